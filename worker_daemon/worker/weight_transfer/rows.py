"""Tensors as engines hand them on, in parts."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

DTYPES: Final = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int32": torch.int32,
    "int64": torch.int64,
}
"""Dtypes of an update, by their names on the wire."""
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


class Rows(NamedTuple):
    """Received rows of one tensor, or another box of it."""

    tensor: int
    """Its index in the manifest."""
    first_row: int
    values: Tensor
    """[rows, ...], whole rows; in the tensor's own shape if it was received in one piece."""
    is_last: bool
    """True if these rows complete the tensor."""
    origin: tuple[int, ...] | None = None
    """Place of the first value in the whole tensor, if they are another box; first_row is 0."""


Place = Callable[[Sequence[Rows]], None]
"""Stores received rows; does not keep them."""

"""A weight of one rank, and the checkpoint tensors that fill it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["matrix", "norm", "bias"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A region of one checkpoint tensor and its place in a parameter, with equal shapes."""

    name: str
    """Name of the tensor in the checkpoint."""
    full_shape: tuple[int, ...]
    """Shape that the checkpoint tensor must have."""
    source: tuple[slice, ...]
    """The region to read; one slice with explicit bounds per dimension."""
    target: tuple[slice, ...]
    """Its place in the parameter; one slice with explicit bounds per dimension."""
    kind: Kind = "matrix"
    """The tensor's role, which determines its values in dummy weights."""

    @property
    def is_whole(self) -> bool:
        """True when the piece is the complete checkpoint tensor."""
        return all(
            part.start == 0 and part.stop == size
            for part, size in zip(self.source, self.full_shape, strict=True)
        )


class Parameter:
    """Owns `data`, the local shard. It is zero until loaded; rows that no piece covers (padding)
    stay zero.

    Built and loaded on the step thread; lives in weight memory as long as its stage. On the meta
    device it has no memory until `data` is replaced (worker_daemon/worker/sleep_memory.py).
    """

    name: str
    """Its name; that of the checkpoint tensor if one tensor fills it."""
    data: Tensor
    pieces: tuple[Piece, ...]

    def __init__(
        self,
        shape: tuple[int, ...],
        pieces: Iterable[Piece],
        *,
        name: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name = name
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.pieces = tuple(pieces)

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


def whole_vector(name: str, size: int, kind: Kind) -> Piece:
    """Return the piece for a vector [size] that every rank holds completely."""
    return Piece(name, (size,), (slice(0, size),), (slice(0, size),), kind)

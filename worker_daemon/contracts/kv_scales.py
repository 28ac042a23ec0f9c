"""The FP8 format of a KV cache: its dtype, its range, and the scales of a layer.

A cached value is x / scale, limited to the format's range and rounded to it. Readers multiply by
the scale again. The format is e4m3 of Micikevicius et al. (arXiv 2209.05433), which has NaN but no
infinity.
"""

from typing import Final, Protocol

import torch
from torch import Tensor

FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0
"""The largest finite value. Larger ones are limited to it, NaN stays NaN."""


class KVScales(Protocol):
    """The scales of a layer with a cache in FP8."""

    @property
    def values(self) -> Tensor:
        """float32 [2, Hkv], contiguous, each above 0: those of the heads' keys, then of their
        values. Its address does not change."""

"""The FP8 format of weights and of KV caches: a value is x / scale in e4m3 (Micikevicius et al.,
arXiv 2209.05433), which has NaN but no infinity. Readers multiply by the scale again."""

from typing import Final

import torch
from torch import Tensor

FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0
"""The largest finite value. Larger ones are limited to it, NaN stays NaN."""
FP8_BLOCK: Final = 128
"""Rows and columns of a block of weights with one scale."""
FP8_LEAST_SCALE: Final = 1e-12
"""The scale of zeros, where it is computed from the largest value."""


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale in FP8: divided in float32, limited to the format's range and rounded to
    it. scale: float32, broadcast to x."""
    return (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8)

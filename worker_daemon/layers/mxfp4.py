"""Values in MXFP4 (Open Compute Project, Microscaling Formats 1.0, 2023): blocks of 32 values in
four bits (E2M1) with one scale, a power of two (E8M0)."""

from typing import Final

import torch
from torch import Tensor

MXFP4_BLOCK: Final = 32
"""Consecutive values of a row with one scale."""
MXFP4_BYTES: Final = MXFP4_BLOCK // 2
"""Bytes of a block; each has two values, the first in its lower bits."""
_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MANTISSA_BITS: Final = 23
_LEAST_SCALE_BITS: Final = 1 << 22
"""Bits of 2^-127, the scale 0, which is below float32's normal numbers."""
_NAN_BITS: Final = 0x7FC00000


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return values times scales, float32 [M, 32 G], exact unless they exceed float32: blocks uint8
    [M, G, 16], scales uint8 [M, G]. The scale 255 is NaN."""
    magnitudes = torch.tensor(_MAGNITUDES, dtype=torch.float32, device=blocks.device)
    table = torch.cat((magnitudes, -magnitudes))
    values = torch.stack((table[(blocks & 15).int()], table[(blocks >> 4).int()]), dim=3)
    # A scale is the exponent of a float32, with the same bias.
    bits = scales.to(torch.int32) << _MANTISSA_BITS
    bits.masked_fill_(scales == 0, _LEAST_SCALE_BITS).masked_fill_(scales == 255, _NAN_BITS)
    factors = bits.view(torch.float32)
    return values.flatten(2).mul_(factors.unsqueeze(2)).flatten(1)

"""Keys and values in FP8, in plain torch."""

from torch import Tensor

from worker_daemon.contracts.fp8 import to_fp8


def quantize(x: Tensor, scales: Tensor) -> Tensor:
    """Return x [..., Hkv, D] in FP8, divided by its head's scale, float32 [Hkv]. NaN stays NaN."""
    return to_fp8(x, scales.unsqueeze(-1))


def dequantize(x: Tensor, scales: Tensor) -> Tensor:
    """Return x [..., Hkv, D] in FP8 as float32, times its head's scale, float32 [Hkv]."""
    return x.float() * scales.unsqueeze(-1)

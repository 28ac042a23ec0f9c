"""Keys and values in FP8 (contracts/kv_scales.py), in plain torch."""

from torch import Tensor

from worker_daemon.contracts.kv_scales import FP8, FP8_MAX


def quantize(x: Tensor, scales: Tensor) -> Tensor:
    """Return x [..., Hkv, D] in FP8, divided by its head's scale, float32 [Hkv]. NaN stays NaN."""
    return (x.float() / scales.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def dequantize(x: Tensor, scales: Tensor) -> Tensor:
    """Return x [..., Hkv, D] in FP8 as float32, times its head's scale, float32 [Hkv]."""
    return x.float() * scales.unsqueeze(-1)

"""The scales of a KV cache in FP8 (fp8.py)."""

from typing import Protocol

from torch import Tensor


class KVScales(Protocol):
    """The scales of a layer with a cache in FP8."""

    @property
    def values(self) -> Tensor:
        """float32 [2, Hkv], contiguous, each above 0: those of the heads' keys, then of their
        values. Its address does not change."""

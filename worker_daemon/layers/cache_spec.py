"""Specs of what a layer keeps in the KV cache."""

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch


@dataclass(frozen=True, slots=True)
class KVLayerSpec:
    """A local layer that keeps keys and values of each token."""

    name: str
    """Checkpoint prefix of the layer's attention."""
    num_kv_heads: int
    """KV heads on this rank."""
    head_dim: int
    window: int | None
    """Sliding window in tokens; None keeps everything."""

    @property
    def layout(self) -> Literal["NHD"]:
        """See KVCacheGroup."""
        return "NHD"

    @property
    def token_values(self) -> int:
        """Number of values of a token."""
        return 2 * self.num_kv_heads * self.head_dim

    def page_shape(self, block_size: int) -> tuple[int, ...]:
        """Return the shape of the values of a block's tokens, K first."""
        return 2, block_size, self.num_kv_heads, self.head_dim

    def named(self, name: str) -> "KVLayerSpec":
        """Return the spec under another name."""
        return replace(self, name=name)


@dataclass(frozen=True, slots=True)
class LatentLayerSpec:
    """A local layer that keeps one vector of each token, from which it computes keys and values."""

    name: str
    """Checkpoint prefix of the layer's attention."""
    width: int
    """Elements of the vector on this rank."""
    window: int | None = None
    """See KVLayerSpec."""

    @property
    def layout(self) -> Literal["latent"]:
        """See KVCacheGroup."""
        return "latent"

    @property
    def token_values(self) -> int:
        """Number of values of a token."""
        return self.width

    def page_shape(self, block_size: int) -> tuple[int, ...]:
        """Return the shape of the values of a block's tokens."""
        return block_size, self.width

    def named(self, name: str) -> "LatentLayerSpec":
        """Return the spec under another name."""
        return replace(self, name=name)


@dataclass(frozen=True, slots=True)
class StateLayerSpec:
    """A local layer that keeps a state of each request, whatever the request's length."""

    name: str
    """Checkpoint prefix of the layer's first block."""
    shape: tuple[int, ...]
    """Shape of a request's state on this rank."""
    dtype: torch.dtype
    checkpoint_blocks: int | None = None
    """Blocks from one checkpoint of a request's state to the next (see RowState); 0: none. None:
    so many that checkpoints take at most a tenth of the KV cache."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a request's state."""
        return math.prod(self.shape) * self.dtype.itemsize


PageSpec: TypeAlias = KVLayerSpec | LatentLayerSpec
"""Spec of a local layer that keeps pages."""

CacheSpec: TypeAlias = PageSpec | StateLayerSpec
"""Spec of what one local layer keeps."""

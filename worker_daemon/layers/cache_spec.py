"""Specs of what a layer keeps in the KV cache."""

from dataclasses import dataclass
from typing import Literal, TypeAlias


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


CacheSpec: TypeAlias = KVLayerSpec | LatentLayerSpec
"""Spec of what one local layer keeps."""

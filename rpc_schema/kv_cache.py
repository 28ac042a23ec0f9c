"""The KV cache as ranks describe it and as the driver plans it."""

from typing import Annotated

from msgspec import Meta

from rpc_schema.base import Name, Positive, Unsigned, Value


class KVCacheSpec(Value, frozen=True, kw_only=True):
    """What one layer of one rank keeps per token. Sizes are the local shard's."""

    layer_name: Name
    num_kv_heads: Positive
    head_size: Positive
    dtype: Annotated[str, Meta(max_length=32)]
    bytes_per_token: Positive
    sliding_window: Positive | None = None


class KVCacheGroup(Value, frozen=True, kw_only=True):
    """Layers that share one block table."""

    layer_names: tuple[Name, ...]


class KVCacheConfig(Value, frozen=True, kw_only=True):
    """One rank's KV cache. Block 0 is the null block: padding points at it and no request may own
    it."""

    num_blocks: Annotated[int, Meta(ge=2, le=2**31 - 1)]
    block_size: Positive
    groups: tuple[KVCacheGroup, ...]
    size_bytes: Unsigned
    """Of all tensors together: num_blocks * block_size * the sum of the layers' bytes_per_token."""

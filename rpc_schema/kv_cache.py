"""The KV cache as ranks describe it and as the driver plans it, and the arithmetic of its blocks:
once, for drivers and for `worker-daemon plan`."""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from rpc_schema.base import Name, Positive, Unsigned, Value

NUM_NULL_BLOCKS = 1
"""Block 0 is never given to a request."""


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


def bytes_per_block(layers: Sequence[KVCacheSpec], block_size: int) -> int:
    """Return the bytes that a block takes on a rank with these layers."""
    return block_size * sum(layer.bytes_per_token for layer in layers)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the blocks that hold num_tokens tokens."""
    return -(-num_tokens // block_size)


def fitting_blocks(available_bytes: int, block_bytes: int) -> int:
    """Return the blocks that a rank has room for, the null block included; none if it lacks
    bytes."""
    return max(0, available_bytes // block_bytes)


def smallest_fitting_blocks(
    specs: Sequence[Sequence[KVCacheSpec]], available_bytes: Sequence[int], block_size: int
) -> int:
    """Return the block count that fits into every rank's memory: the smallest over the ranks.

    specs holds each rank's layers, available_bytes each rank's memory for the KV cache.
    """
    return min(
        fitting_blocks(available, bytes_per_block(layers, block_size))
        for layers, available in zip(specs, available_bytes, strict=True)
    )


def usable_tokens(num_blocks: int, block_size: int) -> int:
    """Return the tokens that num_blocks hold beside the null block."""
    return max(0, num_blocks - NUM_NULL_BLOCKS) * block_size


def longest_requests(num_blocks: int, block_size: int, max_model_len: int) -> int:
    """Return how many requests of max_model_len tokens have all their blocks at once."""
    usable = max(0, num_blocks - NUM_NULL_BLOCKS)
    return usable // blocks_for(max_model_len, block_size)


def build_kv_cache_config(
    layers: Sequence[KVCacheSpec], num_blocks: int, block_size: int
) -> KVCacheConfig:
    """Return one rank's configuration: all its layers in one group."""
    return KVCacheConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        groups=(KVCacheGroup(layer_names=tuple(layer.layer_name for layer in layers)),),
        size_bytes=num_blocks * bytes_per_block(layers, block_size),
    )

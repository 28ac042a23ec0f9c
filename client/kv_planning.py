"""How many KV blocks a group gets, and for which context length: pure functions of what the ranks
reported."""

from collections.abc import Sequence

from client.errors import KVPlanError
from rpc_schema.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec

NUM_NULL_BLOCKS = 1
"""Block 0 is never given to a request."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return the blocks that hold num_tokens tokens."""
    return -(-num_tokens // block_size)


def fitting_blocks(
    specs: Sequence[Sequence[KVCacheSpec]], available_bytes: Sequence[int], block_size: int
) -> int:
    """Return the block count that fits into every rank's memory: the smallest over the ranks.

    specs holds each rank's layers, available_bytes each rank's memory for the KV cache.
    """
    return min(
        available // (block_size * sum(layer.bytes_per_token for layer in layers))
        for layers, available in zip(specs, available_bytes, strict=True)
    )


def choose_num_blocks(fitting: int, asked: int | None) -> int:
    """Return what was asked for, or else all that fits.

    Raises:
        KVPlanError: more was asked for than fits.
    """
    if asked is None:
        return fitting
    if asked > fitting:
        raise KVPlanError(
            f"only {fitting} KV blocks fit into the memory of the smallest rank",
            field="num_gpu_blocks",
            value=asked,
            fix=f"ask for at most {fitting}, or leave it out",
        )
    return asked


def fit_max_model_len(
    num_blocks: int, block_size: int, max_model_len: int, *, may_lower: bool
) -> int:
    """Return the context length that num_blocks can hold for one request: max_model_len, or less
    where may_lower.

    Raises:
        KVPlanError: not one request of max_model_len tokens fits, and it may not be lowered, or
        nothing fits at all.
    """
    capacity = (num_blocks - NUM_NULL_BLOCKS) * block_size
    if capacity >= max_model_len:
        return max_model_len
    if may_lower and capacity > 0:
        return capacity
    needed = blocks_for(max_model_len, block_size) + NUM_NULL_BLOCKS
    raise KVPlanError(
        f"one request of max_model_len = {max_model_len} tokens needs {needed} KV blocks of "
        f"{block_size} tokens, and there are {max(num_blocks, 0)}",
        field="max_model_len",
        value=max_model_len,
        fix="lower it (or let it be fitted), raise gpu_memory_utilization, or use more ranks",
    )


def build_kv_cache_configs(
    specs: Sequence[Sequence[KVCacheSpec]], num_blocks: int, block_size: int
) -> tuple[KVCacheConfig, ...]:
    """Return one configuration a rank: the same block count, and all its layers in one group."""
    return tuple(
        KVCacheConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            groups=(KVCacheGroup(layer_names=tuple(layer.layer_name for layer in layers)),),
            size_bytes=num_blocks * block_size * sum(layer.bytes_per_token for layer in layers),
        )
        for layers in specs
    )

"""How many KV blocks a group gets, and for which context length: a driver's choices, as pure
functions of what the ranks reported. The arithmetic of blocks is rpc_schema/kv_cache.py's."""

from rpc_schema.kv_cache import NUM_NULL_BLOCKS, blocks_for, usable_tokens
from worker_client.errors import KVPlanError


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
    capacity = usable_tokens(num_blocks, block_size)
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

"""Chooses the number of KV blocks and the context length from the ranks' reports. Pure. The
arithmetic of blocks is in rpc_schema/kv_cache.py."""

from collections.abc import Sequence

from rpc_schema.config import WorkerConfig
from rpc_schema.kv_cache import (
    NUM_NULL_BLOCKS,
    BlockGroup,
    KVCacheSpec,
    LayerGroup,
    RankStates,
    UnequalPages,
    bytes_per_block,
    fitting_host_blocks,
    longest_request,
    plan_groups,
    request_blocks,
)
from worker_client.errors import KVPlanError


def choose_num_blocks(fitting: int, asked: int | None) -> int:
    """Return the requested number of blocks, or else all that fit.

    Raises:
        KVPlanError: more were requested than fit.
    """
    if asked is None:
        return fitting
    if asked > fitting:
        problem = f"only {fitting} KV blocks fit into the memory of the smallest rank"
        fix = f"ask for at most {fitting}, or leave it out"
        raise KVPlanError(problem, field="num_gpu_blocks", value=asked, fix=fix)
    return asked


def choose_host_blocks(memory_bytes: int, groups: Sequence[LayerGroup], num_ranks: int) -> int:
    """Return the number of slots of the host tier, which all ranks have: as many as fit into
    memory_bytes of each. 0 without a tier, and for models without a KV cache.

    Raises:
        KVPlanError: not one block fits.
    """
    fitting = fitting_host_blocks(memory_bytes, groups, num_ranks)
    largest = max(bytes_per_block(groups, rank) for rank in range(num_ranks))
    if memory_bytes and largest and not fitting:
        problem = f"a KV block takes {largest} bytes"
        field = "cache.kv_host_memory_bytes"
        raise KVPlanError(problem, field=field, value=memory_bytes, fix="more, or 0")
    return fitting


def bytes_for_pages(
    available_bytes: Sequence[int], states: Sequence[RankStates], max_num_seqs: int
) -> list[int]:
    """Return each rank's memory for pages: what the states of max_num_seqs requests leave of
    available_bytes.

    Raises:
        KVPlanError: a rank lacks memory for the states.
    """
    left = [
        available - own.size_bytes for available, own in zip(available_bytes, states, strict=True)
    ]
    for rank, (available, own) in enumerate(zip(available_bytes, states, strict=True)):
        if own.size_bytes > max(available, 0):
            problem = (
                f"the states of that many requests take {own.size_bytes} bytes on rank {rank}, "
                f"and {available} are left"
            )
            fix = "lower it, raise gpu_memory_utilization, or use more ranks"
            field = "scheduler.max_num_seqs"
            raise KVPlanError(problem, field=field, value=max_num_seqs, fix=fix)
    return left


def fit_max_model_len(
    num_blocks: int,
    groups: Sequence[BlockGroup],
    max_model_len: int,
    max_num_batched_tokens: int,
    *,
    may_lower: bool,
) -> int:
    """Return the context length that num_blocks can hold for one request: max_model_len, or less if
    may_lower.

    Raises:
        KVPlanError: not one request of max_model_len tokens fits, and it may not be lowered, or
            nothing fits at all.
    """
    longest = longest_request(num_blocks, groups, max_model_len, max_num_batched_tokens)
    if longest == max_model_len or (may_lower and longest > 0):
        return longest
    needed = request_blocks(max_model_len, groups, max_num_batched_tokens) + NUM_NULL_BLOCKS
    sizes = " or ".join(map(str, sorted({group.block_size for group in groups})))
    problem = (
        f"one request of max_model_len = {max_model_len} tokens needs {needed} KV blocks of "
        f"{sizes} tokens, and there are {max(num_blocks, 0)}"
    )
    fix = "lower it (or let it be fitted), raise gpu_memory_utilization, or use more ranks"
    raise KVPlanError(problem, field="max_model_len", value=max_model_len, fix=fix)


def choose_groups(
    ranks: Sequence[Sequence[KVCacheSpec]], config: WorkerConfig, max_model_len: int
) -> tuple[LayerGroup, ...]:
    """Return the groups of all ranks' layers.

    Raises:
        KVPlanError: the layers keep such different amounts per token that no block sizes fit them
            all.
    """
    block_size, step = config.cache.block_size, config.scheduler.max_num_batched_tokens
    try:
        return plan_groups(ranks, block_size, max_model_len, step)
    except UnequalPages as error:
        sizes = sorted(set(error.sizes))
        problem = f"layers keep {sizes} bytes per token, which have no common page"
        fix = "use a block size whose bytes they all divide"
        raise KVPlanError(problem, field="cache.block_size", value=block_size, fix=fix) from None

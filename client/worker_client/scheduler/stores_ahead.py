"""Stores of blocks shortly before they are evicted: an admission that evicts many at once has to
store few or none of them then, and its step does not wait until they have left over the bus."""

from typing import Final

from rpc_schema.kv_cache import request_blocks
from worker_client.scheduler.block_pool import BlockPool, RankedFreeBlocks
from worker_client.scheduler.interface import SchedulerLimits
from worker_client.scheduler.outside_blocks import OutsideBlocks

POOL_DIVISOR: Final = 4
"""At most 1 / POOL_DIVISOR of the KV cache is stored ahead: of the blocks that are used again in
time, most are not among them."""
SLOTS_DIVISOR: Final = 8
"""At most 1 / SLOTS_DIVISOR of host memory has blocks that the KV cache has too for this reason."""
MAX_LOOKED_AT: Final = 128
"""Blocks of which a step finds out whether they have to be stored."""


class StoresAhead:
    """Owned by a scheduler.

    The blocks that are evicted next, as many as the longest request takes, are in both places. One
    of them that a request uses again stays in the KV cache; then its copy is the first to make room
    in host memory. So what host memory alone has is not pushed out by copies, but for these few.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        free: RankedFreeBlocks,
        outside: OutsideBlocks,
    ) -> None:
        self._pool = pool
        self._free = free
        self._outside = outside
        longest = request_blocks(
            limits.longest_request, limits.block_groups, limits.max_num_batched_tokens
        )
        self._most_next = min(
            longest, limits.num_blocks // POOL_DIVISOR, limits.num_host_blocks // SLOTS_DIVISOR
        )
        self._most_stores = limits.max_stored_ahead

    def plan(self) -> None:
        """Let the step that is about to be sent store some of the blocks that are evicted next,
        once everything else that it stores is known."""
        free, pool, outside = self._free, self._pool, self._outside
        outside.give_way(pool.keys_of(free.take_kept()).values())
        lacking = min(self._most_next - free.num_next, MAX_LOOKED_AT)
        if lacking <= 0:
            return
        looked_at = free.behind_next(lacking)
        left = outside.store_ahead(pool.keys_of(looked_at), self._most_stores)
        places = (place for place, block_id in enumerate(looked_at) if block_id in left)
        free.add_next(next(places, len(looked_at)))

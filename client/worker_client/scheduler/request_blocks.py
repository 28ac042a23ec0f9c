"""The blocks that requests hold, and the prefix cache: which of their full blocks others may begin
with. Knows tokens and blocks; not who runs or waits, nor what a step is."""

from collections.abc import Iterable, Sequence

import numpy as np

from rpc_schema.kv_cache import blocks_for
from worker_client.scheduler.block_pool import BlockPool, chained_hash
from worker_client.scheduler.interface import SchedulerLimits
from worker_client.scheduler.request import Request


class RequestBlocks:
    """Owns the pool, and what requests have of it (Request.blocks)."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._size = limits.block_size
        self._caches_prefixes = limits.enable_prefix_caching
        self._pool = BlockPool(limits.num_blocks)
        self._to_remember: list[Request] = []

    @property
    def num_free(self) -> int:
        """Blocks that no request holds."""
        return self._pool.num_free

    def extend(self, request: Request, count: int) -> list[int] | None:
        """Give a request the blocks that it lacks for its next `count` tokens, and return them;
        None where too few are free."""
        missing = blocks_for(request.num_computed + count, self._size) - len(request.blocks.ids)
        if missing <= 0:
            return []
        if missing > self._pool.num_free:
            return None
        block_ids = self._pool.allocate(missing)
        request.blocks.ids += block_ids
        return block_ids

    def find_prefix(self, request: Request) -> list[int]:
        """Return the cached blocks that a request can begin with; one token is left to compute."""
        if not self._caches_prefixes or not request.blocks.may_share:
            return []
        self._hash(request)
        num_usable = (len(request.tokens) - 1) // self._size
        return self._pool.find(request.blocks.hashes[:num_usable])

    def can_hold(self, request: Request, prefix: Sequence[int]) -> bool:
        """Whether there are blocks for all known tokens of a request that begins with `prefix`."""
        needed = blocks_for(len(request.tokens), self._size) - len(prefix)
        return needed <= self._pool.num_free - self._pool.num_free_among(prefix)

    def begin(self, request: Request, prefix: Sequence[int], count: int) -> None:
        """Give a request the cached blocks that it begins with, and those for `count` tokens."""
        self.resume(request, prefix, len(prefix) * self._size)
        request.blocks.num_remembered = request.blocks.num_shared = len(prefix)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = request.num_computed
        self.extend(request, count)

    def resume(self, request: Request, block_ids: Sequence[int], num_computed: int) -> None:
        """Give a request the blocks that hold its first tokens."""
        self._pool.hold(block_ids)
        request.blocks.ids = list(block_ids)
        request.num_computed = num_computed

    def release(self, request: Request) -> None:
        """Take a request's blocks. Steps in flight may still write to them; whoever gets them runs
        after those steps."""
        self._pool.release(request.blocks.ids)
        request.blocks.ids = []
        request.blocks.num_remembered = 0
        request.num_computed = 0

    def remember(self, request: Request) -> None:
        """Let others begin with the full blocks of a request whose steps were sent."""
        if not self._caches_prefixes:
            return
        self._hash(request)
        blocks = request.blocks
        num_full = min(len(request.tokens), request.num_computed) // self._size
        for index in range(blocks.num_remembered, num_full):
            self._pool.remember(blocks.ids[index], blocks.hashes[index])
        blocks.num_remembered = max(num_full, blocks.num_remembered)

    def remember_later(self, request: Request) -> None:
        """Remember a request from the next step on: blocks may be hit from the step after the one
        that fills them."""
        self._to_remember.append(request)

    def remember_sent(self) -> None:
        """The last step was sent: remember what it fills."""
        pending, self._to_remember = self._to_remember, []
        for request in pending:
            if request.is_running:
                self.remember(request)

    def distrust(self, request: Request) -> bool:
        """Let nobody begin with the blocks of a request whose context gives no numbers. Return
        whether it had begun with blocks of others, which it will do no more."""
        self._pool.forget(request.blocks.hashes)
        num_shared, request.blocks.num_shared = request.blocks.num_shared, 0
        request.blocks.may_share = False
        return num_shared > 0

    def forget_all(self, good: Iterable[Request] = ()) -> None:
        """Drop the prefix cache. The blocks of `good` requests are good, and remembered anew."""
        self._to_remember.clear()
        self._pool.forget_all()
        for request in good:
            request.blocks.num_remembered = 0

    def _hash(self, request: Request) -> None:
        """Bring a request's block hashes up to its known tokens."""
        size, hashes = self._size, request.blocks.hashes
        for index in range(len(hashes), len(request.tokens) // size):
            tokens = np.array(request.tokens[index * size : (index + 1) * size], np.int32)
            parent = hashes[-1] if hashes else request.prefix_root
            hashes.append(chained_hash(parent, tokens))

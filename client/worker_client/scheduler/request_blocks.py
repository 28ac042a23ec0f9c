"""Blocks held by requests.

In a group with a window a request frees the blocks that the window has passed, before it takes new
ones. Steps in flight may still read them. That is safe: the step being planned is the first that
can reassign them, every rank runs it after those in flight, and no token from num_computed on, this
step's own included, sees them. It is safe after a failure too: the workers drop rows that would
have to return to a position at which they see such a block.
"""

from collections.abc import Sequence

from rpc_schema.kv_cache import NULL_BLOCK, blocks_behind, blocks_for, most_blocks
from worker_client.scheduler.block_pool import BlockPool
from worker_client.scheduler.interface import SchedulerLimits
from worker_client.scheduler.prefix_cache import PrefixCache
from worker_client.scheduler.prefix_search import OUTSIDE, Prefix
from worker_client.scheduler.request import Request


class RequestBlocks:
    """Each request's share of the pool (Request.blocks). Owned by a scheduler."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, prefixes: PrefixCache) -> None:
        self._groups = limits.block_groups
        self._sizes = [group.block_size for group in self._groups]
        self.unit = min(self._sizes)
        """Tokens of the smallest blocks."""
        self._has_windows = any(group.window is not None for group in self._groups)
        self._has_checkpoints = limits.checkpoint_blocks > 0
        self._most_tokens = limits.max_num_batched_tokens
        self._pool = pool
        self._prefixes = prefixes

    @property
    def num_free(self) -> int:
        """Number of blocks that no request holds."""
        return self._pool.num_free

    def can_hold(self, request: Request, prefix: Prefix) -> bool:
        """Return True if there are blocks for all known tokens of a request that begins with
        `prefix`."""
        most, num_free = blocks_for(len(request.tokens), self.unit), self._pool.num_free
        if most * len(self._groups) <= num_free:
            return True
        needed = 0
        for group, own in zip(self._groups, prefix.by_group, strict=True):
            most = most_blocks(len(request.tokens), group, self._most_tokens)
            if own:
                num_lacking = own.count(NULL_BLOCK) + own.count(OUTSIDE)
                most = max(0, most - len(own) + num_lacking)
                most += self._pool.num_free_among([i for i in own if i != OUTSIDE])
            needed += most
        return needed <= num_free

    def num_in_host_memory(self, prefix: Prefix) -> int:
        """Return how many blocks of a prefix have to be loaded from host memory."""
        return self._prefixes.num_in_host_memory(prefix)

    def load(self, request: Request, prefix: Prefix) -> list[int]:
        """Let the next step load what a waiting request may begin with and no block has; return the
        blocks that it is loaded into. They have no references: others may take them, the last of
        all."""
        blocks = request.blocks
        blocks.were_loaded = True
        if blocks.num_cached_tokens < 0:
            blocks.num_loaded_tokens = prefix.num_loaded_tokens
        return self._prefixes.load(request, prefix)

    def begin(self, request: Request, prefix: Prefix, count: int) -> None:
        """Give a request the cached blocks that it begins with, and those for `count` tokens."""
        blocks, by_group = request.blocks, self._prefixes.begin(request, prefix)
        blocks.were_loaded = False
        if prefix.num_tokens:
            self._resume(request, by_group, prefix.num_tokens)
            self.extend(request, count)
        else:
            needed = [-(-count // size) for size in self._sizes]
            blocks.by_group = tuple(self._allocate(0, needed))
        if blocks.num_cached_tokens < 0:
            blocks.num_cached_tokens = min(prefix.num_tokens, request.num_prompt_tokens)
            num_loaded = max(blocks.num_loaded_tokens, prefix.num_loaded_tokens)
            blocks.num_loaded_tokens = min(num_loaded, blocks.num_cached_tokens)

    def adopt(self, request: Request, by_group: Sequence[Sequence[int]], num_computed: int) -> None:
        """Give an adopted request its blocks; others may begin with those that are full."""
        for size, own in zip(self._sizes, by_group, strict=True):
            self._pool.forget_blocks(own[num_computed // size :])
        self._resume(request, by_group, num_computed)
        self._prefixes.adopt(request)

    def extend(self, request: Request, count: int) -> list[list[int]] | None:
        """Allocate the blocks that a request lacks for its next `count` tokens, and return those of
        each group; None if too few are free. Blocks that its windows have passed are freed
        first."""
        held, end = request.blocks.by_group, request.num_computed + count
        missing, total = [], 0
        for size, own in zip(self._sizes, held, strict=True):
            lacking = -(-end // size) - len(own)
            missing.append(lacking)
            if lacking > 0:
                total += lacking
        if not total:
            self._note_end(request)
            return []
        if self._has_windows:
            self._leave_behind(request)
        if total > self._pool.num_free:
            self._note_end(request)
            return None
        given = self._allocate(len(held[0]), missing)
        for own, block_ids in zip(held, given, strict=True):
            own += block_ids
        self._note_end(request)
        return given

    def extend_all(self, requests: Sequence[Request]) -> list[dict[str, list[int]]] | None:
        """Extend every request by its next token, as extend() does for one. Return the new block
        ids by group and request. Return None and change nothing if blocks are short, windows may
        free some, or some have checkpoints: the caller then extends requests one at a time."""
        if self._has_windows or self._has_checkpoints:
            return None
        if len(requests) * len(self._groups) > self._pool.num_free:
            return None
        given: list[dict[str, list[int]]] = []
        for group, size in enumerate(self._sizes):
            held = [
                (request.id, request.blocks.by_group[group])
                for request in requests
                if len(request.blocks.by_group[group]) * size <= request.num_computed
            ]
            given.append({})
            for block_id, (req_id, own) in zip(self._pool.allocate(len(held)), held, strict=True):
                own.append(block_id)
                given[-1][req_id] = [block_id]
        return given

    def preempt(self, request: Request) -> None:
        """Cache a request's blocks, which it is about to lose to others."""
        self._prefixes.remember(request)
        request.blocks.num_preemptions += 1

    def release(self, request: Request) -> None:
        """Release a request's blocks. Steps in flight may still write to them; a new holder's step
        runs after those."""
        for block_ids in request.blocks.by_group:
            self._pool.release(block_ids)
        request.blocks.by_group, request.blocks.end = (), 0
        request.prefix.lose_blocks()
        request.num_computed = 0

    def _resume(
        self, request: Request, by_group: Sequence[Sequence[int]], num_computed: int
    ) -> None:
        """Give a request the blocks of each group that hold its first tokens."""
        for block_ids in by_group:
            self._pool.hold(block_ids)
        request.blocks.by_group = tuple(map(list, by_group))
        request.num_computed = num_computed

    def _allocate(self, num_first: int, counts: Sequence[int]) -> list[list[int]]:
        """Allocate blocks of each group; with checkpoints, those at borders have some. num_first:
        blocks of the first group that the request has."""
        if not self._has_checkpoints:
            return list(map(self._pool.allocate, counts))
        first = self._pool.allocate_from(num_first, counts[0])
        return [first, *map(self._pool.allocate, counts[1:])]

    def _leave_behind(self, request: Request) -> None:
        for group, own in zip(self._groups, request.blocks.by_group, strict=True):
            behind = blocks_behind(request.least_computed, group)
            while behind and own[behind - 1] != NULL_BLOCK:
                behind -= 1
                self._pool.release(own[behind : behind + 1])
                own[behind] = NULL_BLOCK

    def _note_end(self, request: Request) -> None:
        held = zip(self._sizes, request.blocks.by_group, strict=True)
        request.blocks.end = min([size * len(own) for size, own in held])

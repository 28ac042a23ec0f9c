"""The prefix cache: full blocks that other requests may begin with. What a request has filled is
recorded once its step was sent, and dropped when its contents turn out to be wrong."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rpc_schema.kv_cache import NULL_BLOCK
from worker_client.scheduler.block_hashes import HASH_BYTES, BlockHashes
from worker_client.scheduler.block_pool import BlockPool
from worker_client.scheduler.filed_blocks import FetchedBlocks
from worker_client.scheduler.interface import SchedulerLimits
from worker_client.scheduler.outside_blocks import OutsideBlocks, key_of, keys_of
from worker_client.scheduler.prefix_search import OUTSIDE, LackingBlocks, Prefix
from worker_client.scheduler.request import Request, RequestPrefix
from worker_client.steps.cached_blocks import CachedBlocks


class CachedChanges(NamedTuple):
    """Changes of the prefix cache, for the group's notes."""

    cached: CachedBlocks
    """Blocks that requests have filled. A hash is that of the prefix, and a byte for the group."""
    distrusted: list[int]
    """Blocks whose contents no other request may share."""


class PrefixCache:
    """Records in the pool which blocks have which contents, and in each request how far that has
    come (Request.prefix). Owned by a scheduler. References to blocks are RequestBlocks' affair."""

    def __init__(
        self, limits: SchedulerLimits, hashes: BlockHashes, pool: BlockPool, outside: OutsideBlocks
    ) -> None:
        self.unit = hashes.unit
        """Tokens per hash: a request that gains as many has more to remember."""
        self._hashes = hashes
        self._pool = pool
        self._outside = outside.if_any
        self._files = outside.files
        self._num_groups = len(limits.block_groups)
        self._every = limits.checkpoint_blocks
        self._is_enabled = limits.shares_prefixes
        self._to_remember: list[Request] = []

    def begin(self, request: Request, prefix: Prefix) -> Sequence[Sequence[int]]:
        """Let a request begin with a prefix, and the next step load what lies outside. Return the
        blocks of each group, for the caller to hold before it allocates others."""
        known = prefix.num_tokens // self.unit
        own = request.prefix
        own.num_remembered = own.num_shared = known
        own.num_offered = known if own.num_filed is None else min(known, own.num_filed)
        own.num_filed = None
        if self._outside is None or not known:
            return prefix.by_group
        by_group, _ = self._load(self._outside, own, prefix)
        return by_group

    def num_in_host_memory(self, prefix: Prefix) -> int:
        """Return how many blocks of a prefix have to be loaded from host memory."""
        tier = None if self._outside is None else self._outside.tier
        if tier is None:
            return 0
        lacking = [own.keys for own in prefix.lacking]
        return sum(map(len, lacking if self._files is None else map(tier.held, lacking)))

    def load(self, request: Request, prefix: Prefix) -> list[int]:
        """Let the next step load what lies outside of a prefix; return the blocks that it is loaded
        into. They have no reference, and keep their contents until others are allocated in their
        place."""
        if self._outside is None:
            return []
        own = request.prefix
        own.num_offered = prefix.num_tokens // self.unit
        _, loaded = self._load(self._outside, own, prefix)
        own.num_filed, own.num_offered = own.num_offered, 0
        return loaded

    def forget_blocks(self, block_ids: Iterable[int]) -> None:
        """Drop the contents of blocks, which were loaded and did not match."""
        self._forget([name for name in map(self._pool.hash_of, block_ids) if name is not None])

    def adopt(self, request: Request) -> None:
        """Let others begin with the full blocks of a request that another driver has left."""
        if self._outside is not None:
            # Blocks that it had loaded may not have matched, which its former driver alone was
            # told: then it is computed again.
            request.prefix.num_shared = request.num_computed // self.unit
        self.remember(request)

    def remember(self, request: Request) -> None:
        """Let other requests begin with the full blocks of a request whose steps were sent."""
        own = request.prefix
        if not self._is_enabled or own.is_mixed:
            return
        for group, index, block_id, block_hash in self._not_remembered(request):
            if self._every and not group and (index + 1) % self._every == 0:
                self._pool.remember_border(block_id, block_hash)
            else:
                self._pool.remember(group, block_id, block_hash)
        own.num_remembered = max(self._num_full(request), own.num_remembered)
        if self._files is not None:
            self._offer(request, self._files)

    def filled_by(self, requests: Iterable[Request]) -> dict[bytes, int]:
        """Return the blocks that a step fills which is about to be sent, by the keys of their
        contents. requests: those that it has tokens of, which count as computed."""
        if not self._is_enabled:
            return {}
        return {
            key_of(group, block_hash): block_id
            for request in requests
            if not request.prefix.is_mixed
            for group, _, block_id, block_hash in self._not_remembered(request)
        }

    def _not_remembered(self, request: Request) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield the full blocks of a request that were not remembered: group, place, block and
        hash."""
        hashes, num_full = self._hashes.of(request), self._num_full(request)
        for group, block_ids in enumerate(request.blocks.by_group):
            stride = self._hashes.strides[group]
            for index in range(request.prefix.num_remembered // stride, num_full // stride):
                if block_ids[index] != NULL_BLOCK:
                    yield group, index, block_ids[index], self._hashes.at(hashes, group, index)

    def _num_full(self, request: Request) -> int:
        return min(len(request.tokens), request.num_computed) // self.unit

    def remember_later(self, request: Request) -> None:
        """Remember a request from the next step on: blocks may be shared from the step after the
        one that fills them."""
        self._to_remember.append(request)

    def remember_sent(self) -> None:
        """Remember the blocks that the last step fills: it was sent."""
        pending, self._to_remember = self._to_remember, []
        for request in pending:
            if request.is_running:
                self.remember(request)

    def share_recomputed(self, running: Iterable[Request]) -> None:
        """Let others begin with the full blocks of these requests, whose KV is of the weights that
        were named last."""
        for request in running:
            request.prefix.is_mixed = False
            request.prefix.num_remembered = 0
            self.remember(request)

    def give_up(self, request: Request, block_ids: Collection[int]) -> bool:
        """Return True if a request has one of these blocks, whose contents were not those that it
        was to begin with. Neither they, nor what it has computed from them, are shared any more."""
        hashes = request.prefix.hashes
        first = len(hashes)
        for stride, own in zip(self._hashes.strides, request.blocks.by_group, strict=False):
            places = (i * stride for i, block_id in enumerate(own) if block_id in block_ids)
            first = min(first, next(places, first))
        lost = hashes[first:]
        self._forget(lost)
        return bool(lost)

    def distrust(self, request: Request) -> bool:
        """Stop other requests from beginning with the blocks of a request whose logits are not
        finite. Return True if it had begun with blocks of others; it will not do so again."""
        own = request.prefix
        self._forget(own.hashes)
        num_shared, own.num_shared = own.num_shared, 0
        own.may_share = False
        return num_shared > 0

    def forget_all(self, good: Iterable[Request] = ()) -> None:
        """Drop the prefix cache. The blocks of `good` requests stay valid: the next remember() of a
        request caches them again."""
        self._to_remember.clear()
        self._pool.forget_all()
        if self._outside is not None:
            self._outside.blocks_lost()
        for request in good:
            request.prefix.num_remembered = 0

    def take_changes(self) -> CachedChanges:
        """Return what has changed in the prefix cache since the last call."""
        changes = self._pool.take_changes()
        keys = self._pool.keys_of(changes.cached)
        return CachedChanges(CachedBlocks.of([*keys], [*keys.values()]), changes.distrusted)

    def restore(self, blocks: CachedBlocks) -> int:
        """Put blocks that an earlier driver has filled into the prefix cache, as far as no request
        holds them; return their number. They have hashes of this tag."""
        if not self._is_enabled or not blocks.block_ids.size:
            return 0
        # A fresh pool allocates ascending ids, so low ids hold the beginnings of prefixes. They are
        # restored last, which makes them the last to be reused.
        order = np.argsort(-blocks.block_ids)
        raw, width, num_restored = blocks.hashes[order].tobytes(), HASH_BYTES + 1, 0
        for index, block_id in enumerate(blocks.block_ids[order].tolist()):
            entry = raw[index * width : (index + 1) * width]
            num_restored += self._pool.restore(entry[-1], block_id, entry[:-1])
        return num_restored

    def _load(
        self, outside: OutsideBlocks, own: RequestPrefix, prefix: Prefix
    ) -> tuple[Sequence[Sequence[int]], list[int]]:
        """Let the next step load what a request begins with and no block has, into blocks that
        others may share at once; return the blocks of each group with these, and these. They have
        no reference yet."""
        loaded: list[int] = []
        if not prefix.lacking:
            return prefix.by_group, loaded
        # Allocations evict blocks: neither what is there nor what is outside may go.
        for block_ids in prefix.by_group:
            self._pool.hold([i for i in block_ids if i != OUTSIDE])
        found = [list(block_ids) for block_ids in prefix.by_group]
        for part in prefix.lacking:
            outside.keep(part.keys)
        for part in prefix.lacking:
            given = self._pool.allocate(len(part.keys))
            self._note_unfiled(own, part)
            outside.load(dict(zip(given, part.keys, strict=True)))
            self._pool.remember_all(part.group, given, part.hashes)
            of_group = found[part.group]
            for place, block_id in zip(part.places, given, strict=True):
                of_group[place] = block_id
            loaded += given
        for block_ids in found:
            self._pool.release(block_ids)
        return found, loaded

    def _note_unfiled(self, own: RequestPrefix, part: LackingBlocks) -> None:
        """Let blocks be offered to files that are loaded from host memory alone: they may have come
        from another group, for example."""
        if self._files is None:
            return
        filed = self._files.held(part.keys)
        for place, key in zip(part.places, part.keys, strict=True):
            if key not in filed:
                own.num_offered = min(own.num_offered, place * self._hashes.strides[part.group])
                return

    def _offer(self, request: Request, files: FetchedBlocks) -> None:
        """Offer the blocks that a request has filled, and from which it has sampled a token: had
        one NaN, so would the token."""
        own, num_tokens = request.prefix, len(request.tokens)
        if num_tokens == request.num_prompt_tokens:
            return
        num_good = min(own.num_remembered, (num_tokens - 1) // self.unit)
        for group, block_ids in enumerate(request.blocks.by_group):
            stride = self._hashes.strides[group]
            for index in range(own.num_offered // stride, num_good // stride):
                block_hash = self._hashes.at(own.hashes, group, index)
                if self._pool.find(group, block_hash) == block_ids[index]:
                    files.offer(key_of(group, block_hash), block_ids[index])
        own.num_offered = max(num_good, own.num_offered)

    def _forget(self, hashes: Sequence[bytes]) -> None:
        self._pool.forget(hashes)
        if self._outside is not None:
            self._outside.forget(keys_of(hashes, self._num_groups))

"""Blocks held by requests, and the prefix cache: full blocks that other requests may begin with.

In a group with a window a request frees the blocks that the window has passed, before it takes new
ones. Steps in flight may still read them. That is safe: the step being planned is the first that
can reassign them, every rank runs it after those in flight, and no token from num_computed on, this
step's own included, sees them. It is safe after a failure too: the workers drop rows that would
have to return to a position at which they see such a block.
"""

from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from rpc_schema.kv_cache import NULL_BLOCK, blocks_behind, blocks_for, most_blocks
from worker_client.scheduler.block_exchange import HostBlockExchange, KeysOf
from worker_client.scheduler.block_pool import BlockPool
from worker_client.scheduler.filed_blocks import FetchedBlocks
from worker_client.scheduler.host_tier import TierSlots
from worker_client.scheduler.interface import SchedulerLimits
from worker_client.scheduler.outside_blocks import OutsideBlocks, key_of, keys_of
from worker_client.scheduler.request import Request
from worker_client.scheduler_output import SchedulerOutput, StepValues
from worker_client.steps.cached_blocks import CachedBlocks

_TOKEN_BYTES: Final = 4
_HASH_BYTES: Final = 16
_FORMAT: Final = b"worker_client blake2b 2"
"""To be changed with the hashes."""

Prefix: TypeAlias = Sequence[Sequence[int]]
"""First blocks of a request in each group."""
OUTSIDE: Final = -1
"""Takes the place of a block whose contents have to be loaded."""


class CachedChanges(NamedTuple):
    """Changes of the prefix cache, for the group's notes."""

    cached: CachedBlocks
    """Blocks that requests have filled. A hash is that of the prefix, and a byte for the group."""
    distrusted: list[int]
    """Blocks whose contents no other request may share."""


class RequestBlocks:
    """Owner of the pool, and of each request's share of it (Request.blocks)."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._groups = limits.block_groups
        self.unit = min(group.block_size for group in self._groups)
        """Tokens per hash, and per block of the smallest size. The block sizes of all groups are
        multiples of it, and each size is a multiple of every smaller one."""
        self._sizes = [group.block_size for group in self._groups]
        self._has_windows = any(group.window is not None for group in self._groups)
        self._strides = [group.block_size // self.unit for group in self._groups]
        """Hashes for each block, by group."""
        self._every = limits.checkpoint_blocks
        self._prefix_unit = limits.border_tokens // self.unit or max(self._strides)
        """The lengths of cached prefixes are multiples of it, in hashes."""
        self._no_prefix: Prefix = ((),) * len(self._groups)
        self._most_tokens = limits.max_num_batched_tokens
        can_share = not limits.keeps_state or self._every > 0
        self._caches_prefixes = limits.enable_prefix_caching and can_share
        self._outside: OutsideBlocks | None = None
        self._tier: TierSlots | None = None
        self._files: FetchedBlocks | None = None
        if limits.num_host_blocks and self._caches_prefixes:
            self._outside = self._tier = TierSlots(limits.num_host_blocks)
        elif limits.has_kv_files and self._caches_prefixes:
            self._outside = self._files = FetchedBlocks()
        on_evict = None if self._outside is None else self._evict
        self._pool = BlockPool(limits.num_blocks, len(self._groups), self._every, on_evict)
        self._extends_each = self._has_windows or self._every > 0
        """Requests take blocks one request at a time."""
        self._to_remember: list[Request] = []
        self._weights = b""
        """Names the version of the weights; empty: none was named."""

    @property
    def num_free(self) -> int:
        """Number of blocks that no request holds."""
        return self._pool.num_free

    @property
    def tag(self) -> bytes:
        """Name of the hash scheme. With equal tags, equal hashes mean equal contents, whichever
        driver made them."""
        groups = ",".join(f"{group.block_size}/{group.window}" for group in self._groups)
        if self._every:
            groups += f",{self._every}"
        return _FORMAT + blake2b(groups.encode(), digest_size=_HASH_BYTES).digest()

    def use_weights(self, key: bytes, unfinished: Iterable[Request]) -> bool:
        """Hash blocks as those of the weights that `key` names, and the requests' blocks again.
        Return True if other weights were named before: no request may begin with the blocks of
        those that run."""
        before, self._weights = self._weights, key
        is_other = before not in (b"", key)
        if key != before:
            for request in unfinished:
                request.blocks.hashes.clear()
                request.blocks.is_mixed |= is_other and request.is_running
        return is_other

    def share_recomputed(self, running: Iterable[Request]) -> None:
        """Let others begin with the full blocks of these requests, whose KV is of the weights that
        were named last."""
        for request in running:
            request.blocks.is_mixed = False
            request.blocks.num_remembered = 0
            self.remember(request)

    def take_changes(self) -> CachedChanges:
        """Return what has changed in the prefix cache since the last call."""
        changes = self._pool.take_changes()
        contents = map(self._pool.contents_of, changes.cached)
        hashes = [block_hash + bytes((group,)) for block_hash, group in contents]
        return CachedChanges(CachedBlocks.of(changes.cached, hashes), changes.distrusted)

    def restore(self, blocks: CachedBlocks) -> int:
        """Put blocks that an earlier driver has filled into the prefix cache, as far as no request
        holds them; return their number. They have hashes of this tag."""
        if not self._caches_prefixes or not blocks.block_ids.size:
            return 0
        # A fresh pool allocates ascending ids, so low ids hold the beginnings of prefixes. They are
        # restored last, which makes them the last to be reused.
        order = np.argsort(-blocks.block_ids)
        raw, width, num_restored = blocks.hashes[order].tobytes(), _HASH_BYTES + 1, 0
        for index, block_id in enumerate(blocks.block_ids[order].tolist()):
            entry = raw[index * width : (index + 1) * width]
            num_restored += self._pool.restore(entry[-1], block_id, entry[:-1])
        return num_restored

    @property
    def has_host_tier(self) -> bool:
        """True if evicted blocks go to host memory."""
        return self._tier is not None

    @property
    def has_kv_files(self) -> bool:
        """True if full blocks go to files."""
        return self._files is not None

    def take_moves(self) -> tuple[StepValues, ...]:
        """Return what the step that is sent now moves between blocks and another place."""
        return () if self._outside is None else self._outside.take_moves(self.tag)

    def restore_host_tier(self, slots: CachedBlocks) -> int:
        """Take the contents of the slots that an earlier driver has filled; return how many."""
        return 0 if self._tier is None else self._tier.restore(slots)

    def find_lacking(self, request: Request, *, windowed: bool) -> list[list[bytes]]:
        """Return the keys of the blocks that a request could begin with and that are not cached, by
        group; none if it may begin with no others'. windowed: of the groups with windows, what they
        need for the longest prefix that the others can serve now; else of the others, all."""
        if not self._caches_prefixes or not request.blocks.may_share:
            return []
        self._hash(request)
        hashes, unit = request.blocks.hashes, self._prefix_unit
        length = request.most_cached // self.unit // unit * unit
        if windowed:
            for group, blocks in enumerate(self._groups):
                if blocks.window is None:
                    length = self._cached_length(group, hashes, length) // unit * unit
        found = []
        for group, (blocks, stride) in enumerate(zip(self._groups, self._strides, strict=True)):
            if windowed != (blocks.window is not None):
                continue
            first = blocks_behind(length * self.unit, blocks) if windowed else 0
            names = (hashes[(i + 1) * stride - 1] for i in range(first, length // stride))
            cached = self._pool.contents(group)
            found.append([key_of(group, each) for each in names if each not in cached])
        return found

    def note_fetched(self, keys: Iterable[bytes]) -> None:
        """Note blocks that all ranks have read from files."""
        if self._files is not None:
            self._files.fetched(keys)

    def forget_outside(self) -> None:
        """Drop all contents outside of the KV cache."""
        if self._outside is not None:
            self._outside.forget_all()

    @property
    def has_moves(self) -> bool:
        """True if the next step has something to move."""
        return self._tier is not None and self._tier.has_moves

    def exchange(self, keys_of: KeysOf) -> HostBlockExchange | None:
        """Return what other groups exchange blocks with; None without a host tier."""
        return None if self._tier is None else HostBlockExchange(self._tier, self._pool, keys_of)

    def keys_of(self, request: Request) -> list[bytes]:
        """Return the keys of the blocks that a request may begin with, in the first group."""
        if not request.blocks.may_share:
            return []
        self._hash(request)
        length = request.most_cached // self._sizes[0]
        stride = self._strides[0]
        return [key_of(0, request.blocks.hashes[(i + 1) * stride - 1]) for i in range(length)]

    def fail_moves(self, outputs: Iterable[SchedulerOutput]) -> None:
        """Drop what failed steps were to move."""
        if self._outside is not None:
            self._outside.fail(outputs)

    def give_up(self, request: Request, block_ids: Collection[int]) -> bool:
        """Return True if a request has one of these blocks, whose contents were not those that it
        was to begin with. Neither they, nor what it has computed from them, are shared any more."""
        first = len(request.blocks.hashes)
        for stride, own in zip(self._strides, request.blocks.by_group, strict=False):
            places = (i * stride for i, block_id in enumerate(own) if block_id in block_ids)
            first = min(first, next(places, first))
        lost = request.blocks.hashes[first:]
        self._forget(lost)
        return bool(lost)

    def _forget(self, hashes: Sequence[bytes]) -> None:
        self._pool.forget(hashes)
        if self._outside is not None:
            self._outside.forget(keys_of(hashes, len(self._groups)))

    def _evict(self, block_id: int, group: int, block_hash: bytes) -> None:
        assert self._outside is not None, "otherwise nobody asks"
        self._outside.evict(key_of(group, block_hash), block_id)

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
        if self._every:
            given = self._allocate(len(held[0]), missing)
        else:
            given = list(map(self._pool.allocate, missing))
        for own, block_ids in zip(held, given, strict=True):
            own += block_ids
        self._note_end(request)
        return given

    def _note_end(self, request: Request) -> None:
        held = zip(self._sizes, request.blocks.by_group, strict=True)
        request.blocks.end = min([size * len(own) for size, own in held])

    def _allocate(self, num_first: int, counts: Sequence[int]) -> list[list[int]]:
        """Allocate blocks of each group, with checkpoints at borders. num_first: blocks of the
        first group that the request has."""
        first = self._pool.allocate_from(num_first, counts[0])
        return [first, *map(self._pool.allocate, counts[1:])]

    def extend_all(self, requests: Sequence[Request]) -> list[dict[str, list[int]]] | None:
        """Extend every request by its next token, as extend() does for one. Return the new block
        ids by group and request. Return None and change nothing if blocks are short, windows may
        free some, or some have checkpoints: the caller then extends requests one at a time."""
        if self._extends_each or len(requests) * len(self._groups) > self._pool.num_free:
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

    def _leave_behind(self, request: Request) -> None:
        for group, own in zip(self._groups, request.blocks.by_group, strict=True):
            behind = blocks_behind(request.least_computed, group)
            while behind and own[behind - 1] != NULL_BLOCK:
                behind -= 1
                self._pool.release(own[behind : behind + 1])
                own[behind] = NULL_BLOCK

    def find_prefix(self, request: Request) -> Prefix:
        """Return the cached blocks of each group that a request can begin with, null blocks for
        those that no later token sees. At least one token is left to compute. If layers keep
        states, the prefix ends at a checkpoint."""
        if not self._caches_prefixes or not request.blocks.may_share:
            return self._no_prefix
        self._hash(request)
        hashes = request.blocks.hashes
        unit, fitted = self._prefix_unit, 0
        length = request.most_cached // self.unit // unit * unit
        while fitted != length:  # until every group can serve it
            fitted = length
            for group in range(len(self._groups)):
                length = self._cached_length(group, hashes, length) // unit * unit
            if self._every:
                length = self._checkpointed_length(hashes, length)
        prefix = self._prefixes(hashes, length)
        if self._outside is not None:
            # A step loads so many; beyond that, half of a prefix is better than none.
            while sum(own.count(OUTSIDE) for own in prefix) > self._outside.room:
                length = length // 2 // unit * unit
                prefix = self._prefixes(hashes, length)
        return prefix

    def _prefixes(self, hashes: Sequence[bytes], length: int) -> Prefix:
        if not length:
            return self._no_prefix
        return [self._prefix(group, hashes, length) for group in range(len(self._groups))]

    def _cached_length(self, group: int, hashes: Sequence[bytes], most: int) -> int:
        """Return the length in hashes, at most `most`, of the longest prefix that a group can
        serve: it has all blocks that the next token sees. The prefix is a whole number of the
        group's blocks."""
        stride, blocks = self._strides[group], self._groups[group]
        if blocks.window is None:
            cached, outside = self._pool.contents(group), self._outside
            for end in range(stride, most + 1, stride):
                block_hash = hashes[end - 1]
                if block_hash not in cached and (
                    outside is None or key_of(group, block_hash) not in outside
                ):
                    return end - stride
            return most // stride * stride
        end = most // stride
        index = end
        while index > blocks_behind(end * blocks.block_size, blocks):
            index -= 1
            if self._find(group, hashes, index) is None:
                end = index
        return end * stride

    def _checkpointed_length(self, hashes: Sequence[bytes], most: int) -> int:
        """Return the length in hashes, at most `most`, of the longest prefix that ends at a
        checkpoint. most: a border up to which the first group has the blocks."""
        for length in range(most, 0, -self._prefix_unit):
            block_id = self._pool.find(0, hashes[length - 1])
            if block_id is not None and self._pool.has_checkpoint(block_id):
                return length
        return 0

    def _prefix(self, group: int, hashes: Sequence[bytes], length: int) -> list[int]:
        behind = blocks_behind(length * self.unit, self._groups[group])
        found = [
            self._find(group, hashes, index)
            for index in range(behind, length // self._strides[group])
        ]
        return [NULL_BLOCK] * behind + [block_id for block_id in found if block_id is not None]

    def _find(self, group: int, hashes: Sequence[bytes], index: int) -> int | None:
        """Return the block with the contents at an index, or OUTSIDE; None if neither has them."""
        block_hash = hashes[(index + 1) * self._strides[group] - 1]
        block_id = self._pool.find(group, block_hash)
        outside = self._outside
        if block_id is None and outside is not None and key_of(group, block_hash) in outside:
            return OUTSIDE
        return block_id

    def num_cached(self, prefix: Prefix) -> int:
        """Return the number of tokens of a prefix."""
        return len(prefix[0]) * self._groups[0].block_size

    def can_hold(self, request: Request, prefix: Prefix) -> bool:
        """Return True if there are blocks for all known tokens of a request that begins with
        `prefix`."""
        most, num_free = blocks_for(len(request.tokens), self.unit), self._pool.num_free
        if most * len(self._groups) <= num_free:
            return True
        needed = 0
        for group, own in zip(self._groups, prefix, strict=True):
            most = most_blocks(len(request.tokens), group, self._most_tokens)
            if own:
                num_lacking = own.count(NULL_BLOCK) + own.count(OUTSIDE)
                most = max(0, most - len(own) + num_lacking)
                most += self._pool.num_free_among([i for i in own if i != OUTSIDE])
            needed += most
        return needed <= num_free

    def begin(self, request: Request, prefix: Prefix, count: int) -> None:
        """Give a request the cached blocks that it begins with, and those for `count` tokens."""
        num_cached, blocks, num_loaded = self.num_cached(prefix), request.blocks, 0
        if num_cached:
            if self._outside is not None:
                num_loaded = prefix[0].count(OUTSIDE) * self._groups[0].block_size
                prefix = self._load(request, self._outside, prefix)
            self.resume(request, prefix, num_cached)
            blocks.num_remembered = blocks.num_shared = num_cached // self.unit
            blocks.num_offered = blocks.num_shared
            self.extend(request, count)
        else:
            needed = [-(-count // size) for size in self._sizes]
            if self._every:
                blocks.by_group = tuple(self._allocate(0, needed))
            else:
                blocks.by_group = tuple(map(self._pool.allocate, needed))
            blocks.num_shared = 0
        if blocks.num_cached_tokens < 0:
            blocks.num_cached_tokens = min(num_cached, request.num_prompt_tokens)
            blocks.num_loaded_tokens = min(num_loaded, request.num_prompt_tokens)

    def _load(self, request: Request, outside: OutsideBlocks, prefix: Prefix) -> Prefix:
        """Let the next step load what a request begins with and no block has, into blocks that
        others may share at once; return the prefix with these. They have no reference yet."""
        hashes, found = request.blocks.hashes, [list(own) for own in prefix]
        lacking = [
            (group, index, hashes[(index + 1) * self._strides[group] - 1])
            for group, own in enumerate(prefix)
            for index, block_id in enumerate(own)
            if block_id == OUTSIDE
        ]
        # Allocations evict blocks: neither what is there nor what is outside may go.
        for own in prefix:
            self._pool.hold([i for i in own if i != OUTSIDE])
        outside.keep(key_of(group, block_hash) for group, _, block_hash in lacking)
        for group, index, block_hash in lacking:
            (block_id,) = self._pool.allocate(1)
            outside.load(key_of(group, block_hash), block_id)
            self._pool.remember(group, block_id, block_hash)
            found[group][index] = block_id
        for block_ids in found:
            self._pool.release(block_ids)
        return found

    def resume(self, request: Request, by_group: Prefix, num_computed: int) -> None:
        """Give a request the blocks of each group that hold its first tokens."""
        for block_ids in by_group:
            self._pool.hold(block_ids)
        request.blocks.by_group = tuple(map(list, by_group))
        request.num_computed = num_computed

    def adopt(self, request: Request, by_group: Prefix, num_computed: int) -> None:
        """Give an adopted request its blocks; others may begin with those that are full."""
        for size, own in zip(self._sizes, by_group, strict=True):
            self._pool.forget_blocks(own[num_computed // size :])
        self.resume(request, by_group, num_computed)
        if self._outside is not None:
            # Blocks that it had loaded may not have matched, which its former driver alone was
            # told: then it is computed again.
            request.blocks.num_shared = num_computed // self.unit
        self.remember(request)

    def release(self, request: Request) -> None:
        """Release a request's blocks. Steps in flight may still write to them; a new holder's step
        runs after those."""
        request.blocks.is_mixed = False
        for block_ids in request.blocks.by_group:
            self._pool.release(block_ids)
        request.blocks.by_group, request.blocks.end = (), 0
        request.blocks.num_remembered = request.blocks.num_offered = 0
        request.num_computed = 0

    def remember(self, request: Request) -> None:
        """Let other requests begin with the full blocks of a request whose steps were sent."""
        if not self._caches_prefixes or request.blocks.is_mixed:
            return
        self._hash(request)
        blocks = request.blocks
        num_full = min(len(request.tokens), request.num_computed) // self.unit
        for group, own in enumerate(blocks.by_group):
            stride = self._strides[group]
            for index in range(blocks.num_remembered // stride, num_full // stride):
                if own[index] == NULL_BLOCK:
                    continue
                block_hash = blocks.hashes[(index + 1) * stride - 1]
                if self._every and not group and (index + 1) % self._every == 0:
                    self._pool.remember_border(own[index], block_hash)
                else:
                    self._pool.remember(group, own[index], block_hash)
        blocks.num_remembered = max(num_full, blocks.num_remembered)
        if self._files is not None:
            self._offer(request, self._files)

    def _offer(self, request: Request, files: FetchedBlocks) -> None:
        """Offer the blocks that a request has filled, and from which it has sampled a token: had
        one NaN, so would the token."""
        blocks, num_tokens = request.blocks, len(request.tokens)
        if num_tokens == request.num_prompt_tokens:
            return
        num_good = min(blocks.num_remembered, (num_tokens - 1) // self.unit)
        for group, own in enumerate(blocks.by_group):
            stride = self._strides[group]
            for index in range(blocks.num_offered // stride, num_good // stride):
                block_hash = blocks.hashes[(index + 1) * stride - 1]
                if self._pool.find(group, block_hash) == own[index]:
                    files.offer(key_of(group, block_hash), own[index])
        blocks.num_offered = max(num_good, blocks.num_offered)

    def preempt(self, request: Request) -> None:
        """Remember a request's blocks, which it is about to lose to others."""
        self.remember(request)
        request.blocks.num_preemptions += 1

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

    def distrust(self, request: Request) -> bool:
        """Stop other requests from beginning with the blocks of a request whose logits are not
        finite. Return True if it had begun with blocks of others; it will not do so again."""
        self._forget(request.blocks.hashes)
        num_shared, request.blocks.num_shared = request.blocks.num_shared, 0
        request.blocks.may_share = False
        return num_shared > 0

    def forget_all(self, good: Iterable[Request] = ()) -> None:
        """Drop the prefix cache. The blocks of `good` requests stay valid: the next remember() of a
        request caches them again."""
        self._to_remember.clear()
        self._pool.forget_all()
        if self._outside is not None:
            self._outside.blocks_lost()
        for request in good:
            request.blocks.num_remembered = 0

    def _hash(self, request: Request) -> None:
        """Extend a request's block hashes up to its known tokens."""
        hashes, num_bytes = request.blocks.hashes, _TOKEN_BYTES * self.unit
        num_new = len(request.tokens) // self.unit - len(hashes)
        if num_new <= 0:
            return
        raw = request.tokens[len(hashes) * self.unit :].tobytes()
        parent = hashes[-1] if hashes else self._weights + request.blocks.root
        for start in range(0, num_new * num_bytes, num_bytes):
            block = raw[start : start + num_bytes]
            parent = blake2b(parent + block, digest_size=_HASH_BYTES).digest()
            hashes.append(parent)

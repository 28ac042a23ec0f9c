"""Finds what a request may begin with: full blocks of other requests, in the KV cache or in a place
outside of it."""

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from rpc_schema.kv_cache import NULL_BLOCK, blocks_behind
from worker_client.scheduler.block_hashes import BlockHashes
from worker_client.scheduler.block_pool import BlockPool
from worker_client.scheduler.interface import SchedulerLimits
from worker_client.scheduler.outside_blocks import OutsideBlocks, keys_in
from worker_client.scheduler.request import Request

OUTSIDE: Final = -1
"""Takes the place of a block whose contents have to be loaded."""


LOOKED_AT: Final = 128
"""Blocks that are looked up together: of a prompt whose beginning nobody has, few are in vain."""


_Found: TypeAlias = list[int | None]
"""A group's blocks with a request's contents, by their place: the block, or OUTSIDE; None where
neither the pool nor another place has them."""


class LackingBlocks(NamedTuple):
    """Blocks of a prefix that lie outside, of one group. Aligned columns."""

    group: int
    places: list[int]
    """Among the request's blocks of the group."""
    hashes: list[bytes]
    keys: list[bytes]


class Prefix(NamedTuple):
    """First blocks of a request, as they were found. No block has a new reference yet: it is void
    once the pool has changed."""

    by_group: Sequence[Sequence[int]]
    """Blocks of each group; null blocks for those that no later token sees, and OUTSIDE."""
    num_tokens: int = 0
    num_loaded_tokens: int = 0
    """Those of them whose KV the first group has to load."""
    lacking: Sequence[LackingBlocks] = ()
    """Blocks that have to be loaded, of the groups that have some."""


class PrefixSearch:
    """Reads the pool and what is outside of it; changes neither. Owned by a scheduler."""

    def __init__(
        self,
        limits: SchedulerLimits,
        hashes: BlockHashes,
        pool: BlockPool,
        outside: OutsideBlocks | None = None,
    ) -> None:
        self._groups = limits.block_groups
        self._hashes = hashes
        self._pool = pool
        self._outside = outside
        self._has_checkpoints = limits.checkpoint_blocks > 0
        self._step = limits.border_tokens // hashes.unit or max(hashes.strides)
        """The lengths of cached prefixes are multiples of it, in hashes."""
        self._is_enabled = limits.shares_prefixes
        self._nothing = Prefix(((),) * len(self._groups))

    def find(self, request: Request) -> Prefix:
        """Return the cached blocks that a request can begin with. At least one token is left to
        compute. If layers keep states, the prefix ends at a checkpoint."""
        if not self._may_begin(request):
            return self._nothing
        hashes, length = self._hashes.of(request), self._most(request)
        found = [self._find(group, hashes, length) for group in range(len(self._groups))]
        length = self._served_length(found, hashes, length)
        prefix = self._prefix(found, hashes, length)
        if self._outside is not None:
            # A step loads so many; beyond that, half of a prefix is better than none. Groups with
            # windows need other blocks for it.
            while sum(len(own.keys) for own in prefix.lacking) > self._outside.room:
                half = length // 2 // self._step * self._step
                length = self._served_length(found, hashes, half)
                prefix = self._prefix(found, hashes, length)
        return prefix

    def find_lacking(self, request: Request, *, windowed: bool) -> list[list[bytes]]:
        """Return the keys of the blocks that a request could begin with and that are not cached, by
        group; none if it may begin with no others'. windowed: of the groups with windows, what they
        need for the longest prefix that the others can serve now; else of the others, all."""
        if not self._may_begin(request):
            return []
        hashes, step, length = self._hashes.of(request), self._step, self._most(request)
        if windowed:
            for group, blocks in enumerate(self._groups):
                if blocks.window is None:
                    known = self._find(group, hashes, length)
                    length = self._cached_length(group, known, length) // step * step
        found = []
        for group, blocks in enumerate(self._groups):
            if windowed != (blocks.window is not None):
                continue
            first = blocks_behind(length * self._hashes.unit, blocks) if windowed else 0
            end = length // self._hashes.strides[group]
            cached = self._pool.contents(group)
            names = self._names(group, hashes, first, end)
            found.append(keys_in(group, [each for each in names if each not in cached]))
        return found

    def keys_of(self, request: Request, num_more: int = 0) -> list[bytes]:
        """Return the keys of the blocks that the longest prefix of a request takes once it has so
        many more tokens, by group: in groups with windows, those that its next token sees."""
        if not request.prefix.may_share:
            return []
        hashes, length = self._hashes.of(request), self._most(request, num_more)
        found = []
        for group, blocks in enumerate(self._groups):
            first = blocks_behind(length * self._hashes.unit, blocks)
            end = length // self._hashes.strides[group]
            found += keys_in(group, self._names(group, hashes, first, end))
        return found

    def _may_begin(self, request: Request) -> bool:
        return self._is_enabled and request.prefix.may_share

    def _most(self, request: Request, num_more: int = 0) -> int:
        """Return the length in hashes of the longest prefix that a request may have."""
        most = min(request.most_cached + num_more, len(request.tokens))
        return most // self._hashes.unit // self._step * self._step

    def _served_length(self, found: Sequence[_Found], hashes: Sequence[bytes], most: int) -> int:
        """Return the length in hashes, at most `most`, of the longest prefix that every group can
        serve; it ends at a checkpoint if layers keep states. found: by group."""
        length, fitted = most, 0
        while fitted != length:
            fitted = length
            for group, own in enumerate(found):
                length = self._cached_length(group, own, length) // self._step * self._step
            if self._has_checkpoints:
                length = self._checkpointed_length(hashes, length)
        return length

    def _cached_length(self, group: int, found: _Found, most: int) -> int:
        """Return the length in hashes, at most `most`, of the longest prefix that a group can
        serve: it has all blocks that the next token sees. The prefix is a whole number of the
        group's blocks."""
        stride, blocks = self._hashes.strides[group], self._groups[group]
        end = most // stride
        if blocks.window is None:
            return (
                next((at for at in range(min(end, len(found))) if found[at] is None), end) * stride
            )
        index = end
        while index > blocks_behind(end * blocks.block_size, blocks):
            index -= 1
            if found[index] is None:
                end = index
        return end * stride

    def _checkpointed_length(self, hashes: Sequence[bytes], most: int) -> int:
        """Return the length in hashes, at most `most`, of the longest prefix that ends at a
        checkpoint. most: a border up to which the first group has the blocks."""
        for length in range(most, 0, -self._step):
            block_id = self._pool.find(0, hashes[length - 1])
            if block_id is not None and self._pool.has_checkpoint(block_id):
                return length
        return 0

    def _prefix(self, found: Sequence[_Found], hashes: Sequence[bytes], length: int) -> Prefix:
        """Return the prefix of so many hashes, which every group can serve."""
        if not length:
            return self._nothing
        by_group = [self._blocks(group, own, length) for group, own in enumerate(found)]
        num_tokens = length * self._hashes.unit
        if self._outside is None:
            return Prefix(by_group, num_tokens)
        lacking = [
            self._lacking(group, hashes, own)
            for group, own in enumerate(by_group)
            if OUTSIDE in own
        ]
        num_loaded = by_group[0].count(OUTSIDE) * self._groups[0].block_size
        return Prefix(by_group, num_tokens, num_loaded, lacking)

    def _blocks(self, group: int, found: _Found, length: int) -> list[int]:
        behind = blocks_behind(length * self._hashes.unit, self._groups[group])
        seen = found[behind : length // self._hashes.strides[group]]
        return [NULL_BLOCK] * behind + [block_id for block_id in seen if block_id is not None]

    def _lacking(self, group: int, hashes: Sequence[bytes], own: Sequence[int]) -> LackingBlocks:
        stride = self._hashes.strides[group]
        places = [place for place, block_id in enumerate(own) if block_id == OUTSIDE]
        lacking = [hashes[(place + 1) * stride - 1] for place in places]
        return LackingBlocks(group, places, lacking, keys_in(group, lacking))

    def _find(self, group: int, hashes: Sequence[bytes], most: int) -> _Found:
        """Look up the blocks of a group in the first `most` hashes. Without a window, those behind
        one that neither has may be left out."""
        found: _Found = []
        has_window = self._groups[group].window is not None
        end = most // self._hashes.strides[group]
        size = end if has_window else LOOKED_AT
        for first in range(0, end, size or 1):
            names = self._names(group, hashes, first, min(end, first + size))
            found += self._look_up(group, names)
            if not has_window and None in found:
                break
        return found

    def _look_up(self, group: int, names: Sequence[bytes]) -> _Found:
        found: _Found = [*map(self._pool.contents(group).get, names)]
        if self._outside is None or None not in found:
            return found
        keys = keys_in(group, names)
        lacking = [key for key, block_id in zip(keys, found, strict=True) if block_id is None]
        held = self._outside.held(lacking)
        if not held:
            return found
        return [
            OUTSIDE if block_id is None and key in held else block_id
            for key, block_id in zip(keys, found, strict=True)
        ]

    def _names(self, group: int, hashes: Sequence[bytes], first: int, end: int) -> Sequence[bytes]:
        """Return the hashes of a request's blocks of a group, from place `first` to end - 1."""
        stride = self._hashes.strides[group]
        return hashes[(first + 1) * stride - 1 : end * stride : stride]

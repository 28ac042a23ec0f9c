"""Finds what a request may begin with: full blocks of other requests, in the KV cache or in a place
outside of it."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from rpc_schema.kv_cache import NULL_BLOCK, blocks_behind
from worker_client.scheduler.block_hashes import BlockHashes
from worker_client.scheduler.block_pool import BlockPool
from worker_client.scheduler.interface import SchedulerLimits
from worker_client.scheduler.outside_blocks import OutsideBlocks, key_of
from worker_client.scheduler.request import Request

OUTSIDE: Final = -1
"""Takes the place of a block whose contents have to be loaded."""


class Prefix(NamedTuple):
    """First blocks of a request, as they were found. No block has a new reference yet: it is void
    once the pool has changed."""

    by_group: Sequence[Sequence[int]]
    """Blocks of each group; null blocks for those that no later token sees, and OUTSIDE."""
    num_tokens: int = 0
    num_loaded_tokens: int = 0
    """Those of them whose KV the first group has to load."""


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
        hashes = self._hashes.of(request)
        length = self._served_length(hashes, self._most(request))
        prefix = self._prefix(hashes, length)
        if self._outside is not None:
            # A step loads so many; beyond that, half of a prefix is better than none. Groups with
            # windows need other blocks for it.
            while sum(own.count(OUTSIDE) for own in prefix.by_group) > self._outside.room:
                length = self._served_length(hashes, length // 2 // self._step * self._step)
                prefix = self._prefix(hashes, length)
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
                    length = self._cached_length(group, hashes, length) // step * step
        found = []
        for group, blocks in enumerate(self._groups):
            if windowed != (blocks.window is not None):
                continue
            first = blocks_behind(length * self._hashes.unit, blocks) if windowed else 0
            end = length // self._hashes.strides[group]
            names = (self._hashes.at(hashes, group, index) for index in range(first, end))
            cached = self._pool.contents(group)
            found.append([key_of(group, each) for each in names if each not in cached])
        return found

    def keys_of(self, request: Request) -> list[bytes]:
        """Return the keys of the blocks that the longest prefix of a request takes, by group: in
        groups with windows, those that its next token sees."""
        if not request.prefix.may_share:
            return []
        hashes, length = self._hashes.of(request), self._most(request)
        return [
            key_of(group, self._hashes.at(hashes, group, index))
            for group, blocks in enumerate(self._groups)
            for index in range(
                blocks_behind(length * self._hashes.unit, blocks),
                length // self._hashes.strides[group],
            )
        ]

    def _may_begin(self, request: Request) -> bool:
        return self._is_enabled and request.prefix.may_share

    def _most(self, request: Request) -> int:
        """Return the length in hashes of the longest prefix that a request may have."""
        return request.most_cached // self._hashes.unit // self._step * self._step

    def _served_length(self, hashes: Sequence[bytes], most: int) -> int:
        """Return the length in hashes, at most `most`, of the longest prefix that every group can
        serve; it ends at a checkpoint if layers keep states."""
        length, fitted = most, 0
        while fitted != length:
            fitted = length
            for group in range(len(self._groups)):
                length = self._cached_length(group, hashes, length) // self._step * self._step
            if self._has_checkpoints:
                length = self._checkpointed_length(hashes, length)
        return length

    def _cached_length(self, group: int, hashes: Sequence[bytes], most: int) -> int:
        """Return the length in hashes, at most `most`, of the longest prefix that a group can
        serve: it has all blocks that the next token sees. The prefix is a whole number of the
        group's blocks."""
        stride, blocks = self._hashes.strides[group], self._groups[group]
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
        for length in range(most, 0, -self._step):
            block_id = self._pool.find(0, hashes[length - 1])
            if block_id is not None and self._pool.has_checkpoint(block_id):
                return length
        return 0

    def _prefix(self, hashes: Sequence[bytes], length: int) -> Prefix:
        """Return the prefix of so many hashes, which every group can serve."""
        if not length:
            return self._nothing
        by_group = [self._blocks(group, hashes, length) for group in range(len(self._groups))]
        num_loaded = 0 if self._outside is None else by_group[0].count(OUTSIDE)
        return Prefix(by_group, length * self._hashes.unit, num_loaded * self._groups[0].block_size)

    def _blocks(self, group: int, hashes: Sequence[bytes], length: int) -> list[int]:
        behind = blocks_behind(length * self._hashes.unit, self._groups[group])
        found = [
            self._find(group, hashes, index)
            for index in range(behind, length // self._hashes.strides[group])
        ]
        return [NULL_BLOCK] * behind + [block_id for block_id in found if block_id is not None]

    def _find(self, group: int, hashes: Sequence[bytes], index: int) -> int | None:
        """Return the block with the contents at an index, or OUTSIDE; None if neither has them."""
        block_hash = self._hashes.at(hashes, group, index)
        block_id = self._pool.find(group, block_hash)
        outside = self._outside
        if block_id is None and outside is not None and key_of(group, block_hash) in outside:
            return OUTSIDE
        return block_id

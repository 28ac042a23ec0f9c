"""The host tier of vLLM's prefix cache: blocks that it evicts go to the host memory of the ranks,
and prompts that begin with such blocks load them. Contents have the names that vLLM's cache gives
them: the hash of a prefix, and the KV group."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rpc_schema.errors import WorkerDaemonError
from rpc_schema.kv_cache import NULL_BLOCK, BlockGroup, blocks_behind
from worker_client.group.prefixes import GroupPrefixes
from worker_client.scheduler.host_tier import HostPlace
from worker_client.steps.block_moves import HostMoves
from worker_client.vllm.prefix_notes import tag_of
from worker_client.vllm.settings import LOGGER

_LOG = logging.getLogger(LOGGER)

ContentsName = Callable[[bytes, int], bytes]
"""Returns the name of a block's contents, by the hash of its prefix and its KV group."""


class _LoadedPlace(NamedTuple):
    """A block of a request, and what has to be in it."""

    group: int
    at: int
    """Among the request's blocks of the group."""
    name: bytes


class OffloadedBlocks:
    """Contents of the slots of host memory, and what the next step moves. Belongs to one scheduler
    and one group, on their thread.

    The daemons check what a step loads (rpc_schema/host_tier.py). So this need not be right about
    what they have, after a lost step for example: requests would be computed again.
    """

    def __init__(
        self,
        prefixes: GroupPrefixes,
        name_of: ContentsName,
        groups: Sequence[BlockGroup],
        num_slots: int,
        tag: bytes,
    ) -> None:
        """tag: names how the hashes are made."""
        self._prefixes = prefixes
        self._name_of = name_of
        self._groups = tuple(groups)
        self._tier = HostPlace(num_slots)
        self._tag = tag
        self._ends = False
        """All contents are forgotten with the step that is being planned."""
        self.unit = min(group.block_size for group in groups)
        """Tokens of each hash."""
        self._step = max(group.block_size for group in groups)
        """Lengths of what is loaded are multiples of it, in tokens."""

    def read(self) -> int:
        """Take over what all ranks have, of earlier servers and of this one, before any step or
        after a lost one; return the number of blocks."""
        self._end()
        self._tier.forget_all()
        try:
            found = self._prefixes.get(self._tag, in_host_tier=True)
        except WorkerDaemonError as error:
            _LOG.warning("the blocks in host memory are not used: %s", error)
            return 0
        num_blocks = self._tier.slots.restore(found)
        if num_blocks:
            _LOG.info("%d blocks are in host memory", num_blocks)
        return num_blocks

    def find(self, hashes: Sequence[bytes], first: int, known: int) -> int:
        """Return how many tokens a request can load from token `first` on, as far as to leave one
        of its `known` tokens to be computed. What it would load stays until the next step. hashes:
        of each `unit` tokens."""
        end = (known - 1) // self._step * self._step
        if self._ends or first % self._step or end <= first:
            return 0
        for number, group in enumerate(self._groups):
            if group.window is None:
                end = self._last_held(number, hashes, first, end)
        while end > first and not self._fits(hashes, first, end):
            end -= self._step
        self._tier.keep([place.name for place in self._places(hashes, first, end)])
        return max(0, end - first)

    def load(
        self, hashes: Sequence[bytes], first: int, end: int, by_group: Sequence[Sequence[int]]
    ) -> None:
        """Load tokens `first` to end - 1, which find() has found, with the next step. by_group: the
        request's blocks, null blocks for those that no later token sees."""
        places = list(self._places(hashes, first, end))
        given = sum(
            block_id != NULL_BLOCK
            for group, own in zip(self._groups, by_group, strict=True)
            for block_id in own[first // group.block_size : end // group.block_size]
        )
        block_ids = [by_group[place.group][place.at] for place in places]
        assert NULL_BLOCK not in block_ids and len(block_ids) == given, "vLLM sees other windows"
        names = [place.name for place in places]
        self._tier.load(dict(zip(block_ids, names, strict=True)))

    def evict(self, name: bytes, block_id: int) -> None:
        """Keep the contents of a block that the next step gives to a request."""
        if not self._ends:
            self._tier.evict({block_id: name})

    def take_moves(self) -> tuple[HostMoves, ...]:
        """Return what the step that is sent now moves."""
        moves = self._tier.take_moves(self._tag)
        self._end()
        return moves

    def distrust(self, hashes: Sequence[bytes], first: int = 0) -> None:
        """Forget a request's contents from token `first` on."""
        groups = range(len(self._groups))
        lost = hashes[first // self.unit :]
        self._tier.forget(self._name_of(each, group) for each in lost for group in groups)

    def forget_all(self) -> None:
        """Forget all contents: they are of other weights, which the daemons know."""
        self._tier.forget_all()

    def begin_anew(self) -> None:
        """Forget all contents for good: nothing that the daemons have now is found again. A step
        that is being planned goes on with what it is to load."""
        self._ends = True

    def _end(self) -> None:
        if self._ends:
            self._ends = False
            self._tier.forget_all()
            self._tag = tag_of(self._tag, os.urandom(16))

    def _last_held(self, group: int, hashes: Sequence[bytes], first: int, end: int) -> int:
        """Return the end, at most `end`, of the tokens that a group without a window has."""
        size = self._groups[group].block_size
        for index in range(first // size, end // size):
            if self._name(group, hashes, index) not in self._tier:
                return index * size // self._step * self._step
        return end

    def _fits(self, hashes: Sequence[bytes], first: int, end: int) -> bool:
        """Return True if the next step can load these tokens, of which the groups without a window
        have all."""
        for number, place in enumerate(self._places(hashes, first, end), 1):
            has_window = self._groups[place.group].window is not None
            if number > self._tier.room or (has_window and place.name not in self._tier):
                return False
        return True

    def _places(self, hashes: Sequence[bytes], first: int, end: int) -> Iterator[_LoadedPlace]:
        """Yield what a request loads that begins with `end` tokens, all before `first` in its
        blocks."""
        for number, group in enumerate(self._groups):
            begin = max(first // group.block_size, blocks_behind(end, group))
            for index in range(begin, end // group.block_size):
                yield _LoadedPlace(number, index, self._name(number, hashes, index))

    def _name(self, group: int, hashes: Sequence[bytes], index: int) -> bytes:
        stride = self._groups[group].block_size // self.unit
        return self._name_of(hashes[(index + 1) * stride - 1], group)

"""HostMoves and KVFileMoves: blocks that a step moves between the KV cache and a place outside."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import numpy as np

from rpc_schema.cached_blocks import MAX_BLOCK_HASH_BYTES, MAX_TAG_BYTES
from rpc_schema.host_tier import HostTierMoves
from rpc_schema.kv_files import FileMoves
from rpc_schema.moved_blocks import MAX_MOVED_BLOCKS
from worker_client.scheduler_output import EncodedValues, StepFault, StepValues
from worker_client.steps.step_checks import size_fault
from worker_client.steps.step_fault import malformed

Columns: TypeAlias = tuple[Any, ...]
"""A NamedTuple of aligned columns: of numbers, block ids first, and last one of hashes."""


class MovedBlocks(NamedTuple):
    """Blocks, their slots and their hashes. Aligned columns."""

    block_ids: Sequence[int]
    slots: Sequence[int]
    """Numbers from 0 to SchedulerLimits.num_host_blocks - 1."""
    hashes: Sequence[bytes]
    """All of one length, at most 64 bytes; each names the KV group of its block, if there are
    several."""


class HashedBlocks(NamedTuple):
    """Blocks and their hashes. Aligned columns."""

    block_ids: Sequence[int]
    hashes: Sequence[bytes]
    """See MovedBlocks."""


NO_BLOCKS: Final = MovedBlocks((), (), ())
NO_HASHED_BLOCKS: Final = HashedBlocks((), ())


class BlockMoves(StepValues, ABC):
    """The moves of one place. A step does those of all places: first all stores, then all loads,
    then the forward pass. A store copies what the steps before have left in its block, but for
    HostMoves.num_filled. No block is loaded twice in a step."""

    columns: ClassVar[type[Columns]]
    tag: bytes
    """1 to 64 bytes that identify how the hashes were made, as for GroupPrefixes.note."""
    stored: Columns
    loaded: Columns

    @property
    def filled_blocks(self) -> Collection[int]:
        block_ids: Collection[int] = self.loaded[0]
        return block_ids

    def find_fault(self) -> StepFault | None:
        if not isinstance(self.tag, bytes) or not 1 <= len(self.tag) <= MAX_TAG_BYTES:
            return malformed("tag", self.tag, f"give 1 to {MAX_TAG_BYTES} bytes")
        for field, moved in (("stored", self.stored), ("loaded", self.loaded)):
            if not isinstance(moved, self.columns):
                return malformed(field, moved, f"give {self.columns.__name__}")
            for column in moved:
                fault = size_fault(field, column, Sequence, "give columns", MAX_MOVED_BLOCKS)
                if fault is not None:
                    return fault
        return None

    def encode(self, slot_of: Mapping[str, int]) -> EncodedValues | StepFault | None:
        """The fault: columns differ in length, or hold a value that is no number of an int32, or
        hashes of different lengths. The workers know which blocks and slots there are."""
        hashes = [*self.stored[-1], *self.loaded[-1]]
        if not hashes:
            return None
        for field, moved in (("stored", self.stored), ("loaded", self.loaded)):
            fault = _contents_fault(field, moved)
            if fault is not None:
                return fault
        widths = {*map(len, hashes)}
        if len(widths) > 1 or not 1 <= max(widths) <= MAX_BLOCK_HASH_BYTES:
            fix = f"give hashes of one length, 1 to {MAX_BLOCK_HASH_BYTES} bytes"
            return malformed("hashes", sorted(widths)[:8], fix)
        return self._message(len(hashes[0])), ()

    @abstractmethod
    def _message(self, hash_bytes: int) -> HostTierMoves | FileMoves:
        """Return the extension of the message. hash_bytes: length of each hash."""


@dataclass(frozen=True, slots=True)
class HostMoves(BlockMoves):
    """Moves between the KV cache and the host tier."""

    columns = MovedBlocks
    tag: bytes
    stored: MovedBlocks = NO_BLOCKS
    loaded: MovedBlocks = NO_BLOCKS
    num_beside: int = 0
    """The last so many loads run beside this step and later ones, of which those wait that give
    their blocks to a request. StepResult.arrived_blocks tells when they are there."""
    are_idle: bool = False
    """No step in flight touches the loaded blocks: they are loaded without waiting for any."""
    num_filled: int = 0
    """The last so many stores are of blocks that this step fills: they are copied as it leaves
    them, while it is computed where that can be."""

    def _message(self, hash_bytes: int) -> HostTierMoves:
        return HostTierMoves(
            block_tag=self.tag,
            hash_bytes=hash_bytes,
            store_blocks=_packed(self.stored.block_ids),
            store_slots=_packed(self.stored.slots),
            store_hashes=b"".join(self.stored.hashes),
            load_blocks=_packed(self.loaded.block_ids),
            load_slots=_packed(self.loaded.slots),
            load_hashes=b"".join(self.loaded.hashes),
            num_beside=self.num_beside,
            are_idle=self.are_idle,
            num_filled=self.num_filled,
        )


@dataclass(frozen=True, slots=True)
class KVFileMoves(BlockMoves):
    """Moves between the KV cache and files. A load copies what GroupKVFiles has had the ranks
    read."""

    columns = HashedBlocks
    tag: bytes
    stored: HashedBlocks = NO_HASHED_BLOCKS
    loaded: HashedBlocks = NO_HASHED_BLOCKS

    def _message(self, hash_bytes: int) -> FileMoves:
        return FileMoves(
            block_tag=self.tag,
            hash_bytes=hash_bytes,
            store_blocks=_packed(self.stored.block_ids),
            store_hashes=b"".join(self.stored.hashes),
            load_blocks=_packed(self.loaded.block_ids),
            load_hashes=b"".join(self.loaded.hashes),
        )


def _contents_fault(field: str, moved: Any) -> StepFault | None:
    *numbers, hashes = moved
    if len({*map(len, moved)}) > 1:
        fix = f"give {', '.join(type(moved)._fields)} of one length"
        return malformed(field, [*map(len, moved)], fix)
    for column in numbers:
        wrong = [n for n in column if type(n) is not int or not 0 <= n < 2**31]
        if wrong:
            return malformed(field, wrong[0], "give numbers of blocks and of slots")
    wrong_hashes = [each for each in hashes if not isinstance(each, bytes)]
    if wrong_hashes:
        return malformed(field, wrong_hashes[0], "give bytes")
    return None


def _packed(numbers: Sequence[int]) -> bytes:
    return np.array(numbers, "<i4").tobytes()

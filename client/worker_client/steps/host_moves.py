"""HostMoves: blocks that a step moves to the host tier and from there."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from rpc_schema.cached_blocks import MAX_BLOCK_HASH_BYTES, MAX_TAG_BYTES
from rpc_schema.host_tier import MAX_MOVED_BLOCKS, HostTierMoves
from worker_client.scheduler_output import EncodedValues, StepFault, StepValues
from worker_client.steps.step_checks import size_fault
from worker_client.steps.step_fault import malformed


class MovedBlocks(NamedTuple):
    """Blocks, their slots and their hashes. Aligned columns."""

    block_ids: Sequence[int]
    slots: Sequence[int]
    """Numbers from 0 to SchedulerLimits.num_host_blocks - 1."""
    hashes: Sequence[bytes]
    """All of one length, at most 64 bytes; each names the KV group of its block, if there are
    several."""

    def packed(self) -> tuple[bytes, bytes, bytes]:
        """Return the columns as a message has them."""
        blocks, slots = (np.array(own, "<i4").tobytes() for own in self[:2])
        return blocks, slots, b"".join(self.hashes)


NO_BLOCKS: Final = MovedBlocks((), (), ())


@dataclass(frozen=True, slots=True)
class HostMoves(StepValues):
    """All stores come first, then all loads, then the forward pass. A store copies what the steps
    before have left in its block."""

    tag: bytes
    """1 to 64 bytes that identify how the hashes were made, as for GroupPrefixes.note."""
    stored: MovedBlocks = NO_BLOCKS
    loaded: MovedBlocks = NO_BLOCKS

    @property
    def filled_blocks(self) -> Collection[int]:
        return self.loaded.block_ids

    def find_fault(self) -> StepFault | None:
        if not isinstance(self.tag, bytes) or not 1 <= len(self.tag) <= MAX_TAG_BYTES:
            return malformed("tag", self.tag, f"give 1 to {MAX_TAG_BYTES} bytes")
        return _columns_fault("stored", self.stored) or _columns_fault("loaded", self.loaded)

    def encode(self, slot_of: Mapping[str, int]) -> EncodedValues | StepFault | None:
        """The fault: columns differ in length, or a value is no number of an int32, or hashes
        differ in length. The workers know which blocks and slots there are."""
        hashes = [*self.stored.hashes, *self.loaded.hashes]
        if not hashes:
            return None
        fault = _contents_fault("stored", self.stored) or _contents_fault("loaded", self.loaded)
        if fault is not None:
            return fault
        width = len(hashes[0])
        if not 1 <= width <= MAX_BLOCK_HASH_BYTES or any(len(each) != width for each in hashes):
            fix = f"give hashes of one length, 1 to {MAX_BLOCK_HASH_BYTES} bytes"
            return malformed("hashes", sorted({*map(len, hashes)})[:8], fix)
        store, load = self.stored.packed(), self.loaded.packed()
        message = HostTierMoves(
            block_tag=self.tag,
            hash_bytes=width,
            store_blocks=store[0],
            store_slots=store[1],
            store_hashes=store[2],
            load_blocks=load[0],
            load_slots=load[1],
            load_hashes=load[2],
        )
        return message, ()


def _columns_fault(field: str, moved: object) -> StepFault | None:
    if not isinstance(moved, MovedBlocks):
        return malformed(field, moved, "give MovedBlocks")
    faults = (
        size_fault(field, column, Sequence, "give columns", MAX_MOVED_BLOCKS) for column in moved
    )
    return next((fault for fault in faults if fault is not None), None)


def _contents_fault(field: str, moved: MovedBlocks) -> StepFault | None:
    if not len(moved.block_ids) == len(moved.slots) == len(moved.hashes):
        return malformed(field, [*map(len, moved)], "give a slot and a hash for each block")
    for column in moved[:2]:
        wrong = [n for n in column if type(n) is not int or not 0 <= n < 2**31]
        if wrong:
            return malformed(field, wrong[0], "give numbers of blocks and of slots")
    wrong_hashes = [each for each in moved.hashes if not isinstance(each, bytes)]
    return malformed(field, wrong_hashes[0], "give bytes") if wrong_hashes else None

"""HostMoves: blocks that a step moves to the host tier and from there."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from rpc_schema.host_tier import HostTierMoves
from worker_client.scheduler_output import EncodedValues, StepFault, StepValues
from worker_client.steps.moved_columns import columns_fault, contents_fault, tag_fault


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
        return (
            tag_fault(self.tag)
            or columns_fault("stored", self.stored, MovedBlocks)
            or columns_fault("loaded", self.loaded, MovedBlocks)
        )

    def encode(self, slot_of: Mapping[str, int]) -> EncodedValues | StepFault | None:
        """The fault: see contents_fault. The workers know which blocks and slots there are."""
        hashes = [*self.stored.hashes, *self.loaded.hashes]
        if not hashes:
            return None
        fix = "give a slot and a hash for each block"
        fault = contents_fault(self.stored, self.loaded, fix)
        if fault is not None:
            return fault
        store, load = self.stored.packed(), self.loaded.packed()
        message = HostTierMoves(
            block_tag=self.tag,
            hash_bytes=len(hashes[0]),
            store_blocks=store[0],
            store_slots=store[1],
            store_hashes=store[2],
            load_blocks=load[0],
            load_slots=load[1],
            load_hashes=load[2],
        )
        return message, ()

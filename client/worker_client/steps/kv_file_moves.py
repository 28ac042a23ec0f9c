"""KVFileMoves: blocks that a step moves to files and from there."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from rpc_schema.kv_files import FileMoves
from worker_client.scheduler_output import EncodedValues, StepFault, StepValues
from worker_client.steps.moved_columns import columns_fault, contents_fault, tag_fault


class HashedBlocks(NamedTuple):
    """Blocks and their hashes. Aligned columns."""

    block_ids: Sequence[int]
    hashes: Sequence[bytes]
    """All of one length, at most 64 bytes; each names the KV group of its block, if there are
    several."""


NO_HASHED_BLOCKS: Final = HashedBlocks((), ())


@dataclass(frozen=True, slots=True)
class KVFileMoves(StepValues):
    """All stores come first, then all loads, then the forward pass. A store copies what the steps
    before have left in its block; a load, what GroupKVFiles has had the ranks read."""

    tag: bytes
    """1 to 64 bytes that identify how the hashes were made, as for GroupPrefixes.note."""
    stored: HashedBlocks = NO_HASHED_BLOCKS
    loaded: HashedBlocks = NO_HASHED_BLOCKS

    @property
    def filled_blocks(self) -> Collection[int]:
        return self.loaded.block_ids

    def find_fault(self) -> StepFault | None:
        return (
            tag_fault(self.tag)
            or columns_fault("stored", self.stored, HashedBlocks)
            or columns_fault("loaded", self.loaded, HashedBlocks)
        )

    def encode(self, slot_of: Mapping[str, int]) -> EncodedValues | StepFault | None:
        """The fault: see contents_fault. The workers know which blocks there are."""
        hashes = [*self.stored.hashes, *self.loaded.hashes]
        if not hashes:
            return None
        fault = contents_fault(self.stored, self.loaded, "give a hash for each block")
        if fault is not None:
            return fault
        message = FileMoves(
            block_tag=self.tag,
            hash_bytes=len(hashes[0]),
            store_blocks=np.array(self.stored.block_ids, "<i4").tobytes(),
            store_hashes=b"".join(self.stored.hashes),
            load_blocks=np.array(self.loaded.block_ids, "<i4").tobytes(),
            load_hashes=b"".join(self.loaded.hashes),
        )
        return message, ()

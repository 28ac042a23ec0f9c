"""Blocks that a step moves to the host tier and from there: checks what the step says of them. The
connector moves them (connectors/host_tier.py).

Shapes: S blocks to store, L blocks to load.
"""

from collections.abc import Sequence

import numpy as np

from rpc_schema.codec import Frame
from rpc_schema.host_tier import HostTierMoves
from worker_daemon.contracts.arrays import Int32s
from worker_daemon.runner.connectors.host_tier import Moves
from worker_daemon.runner.parts.interface import PartContext, StepPart
from worker_daemon.runner.parts.moved_blocks import (
    check_range,
    check_unique,
    read_blocks,
    read_hashes,
)
from worker_daemon.runner.scheduled_step import StepLimits, invalid
from worker_daemon.runner.step_columns import INT32, read_column


class HostTierPart(StepPart):
    """Has no rows and changes no logits: a step that moves blocks is otherwise as any."""

    step_extension = HostTierMoves
    in_sampling = False
    may_come_later = False
    loads_blocks = True

    @classmethod
    def serves(cls, context: PartContext) -> bool:
        return context.limits.num_host_blocks > 0

    def check_step(
        self, extension: HostTierMoves, frames: Sequence[Frame], limits: StepLimits
    ) -> Moves:
        """Raises InvalidStepError: a block or slot does not exist or is named twice, a slot is
        stored to and loaded, more loads run beside steps, or stores are of filled blocks, than
        there are, or columns do not fit."""
        store_blocks = read_blocks("store_blocks", extension.store_blocks, limits)
        load_blocks = read_blocks("load_blocks", extension.load_blocks, limits)
        store_slots = _slots("store_slots", extension.store_slots, store_blocks, limits)
        load_slots = _slots("load_slots", extension.load_slots, load_blocks, limits)
        num_before = store_blocks.size - _count("num_filled", extension.num_filled, store_blocks)
        check_unique("store_blocks", store_blocks[:num_before])
        check_unique("store_blocks", store_blocks[num_before:])
        check_unique("load_blocks", load_blocks)
        check_unique("store_slots", store_slots)
        both = np.intersect1d(store_slots, load_slots)
        if both.size:
            fix = "load it in a step before the one that replaces it"
            raise invalid("extensions.load_slots", int(both[0]), fix)
        width = extension.hash_bytes
        hashes = read_hashes("store_hashes", extension.store_hashes, store_blocks.size, width)
        before, filled = slice(num_before), slice(num_before, None)
        return Moves(
            extension.block_tag,
            store_blocks[before],
            store_slots[before],
            hashes[before],
            load_blocks,
            load_slots,
            read_hashes("load_hashes", extension.load_hashes, load_blocks.size, width),
            _count("num_beside", extension.num_beside, load_blocks),
            extension.are_idle,
            store_blocks[filled],
            store_slots[filled],
            hashes[filled],
        )

    def loaded_blocks(self, step_values: Moves) -> Int32s:
        return step_values.load_blocks


def _count(field: str, count: int, blocks: Int32s) -> int:
    """Return how many of the blocks, the last ones, are of a kind."""
    if count > blocks.size:
        raise invalid(f"extensions.{field}", count, f"at most the number of moves, {blocks.size}")
    return count


def _slots(field: str, raw: bytes, block_ids: Int32s, limits: StepLimits) -> Int32s:
    slots = read_column(f"extensions.{field}", raw, INT32)
    if slots.size != block_ids.size:
        fix = f"one for each of {block_ids.size} blocks"
        raise invalid(f"extensions.{field}", f"{slots.size} slots", fix)
    check_range(field, slots, 0, limits.num_host_blocks - 1)
    return slots.astype(np.int32)

"""Blocks that a step moves to the host tier and from there: checks what the step says of them. The
connector moves them (connectors/host_tier.py).

Shapes: S blocks to store, L blocks to load.
"""

from collections.abc import Sequence

import numpy as np

from rpc_schema.codec import Frame
from rpc_schema.host_tier import HostTierMoves
from rpc_schema.kv_cache import NULL_BLOCK
from worker_daemon.contracts.arrays import Int32s
from worker_daemon.runner.block_contents import Hashes
from worker_daemon.runner.connectors.host_tier import Moves
from worker_daemon.runner.parts.interface import PartContext, StepPart
from worker_daemon.runner.scheduled_step import StepLimits, invalid
from worker_daemon.runner.step_columns import INT32, read_column


class HostTierPart(StepPart):
    """Has no rows and changes no logits: a step that moves blocks is otherwise as any."""

    step_extension = HostTierMoves
    in_sampling = False
    may_come_later = False

    @classmethod
    def serves(cls, context: PartContext) -> bool:
        return context.limits.num_host_blocks > 0

    def check_step(
        self, extension: HostTierMoves, frames: Sequence[Frame], limits: StepLimits
    ) -> Moves:
        """Raises InvalidStepError: a block or slot does not exist or is named twice, a slot is
        stored to and loaded, or columns do not fit."""
        store_blocks = _blocks("store_blocks", extension.store_blocks, limits)
        load_blocks = _blocks("load_blocks", extension.load_blocks, limits)
        store_slots = _slots("store_slots", extension.store_slots, store_blocks, limits)
        load_slots = _slots("load_slots", extension.load_slots, load_blocks, limits)
        _check_unique("store_blocks", store_blocks)
        _check_unique("load_blocks", load_blocks)
        _check_unique("store_slots", store_slots)
        both = np.intersect1d(store_slots, load_slots)
        if both.size:
            fix = "load it in a step before the one that replaces it"
            raise invalid("extensions.load_slots", int(both[0]), fix)
        width = extension.hash_bytes
        return Moves(
            extension.block_tag,
            store_blocks,
            store_slots,
            _hashes("store_hashes", extension.store_hashes, store_blocks.size, width),
            load_blocks,
            load_slots,
            _hashes("load_hashes", extension.load_hashes, load_blocks.size, width),
        )


def _blocks(field: str, raw: bytes, limits: StepLimits) -> Int32s:
    block_ids = read_column(f"extensions.{field}", raw, INT32)
    _check_range(field, block_ids, NULL_BLOCK + 1, limits.num_blocks - 1)
    return block_ids.astype(np.int32)  # the message's bytes cannot be written to


def _slots(field: str, raw: bytes, block_ids: Int32s, limits: StepLimits) -> Int32s:
    slots = read_column(f"extensions.{field}", raw, INT32)
    if slots.size != block_ids.size:
        fix = f"one for each of {block_ids.size} blocks"
        raise invalid(f"extensions.{field}", f"{slots.size} slots", fix)
    _check_range(field, slots, 0, limits.num_host_blocks - 1)
    return slots.astype(np.int32)


def _check_range(field: str, values: Int32s, least: int, most: int) -> None:
    outside = (values < least) | (values > most)
    if outside.any():
        value = int(values[int(outside.argmax())])
        raise invalid(f"extensions.{field}", value, f"{least} to {most}")


def _check_unique(field: str, values: Int32s) -> None:
    found, counts = np.unique(values, return_counts=True)
    if found.size < values.size:
        value = int(found[int(counts.argmax())])
        raise invalid(f"extensions.{field}", value, "name it once in a step")


def _hashes(field: str, raw: bytes, count: int, width: int) -> Hashes:
    if len(raw) != count * width:
        fix = f"{width} for each of {count} blocks"
        raise invalid(f"extensions.{field}", f"{len(raw)} bytes", fix)
    return np.frombuffer(raw, np.uint8).reshape(count, width)

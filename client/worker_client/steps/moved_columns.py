"""Checks of the blocks that a step moves between the KV cache and another place: columns of
numbers, and last one of hashes."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from rpc_schema.cached_blocks import MAX_BLOCK_HASH_BYTES, MAX_TAG_BYTES
from rpc_schema.moved_blocks import MAX_MOVED_BLOCKS
from worker_client.scheduler_output import StepFault
from worker_client.steps.step_checks import size_fault
from worker_client.steps.step_fault import malformed

Columns: TypeAlias = tuple[Any, ...]
"""A NamedTuple of aligned columns."""


def tag_fault(tag: object) -> StepFault | None:
    """Return the fault of the name of a way to make hashes."""
    if isinstance(tag, bytes) and 1 <= len(tag) <= MAX_TAG_BYTES:
        return None
    return malformed("tag", tag, f"give 1 to {MAX_TAG_BYTES} bytes")


def columns_fault(field: str, moved: object, kind: type[Columns]) -> StepFault | None:
    """Return the fault of a value that has no columns, or too long ones."""
    if not isinstance(moved, kind):
        return malformed(field, moved, f"give {kind.__name__}")
    faults = (
        size_fault(field, column, Sequence, "give columns", MAX_MOVED_BLOCKS) for column in moved
    )
    return next((fault for fault in faults if fault is not None), None)


def contents_fault(stored: Columns, loaded: Columns, fix: str) -> StepFault | None:
    """Return the fault of columns that differ in length, or hold a value that is no number of an
    int32, or hashes of different lengths. fix: for the lengths."""
    for field, moved in (("stored", stored), ("loaded", loaded)):
        *numbers, own = moved
        if len({*map(len, moved)}) > 1:
            return malformed(field, [*map(len, moved)], fix)
        for column in numbers:
            wrong = [n for n in column if type(n) is not int or not 0 <= n < 2**31]
            if wrong:
                return malformed(field, wrong[0], "give numbers of blocks and of slots")
        wrong_hashes = [each for each in own if not isinstance(each, bytes)]
        if wrong_hashes:
            return malformed(field, wrong_hashes[0], "give bytes")
    widths = {len(each) for each in (*stored[-1], *loaded[-1])}
    if len(widths) > 1 or not 1 <= max(widths, default=1) <= MAX_BLOCK_HASH_BYTES:
        fix = f"give hashes of one length, 1 to {MAX_BLOCK_HASH_BYTES} bytes"
        return malformed("hashes", sorted(widths)[:8], fix)
    return None

"""Reads the drafts of rows for a driver that asks for them between steps: those that were made
after the last step, from the rows' tables, where the next step finds them, or those in a step whose
rows wait to be sampled. Steps do nothing for it."""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from worker_daemon.contracts.arrays import Int64s
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.sample_rows import Unsampled


class RowsDrafts(NamedTuple):
    """Drafts of rows, slots ascending."""

    req_ids: tuple[str, ...]
    num_drafts: bytes
    """uint8 for each row."""
    token_ids: bytes
    """int32 little-endian, all rows concatenated."""


NO_ROWS = RowsDrafts((), b"", b"")


def read_drafts(state: RequestState, next_tokens: Tensor) -> RowsDrafts:
    """Return the drafts of the last step's rows: none of those that have sampled nothing in it, or
    have failed; no rows if no step has run since the rows were dropped. Waits for the device.
    next_tokens: int64 [S + 1, 1 + K], see RowTables."""
    step = state.last_step
    if step is None or not step.slots.size:
        return NO_ROWS
    newest = next_tokens[step.slots].cpu().numpy()
    drafted = (step.num_samples > 0) & ~state.counts.unsampled[step.slots] & (newest[:, 0] >= 0)
    drafted &= not step.skips_drafts
    counts = np.where(drafted, newest.shape[1] - 1, 0)
    return _rows_drafts(state, step.slots, counts, newest[drafted, 1:])


def read_deferred(state: RequestState, step: Unsampled | None) -> RowsDrafts:
    """Return the drafts that a step verifies for rows that wait to be sampled; no rows if there are
    none. Waits for the device. step: those rows."""
    if step is None or step.chosen is None or step.chosen.inputs is None:
        return NO_ROWS
    rows = step.rows
    if rows.groups is None or not rows.has_drafts:
        return NO_ROWS
    inputs = step.chosen.inputs[: rows.slots_np.size].cpu().numpy()
    is_draft = np.ones(rows.slots_np.size, np.bool_)
    is_draft[rows.groups.firsts_np] = False  # each first sample follows the row's last known token
    is_draft &= state.are_current(rows.slots_np, rows.generations)
    slots, counts = np.unique_counts(rows.slots_np[is_draft])
    return _rows_drafts(state, slots, counts, inputs[is_draft])


def _rows_drafts(state: RequestState, slots: Int64s, counts: Int64s, tokens: Int64s) -> RowsDrafts:
    return RowsDrafts(
        tuple(state.req_ids[slot] for slot in slots.tolist()),
        counts.astype(np.uint8).tobytes(),
        tokens.astype("<i4").tobytes(),
    )

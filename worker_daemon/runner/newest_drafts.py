"""Reads the drafts that were made after the last step, for a driver that asks for them between
steps: from the rows' tables, where the next step finds them. Steps do nothing for it."""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from worker_daemon.runner.request_state import RequestState


class NewestDrafts(NamedTuple):
    """Drafts of the rows of the last step, slots ascending."""

    req_ids: tuple[str, ...]
    num_drafts: bytes
    """uint8 for each row."""
    token_ids: bytes
    """int32 little-endian, all rows concatenated."""


NO_ROWS = NewestDrafts((), b"", b"")


def read_drafts(state: RequestState, next_tokens: Tensor) -> NewestDrafts:
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
    return NewestDrafts(
        tuple(state.req_ids[slot] for slot in step.slots.tolist()),
        counts.astype(np.uint8).tobytes(),
        newest[drafted, 1:].astype("<i4").tobytes(),
    )

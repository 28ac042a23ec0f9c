"""Checks the drafts of a step, and the slots whose counts become exact again, before any of it is
applied. Part of step_checker.py.

Shapes: B scheduled requests.
"""

import numpy as np

from rpc_schema.step import ExecuteModel
from worker_daemon.contracts.arrays import Bools, Int32s, Int64s
from worker_daemon.runner.parts.step_parts import StepParts
from worker_daemon.runner.row_counts import RowCounts
from worker_daemon.runner.scheduled_step import Drafts, StepLimits, invalid
from worker_daemon.runner.slot_bitmap import read_bitmap
from worker_daemon.runner.steady_batch import EXACT
from worker_daemon.runner.step_columns import INT32, read_column, read_pairs


class DraftChecker:
    """Checks num_drafts, draft_token_ids and settled. Every rank reaches the same result."""

    def __init__(self, limits: StepLimits, parts: StepParts) -> None:
        self._limits = limits
        self._parts = parts

    def settle(self, step: ExecuteModel, slots: Int64s, counts: RowCounts) -> None:
        """Make the counts of rows exact that a message names. slots [B]: the scheduled ones.
        Raises InvalidStepError."""
        settled = read_bitmap(step.settled)
        is_bound = np.isin(settled, slots)
        is_bound[is_bound] = counts.corrected[settled[is_bound]] > EXACT
        for slot in settled[~is_bound].tolist()[:1]:
            fix = "name scheduled slots that had drafts since their counts were exact"
            raise invalid("settled", slot, fix)
        if self._may_refuse(settled, step):
            fix = "leave out the slots of requests with a feature that refuses tokens"
            raise invalid("settled", settled.tolist()[:8], fix)
        counts.settle(settled)

    def read(self, step: ExecuteModel, slots: Int64s, beyond: Int32s, counts: RowCounts) -> Drafts:
        """Return a step's drafts; the counts of slots that have some become bounds. beyond: the
        tokens [B] of each scheduled slot past its last known one. Raises InvalidStepError."""
        self._check_served(step)
        field, most = "num_drafts", self._limits.max_drafts
        named, numbers, positions = read_pairs(field, step.num_drafts, slots)
        counts.check_live(field, slots[positions])
        if not (named[1:] > named[:-1]).all():
            raise invalid(field, named.tolist()[:8], "name slots in ascending order")
        wrong = np.flatnonzero((numbers < 1) | (numbers > most) | (numbers != beyond[positions]))
        if wrong.size:
            at = int(wrong[0])
            fix = f"use 1 to {most} drafts, and schedule the slot's tokens up to the last of them: "
            fix += f"{int(beyond[positions[at]])} of them are beyond its last known token"
            raise invalid(field, f"slot {int(named[at])}: {int(numbers[at])}", fix)
        drafts = np.zeros(slots.size, np.int32)
        drafts[positions] = numbers
        token_ids = self._read_tokens(step, int(numbers.sum()))
        counts.begin_drafts(slots[positions])
        return Drafts(drafts, token_ids)

    def of_steady(self, step: ExecuteModel, counts: Int32s) -> Drafts:
        """Return the drafts of a step whose rows had as many in their last step. counts [B]: those
        of each scheduled slot. Raises InvalidStepError."""
        if not step.draft_token_ids:
            return Drafts(counts, None)
        return Drafts(counts, self._read_tokens(step, int(counts.sum())))

    def _check_served(self, step: ExecuteModel) -> None:
        if not step.num_drafts:
            raise invalid("draft_token_ids", "no num_drafts", "say which slots these are drafts of")
        value = f"{len(step.num_drafts)} bytes"
        if not self._limits.max_drafts:
            fix = "none: load the model with speculative.method and num_speculative_tokens"
            raise invalid("num_drafts", value, fix)
        if self._limits.keeps_state:
            fix = "none: layers of this model keep a state per request, which cannot be taken back"
            raise invalid("num_drafts", value, fix)
        if step.num_samples:
            raise invalid("num_samples", "with num_drafts", "give one of them in a step")

    def _read_tokens(self, step: ExecuteModel, count: int) -> Int32s | None:
        """Read the drafts that a message brings; None if it brings none."""
        field, raw = "draft_token_ids", step.draft_token_ids
        if not raw:
            return None
        token_ids: Int32s = read_column(field, raw, INT32)
        if token_ids.size != count:
            raise invalid(field, f"{token_ids.size} values", f"{count}, as num_drafts says")
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < -1 or high >= self._limits.vocab_size:
            fix = f"token ids from 0 to {self._limits.vocab_size - 1}, or -1 for the device's draft"
            raise invalid(field, f"{low}..{high}", fix)
        if low < 0 and not self._limits.makes_drafts:
            raise invalid(field, low, "token ids: this daemon makes no drafts")
        return token_ids

    def check(self, drafts: Int32s, slots: Int64s, samples: Bools, step: ExecuteModel) -> None:
        """Check that the slots with drafts [B] may have some. samples [B]: True for slots that
        sample. Raises InvalidStepError."""
        idle = np.flatnonzero((drafts > 0) & ~samples)
        if idle.size:
            fix = f"name slots that sample in this step: {slots[samples].tolist()[:8]}"
            raise invalid("num_drafts", int(slots[idle[0]]), fix)
        if self._may_refuse(slots, step):
            fix = "no drafts in a step with a request whose feature refuses tokens"
            raise invalid("num_drafts", slots[drafts > 0].tolist()[:8], fix)

    def _may_refuse(self, slots: Int64s, step: ExecuteModel) -> bool:
        """Return True if a part may refuse tokens of these rows or of a new request in one."""
        parts = self._parts
        new = [r.slot for r in step.scheduled_new_reqs if parts.may_refuse(r.extensions)]
        return bool(np.isin(new, slots).any()) or parts.any_may_refuse(parts.used_by(slots))

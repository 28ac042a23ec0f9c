"""The request rows: what every rank knows of every request, and the one judge of whether a step is
valid.

A row is a slot of the wire. A step is checked whole before any of it is applied, by its bytes and
by these rows alone, so that all ranks accept or refuse alike: step_columns.py reads it against the
rows' counts (row_counts.py), decode_run.py is the short way of a batch that only goes on. Host
memory is the source of truth; device copies are input_batch.py's business.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from rpc_schema.codec import Frame
from rpc_schema.extensions import RequestExtension
from rpc_schema.step import ExecuteModel, NewRequestData
from worker_daemon.errors import InvalidStepError, PrecededByError
from worker_daemon.runner.decode_run import DecodeRun
from worker_daemon.runner.parts.step_parts import StepParts
from worker_daemon.runner.row_counts import (
    EXACT,
    FREE_ROW_BLOCKS,
    NOT_SAMPLED,
    RowCounts,
    StepRecord,
)
from worker_daemon.runner.scheduled_step import (
    NO_UPDATES,
    NOTHING_BROUGHT,
    BlockUpdates,
    Bools,
    Int32s,
    Int64s,
    ScheduledStep,
    StepLimits,
    invalid,
    places_behind,
)
from worker_daemon.runner.step_columns import Batch, BatchReader, BlockReader, change_requests

MAX_UNSAMPLED_STEPS = 16
"""Steps whose sampling may be deferred at a time: each keeps its hidden states on the device."""

_NO_TOKENS = np.zeros(0, np.int32)


class _Verdict(NamedTuple):
    """A valid step, and what it makes of the rows."""

    scheduled: ScheduledStep
    batch: Batch
    counts: RowCounts
    """With the step's requests and blocks, without its tokens."""
    capacity: Int32s
    """[B] tokens that each row has room for."""
    new_tokens: Int32s
    """Of its new requests."""


class RequestState:
    """All rows of one rank. Owned by the model runner, used on the step thread only, but for
    num_held_blocks."""

    def __init__(self, limits: StepLimits, parts: StepParts) -> None:
        num_rows = limits.max_num_seqs + 1
        self.limits = limits
        self.parts = parts
        """The optional features; they judge what requests and steps have of them."""
        self.known_tokens: list[Int32s] = [_NO_TOKENS] * num_rows
        """Of each row, the tokens that came with its admission."""
        self.num_known_tokens = np.zeros(num_rows, np.int32)
        """Of each row, how many of its tokens came with its admission; later ones were sampled."""
        self.num_prompt_tokens = np.zeros(num_rows, np.int32)
        self.generation = np.zeros(num_rows, np.int64)
        """Of each row, how often it was admitted: tells a request from its slot's former ones."""
        self.req_ids = [""] * num_rows
        """Of each row, the request's id, and below the features that it uses and what its
        scheduler noted with it."""
        self.extensions: list[tuple[RequestExtension, ...]] = [()] * num_rows
        self.notes = [b""] * num_rows
        self._counts = RowCounts.of_free_rows(num_rows, limits.num_groups)
        self._run: DecodeRun | None = None
        """Where the last step was a decode that may go on."""
        self._deferred: dict[int, tuple[Int64s, Int64s]] = {}
        """Slots and generations that each step with deferred sampling is to sample."""
        self._record = StepRecord(limits.block_groups)
        self._batches = BatchReader(limits)
        self._blocks = BlockReader(limits)
        self._block_sizes = _block_sizes(limits)

    @property
    def spare_slot(self) -> int:
        """A row that no request ever has; its block table is the null block's."""
        return self.limits.max_num_seqs

    @property
    def counts(self) -> RowCounts:
        """How far the rows are, with what a run has kept to itself."""
        if self._run is not None:
            self._run.write(self._counts)
        return self._counts

    def num_held_blocks(self) -> int:
        """Return how many blocks the rows have, one that several share counted for each, and those
        behind a window not. Any thread may ask: it sees some moment of a step."""
        num_blocks, run = self._counts.blocks_by_group.copy(), self._run
        num_computed = self._counts.num_computed.copy()
        if run is not None:
            num_computed[run.batch.rows] = run.last.ends
        num_held = 0
        for own, group in zip(num_blocks, self.limits.block_groups, strict=True):
            held = own - np.minimum(places_behind(num_computed, group), own)
            num_held += int(held[own < FREE_ROW_BLOCKS].sum())
        return num_held

    @property
    def has_failed(self) -> bool:
        """A step failed, and no resynchronisation has come since."""
        return self._record.failed_seq is not None

    def are_current(self, slots: Int64s, generations: Int64s) -> Bools:
        """Return for each slot [R] whether it still holds the request that it held in that
        generation."""
        current: Bools = self._counts.live[slots] & (self.generation[slots] == generations)
        return current

    def drop_all(self) -> None:
        """Free every row, and forget a failure: a new driver, or a new purpose, begins."""
        self._counts.clear(slice(None))
        self._run = None
        self._deferred.clear()
        self._record.restart()

    def mark_failed(self, seq: int) -> None:
        """A step failed after it was accepted: those behind it fail too, until a
        resynchronisation."""
        self._record.fail(seq)

    def raise_if_failed(self) -> None:
        """Raises PrecededByError while an earlier step's failure stands."""
        if self._record.failed_seq is not None:
            raise PrecededByError(
                f"step {self._record.failed_seq} failed before this one",
                fix="send the next step with resync",
            )

    def take_back(self, has_ended_well: Callable[[int, int], bool]) -> BlockUpdates:
        """Undo what failed steps, and all from the first one that is not known to have ended well
        (by epoch and seq) on, did to rows that are still there: what they computed is not counted,
        what they appended is not theirs. Their tokens, and requests that ended, stay as they are.

        Return blocks of rows that came with the first of these steps and with KV: theirs still, but
        the step may not have written them to the device.

        A failure stands, as before, until a resynchronisation.
        """
        kept = self._record.take_back(self.counts, has_ended_well)
        self._run = None
        return kept

    def apply(self, step: ExecuteModel, arrays: Sequence[Frame]) -> ScheduledStep:
        """Check a step whole, then apply it to the rows.

        Raises:
            InvalidStepError: some value is out of range or disagrees with the rows. Nothing is
            applied, but the steps behind it fail as after any failed step.
        """
        run, scheduled = self._run, None
        try:
            if run is not None and run.is_continued_by(step, arrays):
                scheduled = self._go_on(run, step)
            if scheduled is None:
                scheduled = self._accept(step, self._judge(step, arrays))
        except InvalidStepError:
            self._record.fail(step.seq)
            raise
        self._record.add(step.epoch, scheduled)
        return scheduled

    def _go_on(self, run: DecodeRun, step: ExecuteModel) -> ScheduledStep | None:
        updates = self._blocks.updates(step, self._counts)
        self._counts.append(updates)
        scheduled = run.advance(step.seq, updates, self._counts)
        if scheduled is None:
            self._counts.remove(updates)
        return scheduled

    def _judge(self, step: ExecuteModel, arrays: Sequence[Frame]) -> _Verdict:
        """Check a step whole. Rows stay as they are: what becomes of requests is noted in a copy of
        their counts, blocks that are appended to them go again with a refusal."""
        counts, tokens = self.counts, _NO_TOKENS
        num_own = 1 if step.scheduled_new_reqs else 0
        changes_rows = step.finished or step.corrections or step.scheduled_new_reqs
        if changes_rows or step.resync is not None:
            counts, own = counts.copy(), arrays[:num_own]
            known = self.num_known_tokens
            tokens = change_requests(step, own, counts, known, self.limits, self.parts)
        brought = self.parts.judge_step(step.extensions, arrays[num_own:], self.limits)
        updates = self._blocks.updates(step, counts)
        waiting = {} if step.resync is not None else self._deferred
        if step.defer_sampling and len(waiting) == MAX_UNSAMPLED_STEPS:
            raise invalid("defer_sampling", True, f"sample step {min(waiting)} first")
        batch = self._batches.batch(step)
        slots, rows = batch.slots, batch.rows
        if self._deferred:
            counts.check_sampled(slots)
        num_tokens = self._batches.num_tokens(step, batch)
        counts.append(updates)
        starts, known = counts.num_computed[rows].copy(), counts.num_tokens[rows]
        ends = starts + num_tokens
        room = counts.capacity(rows, self._block_sizes)
        capacity = np.minimum(room, self.limits.max_model_len)
        beyond = ends > np.minimum(known, capacity)
        if np.count_nonzero(beyond):
            counts.remove(updates)
            counts.check_live("scheduled", slots)
            at = int(beyond.argmax())
            raise invalid(
                "num_scheduled_tokens",
                f"slot {int(slots[at])}: {int(num_tokens[at])}",
                f"it has {starts[at]} of {known[at]} tokens computed, "
                f"blocks for {capacity[at]}, and max_model_len is {self.limits.max_model_len}",
            )
        scheduled = ScheduledStep(
            seq=step.seq,
            slots=slots,
            num_tokens=num_tokens,
            starts=starts,
            ends=ends,
            total_num_tokens=step.total_num_scheduled_tokens,
            longest=int(ends.max()) if ends.size else 0,
            samples=ends == known,
            new_requests=step.scheduled_new_reqs,
            block_updates=updates,
            defer_sampling=step.defer_sampling,
            brought=brought,
            corrections=self._corrections(counts, rows),
        )
        return _Verdict(scheduled, batch, counts, capacity, tokens)

    def _corrections(self, counts: RowCounts, rows: slice | Int64s) -> Int32s | None:
        """As ScheduledStep has them, of these rows."""
        if not self.parts.refusing:
            return None
        corrected = counts.corrected[rows]
        if not corrected.size or int(corrected.max()) == EXACT:
            return None
        return np.maximum(corrected, NOT_SAMPLED)

    def _accept(self, step: ExecuteModel, verdict: _Verdict) -> ScheduledStep:
        """Apply a step that was checked."""
        scheduled, batch, counts, capacity, tokens = verdict
        self._counts = counts
        self._remember(scheduled.new_requests, tokens)
        if step.resync is not None:
            self._record.restart()
            self._deferred.clear()
        samples = scheduled.samples
        counts.num_computed[batch.rows] = scheduled.ends
        counts.num_tokens[batch.rows] += samples
        self._run = None
        if scheduled.corrections is not None:
            first = batch.slots[samples & (counts.corrected[batch.rows] == NOT_SAMPLED)]
            counts.corrected[first] = 0
        if step.defer_sampling:
            sampling = batch.slots[samples]
            counts.unsampled[sampling] = True
            self._deferred[step.seq] = (sampling, self.generation[sampling])
        elif (
            samples.size
            and np.count_nonzero(samples) == samples.size
            and scheduled.corrections is None
        ):
            max_model_len = self.limits.max_model_len
            self._run = DecodeRun(batch, scheduled, capacity, self._block_sizes, max_model_len)
        return scheduled

    def _remember(self, requests: Sequence[NewRequestData], tokens: Int32s) -> None:
        first = 0
        for request in requests:
            self.known_tokens[request.slot] = tokens[first : first + request.num_tokens].copy()
            self.num_known_tokens[request.slot] = request.num_tokens
            self.num_prompt_tokens[request.slot] = request.num_prompt_tokens
            self.req_ids[request.slot] = request.req_id
            self.extensions[request.slot] = request.extensions
            self.notes[request.slot] = request.note
            self.generation[request.slot] += 1
            first += request.num_tokens

    def take_unsampled(self, step_seq: int) -> None:
        """Note that a deferred step is sampled now.

        Raises:
            InvalidStepError: that step did not defer its sampling, or was sampled already.
        """
        if step_seq not in self._deferred:
            raise invalid("step_seq", step_seq, f"one of {sorted(self._deferred)}")
        slots, generations = self._deferred.pop(step_seq)
        self._counts.unsampled[slots[self.are_current(slots, generations)]] = False

    def dummy_step(self, seq: int) -> ScheduledStep:
        """Return a step of one token on the spare row, which writes to the null block and samples
        nothing."""
        slots, samples = np.array([self.spare_slot], np.int64), np.zeros(1, np.bool_)
        zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
        # By position, in the order of the fields.
        return ScheduledStep(
            seq, slots, one, zero, one, 1, 1, samples, (), NO_UPDATES, False, NOTHING_BROUGHT
        )


def _block_sizes(limits: StepLimits) -> Int32s:
    """What RowCounts.capacity takes: numpy multiplies by arrays faster than by its scalars and
    Python's."""
    if limits.num_groups == 1:
        return np.array(limits.block_groups[0].block_size, np.int32)
    return np.array([[group.block_size] for group in limits.block_groups], np.int32)

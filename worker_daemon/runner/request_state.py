"""The request rows: the state of every request on every rank, and the last steps, so that they can
be rolled back.

A row is a slot of the wire. A whole step is checked before any of it is applied. The check uses
only its bytes and these rows, so that all ranks accept or refuse alike. step_checker.py checks it
against the rows' counts (row_counts.py); a step that continues a steady batch (steady_batch.py)
takes a shorter path. Host memory is the source of truth; input_batch.py makes the device copies.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from rpc_schema.codec import Frame
from rpc_schema.errors import InvalidStepError, PrecededByError
from rpc_schema.extensions import RequestExtension
from rpc_schema.kv_cache import BlockGroup
from rpc_schema.step import ExecuteModel, NewRequestData
from worker_daemon.contracts.arrays import Bools, Int32s, Int64s
from worker_daemon.runner.block_contents import LAST_STEP, BlockContents
from worker_daemon.runner.draft_gaps import DraftGaps
from worker_daemon.runner.parts.step_parts import StepParts
from worker_daemon.runner.replica_counts import ReplicaCounts
from worker_daemon.runner.row_counts import FREE_ROW_BLOCKS, RowCounts
from worker_daemon.runner.scheduled_step import (
    NO_STEP_VALUES,
    NO_UPDATES,
    BlockUpdates,
    ScheduledStep,
    StepExtensions,
    StepLimits,
    TokensOfReplicas,
    blocks_before_window,
    invalid,
)
from worker_daemon.runner.slot_bitmap import read_bitmap, slot_bitmap
from worker_daemon.runner.steady_batch import NOT_SAMPLED, SteadyBatch
from worker_daemon.runner.step_checker import Batch, CheckedStep, StepChecker
from worker_daemon.runner.step_columns import INT32, read_column

MAX_TAKEN_BACK = 64
"""Number of steps that can be rolled back: more than a driver may have in flight."""
_NO_TOKENS = np.zeros(0, np.int32)


class RequestState:
    """All rows of one rank. Owned by the model runner, used on the step thread only, except
    num_requests, num_held_blocks and uploads_in_use."""

    def __init__(
        self, limits: StepLimits, parts: StepParts, lockstep: ReplicaCounts | None = None
    ) -> None:
        """lockstep: checks what steps say of all replicas, if these take each step together."""
        num_rows = limits.max_num_seqs + 1
        self.limits = limits
        self.parts = parts
        """The optional features; they check the extensions of requests and steps."""
        self.known_tokens: list[Int32s] = [_NO_TOKENS] * num_rows
        """For each row, the tokens that came with its admission."""
        self.num_known_tokens = np.zeros(num_rows, np.int32)
        """For each row, the number of tokens that came with its admission; later ones were
        sampled."""
        self.num_prompt_tokens = np.zeros(num_rows, np.int32)
        self.generation = np.zeros(num_rows, np.int64)
        """For each row, the number of admissions so far; distinguishes a request from earlier ones
        of its slot."""
        self.req_ids = [""] * num_rows
        """For each row, the request's id."""
        self.extensions: list[tuple[RequestExtension, ...]] = [()] * num_rows
        """For each row, the request's extensions."""
        self.notes = [b""] * num_rows
        """For each row, the note that the request's scheduler attached."""
        self._counts = RowCounts.of_free_rows(num_rows, limits.num_groups)
        self._steady: dict[bytes, SteadyBatch] = {}
        """Steady batches that may continue, by bitmap; no row is in two of them. There is one, or
        one for each micro-batch of a pipeline. Replaced, never changed: any thread may read it."""
        self._deferred: dict[int, Int64s] = {}
        """Slots that each step has still to sample, by seq. Its requests may have ended since."""
        self._generations: dict[int, Int64s] = {}
        """For each step in _deferred, the generations of its slots."""
        self._deferred_drafts: dict[int, Int32s] = {}
        """For each step in _deferred with drafts, those of its slots."""
        self._record = StepRecord(limits.block_groups)
        self._checker = StepChecker(limits, parts)
        self._lockstep = lockstep
        self.computes_nothing = False
        """True if steps are run that no driver has sent: see the method computing_nothing."""
        self.contents = BlockContents(limits.num_blocks)
        """Outlives the rows: blocks keep their contents."""
        self.host_contents = BlockContents(limits.num_host_blocks)
        self.draft_gaps = DraftGaps(limits.num_blocks, limits.num_host_blocks)
        """Those of the host tier's slots; they outlive the KV cache's too. Only the step thread
        notes any."""

    @property
    def spare_slot(self) -> int:
        """A row that no request uses; its block table holds only the null block."""
        return self.limits.max_num_seqs

    @property
    def counts(self) -> RowCounts:
        """Counts of all rows, those of steady batches included."""
        for batch in self._steady.values():
            self._counts.write(batch)
        return self._counts

    @property
    def tokens_of_replicas(self) -> TokensOfReplicas | None:
        """The tokens of each replica in the last step, accepted or refused; None if it did not say
        them, as a synthetic one, or if there is one replica."""
        return None if self._lockstep is None else self._lockstep.tokens

    @property
    def replicas(self) -> ReplicaCounts | None:
        """This rank's place among replicas in lockstep; None if there is one replica."""
        return self._lockstep

    def num_requests(self) -> int:
        """Return the number of rows with a request. Any thread may call it."""
        return int(np.count_nonzero(self._counts.live))

    def num_held_blocks(self) -> int:
        """Return the number of blocks of all rows. A shared block counts once per row, blocks
        behind a window do not count. Any thread may call it; it may see a step half applied."""
        num_blocks, steady = self._counts.blocks_by_group.copy(), self._steady
        num_computed = self._counts.num_computed.copy()
        for batch in steady.values():
            num_computed[batch.rows] = batch.ends
        num_held = 0
        for own, group in zip(num_blocks, self.limits.block_groups, strict=True):
            held = own - np.minimum(blocks_before_window(num_computed, group), own)
            num_held += int(held[own < FREE_ROW_BLOCKS].sum())
        return num_held

    def uploads_in_use(self) -> frozenset[bytes]:
        """Return the hashes of the uploads that the rows' requests use. Any thread may call it,
        like num_held_blocks."""
        live = np.flatnonzero(self._counts.live.copy()).tolist()
        return frozenset(
            name for slot in live for each in self.extensions[slot] for name in each.uploads
        )

    @property
    def has_failed(self) -> bool:
        """True if a step failed and no resynchronization has followed."""
        return self._record.failed_seq is not None

    @property
    def last_step(self) -> ScheduledStep | None:
        """The last accepted step; None since the rows were dropped."""
        return self._record.newest

    @property
    def newest_epoch(self) -> int:
        """The epoch of the last accepted step; 0 since the rows were dropped."""
        return self._record.newest_epoch

    def are_current(self, slots: Int64s, generations: Int64s) -> Bools:
        """Return [R]: True where a slot still holds the request of that generation."""
        current: Bools = self._counts.live[slots] & (self.generation[slots] == generations)
        return current

    def drop_all(self) -> None:
        """Free every row, and forget a failure: before a new driver, or another use of the rows.
        All steps that were accepted have run."""
        if not self.has_failed:
            self.host_contents.end_epoch(LAST_STEP)
        self._counts.clear(slice(None))
        self._steady = {}
        self._deferred.clear()
        self._generations.clear()
        self._deferred_drafts.clear()
        self._record.restart()

    def mark_failed(self, seq: int) -> None:
        """Record that an accepted step failed: later steps fail too, until a resynchronization."""
        if self.has_failed:
            self.contents.forget()
        else:
            self.contents.fail(seq)
        self._record.fail(seq)
        self._drop_failed_stores()

    def raise_if_failed(self) -> None:
        """Raise PrecededByError if an earlier step failed and no resynchronization has followed. To
        be called after each step: one that ran may have found a block table to which the failed
        step's changes are missing, and written to any block."""
        if self._record.failed_seq is not None:
            self.contents.forget()
            self._drop_failed_stores()
            self.check_failure()

    def _drop_failed_stores(self) -> None:
        """Forget what the failed step and those after it have stored in the host tier: what they
        stored may never have been computed."""
        if self._record.failed_seq is not None:
            self.host_contents.fail(self._record.failed_seq)

    def check_failure(self) -> None:
        """Raise PrecededByError if a step failed and no resynchronization has followed."""
        if self._record.failed_seq is not None:
            raise PrecededByError(
                f"step {self._record.failed_seq} failed before this one",
                fix="send the next step with resync",
            )

    @contextmanager
    def computing_nothing(self) -> Iterator[None]:
        """Accept steps that no request could have, in the block: their results are not used. Of a
        model with states, requests may begin anywhere. Nothing is said of other replicas."""
        before, self._checker.checks_states = self._checker.checks_states, False
        lockstep, self._lockstep = self._lockstep, None
        self.computes_nothing = True
        try:
            yield
        finally:
            self.computes_nothing = False
            self._checker.checks_states, self._lockstep = before, lockstep

    @contextmanager
    def knowing(self, tokens: Mapping[int, Int32s]) -> Iterator[None]:
        """Let rows take all of these tokens from the host in the block, by slot: those of their
        admission and those that they have sampled."""
        before = {slot: self.known_tokens[slot] for slot in tokens}
        self._know(tokens)
        try:
            yield
        finally:
            self._know(before)

    def _know(self, tokens: Mapping[int, Int32s]) -> None:
        for slot, own in tokens.items():
            self.known_tokens[slot] = own
            self.num_known_tokens[slot] = own.size

    def give_up_kv(self, rows: Mapping[int, int]) -> None:
        """Keep no computed tokens of rows, by slot and generation; their requests stay."""
        slots = np.array([*rows], np.int64)
        own = slots[self.are_current(slots, np.array([*rows.values()], np.int64))]
        if own.size:
            counts = self.counts
            self._steady = {}
            counts.num_computed[own] = 0
            counts.blocks_by_group[:, own] = 0

    def last_good_seq(self, has_ended_well: Callable[[int, int], bool]) -> int:
        """Return the last of the recorded steps up to which all are known to have succeeded (by
        epoch and seq); 0 if there is none."""
        return self._record.last_good_seq(has_ended_well)

    def have_all_ended_well(self, epoch: int, has_ended_well: Callable[[int, int], bool]) -> bool:
        """Return True if all recorded steps of an epoch are known to have succeeded."""
        return self._record.have_all_ended_well(epoch, has_ended_well)

    def take_back(self, has_ended_well: Callable[[int, int], bool]) -> BlockUpdates:
        """Roll back failed steps, and all steps from the first one that is not known to have
        succeeded (by epoch and seq). In rows that still exist, tokens that these steps computed no
        longer count, and blocks that they appended are removed. Sampled tokens, and requests that
        ended, stay as they are.

        Return the blocks of rows that the first of these steps admitted with KV. The rows keep
        them, but the step may not have written them to the device's block table.

        A recorded failure stays until a resynchronization.
        """
        kept = self._record.take_back(self.counts, has_ended_well)
        self._steady = {}
        return kept

    def apply(self, step: ExecuteModel, arrays: Sequence[Frame]) -> ScheduledStep:
        """Check a whole step, then apply it to the rows.

        Raises:
            InvalidStepError: a value is out of range or contradicts the rows. Nothing is applied,
                but later steps fail as after any failed step.
        """
        try:
            if self._lockstep is not None:
                self._lockstep.check(step)
            elif step.replica_counts:
                size, fix = f"{len(step.replica_counts)} bytes", "empty: there is one replica"
                raise invalid("replica_counts", size, fix)
            scheduled = self._go_on(step, arrays)
            if scheduled is None:
                known, deferred = self.num_known_tokens, self._deferred
                checked = self._checker.check(step, arrays, self.counts, known, deferred)
                scheduled = self._accept(step, checked)
        except InvalidStepError:
            self.mark_failed(step.seq)
            raise
        self._record.add(step.epoch, scheduled)
        return scheduled

    def _go_on(self, step: ExecuteModel, arrays: Sequence[Frame]) -> ScheduledStep | None:
        """Apply a step of a steady batch: it gives each row its next token, with as many drafts as
        in the step before, appends blocks, and says which drafts of earlier steps were refused. For
        any other step do nothing, and return None: then the whole step is checked, and refused if
        it has a fault. Faults in blocks or draft_token_ids alone are raised here."""
        batch = self._steady.get(step.scheduled)
        if (
            batch is None
            or step.total_num_scheduled_tokens != batch.total_num_tokens
            or step.num_scheduled_tokens != batch.num_scheduled_tokens
            or step.num_drafts != batch.num_drafts
            or step.finished
            or step.scheduled_new_reqs
            or step.extensions
            or step.deferred is not None
            or step.resync is not None
            or step.num_samples
            or arrays
        ):
            return None
        noted, updates, capacity, drafts = None, NO_UPDATES, None, None
        corrections, starts = batch.bounds, batch.ends
        if step.corrections or step.settled:
            noted = batch.read_notes(step.corrections, step.settled)
            if noted is None:
                return None
            corrections, starts = noted.corrections, noted.ends
        if step.new_block_slots or step.new_block_ids or step.new_block_groups:
            updates = self._checker.blocks.updates(step, self._counts)
        if batch.drafts is not None:
            drafts = self._checker.drafts.of_steady(step, batch.drafts)
        elif step.draft_token_ids:
            return None
        if updates is not NO_UPDATES:
            self._counts.append(updates)
            capacity = self._counts.capacity(batch.rows, self._checker.block_sizes)
        if not batch.advance(capacity, noted):
            self._counts.remove(updates)
            return None
        if capacity is not None:
            self.contents.write(updates.block_ids, step.seq)
        # By position, in the order of the fields: keyword arguments would cost as much as the
        # checks above.
        return ScheduledStep(
            step.seq, batch.slots, batch.num_tokens, starts, batch.ends, batch.total_num_tokens,
            batch.longest, batch.num_tokens, (), updates, None, NO_STEP_VALUES, corrections, batch,
            None, drafts is not None, drafts, step.skip_drafts,
        )  # fmt: skip

    def _accept(self, step: ExecuteModel, checked: CheckedStep) -> ScheduledStep:
        """Apply a checked step."""
        scheduled, batch, counts, capacity, tokens = checked
        self._counts = counts
        self._remember(scheduled.new_requests, tokens)
        if step.resync is not None:
            self._record.restart()
            self._deferred.clear()
            self._generations.clear()
            self._deferred_drafts.clear()
        if scheduled.block_updates.rows.size:
            self._note_written(scheduled)
        samples = scheduled.num_samples > 0
        counts.num_computed[batch.rows] = scheduled.ends
        counts.num_tokens[batch.rows] += samples  # of several, only the last is a new token
        if scheduled.drafts is not None:
            counts.num_tokens[batch.rows] += scheduled.drafts.counts
        if scheduled.corrections is not None:
            first = batch.slots[samples & (counts.corrected[batch.rows] == NOT_SAMPLED)]
            counts.corrected[first] = 0
        if scheduled.deferred is not None:
            later = batch.slots[scheduled.deferred]
            counts.unsampled[later] = True
            self._deferred[step.seq], self._generations[step.seq] = later, self.generation[later]
            if scheduled.drafts is not None:
                self._deferred_drafts[step.seq] = scheduled.drafts.counts[scheduled.deferred]
        steady = self._steady_batch(step, scheduled, batch, capacity)
        still = self._surviving_steady_batches(step)
        if steady is not None:
            still[step.scheduled] = steady
            scheduled = scheduled._replace(steady=steady)
        self._steady = still
        return scheduled

    def _note_written(self, step: ScheduledStep) -> None:
        """Record the blocks that a step gives to requests, without those that are full of a new
        request's computed tokens: it only reads these. Called before the step's tokens count."""
        rows, indices, block_ids = step.block_updates
        if any(request.num_computed_tokens for request in step.new_requests):
            groups, slots = np.divmod(rows, self._counts.live.size)
            sizes = self._checker.block_sizes.reshape(-1)[groups]
            block_ids = block_ids[indices >= self._counts.num_computed[slots] // sizes]
        self.contents.write(block_ids, step.seq)

    def _steady_batch(
        self, message: ExecuteModel, step: ScheduledStep, batch: Batch, capacity: Int32s
    ) -> SteadyBatch | None:
        """Return the steady batch that begins with an applied step; None unless each row has its
        last token, which was sampled before, and samples after it and after each draft."""
        slots, rows, num_tokens = batch.slots, batch.rows, step.num_tokens
        if (
            not slots.size
            or message.num_samples
            or step.deferred is not None
            or step.new_requests
            or np.count_nonzero(step.num_samples != num_tokens)
        ):
            return None
        known, used = self.num_known_tokens[slots], self.parts.used_by(slots)
        if np.count_nonzero(step.starts < known) or self.parts.any_may_refuse(used):
            return None
        corrected = None if step.corrections is None else self._counts.corrected[rows].copy()
        most = int(num_tokens.max())
        return SteadyBatch(
            bitmap=batch.bitmap,
            num_scheduled_tokens=message.num_scheduled_tokens,
            num_drafts=message.num_drafts,
            reply_bitmap=slot_bitmap(slots),
            slots=slots,
            rows=rows,
            generations=self.generation[slots],
            num_tokens=num_tokens,
            total_num_tokens=step.total_num_tokens,
            growth=most if most * slots.size == step.total_num_tokens else 0,
            drafts=None if step.drafts is None else step.drafts.counts,
            num_known_tokens=known,
            used=used,
            max_model_len=self.limits.max_model_len,
            ends=step.ends,
            longest=step.longest,
            capacity=capacity,
            corrected=corrected,
            bounds=None if corrected is None else np.maximum(corrected, NOT_SAMPLED),
        )

    def _surviving_steady_batches(self, step: ExecuteModel) -> dict[bytes, SteadyBatch]:
        """Return the steady batches that a checked step does not touch: those with none of the rows
        that it schedules or corrects, unless it starts or ends requests."""
        changes_rows = step.finished or step.scheduled_new_reqs or step.resync is not None
        if not self._steady or changes_rows:
            return {}
        rows = int.from_bytes(step.scheduled, "little")
        for slot in read_column("corrections", step.corrections, INT32)[::2].tolist():
            rows |= 1 << slot
        return {
            bitmap: batch
            for bitmap, batch in self._steady.items()
            if not rows & int.from_bytes(bitmap, "little")
        }

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

    def take_unsampled(
        self, step_seq: int, named: bytes | None, step_values: StepExtensions = NO_STEP_VALUES
    ) -> tuple[Int64s, Int64s]:
        """Note that slots that a step has deferred are sampled now: those that a bitmap names, or
        all that are left. Return those of them that still hold their request, and the slots that
        are left. step_values: those of the message.

        Raises:
            InvalidStepError: the step has deferred none, or not these, or they were sampled; or the
                values do not fit their drafts.
        """
        if step_seq not in self._deferred:
            raise invalid("step_seq", step_seq, f"one of {sorted(self._deferred)}")
        slots, generations = self._deferred[step_seq], self._generations[step_seq]
        now = np.ones(slots.size, np.bool_)
        if named is not None:
            wanted = read_bitmap(named)
            now = np.isin(slots, wanted)
            if not 0 < np.count_nonzero(now) == wanted.size:
                fix = f"some of {slots.tolist()[:8]}, which step {step_seq} has still to sample"
                raise invalid("slots", wanted.tolist()[:8], fix)
        drafts = self._deferred_drafts.get(step_seq)
        if drafts is not None:
            self.parts.check_drafts(step_values, slots[now], drafts[now])
            self._deferred_drafts[step_seq] = drafts[~now]
        taken = slots[now & self.are_current(slots, generations)]
        self._counts.unsampled[taken] = False
        self._deferred[step_seq], self._generations[step_seq] = slots[~now], generations[~now]
        if now.all():
            del self._deferred[step_seq], self._generations[step_seq]
            self._deferred_drafts.pop(step_seq, None)
        return taken, slots[~now]

    def dummy_step(self, seq: int) -> ScheduledStep:
        """Return a step of one token of padding on the spare row, which may write to the null block
        and samples nothing."""
        slots = np.array([self.spare_slot], np.int64)
        zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
        # By position, in the order of the fields.
        return ScheduledStep(
            seq, slots, one, zero, one, 1, 1, zero, (), NO_UPDATES, None, NO_STEP_VALUES
        )


class StepRecord:
    """Steps since the last full resynchronization. Owned by RequestState."""

    def __init__(self, groups: Sequence[BlockGroup]) -> None:
        self._groups = groups
        self.failed_seq: int | None = None
        """Seq of the first step that failed since then."""
        self._num_before = 0
        """Number of steps accepted before that one; meaningless without a failure."""
        self._num_accepted = 0
        """Number of accepted steps, over all epochs."""
        self._steps: deque[tuple[int, ScheduledStep]] = deque(maxlen=MAX_TAKEN_BACK)
        """The newest steps, with their epochs."""

    @property
    def newest(self) -> ScheduledStep | None:
        """The newest step."""
        return self._steps[-1][1] if self._steps else None

    @property
    def newest_epoch(self) -> int:
        """See RequestState.newest_epoch."""
        return self._steps[-1][0] if self._steps else 0

    def add(self, epoch: int, step: ScheduledStep) -> None:
        """Record an accepted step."""
        self._num_accepted += 1
        self._steps.append((epoch, step))

    def fail(self, seq: int) -> None:
        """Record a failure of the newest step, or of an operation after it, unless one is recorded
        already."""
        if self.failed_seq is None:
            self.failed_seq = seq
            is_newest = bool(self._steps) and self._steps[-1][1].seq == seq
            self._num_before = self._num_accepted - is_newest

    def have_all_ended_well(self, epoch: int, has_ended_well: Callable[[int, int], bool]) -> bool:
        """See RequestState.have_all_ended_well."""
        return all(has_ended_well(own, step.seq) for own, step in self._steps if own == epoch)

    def last_good_seq(self, has_ended_well: Callable[[int, int], bool]) -> int:
        """See RequestState.last_good_seq."""
        last = 0
        for epoch, step in self._steps:
            if not has_ended_well(epoch, step.seq):
                break
            last = step.seq
        return last

    def restart(self) -> None:
        """Forget all steps, and the failure."""
        self.failed_seq = None
        self._steps.clear()

    def take_back(
        self, counts: RowCounts, has_ended_well: Callable[[int, int], bool]
    ) -> BlockUpdates:
        """Forget all steps, but not the failure; undo the steps from the first one that failed or
        is not known to have succeeded (by epoch and seq). See RequestState.take_back."""
        steps = list(self._steps)
        self._steps.clear()
        most = len(steps)
        if self.failed_seq is not None:
            most -= self._num_accepted - self._num_before
        good = 0
        while good < most and has_ended_well(steps[good][0], steps[good][1].seq):
            good += 1
        undone = [step for _, step in steps[good:]]
        released_to = counts.num_computed.copy()
        if undone:
            released_to[undone[-1].slots] = undone[-1].starts
        # Earlier steps may be forgotten; then the rows' former state is unknown.
        all_unknown = good == 0 and len(steps) == MAX_TAKEN_BACK
        unknown = np.full(counts.live.size, all_unknown)
        for step in reversed(undone):
            counts.num_computed[step.slots] = step.starts
            counts.remove(step.block_updates)
            unknown[_admitted(step)] = True
        counts.num_computed[unknown] = 0
        counts.blocks_by_group[:, unknown] = 0
        kept = NO_UPDATES
        # A refused step is not among these; nothing after it is certain.
        is_first = bool(undone) and (self.failed_seq is None or undone[0].seq <= self.failed_seq)
        if is_first and not all_unknown:
            kept = self._admit_again(undone, counts)
        self._drop_overwritten(counts, released_to)
        counts.clear(~counts.live)
        return kept

    def _drop_overwritten(self, counts: RowCounts, released_to: Int32s) -> None:
        """Give up the KV of rows whose windows cover blocks again that they had left behind before
        the last step: other rows may have taken and overwritten these blocks. released_to: [S + 1],
        each row's position at that time."""
        for group in self._groups:
            released, seen = (
                blocks_before_window(at, group) for at in (released_to, counts.num_computed)
            )
            lost = released > seen
            counts.num_computed[lost] = 0
            counts.blocks_by_group[:, lost] = 0

    def _admit_again(self, undone: Sequence[ScheduledStep], counts: RowCounts) -> BlockUpdates:
        """Restore the KV of rows that the first undone step admitted: successful steps, or an
        earlier driver's, had computed it. Rows that later steps admitted may depend on KV that was
        never computed. Return the restored rows' blocks."""
        computed = np.zeros(counts.live.size, np.int32)
        computed[_admitted(undone[0])] = [r.num_computed_tokens for r in undone[0].new_requests]
        for later in undone[1:]:
            computed[_admitted(later)] = 0
        num_blocks = np.stack([-(-computed // group.block_size) for group in self._groups])
        rows, indices, block_ids = undone[0].block_updates
        theirs = np.flatnonzero(indices < num_blocks.reshape(-1)[rows])
        kept = BlockUpdates(rows[theirs], indices[theirs], block_ids[theirs])
        num_kept = np.bincount(kept.rows, minlength=num_blocks.size).reshape(num_blocks.shape)
        warm = np.flatnonzero((num_kept == num_blocks).all(axis=0) & (computed > 0))
        counts.num_computed[warm] = computed[warm]
        counts.blocks_by_group[:, warm] = num_blocks[:, warm]
        return kept


def _admitted(step: ScheduledStep) -> Int64s:
    return np.array([request.slot for request in step.new_requests], np.int64)

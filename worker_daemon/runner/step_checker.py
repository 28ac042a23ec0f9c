"""Checks a step: reads the message's columns and checks the whole step against the limits and the
rows' counts, before any of it is applied. An invalid step raises InvalidStepError with field, value
and fix. Every rank reaches the same result.

Shapes: B scheduled requests.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from rpc_schema.codec import Frame
from rpc_schema.errors import InvalidStepError
from rpc_schema.kv_cache import NULL_BLOCK, has_checkpoint
from rpc_schema.pooling import MAX_KEPT_BYTES, MAX_POOLED_BYTES, PoolingParams
from rpc_schema.step import ExecuteModel, NewRequestData
from worker_daemon.contracts.arrays import Bools, Int32s, Int64s
from worker_daemon.runner.draft_checks import DraftChecker
from worker_daemon.runner.parts.step_parts import StepParts
from worker_daemon.runner.row_counts import RowCounts
from worker_daemon.runner.scheduled_step import (
    MAX_BLOCK_UPDATES,
    NO_UPDATES,
    BlockUpdates,
    Drafts,
    ScheduledStep,
    StepLimits,
    blocks_before_window,
    invalid,
)
from worker_daemon.runner.slot_bitmap import read_bitmap
from worker_daemon.runner.steady_batch import EXACT, NOT_SAMPLED
from worker_daemon.runner.step_columns import INT32, check_unique, read_column, read_pairs

_UINT8 = np.dtype("u1")
_UINT16 = np.dtype("<u2")

MAX_UNSAMPLED_STEPS = 16
"""Largest number of steps whose sampling is deferred at a time."""

MAX_BLOCK_COLUMNS = 64
"""Number of decoded block-update columns that are cached. Rows that decode together fill their
blocks together, so the same columns recur every block_size steps."""
_FEW = 64
"""Up to this many values, Python's min and max are faster than numpy's."""

_NO_TOKENS = np.zeros(0, np.int32)
_NONE_DEFERRED: Final[Mapping[int, Int64s]] = MappingProxyType({})


def _change_requests(
    step: ExecuteModel,
    arrays: Sequence[Frame],
    counts: RowCounts,
    num_known: Int32s,
    limits: StepLimits,
    parts: StepParts,
    *,
    checks_states: bool,
) -> Int32s:
    """Free, correct and admit rows in the counts, and return the tokens of all new requests, [sum
    of num_tokens]. After a refusal the counts must be discarded. arrays: the frame of these tokens,
    if there is one; num_known: [S + 1], tokens that came with each row's admission. checks_states:
    see StepChecker."""
    if step.finished:
        slots = read_column("finished", step.finished, _UINT16).astype(np.int64)
        counts.check_live("finished", slots)
        check_unique("finished", slots)
        counts.clear(slots)
    if step.resync is not None:
        _free_others(step.resync, counts)
    if step.corrections:
        _correct(step.corrections, counts, num_known)
    tokens = _read_tokens(step.scheduled_new_reqs, arrays, limits.vocab_size)
    for request in step.scheduled_new_reqs:
        _admit(request, counts)
        _check_admitted(request, limits)
        if checks_states:
            _check_state(request, limits, parts)
        parts.check(request, limits)
        if parts.may_refuse(request.extensions):
            counts.corrected[request.slot] = NOT_SAMPLED
        if request.extensions:
            size = parts.output_size(request, limits)
            if size is not None:
                counts.pool(request.slot, size)
    return tokens


def _correct(raw: bytes, counts: RowCounts, num_known: Int32s) -> None:
    """Lower the bounds of rows by a message's corrections."""
    field = "corrections"
    pairs = read_column(field, raw, INT32)
    if pairs.size % 2:
        raise invalid(field, f"{pairs.size} values", "send pairs (slot, tokens)")
    slots, by = pairs.reshape(-1, 2).T
    slots = slots.astype(np.int64)
    if slots.min() < 0:
        raise counts.unknown(field, int(slots.min()))
    counts.check_live(field, slots)
    check_unique(field, slots)
    most = np.where(counts.corrected[slots] < 0, 0, counts.num_tokens[slots] - num_known[slots])
    wrong = np.flatnonzero((by < 1) | (by > most))
    if wrong.size:
        at = int(wrong[0])
        fix = f"use 1 to {most[at]}, the number of tokens that it sampled and may refuse"
        if counts.corrected[slots[at]] == EXACT:
            fix = (
                "leave the slot out: it had no drafts, and no feature of its request refuses tokens"
            )
        raise invalid(field, f"slot {int(slots[at])}: {int(by[at])}", fix)
    counts.lower(slots, by)


def _free_others(resync: bytes, counts: RowCounts) -> None:
    """Free the rows that a resynchronization does not name."""
    values = read_column("resync", resync, INT32)
    held = counts.blocks_by_group
    width = 3 + len(held)
    if values.size % width:
        raise invalid("resync", f"{values.size} values", f"send rows of {width} int32")
    slots, computed, tokens, *blocks = values.reshape(-1, width).T.astype(np.int64)
    if slots.size and slots.min() < 0:
        raise counts.unknown("resync", int(slots.min()))
    counts.check_live("resync", slots)
    check_unique("resync", slots)
    wrong = np.flatnonzero(
        (counts.num_computed[slots] != computed)
        | (counts.num_tokens[slots] != tokens)
        | (held[:, slots] != blocks).any(axis=0)
        | counts.unsampled[slots]
    )
    if wrong.size:
        slot = int(slots[wrong[0]])
        raise invalid(
            "resync",
            f"slot {slot}: {values.reshape(-1, width)[wrong[0], 1:].tolist()}",
            f"this rank has {counts.num_computed[slot]} computed of "
            f"{counts.num_tokens[slot]} tokens, {held[:, slot].tolist()} blocks, "
            f"unsampled {bool(counts.unsampled[slot])}: finish the request and admit it again",
        )
    dropped = counts.live.copy()
    dropped[slots] = False
    counts.clear(dropped)


def _read_tokens(
    requests: Sequence[NewRequestData], arrays: Sequence[Frame], vocab_size: int
) -> Int32s:
    if len(arrays) != (1 if requests else 0):
        fix = "send one frame of tokens with new requests, else none"
        raise invalid("arrays", f"{len(arrays)} frames", fix)
    tokens = read_column("tokens", arrays[0] if arrays else b"", INT32)
    expected = sum(request.num_tokens for request in requests)
    if tokens.size != expected:
        raise invalid("tokens", f"{tokens.size} values", f"the new requests have {expected}")
    if requests:
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= vocab_size:
            raise invalid("tokens", f"{low}..{high}", f"token ids from 0 to {vocab_size - 1}")
    return tokens


def _admit(request: NewRequestData, counts: RowCounts) -> None:
    slot, field = request.slot, f"scheduled_new_reqs[{request.req_id}].slot"
    if slot >= counts.live.size - 1:
        raise counts.unknown(field, slot)
    if counts.live[slot]:
        raise invalid(field, slot, "finish the slot's request first")
    counts.live[slot] = True
    counts.num_computed[slot] = request.num_computed_tokens
    counts.num_tokens[slot] = request.num_tokens
    counts.blocks_by_group[:, slot] = 0


def _check_admitted(request: NewRequestData, limits: StepLimits) -> None:
    """Check a new request's own fields."""
    name = f"scheduled_new_reqs[{request.req_id}]"
    num_tokens, num_computed = request.num_tokens, request.num_computed_tokens
    if not (limits.generates or any(isinstance(e, PoolingParams) for e in request.extensions)):
        fix = f"ask for one of its pooling tasks: {limits.pooling.names}"
        raise invalid(f"{name}.extensions", "no pooling", f"the model has no output layer: {fix}")
    if num_tokens > limits.max_model_len:
        fix = f"max_model_len is {limits.max_model_len}"
        raise invalid(f"{name}.num_tokens", num_tokens, fix)
    if request.num_prompt_tokens > num_tokens:
        fix = f"at most {num_tokens}"
        raise invalid(f"{name}.num_prompt_tokens", request.num_prompt_tokens, fix)
    if num_computed >= num_tokens:
        fix = "leave at least one token to compute"
        raise invalid(f"{name}.num_computed_tokens", num_computed, fix)


def _check_state(request: NewRequestData, limits: StepLimits, parts: StepParts) -> None:
    """Check a new request of a model whose layers keep a state per request: it can be shared at
    borders only, and not be taken back."""
    name, computed = f"scheduled_new_reqs[{request.req_id}]", request.num_computed_tokens
    if computed and not (limits.border_tokens and computed % limits.border_tokens == 0):
        fix = "0"
        if limits.border_tokens:
            fix += f", or a multiple of {limits.border_tokens}, where there are checkpoints"
        fix += ": layers of this model keep a state per request"
        raise invalid(f"{name}.num_computed_tokens", computed, fix)
    if parts.may_refuse(request.extensions):
        fix = "no feature that refuses tokens: layers of this model keep a state per request"
        raise invalid(f"{name}.extensions", [type(e).__name__ for e in request.extensions], fix)


class Batch(NamedTuple):
    """The rows of one bitmap."""

    bitmap: bytes
    slots: Int64s
    """[B] ascending"""
    rows: slice | Int64s
    """The slots as an index: a slice, which is faster, if they are contiguous."""
    one_each: Int32s
    """[B] one token for each."""


class BatchReader:
    """Reads the slots that a step schedules, and their tokens. If the bitmap is the same as in the
    last step, it returns the same arrays."""

    def __init__(self, limits: StepLimits) -> None:
        self._limits = limits
        self._one_each = np.ones(limits.max_num_seqs, np.int32)
        self._last = Batch(b"", np.zeros(0, np.int64), slice(0), self._one_each[:0])

    def batch(self, step: ExecuteModel) -> Batch:
        """Return the scheduled slots."""
        if step.scheduled != self._last.bitmap:
            slots = read_bitmap(step.scheduled)
            highest = self._limits.max_num_seqs - 1
            if slots.size and slots[-1] > highest:
                raise invalid("scheduled", int(slots[-1]), f"slots from 0 to {highest}")
            one_each = self._one_each[: slots.size]
            self._last = Batch(step.scheduled, slots, _as_rows(slots), one_each)
        return self._last

    def num_tokens(self, step: ExecuteModel, batch: Batch) -> Int32s:
        """Return the tokens of each scheduled slot [B]."""
        num_tokens, total = batch.one_each, batch.slots.size
        if step.num_scheduled_tokens:
            num_tokens = self._read_exceptions(step.num_scheduled_tokens, batch.slots)
            total = int(num_tokens.sum(dtype=np.int64))
        field, most = "total_num_scheduled_tokens", self._limits.max_num_batched_tokens
        if total != (named := step.total_num_scheduled_tokens):
            raise invalid(field, named, f"the scheduled slots have {total}")
        if total > most:
            raise invalid(field, total, f"max_num_batched_tokens is {most}")
        return num_tokens

    def _read_exceptions(self, raw: bytes, slots: Int64s) -> Int32s:
        """Return the number of tokens of each slot: one, except for the (slot, tokens) pairs in
        raw."""
        field, most = "num_scheduled_tokens", self._limits.max_model_len
        _, tokens, positions = read_pairs(field, raw, slots)
        low, high = int(tokens.min()), int(tokens.max())
        if low < 1 or high > most:
            wrong = low if low < 1 else high
            raise invalid(field, wrong, f"1 to {most}; leave slots without tokens out")
        num_tokens = np.ones(slots.size, np.int32)
        num_tokens[positions] = tokens
        return num_tokens


def _as_rows(slots: Int64s) -> slice | Int64s:
    if slots.size and int(slots[-1]) - int(slots[0]) + 1 == slots.size:
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return slots


class BlockReader:
    """Reads the blocks that a step appends to rows of the block table, and finds their places."""

    def __init__(self, limits: StepLimits) -> None:
        self._max_block_id = limits.num_blocks - 1
        self._max_blocks = limits.max_blocks_per_seq
        self._groups = limits.block_groups
        self._num_rows = limits.max_num_seqs + 1
        """Number of block-table rows of one group."""
        self._columns: dict[tuple[bytes, bytes], tuple[Int64s, Int32s | None]] = {}
        """For two raw columns, their rows and each row's number of earlier occurrences; None if no
        row occurs twice."""

    def updates(self, step: ExecuteModel, counts: RowCounts) -> BlockUpdates:
        """Return the step's blocks, each placed after the row's existing ones."""
        if not (step.new_block_slots or step.new_block_ids or step.new_block_groups):
            return NO_UPDATES
        columns = step.new_block_slots, step.new_block_groups
        rows, occurrences = self._columns.get(columns) or self._read_rows(*columns)
        block_ids = read_column("new_block_ids", step.new_block_ids, INT32)
        if block_ids.size > MAX_BLOCK_UPDATES:
            fix = f"a step brings at most {MAX_BLOCK_UPDATES}: admit fewer requests at a time"
            raise invalid("new_block_ids", f"{block_ids.size} blocks", fix)
        if rows.size != block_ids.size:
            fix = f"one for each of {block_ids.size} blocks"
            raise invalid("new_block_slots", f"{rows.size} slots", fix)
        try:
            indices = counts.num_blocks[rows]
        except IndexError:
            raise counts.unknown("new_block_slots", int(rows.max())) from None
        if occurrences is not None:
            indices += occurrences
        is_inside = _within(block_ids, 1, self._max_block_id)
        if not (is_inside and _within(indices, 0, self._max_blocks - 1)):
            counts.check_live("new_block_slots", rows % self._num_rows)
            self._check_places(rows, block_ids, indices, counts)
        return BlockUpdates(rows, indices, block_ids)

    def _read_rows(self, raw_slots: bytes, raw_groups: bytes) -> tuple[Int64s, Int32s | None]:
        rows = read_column("new_block_slots", raw_slots, _UINT16).astype(np.int64)
        if raw_groups:
            groups = read_column("new_block_groups", raw_groups, _UINT8)
            if groups.size != rows.size:
                fix = f"one for each of {rows.size} blocks, or none"
                raise invalid("new_block_groups", f"{groups.size} groups", fix)
            if groups.max() >= len(self._groups):
                fix = f"groups from 0 to {len(self._groups) - 1}"
                raise invalid("new_block_groups", int(groups.max()), fix)
            rows += groups.astype(np.int64) * self._num_rows
        if len(self._groups) > 1:
            self._check_slots(raw_slots)
        rows.flags.writeable = False  # all steps with these columns share it
        occurrences = _occurrences(rows)
        if len(self._columns) == MAX_BLOCK_COLUMNS:
            self._columns.clear()
        found = (rows, occurrences if occurrences.any() else None)
        self._columns[raw_slots, raw_groups] = found
        return found

    def _check_slots(self, raw: bytes) -> None:
        """Check the slots: one that does not exist would be another group's row."""
        highest = int(read_column("new_block_slots", raw, _UINT16).max(initial=0))
        if highest >= self._num_rows - 1:
            raise invalid("new_block_slots", highest, f"slots from 0 to {self._num_rows - 2}")

    def _check_places(
        self, rows: Int64s, block_ids: Int32s, indices: Int32s, counts: RowCounts
    ) -> None:
        """Check block ids, some of which are out of range or the null block, and the rows'
        lengths."""
        groups, slots = rows // self._num_rows, rows % self._num_rows
        computed = counts.num_computed[slots]
        behind = np.zeros(rows.size, np.int32)
        for number, group in enumerate(self._groups):
            own = groups == number
            behind[own] = blocks_before_window(computed[own], group)
        may_be_null = (block_ids == NULL_BLOCK) & (indices < behind)
        outside = ((block_ids < 1) | (block_ids > self._max_block_id)) & ~may_be_null
        if outside.any():
            block_id = int(block_ids[int(outside.argmax())])
            fix = f"block ids from 1 to {self._max_block_id}"
            if block_id == NULL_BLOCK and any(group.window for group in self._groups):
                fix += ", or 0 for blocks that a window has left behind"
            raise invalid("new_block_ids", block_id, fix)
        too_many = indices >= self._max_blocks
        if too_many.any():
            slot = int(slots[int(too_many.argmax())])
            raise invalid(
                "new_block_slots", slot, f"a request has at most {self._max_blocks} blocks"
            )


def _within(values: Int32s, low: int, high: int) -> bool:
    """Return True if all values lie within the bounds. A few are compared without numpy, which
    would be mostly overhead."""
    if values.size <= _FEW:
        few = values.tolist()
        return not few or (low <= min(few) and max(few) <= high)
    return bool(low <= values.min() and values.max() <= high)


def _occurrences(slots: Int64s) -> Int32s:
    """Return for each element the number of earlier equal elements: [7, 3, 7, 7] -> [0, 0, 1,
    2]."""
    if np.count_nonzero(slots[1:] <= slots[:-1]) == 0:
        return np.zeros(slots.size, np.int32)
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    run_lengths = np.diff(np.r_[starts, ordered.size])
    result = np.empty(slots.size, np.int32)
    result[order] = np.arange(slots.size) - np.repeat(starts, run_lengths)
    return result


class CheckedStep(NamedTuple):
    """A valid step, and the counts after it."""

    scheduled: ScheduledStep
    batch: Batch
    counts: RowCounts
    """The counts with the step's requests and blocks, without its tokens."""
    capacity: Int32s
    """[B] number of tokens for which each row has blocks."""
    new_tokens: Int32s
    """The tokens of its new requests."""


class StepChecker:
    """Checks whole steps before they are applied. Owned by RequestState."""

    def __init__(self, limits: StepLimits, parts: StepParts) -> None:
        self._limits = limits
        self._parts = parts
        self._batches = BatchReader(limits)
        self.blocks = BlockReader(limits)
        self.block_sizes = _block_sizes(limits)
        """Block sizes in the form that RowCounts.capacity takes."""
        self.checks_states = limits.keeps_state
        """False: requests may begin anywhere, and be computed in any parts."""
        self.drafts = DraftChecker(limits, parts)

    def check(
        self,
        step: ExecuteModel,
        arrays: Sequence[Frame],
        counts: RowCounts,
        num_known: Int32s,
        deferred: Mapping[int, Int64s],
    ) -> CheckedStep:
        """Check a whole step. A refusal does not change the rows: requests start and end in a copy
        of the counts, and appended blocks are removed again. num_known: [S + 1], tokens that came
        with each row's admission; deferred: the slots that steps have still to sample, by seq.

        Raises:
            InvalidStepError: a value is out of range or contradicts the rows.
        """
        tokens = _NO_TOKENS
        num_own = 1 if step.scheduled_new_reqs else 0
        changes_rows = step.finished or step.corrections or step.scheduled_new_reqs
        if changes_rows or step.num_drafts or step.settled or step.resync is not None:
            counts, own = counts.copy(), arrays[:num_own]
            tokens = _change_requests(
                step,
                own,
                counts,
                num_known,
                self._limits,
                self._parts,
                checks_states=self.checks_states,
            )
        step_values = self._parts.check_step(step.extensions, arrays[num_own:], self._limits)
        updates = self.blocks.updates(step, counts)
        waiting = _NONE_DEFERRED if step.resync is not None else deferred
        if step.deferred is not None and len(waiting) == MAX_UNSAMPLED_STEPS:
            raise invalid("deferred", f"{len(waiting)} steps", f"sample step {min(waiting)} first")
        batch = self._batches.batch(step)
        slots, rows = batch.slots, batch.rows
        if step.settled:
            self.drafts.settle(step, slots, counts)
        self._parts.check_batch(slots, step.scheduled_new_reqs)
        if deferred:
            counts.check_sampled(slots)
        num_tokens = self._batches.num_tokens(step, batch)
        counts.append(updates)
        try:
            starts, ends, capacity, drafts = self._ranges(step, batch, num_tokens, counts)
            if self.checks_states and self._limits.checkpoint_blocks:
                self._check_borders(step.scheduled_new_reqs, updates, slots, starts, ends)
            num_samples, later, pooling = self._samples(
                step, batch, num_tokens, counts, drafts, waiting
            )
            if drafts is not None:
                self._parts.check_drafts(step_values, slots, drafts.counts)
        except InvalidStepError:
            counts.remove(updates)
            raise
        scheduled = ScheduledStep(
            seq=step.seq,
            slots=slots,
            num_tokens=num_tokens,
            starts=starts,
            ends=ends,
            total_num_tokens=step.total_num_scheduled_tokens,
            longest=int(ends.max()) if ends.size else 0,
            num_samples=num_samples,
            new_requests=step.scheduled_new_reqs,
            block_updates=updates,
            deferred=later,
            step_values=step_values,
            corrections=self._corrections(counts, rows),
            pooling=pooling,
            has_several=bool(step.num_samples or step.num_drafts) and int(num_samples.max()) > 1,
            drafts=drafts,
            skips_drafts=step.skip_drafts,
        )
        return CheckedStep(scheduled, batch, counts, capacity, tokens)

    def _ranges(
        self, step: ExecuteModel, batch: Batch, num_tokens: Int32s, counts: RowCounts
    ) -> tuple[Int32s, Int32s, Int32s, Drafts | None]:
        """Return each scheduled slot's first position, its end and its capacity, [B] each, and the
        step's drafts. counts: with its blocks."""
        slots, rows, drafts = batch.slots, batch.rows, None
        starts, known = counts.num_computed[rows].copy(), counts.num_tokens[rows]
        ends = starts + num_tokens
        if step.num_drafts or step.draft_token_ids:
            drafts = self.drafts.read(step, slots, ends - known, counts)
            known = known + drafts.counts
        room = counts.capacity(rows, self.block_sizes)
        capacity = np.minimum(room, self._limits.max_model_len)
        beyond = ends > np.minimum(known, capacity)
        if np.count_nonzero(beyond):
            counts.check_live("scheduled", slots)
            at = int(beyond.argmax())
            raise invalid(
                "num_scheduled_tokens",
                f"slot {int(slots[at])}: {int(num_tokens[at])}",
                f"it has {starts[at]} of {known[at]} tokens computed, "
                f"blocks for {capacity[at]}, and max_model_len is {self._limits.max_model_len}",
            )
        return starts, ends, capacity, drafts

    def _samples(
        self,
        step: ExecuteModel,
        batch: Batch,
        num_tokens: Int32s,
        counts: RowCounts,
        drafts: Drafts | None,
        waiting: Mapping[int, Int64s],
    ) -> tuple[Int32s, Bools | None, Int64s | None]:
        """Return ScheduledStep.num_samples, deferred and pooling. waiting: the slots that earlier
        steps have still to sample, by seq."""
        slots, rows = batch.slots, batch.rows
        starts, known = counts.num_computed[rows], counts.num_tokens[rows]
        ends = starts + num_tokens
        if drafts is not None:
            known = known + drafts.counts
        samples, later, pooling = ends == known, None, None
        if counts.num_pooling:
            samples, pooling = self._check_pooling(counts, slots, starts, ends, samples)
        num_samples = samples.astype(np.int32)
        if drafts is not None:
            self.drafts.check(drafts.counts, slots, samples, step)
            num_samples += drafts.counts
        if step.num_samples:
            self._read_samples(step.num_samples, slots, num_tokens, num_samples)
        if step.deferred is not None:
            later = _deferred(step.deferred, slots, samples)
            self._check_held(samples, waiting)
        return num_samples, later, pooling

    def _check_borders(
        self,
        requests: Sequence[NewRequestData],
        updates: BlockUpdates,
        slots: Int64s,
        starts: Int32s,
        ends: Int32s,
    ) -> None:
        """Check that no slot's tokens lie on both sides of a border, and that new requests with
        computed tokens begin at a checkpoint. starts, ends: [B], of the slots [B]."""
        interval, every = self._limits.border_tokens, self._limits.checkpoint_blocks
        crossing = np.flatnonzero(starts // interval != (ends - 1) // interval)
        if crossing.size:
            at = int(crossing[0])
            value = f"slot {int(slots[at])}: {int(ends[at] - starts[at])}"
            fix = f"at most {interval - int(starts[at]) % interval}: a checkpoint of the request's "
            fix += f"state is kept after every {interval} tokens"
            raise invalid("num_scheduled_tokens", value, fix)
        for request in requests:
            if not request.num_computed_tokens:
                continue
            index = request.num_computed_tokens // self._limits.block_groups[0].block_size - 1
            is_last = (updates.rows == request.slot) & (updates.indices == index)
            block_id = int(updates.block_ids[is_last].max(initial=NULL_BLOCK))
            if not has_checkpoint(block_id, every):
                fix = (
                    f"a multiple of {every} for block {index} of request {request.req_id!r}, which "
                )
                fix += "begins at its end; or begin at 0: other blocks have no checkpoint"
                raise invalid("new_block_ids", block_id, fix)

    def _read_samples(
        self, raw: bytes, slots: Int64s, num_tokens: Int32s, num_samples: Int32s
    ) -> None:
        """Replace the numbers of samples, 1 or 0 for each slot [B], by those that a message
        names."""
        field = "num_samples"
        named, counts, positions = read_pairs(field, raw, slots)
        idle = np.flatnonzero(num_samples[positions] == 0)
        if idle.size:
            fix = f"name slots that sample in this step: {slots[num_samples > 0].tolist()[:8]}"
            raise invalid(field, int(named[idle[0]]), fix)
        most = np.minimum(num_tokens[positions], self._limits.max_samples_per_seq)
        wrong = np.flatnonzero((counts < 1) | (counts > most))
        if wrong.size:
            at = int(wrong[0])
            raise invalid(
                field,
                f"slot {int(named[at])}: {int(counts[at])}",
                f"use 1 to {most[at]}: the step has {num_tokens[positions[at]]} tokens of it, and "
                f"max_samples_per_seq is {self._limits.max_samples_per_seq}",
            )
        num_samples[positions] = counts

    def _check_held(self, samples: Bools, waiting: Mapping[int, Int64s]) -> None:
        """Check the requests whose logits are copied by a step that defers, and those whose logits
        are still held for earlier ones. A request that ends does not free its copies, its
        SampleTokens does. The memory profile and the plan count max_samples_per_seq copies for each
        request."""
        held, new = sum(each.size for each in waiting.values()), int(np.count_nonzero(samples))
        if held + new > self._limits.max_num_seqs:
            raise invalid(
                "deferred",
                f"{new} slots sample, and {held} wait for SampleTokens",
                f"at most max_num_seqs = {self._limits.max_num_seqs} together in a step that "
                f"defers: sample step {min(waiting)} first, even if its requests have finished",
            )

    def _check_pooling(
        self, counts: RowCounts, slots: Int64s, starts: Int32s, ends: Int32s, is_last: Bools
    ) -> tuple[Bools, Int64s | None]:
        """Check the outputs of a step's requests that pool. Return which of its rows sample, and
        ScheduledStep.pooling. counts: before the step; is_last [B]: True for rows of which the step
        computes the last token."""
        pools = counts.output_bytes[slots] > 0
        if not pools.any():
            return is_last, None
        field = "num_scheduled_tokens"
        if self._limits.pooling.whole_prompts:
            parted = np.flatnonzero(pools & ~(is_last & (starts == 0)))
            if parted.size:
                at = int(parted[0])
                value = f"slot {int(slots[at])}: {int(ends[at] - starts[at])}"
                fix = f"all {int(counts.num_tokens[slots[at]])}: this model computes whole prompts"
                raise invalid(field, value, fix)
        num_bytes = int(counts.output_bytes[slots[is_last]].sum(dtype=np.int64))
        if num_bytes > MAX_POOLED_BYTES:
            fix = f"at most {MAX_POOLED_BYTES}: let fewer prompts end in a step"
            raise invalid(field, f"{num_bytes} bytes of outputs", fix)
        computed = counts.num_computed.astype(np.int64)
        computed[slots] = np.where(is_last, 0, ends)
        kept = int((computed * counts.token_bytes)[counts.num_computed < counts.num_tokens].sum())
        if kept > MAX_KEPT_BYTES:
            fix = f"at most {MAX_KEPT_BYTES}: finish prompts before others begin"
            raise invalid(field, f"{kept} bytes of tokens' outputs are kept", fix)
        return is_last & ~pools, np.flatnonzero(counts.output_bytes)

    def _corrections(self, counts: RowCounts, rows: slice | Int64s) -> Int32s | None:
        """Return ScheduledStep.corrections for these rows."""
        if not (self._parts.refusing or self._limits.max_drafts):
            return None
        corrected = counts.corrected[rows]
        if not corrected.size or int(corrected.max()) == EXACT:
            return None
        return np.maximum(corrected, NOT_SAMPLED)


def _deferred(named: bytes, slots: Int64s, samples: Bools) -> Bools:
    """Return which of the scheduled slots [B] are sampled later."""
    wanted = read_bitmap(named)
    later = np.isin(slots, wanted) & samples
    if not 0 < np.count_nonzero(later) == wanted.size:
        fix = f"slots that sample in this step: {slots[samples].tolist()[:8]}"
        raise invalid("deferred", wanted.tolist()[:8], fix)
    return later


def _block_sizes(limits: StepLimits) -> Int32s:
    """Return the argument of RowCounts.capacity as an array: numpy multiplies faster by arrays than
    by numpy or Python scalars."""
    if limits.num_groups == 1:
        return np.array(limits.block_groups[0].block_size, np.int32)
    return np.array([[group.block_size] for group in limits.block_groups], np.int32)

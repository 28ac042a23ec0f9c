"""Fills a step's columns from the request rows, for the device to take.

Shapes: N tokens, B sequences, R samples (step_layout.py). Nothing in this module
waits for the device, unless all buffers are in use.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rpc_schema.step import NO_TOKEN
from worker_daemon.contracts.arrays import Bools, Int32s, Int64s
from worker_daemon.contracts.attention import AttentionMetadata
from worker_daemon.drafting.interface import Drafter, Gained, MissingTokens
from worker_daemon.runner.draft_backlog import DraftBacklog
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.row_tables import TOKEN_ON_DEVICE, Gathered, RowTables
from worker_daemon.runner.sample_rows import (
    BY_LOGITS,
    SampleGroups,
    SampleRows,
    Unsampled,
    group_samples,
)
from worker_daemon.runner.scheduled_step import (
    BlockUpdates,
    Drafts,
    ScheduledStep,
    TokensOfReplicas,
)
from worker_daemon.runner.staging import Packed, Staging
from worker_daemon.runner.steady_batch import SteadyBatch
from worker_daemon.runner.step_layout import (
    ExactShapes,
    StepColumns,
    StepPlan,
    largest_shape,
    packed_size,
)

_ONE: Final = np.array(1, np.int32)


class StepInputs(NamedTuple):
    """Inputs of the forward pass and the sampler."""

    plan: StepPlan
    packed: Packed
    """The buffer with the columns that the device takes."""
    num_tokens: int
    """Tokens of the step; the columns may be padded to more."""
    query_lens_np: Int32s
    """[B] host"""
    seq_lens_np: Int32s
    """[B] host"""
    sample_rows: SampleRows
    reads: Int64s
    """Slots whose newest sampled token the step reads; all of its slots if counts may be
    corrected."""
    missing: MissingTokens | None = None
    """Tokens that the draft model is to compute after the step; None: none, or there is no such
    model."""

    @property
    def columns(self) -> StepColumns[Tensor]:
        """On the device; valid from when they are taken until the next step's are taken."""
        return self.packed.columns

    def attention(self, gathered: Gathered, tables: RowTables) -> list[AttentionMetadata]:
        """Return the step's attention metadata for the layers of each group."""
        columns, state_slots = self.packed.columns, tables.state_slots(self.packed.columns)
        return [
            AttentionMetadata(
                query_start_loc=columns.query_start_loc,
                seq_lens=columns.seq_lens,
                seq_order=columns.seq_order,
                block_table=block_table,
                seq_rows=columns.seq_rows,
                slot_mapping=slot_mapping,
                num_seqs=self.plan.shape.num_seqs,
                max_query_len=self.plan.max_query_len,
                max_seq_len=self.plan.max_seq_len,
                query_lens_np=self.query_lens_np,
                seq_lens_np=self.seq_lens_np,
                state_slots=state_slots,
            )
            for block_table, slot_mapping in zip(
                tables.group_tables, gathered.slot_mappings, strict=True
            )
        ]


class InputBuilder:
    """Builds StepInputs. Owned by the model runner, used on the step thread only."""

    def __init__(
        self,
        state: RequestState,
        tables: RowTables,
        staging: Staging,
        ladder: ExactShapes,
        drafter: Drafter | None = None,
    ) -> None:
        """drafter: follows new requests, on the last stage."""
        self.tables = tables
        self.drafter = drafter
        self._parts = state.parts
        self._state = state
        self._staging = staging
        self._ladder = ladder
        self._planned: SteadyBatch | None = None
        """The batch to which `_plan` belongs."""
        self._plan: StepPlan | None = None
        """Plan of a step without block updates or values for parts, by the current ladder."""
        self._shortest = 0
        """ScheduledStep.longest of that step: shorter ones may have another plan."""
        follower = None if drafter is None else drafter.follower
        self._follower = follower
        self._backlog = None if follower is None else DraftBacklog(state)
        self._no_column = torch.zeros(0, dtype=torch.int32, device=tables.device)
        self._count = np.arange(most_seqs(state) + 1, dtype=np.int32)

    def with_parts(self, plans: Sequence[StepPlan]) -> list[StepPlan]:
        """Return each plan for every choice of parts around the forward pass that has graphs. The
        plan without such parts comes last. If steps may have drafts, also those of such steps."""
        corrected, exact = [], [plan for plan in plans if not plan.shape.num_corrected]
        if self._state.limits.max_drafts:
            corrected = [plan.corrected() for plan in plans if plan.max_query_len > 1]
        keys = self._parts.graph_keys()
        extended = (
            self._parts.extended(plan, key) for plan in (*corrected, *exact) for key in keys
        )
        return list(dict.fromkeys(extended))  # a part that may refuse tokens corrects every plan

    def pad_by(self, ladder: ExactShapes, plans: Sequence[StepPlan]) -> None:
        """Pad steps by another ladder from now on. plans: its recurring plans."""
        self._ladder = ladder
        self._planned = None
        self._staging.keep(plan.shape for plan in plans)

    def size_of_all(self, tokens: TokensOfReplicas) -> int:
        """Return the number of tokens to which replicas that share experts pad a step."""
        return self._ladder.size_of_all(tokens)

    def build(self, step: ScheduledStep) -> StepInputs:
        """Fill in the changes and the step's own values; the device gathers the rest."""
        if step.new_requests:
            known = self._state.known_tokens
            tokens = [known[request.slot] for request in step.new_requests]
            self._parts.admit(step.new_requests, tokens)
            if self.drafter is not None:
                self.drafter.begin([request.slot for request in step.new_requests], tokens)
        plan = self._fit(step)
        missing = None
        if self._follower is not None and self._backlog is not None:
            follows = self._follower.follows(plan.max_query_len)
            missing = self._backlog.take(step, follows=follows)
        packed = self._staging.open(plan.shape)
        filled, steady = packed.holds, step.steady
        if steady is not None and isinstance(filled, _Filled) and filled.steady is steady:
            filled.advance(step)
        else:
            packed.holds = None
            packed.holds = filled = self._fill(packed.host, step)
        updates, room = step.block_updates, plan.shape.num_updates
        if updates.rows.size > room:
            self.tables.write(updates.part(slice(room, None)))
            updates = updates.part(slice(room))
        self._fill_updates(packed.host, updates, filled.num_updates)
        filled.num_updates = updates.rows.size
        if plan.parts:
            self._parts.fill(plan.parts, packed.host, step)
        columns, rows = packed.columns, filled.rows
        groups, are_verified = rows.groups, False
        if groups is not None and step.drafts is not None:
            groups = groups.on(columns.first_samples, columns.num_before)
            are_verified = _can_verify(step, rows)
            packed.host.num_verified[0] = groups.firsts_np.size if are_verified else 0
        # By position, in the order of the fields: keyword arguments would cost as much as all the
        # rest here.
        return StepInputs(
            plan,
            packed,
            step.total_num_tokens,
            step.num_tokens,
            step.ends,
            SampleRows(
                rows.slots,
                rows.generations,
                filled.positions,
                rows.used,
                columns.sample_rows,
                columns.sample_tokens,
                columns.sample_positions,
                packed.delivery if groups is None or are_verified else None,
                step.corrections is not None,
                rows.bitmap,
                rows.given,
                step.drafts is not None,
                groups,
                are_verified,
            ),
            rows.reads,
            missing,
        )

    def catch_up(self, inputs: StepInputs, missing: MissingTokens) -> None:
        """Let the draft model compute what rows lack, after the program of their step and before
        the next one."""
        assert self._follower is not None and self._backlog is not None, "it lacks something"
        self._follower.catch_up(missing, inputs.columns.seq_lens)
        self._backlog.caught_up(missing)

    def _fit(self, step: ScheduledStep) -> StepPlan:
        """Return the plan that the ladder has for a step, with the parts that it uses. The steps of
        a steady batch differ only in their lengths, which mostly grow, in their block updates, and
        in the values that their rows continue from."""
        steady, plan = step.steady, self._plan
        num_updates = step.block_updates.rows.size
        if steady is not None and steady is self._planned and plan is not None:
            fits = num_updates <= plan.shape.num_updates
            if step.shared_size:
                fits &= plan.shape.num_tokens == step.shared_size
            if fits and self._shortest <= step.longest <= plan.max_seq_len:
                return plan
            if not num_updates and not self._ladder.pads:
                return plan._replace(max_seq_len=step.longest)
        fitted, values = self._ladder.fit(step), step.step_values.used
        if self._parts.active_in_forward | values:
            fitted = self._parts.extended(fitted, self._used_by(step) | values)
        if step.corrections is not None:
            fitted = fitted.corrected()
        if steady is not None and not num_updates | values:
            self._planned, self._plan, self._shortest = steady, fitted, step.longest
        return fitted

    def _used_by(self, step: ScheduledStep) -> int:
        """Return the bits of the parts that a step uses. In a steady batch, none depends on token
        positions."""
        if step.steady is not None:
            return step.steady.used
        used = self._parts.used_by(step.slots) | self._parts.used_in(step)
        # The parts that refuse tokens want corrections of bounds.
        return used & ~self._parts.refusing if step.recomputes else used

    def _fill(self, columns: StepColumns[Int32s], step: ScheduledStep) -> "_Filled":
        on_device = step.starts >= self._state.num_known_tokens[step.slots]
        sampling = _sampling(step)
        self._fill_query_starts(columns.query_start_loc, step)
        if step.total_num_tokens == step.slots.size:
            self._fill_decode(columns, step)
        else:
            self._fill_mixed(columns, step)
        columns.seq_order[:] = np.argsort(-columns.seq_lens, kind="stable")
        self._fill_known_tokens(columns, step, on_device)
        self._fill_samples(columns, step, sampling)
        if columns.corrections.size:
            assert step.corrections is not None, "tokens may be refused"
            columns.corrections[: step.slots.size] = step.corrections
            columns.corrections[step.slots.size :] = 0
        rows = self._rows_of(step, on_device, sampling)
        if columns.num_verified.size:
            _fill_groups(columns, None if step.drafts is None else rows.groups)
        return _Filled(step, columns, rows)

    def _rows_of(self, step: ScheduledStep, on_device: Bools, sampling: "_Sampling") -> "_StepRows":
        # Counts of a slot's former request must have arrived before a new request's are set to
        # zero.
        reads = step.slots[on_device] if step.corrections is None else step.slots
        steady, in_sampling = step.steady, self._parts.in_sampling
        bitmap = b"" if steady is None else steady.reply_bitmap
        if steady is not None and not step.has_several:
            slots, used = steady.slots, steady.used & in_sampling
            return _StepRows(slots, steady.generations, step.ends, used, reads, bitmap)
        slots = step.slots[sampling.seqs]
        used = self._parts.used_by(slots) & in_sampling
        generations, given = self._state.generation[slots], ()
        groups = None
        if step.has_several:
            # In steps with drafts, their columns bring what this uploads.
            groups = group_samples(slots, self.tables.device if step.drafts is None else None)
            if step.drafts is None:
                given = tuple(self._state.known_tokens[slot] for slot in slots.tolist())
        return _StepRows(slots, generations, sampling.positions, used, reads, bitmap, given, groups)

    def forget_requests(self) -> None:
        """All rows were freed."""
        if self.drafter is not None:
            self.drafter.forget()

    def restart_drafts(self) -> None:
        """Drop all drafts, and what the drafter knows. Ranks that verify the same drafts must do it
        together."""
        self.tables.drafts.zero_()
        if self.drafter is not None:
            self.drafter.restart()
        self.distrust_drafter()

    def distrust_drafter(self) -> None:
        """Let a draft model compute again all that it has computed: its weights have changed."""
        if self._backlog is not None:
            self._backlog.restart()

    def launch_drafting(self) -> None:
        """Launch the kernels that verify drafts, and those of a drafter but for a model's, inside
        compiling_ahead, where launches only request their kernels."""
        most, device = self._state.limits.max_drafts, self.tables.device
        if not most:
            return
        row, spare = torch.zeros(1, dtype=torch.int32, device=device), self._state.spare_slot
        token_ids = torch.full((1, 1 + most), NO_TOKEN, dtype=torch.int64, device=device)
        firsts = torch.cat((row, row + 1 + most))
        self.tables.verify(token_ids[0], token_ids[0], firsts, row, row + spare, row)
        drafter = self.drafter
        if drafter is None:
            return
        drafter.begin([spare], [np.zeros(1, np.int32)])
        if drafter.follower is not None:
            return
        for columns in (1, 1 + most):  # after a step without drafts, and with some
            given = token_ids[:, :columns].contiguous()
            drafter.propose(Gained(row + spare, given, row, row))
        self.restart_drafts()

    def padding(self, plan: StepPlan) -> StepInputs:
        """Return inputs that consist only of padding, for warm-up and capture."""
        packed = self._staging.open(plan.shape)
        packed.holds = None
        columns = packed.host
        for column in columns.every:
            column[:] = 0
        spare = self._state.spare_slot
        for rows in (
            columns.token_rows,
            columns.seq_rows,
            columns.sample_rows,
            columns.update_rows,
        ):
            rows[:] = spare
        columns.seq_lens[:] = 1
        columns.query_start_loc[:] = self._count[: columns.query_start_loc.size]
        columns.seq_order[:] = self._count[: columns.seq_order.size]
        on_device, none = packed.columns, np.zeros(0, np.int64)
        return StepInputs(
            plan=plan,
            packed=packed,
            num_tokens=plan.shape.num_tokens,
            query_lens_np=np.ones(plan.shape.num_seqs, np.int32),
            seq_lens_np=np.ones(plan.shape.num_seqs, np.int32),
            sample_rows=SampleRows(
                none,
                none,
                none.astype(np.int32),
                0,
                on_device.sample_rows,
                on_device.sample_tokens,
                on_device.sample_positions,
                None,
            ),
            reads=none,
        )

    def lost(self, step: ScheduledStep, later: Bools) -> Unsampled:
        """Return the deferred rows of a step that failed before sampling was possible. later [B]:
        True for these rows."""
        slots, none, has_drafts = step.slots[later], self._no_column, step.drafts is not None
        if has_drafts:  # other ranks return as much for each row as they have samples
            slots = np.repeat(slots, step.num_samples[later])
        rows = SampleRows(
            slots_np=slots,
            generations=self._state.generation[slots],
            positions_np=np.zeros(slots.size, np.int32),
            used=BY_LOGITS | self._parts.used_by(slots),
            slots=none,
            token_indices=none,
            positions=none,
            delivery=None,
            has_drafts=has_drafts,
            groups=group_samples(slots, None) if has_drafts else None,
        )
        return Unsampled(rows, None, none, step.step_values, skips_drafts=step.skips_drafts)

    def _fill_query_starts(self, query_start_loc: Int32s, step: ScheduledStep) -> None:
        """Fill in the starts of sequences; the last entry is the number of tokens that are not
        padding. All of a dummy step is padding."""
        seqs = step.slots.size
        query_start_loc[0] = 0
        np.cumsum(step.num_tokens, out=query_start_loc[1 : seqs + 1])
        if seqs and step.slots[-1] == self._state.spare_slot:
            query_start_loc[seqs] = 0
        query_start_loc[seqs + 1 :] = query_start_loc[seqs]

    def _fill_decode(self, columns: StepColumns[Int32s], step: ScheduledStep) -> None:
        """Fill a decode: every sequence has one token. Padding consists of tokens on the spare row,
        and of sequences without tokens."""
        spare, used = self._state.spare_slot, step.slots.size
        for rows in (columns.token_rows, columns.seq_rows):
            rows[:used] = step.slots
            rows[used:] = spare
        columns.positions[:used] = step.starts
        columns.positions[used:] = 0
        columns.seq_lens[:used] = step.ends
        columns.seq_lens[used:] = 1

    def _fill_mixed(self, columns: StepColumns[Int32s], step: ScheduledStep) -> None:
        """Fill a mixed step. Padding consists of tokens on the spare row after the last sequence,
        and of empty sequences."""
        spare, used, seqs = self._state.spare_slot, step.total_num_tokens, step.slots.size
        columns.token_rows[:used] = np.repeat(step.slots, step.num_tokens)
        columns.token_rows[used:] = spare
        first_tokens = columns.query_start_loc[:seqs]
        np.add(
            np.arange(used, dtype=np.int32),
            np.repeat(step.starts - first_tokens, step.num_tokens),
            out=columns.positions[:used],
        )
        columns.positions[used:] = 0
        columns.seq_rows[:seqs] = step.slots
        columns.seq_rows[seqs:] = spare
        columns.seq_lens[:seqs] = step.ends
        columns.seq_lens[seqs:] = 0

    def _fill_known_tokens(
        self, columns: StepColumns[Int32s], step: ScheduledStep, sampled_on_device: Bools
    ) -> None:
        tokens = columns.host_token_ids
        tokens[: step.total_num_tokens] = TOKEN_ON_DEVICE
        tokens[step.total_num_tokens :] = 0
        for index in np.flatnonzero(~sampled_on_device):
            first, start = columns.query_start_loc[index], step.starts[index]
            known = self._state.known_tokens[step.slots[index]]
            part = known[start : start + step.num_tokens[index]]
            tokens[first : first + part.size] = part
        if step.drafts is not None:
            _DraftPlaces(columns.query_start_loc, step.drafts.counts).fill(tokens, step.drafts)

    def _fill_samples(
        self,
        columns: StepColumns[Int32s],
        step: ScheduledStep,
        sampling: "_Sampling",
    ) -> None:
        seqs, positions, num_newer = sampling
        used = seqs.size
        columns.sample_rows[:used] = step.slots[seqs]
        columns.sample_rows[used:] = self._state.spare_slot
        columns.sample_tokens[:used] = columns.query_start_loc[seqs + 1] - 1
        if num_newer is not None:
            columns.sample_tokens[:used] -= num_newer
        columns.sample_tokens[used:] = 0
        columns.sample_positions[:used] = positions
        columns.sample_positions[used:] = 0

    def _fill_updates(
        self, columns: StepColumns[Int32s], updates: BlockUpdates, num_filled: int
    ) -> None:
        """num_filled: number of leading entries that may hold values other than padding."""
        used = updates.rows.size
        if used:
            columns.update_rows[:used] = updates.rows
            columns.update_indices[:used] = updates.indices
            columns.update_block_ids[:used] = updates.block_ids
        if used < num_filled:
            columns.update_rows[used:num_filled] = self._state.spare_slot
            columns.update_indices[used:num_filled] = 0
            columns.update_block_ids[used:num_filled] = 0


class _DraftPlaces:
    """The places of drafts, the last tokens of their sequences. Columns [sum of counts]."""

    def __init__(self, query_start_loc: Int32s, counts: Int32s) -> None:
        """counts [B]: drafts of each sequence."""
        ends = np.repeat(query_start_loc[1 : counts.size + 1], counts)
        num_after = np.repeat(np.cumsum(counts), counts) - np.arange(ends.size) - 1
        self._indices = ends - 1 - num_after
        number = np.repeat(counts, counts) - num_after  # from 1
        self._on_device = TOKEN_ON_DEVICE - number

    def fill(self, tokens: Int32s, drafts: Drafts) -> None:
        """Fill in a step's drafts."""
        given, on_device = drafts.token_ids, self._on_device
        tokens[self._indices] = (
            on_device if given is None else np.where(given < 0, on_device, given)
        )


def _can_verify(step: ScheduledStep, rows: "_StepRows") -> bool:
    """Return True if the program can verify a step's drafts: all rows take their most likely
    tokens, now, and are to get drafts if there is a drafter."""
    if rows.used | step.step_values.used:
        return False
    return step.deferred is None and not step.skips_drafts


def _fill_groups(columns: StepColumns[Int32s], groups: SampleGroups | None) -> None:
    """Fill in how the samples of a step with drafts follow each other; None: it has none."""
    columns.num_verified[0] = num_seqs = num_samples = 0
    if groups is not None:
        num_seqs, num_samples = groups.firsts_np.size, groups.num_before_np.size
        columns.first_samples[:num_seqs] = groups.firsts_np
        columns.num_before[:num_samples] = groups.num_before_np
    columns.first_samples[num_seqs:] = num_samples
    columns.num_before[num_samples:] = 0


class _Sampling(NamedTuple):
    """The samples of a step. Aligned columns [R]."""

    seqs: Int64s
    """Index of each one's sequence."""
    positions: Int32s
    num_newer: Int32s | None
    """Number of later samples of the same sequence; None: each has one."""


def _sampling(step: ScheduledStep) -> _Sampling:
    seqs = np.flatnonzero(step.num_samples)
    if not step.has_several:
        return _Sampling(seqs, step.ends[seqs], None)
    counts = step.num_samples[seqs]
    ends, seqs = np.repeat(np.cumsum(counts), counts), np.repeat(seqs, counts)
    num_newer = (ends - 1 - np.arange(seqs.size)).astype(np.int32)
    return _Sampling(seqs, step.ends[seqs] - num_newer, num_newer)


class _StepRows(NamedTuple):
    """The rows of a step."""

    slots: Int64s
    """Slot of each sample."""
    generations: Int64s
    """Generation of each one's row."""
    positions: Int32s
    """Position of each sample; of a steady batch, those of its first step."""
    used: int
    """The value of SampleRows.used."""
    reads: Int64s
    """The value of StepInputs.reads."""
    bitmap: bytes
    """The value of SampleRows.known_bitmap."""
    given: tuple[Int32s, ...] = ()
    """The value of SampleRows.given."""
    groups: SampleGroups | None = None
    """The value of SampleRows.groups, of a step with drafts without device columns."""


class _Filled:
    """Columns that were filled for a step and for later steps of the same steady batch."""

    def __init__(self, step: ScheduledStep, columns: StepColumns[Int32s], rows: _StepRows) -> None:
        self.steady = step.steady
        self.rows = rows
        self.positions = rows.positions
        """The value of SampleRows.positions_np."""
        self.num_updates: int = columns.update_rows.size
        """Entries of the block-table columns that may hold values other than padding: all of them
        before the first step."""
        self._bounds = None
        if step.steady is None:
            return
        used, seqs = step.total_num_tokens, step.slots.size
        self._positions = columns.positions[:used]
        self._seq_lens = columns.seq_lens[:seqs]
        self._sample_positions = columns.sample_positions[:used]
        self._bounds = None if step.corrections is None else _FilledBounds(step, columns)

    def advance(self, step: ScheduledStep) -> None:
        """Advance the columns to a later step of the same batch."""
        np.copyto(self._seq_lens, step.ends)
        if self._bounds is None:
            np.copyto(self._positions, step.starts)
            np.copyto(self._sample_positions, step.ends)
            self.positions = step.ends
        else:
            self._bounds.advance(step, self._positions)
            self.positions = self._positions + _ONE
            np.copyto(self._sample_positions, self.positions)


class _FilledBounds:
    """Columns of a steady batch whose counts are bounds: its rows may have drafts."""

    def __init__(self, step: ScheduledStep, columns: StepColumns[Int32s]) -> None:
        counts = step.num_tokens
        self._seqs = np.repeat(np.arange(counts.size), counts)
        firsts = columns.query_start_loc[: counts.size]
        self._offsets = np.arange(self._seqs.size, dtype=np.int32) - np.repeat(firsts, counts)
        self._columns = columns
        self._corrections = step.corrections
        """Those that the columns hold."""
        self._places = None
        if step.drafts is not None:
            self._places = _DraftPlaces(columns.query_start_loc, step.drafts.counts)
        self._on_device = step.drafts is None or step.drafts.token_ids is None
        """True if the columns hold no draft that a step has brought."""

    def advance(self, step: ScheduledStep, positions: Int32s) -> None:
        """Advance these columns, and positions, to a later step of the batch."""
        np.add(step.starts[self._seqs], self._offsets, out=positions)
        columns, steady = self._columns, step.steady
        assert steady is not None and step.corrections is not None, "the batch goes on"
        is_changed = step.corrections is not self._corrections
        if is_changed:
            columns.corrections[: step.slots.size] = self._corrections = step.corrections
        if is_changed or not steady.growth:
            columns.seq_order[:] = np.argsort(-columns.seq_lens, kind="stable")
        drafts = step.drafts
        on_device = drafts is None or drafts.token_ids is None
        if drafts is not None and self._places is not None and not (on_device and self._on_device):
            self._places.fill(columns.host_token_ids, drafts)
            self._on_device = on_device


def staging_capacity(state: RequestState) -> int:
    """Return the int32 values of the largest step, in which every part takes part."""
    return packed_size(state.parts.largest(largest_shape(state.limits)))


def most_seqs(state: RequestState) -> int:
    """Number of sequences in the largest step, padding included."""
    return largest_shape(state.limits).num_seqs

"""A step's columns, filled from the request rows for the device to take. Owns what the host derives
from how each row is sampled.

Shapes: N tokens, B sequences, R sequences that sample (step_layout.py). Nothing in here waits for
the device, unless it is as many steps behind as there are buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rpc_schema.sampling import SamplingParams
from worker_daemon.device.pinned import upload
from worker_daemon.layers.attention import AttentionMetadata
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.row_tables import (
    SAMPLING_COLUMNS,
    TOKEN_ON_DEVICE,
    Gathered,
    RowTables,
)
from worker_daemon.runner.scheduled_step import (
    MAX_BLOCK_UPDATES,
    BlockUpdates,
    Bools,
    Int32s,
    Int64s,
    ScheduledStep,
)
from worker_daemon.runner.staging import Delivery, Packed, Staging
from worker_daemon.runner.step_layout import (
    Ladder,
    StepColumns,
    StepPlan,
    StepShape,
    decode_sizes,
    packed_size,
)
from worker_daemon.runner.token_history import Sampled
from worker_daemon.sample.sampler import NO_LOGPROBS, SamplingMetadata, build_bans


class SampleRows(NamedTuple):
    """The sequences of a step that sample. The device's columns may be longer: padding points at
    the spare row."""

    slots_np: Int64s
    """[R]"""
    generations: Int64s
    """[R] of the rows, when the step was accepted."""
    positions_np: Int32s
    """[R] position of the token that is sampled."""
    are_plain: bool
    """Every row takes its likeliest token and reports nothing else."""
    slots: Tensor
    """int32 [>= R], device"""
    token_indices: Tensor
    """int32 [>= R], device: each sequence's last token in the step."""
    positions: Tensor
    """int32 [>= R], device"""
    delivery: Delivery | None
    """Where the host finds the likeliest tokens of all; None where they are copied to it."""

    @property
    def sampled(self) -> Sampled:
        """What the host is to remember of them."""
        return Sampled(self.slots_np, self.generations, self.positions_np)

    def detach(self) -> "SampleRows":
        """Return a copy whose columns no later step overwrites."""
        return SampleRows(
            self.slots_np,
            self.generations,
            self.positions_np,
            self.are_plain,
            self.slots.clone(),
            self.token_indices.clone(),
            self.positions.clone(),
            None,
        )

    def keep(self, chosen: Int64s) -> "SampleRows":
        """Return these rows only. chosen [R'] int64: indices into the rows."""
        on_device = upload(chosen, self.slots.device)
        return SampleRows(
            self.slots_np[chosen],
            self.generations[chosen],
            self.positions_np[chosen],
            self.are_plain,
            self.slots[on_device],
            self.token_indices[on_device],
            self.positions[on_device],
            None,
        )


class StepInputs(NamedTuple):
    """What the forward pass and the sampler read."""

    plan: StepPlan
    packed: Packed
    """The columns, to be taken to the device."""
    num_tokens: int
    """Tokens of the step; the columns may be padded to more."""
    query_lens_np: Int32s
    """[B] host"""
    seq_lens_np: Int32s
    """[B] host"""
    sample_rows: SampleRows
    tokens_from: int
    """The publication (tokens.py) that brings the last of the sampled tokens that this step reads;
    -1: reads none."""

    @property
    def columns(self) -> StepColumns[Tensor]:
        """On the device, valid once taken, until the next step's are."""
        return self.packed.columns

    def attention(self, gathered: Gathered, tables: RowTables) -> list[AttentionMetadata]:
        """Return what attention reads of the step, in layers of each group."""
        columns = self.packed.columns
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
            )
            for block_table, slot_mapping in zip(
                tables.group_tables, gathered.slot_mappings, strict=True
            )
        ]


class InputBuilder:
    """Builds StepInputs. Owned by the model runner, used on the step thread only."""

    def __init__(
        self, state: RequestState, tables: RowTables, staging: Staging, ladder: Ladder
    ) -> None:
        num_rows = state.limits.max_num_seqs + 1
        self.tables = tables
        self._state = state
        self._staging = staging
        self._ladder = ladder
        self._features = np.zeros((num_rows, 4), np.bool_)
        self._num_logprobs = np.full(num_rows, NO_LOGPROBS, np.int32)
        self._min_tokens = np.zeros(num_rows, np.int32)
        self._is_plain = np.ones(num_rows, np.bool_)
        self._published = np.full(num_rows, -1, np.int64)
        self._newest = (np.zeros(0, np.int64), -1)
        """The last publication, and its rows: noted in _published when others come."""
        self._steady: _Batch | None = None
        self._count = np.arange(most_seqs(state) + 1, dtype=np.int32)

    def pad_by(self, ladder: Ladder, plans: Sequence[StepPlan]) -> None:
        """Pad steps by another ladder from here on. plans: those of it that come again and
        again."""
        self._ladder = ladder
        self._staging.keep(plan.shape for plan in plans)

    def build(self, step: ScheduledStep) -> StepInputs:
        """Fill in what changed and what this step is; the rest is gathered on the device."""
        plan = self._ladder.fit(step)
        packed = self._staging.open(plan.shape)
        batch, ends = self._batch(step), step.ends
        held = packed.holds
        if isinstance(held, _Held) and held.batch is batch:
            held.advance(step)
        else:
            packed.holds = None
            self._fill(packed.host, step, batch)
            held = _Held(batch, packed.host, ends.size)
            packed.holds = held if batch.goes_on else None
        self._fill_updates(packed.host, step.block_updates, held.num_updates)
        held.num_updates = step.block_updates.rows.size
        columns = packed.columns
        # By position, in the order of the fields: names would cost as much as all the rest here.
        return StepInputs(
            plan,
            packed,
            step.total_num_tokens,
            step.num_tokens,
            ends,
            SampleRows(
                batch.sampling_slots,
                batch.generations,
                ends if batch.goes_on else ends[batch.sampling],
                batch.are_plain,
                columns.sample_rows,
                columns.sample_tokens,
                columns.sample_positions,
                packed.delivery,
            ),
            self._newest_publication(batch),
        )

    def _batch(self, step: ScheduledStep) -> "_Batch":
        """What this step has in common with the one before, if it only goes on; else anew."""
        batch = self._steady
        if batch is None or batch.slots is not step.slots or step.new_requests:
            self._admit(step)
            batch = self._survey(step)
            self._steady = batch if batch.goes_on else None
        return batch

    def _survey(self, step: ScheduledStep) -> "_Batch":
        on_device = step.starts >= self._state.num_known_tokens[step.slots]
        sampling = np.flatnonzero(step.samples)
        slots = step.slots[sampling]
        is_decode = 0 < step.slots.size == step.total_num_tokens
        return _Batch(
            slots=step.slots,
            on_device=on_device,
            reading_slots=step.slots[on_device],
            sampling=sampling,
            sampling_slots=slots,
            generations=self._state.generation[slots],
            are_plain=bool(self._is_plain[slots].all()),
            goes_on=bool(is_decode and step.samples.all() and on_device.all()),
        )

    def _newest_publication(self, batch: "_Batch") -> int:
        slots, publication = self._newest
        if batch.goes_on and slots is batch.sampling_slots:
            return publication
        self._note_newest()
        return int(self._published[batch.reading_slots].max(initial=-1))

    def _fill(self, columns: StepColumns[Int32s], step: ScheduledStep, batch: "_Batch") -> None:
        if step.total_num_tokens == step.slots.size:
            self._fill_decode(columns, step)
        else:
            self._fill_mixed(columns, step)
        columns.seq_order[:] = np.argsort(-columns.seq_lens, kind="stable")
        self._fill_known_tokens(columns, step, batch.on_device)
        self._fill_samples(columns, step, batch.sampling)

    def padding(self, plan: StepPlan) -> StepInputs:
        """Return inputs that are padding alone: for warm-up and capture, without a request."""
        packed = self._staging.open(plan.shape)
        packed.holds = None
        for column in packed.host:
            column[:] = 0
        columns = packed.host
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
                True,
                on_device.sample_rows,
                on_device.sample_tokens,
                on_device.sample_positions,
                None,
            ),
            tokens_from=-1,
        )

    def lost_rows(self, step: ScheduledStep) -> SampleRows:
        """Return the sequences that sample in a step whose inputs could not be built or used."""
        slots_np = step.slots[step.samples]
        slots = upload(slots_np, self.tables.device).int()
        nothing = torch.zeros_like(slots)
        return SampleRows(
            slots_np=slots_np,
            generations=self._state.generation[slots_np],
            positions_np=np.zeros(slots_np.size, np.int32),
            are_plain=False,
            slots=slots,
            token_indices=nothing,
            positions=nothing,
            delivery=None,
        )

    def note_publication(self, slots: Int64s, publication: int) -> None:
        """Remember which publication brings the newest token of these rows."""
        if slots is not self._newest[0]:
            self._note_newest()
        self._newest = (slots, publication)

    def _note_newest(self) -> None:
        slots, publication = self._newest
        self._published[slots] = publication

    def sampling_metadata(self, rows: SampleRows) -> SamplingMetadata:
        """Gather how each of the rows is sampled, without padding."""
        features: list[bool] = np.any(self._features[rows.slots_np], axis=0).tolist()
        count = rows.slots_np.size
        table = self.tables.sampling[rows.slots[:count].long()]
        floats, seeds = table[:, :3].contiguous().view(torch.float32), table[:, 4:6].long()
        ban_rows, ban_token_ids = self._bans(rows)
        return SamplingMetadata(
            temperature=floats[:, 0],
            top_p=floats[:, 1],
            min_p=floats[:, 2],
            top_k=table[:, 3],
            seeds=(seeds[:, 1] << 32) | (seeds[:, 0] & 0xFFFFFFFF),
            positions=rows.positions[:count].long(),
            ban_rows=ban_rows,
            ban_token_ids=ban_token_ids,
            any_random=features[0],
            any_top_k=features[1],
            any_top_p=features[2],
            any_min_p=features[3],
            num_logprobs=int(self._num_logprobs[rows.slots_np].max(initial=NO_LOGPROBS)),
        )

    def _bans(self, rows: SampleRows) -> tuple[Tensor, Tensor]:
        num_generated = rows.positions_np - self._state.num_prompt_tokens[rows.slots_np]
        if not (self._min_tokens[rows.slots_np] > num_generated).any():
            empty = rows.slots[:0].long()
            return empty, empty
        params = [self._state.sampling[slot] for slot in rows.slots_np]
        bans = build_bans(
            num_generated.tolist(),
            [p.min_tokens for p in params],
            [p.stop_token_ids for p in params],
        )
        device = rows.slots.device
        return upload(bans[0], device), upload(bans[1], device)

    def _fill_decode(self, columns: StepColumns[Int32s], step: ScheduledStep) -> None:
        """Every sequence has one token; padding is sequences of one token on the spare row."""
        spare, used = self._state.spare_slot, step.slots.size
        for rows in (columns.token_rows, columns.seq_rows):
            rows[:used] = step.slots
            rows[used:] = spare
        columns.positions[:used] = step.starts
        columns.positions[used:] = 0
        columns.seq_lens[:used] = step.ends
        columns.seq_lens[used:] = 1
        columns.query_start_loc[:] = self._count[: columns.query_start_loc.size]

    def _fill_mixed(self, columns: StepColumns[Int32s], step: ScheduledStep) -> None:
        """Padding is tokens of the spare row behind the last sequence, and sequences of none."""
        spare, used, seqs = self._state.spare_slot, step.total_num_tokens, step.slots.size
        columns.query_start_loc[0] = 0
        np.cumsum(step.num_tokens, out=columns.query_start_loc[1 : seqs + 1])
        columns.query_start_loc[seqs + 1 :] = used
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

    def _fill_samples(
        self,
        columns: StepColumns[Int32s],
        step: ScheduledStep,
        sampling: Int64s,
    ) -> None:
        used = sampling.size
        columns.sample_rows[:used] = step.slots[sampling]
        columns.sample_rows[used:] = self._state.spare_slot
        columns.sample_tokens[:used] = columns.query_start_loc[sampling + 1] - 1
        columns.sample_tokens[used:] = 0
        columns.sample_positions[:used] = step.ends[sampling]
        columns.sample_positions[used:] = 0

    def _fill_updates(
        self, columns: StepColumns[Int32s], updates: BlockUpdates, num_filled: int
    ) -> None:
        """num_filled: how many entries may hold something else than padding."""
        used = updates.rows.size
        if used:
            columns.update_rows[:used] = updates.rows
            columns.update_indices[:used] = updates.indices
            columns.update_block_ids[:used] = updates.block_ids
        if used < num_filled:
            columns.update_rows[used:num_filled] = self._state.spare_slot
            columns.update_indices[used:num_filled] = 0
            columns.update_block_ids[used:num_filled] = 0

    def _admit(self, step: ScheduledStep) -> None:
        if not step.new_requests:
            return
        self._note_newest()
        admissions = np.empty((len(step.new_requests), 1 + SAMPLING_COLUMNS), np.int32)
        for admission, request in zip(admissions, step.new_requests, strict=True):
            admission[0] = request.slot
            admission[1:] = _sampling_row(request.sampling)
            self._remember(request.slot, request.sampling)
        self.tables.admit(upload(admissions, self.tables.device))

    def _remember(self, slot: int, params: SamplingParams) -> None:
        random = params.temperature > 0
        self._features[slot] = (
            random,
            random and params.top_k > 0,
            random and params.top_p < 1,
            random and params.min_p > 0,
        )
        self._num_logprobs[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self._min_tokens[slot] = params.min_tokens if params.stop_token_ids else 0
        self._is_plain[slot] = not random and params.logprobs is None and not self._min_tokens[slot]
        self._published[slot] = -1


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """What steps of the same rows have in common."""

    slots: Int64s
    """[B], the very array that the steps carry."""
    on_device: Bools
    """[B] whether the row's token was sampled, and so is on the device."""
    reading_slots: Int64s
    """Those rows."""
    sampling: Int64s
    """Indices of the sequences that sample."""
    sampling_slots: Int64s
    generations: Int64s
    """Of sampling_slots."""
    are_plain: bool
    """Of sampling_slots, as SampleRows has it."""
    goes_on: bool
    """One token each, all on the device, all sampling: a next step of the same rows is the same but
    for its positions and blocks."""


class _Held:
    """What a buffer's columns were filled for."""

    def __init__(self, batch: _Batch, columns: StepColumns[Int32s], used: int) -> None:
        """used: sequences, without padding."""
        self.batch = batch
        self.num_updates: int = columns.update_rows.size
        """Entries of the block table that may be no padding: before the first step, all."""
        self._positions = columns.positions[:used]
        self._seq_lens = columns.seq_lens[:used]
        self._sample_positions = columns.sample_positions[:used]

    def advance(self, step: ScheduledStep) -> None:
        """Bring columns that were filled for an earlier step of the same batch up to this one."""
        np.copyto(self._positions, step.starts)
        np.copyto(self._seq_lens, step.ends)
        np.copyto(self._sample_positions, step.ends)


def staging_capacity(state: RequestState) -> int:
    """Return the int32 values of the largest step: tokens, sequences and every block table entry,
    or padding in place of them."""
    limits = state.limits
    seqs, groups = most_seqs(state), limits.num_groups
    tokens = limits.max_num_batched_tokens + seqs
    entries = groups * seqs * limits.max_blocks_per_seq
    updates = max(min(entries, max(groups * seqs, MAX_BLOCK_UPDATES)), groups * tokens)
    return packed_size(StepShape(tokens, seqs, seqs, updates))


def most_seqs(state: RequestState) -> int:
    """Sequences of the largest step, padding included."""
    return max(state.limits.max_num_seqs + 1, *decode_sizes(state.limits.max_num_seqs))


def _sampling_row(params: SamplingParams) -> Int32s:
    """int32 [6]: temperature, top_p and min_p as float32 bits, top_k, then the seed's low and high
    half."""
    row = np.empty(SAMPLING_COLUMNS, np.int32)
    row[:3] = np.array([params.temperature, params.top_p, params.min_p], np.float32).view(np.int32)
    row[3] = params.top_k
    row[4:] = np.array([params.seed], np.uint64).view(np.int32)
    return row

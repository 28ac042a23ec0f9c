"""A step's device tensors, gathered from the request rows. Owns the rows' device copies: block
table, last tokens, sampling.

Shapes: S rows, N tokens, B sequences, R sequences that sample. Nothing in here waits for the
device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rpc_schema.sampling import SamplingParams
from worker_daemon.layers.attention import AttentionMetadata
from worker_daemon.runner.request_state import Int32s, Int64s, RequestState, ScheduledStep
from worker_daemon.runner.staging import HostStaging, upload
from worker_daemon.sample.sampler import NO_LOGPROBS, SamplingMetadata, build_bans

_SAMPLING_COLUMNS = 6
_TOKEN_ON_DEVICE = -1
_GREEDY = SamplingParams()


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The sequences of a step that sample. Device tensors, and the host's copy of their slots."""

    slots_np: Int64s
    """[R]"""
    generations: Int64s
    """[R] of the rows, when the step was accepted."""
    slots: Tensor
    """int64 [R]"""
    token_indices: Tensor
    """int64 [R]: each sequence's last token in the step."""
    positions: Tensor
    """int64 [R]: position of the token that is sampled."""
    num_generated: Int32s
    """[R] output tokens before the one that is sampled."""

    def keep(self, chosen: Int64s) -> "SampleRows":
        """Return these rows only. chosen [R'] int64: indices into the rows."""
        on_device = upload(chosen, self.slots.device)
        return SampleRows(
            self.slots_np[chosen],
            self.generations[chosen],
            self.slots[on_device],
            self.token_indices[on_device],
            self.positions[on_device],
            self.num_generated[chosen],
        )


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the forward pass and the sampler read."""

    host_token_ids: Tensor
    """int32 [N]; -1 where the token was sampled and is on the device only."""
    token_slots: Tensor
    """int64 [N]: row of each token."""
    positions: Tensor
    """int64 [N]"""
    attention: AttentionMetadata
    sample_rows: SampleRows
    tokens_from: int
    """The publication (tokens.py) that brings the last of the sampled tokens that this step reads;
    -1: reads none."""


class InputBuilder:
    """Builds StepInputs. Owned by the model runner, used on the step thread only."""

    def __init__(self, state: RequestState, device: torch.device, depth: int) -> None:
        limits = state.limits
        num_rows = limits.max_num_seqs + 1
        self._state = state
        self._block_size = limits.block_size
        self._block_table = torch.zeros(
            (num_rows, limits.max_blocks_per_seq), dtype=torch.int32, device=device
        )
        self.last_sampled = torch.zeros(num_rows, dtype=torch.int64, device=device)
        """int64 [S + 1]: the newest sampled token of each row."""
        self._sampling = torch.zeros(
            (num_rows, _SAMPLING_COLUMNS), dtype=torch.int32, device=device
        )
        self._params: list[SamplingParams] = [_GREEDY] * num_rows
        self._features = np.zeros((num_rows, 4), np.bool_)
        self._num_logprobs = np.full(num_rows, NO_LOGPROBS, np.int32)
        self._min_tokens = np.zeros(num_rows, np.int32)
        self._published = np.full(num_rows, -1, np.int64)
        self._staging = HostStaging(_staging_capacity(state), device, depth)

    def build(self, step: ScheduledStep) -> StepInputs:
        """Upload what changed and what this step is; gather the rest on the device."""
        num_seqs = step.slots.size
        query_start_loc = np.zeros(num_seqs + 1, np.int32)
        np.cumsum(step.num_tokens, out=query_start_loc[1:])
        seq_lens = step.starts + step.num_tokens
        token_slots = np.repeat(step.slots, step.num_tokens).astype(np.int32)
        positions = np.arange(step.total_num_tokens, dtype=np.int32) + np.repeat(
            step.starts - query_start_loc[:-1], step.num_tokens
        )
        sampling = np.flatnonzero(step.samples)
        uploaded = self._staging.upload(
            [
                self._host_tokens(step, query_start_loc),
                token_slots,
                positions,
                step.slots.astype(np.int32),
                query_start_loc,
                seq_lens,
                step.slots[sampling].astype(np.int32),
                query_start_loc[sampling + 1] - 1,
                *self._row_updates(step),
            ]
        )
        tokens, token_rows, token_positions, slots, start_loc, lens, rows, last = uploaded[:8]
        self._apply_row_updates(uploaded[8:])
        token_rows, token_positions, rows, last = (
            t.long() for t in (token_rows, token_positions, rows, last)
        )
        sampled_slots = step.slots[sampling]
        return StepInputs(
            host_token_ids=tokens,
            token_slots=token_rows,
            positions=token_positions,
            attention=self._attention(
                step, seq_lens, (slots.long(), start_loc, lens), (token_rows, token_positions)
            ),
            sample_rows=SampleRows(
                slots_np=sampled_slots,
                generations=self._state.generation[sampled_slots],
                slots=rows,
                token_indices=last,
                positions=token_positions[last] + 1,
                num_generated=seq_lens[sampling] - self._state.num_prompt_tokens[sampled_slots],
            ),
            tokens_from=self._newest_publication(step),
        )

    def lost_rows(self, step: ScheduledStep) -> SampleRows:
        """Return the sequences that sample in a step whose inputs could not be built or used."""
        slots_np = step.slots[step.samples]
        slots = upload(slots_np, self.last_sampled.device)
        nothing = torch.zeros_like(slots)
        return SampleRows(
            slots_np=slots_np,
            generations=self._state.generation[slots_np],
            slots=slots,
            token_indices=nothing,
            positions=nothing,
            num_generated=np.zeros(slots_np.size, np.int32),
        )

    def gather_token_ids(self, inputs: StepInputs) -> Tensor:
        """Return int64 [N]: tokens from the host, or else the newest sampled token of their row."""
        on_device = inputs.host_token_ids == _TOKEN_ON_DEVICE
        return torch.where(
            on_device, self.last_sampled[inputs.token_slots], inputs.host_token_ids.long()
        )

    def note_publication(self, slots: Int64s, publication: int) -> None:
        """Remember which publication brings the newest token of these rows."""
        self._published[slots] = publication

    def sampling_metadata(self, rows: SampleRows) -> SamplingMetadata:
        """Gather how each of the rows is sampled."""
        features: list[bool] = np.any(self._features[rows.slots_np], axis=0).tolist()
        table = self._sampling[rows.slots]
        floats, seeds = table[:, :3].contiguous().view(torch.float32), table[:, 4:6].long()
        ban_rows, ban_token_ids = self._bans(rows)
        return SamplingMetadata(
            temperature=floats[:, 0],
            top_p=floats[:, 1],
            min_p=floats[:, 2],
            top_k=table[:, 3],
            seeds=(seeds[:, 1] << 32) | (seeds[:, 0] & 0xFFFFFFFF),
            positions=rows.positions,
            ban_rows=ban_rows,
            ban_token_ids=ban_token_ids,
            any_random=features[0],
            any_top_k=features[1],
            any_top_p=features[2],
            any_min_p=features[3],
            num_logprobs=int(self._num_logprobs[rows.slots_np].max(initial=NO_LOGPROBS)),
        )

    def _bans(self, rows: SampleRows) -> tuple[Tensor, Tensor]:
        if not (self._min_tokens[rows.slots_np] > rows.num_generated).any():
            empty = rows.slots[:0]
            return empty, empty
        params = [self._params[slot] for slot in rows.slots_np]
        bans = build_bans(
            rows.num_generated.tolist(),
            [p.min_tokens for p in params],
            [p.stop_token_ids for p in params],
        )
        device = rows.slots.device
        return upload(bans[0], device), upload(bans[1], device)

    def _attention(
        self,
        step: ScheduledStep,
        seq_lens: Int32s,
        sequences: tuple[Tensor, Tensor, Tensor],
        tokens: tuple[Tensor, Tensor],
    ) -> AttentionMetadata:
        slots, query_start_loc, seq_lens_on_device = sequences
        token_slots, positions = tokens
        max_seq_len = int(seq_lens.max(initial=0))
        width = -(-max_seq_len // self._block_size)
        blocks = self._block_table[token_slots, positions // self._block_size].long()
        return AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens_on_device,
            block_table=self._block_table[slots, :width],
            slot_mapping=blocks * self._block_size + positions % self._block_size,
            num_seqs=slots.shape[0],
            max_query_len=int(step.num_tokens.max(initial=0)),
            max_seq_len=max_seq_len,
            query_lens_np=step.num_tokens,
            seq_lens_np=seq_lens,
        )

    def _host_tokens(self, step: ScheduledStep, query_start_loc: Int32s) -> Int32s:
        tokens = np.full(step.total_num_tokens, _TOKEN_ON_DEVICE, np.int32)
        known = self._state.num_known_tokens[step.slots]
        for index in np.flatnonzero(step.starts < known):
            first, start = query_start_loc[index], step.starts[index]
            count = step.num_tokens[index]
            tokens[first : first + count] = self._state.known_tokens[step.slots[index]][
                start : start + count
            ]
        return tokens

    def _newest_publication(self, step: ScheduledStep) -> int:
        sampled = step.slots[step.starts >= self._state.num_known_tokens[step.slots]]
        return int(self._published[sampled].max(initial=-1))

    def _row_updates(self, step: ScheduledStep) -> Sequence[Int32s]:
        updates = step.block_updates
        for request in step.new_requests:
            self._admit(request.slot, request.sampling)
        new_slots = np.array([request.slot for request in step.new_requests], np.int32)
        new_rows = [_sampling_row(request.sampling) for request in step.new_requests]
        return (
            updates.slots.astype(np.int32),
            updates.indices.astype(np.int32),
            updates.block_ids,
            new_slots,
            np.concatenate(new_rows) if new_rows else new_slots,
        )

    def _apply_row_updates(self, columns: Sequence[Tensor]) -> None:
        slots, indices, block_ids, new_slots, new_rows = columns
        if slots.numel():
            self._block_table[slots.long(), indices.long()] = block_ids
        if new_slots.numel():
            self._sampling[new_slots.long()] = new_rows.view(-1, _SAMPLING_COLUMNS)

    def _admit(self, slot: int, params: SamplingParams) -> None:
        self._params[slot] = params
        random = params.temperature > 0
        self._features[slot] = (
            random,
            random and params.top_k > 0,
            random and params.top_p < 1,
            random and params.min_p > 0,
        )
        self._num_logprobs[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self._min_tokens[slot] = params.min_tokens if params.stop_token_ids else 0
        self._published[slot] = -1


def _sampling_row(params: SamplingParams) -> Int32s:
    """int32 [6]: temperature, top_p and min_p as float32 bits, top_k, then the seed's low and high
    half."""
    row = np.empty(_SAMPLING_COLUMNS, np.int32)
    row[:3] = np.array([params.temperature, params.top_p, params.min_p], np.float32).view(np.int32)
    row[3] = params.top_k
    row[4:] = np.array([params.seed], np.uint64).view(np.int32)
    return row


def _staging_capacity(state: RequestState) -> int:
    """int32 values of the largest step: tokens, sequences, every row admitted and every block table
    entry."""
    limits = state.limits
    tokens, rows = limits.max_num_batched_tokens, limits.max_num_seqs + 1
    blocks = min(rows * limits.max_blocks_per_seq, 1 << 20)
    return 3 * tokens + 5 * rows + 1 + 3 * blocks + (1 + _SAMPLING_COLUMNS) * rows

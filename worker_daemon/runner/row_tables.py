"""The request rows' tables on the device: block table, newest sampled tokens. request_state.py
holds the host's rows, which are the source of truth.

Shapes: S rows (plus the spare row), N tokens, U updates (step_layout.py), G KV groups.
"""

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rpc_schema.step import NO_TOKEN
from worker_daemon.contracts.attention import StateSlots
from worker_daemon.contracts.drafts import Verified
from worker_daemon.device.pinned import upload
from worker_daemon.runner.scheduled_step import BlockUpdates, StepLimits
from worker_daemon.runner.step_layout import StepColumns, aligned

TOKEN_ON_DEVICE = -1
"""In place of a row's newest token. -1 - j is draft j after it, from 1."""


class RowKernels(Protocol):
    """Operations on the device's rows. They never wait for it; a CUDA graph can capture them."""

    def update_blocks(
        self, block_table: Tensor, rows: Tensor, indices: Tensor, block_ids: Tensor
    ) -> None:
        """block_table[rows, indices] = block_ids. Columns int32 [U]; equal targets are written
        with equal values."""

    def gather_tokens(
        self,
        host_token_ids: Tensor,
        token_rows: Tensor,
        positions: Tensor,
        next_tokens: Tensor,
        block_table: Tensor,
        block_size: int,
        texts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Columns int32 [N], next_tokens int64 [S + 1, 1 + K] -> (token_ids, slot_mapping), both
        int64 [N]. Each token is also written to texts int32 [S + 1, W], at its row and position.

        A token is the host's value or, if that is -1 - j, entry j of its row in next_tokens (0 if
        that is NO_TOKEN: the request has failed, and its driver does not know it yet). Its KV slot
        is block_id * block_size + offset, for its position in its row's block table.
        """

    def correct_lengths(
        self,
        seq_lens: Tensor,
        seq_rows: Tensor,
        corrections: Tensor,
        refused: Tensor,
        shift: Tensor,
    ) -> None:
        """Columns int32 [B], tables int32 [S + 1]. A row's shift is its correction - refused, and
        is added to its sequence's length; a correction of -1 counts as 0, and clears refused."""

    def correct_positions(self, positions: Tensor, rows: Tensor, shift: Tensor) -> None:
        """positions += shift[rows]: columns int32 [N], shift int32 [S + 1]."""

    def verify(
        self,
        token_ids: Tensor,
        inputs: Tensor,
        firsts: Tensor,
        num_seqs: Tensor,
        rows: Tensor,
        positions: Tensor,
        next_tokens: Tensor,
        refused: Tensor,
    ) -> Verified:
        """Decide which samples sequences gain in a step with drafts: those up to the first that
        differs from the draft after it, or that a NO_TOKEN follows. See RowTables.verify.
        token_ids, inputs int64 [R]; firsts int32 [Q + 1]: each sequence's first sample, then their
        number; num_seqs int32 [1]: sequences from there on are padding; rows, positions int32
        [R], of each sample."""


class TorchRowKernels:
    """Plain torch, for the CPU and as the reference of the Triton kernels."""

    def update_blocks(
        self, block_table: Tensor, rows: Tensor, indices: Tensor, block_ids: Tensor
    ) -> None:
        block_table[rows.long(), indices.long()] = block_ids

    def gather_tokens(
        self,
        host_token_ids: Tensor,
        token_rows: Tensor,
        positions: Tensor,
        next_tokens: Tensor,
        block_table: Tensor,
        block_size: int,
        texts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        rows, places = token_rows.long(), positions.long()
        column = (TOKEN_ON_DEVICE - host_token_ids.long()).clamp(min=0)
        token_ids = torch.where(
            host_token_ids < 0, next_tokens[rows, column].clamp(min=0), host_token_ids.long()
        )
        if texts is not None:
            texts[rows, places] = token_ids.int()
        blocks = block_table[rows, places // block_size].long()
        return token_ids, blocks * block_size + places % block_size

    def correct_lengths(
        self,
        seq_lens: Tensor,
        seq_rows: Tensor,
        corrections: Tensor,
        refused: Tensor,
        shift: Tensor,
    ) -> None:
        rows = seq_rows.long()
        refused[rows] = torch.where(corrections < 0, 0, refused[rows])
        shift[rows] = corrections.clamp(min=0) - refused[rows]
        seq_lens += shift[rows]

    def correct_positions(self, positions: Tensor, rows: Tensor, shift: Tensor) -> None:
        positions += shift[rows.long()]

    def verify(
        self,
        token_ids: Tensor,
        inputs: Tensor,
        firsts: Tensor,
        num_seqs: Tensor,
        rows: Tensor,
        positions: Tensor,
        next_tokens: Tensor,
        refused: Tensor,
    ) -> Verified:
        device, last, spare = token_ids.device, token_ids.shape[0] - 1, next_tokens.shape[0] - 1
        is_there = torch.arange(firsts.shape[0] - 1, device=device) < num_seqs
        starts = firsts[:-1].long().clamp(max=last)
        num_samples = torch.where(is_there, firsts.diff(), 0)
        place = torch.arange(next_tokens.shape[1], device=device)
        index = (starts.unsqueeze(1) + place).clamp(max=last)
        following = (index + 1).clamp(max=last)
        sampled = token_ids[index]
        agrees = (sampled == inputs[following]) & (token_ids[following] != NO_TOKEN)
        agrees &= place + 1 < num_samples.unsqueeze(1)
        accepted = agrees.long().cumprod(1).sum(1)
        is_gained = (place <= accepted.unsqueeze(1)) & is_there.unsqueeze(1)
        gained = torch.where(is_gained, sampled, NO_TOKEN)
        counts = torch.where(is_there, accepted + 1, 0).int()
        own, own_rows = num_samples - counts, torch.where(is_there, rows[starts], spare)
        lengths = torch.where(is_there, positions[starts] + counts, 0)
        places = own_rows.long()
        newest = sampled.gather(1, accepted.unsqueeze(1)).squeeze(1)
        next_tokens[places, 0] = torch.where(is_there, newest, next_tokens[places, 0])
        total = refused[places] + own
        refused[places] = total
        kept = token_ids.new_full((token_ids.shape[0] + 1,), NO_TOKEN)  # the last one for the rest
        kept.scatter_(0, torch.where(is_gained, index, last + 1).flatten(), gained.flatten())
        return Verified(own_rows, gained, counts, lengths, own, total, kept[:-1])


class Gathered(NamedTuple):
    """The tokens and KV slots that a forward pass reads."""

    token_ids: Tensor
    """int64 [N]"""
    slot_mappings: tuple[Tensor, ...]
    """int64 [N] for each group."""


class RowTables:
    """The device tables of the request rows. Owned by the model runner; written by steps in order,
    on the device's stream."""

    def __init__(self, limits: StepLimits, device: torch.device, kernels: RowKernels) -> None:
        num_rows = limits.max_num_seqs + 1
        self._kernels = kernels
        self._block_sizes = [group.block_size for group in limits.block_groups]
        self._num_rows = num_rows
        self._checkpoint_blocks = limits.checkpoint_blocks
        self._border_tokens = limits.border_tokens
        self.device = device
        self.block_table = torch.zeros(
            (limits.num_groups * num_rows, limits.max_blocks_per_seq),
            dtype=torch.int32,
            device=device,
        )
        """int32 [G * (S + 1), max_blocks]"""
        self.group_tables: tuple[Tensor, ...] = torch.split(self.block_table, num_rows)
        """int32 [S + 1, max_blocks] for each group: views of it."""
        shape = (num_rows, 1 + limits.max_drafts)
        self.next_tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        """int64 [S + 1, 1 + K]: the next tokens of each row, its newest one and then K drafts."""
        self.last_sampled = self.next_tokens[:, 0]
        """int64 [S + 1], a view: the newest sampled token of each row or, if that was refused, the
        token from which the row continues."""
        self.drafts = self.next_tokens[:, 1:]
        """int64 [S + 1, K], a view."""
        self.refused = torch.zeros(num_rows, dtype=torch.int32, device=device)
        """int32 [S + 1]: for each row whose counts on the host are bounds, the number of refused
        tokens since they became bounds. The true counts are the bounds + its corrections - these.
        """
        self._shift = torch.zeros_like(self.refused)

    def update(self, columns: StepColumns[Tensor]) -> None:
        """Write the block ids that the step brings."""
        if columns.update_rows.shape[0]:
            self._kernels.update_blocks(
                self.block_table,
                columns.update_rows,
                columns.update_indices,
                columns.update_block_ids,
            )

    def write(self, updates: BlockUpdates) -> None:
        """Write block ids before the step that is launched next, and after those before it."""
        count = updates.rows.size
        columns = np.empty((3, aligned(count)), np.int32)
        columns[0, :count] = updates.rows
        columns[1, :count] = updates.indices
        columns[2, :count] = updates.block_ids
        rows, indices, block_ids = upload(columns, self.device)[:, :count]
        self._kernels.update_blocks(self.block_table, rows, indices, block_ids)

    def correct(self, columns: StepColumns[Tensor]) -> None:
        """Correct a step's positions and lengths if the host has only bounds. Must run before
        anything reads them."""
        if not columns.corrections.shape[0]:
            return
        kernels, shift = self._kernels, self._shift
        kernels.correct_lengths(
            columns.seq_lens, columns.seq_rows, columns.corrections, self.refused, shift
        )
        kernels.correct_positions(columns.positions, columns.token_rows, shift)
        if columns.sample_rows.shape[0]:
            kernels.correct_positions(columns.sample_positions, columns.sample_rows, shift)

    def refuse(self, rows: Tensor, token_ids: Tensor, refused: Tensor) -> Tensor:
        """Record the refusals int32 [R] of rows int32 [R], and the tokens int64 [R] from which they
        continue; return each row's total refusals, int32 [R]."""
        places = rows.long()
        total = self.refused[places] + refused
        self.refused[places] = total
        self.last_sampled[places] = token_ids
        return total

    def verify(
        self,
        token_ids: Tensor,
        inputs: Tensor,
        firsts: Tensor,
        num_seqs: Tensor,
        rows: Tensor,
        positions: Tensor,
    ) -> Verified:
        """Decide the outcome of a step's drafts, record refusals, and let each row continue from
        the last token that it gains. See RowKernels.verify."""
        return self._kernels.verify(
            token_ids, inputs, firsts, num_seqs, rows, positions, self.next_tokens, self.refused
        )

    def restore(self, updates: BlockUpdates) -> None:
        """Write block ids outside of any step."""
        rows = torch.from_numpy(updates.rows).to(self.device)
        indices = torch.from_numpy(updates.indices).long().to(self.device)
        self.block_table[rows, indices] = torch.from_numpy(updates.block_ids).to(self.device)

    def gather(self, columns: StepColumns[Tensor], texts: Tensor | None = None) -> Gathered:
        """Return the step's tokens and their KV slots. The step's updates must have been written.
        texts: see Drafter."""
        by_group = [
            self._kernels.gather_tokens(
                columns.host_token_ids,
                columns.token_rows,
                columns.positions,
                self.next_tokens,
                block_table,
                block_size,
                texts,
            )
            for block_table, block_size in zip(self.group_tables, self._block_sizes, strict=True)
        ]
        # Each call gathers the same tokens again: a kernel for slots only would save almost
        # nothing.
        return Gathered(by_group[0][0], tuple(slots for _, slots in by_group))

    def state_slots(self, columns: StepColumns[Tensor]) -> StateSlots | None:
        """Return the places of the step's sequences in layers' states; None if there are no
        checkpoints. The step's updates must have been written.

        They follow from positions and block table alone. So a graph's launches are the same for
        all steps, and a row that continues at a border reads the copy that it has just written.
        """
        if not self._checkpoint_blocks:
            return None
        starts, ends = columns.query_start_loc[:-1].long(), columns.query_start_loc[1:]
        first = columns.positions.index_select(0, starts.clamp_max(columns.positions.shape[0] - 1))
        rows = columns.seq_rows.long()
        before = self._checkpoints(rows, first.long())
        after = self._checkpoints(rows, columns.seq_lens.long())
        return StateSlots(
            torch.where(before > 0, before + self._num_rows, rows),
            torch.where(starts < ends, after, 0) + self._num_rows,
        )

    def _checkpoints(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return the number of the checkpoint at the end of each row's first tokens, int64 [B]; 0
        if that is no border, or if its block has no checkpoint."""
        indices = (ends // self._block_sizes[0] - 1).clamp_min(0)
        block_ids = self.group_tables[0][rows, indices].long()
        is_border = (ends % self._border_tokens == 0) & (block_ids % self._checkpoint_blocks == 0)
        return torch.where(is_border & (ends > 0), block_ids // self._checkpoint_blocks, 0)

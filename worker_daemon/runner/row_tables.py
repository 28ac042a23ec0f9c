"""The request rows' device copies: block table, newest sampled tokens. Host truth is
request_state.py's.

Shapes: S rows (plus the spare row), N tokens, U updates (step_layout.py), G groups of layers.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from worker_daemon.runner.scheduled_step import BlockUpdates, StepLimits
from worker_daemon.runner.step_layout import StepColumns

TOKEN_ON_DEVICE = -1


class RowKernels(Protocol):
    """What is done to rows on the device. Never waits for it; capturable into a CUDA graph."""

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
        last_sampled: Tensor,
        block_table: Tensor,
        block_size: int,
    ) -> tuple[Tensor, Tensor]:
        """Columns int32 [N] -> (token_ids, slot_mapping), both int64 [N].

        A token is the host's, or where that is -1 its row's newest sampled one (0 where that is
        NO_TOKEN: the request has failed, and its driver does not know yet); its KV slot is
        block_id * block_size + offset of its position in its row's block table.
        """


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
        last_sampled: Tensor,
        block_table: Tensor,
        block_size: int,
    ) -> tuple[Tensor, Tensor]:
        rows, places = token_rows.long(), positions.long()
        token_ids = torch.where(
            host_token_ids == TOKEN_ON_DEVICE,
            last_sampled[rows].clamp(min=0),
            host_token_ids.long(),
        )
        blocks = block_table[rows, places // block_size].long()
        return token_ids, blocks * block_size + places % block_size


class Gathered(NamedTuple):
    """What a forward pass reads of the rows."""

    token_ids: Tensor
    """int64 [N]"""
    slot_mappings: tuple[Tensor, ...]
    """Of each group int64 [N]."""


class RowTables:
    """Owned by the model runner; written by steps in order, on the device's stream."""

    def __init__(self, limits: StepLimits, device: torch.device, kernels: RowKernels) -> None:
        num_rows = limits.max_num_seqs + 1
        self._kernels = kernels
        self._block_sizes = [group.block_size for group in limits.block_groups]
        self.device = device
        self.block_table = torch.zeros(
            (limits.num_groups * num_rows, limits.max_blocks_per_seq),
            dtype=torch.int32,
            device=device,
        )
        """int32 [G * (S + 1), max_blocks]"""
        self.group_tables: tuple[Tensor, ...] = torch.split(self.block_table, num_rows)
        """Of each group int32 [S + 1, max_blocks]: parts of it."""
        self.last_sampled = torch.zeros(num_rows, dtype=torch.int64, device=device)
        """int64 [S + 1]: the newest sampled token of each row."""

    def update(self, columns: StepColumns[Tensor]) -> None:
        """Write the block ids that the step brings."""
        if columns.update_rows.shape[0]:
            self._kernels.update_blocks(
                self.block_table,
                columns.update_rows,
                columns.update_indices,
                columns.update_block_ids,
            )

    def restore(self, updates: BlockUpdates) -> None:
        """Write block ids outside of any step."""
        rows = torch.from_numpy(updates.rows).to(self.device)
        indices = torch.from_numpy(updates.indices).long().to(self.device)
        self.block_table[rows, indices] = torch.from_numpy(updates.block_ids).to(self.device)

    def gather(self, columns: StepColumns[Tensor]) -> Gathered:
        """Return the step's tokens and their KV slots. The step's updates are written."""
        by_group = [
            self._kernels.gather_tokens(
                columns.host_token_ids,
                columns.token_rows,
                columns.positions,
                self.last_sampled,
                block_table,
                block_size,
            )
            for block_table, block_size in zip(self.group_tables, self._block_sizes, strict=True)
        ]
        # Each brings the same tokens: a kernel for slots alone would save next to nothing.
        return Gathered(by_group[0][0], tuple(slots for _, slots in by_group))

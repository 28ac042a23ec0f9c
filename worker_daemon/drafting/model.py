"""A draft model: a smaller model of the same vocabulary, all of it on the last stage's devices.

It computes what the target computes, so that its KV cache holds the same tokens in the same blocks:
most tokens in the same step, those of plain decodes once it is asked for drafts (`catch_up`), from
the rows' texts. Then it computes K tokens more for each row, one after the other. It samples with
the row's parameters and noise (seed and position), so that it chooses what the target does wherever
their logits agree.

A row has blocks for its own tokens only. Drafts beyond these are computed with pages that nobody
owns, and are as good as the rest of their context.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from worker_daemon.contracts.arrays import Int32s, Int64s
from worker_daemon.contracts.attention import AttentionMetadata
from worker_daemon.device.pinned import upload
from worker_daemon.drafting.interface import ComputedStep, Gained, MissingTokens, Replay
from worker_daemon.drafting.row_texts import DraftLimits, RowTexts
from worker_daemon.models.decoder import DecoderStage

_ALIGNMENT: Final = 4
"""Columns start at multiples of 16 bytes, for which kernels are compiled."""


class ModelDrafter:
    """The drafter of the method draft_model, and a StepFollower. Owns the texts of its rows; its
    weights belong to the loaded model, and its pages to the KV cache."""

    def __init__(
        self,
        stage: DecoderStage,
        pages: Sequence[Tensor],
        block_table: Tensor,
        block_size: int,
        limits: DraftLimits,
        texts: RowTexts,
    ) -> None:
        """stage: the whole draft model. pages: one tensor for each of its layers, [num_blocks,
        *page shape], or none under NullAttention. block_table int32 [S + 1, max_blocks]: that of
        the rows, whose entries this object may set to 0 beyond a new row's blocks. texts: of these
        rows, for this object alone."""
        self.stage = stage
        self._pages = pages
        self._block_table = block_table
        self._block_size = block_size
        self._limits = limits
        self._texts = texts
        self._count = torch.arange(
            block_table.shape[0] + 1, dtype=torch.int32, device=block_table.device
        )
        self._replay: Replay | None = None

    @property
    def follower(self) -> "ModelDrafter":
        """See Drafter."""
        return self

    @property
    def texts(self) -> Tensor:
        """See Drafter."""
        return self._texts.table.tokens

    @staticmethod
    def num_bytes(limits: DraftLimits) -> int:
        """Return the device memory that a drafter owns."""
        return RowTexts.num_bytes(limits)

    def begin(self, slots: Sequence[int], tokens: Sequence[Int32s]) -> None:
        """See Drafter."""
        rows = upload(np.array(slots, np.int64), self._block_table.device)
        self._block_table.index_fill_(0, rows, 0)
        self._texts.begin(slots, tokens)

    def forget(self) -> None:
        """See Drafter: nothing is kept but the KV cache, and texts, which begin anew with each
        row."""

    def restart(self) -> None:
        """See Drafter, and `forget`. Rows that go on have the same tokens on every rank, as they
        have taken part in no step that has failed on one."""

    def follows(self, max_query_len: int) -> bool:
        """See StepFollower: all steps but plain decodes."""
        return max_query_len > 1

    def follow(self, step: ComputedStep) -> None:
        """See Drafter."""
        if self.follows(step.metadata.max_query_len):
            self.compute_tokens(step)

    @torch.inference_mode()
    def compute_tokens(self, step: ComputedStep) -> None:
        """See StepFollower."""
        self._forward(step.token_ids, step.positions, step.metadata)

    @torch.inference_mode()
    def catch_up(self, missing: MissingTokens, seq_lens: Tensor) -> None:
        """See StepFollower. The tokens are computed like the end of a prompt, also if each row has
        one: the kernels of decodes read no keys that other rows write in the same pass, and rows
        may share the blocks that they fill."""
        counts, size = missing.counts, self._block_size
        starts = np.concatenate(([0], np.cumsum(counts)))
        seqs = np.repeat(np.arange(counts.size), counts)
        behind = np.arange(seqs.size) - (starts[1:] + missing.left)[seqs]
        order = np.argsort(-missing.ends, kind="stable")
        columns = (starts, order, missing.rows, missing.indices, missing.left, seqs, behind)
        firsts, seq_order, rows, indices, left, seqs_there, places = _upload_all(
            columns, seq_lens.device
        )
        lens = seq_lens.index_select(0, indices)
        positions = (lens.index_select(0, seqs_there) + places).clamp(min=0)
        token_rows = rows.index_select(0, seqs_there).long()
        token_ids = self.texts[token_rows, positions.long()].long()
        blocks = self._block_table[token_rows, (positions // size).long()].long()
        metadata = AttentionMetadata(
            query_start_loc=firsts,
            seq_lens=lens - left,
            seq_order=seq_order,
            block_table=self._block_table,
            seq_rows=rows,
            slot_mapping=blocks * size + positions % size,
            num_seqs=counts.size,
            max_query_len=max(2, int(counts.max())),
            max_seq_len=int(missing.ends.max()),
            query_lens_np=counts,
            seq_lens_np=missing.ends,
        )
        self._forward(token_ids, positions, metadata)

    @torch.inference_mode()
    def propose(self, gained: Gained) -> Tensor:
        """See Drafter."""
        replayed = None if self._replay is None else self._replay(gained)
        return self.compute(gained) if replayed is None else replayed

    def propose_by(self, replay: Replay | None) -> None:
        """See StepFollower."""
        self._replay = replay

    def compile_subset(self) -> "ModelDrafter":
        """See Drafter."""
        stage, kept = self.stage.compile_subset()
        pages = [self._pages[index] for index in kept] if self._pages else ()
        return ModelDrafter(
            stage, pages, self._block_table, self._block_size, self._limits, self._texts
        )

    @torch.inference_mode()
    def compute(self, gained: Gained) -> Tensor:
        """See StepFollower. Rows that have gained nothing compute position 0, in the null block."""
        ends = gained.ends
        assert ends is not None, "this drafter is a StepFollower"
        num_drafts, last = self._limits.num_drafts, self._limits.max_model_len - 1
        has_gained = gained.counts > 0
        newest = (gained.counts.long() - 1).clamp(min=0).unsqueeze(1)
        token_ids = gained.token_ids.gather(1, newest).squeeze(1).clamp(min=0)
        drafts = torch.empty(
            (token_ids.shape[0], num_drafts), dtype=torch.int64, device=token_ids.device
        )
        for number in range(num_drafts):
            positions = (gained.lengths - 1 + number) * has_gained
            is_kept = has_gained & (positions <= last)
            positions = positions.clamp(0, last)
            longest = min(ends.longest + number, last) + 1
            metadata = self._metadata(gained.rows, positions, is_kept, longest)
            hidden = self._forward(token_ids, positions, metadata)
            logits = self.stage.compute_logits(hidden)
            token_ids = ends.choose(logits, positions + 1).clamp(min=0)
            drafts[:, number] = token_ids
        return drafts

    def _forward(self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        stage = self.stage
        hidden = stage.embed(token_ids)
        return stage.forward(hidden, positions, self._pages, [metadata] * stage.num_layers)

    def _metadata(
        self, rows: Tensor, positions: Tensor, is_kept: Tensor, longest: int
    ) -> AttentionMetadata:
        """Return that of one token of each row. is_kept: bool [Q], False for tokens whose keys go
        to the null block."""
        count, size = rows.shape[0], self._block_size
        # int64, as the target's slots are: kernels are compiled ahead for these.
        blocks = self._block_table[rows.long(), (positions // size).long()].long()
        slots = (blocks * size + positions % size) * is_kept
        return AttentionMetadata(
            query_start_loc=self._count[: count + 1],
            seq_lens=positions + 1,
            seq_order=self._count[:count],
            block_table=self._block_table,
            seq_rows=rows,
            slot_mapping=slots,
            num_seqs=count,
            max_query_len=1,
            max_seq_len=longest,
            query_lens_np=np.ones(count, np.int32),
            seq_lens_np=np.full(count, longest, np.int32),
        )


def _upload_all(columns: Sequence[Int32s | Int64s], device: torch.device) -> list[Tensor]:
    """Copy columns to the device as int32, in one copy."""
    padded = [np.pad(column, (0, -column.size % _ALIGNMENT)) for column in columns]
    joined = upload(np.concatenate(padded).astype(np.int32), device)
    parts = torch.split(joined, [column.size for column in padded])
    return [part[: column.size] for part, column in zip(parts, columns, strict=True)]

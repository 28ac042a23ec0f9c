"""A draft model: a smaller model of the same vocabulary, all of it on the last stage's devices.

It computes each token in the same step as the target, so that its KV cache holds the same tokens in
the same blocks: a cached prefix, an adopted request or a rejected draft needs nothing of its own.
Then it computes K tokens more for each row, one after the other. It samples with the row's
parameters and noise (seed and position), so that it chooses what the target does wherever their
logits agree.

A row has blocks for its own tokens only. Drafts beyond these are computed with pages that nobody
owns, and are as good as the rest of their context.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker_daemon.contracts.arrays import Int32s
from worker_daemon.contracts.attention import AttentionMetadata
from worker_daemon.device.pinned import upload
from worker_daemon.drafting.interface import ComputedStep, Gained, Replay
from worker_daemon.drafting.row_texts import DraftLimits
from worker_daemon.models.decoder import DecoderStage


class ModelDrafter:
    """The drafter of the method draft_model, and a StepFollower. Owns no memory: its weights belong
    to the loaded model, and its pages to the KV cache."""

    def __init__(
        self,
        stage: DecoderStage,
        pages: Sequence[Tensor],
        block_table: Tensor,
        block_size: int,
        limits: DraftLimits,
    ) -> None:
        """stage: the whole draft model. pages: one tensor for each of its layers, [num_blocks,
        *page shape], or none under NullAttention. block_table int32 [S + 1, max_blocks]: that of
        the rows, whose entries this object may set to 0 beyond a new row's blocks."""
        self.stage = stage
        self._pages = pages
        self._block_table = block_table
        self._block_size = block_size
        self._limits = limits
        self._count = torch.arange(
            block_table.shape[0] + 1, dtype=torch.int32, device=block_table.device
        )
        self._replay: Replay | None = None

    @property
    def follower(self) -> "ModelDrafter":
        """See Drafter."""
        return self

    @property
    def texts(self) -> None:
        """See Drafter."""
        return None

    def begin(self, slots: Sequence[int], tokens: Sequence[Int32s]) -> None:
        """See Drafter. The step that admits a request computes its tokens here, too (`follow`)."""
        rows = upload(np.array(slots, np.int64), self._block_table.device)
        self._block_table.index_fill_(0, rows, 0)

    def forget(self) -> None:
        """See Drafter: nothing is kept but the KV cache."""

    def restart(self) -> None:
        """See Drafter, and `forget`."""

    @torch.inference_mode()
    def follow(self, step: ComputedStep) -> None:
        """See Drafter."""
        self._forward(step.token_ids, step.positions, step.metadata)

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
        return ModelDrafter(stage, pages, self._block_table, self._block_size, self._limits)

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

"""Runs the forward pass of a stage: the part of a step that one CUDA graph can hold.

Shapes: N tokens, H hidden size, R samples; N and R with padding.
"""

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from worker_daemon.contracts.arrays import Int32s
from worker_daemon.contracts.attention import AttentionMetadata
from worker_daemon.drafting.interface import ComputedStep, Drafter
from worker_daemon.models.decoder import DecoderStage, LayerWritten
from worker_daemon.runner.draft_verifier import DraftVerifier
from worker_daemon.runner.input_batch import StepInputs
from worker_daemon.runner.kv_cache import LayerKV
from worker_daemon.runner.parts.step_parts import StepParts
from worker_daemon.runner.routed_experts import StageExperts
from worker_daemon.runner.row_tables import RowTables
from worker_daemon.runner.sample_rows import SamplingInputs
from worker_daemon.runner.staging import Staging
from worker_daemon.runner.step_layout import StepColumns


class StageOutput(NamedTuple):
    """Results of a stage. Valid until the next step runs."""

    hidden: Tensor
    """[N, H] residual stream; on a stage that hands on experts, followed by these
    (runner/routed_experts.py)."""
    chosen: SamplingInputs


class StageProgram(Protocol):
    """Runs a stage on a step's inputs: brings them to the device, then computes."""

    def run(self, inputs: StepInputs, arrived: Tensor) -> StageOutput:
        """arrived: [num_tokens, H] from the stage before, perhaps with experts behind it; [0, H] on
        the first stage."""

    def watched(self, layer_written: LayerWritten) -> "StageProgram":
        """Return the same program, which tells of each layer. One that launches several layers at
        once, as a graph does, tells of none."""


class EagerProgram:
    """Launches every kernel of a step."""

    def __init__(
        self,
        stage: DecoderStage,
        tables: RowTables,
        kv: Sequence[LayerKV],
        parts: StepParts,
        tokens: Staging | None,
        logits: Tensor | None,
        drafter: Drafter | None = None,
        verifier: DraftVerifier | None = None,
        experts: StageExperts | None = None,
        *,
        shares_experts: bool = False,
    ) -> None:
        """kv: one for each local layer, or none under NullAttention. tokens: receives the most
        likely tokens at once, if this stage embeds them in the next step; None if other stages do,
        which receive the sampled tokens. logits: receives those of each step (SamplingInputs), of
        as many rows as can sample; None on a stage that does not sample. drafter: of the last
        stage, if there is one. verifier: on the last stage, if steps may have drafts.
        experts: takes those of tokens, if they are kept. shares_experts: with other replicas, which
        may have tokens in a step when this one has none. Otherwise such a step skips the layers,
        unless experts are kept."""
        self._kv = kv
        self._kv_caches = [layer.cache for layer in kv]
        self._layer_groups = [layer.group for layer in kv] or [0] * stage.num_layers
        self._parts = parts
        self._stage = stage
        self._is_first = stage.is_first
        self._tables = tables
        self._tokens = tokens
        self._logits = logits
        self._drafter = drafter
        self._texts = None if drafter is None else drafter.texts
        self._verifier = verifier
        self._experts = experts
        self._shares_experts = shares_experts

    def compile_subset(self) -> "EagerProgram":
        """Return a program that launches the same kernels for a few layers only, to compile and
        load them."""
        stage, kept = self._stage.compile_subset()
        kv = [self._kv[index] for index in kept] if self._kv else ()
        drafter = None if self._drafter is None else self._drafter.compile_subset()
        return EagerProgram(
            stage,
            self._tables,
            kv,
            self._parts,
            self._tokens,
            self._logits,
            drafter,
            self._verifier,
            self._experts,
            shares_experts=self._shares_experts,
        )

    def watched(self, layer_written: LayerWritten) -> "EagerProgram":
        """See StageProgram."""
        watched = copy(self)
        watched._stage = self._stage.watched(layer_written)
        return watched

    def run(self, inputs: StepInputs, arrived: Tensor) -> StageOutput:
        inputs.packed.take()
        inputs.packed.taken()
        return self.compute(inputs, arrived)

    @torch.inference_mode()
    def compute(self, inputs: StepInputs, arrived: Tensor) -> StageOutput:
        """Compute as run does, from columns that are already on the device."""
        columns, used = inputs.packed.columns, inputs.plan.parts
        self._tables.correct(columns)
        self._tables.update(columns)
        gathered = self._tables.gather(columns, self._texts)
        by_group = inputs.attention(gathered, self._tables)
        earlier = None
        if self._is_first:
            hidden = self._stage.embed(gathered.token_ids)
        elif self._experts is None:
            hidden = arrived
        else:
            hidden, earlier = self._experts.split(arrived)
        layers = [by_group[group] for group in self._layer_groups]
        try:
            if used:
                hidden = self._parts.before_forward(used, hidden, columns)
            if hidden.shape[0] or self._shares_experts or self._experts is not None:
                hidden = self._stage.forward(hidden, columns.positions, self._kv_caches, layers)
        finally:
            if used:
                self._parts.forward_ended(used)
        if used:
            hidden = self._parts.after_forward(used, hidden, columns)
        if self._drafter is not None:
            computed = ComputedStep(gathered.token_ids, hidden, columns.positions, by_group[0])
            self._drafter.follow(computed)
        chosen = self._choose(hidden, columns, gathered.token_ids)
        if self._experts is not None:
            slots = gathered.slot_mappings[0]
            hidden = self._experts.end(hidden, earlier, columns.positions, slots)
        return StageOutput(hidden, chosen)

    @torch.inference_mode()
    def launch_layers(self, hidden: Tensor, query_lens: Int32s, seq_lens: Int32s) -> None:
        """Launch the layers of a step, and what the drafter launches for its tokens, inside
        compiling_ahead, where launches only request their kernels. hidden [N, H], of any values.
        query_lens, seq_lens int32 [B]: each sequence's tokens in the step, and its context
        length."""
        device = self._tables.device
        zeros = torch.zeros(hidden.shape[0], dtype=torch.int64, device=device)
        column = torch.zeros(query_lens.size + 1, dtype=torch.int32, device=device)
        by_group = [
            AttentionMetadata(
                query_start_loc=column,
                seq_lens=column[:-1],
                seq_order=column[:-1],
                block_table=block_table,
                seq_rows=column[:-1],
                slot_mapping=zeros,
                num_seqs=query_lens.size,
                max_query_len=int(query_lens.max()),
                max_seq_len=int(seq_lens.max()),
                query_lens_np=query_lens,
                seq_lens_np=seq_lens,
            )
            for block_table in self._tables.group_tables
        ]
        layers = [by_group[group] for group in self._layer_groups]
        self._stage.forward(hidden, zeros.int(), self._kv_caches, layers)
        if self._drafter is not None:
            computed, follower = (
                ComputedStep(zeros, hidden, zeros.int(), by_group[0]),
                self._drafter.follower,
            )
            if follower is None:
                self._drafter.follow(computed)
            else:
                follower.compute_tokens(computed)

    @torch.inference_mode()
    def launch_sampling(self, num_rows: int) -> None:
        """Launch the sampling of a step of num_rows rows inside compiling_ahead, where launches
        only request their kernels. Do nothing unless this is the last stage."""
        if self._logits is not None:
            self._parts.launch_sampling(self._stage.new_gathered(num_rows))

    def _choose(
        self, hidden: Tensor, columns: StepColumns[Tensor], token_ids: Tensor
    ) -> SamplingInputs:
        """Return the logits after each token that a sample follows, and the most likely token; in a
        step that may have drafts, also the outcome of those that the columns name."""
        if self._logits is None:
            return SamplingInputs(hidden[:0], columns.sample_rows[:0])
        rows = hidden.index_select(0, columns.sample_tokens)
        logits = self._stage.rank_logits(rows, self._logits[: rows.shape[0]])
        likeliest = self._stage.argmax_tokens(logits)
        if self._tokens is not None and likeliest.shape[0]:
            self._tokens.store(self._tables.last_sampled, columns.sample_rows, likeliest)
        if not columns.corrections.shape[0]:
            return SamplingInputs(logits, likeliest)
        inputs, outcome = token_ids.index_select(0, columns.sample_tokens), None
        if self._verifier is not None and likeliest.shape[0]:
            outcome = self._verifier.settle(likeliest, inputs, columns, self._tokens)
        return SamplingInputs(logits, likeliest, inputs, outcome)

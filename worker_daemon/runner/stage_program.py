"""What a stage computes between its inputs and what it gives away: the part of a step that a CUDA
graph can hold as a whole.

Knows no message, no neighbour and no sampling parameters. Shapes: N tokens, H hidden size, R
sequences that sample, both with padding.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from worker_daemon.device.pinned import upload
from worker_daemon.models.decoder import DecoderStage
from worker_daemon.runner.input_batch import StepInputs
from worker_daemon.runner.kv_cache import LayerKV
from worker_daemon.runner.parts.step_parts import StepParts
from worker_daemon.runner.row_tables import RowTables
from worker_daemon.runner.scheduled_step import Int64s
from worker_daemon.runner.staging import TokenStore
from worker_daemon.runner.step_layout import StepColumns


class SamplingInputs(NamedTuple):
    """What sampling needs of a step: nothing but empty tensors on a stage that does not sample."""

    hidden: Tensor
    """[R, H] residual stream of each sequence's last token."""
    greedy: Tensor
    """int64 [R] the likeliest token."""
    inputs: Tensor | None = None
    """int64 [R] each sequence's last token, where it may be computed again; else None."""

    def keep(self, kept: Int64s) -> "SamplingInputs":
        """Return these rows only: kept int64 [R'] indexes the rows."""
        if not self.hidden.shape[0]:
            return self
        on_device = upload(kept, self.hidden.device)
        inputs = None if self.inputs is None else self.inputs[on_device]
        return SamplingInputs(self.hidden[on_device], self.greedy[on_device], inputs)

    def clone(self) -> "SamplingInputs":
        """Return a copy that no later step overwrites."""
        inputs = None if self.inputs is None else self.inputs.clone()
        return SamplingInputs(self.hidden.clone(), self.greedy.clone(), inputs)


class StageOutput(NamedTuple):
    """What a stage gives away. Valid until the next step runs."""

    hidden: Tensor
    """[N, H] residual stream."""
    chosen: SamplingInputs


class Front(Protocol):
    """Where a stage's first hidden states come from."""

    def hidden(self, token_ids: Tensor, arrived: Tensor) -> Tensor:
        """token_ids int64 [N], arrived [N, H] from the stage before (or nothing) -> [N, H]."""


class EmbeddingFront:
    """The first stage embeds its tokens."""

    def __init__(self, stage: DecoderStage) -> None:
        self._stage = stage

    def hidden(self, token_ids: Tensor, arrived: Tensor) -> Tensor:
        return self._stage.embed(token_ids)


class ArrivedFront:
    """A later stage goes on with what it received."""

    def hidden(self, token_ids: Tensor, arrived: Tensor) -> Tensor:
        return arrived


class Back(Protocol):
    """What a stage keeps of its last hidden states."""

    def choose(self, hidden: Tensor, columns: StepColumns[Tensor]) -> SamplingInputs:
        """hidden [N, H] -> what sampling needs of it."""


class TokenSink(Protocol):
    """Where the likeliest tokens go at once."""

    def keep(self, rows: Tensor, token_ids: Tensor) -> None:
        """rows int32 [R], token_ids int64 [R]. May be captured."""


class NoSink:
    """Nobody reads them here: other stages embed, and get what was sampled."""

    def keep(self, rows: Tensor, token_ids: Tensor) -> None:
        return None


class RowSink:
    """They are their rows' newest tokens: this stage embeds them in the next step."""

    def __init__(self, store: TokenStore, last_sampled: Tensor) -> None:
        self._store = store
        self._last_sampled = last_sampled

    def keep(self, rows: Tensor, token_ids: Tensor) -> None:
        if token_ids.shape[0]:
            self._store.store(self._last_sampled, rows, token_ids)


class ScoringBack:
    """The last stage keeps each sequence's last hidden state, and its likeliest token."""

    def __init__(self, stage: DecoderStage, sink: TokenSink) -> None:
        self._stage = stage
        self._sink = sink

    def choose(self, hidden: Tensor, columns: StepColumns[Tensor]) -> SamplingInputs:
        rows = hidden.index_select(0, columns.sample_tokens)
        token_ids = self._stage.likeliest_tokens(rows)
        self._sink.keep(columns.sample_rows, token_ids)
        return SamplingInputs(rows, token_ids)


class SendingBack:
    """Another stage goes on with all of it."""

    def choose(self, hidden: Tensor, columns: StepColumns[Tensor]) -> SamplingInputs:
        return SamplingInputs(hidden[:0], columns.sample_rows[:0])


class StageProgram(Protocol):
    """Runs a stage on a step's inputs: takes them to the device, then computes."""

    def run(self, inputs: StepInputs, arrived: Tensor) -> StageOutput:
        """arrived: [num_tokens, H] from the stage before; [0, H] on the first stage."""


class EagerProgram:
    """Launches every kernel of a step."""

    def __init__(
        self,
        stage: DecoderStage,
        tables: RowTables,
        kv: Sequence[LayerKV],
        front: Front,
        back: Back,
        parts: StepParts,
    ) -> None:
        """kv: one for each local layer, or none under NullAttention."""
        self._kv = kv
        self._kv_caches = [layer.cache for layer in kv]
        self._layer_groups = [layer.group for layer in kv] or [0] * len(stage.kv_layer_specs)
        self._parts = parts
        self._stage = stage
        self._tables = tables
        self._front = front
        self._back = back

    def compile_subset(self) -> "EagerProgram":
        """Return a program that launches the same kernels for a few of the layers alone: to have
        them compiled and loaded."""
        stage, kept = self._stage.compile_subset()
        kv = [self._kv[index] for index in kept] if self._kv else ()
        return EagerProgram(stage, self._tables, kv, self._front, self._back, self._parts)

    def run(self, inputs: StepInputs, arrived: Tensor) -> StageOutput:
        inputs.packed.take()
        inputs.packed.taken()
        return self.compute(inputs, arrived)

    @torch.inference_mode()
    def compute(self, inputs: StepInputs, arrived: Tensor) -> StageOutput:
        """As run, from columns that are on the device."""
        columns, used = inputs.packed.columns, inputs.plan.parts
        self._tables.correct(columns)
        self._tables.update(columns)
        gathered = self._tables.gather(columns)
        by_group = inputs.attention(gathered, self._tables)
        hidden = self._front.hidden(gathered.token_ids, arrived)
        if used:
            hidden = self._parts.before_forward(used, hidden, columns)
        hidden = self._stage.forward(
            hidden,
            columns.positions,
            self._kv_caches,
            [by_group[group] for group in self._layer_groups],
        )
        if used:
            hidden = self._parts.after_forward(used, hidden, columns)
        chosen = self._back.choose(hidden, columns)
        if columns.corrections.shape[0]:
            last = gathered.token_ids.index_select(0, columns.sample_tokens)
            chosen = chosen._replace(inputs=last)
        return StageOutput(hidden, chosen)

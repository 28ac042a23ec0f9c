"""Turns a step's logits into the tokens with which its rows continue, and the hidden states of
pooling requests into outputs. Used on the last stage."""

from dataclasses import replace

import torch
from torch import Tensor

from worker_daemon.models.decoder import DecoderStage
from worker_daemon.runner.parts.step_parts import SamplerOutput, StepParts
from worker_daemon.runner.report import Report
from worker_daemon.runner.row_tables import RowTables
from worker_daemon.runner.sample_rows import Unsampled
from worker_daemon.runner.scheduled_step import ScheduledStep


class StepSampler:
    """Samples a step's rows. Owned by the stage that samples."""

    def __init__(self, stage: DecoderStage, parts: StepParts, tables: RowTables) -> None:
        self._stage = stage
        self._parts = parts
        self._tables = tables

    def report_forward(self, step: ScheduledStep, hidden: Tensor) -> tuple[Report, ...]:
        """Return the parts' reports of a step's forward pass, including pooled outputs. hidden [N,
        H]: the last layer's output."""
        reports: tuple[Report, ...] = ()
        if self._parts.has_reports_of_forward:
            reports = self._parts.report_forward(hidden, step, self._stage.compute_logits)
        return reports if step.pooling is None else reports + self._parts.pool(hidden, step)

    def sample(self, step: Unsampled) -> SamplerOutput:
        """Choose the token of each sample."""
        rows, chosen = step.rows, step.chosen
        assert chosen is not None, "the step has got this far"
        count = rows.slots_np.size
        if not rows.used | step.step_values.used:
            return SamplerOutput(chosen.greedy[:count], step.reports)
        logits = self._stage.gather_logits(chosen.logits[:count])
        sampled = self._parts.sample(logits, rows, step.step_values)
        return replace(sampled, reports=sampled.reports + step.reports) if step.reports else sampled

    def refuse(self, step: Unsampled, sampled: SamplerOutput, refused: Tensor) -> Tensor:
        """Write the refusals, int32 [Q], to this rank's rows. Return int64 [2, Q]: the token from
        which each row continues (after a refusal the one before it), and each row's total
        refusals."""
        assert step.chosen is not None, "the step has got this far"
        assert step.chosen.inputs is not None, "steps that may refuse keep their last tokens"
        rows = step.rows
        last, newest = rows.newest_of(step.chosen.inputs), rows.newest_of(sampled.token_ids)
        token_ids = torch.where(refused > 0, last, newest)
        total = self._tables.refuse(rows.newest_of(rows.slots), token_ids, refused)
        return torch.stack((token_ids, total.long()))

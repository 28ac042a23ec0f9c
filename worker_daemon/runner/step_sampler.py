"""Turns a step's logits into the tokens with which its rows continue, and the hidden states of
pooling requests into outputs. Verifies drafts, and lets the drafter make new ones, unless the
step's program has done so. Used on the last stage.

Shapes: R samples, Q sequences that sample, K num_speculative_tokens.
"""

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from rpc_schema.step import NO_TOKEN
from worker_daemon.drafting.interface import Drafter, Gained, RowEnds
from worker_daemon.models.decoder import DecoderStage
from worker_daemon.runner.draft_verifier import DraftVerifier
from worker_daemon.runner.parts.interface import Chosen
from worker_daemon.runner.parts.step_parts import SamplerOutput, StepParts
from worker_daemon.runner.report import Report
from worker_daemon.runner.row_tables import RowTables
from worker_daemon.runner.sample_rows import Outcome, SampleRows, Unsampled
from worker_daemon.runner.scheduled_step import ScheduledStep


class StepSampler:
    """Samples a step's rows. Owned by the stage that samples."""

    def __init__(
        self, stage: DecoderStage, parts: StepParts, tables: RowTables, drafter: Drafter | None
    ) -> None:
        self._stage = stage
        self._parts = parts
        self._tables = tables
        self.drafter = drafter
        self._verifier = DraftVerifier(tables, drafter)
        self._one = torch.ones_like(tables.refused)
        self._num_rows = torch.full_like(self._one[:1], self._one.shape[0])

    def report_forward(self, step: ScheduledStep, hidden: Tensor) -> tuple[Report, ...]:
        """Return the parts' reports of a step's forward pass, including pooled outputs. hidden [N,
        H]: the last layer's output. None of a step that recomputes."""
        if step.recomputes:
            return ()
        reports: tuple[Report, ...] = ()
        if self._parts.has_reports_of_forward:
            reports = self._parts.report_forward(hidden, step, self)
        return reports if step.pooling is None else reports + self._parts.pool(hidden, step)

    def compute(self, hidden: Tensor) -> Tensor:
        """See PositionLogits."""
        return self._stage.compute_logits(hidden)

    def replay(self, logits: Tensor, token_ids: Tensor, rows: SampleRows) -> Chosen:
        """See PositionLogits."""
        return self._parts.replay(logits, token_ids, rows)

    def sample(self, step: Unsampled) -> SamplerOutput:
        """Choose the token of each sample. Where drafts, or a part, may refuse some, decide which
        ones rows gain, and write to the rows from which token they continue."""
        rows, chosen = step.rows, step.chosen
        assert chosen is not None, "the step has got this far"
        count = rows.slots_np.size
        if rows.are_verified:
            return _verified(rows, _outcome(step), chosen.greedy[:count], step.reports)
        if rows.has_drafts:
            assert chosen.inputs is not None, "steps with drafts keep their last tokens"
            rows = rows.following(chosen.inputs[:count])
        if not rows.used | step.step_values.used:
            sampled = SamplerOutput(chosen.greedy[:count], step.reports)
        else:
            logits = self._stage.gather_logits(chosen.logits[:count])
            sampled = self._parts.sample(logits, rows, step.step_values)
            if step.reports:
                sampled = replace(sampled, reports=sampled.reports + step.reports)
        if rows.drafted is not None:
            return self._verify(rows, rows.drafted.inputs, sampled)
        if sampled.refused is None:
            return sampled
        assert chosen.inputs is not None, "steps that may refuse keep their last tokens"
        return self._refuse(rows, chosen.inputs, sampled, sampled.refused)

    def _verify(self, rows: SampleRows, inputs: Tensor, sampled: SamplerOutput) -> SamplerOutput:
        """Decide which samples rows gain. inputs: int64 [R]."""
        groups = rows.groups
        assert groups is not None, "a step with drafts"
        verified = self._verifier.verify(
            sampled.token_ids, inputs, groups.firsts, self._num_rows, rows.slots, rows.positions
        )
        self._parts.follow(verified.kept, rows)
        gained = Gained(verified.rows, verified.gained, verified.counts, verified.lengths)
        return replace(sampled, refused=verified.refused, gained=gained, total=verified.total)

    def _refuse(
        self, rows: SampleRows, inputs: Tensor, sampled: SamplerOutput, refused: Tensor
    ) -> SamplerOutput:
        """Let rows continue after refusals int32 [Q] by parts: from the token before a refused one.
        inputs: int64 [R]."""
        last, newest = rows.newest_of(inputs), rows.newest_of(sampled.token_ids)
        token_ids = torch.where(refused > 0, last, newest)
        total = self._tables.refuse(rows.newest_of(rows.slots), token_ids, refused)
        return replace(sampled, total=total)

    def following(self, rows: SampleRows, sampled: SamplerOutput) -> Tensor:
        """Return the token from which each row continues, int64 [Q]; int64 [2, Q] if some may have
        been refused, with each row's refusals so far below."""
        if sampled.total is None:
            return rows.newest_of(sampled.token_ids)
        newest = self._tables.last_sampled.index_select(0, rows.newest_of(rows.slots))
        return torch.stack((newest, sampled.total.long()))

    def draft(self, step: Unsampled, sampled: SamplerOutput) -> Tensor | None:
        """Let the drafter make drafts of the rows' next tokens, unless the step skips them. Write
        these to the rows, and return them, int64 [Q, K]; None without a drafter or drafts."""
        if self.drafter is None or step.skips_drafts:
            return None
        rows, gained = step.rows, sampled.gained
        if rows.are_verified and self.drafter.follower is None:
            drafts = _outcome(step).drafts
            assert drafts is not None and gained is not None, "the program has made them"
            return drafts[: gained.rows.shape[0]]
        if gained is None:
            gained = self._one_each(rows, sampled)
        if self.drafter.follower is not None:
            gained = gained._replace(ends=self._ends(rows))
        return self._verifier.propose(self.drafter, gained)

    def draft_verified(self, step: Unsampled) -> None:
        """Do what is left to do for the next drafts of a step whose program has verified its own:
        a draft model makes them now."""
        if self.drafter is not None and self.drafter.follower is not None:
            self.draft(step, self.sample(step))

    def _ends(self, rows: SampleRows) -> RowEnds:
        """Return how a draft model goes on after rows."""
        groups = rows.groups
        newest_np = rows.positions_np if groups is None else rows.positions_np[groups.newest_np]
        own = cache(rows.newest)  # graphs do not need it

        def choose(logits: Tensor, at: Tensor) -> Tensor:
            return self._parts.chooser.choose(logits, own()._replace(positions=at))

        return RowEnds(int(newest_np.max(initial=0)), choose)

    def _one_each(self, rows: SampleRows, sampled: SamplerOutput) -> Gained:
        """Return what rows gain in a step without drafts."""
        own, newest = rows.newest_of(rows.slots), rows.newest_of(sampled.token_ids)
        counts = self._one[: own.shape[0]]
        if sampled.refused is not None:
            counts = counts - sampled.refused
            newest = newest.masked_fill(sampled.refused > 0, NO_TOKEN)
        return Gained(own, newest.unsqueeze(1), counts, rows.newest_of(rows.positions) + counts)


def _outcome(step: Unsampled) -> Outcome:
    chosen = step.chosen
    assert chosen is not None and chosen.outcome is not None, "the program has verified its drafts"
    return chosen.outcome


def _verified(
    rows: SampleRows, outcome: Outcome, token_ids: Tensor, reports: tuple[Report, ...]
) -> SamplerOutput:
    """Return what rows gain by the outcome that their step's program has found."""
    assert rows.groups is not None, "a step with drafts"
    count, verified = rows.groups.firsts_np.size, outcome.verified
    gained = Gained(
        verified.rows[:count],
        verified.gained[:count],
        verified.counts[:count],
        verified.lengths[:count],
    )
    return SamplerOutput(
        token_ids, reports, verified.refused[:count], gained, verified.total[:count]
    )

"""Decides the outcome of a step's drafts, and lets the drafter make new ones. Used on the last
stage: by its program, so that the graphs of greedy steps hold these launches, and by the sampler,
for steps whose tokens are known only after the program.

Shapes: R samples, Q sequences that sample, K num_speculative_tokens; with padding in a program.
"""

from torch import Tensor

from worker_daemon.contracts.drafts import Verified
from worker_daemon.drafting.interface import Drafter, Gained
from worker_daemon.runner.row_tables import RowTables
from worker_daemon.runner.sample_rows import Outcome
from worker_daemon.runner.staging import Staging
from worker_daemon.runner.step_layout import StepColumns


class DraftVerifier:
    """Writes to the rows what they gain, and their next drafts. Never waits for the device. On a
    CUDA device all launches depend on shapes alone, unless the drafter is a model."""

    def __init__(self, tables: RowTables, drafter: Drafter | None) -> None:
        """drafter: None if drivers bring all drafts."""
        self._tables = tables
        self.drafter = drafter

    def settle(
        self,
        token_ids: Tensor,
        inputs: Tensor,
        columns: StepColumns[Tensor],
        delivery: Staging | None,
    ) -> Outcome:
        """Verify the drafts of a step's first `num_verified` sequences, whose most likely tokens
        are token_ids int64 [R], and make their next drafts. May be captured. inputs: int64 [R], see
        SamplingInputs. delivery: receives the number of tokens that each sequence gains."""
        verified = self.verify(
            token_ids,
            inputs,
            columns.first_samples,
            columns.num_verified,
            columns.sample_rows,
            columns.sample_positions,
        )
        if delivery is not None:
            delivery.store_counts(verified.counts)
        if self.drafter is None or self.drafter.follower is not None:
            return Outcome(verified, None)
        gained = Gained(verified.rows, verified.gained, verified.counts, verified.lengths)
        return Outcome(verified, self.propose(self.drafter, gained))

    def verify(
        self,
        token_ids: Tensor,
        inputs: Tensor,
        firsts: Tensor,
        num_seqs: Tensor,
        rows: Tensor,
        positions: Tensor,
    ) -> Verified:
        """See RowKernels.verify."""
        return self._tables.verify(token_ids, inputs, firsts, num_seqs, rows, positions)

    def propose(self, drafter: Drafter, gained: Gained) -> Tensor:
        """Let the drafter follow what rows have gained, and return their next drafts, int64 [Q, K],
        which are written to the rows."""
        drafts = drafter.propose(gained)
        self._tables.drafts.index_copy_(0, gained.rows.long(), drafts)
        return drafts

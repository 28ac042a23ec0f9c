"""CUDA graphs of what a draft model computes after a step: all of its passes, and the sampling
between them. The launches are too short for the host to make them one by one.

There is a graph for each plan of a ladder (step_layout.py). It reads rows, newest tokens and
lengths from buffers, to which steps copy theirs. Which sampling options rows use is known to the
host alone, so that a graph samples as if they used all of them. That changes no token, and takes
three short kernels more for each pass.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rpc_schema.step import NO_TOKEN
from worker_daemon.drafting.interface import Gained, Replay, RowEnds, StepFollower
from worker_daemon.runner.graph_recorder import GraphRecorder, RecordedGraph
from worker_daemon.runner.parts.interface import TokenChooser
from worker_daemon.runner.step_layout import ProposalLadder, ProposalPlan


class ProposalInputs:
    """The buffers that graphs read, for as many rows as a ladder has."""

    def __init__(
        self, num_rows: int, num_drafts: int, chooser: TokenChooser, device: torch.device
    ) -> None:
        """num_rows: of the largest plan; num_drafts: K."""
        self._chooser = chooser
        self._rows = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._token_ids = torch.full(
            (num_rows, 1 + num_drafts), NO_TOKEN, dtype=torch.int64, device=device
        )
        self._counts = torch.zeros_like(self._rows)
        self._lengths = torch.zeros_like(self._rows)

    @property
    def num_bytes(self) -> int:
        """The memory of the buffers."""
        buffers = (self._rows, self._token_ids, self._counts, self._lengths)
        return sum(buffer.nbytes for buffer in buffers)

    def of(self, plan: ProposalPlan) -> Gained:
        """Return views of the buffers for a plan's rows."""
        count, chooser = plan.num_seqs, self._chooser
        rows = self._rows[:count]

        def choose(logits: Tensor, at: Tensor) -> Tensor:
            return chooser.choose_any(logits, rows, at)

        ends = RowEnds(plan.max_seq_len - 1, choose)
        counts, lengths = self._counts[:count], self._lengths[:count]
        return Gained(rows, self._token_ids[:count], counts, lengths, ends)

    def clear(self) -> None:
        """Let all rows be padding."""
        self._counts.zero_()

    def fill(self, plan: ProposalPlan, gained: Gained) -> None:
        """Copy the rows of a step. Padding is rows that have gained nothing."""
        count = gained.rows.shape[0]
        self._rows[:count].copy_(gained.rows)
        self._token_ids[:count, : gained.token_ids.shape[1]].copy_(gained.token_ids)
        self._counts[:count].copy_(gained.counts)
        self._counts[count : plan.num_seqs].zero_()
        self._lengths[:count].copy_(gained.lengths)


class GraphedProposals:
    """Replays the graphs of plans. It does not know the draft model, which holds it."""

    def __init__(self, ladder: ProposalLadder, inputs: ProposalInputs) -> None:
        self._ladder = ladder
        self._inputs = inputs
        self._graphs: dict[ProposalPlan, RecordedGraph[Tensor]] = {}

    def add(self, plan: ProposalPlan, recorded: RecordedGraph[Tensor]) -> None:
        """Replay the graph of a plan from now on."""
        self._graphs[plan] = recorded

    def replay(self, gained: Gained) -> Tensor | None:
        """See Replay. Every rank of a stage finds the same plan, as it depends on the step message
        alone."""
        assert gained.ends is not None, "of a draft model"
        count = gained.rows.shape[0]
        plan = self._ladder.fit(count, gained.ends.longest)
        if plan is None:
            return None
        self._inputs.fill(plan, gained)
        recorded = self._graphs[plan]
        recorded.graph.replay()
        return recorded.output[:count]


class Proposals:
    """The graphs of what a draft model computes after steps. This class has none: there is no draft
    model."""

    plans: Sequence[ProposalPlan] = ()
    """All plans, the largest first."""
    num_bytes = 0
    """Bytes of the buffers that graphs read."""

    def launch(self, recorder: GraphRecorder) -> None:
        """Launch the kernels of all graphs: see StepGraphs."""

    def capture(self, recorder: GraphRecorder, plans: Sequence[ProposalPlan]) -> Replay | None:
        """Capture a graph of each plan, and return what replays them: see
        GraphedProgram.capture."""
        return None

    def use(self, replay: Replay | None) -> None:
        """Let the draft model replay these graphs; None: launch its kernels one by one."""


class DraftModelProposals(Proposals):
    """The proposals of a draft model."""

    def __init__(
        self, follower: StepFollower, ladder: ProposalLadder, inputs: ProposalInputs
    ) -> None:
        self.plans = ladder.plans
        self.num_bytes = inputs.num_bytes
        self._follower = follower
        self._ladder = ladder
        self._inputs = inputs

    @torch.inference_mode()
    def launch(self, recorder: GraphRecorder) -> None:
        """See Proposals."""
        thin = self._follower.compile_subset()
        dropped = []  # together, at the end: the pool must always have a graph
        for plan in self.plans:
            compute = partial(thin.compute, self._inputs.of(plan))
            dropped.append(recorder.record(compute, "relaxed"))

    @torch.inference_mode()
    def capture(self, recorder: GraphRecorder, plans: Sequence[ProposalPlan]) -> Replay | None:
        """See Proposals. The rows are padding, so that no request is touched."""
        thin, graphs = self._follower.compile_subset(), GraphedProposals(self._ladder, self._inputs)
        self._inputs.clear()
        for plan in plans:
            gained = self._inputs.of(plan)
            thin.compute(gained)
            recorded = recorder.record(partial(self._follower.compute, gained))
            recorded.graph.replay()
            graphs.add(plan, recorded)
        return graphs.replay

    def use(self, replay: Replay | None) -> None:
        """See Proposals."""
        self._follower.propose_by(replay)

"""CUDA graphs of a stage's program: one for each padded plan, captured at warm-up, replayed by
steps.

A graph reads the step's columns, the rows, the weights and the KV cache at the addresses of its
capture; all of these stay where they are while the runner lives.
"""

import math
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from worker_daemon.distributed.ep import ReplicaExperts
from worker_daemon.drafting.interface import Replay
from worker_daemon.models.decoder import LayerWritten
from worker_daemon.runner.graph_recorder import GraphRecorder, RecordedGraph
from worker_daemon.runner.input_batch import StepInputs
from worker_daemon.runner.model_runner import ModelRunner
from worker_daemon.runner.proposal_graphs import Proposals
from worker_daemon.runner.shared_ladder import SharedLadder
from worker_daemon.runner.stage_program import EagerProgram, StageOutput
from worker_daemon.runner.step_layout import ExactShapes, StepLadder, StepPlan

SAMPLED_GRAPHS: Final = 8
"""One of this many graphs is captured, to measure the memory of the others."""

_Plan = TypeVar("_Plan")


class StepGraphs:
    """Decides which steps of a runner are replayed. This class replays none: every step runs
    eagerly, on the CPU or with --enforce-eager."""

    count = 0
    """Number of graphs."""

    def launch(self, runner: ModelRunner) -> None:
        """Launch the kernels of all graphs in captures that are dropped, so that nothing runs. Used
        inside compiling_ahead, where launches only request their kernels."""

    def capture(self, runner: ModelRunner) -> None:
        """Capture all graphs, and let the runner replay them."""

    def estimate_bytes(self, runner: ModelRunner, used_bytes: Callable[[], int]) -> int:
        """Estimate the bytes that capture would take, and leave everything as it was.

        used_bytes() returns the device memory of this process, without what its allocator could
        free. Every rank of a tensor-parallel stage takes part.
        """
        return 0

    def before_relink(self, runner: ModelRunner) -> None:
        """Drop the graphs that hold the communicators, which are about to end."""

    def set_aside(self, runner: ModelRunner) -> None:
        """Run the next steps eagerly and unpadded, until restore()."""

    def restore(self, runner: ModelRunner) -> None:
        """Replay the remaining graphs again, and recapture the dropped ones with the new
        communicators, unless these cannot be captured."""


class _Captured(NamedTuple):
    """All graphs of a runner, which share a pool."""

    program: "GraphedProgram"
    proposals: Replay | None


class LadderGraphs(StepGraphs):
    """Captured graphs for the steps of a ladder. Kept by the worker together with the runner."""

    def __init__(
        self,
        ladder: StepLadder | SharedLadder,
        eager: EagerProgram,
        arrived: Tensor,
        stream: torch.cuda.Stream | None,
        *,
        holds_communication: bool,
        proposals: Proposals | None = None,
        exchange: ReplicaExperts | None = None,
    ) -> None:
        """arrived, exchange: see GraphedProgram; stream: see GraphRecorder; holds_communication:
        the program calls collectives; proposals: those of the runner's draft model."""
        self._ladder = ladder
        self._stream = stream
        self._eager = eager
        self._arrived = arrived
        self._holds_communication = holds_communication
        self._exchange = exchange
        self._proposals = Proposals() if proposals is None else proposals
        self._captured: _Captured | None = None
        """None before the first capture, and after the graphs were dropped."""

    def launch(self, runner: ModelRunner) -> None:
        eager, recorder = self._eager.compile_subset(), GraphRecorder(self._stream)
        program = GraphedProgram(eager, self._arrived, recorder, self._exchange)
        program.launch(self._plans(runner), runner.inputs.padding)
        # A pool whose graphs are gone takes no further ones.
        self._proposals.launch(GraphRecorder(self._stream))

    def capture(self, runner: ModelRunner) -> None:
        recorder, plans = GraphRecorder(self._stream), self._plans(runner)
        program = self._program(recorder)
        program.capture(plans, runner.inputs.padding)
        proposals = self._proposals.capture(recorder, self._proposals.plans)
        self._captured = _Captured(program, proposals)
        self.count = len(plans) + len(self._proposals.plans)
        self._use(runner, self._captured, plans)

    def estimate_bytes(self, runner: ModelRunner, used_bytes: Callable[[], int]) -> int:
        """Estimate from samples: the largest graph of each kind allocates the pool that all
        others share, and a few others show how much each adds (its kernels' arguments, its
        outputs)."""
        recorder, proposals = GraphRecorder(self._stream), self._proposals
        program = self._program(recorder)
        largest, others = _split_plans(self._plans(runner))
        before = used_bytes()
        program.capture(largest, runner.inputs.padding)
        kept = [proposals.capture(recorder, proposals.plans[:1])]
        taken = self._arrived.nbytes + proposals.num_bytes + max(0, used_bytes() - before)
        taken += _estimate(
            others, lambda sample: program.capture(sample, runner.inputs.padding), used_bytes
        )
        taken += _estimate(
            proposals.plans[1:],
            lambda sample: kept.append(proposals.capture(recorder, sample)),
            used_bytes,
        )
        return taken

    def _program(self, recorder: GraphRecorder) -> "GraphedProgram":
        return GraphedProgram(self._eager, self._arrived, recorder, self._exchange)

    def _plans(self, runner: ModelRunner) -> list[StepPlan]:
        return runner.inputs.with_parts(self._ladder.plans)

    def before_relink(self, runner: ModelRunner) -> None:
        if self._holds_communication:
            self.set_aside(runner)
            self._captured = None
            self.count = 0

    def set_aside(self, runner: ModelRunner) -> None:
        runner.inputs.pad_by(ExactShapes(), ())
        runner.use(self._eager)
        self._proposals.use(None)

    def restore(self, runner: ModelRunner) -> None:
        if self._captured is not None:
            self._use(runner, self._captured, ())  # their views are kept
            return
        # Free the pool of the dropped graphs, because the new ones get another pool. It cannot be
        # freed earlier: freeing waits for kernels, which may wait for a peer until the link ends.
        torch.cuda.empty_cache()
        if self._exchange is None or self._exchange.can_be_graphed:
            self.capture(runner)

    def _use(self, runner: ModelRunner, captured: _Captured, plans: Sequence[StepPlan]) -> None:
        """plans: see InputBuilder.pad_by."""
        runner.inputs.pad_by(self._ladder, plans)
        runner.use(captured.program)
        self._proposals.use(captured.proposals)


class GraphedProgram:
    """Replays the graph of a step's plan; a plan without one runs eagerly."""

    def __init__(
        self,
        eager: EagerProgram,
        arrived: Tensor,
        recorder: GraphRecorder,
        exchange: ReplicaExperts | None = None,
    ) -> None:
        """arrived: [N, H], N the tokens of the largest plan: the buffer from which graphs read the
        previous stage's output; [0, H] on the first stage. exchange: the program's with other
        replicas; None: it has none."""
        self._eager = eager
        self._exchange = exchange
        self._arrived = arrived
        self._graphs: dict[StepPlan, RecordedGraph[StageOutput]] = {}
        self._recorder = recorder

    def watched(self, layer_written: LayerWritten) -> "GraphedProgram":
        """See StageProgram. The graphs are the same."""
        watched = copy(self)
        watched._eager = self._eager.watched(layer_written)
        return watched

    def run(self, inputs: StepInputs, arrived: Tensor) -> StageOutput:
        recorded, exchange = self._graphs.get(inputs.plan), self._exchange
        if recorded is None:
            return self._eager.run(inputs, arrived)
        if exchange is not None and not exchange.has_size_of(inputs.plan.shape.num_tokens):
            return self._eager.run(inputs, arrived)  # a step's own sizes may be those of a graph
        if arrived.shape[0]:
            self._arrived[: arrived.shape[0]].copy_(arrived)
        if exchange is None:
            recorded.graph.replay()
        else:
            exchange.replay(recorded.graph.replay)
        inputs.packed.taken()
        return recorded.output

    @torch.inference_mode()
    def launch(self, plans: Sequence[StepPlan], padding: Callable[[StepPlan], StepInputs]) -> None:
        """Launch the kernels of each plan in a capture, and keep no graph (see StepGraphs)."""
        dropped = []  # together, at the end: the pool must always have a graph
        for plan in plans:
            arrived = self._arrived[: plan.shape.num_tokens]
            # Libraries load their kernels at their first use, which is here.
            compute = partial(self._compute, padding(plan), arrived)
            self._begin(plan)
            dropped.append(self._recorder.record(compute, "relaxed"))

    @torch.inference_mode()
    def capture(self, plans: Sequence[StepPlan], padding: Callable[[StepPlan], StepInputs]) -> None:
        """Capture a graph of each plan, the largest first: smaller ones then fit into its memory.

        padding(plan) builds inputs that touch no request. Before capture, a few layers of each plan
        run, so that all of its kernels are compiled and loaded. The captured graph then runs once,
        which uploads it to the device: no later step waits for that or takes memory for it. In a
        group that exchanges anything every rank captures the same plans in the same order.
        """
        thin = self._eager.compile_subset()
        for plan in plans:
            inputs = padding(plan)
            arrived = self._arrived[: plan.shape.num_tokens]
            self._begin(plan)
            thin.run(inputs, arrived)
            self._begin(plan)
            self._graphs[plan] = self._recorder.record(partial(self._compute, inputs, arrived))
            self.run(padding(plan), arrived)

    def _begin(self, plan: StepPlan) -> None:
        """Begin the exchanges of a plan with other replicas, all of whose ranks compute it."""
        if self._exchange is not None:
            self._exchange.begin(plan.shape.num_tokens)

    def _compute(self, inputs: StepInputs, arrived: Tensor) -> StageOutput:
        inputs.packed.take()
        return self._eager.compute(inputs, arrived)


def _estimate(
    plans: Sequence[_Plan],
    capture: Callable[[Sequence[_Plan]], None],
    used_bytes: Callable[[], int],
) -> int:
    """Estimate what graphs of plans take beside the pool, by capturing some of them."""
    sample = plans[::SAMPLED_GRAPHS]
    if not sample:
        return 0
    before = used_bytes()
    capture(sample)
    each = max(0, used_bytes() - before) / len(sample)
    return math.ceil(each * len(plans))


def _split_plans(plans: Sequence[StepPlan]) -> tuple[list[StepPlan], list[StepPlan]]:
    """Return the largest plan of either kind, and the others. plans: each kind's largest first."""
    kinds = ([p for p in plans if p.max_query_len > 1], [p for p in plans if p.max_query_len == 1])
    largest = [kind[0] for kind in kinds if kind]
    return largest, [plan for kind in kinds for plan in kind[1:]]

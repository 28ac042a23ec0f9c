"""CUDA graphs of a stage's program: one for each padded plan, captured at warm-up, replayed by
steps.

A graph reads the step's columns, the rows, the weights and the KV cache at the addresses of its
capture; all of these stay where they are while the runner lives.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import torch
from torch import Tensor

from worker_daemon.runner.input_batch import StepInputs
from worker_daemon.runner.model_runner import ModelRunner
from worker_daemon.runner.stage_program import EagerProgram, StageOutput
from worker_daemon.runner.step_layout import ExactShapes, StepLadder, StepPlan

SAMPLED_GRAPHS: Final = 8
"""One of this many graphs is captured, to measure the memory of the others."""


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
        communicators."""


class LadderGraphs(StepGraphs):
    """Captured graphs for the steps of a ladder. Kept by the worker together with the runner."""

    def __init__(
        self,
        ladder: StepLadder,
        eager: EagerProgram,
        arrived: Tensor,
        stream: torch.cuda.Stream | None,
        *,
        holds_communication: bool,
    ) -> None:
        """arrived, stream: see GraphedProgram; holds_communication: the program calls
        collectives."""
        self._ladder = ladder
        self._stream = stream
        self._eager = eager
        self._arrived = arrived
        self._holds_communication = holds_communication
        self._program: GraphedProgram | None = None
        """None before the first capture, and after the graphs were dropped."""

    def launch(self, runner: ModelRunner) -> None:
        program = GraphedProgram(self._eager.compile_subset(), self._arrived, self._stream)
        program.launch(self._plans(runner), runner.inputs.padding)

    def capture(self, runner: ModelRunner) -> None:
        program = GraphedProgram(self._eager, self._arrived, self._stream)
        plans = self._plans(runner)
        program.capture(plans, runner.inputs.padding)
        runner.inputs.pad_by(self._ladder, plans)
        runner.use(program)
        self._program = program
        self.count = len(plans)

    def estimate_bytes(self, runner: ModelRunner, used_bytes: Callable[[], int]) -> int:
        """Estimate from samples: the largest graph of either kind allocates the pool that all
        others share, and a few others show how much each adds (its kernels' arguments, its
        outputs)."""
        program = GraphedProgram(self._eager, self._arrived, self._stream)
        largest, others = _split_plans(self._plans(runner))
        before = used_bytes()
        program.capture(largest, runner.inputs.padding)
        with_largest = used_bytes()
        taken = self._arrived.nbytes + max(0, with_largest - before)
        sample = others[::SAMPLED_GRAPHS]
        if sample:
            program.capture(sample, runner.inputs.padding)
            each = max(0, used_bytes() - with_largest) / len(sample)
            taken += math.ceil(each * len(others))
        return taken

    def _plans(self, runner: ModelRunner) -> list[StepPlan]:
        return runner.inputs.with_parts(self._ladder.plans)

    def before_relink(self, runner: ModelRunner) -> None:
        if self._holds_communication:
            self.set_aside(runner)
            self._program = None
            self.count = 0

    def set_aside(self, runner: ModelRunner) -> None:
        runner.inputs.pad_by(ExactShapes(), ())
        runner.use(self._eager)

    def restore(self, runner: ModelRunner) -> None:
        if self._program is not None:
            runner.inputs.pad_by(self._ladder, ())  # their views are kept
            runner.use(self._program)
            return
        # Free the pool of the dropped graphs, because the new ones get another pool. It cannot be
        # freed earlier: freeing waits for kernels, which may wait for a peer until the link ends.
        torch.cuda.empty_cache()
        self.capture(runner)


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    output: StageOutput


class GraphedProgram:
    """Replays the graph of a step's plan; a plan without one runs eagerly."""

    def __init__(
        self, eager: EagerProgram, arrived: Tensor, stream: torch.cuda.Stream | None
    ) -> None:
        """arrived: [N, H], N the tokens of the largest plan: the buffer from which graphs read the
        previous stage's output; [0, H] on the first stage. stream: on which graphs are captured."""
        self._eager = eager
        self._arrived = arrived
        self._graphs: dict[StepPlan, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = stream

    def run(self, inputs: StepInputs, arrived: Tensor) -> StageOutput:
        captured = self._graphs.get(inputs.plan)
        if captured is None:
            return self._eager.run(inputs, arrived)
        if arrived.shape[0]:
            self._arrived[: arrived.shape[0]].copy_(arrived)
        captured.graph.replay()
        inputs.packed.taken()
        return captured.output

    @torch.inference_mode()
    def launch(self, plans: Sequence[StepPlan], padding: Callable[[StepPlan], StepInputs]) -> None:
        """Launch the kernels of each plan in a capture, and keep no graph (see StepGraphs)."""
        dropped = []  # together, at the end: the pool must always have a graph
        for plan in plans:
            arrived = self._arrived[: plan.shape.num_tokens]
            # Libraries load their kernels at their first use, which is here.
            dropped.append(self._record(padding(plan), arrived, "relaxed"))

    @torch.inference_mode()
    def capture(self, plans: Sequence[StepPlan], padding: Callable[[StepPlan], StepInputs]) -> None:
        """Capture a graph of each plan, the largest first: smaller ones then fit into its memory.

        padding(plan) builds inputs that touch no request. Before capture, a few layers of each plan
        run, so that all of its kernels are compiled and loaded. The captured graph then runs once,
        which uploads it to the device: no later step waits for that or takes memory for it. In a
        tensor-parallel group every rank captures the same plans in the same order.
        """
        thin = self._eager.compile_subset()
        for plan in plans:
            inputs = padding(plan)
            arrived = self._arrived[: plan.shape.num_tokens]
            thin.run(inputs, arrived)
            self._graphs[plan] = self._record(inputs, arrived)
            self.run(padding(plan), arrived)

    def _record(
        self, inputs: StepInputs, arrived: Tensor, error_mode: str = "thread_local"
    ) -> _Captured:
        """Capture a graph as torch.cuda.graph does, without collecting garbage each time."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            # Other threads of the process (a communicator's watchdog) may call CUDA meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode=error_mode)
            try:
                inputs.packed.take()
                output = self._eager.compute(inputs, arrived)
            except BaseException:
                with suppress(RuntimeError):  # the first error names the cause
                    graph.capture_end()
                raise
            graph.capture_end()
        return _Captured(graph, output)


def _split_plans(plans: Sequence[StepPlan]) -> tuple[list[StepPlan], list[StepPlan]]:
    """Return the largest plan of either kind, and the others. plans: each kind's largest first."""
    kinds = ([p for p in plans if p.max_query_len > 1], [p for p in plans if p.max_query_len == 1])
    largest = [kind[0] for kind in kinds if kind]
    return largest, [plan for kind in kinds for plan in kind[1:]]

"""Records launches as CUDA graphs that share one pool of memory."""

from collections.abc import Callable
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

import torch

_Output = TypeVar("_Output")


class RecordedGraph(NamedTuple, Generic[_Output]):
    """A graph, and what the launches in it return: tensors in the pool, at addresses of their own,
    which each replay overwrites."""

    graph: torch.cuda.CUDAGraph
    output: _Output


class GraphRecorder:
    """Owns a pool, which its graphs use in turn: they are replayed on one stream. Apart from their
    outputs, the largest takes the memory of all."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        """stream: on which graphs are captured."""
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = stream

    def record(
        self, launch: Callable[[], _Output], error_mode: str = "thread_local"
    ) -> RecordedGraph[_Output]:
        """Capture the launches as torch.cuda.graph does, without collecting garbage each time.
        error_mode: "relaxed" lets libraries load kernels at their first use, inside the capture."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            # Other threads of the process (a communicator's watchdog) may call CUDA meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode=error_mode)
            try:
                output = launch()
            except BaseException:
                with suppress(RuntimeError):  # the first error names the cause
                    graph.capture_end()
                raise
            graph.capture_end()
        return RecordedGraph(graph, output)

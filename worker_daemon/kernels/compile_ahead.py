"""Compiles many kernels in parallel, before any of them runs.

Triton compiles kernels one at a time, each at its first launch, for half a second each. Inside
`compiling_ahead()`, launching a kernel that is marked `launched` only requests its compilation, by
threads in the background. When the block ends, all kernels are in Triton's caches, in memory and on
disk. Nothing is computed, so results are undefined: capture a graph and drop it.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

from triton.runtime._async_compile import AsyncCompileMode, active_mode

MAX_THREADS: Final = 16
"""The compiler passes of a kernel release the GIL; its code generator does not."""

_Grid = TypeVar("_Grid")


class Launched:
    """A Triton kernel that the host launches: `kernel[grid](...)`."""

    def __init__(self, kernel: Any) -> None:
        """kernel: the result of triton.jit, compiled or interpreted."""
        self._kernel = kernel

    def __getitem__(self, grid: _Grid) -> Callable[..., object]:
        if active_mode.get() is None:
            launch: Callable[..., object] = self._kernel[grid]
            return launch
        return partial(self._kernel.warmup, grid=grid)


def launched(kernel: Any) -> Launched:
    """Mark a kernel; use it as a decorator above triton.jit."""
    return Launched(kernel)


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Make launches only compile; all kernels are compiled when the block ends. Not reentrant.

    Raises:
        triton.CompilationError: a kernel cannot be compiled.
    """
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads, "compile") as pool, AsyncCompileMode(pool):
        yield

"""Compiles many kernels in parallel, before any of them runs.

Triton compiles kernels one at a time, each at its first launch, for half a second each. Inside
`compiling_ahead(compiler)`, launching a kernel that is marked `launched` only requests it from the
compiler's processes. When the block ends, all of them are in Triton's cache on disk, from where
each is loaded at its first launch. Nothing is computed, so results are undefined: capture a graph
and drop it.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from triton import knobs
from triton.runtime import driver

from worker_daemon.kernel_compiler import CompileRequest, CompileRequests, KernelCompiler

_Grid = TypeVar("_Grid")

_only_requests: Final[ContextVar[bool]] = ContextVar("only_requests", default=False)

_LOG = logging.getLogger(__name__)


class Launched:
    """A Triton kernel that the host launches: `kernel[grid](...)`."""

    def __init__(self, kernel: Any) -> None:
        """kernel: the result of triton.jit, compiled or interpreted."""
        self.kernel = kernel

    def __getitem__(self, grid: _Grid) -> Callable[..., object]:
        if _only_requests.get():
            return self._request
        launch: Callable[..., object] = self.kernel[grid]
        return launch

    def _request(self, *args: object, **options: object) -> None:
        try:
            self.kernel.warmup(*args, grid=None, **options)
        except Exception as error:  # if it matters, the launch will raise it
            _LOG.warning("%s cannot be compiled ahead: %s", self.kernel, error)


def launched(kernel: Any) -> Launched:
    """Mark a kernel; use it as a decorator above triton.jit."""
    return Launched(kernel)


@contextmanager
def compiling_ahead(compiler: KernelCompiler) -> Iterator[None]:
    """Make this thread's launches request kernels only; all are compiled when the block ends. Not
    reentrant. A kernel that cannot be compiled is logged, and fails at its launch."""
    with compiler.requests() as requests:
        hook, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, _Requesting(requests)
        token = _only_requests.set(True)
        try:
            yield
        finally:
            _only_requests.reset(token)
            knobs.runtime.jit_cache_hook = hook


class _Requesting:
    """Triton's hook for kernels that are not in memory: requests each once, compiles none."""

    def __init__(self, requests: CompileRequests) -> None:
        self._requests = requests
        self._requested: set[str] = set()
        self._target = driver.active.get_current_target()

    def __call__(self, *, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        specialization: str = compile["specialization_data"]
        if specialization not in self._requested:
            self._requested.add(specialization)
            target, key = self._target, fn.jit_function.cache_key
            request = CompileRequest(
                target.backend, target.arch, target.warp_size, key, specialization
            )
            self._requests.send(request)
        return True

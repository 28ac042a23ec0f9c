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
from functools import partial
from typing import Any, Final, TypeVar

from triton import knobs
from triton.runtime import driver

from worker_daemon.kernel_compiler import (
    CompileRequest,
    CompileRequests,
    KernelCompiler,
    hash_sources,
)

_Grid = TypeVar("_Grid")

_LOG = logging.getLogger(__name__)


class Launched:
    """A Triton kernel that the host launches: `kernel[grid](...)`."""

    def __init__(self, kernel: Any) -> None:
        """kernel: the result of triton.jit, compiled or interpreted."""
        self.kernel = kernel

    def __getitem__(self, grid: _Grid) -> Callable[..., object]:
        requesting = _requesting.get()
        if requesting is not None:
            return partial(requesting.launch, self.kernel)
        launch: Callable[..., object] = self.kernel[grid]
        return launch


def launched(kernel: Any) -> Launched:
    """Mark a kernel; use it as a decorator above triton.jit."""
    return Launched(kernel)


@contextmanager
def compiling_ahead(compiler: KernelCompiler) -> Iterator[CompileRequests]:
    """Make this thread's launches request kernels only; all are compiled when the block ends. Not
    reentrant. A kernel that cannot be compiled is logged, and fails at its launch; after the block,
    has_failed of the yielded requests is True then."""
    with compiler.requests() as requests:
        requesting = _Requesting(requests)
        hook, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, requesting.request
        token = _requesting.set(requesting)
        try:
            yield requests
        finally:
            _requesting.reset(token)
            knobs.runtime.jit_cache_hook = hook


class _Requesting:
    """Turns launches into requests, each sent once."""

    def __init__(self, requests: CompileRequests) -> None:
        self._requests = requests
        self._requested: set[str] = set()
        self._failed: set[object] = set()
        self._target = driver.active.get_current_target()
        self._sources = hash_sources()

    def launch(self, kernel: Any, *args: object, **options: object) -> None:
        """Make Triton call `request`, unless it has the kernel in memory."""
        try:
            kernel.warmup(*args, grid=None, **options)
        except Exception as error:  # if it matters, the launch will raise it
            self._requests.has_failed = True
            if kernel not in self._failed:
                self._failed.add(kernel)
                _LOG.warning("%s cannot be compiled ahead: %s", kernel, error)

    def request(self, *, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        """Request a kernel; called by Triton (knobs.runtime.jit_cache_hook), which then compiles
        nothing."""
        specialization: str = compile["specialization_data"]
        if specialization not in self._requested:
            self._requested.add(specialization)
            target, key = self._target, fn.jit_function.cache_key
            request = CompileRequest(
                target.backend, target.arch, target.warp_size, key, self._sources, specialization
            )
            self._requests.send(request)
        return True


_requesting: Final[ContextVar[_Requesting | None]] = ContextVar("requesting", default=None)
"""Set while launches only request kernels."""

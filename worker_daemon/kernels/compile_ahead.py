"""Compiles many kernels in parallel, before any of them runs.

Triton compiles kernels one at a time, each at its first launch, which takes about half a second.
Inside `compiling_ahead(compiler)`, the launch of a kernel that is marked `launched` runs nothing:
it requests the kernel from the compile server. When the block ends, all requested kernels are in
Triton's cache on disk, from where each is loaded at its first real launch. Results inside the block
are undefined. torch's own kernels do run, unless a graph is being captured.
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
    CompileBatch,
    CompileRequest,
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
        requester = _requester.get()
        if requester is not None:
            return partial(requester.launch, self.kernel)
        launch: Callable[..., object] = self.kernel[grid]
        return launch


def launched(kernel: Any) -> Launched:
    """Mark a kernel; use it as a decorator above triton.jit."""
    return Launched(kernel)


@contextmanager
def compiling_ahead(compiler: KernelCompiler) -> Iterator[CompileBatch]:
    """Make this thread's launches only request their kernels, which are compiled when the block
    ends. Not reentrant. A kernel that cannot be compiled is logged, and sets has_failed of the
    batch; its first real launch compiles it, or raises the error."""
    with compiler.batch() as batch:
        requester = _Requester(batch)
        hook, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, requester.request
        token = _requester.set(requester)
        try:
            yield batch
        finally:
            _requester.reset(token)
            knobs.runtime.jit_cache_hook = hook


class _Requester:
    """Turns launches into requests, each sent once."""

    def __init__(self, batch: CompileBatch) -> None:
        self._batch = batch
        self._requested: set[str] = set()
        self._failed: set[object] = set()
        self._target = driver.active.get_current_target()
        self._sources = hash_sources()

    def launch(self, kernel: Any, *args: object, **options: object) -> None:
        """Make Triton call `request`, unless it has the kernel in memory. Takes a launch's
        arguments."""
        try:
            kernel.warmup(*args, grid=None, **options)
        except Exception as error:  # if it matters, the launch will raise it
            self._batch.has_failed = True
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
            self._batch.send(request)
        return True


_requester: Final[ContextVar[_Requester | None]] = ContextVar("requester", default=None)
"""Set while launches only request kernels."""

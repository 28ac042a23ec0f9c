"""The compile server, with real processes that compile for a GPU that this host does not have."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from worker_daemon.kernel_compiler import CompileRequest, KernelCompiler
from worker_daemon.kernels import step_buffers
from worker_daemon.kernels.argmax import greedy_tokens
from worker_daemon.kernels.compile_ahead import Launched, compiling_ahead
from worker_daemon.kernels.compile_server import TargetDriver
from worker_daemon.kernels.penalties import count_tokens
from worker_daemon.server.assembly import running_compiler

HOPPER = GPUTarget("cuda", 90, 32)
UNKNOWN = CompileRequest("cuda", 90, 32, "", json.dumps({"name": "no.such.kernel"}))
ENDS_WITHIN_S = 30.0

ORPHAN = """
import sys, time
from worker_daemon.kernel_compiler import CompileRequest, KernelCompiler
compiler = KernelCompiler.start()
with compiler.batch() as batch:
    batch.send(CompileRequest("cuda", 90, 32, "", '{"name": "none"}'))
    batch.wait()
    print(compiler.server_pid, flush=True)
    time.sleep(600)
"""
"""A daemon in the middle of a batch, with all processes running."""


class HopperDriver(TargetDriver):
    """Stands for the driver of a Hopper GPU, so that kernels can be compiled and not launched."""

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KernelCompiler]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        # Triton 3.9 warns that a later version will not fuse by default.
        patch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
        patch.setattr(driver, "_active", HopperDriver(HOPPER))
        with KernelCompiler.start() as compiler:
            yield compiler


def launch_some() -> None:
    """Launch kernels of two modules, one of them for two dtypes."""
    for dtype in (torch.bfloat16, torch.float32):
        greedy_tokens(torch.zeros(4, 1000, dtype=dtype), 1000, pdl=True)
    tables = torch.zeros(2, 1000, dtype=torch.int16), torch.zeros(2, 3)
    column = torch.zeros(4, dtype=torch.int32)
    count_tokens(column, column.long(), _Tables(*tables))


class _Tables:
    def __init__(self, seen: torch.Tensor, weights: torch.Tensor) -> None:
        self.seen, self.weights = seen, weights


def cached_kernels() -> set[str]:
    """Return the directories of complete kernels in the cache."""
    return {path.parent.name for path in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")}


def compile_only(kernel: Launched, grid: object) -> Callable[..., object]:
    """Stand for Launched.__getitem__: compile for a launch, without one."""
    return partial(kernel.kernel.warmup, grid=grid)


def test_kernels_that_are_requested_are_those_that_launches_need(
    compiler: KernelCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with compiling_ahead(compiler) as batch:
        launch_some()
        launch_some()
    assert not batch.has_failed
    made = cached_kernels()
    assert len(made) >= 3
    monkeypatch.setattr(Launched, "__getitem__", compile_only)
    launch_some()
    assert cached_kernels() == made


def test_what_cannot_be_compiled_is_logged_and_the_rest_compiled(
    compiler: KernelCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    before = cached_kernels()
    complexes = torch.zeros(4, dtype=torch.complex64)  # which Triton does not know
    column = torch.zeros(4, dtype=torch.int32)
    with compiling_ahead(compiler), caplog.at_level(logging.WARNING):
        for _ in range(2):
            step_buffers.store_tokens(complexes, column, column, torch.zeros(2, 4), column)
        greedy_tokens(torch.zeros(4, 999, dtype=torch.float16), 999, pdl=False)
    assert caplog.text.count("cannot be compiled ahead") == 1
    assert cached_kernels() > before


def test_an_unknown_kernel_is_logged(
    compiler: KernelCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    with compiler.batch() as batch, caplog.at_level(logging.WARNING):
        batch.send(UNKNOWN)
    assert "no.such.kernel" in caplog.text
    assert batch.has_failed


def test_a_marker_is_found_by_a_later_process(tmp_path: Path) -> None:
    with KernelCompiler.start(tmp_path) as first:
        assert not first.has_compiled("a model")
        first.mark_compiled("a model")
    with KernelCompiler.start(tmp_path) as later, KernelCompiler.start() as without:
        assert later.has_compiled("a model")
        assert not later.has_compiled("another model")
        without.mark_compiled("a model")
        assert not without.has_compiled("a model")


def test_an_error_of_the_block_is_raised_and_later_launches_are_launches(
    compiler: KernelCompiler,
) -> None:
    with pytest.raises(ZeroDivisionError), compiling_ahead(compiler):
        raise ZeroDivisionError
    kernel = Launched(lambda **options: options)
    with pytest.raises(TypeError):
        kernel[(1,)]


def test_a_killed_process_costs_its_request_and_a_killed_server_all_of_them(
    compiler: KernelCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    server = psutil.Process(compiler.server_pid)
    with compiler.batch() as batch:
        batch.send(UNKNOWN)
        batch.wait()  # all run
        for process in server.children():
            process.suspend()
        batch.send(UNKNOWN)
        server.children()[0].kill()
        for process in server.children():
            process.resume()
    assert server.is_running()
    with compiler.batch() as batch, caplog.at_level(logging.WARNING):
        batch.send(UNKNOWN)
        server.kill()
    assert "the compile server is lost" in caplog.text
    while runs(server):
        time.sleep(0.01)
    caplog.clear()
    with compiler.batch() as batch, caplog.at_level(logging.WARNING):
        batch.send(UNKNOWN)
        batch.send(UNKNOWN)
    assert caplog.text.count("the compile server is lost") == 1


def test_no_process_is_left_of_a_daemon_that_is_killed() -> None:
    daemon = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
    assert daemon.stdout is not None
    with daemon, daemon.stdout:
        server = psutil.Process(int(daemon.stdout.readline()))
        started = [server, *server.children(recursive=True)]
        assert len(started) >= 2
        daemon.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + ENDS_WITHIN_S
    while any(map(runs, started)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(process: psutil.Process) -> bool:
    """Return False for a process that has ended, whether or not its new parent has noticed."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_a_daemon_on_the_cpu_starts_no_compiler() -> None:
    with running_compiler("cpu") as compiler:
        assert compiler is None

"""The compile server, with real processes that compile for a GPU that this host does not have."""

import json
import logging
import os
import shutil
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

from benchmarks.paged_reference import Shape, make_batch
from tests.support.fp8_caches import in_fp8, random_scales
from tests.support.waiting import PATIENCE_S, wait_until
from worker_daemon import kernel_compiler
from worker_daemon.contracts.attention import KeyRange
from worker_daemon.kernel_compiler import CompileRequest, KernelCompiler, hash_sources
from worker_daemon.kernels import compile_ahead, step_buffers
from worker_daemon.kernels.argmax import greedy_tokens
from worker_daemon.kernels.compile_ahead import Launched, compiling_ahead
from worker_daemon.kernels.compile_server import TargetDriver, num_processes
from worker_daemon.kernels.gathered_fp8 import gather_fp8
from worker_daemon.kernels.gathered_prefill import gathered_attention
from worker_daemon.kernels.paged_attention import paged_attention
from worker_daemon.kernels.penalties import count_tokens
from worker_daemon.kernels.tiles import DeviceLimits
from worker_daemon.server.assembly import running_compiler

HOPPER = GPUTarget("cuda", 90, 32)
NOTHING = json.dumps({"name": "no.such.kernel"})
UNKNOWN = CompileRequest("cuda", 90, 32, "", hash_sources(), NOTHING)
ENDS_WITHIN_S = PATIENCE_S

ORPHAN = """
import sys, time
from worker_daemon.kernel_compiler import CompileRequest, KernelCompiler, hash_sources
compiler = KernelCompiler.start()
with compiler.batch() as batch:
    batch.send(CompileRequest("cuda", 90, 32, "", hash_sources(), '{"name": "none"}'))
    batch.wait()
    print(compiler.server_pid, flush=True)
    time.sleep(600)
"""
"""A daemon in the middle of a batch, with all processes running."""
ONE_REQUEST = """
from worker_daemon.kernel_compiler import CompileRequest, KernelCompiler, hash_sources
with KernelCompiler.start() as compiler, compiler.batch() as batch:
    batch.send(CompileRequest("cuda", 90, 32, "", hash_sources(), '{"name": "none"}'))
"""
"""A daemon that prints the reply to a request."""
FEW_PROCESSES = """
import errno, os, socket, sys
from worker_daemon.kernels import compile_server

def refuse():
    raise BlockingIOError(errno.EAGAIN, "no more processes")

forks = iter((os.fork, refuse, os.fork))
os.fork = lambda: next(forks)()
compile_server.num_processes = lambda: 3
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
ours.send(sys.argv[1].encode())
ours.shutdown(socket.SHUT_WR)
compile_server.serve_batch(theirs, compile_server.find_kernels())
print(ours.recv(4096).decode())
"""
"""A server that may fork one process."""
OWN_NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")


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


@pytest.mark.each_value
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 5000), *[(1, 100)] * 99],
        [(1, 5000), (1, 100), (40, 6000)],
        [(3, 900), (4, 2000)],
        [(600, 700)],
    ],
    ids=["decodes", "beside a chunk", "drafts", "prompt"],
)
@pytest.mark.parametrize("has_fp8_cache", [False, True])
def test_attention_that_the_interpreter_runs_compiles_for_hopper(
    compiler: KernelCompiler, lengths: list[tuple[int, int]], has_fp8_cache: bool
) -> None:
    """The compiler is stricter about types than the interpreter, which the other tests use."""
    batch = make_batch(Shape(8, 2, 64), lengths, dtype=torch.bfloat16, device="cpu", seed=1)
    if has_fp8_cache:
        batch = in_fp8(batch, random_scales(2, "cpu", 1))
    scales = random_scales(2, "cpu", 1) if has_fp8_cache else None
    with compiling_ahead(compiler) as compiled:
        paged_attention(
            batch.q, batch.kv_cache, batch.metadata, scale=0.1, window=None, kv_scales=scales,
            limits=DeviceLimits(132, 232_448), pdl=True,
        )  # fmt: skip
    assert not compiled.has_failed


@pytest.mark.parametrize(("head_dim", "window", "cap"), [(16, None, None), (128, 100, 2.0)])
def test_products_in_fp8_compile_for_hopper(
    compiler: KernelCompiler, head_dim: int, window: int | None, cap: float | None
) -> None:
    """Those of long prompts; the gather before them too."""
    shape, scales = Shape(8, 2, head_dim), random_scales(2, "cpu", 1)
    batch = make_batch(shape, [(1100, 1200)], dtype=torch.bfloat16, device="cpu", seed=1)
    batch = in_fp8(batch, scales)
    with compiling_ahead(compiler) as compiled:
        context = gather_fp8(batch.kv_cache, scales, batch.metadata, KeyRange(0, 0, 1200, 1200))
        gathered_attention(
            batch.q, context, scale=0.1, window=window, logit_softcap=cap,
            limits=DeviceLimits(132, 232_448),
        )  # fmt: skip
    assert not compiled.has_failed


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


def suspend_compilers(server: psutil.Process) -> list[psutil.Process]:
    """Suspend all processes of a batch that has replied; they are forked one after the other."""
    wait_until(lambda: len(server.children()) == num_processes(), "all run", ENDS_WITHIN_S)
    processes = server.children()
    for process in processes:
        process.suspend()
    return processes


def test_requests_never_wait_for_the_processes(compiler: KernelCompiler) -> None:
    """More of them than a socket holds, and than the replies that it holds."""
    server = psutil.Process(compiler.server_pid)
    with compiler.batch() as batch:
        batch.send(UNKNOWN)
        batch.wait()
        processes = suspend_compilers(server)
        for _ in range(1000):
            batch.send(UNKNOWN)
        for process in processes:
            process.resume()
        batch.has_failed = False
        batch.wait()
        assert batch.has_failed


def test_a_server_whose_processes_hang_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with KernelCompiler.start() as compiler:
        server = psutil.Process(compiler.server_pid)
        with compiler.batch() as batch:
            batch.send(UNKNOWN)
            batch.wait()
            processes = suspend_compilers(server)
            monkeypatch.setattr(kernel_compiler, "REPLY_TIMEOUT_S", 0.1)
            batch.send(UNKNOWN)
        assert not psutil.wait_procs([server, *processes], ENDS_WITHIN_S)[1]
        with compiler.batch() as batch:
            batch.send(UNKNOWN)
        assert batch.has_failed


def test_the_server_is_killed_before_the_daemon_and_leaves_compilers_no_socket(
    compiler: KernelCompiler,
) -> None:
    with compiler.batch() as batch:
        batch.send(UNKNOWN)
    here = Path(f"/proc/{compiler.server_pid}")
    assert (here / "oom_score_adj").read_text().strip() == "1000"
    assert (here / "fd" / "0").readlink() == Path(os.devnull)


def test_a_process_that_dies_after_its_batch_leaves_the_server(compiler: KernelCompiler) -> None:
    server = psutil.Process(compiler.server_pid)
    with pytest.raises(ZeroDivisionError), compiler.batch() as batch:
        batch.send(UNKNOWN)
        batch.wait()
        process = server.children()[0]
        process.suspend()
        raise ZeroDivisionError
    process.kill()
    with compiler.batch() as batch:
        batch.send(UNKNOWN)
    assert server.is_running()


def test_a_server_that_may_fork_few_processes_compiles_with_these() -> None:
    words = [sys.executable, "-c", FEW_PROCESSES, json.dumps(UNKNOWN)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    assert "no.such.kernel" in done.stdout


def test_without_a_server_launches_request_nothing(
    compiler: KernelCompiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank whose host refuses the process captures the same collectives as its peers."""
    before = cached_kernels()
    monkeypatch.setattr(sys, "executable", "/no/such/program")
    with KernelCompiler.start() as without, caplog.at_level(logging.WARNING):
        with compiling_ahead(without) as batch:
            greedy_tokens(torch.zeros(4, 997, dtype=torch.float16), 997, pdl=False)
        assert batch.has_failed
    assert caplog.text.count("the compile server is lost") == 1
    assert cached_kernels() == before


def test_no_module_is_imported_from_the_working_directory(tmp_path: Path) -> None:
    for name in ("json", "torch"):
        (tmp_path / f"{name}.py").write_text(
            f"import os; os.close(os.open({str(tmp_path / 'planted')!r}, os.O_CREAT)); os._exit(1)"
        )
    done = subprocess.run(
        [sys.executable, "-P", "-c", ONE_REQUEST],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert "KeyError" in done.stderr
    assert not (tmp_path / "planted").exists()


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run([*OWN_NAMESPACE, "true"], capture_output=True, check=False).returncode != 0,
    reason="this user cannot make a namespace of processes",
)
def test_the_first_process_of_a_container_has_a_compiler() -> None:
    script = f"import os; assert os.getpid() == 1{ONE_REQUEST}"
    words = [*OWN_NAMESPACE, sys.executable, "-c", script]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=True)
    assert "KeyError" in done.stderr


def test_a_package_that_was_replaced_since_the_start_is_not_compiled(
    compiler: KernelCompiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = cached_kernels()
    monkeypatch.setattr(compile_ahead, "hash_sources", lambda: "of a newer package")
    with caplog.at_level(logging.WARNING), compiling_ahead(compiler) as batch:
        greedy_tokens(torch.zeros(4, 998, dtype=torch.float16), 998, pdl=False)
    assert batch.has_failed
    assert "have changed" in caplog.text
    assert cached_kernels() == before


def test_a_marker_is_found_by_a_later_process(tmp_path: Path) -> None:
    with KernelCompiler.start(tmp_path) as first:
        assert not first.has_compiled("a model")
        first.mark_compiled("a model")
    with KernelCompiler.start(tmp_path) as later, KernelCompiler.start() as without:
        assert later.has_compiled("a model")
        assert not later.has_compiled("another model")
        without.mark_compiled("a model")
        assert not without.has_compiled("a model")


def test_a_marker_that_cannot_be_written_is_not_there(tmp_path: Path) -> None:
    with KernelCompiler.start(tmp_path / "gone") as compiler:
        compiler.mark_compiled("a model")
        assert not compiler.has_compiled("a model")


def test_a_marker_follows_no_link(tmp_path: Path) -> None:
    with KernelCompiler.start(tmp_path) as compiler:
        compiler.mark_compiled("a model")
        (marker,) = tmp_path.iterdir()
        marker.unlink()
        marker.symlink_to(tmp_path / "target")
        compiler.mark_compiled("a model")
    assert not (tmp_path / "target").exists()


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
        batch.wait()
        killed, *others = suspend_compilers(server)
        batch.send(UNKNOWN)
        killed.kill()
        for process in others:
            process.resume()
    assert server.is_running()
    server.suspend()  # it replies to nothing before it is killed
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

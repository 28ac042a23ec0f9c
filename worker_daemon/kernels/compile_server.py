"""Runs the compile server: `python -P -m worker_daemon.kernels.compile_server DAEMON_PID`, with the
daemon's control socket as standard input. kernel_compiler.py is the daemon's side.

The server imports Triton and our kernels once, and opens no device. For each socket that it
receives it forks processes, which share its memory and take requests from that socket, one at a
time, until the daemon closes it. Processes are faster than threads: Triton's code generator holds
the interpreter's lock.

Some versions of Triton (3.6, not 3.9) also build C modules with the host's C compiler: one that
loads kernels, and for each signature one that launches them. The server builds them too, since each
takes 0.25 s.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

import worker_daemon.kernels
from worker_daemon.kernel_compiler import COMPILED, CompileRequest, hash_sources
from worker_daemon.kernels.compile_ahead import Launched

MAX_PROCESSES: Final = 16
NICE: Final = 10
"""Added to the nice value of the server and its children, so that the daemon runs first."""
_MAX_REQUEST_BYTES: Final = 1 << 16
_MAX_ERROR_CHARS: Final = 1000
_PR_SET_PDEATHSIG: Final = 1
_BUILDS_LAUNCHERS: Final = hasattr(nvidia, "make_launcher")
"""True if this version of Triton builds C modules."""


class Kernels(NamedTuple):
    """The kernels that the host launches."""

    sources: str
    """hash_sources, before they were imported."""
    by_name: Mapping[str, Any]
    """Kernels (triton.JITFunction) by module and qualified name."""


class TargetDriver:
    """Stands for Triton's driver of a device that this process does not open."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        """Return the target of compilations."""
        return self._target

    def get_current_device(self) -> int:
        """Return 0: all requests of a process are for one device."""
        return 0


def find_kernels() -> Kernels:
    """Import all modules of kernels, and return the kernels that the host launches."""
    sources, found = hash_sources(), {}
    package = worker_daemon.kernels
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if module.name == __spec__.name:
            continue
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Launched):
                kernel = value.kernel
                found[f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"] = kernel
    return Kernels(sources, found)


def compile_kernel(kernels: Kernels, request: CompileRequest) -> None:
    """Compile a kernel, and the C module that launches it, into Triton's cache. Raises what Triton
    raises, KeyError for an unknown name, and ValueError if the daemon has other sources."""
    if request.sources != kernels.sources:
        raise ValueError("the sources on disk have changed since the compile server started")
    driver.set_active(TargetDriver(GPUTarget(request.backend, request.arch, request.warp_size)))
    kernel = kernels.by_name[json.loads(request.specialization)["name"]]
    kernel.hash = request.source_key
    compiled = kernel.preload(request.specialization)
    if _BUILDS_LAUNCHERS:
        nvidia.CudaLauncher(compiled.src, compiled.metadata)


def build_loader() -> None:
    """Build the C module that loads kernels, if Triton needs one. Without a C compiler or a GPU
    driver, build nothing: the daemon will raise the error."""
    if _BUILDS_LAUNCHERS:
        with contextlib.suppress(Exception):
            nvidia.CudaUtils()


def take_requests(requests: socket.socket, kernels: Kernels) -> None:
    """Compile the kernels requested over a socket, until the other end is closed."""
    while data := requests.recv(_MAX_REQUEST_BYTES):
        reply = COMPILED
        try:
            compile_kernel(kernels, CompileRequest(*json.loads(data)))
        except Exception as error:  # the daemon compiles it again, and raises the error if it must
            reply = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS].encode()
        requests.send(reply)


def serve_batch(requests: socket.socket, kernels: Kernels) -> None:
    """Fork processes that take the requests of one socket (fewer if the host permits no more), and
    wait until all have ended. If one dies, reply to the one request that it had taken."""
    server = os.getpid()
    with contextlib.suppress(OSError):  # a limit on processes or memory
        for _ in range(num_processes()):
            if os.fork() == 0:
                _run_forked(requests, kernels, server)
    while True:
        try:
            _, status = os.wait()
        except ChildProcessError:
            return
        if status:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the batch has ended
                requests.send(f"a compiling process ended with wait status {status}".encode())


def num_processes() -> int:
    """Return the number of processes of a batch: one core is left to the daemon."""
    return max(1, min(MAX_PROCESSES, len(os.sched_getaffinity(0)) - 1))


def _run_forked(requests: socket.socket, kernels: Kernels, server: int) -> None:
    """Run a forked process; does not return. os._exit skips the server's exit handlers."""
    exit_code = 1
    try:
        _end_with_parent(server)
        take_requests(requests, kernels)
        exit_code = 0
    except (BrokenPipeError, ConnectionResetError):  # the daemon has ended
        exit_code = 0
    finally:
        os._exit(exit_code)


def _end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the thread that started it ends (prctl(2)). parent:
    the process of that thread; it is 1 where the daemon is a container's first process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent process has ended")


def _be_killed_first() -> None:
    """Make the kernel end this process and its children before the daemon if memory runs out
    (proc(5))."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _take_control() -> socket.socket:
    """Return the control socket, and close standard input: the compilers that Triton starts
    inherit it, and would keep the socket open."""
    control = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    with Path(os.devnull).open() as null:
        os.dup2(null.fileno(), sys.stdin.fileno())
    return control


def main() -> None:
    """Serve batches until the daemon closes the control socket, or ends."""
    _end_with_parent(int(sys.argv[1]))
    os.nice(NICE)
    _be_killed_first()
    build_loader()
    kernels = find_kernels()
    gc.collect()
    gc.freeze()  # forked processes then do not copy these objects' pages
    with _take_control() as control:
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not message or not descriptors:
                return
            with socket.socket(fileno=descriptors[0]) as requests:
                serve_batch(requests, kernels)


if __name__ == "__main__":
    main()

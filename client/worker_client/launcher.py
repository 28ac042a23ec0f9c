"""Runs local daemons for one driver: starts them together, waits until they are ready, and stops
them when the driver ends, even if it is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import zmq

from rpc_schema.errors import WorkerDaemonError
from worker_client.errors import DeadlineExceeded, LaunchError, Unkillable, WorkerDied
from worker_client.wire.endpoint import new_driver_id, parse_endpoint
from worker_client.wire.worker_client import AskingClient
from worker_host.exit_codes import describe_exit

READY_TIMEOUT_S = 120.0
HELLO_TIMEOUT_S = 0.5
SOCKET_POLL_S = 0.005
STOP_TIMEOUT_S = 10.0
EXIT_WAIT_S = 0.2
"""Time between the end of a daemon's connections and its own, if it ends in order."""
TERMINATE_TIMEOUT_S = 5.0
KILL_LIMIT_S = 30.0
"""Time after SIGKILL from which a process counts as stuck in the kernel, usually in a device
driver."""
PF_EXITING = 0x4
"""Flag of a process whose end has begun (proc_pid_stat(5))."""
LOG_TAIL_BYTES = 4096

Command = Callable[[str, str, int], Sequence[str]]
"""Function from endpoint, device and the file descriptor of the parent's pipe to a daemon's command
line."""

StartProcess = Callable[..., "subprocess.Popen[bytes]"]
"""Function like subprocess.Popen, with its arguments, that starts a daemon's process, our child."""


def serve_command(*options: str, module: str = "worker_daemon") -> Command:
    """Return the command lines of daemons with these options, for LocalDaemons. module: run with
    this interpreter in place of the daemon's, with its options."""

    def build(endpoint: str, device: str, pipe: int) -> list[str]:
        own = ("--endpoint", endpoint, "--device", device, "--exit-with-parent-fd", str(pipe))
        return [sys.executable, "-m", module, "serve", *own, *options]

    return build


@dataclass(frozen=True, slots=True)
class _Daemon:
    endpoint: str
    process: "subprocess.Popen[bytes]"
    log: Path
    pipe: int
    """Our end; the daemon exits when it closes."""


class LocalDaemons:
    """Owns N daemon processes, their directory and their pipes, from construction to stop().

    The directory (mode 0700, under the system's temporary one) holds sockets, epochs and logs.
    Compiled kernels are kept elsewhere: the daemons get no state directory, so they use the user's.
    """

    def __init__(
        self,
        devices: Sequence[str],
        model_root: Path,
        *,
        lora_root: Path | None = None,
        draft_root: Path | None = None,
        adapter_cache: Path | None = None,
        ready_timeout_s: float = READY_TIMEOUT_S,
        command: Command | None = None,
        start_process: StartProcess = subprocess.Popen,
    ) -> None:
        """Start a daemon for each device ("cpu", "cuda:0", ...) and wait until all answer.

        model_root: the directory that they may read models under; lora_root: that of LoRA adapters;
        draft_root: that of a draft model; adapter_cache: a hub cache with adapters.
        command: command line to use instead of `python -m worker_daemon serve` with this
            interpreter.
        start_process: what starts them.

        Raises:
            LaunchError: one exited, or did not answer in time; none is left behind.
        """
        self.directory = Path(tempfile.mkdtemp(prefix="wd-"))
        self.seconds: dict[str, float] = {}
        """Durations of the start: `spawn` until all daemons listen, `import` until all answer."""
        self._devices = tuple(devices)
        self._daemons: list[_Daemon] = []
        self._reaper, self._reaper_pipe = _start_reaper(self.directory)
        roots = ["--model-root", str(model_root)]
        roots += [] if draft_root is None else ["--model-root", str(draft_root)]
        for root in (lora_root, adapter_cache):
            roots += [] if root is None else ["--lora-root", str(root)]
        self._command = command or serve_command(*roots)
        self._start_process = start_process
        began = time.monotonic()
        try:
            for index, device in enumerate(devices):
                self._daemons.append(self._start(index, device))
            deadline = began + ready_timeout_s
            self._wait_for_sockets(deadline)
            listening = time.monotonic()
            self._wait_until_ready(deadline, ready_timeout_s)
            self.seconds["spawn"] = listening - began
            self.seconds["import"] = time.monotonic() - listening
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> "LocalDaemons":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def endpoints(self) -> list[str]:
        """Endpoints of the daemons, in rank order."""
        return [daemon.endpoint for daemon in self._daemons]

    @property
    def pids(self) -> list[int]:
        """The daemons' process ids, in rank order."""
        return [daemon.process.pid for daemon in self._daemons]

    def check_alive(self) -> None:
        """Raise LaunchError for the first daemon that has exited, with the end of its log."""
        for daemon in self._daemons:
            if daemon.process.poll() is not None:
                raise self._launch_error("the daemon has exited", daemon)

    def restart_dead(self) -> None:
        """Start a successor, with the same endpoint and device, for each daemon that has exited or
        is about to; returns before they answer."""
        for index, daemon in enumerate(self._daemons):
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.process.wait(EXIT_WAIT_S)
            if daemon.process.returncode is None and _is_exiting(daemon.process.pid):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    daemon.process.wait(KILL_LIMIT_S)
            if daemon.process.poll() is not None:
                self._daemons[index] = self._start(index, self._devices[index])
                os.close(daemon.pipe)

    @contextlib.contextmanager
    def kept_alive(self) -> Iterator[None]:
        """Restart the daemons that have died, as restart_dead does, and on a thread those that die
        in the block. What starting one raises is raised at the end of the block, in place of the
        block's own error."""
        self.restart_dead()
        is_over = threading.Event()

        def supervise() -> None:
            while not is_over.wait(EXIT_WAIT_S):
                self.restart_dead()

        with ThreadPoolExecutor(1, "restarts") as pool:
            supervising = pool.submit(supervise)
            try:
                yield
            finally:
                is_over.set()
                supervising.result()

    @contextlib.contextmanager
    def naming_causes(self) -> Iterator[None]:
        """Add the end of its log, which stop() deletes, to the error of a daemon that died in the
        block."""
        try:
            yield
        except WorkerDied as error:
            detail = f"{error.detail}; its log ends with\n{self.log_tail(error.rank)}".rstrip()
            raise WorkerDied(error.rank, error.endpoint, detail) from error

    def log_tail(self, rank: int) -> str:
        """Return the end of a daemon's log."""
        return _tail(self._daemons[rank].log)

    def stop(
        self, timeout_s: float = STOP_TIMEOUT_S, *, kill_limit_s: float = KILL_LIMIT_S
    ) -> None:
        """Stop all daemons: by request, then SIGTERM, then SIGKILL. Remove their files. May be
        repeated.

        Raises:
            Unkillable: a process has not ended kill_limit_s after SIGKILL; all others have.
        """
        running = [daemon for daemon in self._daemons if daemon.process.poll() is None]
        with zmq.Context() as context:
            asked = [
                daemon
                for daemon in running
                if _try(context, daemon.endpoint, lambda client: client.shutdown(HELLO_TIMEOUT_S))
            ]
        _wait(asked, timeout_s)
        for number, patience_s in (
            (signal.SIGTERM, TERMINATE_TIMEOUT_S),
            (signal.SIGKILL, kill_limit_s),
        ):
            left = [daemon for daemon in running if daemon.process.poll() is None]
            for daemon in left:
                daemon.process.send_signal(number)
            _wait(left, patience_s)
        left = [daemon for daemon in running if daemon.process.poll() is None]
        places = zip(
            self._daemons, self._devices, strict=False
        )  # fewer daemons if the start failed
        devices = {daemon.endpoint: device for daemon, device in places}
        for daemon in self._daemons:
            os.close(daemon.pipe)
        self._daemons.clear()
        if self._reaper.returncode is None:
            os.close(self._reaper_pipe)
            if left:  # they hold the reaper's pipe: it outlives us
                self._reaper.returncode = 0
            else:
                self._reaper.wait()
        if left:
            stuck = {daemon.process.pid: devices[daemon.endpoint] for daemon in left}
            raise Unkillable(stuck, kill_limit_s)

    def _start(self, index: int, device: str) -> _Daemon:
        endpoint = f"ipc://{self.directory}/w{index}"
        parse_endpoint(endpoint)
        log = self.directory / f"w{index}.log"
        theirs, ours = os.pipe()
        try:
            with log.open("ab") as out:
                process = self._start_process(
                    self._command(endpoint, device, theirs),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs, self._reaper_pipe),
                    start_new_session=True,  # Ctrl-C goes to us alone; we stop them in order
                )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return _Daemon(endpoint, process, log, ours)

    def _wait_for_sockets(self, deadline: float) -> None:
        """Wait until all listen, one has exited, or the deadline; a request then shows which. A
        connection to an existing socket needs no second attempt."""
        for daemon in self._daemons:
            path = Path(daemon.endpoint.removeprefix("ipc://"))
            while not path.exists() and daemon.process.poll() is None:
                if time.monotonic() >= deadline:
                    return
                time.sleep(SOCKET_POLL_S)

    def _wait_until_ready(self, deadline: float, timeout_s: float) -> None:
        with zmq.Context() as context:
            for daemon in self._daemons:
                while not _try(context, daemon.endpoint, lambda c: c.hello(HELLO_TIMEOUT_S)):
                    time.sleep(SOCKET_POLL_S)
                    self.check_alive()
                    if time.monotonic() >= deadline:
                        message = f"the daemon did not answer within {timeout_s:.3g} s"
                        raise self._launch_error(message, daemon)

    def _launch_error(self, message: str, daemon: _Daemon) -> LaunchError:
        code = daemon.process.poll()
        ending = "" if code is None else f" ({describe_exit(code)})"
        problem = f"{daemon.endpoint}: {message}{ending}"
        return LaunchError(problem, exit_code=code, log_tail=_tail(daemon.log))


def _try(
    context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, ask: Callable[[AskingClient], object]
) -> bool:
    """Ask a daemon something; return True if it answered, even with an error: attach reports it."""
    client = AskingClient(context, parse_endpoint(endpoint), 0, new_driver_id())
    try:
        ask(client)
    except (DeadlineExceeded, WorkerDied):
        return False
    except WorkerDaemonError:
        return True
    finally:
        client.close()
    return True


def _start_reaper(directory: Path) -> tuple["subprocess.Popen[bytes]", int]:
    """Start a shell that removes the directory once we and all daemons have exited.

    We and they hold the other end of its standard input, which is returned; nothing is written to
    it.
    """
    theirs, ours = os.pipe()
    try:
        reaper = subprocess.Popen(
            ["/bin/sh", "-c", 'cat > /dev/null; rm -rf -- "$1"', "reaper", str(directory)],
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        os.close(theirs)
    return reaper, ours


def _is_exiting(pid: int) -> bool:
    """Return True if the kernel is ending a child, or has ended it. Its connections have ended by
    then, but freeing its memory, above all a device's, may take seconds more."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # another thread has waited for it
        return True
    return state == "Z" or bool(int(fields[5]) & PF_EXITING)


def _wait(daemons: Sequence[_Daemon], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for daemon in daemons:
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.process.wait(max(0.0, deadline - time.monotonic()))


def _tail(path: Path) -> str:
    data = path.read_bytes() if path.is_file() else b""
    return data[-LOG_TAIL_BYTES:].decode(errors="replace")

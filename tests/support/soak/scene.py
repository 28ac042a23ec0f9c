"""The processes of a soak: daemons that a supervisor restarts, and drivers, each started when its
predecessor exits. Chooses no faults and checks no results; `tick` is called often."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from tests.support.command_line import ask_status, environment
from tests.support.faulty_daemon import FaultFile
from tests.support.soak.driver import (
    DONE,
    GAVE_UP,
    LEFT,
    NEVER_SERVED,
    PROGRESS,
    UNSEATED,
    Life,
)

EXITS = {
    DONE: "done",
    UNSEATED: "unseated",
    GAVE_UP: "gave up",
    NEVER_SERVED: "never served",
    LEFT: "left",
    -signal.SIGKILL: "killed",
}
SAMPLE_S = 2.0
SETTLED_S = 60.0
"""A daemon's memory is measured once it is this old and has loaded."""


class Weight(NamedTuple):
    """Resources of a process."""

    rss_mib: float
    files: int
    """Open descriptors."""
    threads: int

    def since(self, before: "Weight") -> "Weight":
        return Weight(*(now - then for now, then in zip(self, before, strict=True)))


def weigh(pid: int) -> Weight | None:
    """Return a process's resources; None if it is gone."""
    try:
        process = psutil.Process(pid)
        rss_mib = process.memory_info().rss / (1 << 20)
        return Weight(rss_mib, process.num_fds(), process.num_threads())
    except psutil.Error:
        return None


@dataclass
class Daemon:
    """One rank, and its current process."""

    rank: int
    endpoint: str
    faults: FaultFile
    process: "subprocess.Popen[bytes]"
    began: float
    exits: Counter[int] = field(default_factory=Counter)
    first: "Weight | None" = None
    """Resources once it had settled."""
    last: "Weight | None" = None


class Scene:
    """Owns the processes until close()."""

    def __init__(self, directory: Path, model_root: Path, num_ranks: int) -> None:
        """Start the daemons; start_drivers() comes later."""
        self.directory = directory
        self._model_root = model_root
        self.daemons: list[Daemon] = []
        for rank in range(num_ranks):
            endpoint = f"ipc://{directory}/{rank}/w"
            faults = FaultFile(directory / f"{rank}.fault")
            process = self._start_daemon(endpoint, faults)
            self.daemons.append(Daemon(rank, endpoint, faults, process, time.monotonic()))
        self.driver: subprocess.Popen[bytes] | None = None
        self.driver_exits: Counter[str] = Counter()
        self.growths: list[Weight] = []
        """Growth of daemons from when they settled until their exit."""
        self.longest_gap_s = self.gap_s = 0.0
        """Longest time without a token while requests waited; `gap_s` since its last reset."""
        self.num_steps = self.num_tokens = 0
        self._life: Path | None = None
        self._progress: Path | None = None
        self._former: list[subprocess.Popen[bytes]] = []
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._last_token = time.monotonic()
        self._known = (0, 0)
        self._next_sample = 0.0

    def wait_for_daemons(self) -> None:
        """Wait until all answer."""
        deadline = time.monotonic() + 90.0
        for daemon in self.daemons:
            while ask_status(daemon.endpoint) is None:
                assert daemon.process.poll() is None, self.log("daemon")[-3000:]
                assert time.monotonic() < deadline, f"{daemon.endpoint} does not answer"
                time.sleep(0.05)

    def start_drivers(self, life: Life) -> None:
        """Start the first driver."""
        self._life = self.directory / "life.json"
        self._life.write_bytes(msgspec.json.encode(life))
        self._progress = Path(life.progress)
        self._last_token = time.monotonic()
        self.start_driver()

    def start_driver(self) -> None:
        """Start the next driver. A predecessor that still lives is expected to exit."""
        if self.driver is not None:
            self._former.append(self.driver)
        with (self.directory / "driver.log").open("ab") as log:
            self.driver = subprocess.Popen(
                [sys.executable, "-m", "tests.support.soak.driver", str(self._life)],
                stdin=subprocess.PIPE,
                bufsize=0,  # close() must not try again to send a line to one that has ended
                stdout=log,
                stderr=log,
                env=environment(self.directory),
            )

    def tell_driver(self, command: str) -> None:
        """Send the driver a line."""
        assert self.driver is not None and self.driver.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone
            self.driver.stdin.write(command.encode() + b"\n")

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Call act after some seconds."""
        self._later.append((time.monotonic() + seconds, act))

    @property
    def is_done(self) -> bool:
        """Return True if a driver reported that every request has ended."""
        return self.driver_exits["done"] > 0

    def is_stuck(self, after_s: float) -> bool:
        """Return True if there has been no token for that long."""
        return time.monotonic() - self._last_token > after_s

    def tick(self) -> None:
        """Restart exited processes, run due actions, check progress and memory."""
        now = time.monotonic()
        due = [act for at, act in self._later if at <= now]
        self._later = [(at, act) for at, act in self._later if at > now]
        for act in due:
            act()
        for daemon in self.daemons:
            self._supervise(daemon)
        self._look_after_drivers()
        self._look_at_progress(now)
        if now >= self._next_sample:
            self._next_sample = now + SAMPLE_S
            for daemon in self.daemons:
                self._weigh(daemon, now)

    def log(self, of: str) -> str:
        """Return the log of the daemons or the drivers."""
        path = self.directory / f"{of}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def stop_daemons(self) -> list[int]:
        """Send SIGTERM to all daemons once they serve (the last fault may have come with the last
        request's end). Return their exit codes."""
        for daemon in self.daemons:
            daemon.process.send_signal(signal.SIGCONT)
            self._supervise(daemon)
        self.wait_for_daemons()
        for daemon in self.daemons:
            self._refresh_statuses(daemon)
            daemon.process.terminate()
        return [daemon.process.wait(30) for daemon in self.daemons]

    def close(self) -> None:
        """Kill remaining processes, and run actions that are due later, which close sockets."""
        for _, act in self._later:
            act()
        self._later.clear()
        drivers = [*self._former, *([self.driver] if self.driver is not None else [])]
        for process in [*drivers, *(daemon.process for daemon in self.daemons)]:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def _start_daemon(self, endpoint: str, faults: FaultFile) -> "subprocess.Popen[bytes]":
        words = (sys.executable, "-m", "tests.support.faulty_daemon", str(faults.path))
        options = ("serve", "--endpoint", endpoint, "--device", "cpu")
        roots = ("--model-root", os.fspath(self._model_root))
        with (self.directory / "daemon.log").open("ab") as log:
            return subprocess.Popen(
                [*words, *options, *roots],
                stdout=log,
                stderr=log,
                env=environment(self.directory),
            )

    def _supervise(self, daemon: Daemon) -> None:
        code = daemon.process.poll()
        if code is None:
            return
        daemon.exits[code] += 1
        self._refresh_statuses(daemon)
        daemon.process = self._start_daemon(daemon.endpoint, daemon.faults)
        daemon.began = time.monotonic()

    def _look_after_drivers(self) -> None:
        for former in [process for process in self._former if process.poll() is not None]:
            self._former.remove(former)
            self._count_exit(former)
        if self.driver is not None and self.driver.poll() is not None:
            self._count_exit(self.driver)
            ended, self.driver = self.driver, None
            if ended.returncode != DONE:
                self.start_driver()

    def _count_exit(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        process.stdin.close()
        code = process.returncode
        self.driver_exits[EXITS.get(code, f"exit code {code}")] += 1

    def _look_at_progress(self, now: float) -> None:
        assert self._progress is not None
        data = self._progress.read_bytes() if self._progress.exists() else b""
        if len(data) == PROGRESS.size:
            steps, tokens, at = PROGRESS.unpack(data)
            if at > self._last_token:
                before = self._known if tokens >= self._known[1] else (0, 0)
                self.num_steps += steps - before[0]
                self.num_tokens += tokens - before[1]
                self._known = steps, tokens
                self._last_token = at
        gap = now - self._last_token
        self.gap_s = max(self.gap_s, gap)
        self.longest_gap_s = max(self.longest_gap_s, gap)

    def _weigh(self, daemon: Daemon, now: float) -> None:
        if now - daemon.began >= SETTLED_S and (daemon.first or _is_ready(daemon)):
            weight = weigh(daemon.process.pid)
            daemon.first = daemon.first or weight
            daemon.last = weight or daemon.last

    def _refresh_statuses(self, daemon: Daemon) -> None:
        if daemon.first is not None and daemon.last is not None:
            self.growths.append(daemon.last.since(daemon.first))
        daemon.first = daemon.last = None


def _is_ready(daemon: Daemon) -> bool:
    status = ask_status(daemon.endpoint)
    return status is not None and status.load == "READY"

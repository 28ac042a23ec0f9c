"""Starts the processes of a run, and starts each again that dies, as systemd would. Kills some of
them, if it is to."""

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple

from examples.grpo.policy import make_policy
from examples.grpo.run_files import RunFiles, Settings

NUM_STAGES: Final = 2
POLL_S: Final = 0.01
STOP_S: Final = 10.0
MAX_FAILURES: Final = 5
"""Times that one process may die by itself."""
MAX_DELAY_S: Final = 0.3


class Kill(NamedTuple):
    """One death."""

    num_batches: int
    """It comes when so many are complete,"""
    delay_s: float
    """and so much time has passed."""
    victim: str


class RunFailed(Exception):
    """A process of a run has died by itself again and again; the message has its log's end."""


class Supervisor:
    """Owns the processes of a run in a directory, and their logs there."""

    def __init__(
        self,
        directory: Path,
        num_updates: int,
        *,
        kept_policies: int | None = None,
        popen: "Callable[..., subprocess.Popen[bytes]]" = subprocess.Popen,
    ) -> None:
        """directory: a new one. kept_policies: see Settings. popen: starts a process."""
        self.files = RunFiles(directory)
        self._popen = popen
        self._sockets = tempfile.TemporaryDirectory(prefix="grpo-")  # their paths must be short
        endpoints = [f"ipc://{self._sockets.name}/w{rank}" for rank in range(NUM_STAGES)]
        settings = Settings(endpoints, num_updates)
        if kept_policies is not None:
            settings = Settings(endpoints, num_updates, kept_policies)
        self.files.create(settings)
        self.files.write_policy(0, make_policy, settings.kept_policies)
        self._commands = {
            "trainer": _module("examples.grpo.trainer", directory),
            "driver": _module("examples.grpo.rollouts", directory),
        } | {
            f"daemon {rank}": _module(
                *("worker_daemon", "serve", "--endpoint", endpoint, "--device", "cpu"),
                *("--model-root", self.files.policies),
            )
            for rank, endpoint in enumerate(endpoints)
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.deaths: Counter[str] = Counter()
        """Deaths of each process, killed or not."""
        self._num_killed: Counter[str] = Counter()

    def __enter__(self) -> "Supervisor":
        for name in self._commands:
            self._start(name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._sockets.cleanup()

    @property
    def names(self) -> list[str]:
        """The processes."""
        return list(self._commands)

    def run(self, kills: Sequence[Kill] = (), say: Callable[[str], object] = print) -> list[float]:
        """Serve until trainer and driver are done; return the mean reward of each batch.

        Raises:
            RunFailed: a process dies by itself again and again.
        """
        rewards: list[float] = []
        upcoming = sorted(kills)
        due_s = 0.0
        while self._attend():
            while self.files.batch(len(rewards)).exists():
                samples = self.files.read_batch(len(rewards))
                rewards.append(sum(sample.reward for sample in samples) / len(samples))
                say(f"update {len(rewards)}: mean reward {rewards[-1]:.3f}")
            if upcoming and len(rewards) >= upcoming[0].num_batches:
                due_s = due_s or time.monotonic() + upcoming[0].delay_s
                if time.monotonic() >= due_s:
                    self._kill(upcoming.pop(0).victim, say)
                    due_s = 0.0
            time.sleep(POLL_S)
        return rewards

    def _start(self, name: str) -> None:
        with self._log(name).open("ab") as log:
            self._processes[name] = self._popen(
                self._commands[name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _attend(self) -> bool:
        """Start again what has died; return False once trainer and driver are done."""
        is_open = False
        for name, process in list(self._processes.items()):
            code = process.poll()
            is_open |= code is None and not name.startswith("daemon")
            if code is None or code == 0:
                continue
            self.deaths[name] += 1
            if self.deaths[name] - self._num_killed[name] > MAX_FAILURES:
                log = self._log(name).read_text(errors="replace")
                raise RunFailed(f"{name} has ended with {code}:\n{log[-4000:]}")
            self._start(name)
            is_open = True
        return is_open

    def _kill(self, victim: str, say: Callable[[str], object]) -> None:
        process = self._processes[victim]
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            self._num_killed[victim] += 1
            say(f"killed: {victim}")

    def _log(self, name: str) -> Path:
        return self.files.directory / f"{name.replace(' ', '-')}.log"


def plan_kills(seed: int, count: int, num_updates: int, names: Sequence[str]) -> list[Kill]:
    """Return so many deaths at random moments of a run, each process's in turn."""
    rng = random.Random(seed)
    victims: list[str] = []
    while len(victims) < count:
        victims += rng.sample(names, len(names))
    return [
        Kill(rng.randrange(max(1, num_updates - 1)), rng.uniform(0.0, MAX_DELAY_S), victim)
        for victim in victims[:count]
    ]


def _module(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", *map(str, words)]

"""One run of `worker-client demo`: the driver's process, what it tells, and the kill."""

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from worker_client.cli.demo_driver import (
    DriverReady,
    Finished,
    Lost,
    Message,
    Plan,
    Replaced,
    StepTokens,
)
from worker_client.errors import LaunchError
from worker_host.exit_codes import describe_exit

_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)
_READ_BYTES = 1 << 16
_TAIL_BYTES = 4096


class DriverProcess:
    """A process that runs demo_driver.py, from construction to close()."""

    def __init__(self, plan: Plan) -> None:
        self.began = time.monotonic()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # until close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "worker_client.cli.demo_driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(plan))
        self._process.stdin.close()
        self._stdout = self._process.stdout.fileno()
        self._rest = b""
        self.has_ended = False
        """True once everything that it has told was read."""

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def read(self, within_s: float) -> list[Message]:
        """Return what it has told since, or tells within the time. Raises LaunchError if it has
        failed."""
        if not select.select([self._stdout], [], [], within_s)[0]:
            return []
        data = os.read(self._stdout, _READ_BYTES)
        if not data:
            self.has_ended = True
            if code := self._process.wait():
                raise self._failed(code)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [_DECODER.decode(line) for line in lines]

    def kill(self) -> list[Message]:
        """Kill it (SIGKILL), and return what it had told and nobody has read."""
        self._process.send_signal(signal.SIGKILL)
        messages = []
        while found := os.read(self._stdout, _READ_BYTES):
            *lines, self._rest = (self._rest + found).split(b"\n")
            messages += [_DECODER.decode(line) for line in lines]
        self._process.wait()
        return messages

    def close(self) -> None:
        """End it, if it still runs."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def _failed(self, code: int) -> LaunchError:
        self._errors.seek(0)
        tail = self._errors.read()[-_TAIL_BYTES:].decode(errors="replace")
        problem = f"the demo's driver has ended ({describe_exit(code)})"
        return LaunchError(problem, exit_code=code, log_tail=tail)


@dataclass(slots=True)
class Recovery:
    """A kill, and what followed. Times are of time.monotonic()."""

    victim: str
    pid: int
    at: float
    seconds: dict[str, float] = field(default_factory=dict)
    """Durations of the phases from the kill to the next token, in order."""
    num_adopted: int | None = None
    """Requests that the next driver continued; None if the driver lived."""
    num_queued: int = 0
    """Requests that had not begun, and that it began."""
    token_at: float | None = None
    """Time of the first token after the recovery."""

    @property
    def total_s(self) -> float | None:
        """Time from the kill to the next token."""
        return None if self.token_at is None else self.token_at - self.at


@dataclass(slots=True)
class Run:
    """Events of a run, as its drivers have told them."""

    title: str
    began: float | None = None
    """Time at which the first driver was ready."""
    tokens: list[StepTokens] = field(default_factory=list)
    num_tokens: int = 0
    outputs: dict[str, list[int]] = field(default_factory=dict)
    """Tokens of the requests that have ended."""
    errors: dict[str, str] = field(default_factory=dict)
    recovery: Recovery | None = None

    @property
    def seconds(self) -> float:
        """Time from the start to the last token."""
        return self.tokens[-1].at - self.began if self.tokens and self.began is not None else 0.0

    def killed(self, victim: str, pid: int, at: float) -> None:
        """Note a kill."""
        self.recovery = Recovery(victim, pid, at)

    def take(self, message: Message, spawned: float) -> None:
        """Note a message of a driver that was started at `spawned`."""
        recovery = self.recovery
        match message:
            case DriverReady() if self.began is None:
                self.began = message.at
            case DriverReady() if recovery is not None:
                recovery.num_adopted, recovery.num_queued = message.num_adopted, message.num_queued
                _note_phases(
                    recovery,
                    {
                        "end of the process": spawned,
                        "interpreter and imports": message.began,
                        "attach": message.attached,
                        "adopt": message.at,
                    },
                )
            case StepTokens():
                self.tokens.append(message)
                self.num_tokens += message.num_tokens
                if recovery is not None and recovery.seconds and recovery.token_at is None:
                    recovery.token_at = message.at
                    _note_phases(recovery, {"first token": message.at})
            case Finished():
                self.outputs[message.req_id] = message.token_ids
                if message.error:
                    self.errors[message.req_id] = message.error
            case Lost() if recovery is not None:
                _note_phases(recovery, {"notice": message.at})
            case Replaced() if recovery is not None:
                recovery.seconds |= message.seconds
                _note_phases(recovery, {"rest of the replacement": message.at})


def _note_phases(recovery: Recovery, ends: Mapping[str, float]) -> None:
    """Note phases by their ends: each begins at the end of the one before."""
    for phase, end in ends.items():
        recovery.seconds[phase] = end - recovery.at - sum(recovery.seconds.values())

"""The state of the step thread and of the wait for results. Every field has one writer at a time;
any thread reads without a lock, since each field is one reference that is replaced as a whole (but
for step_times, which is updated in place)."""

import math
import time
from dataclasses import dataclass
from typing import Final

import msgspec

from worker_daemon.server.lifecycle import DaemonState
from worker_daemon.worker.description import WorkerDescription

MAX_STEPS: Final = 64
"""The mean step time is exact over this many steps; after that it is an exponential moving average
in which each new step has weight 1 / MAX_STEPS."""


class Stamp(msgspec.Struct, frozen=True, gc=False):
    """One phase. Times are of time.monotonic, in seconds. A Struct for its fast constructor, called
    twice per step."""

    phase: str
    since: float
    deadline: float
    """After this the phase counts as hung; infinite while idle."""
    on_link: bool
    """True if the phase may wait for other ranks, so that aborting the link can end it."""

    @property
    def idle(self) -> bool:
        """True if the step thread waits for a request."""
        return self.phase == IDLE

    @property
    def limit_ms(self) -> int:
        """The limit of the phase's duration; 0 if there is none."""
        limit_s = self.deadline - self.since
        return 0 if math.isinf(limit_s) else min(int(limit_s * 1000), 2**31 - 1)

    def age_ms(self, now: float) -> int:
        """Return the duration of the phase at `now`."""
        return min(int((now - self.since) * 1000), 2**31 - 1)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state that changes with lifecycle operations only."""

    state: DaemonState
    rank: int
    transitions: tuple[str, ...]
    description: WorkerDescription
    failure: str = ""


IDLE = "IDLE"
NO_RESULT = Stamp(IDLE, 0.0, math.inf, False)


class StepTimes:
    """The mean step duration; recent steps weigh more. Written by one thread at a time, read
    by any."""

    __slots__ = ("_last_s", "_num_steps", "usual_s")

    def __init__(self) -> None:
        self.usual_s = 0.0
        """0 before the first step has ended."""
        self._num_steps = 0
        self._last_s = 0.0

    def add(self, began_s: float, ended_s: float) -> None:
        """Record a step, in seconds of time.monotonic. Steps overlap: a step counts from its start
        or the end of the previous step, whichever is later, so that idle time never counts."""
        # Plain comparisons: this runs once per step.
        begin_s = self._last_s if self._last_s > began_s else began_s
        took_s = ended_s - begin_s if ended_s > begin_s else 0.0
        self._last_s = ended_s
        if self._num_steps < MAX_STEPS:
            self._num_steps += 1
        self.usual_s += (took_s - self.usual_s) / self._num_steps


class Progress:
    """Written by the step thread (`result` by the completion thread), read by control and guard."""

    __slots__ = (
        "epoch",
        "last_seq",
        "link",
        "result",
        "snapshot",
        "stamp",
        "step_deadline_s",
        "step_times",
    )

    def __init__(self, device: str) -> None:
        self.stamp = Stamp("STARTING", time.monotonic(), math.inf, False)
        self.result = NO_RESULT
        """The phase in which the completion thread waits for a result; a hanging device shows
        here."""
        self.snapshot = Snapshot(DaemonState(), 0, (), WorkerDescription(device))
        self.epoch = 0
        self.link = 0
        self.last_seq = 0
        """The last request whose outcome has been, or is about to be, passed to the completion
        thread."""
        self.step_deadline_s = 60.0
        self.step_times = StepTimes()
        """Written by the thread that takes a step's result: the step thread or the completion
        thread."""

    def begin(self, phase: str, legal_silence_s: float, on_link: bool) -> None:
        """Enter a phase that may last `legal_silence_s`."""
        now = time.monotonic()
        self.stamp = Stamp(phase, now, now + legal_silence_s, on_link)

    def await_result(self, seq: int) -> None:
        """Record that the completion thread begins to wait for the result of `seq`."""
        now = time.monotonic()
        self.result = Stamp(f"RESULT {seq}", now, now + self.step_deadline_s, True)

    def set_phase(self, phase: str, legal_silence_s: float) -> None:
        """Replace the running phase by a finer one; called by a worker inside an operation."""
        self.begin(phase, legal_silence_s, self.stamp.on_link)

    def idle(self) -> None:
        """Wait for the next request."""
        self.stamp = Stamp(IDLE, time.monotonic(), math.inf, False)

    def overdue(self) -> str:
        """Return the overdue phase of the step or completion thread; empty if there is none."""
        now = time.monotonic()
        for stamp in (self.stamp, self.result):
            if now > stamp.deadline:
                return f"{stamp.phase} is past its deadline"
        return ""

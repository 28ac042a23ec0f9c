"""The state of the step thread and of the wait for results. Every field has one writer at a time;
any thread reads without a lock, since each field is one reference that is replaced as a whole (but
for step_times, which is updated in place)."""

import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import Final

import msgspec

from rpc_schema.errors import ErrorCode
from worker_daemon.server.lifecycle import DaemonState
from worker_daemon.worker.description import WorkerDescription
from worker_host.metrics import HistogramCounts

MAX_STEPS: Final = 64
"""The mean step time is exact over this many steps; after that it is an exponential moving average
in which each new step has weight 1 / MAX_STEPS."""
STEP_BOUNDS_S: Final = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.025),
    *(0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0),
)
"""Buckets of step times: close to each other where steps of large models are."""
PHASE_BOUNDS_S: Final = (
    *(0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01),
    *(0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0, 10.0),
)
"""Buckets of the phases of a step."""


class Stamp(msgspec.Struct, frozen=True, gc=False):
    """One phase. Times are of time.monotonic, in seconds. A Struct for its fast constructor, called
    twice per step."""

    phase: str
    since: float
    deadline: float
    """After this the phase counts as hung; infinite while idle."""
    on_link: bool
    """True if the phase may wait for other ranks, so that aborting the link can end it."""
    done: float = 0.0
    """Share of the operation that is complete, if it is known."""

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

    def add(self, began_s: float, ended_s: float, launched_s: float | None = None) -> float:
        """Record a step, in seconds of time.monotonic. Steps overlap: a step counts from its start
        or the end of the previous step, whichever is later, so that idle time never counts.
        launched_s: the end of the step thread's work; None if this rank has no result.
        Return the step's duration."""
        # Plain comparisons: this runs once per step.
        begin_s = self._last_s if self._last_s > began_s else began_s
        took_s = ended_s - begin_s if ended_s > begin_s else 0.0
        self._last_s = ended_s
        if self._num_steps < MAX_STEPS:
            self._num_steps += 1
        self.usual_s += (took_s - self.usual_s) / self._num_steps
        return took_s


class CountedStepTimes(StepTimes):
    """The same, and how many steps took how long, for a daemon with metrics."""

    __slots__ = ("awaited", "launched", "steps")

    def __init__(self) -> None:
        super().__init__()
        self.steps = HistogramCounts(STEP_BOUNDS_S)
        """From step to step, in seconds, without idle times."""
        self.launched = HistogramCounts(PHASE_BOUNDS_S)
        """From a step's start to the end of the step thread's work for it."""
        self.awaited = HistogramCounts(PHASE_BOUNDS_S)
        """From there until its tokens are on the host."""

    def add(self, began_s: float, ended_s: float, launched_s: float | None = None) -> float:
        """Record a step, as StepTimes does, and count it."""
        took_s = super().add(began_s, ended_s, launched_s)
        self.steps.observe(took_s)
        if launched_s is not None:
            self.launched.observe(launched_s - began_s)
            self.awaited.observe(ended_s - launched_s)
        return took_s


class Progress:
    """Written by the step thread (`result` by the completion thread), read by control and guard."""

    __slots__ = (
        "epoch",
        "is_awaited",
        "last_seq",
        "link",
        "num_failed_steps",
        "operation_s",
        "refusals",
        "result",
        "snapshot",
        "stamp",
        "step_deadline_s",
        "step_times",
    )

    def __init__(self, device: str, step_times: StepTimes | None = None) -> None:
        """step_times: where steps are recorded; None: in a StepTimes."""
        self.stamp = Stamp("STARTING", time.monotonic(), math.inf, False)
        self.result = NO_RESULT
        """The phase in which the completion thread waits for a result; a hanging device shows
        here."""
        self.snapshot = Snapshot(DaemonState(), 0, (), WorkerDescription(device))
        self.epoch = 0
        self.is_awaited = False
        """True while a driver that attaches waits for a running operation; written by control."""
        self.link = 0
        self.last_seq = 0
        """The last request whose outcome has been, or is about to be, passed to the completion
        thread."""
        self.step_deadline_s = 60.0
        self.step_times = StepTimes() if step_times is None else step_times
        """Written by the thread that takes a step's result: the step thread or the completion
        thread."""
        self.num_failed_steps = 0
        """Steps that failed on the step thread."""
        self.refusals: Counter[ErrorCode] = Counter()
        """Requests that were not accepted, by the reason."""
        self.operation_s: dict[str, float] = {}
        """Duration of the last operation of each kind, steps excepted."""

    def begin(self, phase: str, legal_silence_s: float, on_link: bool) -> None:
        """Enter a phase that may last `legal_silence_s`."""
        now = time.monotonic()
        self.stamp = Stamp(phase, now, now + legal_silence_s, on_link)

    def waiting_s(self) -> float:
        """Return how long the older of the running phases has lasted; 0 while both threads are
        idle."""
        since = [stamp.since for stamp in (self.stamp, self.result) if not stamp.idle]
        return max(0.0, time.monotonic() - min(since)) if since else 0.0

    def await_result(self, seq: int) -> None:
        """Record that the completion thread begins to wait for the result of `seq`."""
        now = time.monotonic()
        self.result = Stamp(f"RESULT {seq}", now, now + self.step_deadline_s, True)

    def set_phase(self, phase: str, legal_silence_s: float, /, *, done: float = 0.0) -> bool:
        """Replace the running phase by a finer one; called by a worker inside an operation. See
        SetPhase."""
        now = time.monotonic()
        self.stamp = Stamp(phase, now, now + legal_silence_s, self.stamp.on_link, done)
        return self.is_awaited

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

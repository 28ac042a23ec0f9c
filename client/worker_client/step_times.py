"""When a driver sent its last steps and when their outcomes came: a ring of numbers, for whoever
traces the group. Knows no socket; belongs to the group's thread."""

import os
import time
from collections import deque

import numpy as np

from rpc_schema.trace import MAX_DRIVER_STEPS, DriverSteps
from worker_client.clocks import Offset
from worker_client.scheduler_output import SchedulerOutput


class _Times:
    """One step, in nanoseconds of time.monotonic_ns(). Holds nothing of the step itself, which may
    carry whole prompts."""

    __slots__ = ("began_ns", "context", "generation", "sent_ns", "seq", "settled_ns")

    def __init__(self, seq: int, began_ns: int, output: SchedulerOutput | None) -> None:
        self.seq = seq
        self.began_ns = began_ns
        self.sent_ns = time.monotonic_ns()
        self.settled_ns = 0
        self.context = self.generation = 0
        if output is not None:
            counts = output.num_scheduled_tokens.values()
            self.context = sum(count for count in counts if count != 1)
            self.generation = output.total_num_scheduled_tokens - self.context


class StepHistory:
    """The last MAX_DRIVER_STEPS steps of an epoch."""

    def __init__(self) -> None:
        self._times: deque[_Times] = deque(maxlen=MAX_DRIVER_STEPS)
        self._unsettled: dict[int, _Times] = {}

    def sent(self, seq: int, began_ns: int, output: SchedulerOutput | None) -> None:
        """A step has just been handed over."""
        times = self._unsettled[seq] = _Times(seq, began_ns, output)
        self._times.append(times)

    def settled(self, seq: int) -> None:
        """Its outcome is there."""
        times = self._unsettled.pop(seq, None)
        if times is not None:
            times.settled_ns = time.monotonic_ns()

    def failed(self, seq: int) -> None:
        """It will have none."""
        self._unsettled.pop(seq, None)

    def clear(self) -> None:
        """Forget all: seqs begin anew."""
        self._times.clear()
        self._unsettled.clear()

    def between(self, begin_ns: int, end_ns: int, clock: Offset) -> DriverSteps:
        """Return the steps of a stretch of time, whole or in part.

        begin_ns, end_ns: of the daemon's clock that `clock` is the offset of.
        """
        begin, end = begin_ns - clock.ahead_ns, end_ns - clock.ahead_ns
        chosen = [
            times
            for times in self._times
            if times.began_ns <= end and (times.settled_ns or times.sent_ns) >= begin
        ]
        return DriverSteps(
            pid=os.getpid(),
            clock_offset_ns=clock.ahead_ns,
            clock_bound_ns=clock.bound_ns,
            clock_at_ns=clock.at_ns,
            seqs=_int64([times.seq for times in chosen]),
            began_ns=_int64([times.began_ns for times in chosen]),
            sent_ns=_int64([times.sent_ns for times in chosen]),
            settled_ns=_int64([times.settled_ns for times in chosen]),
            context_tokens=_int32([times.context for times in chosen]),
            generation_tokens=_int32([times.generation for times in chosen]),
        )


def _int64(values: list[int]) -> bytes:
    return np.array(values, "<i8").tobytes()


def _int32(values: list[int]) -> bytes:
    return np.array(values, "<i4").tobytes()

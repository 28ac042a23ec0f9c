"""Times at which a driver sent its last steps and received their outcomes, for traces. Belongs to
the group's thread."""

import os
import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from rpc_schema.trace import MAX_DRIVER_STEPS, DriverSteps
from worker_client.scheduler_output import SchedulerOutput
from worker_client.tracing.clocks import Offset


@dataclass(slots=True)
class _Times:
    """One step, in nanoseconds of time.monotonic_ns(). The step itself, which may carry whole
    prompts, is not kept."""

    seq: int
    began_ns: int
    sent_ns: int
    context: int
    generation: int
    settled_ns: int = 0


class StepHistory:
    """The last MAX_DRIVER_STEPS steps of an epoch."""

    def __init__(self) -> None:
        self._times: deque[_Times] = deque(maxlen=MAX_DRIVER_STEPS)
        self._unsettled: dict[int, _Times] = {}

    def sent(self, seq: int, began_ns: int, output: SchedulerOutput | None) -> None:
        """Record a step that was just sent."""
        now_ns, context, generation = time.monotonic_ns(), 0, 0
        if output is not None:
            generation = len(output.decode_req_ids)
            if output.num_scheduled_tokens:
                counts, drafted = output.num_scheduled_tokens, output.num_drafts
                context = sum(n for name, n in counts.items() if n != 1 and name not in drafted)
                generation += sum(counts.values()) - context
        times = self._unsettled[seq] = _Times(seq, began_ns, now_ns, context, generation)
        self._times.append(times)

    def settled(self, seq: int) -> None:
        """Record the arrival of a step's outcome."""
        times = self._unsettled.pop(seq, None)
        if times is not None:
            times.settled_ns = time.monotonic_ns()

    def failed(self, seq: int) -> None:
        """Record that a step will have no outcome."""
        self._unsettled.pop(seq, None)

    def clear(self) -> None:
        """Forget all steps: seqs start over."""
        self._times.clear()
        self._unsettled.clear()

    def between(self, begin_ns: int, end_ns: int, clock: Offset) -> DriverSteps:
        """Return the steps of a period, also those that are partly in it.

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
            seqs=_column("<i8", [times.seq for times in chosen]),
            began_ns=_column("<i8", [times.began_ns for times in chosen]),
            sent_ns=_column("<i8", [times.sent_ns for times in chosen]),
            settled_ns=_column("<i8", [times.settled_ns for times in chosen]),
            context_tokens=_column("<i4", [times.context for times in chosen]),
            generation_tokens=_column("<i4", [times.generation for times in chosen]),
        )


def _column(dtype: str, values: list[int]) -> bytes:
    return np.array(values, dtype).tobytes()

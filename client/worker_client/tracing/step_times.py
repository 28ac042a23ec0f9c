"""Times at which a driver sent its last steps and received their outcomes, for traces. Belongs to
the group's thread."""

import os
import time
from array import array
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rpc_schema.trace import MAX_DRIVER_STEPS, DriverSteps
from worker_client.scheduler_output import SchedulerOutput
from worker_client.tracing.clocks import Offset

_NO_STEP: Final = -1
"""In place of a seq."""
_AWAITED: Final = -1
"""In place of the time at which a step was settled."""


class StepHistory:
    """The last MAX_DRIVER_STEPS steps of an epoch, in columns that do not grow. Step `seq` is in
    row `seq % MAX_DRIVER_STEPS`. Times are nanoseconds of time.monotonic_ns()."""

    def __init__(self) -> None:
        self._seqs = array("q")
        self._began_ns = array("q", bytes(8 * MAX_DRIVER_STEPS))
        self._sent_ns = array("q", bytes(8 * MAX_DRIVER_STEPS))
        self._settled_ns = array("q", bytes(8 * MAX_DRIVER_STEPS))
        """0 for a step that has failed."""
        self._context = array("i", bytes(4 * MAX_DRIVER_STEPS))
        self._generation = array("i", bytes(4 * MAX_DRIVER_STEPS))
        self.clear()

    def sent(self, seq: int, began_ns: int, output: SchedulerOutput | None) -> None:
        """Record a step that was just sent."""
        row, context, generation = seq % MAX_DRIVER_STEPS, 0, 0
        self._seqs[row] = seq
        self._began_ns[row] = began_ns
        self._sent_ns[row] = time.monotonic_ns()
        self._settled_ns[row] = _AWAITED
        if output is not None:
            generation = len(output.decode_req_ids)
            if output.num_scheduled_tokens:
                counts, drafted = output.num_scheduled_tokens, output.num_drafts
                context = sum(n for name, n in counts.items() if n != 1 and name not in drafted)
                generation += sum(counts.values()) - context
        self._context[row] = context
        self._generation[row] = generation

    def settled(self, seq: int) -> None:
        """Record the arrival of a step's outcome."""
        row = seq % MAX_DRIVER_STEPS
        if self._settled_ns[row] == _AWAITED and self._seqs[row] == seq:
            self._settled_ns[row] = time.monotonic_ns()

    def failed(self, seq: int) -> None:
        """Record that a step will have no outcome."""
        row = seq % MAX_DRIVER_STEPS
        if self._settled_ns[row] == _AWAITED and self._seqs[row] == seq:
            self._settled_ns[row] = 0

    def clear(self) -> None:
        """Forget all steps: seqs start over."""
        self._seqs = array("q", (_NO_STEP,)) * MAX_DRIVER_STEPS

    def between(self, begin_ns: int, end_ns: int, clock: Offset) -> DriverSteps:
        """Return the steps of a period, also those that are partly in it.

        begin_ns, end_ns: of the daemon's clock that `clock` is the offset of.
        """
        begin, end = begin_ns - clock.ahead_ns, end_ns - clock.ahead_ns
        seqs, began, sent = map(_view, (self._seqs, self._began_ns, self._sent_ns))
        settled = np.maximum(_view(self._settled_ns), 0)
        last = np.where(settled > 0, settled, sent)
        rows = np.flatnonzero((seqs != _NO_STEP) & (began <= end) & (last >= begin))
        rows = rows[np.argsort(seqs[rows])]
        return DriverSteps(
            pid=os.getpid(),
            clock_offset_ns=clock.ahead_ns,
            clock_bound_ns=clock.bound_ns,
            clock_at_ns=clock.at_ns,
            seqs=seqs[rows].astype("<i8").tobytes(),
            began_ns=began[rows].astype("<i8").tobytes(),
            sent_ns=sent[rows].astype("<i8").tobytes(),
            settled_ns=settled[rows].astype("<i8").tobytes(),
            context_tokens=_view(self._context)[rows].astype("<i4").tobytes(),
            generation_tokens=_view(self._generation)[rows].astype("<i4").tobytes(),
        )


def _view(column: "array[int]") -> "NDArray[np.int32 | np.int64]":
    return np.frombuffer(column, column.typecode)

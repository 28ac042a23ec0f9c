"""Steps with another number of drafts than pays, as far as is known: from time to time, to find out
more."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker_client.scheduler.drafting.step_costs import StepCosts

Int64s = NDArray[np.int64]

PROBE_SHARE: Final = 0.005
"""Share of the time that may be spent on probes."""
PROBE_EVERY: Final = 16
"""Steps from one probe to the next at least, however little it costs."""
FIRST_PROBE: Final = 3
"""Steps before the first one, which has no drafts and may cost what it will, and twice as many
before each further one until the cost of a token is known: steps with prompts tell nothing."""
MOST_SAVED: Final = 2.0
"""Steps whose time may be saved for probes at most."""


class DraftProbe(NamedTuple):
    """A step to find out more."""

    counts: Int64s
    """int64 [requests]: drafts of each."""
    cost_s: float
    """Seconds that it is expected to lose."""


class Probes:
    """The probes so far, and the time that is left for more."""

    def __init__(self, most: int, costs: StepCosts) -> None:
        """most: drafts of a request in a step at most."""
        self._most = most
        self._costs = costs
        self._num_probes = 0
        self._last = 0
        """Number of the step with the last one."""
        self._saved_s = 0.0

    def save(self, seconds: float) -> None:
        """Note that a step has taken so long."""
        self._saved_s = min(self._saved_s + PROBE_SHARE * seconds, MOST_SAVED * seconds)

    def is_due(self, number: int) -> bool:
        """Return True if step `number` comes late enough after the last probe."""
        is_first = not self._costs.has_slope
        wait = FIRST_PROBE << min(self._num_probes, 16) if is_first else PROBE_EVERY
        return number - self._last >= wait

    def find(self, counts: Int64s, room: Int64s, rate: float) -> DraftProbe | None:
        """Return a probe: without drafts if the time of such a step is not known; else with the
        same number for each request, one after the other where drafts pay, and 1 where they do not.
        None: it would tell nothing, or cost too much.

        counts: int64 [requests], the best choice; room: the drafts that each may have; rate: tokens
        per second of the best choice, as expected.
        """
        total, num_rows = int(counts.sum()), counts.size
        if total and not self._costs.knows_undrafted(num_rows):
            other = np.zeros_like(counts)
        else:
            other = np.minimum(1 + self._num_probes % self._most if total else 1, room)
        num_other = int(other.sum())
        if num_other == total:
            return None
        if not self._costs.has_slope:
            return DraftProbe(other, 0.0)
        best_s, other_s = self._costs.seconds(
            num_rows, num_rows + np.array([total, num_other], float)
        )
        # Drafts beyond the best choice are counted as if they gained nothing; with fewer, all are.
        gained = best_s * rate if num_other > total else num_rows
        cost_s = max(0.0, float(other_s - gained / rate))
        return DraftProbe(other, cost_s) if cost_s <= self._saved_s else None

    def sent(self, number: int, probe: DraftProbe) -> None:
        """Note that step `number` is this probe."""
        self._saved_s -= probe.cost_s
        self._last = number
        self._num_probes += 1

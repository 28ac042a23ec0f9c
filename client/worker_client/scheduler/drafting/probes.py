"""Steps with another number of drafts than pays, as far as is known: from time to time, to find out
more. Where their time is not known, a probe is several of them in a row: that of the first one
tells little (step_costs.py)."""

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker_client.scheduler.drafting.acceptance import TRIED_FIRST
from worker_client.scheduler.drafting.step_costs import StepCosts

Int64s = NDArray[np.int64]

PROBE_STEPS: Final = 4
"""Steps of a probe that measures their time."""
PROBE_SHARE: Final = 0.005
"""Share of the time that may be spent on probes."""
PROBE_EVERY: Final = 16
"""Steps from the beginning of one probe to the next at least, however little it costs."""
RARELY: Final = 256
"""The same where hardly any draft is accepted of any request, and nearly each has been tried."""
MANY_UNTRIED: Final = 1 / 16
"""Share of requests that have not been tried: those of another text may be easier to guess."""
HOPELESS: Final = 0.1
"""Share of first drafts of which fewer are accepted there."""
FIRST_PROBE: Final = 3
"""Steps before the first one, which has no drafts and may cost what it will, and twice as many
before each further one until the cost of a token is known: steps with prompts tell nothing."""
MOST_SAVED: Final = 8.0
"""Steps whose time may be saved for probes at most, beside that of waking the device."""


class DraftProbe(NamedTuple):
    """Steps to find out more."""

    counts: Int64s
    """int64 [requests]: drafts of each."""
    num_steps: int
    cost_s: float
    """Seconds that they are expected to lose."""

    @property
    def has_drafts(self) -> bool:
        """False if these steps have no drafts at all."""
        return bool(self.counts.any())


class Probes:
    """The probes so far, and the time that is left for more."""

    def __init__(self, most: int, costs: StepCosts) -> None:
        """most: drafts of a request in a step at most."""
        self._most = most
        self._costs = costs
        self._num_probes = 0
        self._last = 0
        """Number of the step with the last one."""
        self._saved_s = math.inf
        """Seconds left for probes: as many as may be saved, until steps have times."""

    def save(self, seconds: float) -> None:
        """Note that a step has taken so long."""
        most_s = MOST_SAVED * seconds + self._costs.wake_s
        self._saved_s = min(self._saved_s + PROBE_SHARE * seconds, most_s)

    def pay(self, seconds: float) -> None:
        """Note that a probe is to follow for which the device is woken first, which takes so long
        beside the probe itself."""
        self._saved_s -= seconds

    def is_due(self, number: int, *, is_hopeless: bool = False) -> bool:
        """Return True if step `number` comes late enough after the last probe. is_hopeless: of the
        first drafts of each request fewer than HOPELESS are accepted, and not many are untried."""
        wait = RARELY if is_hopeless else PROBE_EVERY
        if not self._costs.has_slope:
            wait = FIRST_PROBE << min(self._num_probes, 16)
        return number - self._last >= wait

    def find(
        self,
        counts: Int64s,
        room: Int64s,
        rate: float,
        wake_s: float,
        *,
        is_hopeless: bool = False,
    ) -> DraftProbe | None:
        """Return a probe: without drafts if the time of such a step is not known; else with the
        same number for each request, one after the other where drafts pay, and 1 where they do not.
        None: it would tell nothing, or cost too much.

        counts: int64 [requests], the best choice; room: the drafts that each may have; rate: tokens
        per second of the best choice, as expected; wake_s: seconds that it takes more to make the
        device draft again; is_hopeless: what drafts cost does not matter, a few outcomes do.
        """
        total, num_rows = int(counts.sum()), counts.size
        is_undrafted = total > 0 and not self._costs.knows_undrafted(num_rows)
        other = np.zeros_like(counts) if is_undrafted else self._other(total, room)
        num_other = int(other.sum())
        if num_other == total:
            return None
        if not self._costs.has_slope:
            return DraftProbe(other, PROBE_STEPS, 0.0)
        num_steps = PROBE_STEPS
        if is_hopeless:
            num_steps = min(max(1, TRIED_FIRST // num_other), PROBE_STEPS)
        elif not is_undrafted and self._costs.knows(num_rows, num_rows + num_other):
            num_steps = 1
        best_s, other_s = self._costs.seconds(
            num_rows, num_rows + np.array([total, num_other], float)
        )
        # Drafts beyond the best choice are counted as if they gained nothing; with fewer, all are.
        gained = best_s * rate if num_other > total else num_rows
        lost_s = max(0.0, float(other_s - gained / rate))
        cost_s = num_steps * lost_s + 2 * self._costs.change_s + wake_s
        return DraftProbe(other, num_steps, cost_s) if cost_s <= self._saved_s else None

    def _other(self, total: int, room: Int64s) -> Int64s:
        """Return the next number of drafts to try that is not `total` in all, if there is one."""
        other = np.minimum(1, room)
        for ahead in range(self._most if total else 0):
            other = np.minimum(1 + (self._num_probes + ahead) % self._most, room)
            if int(other.sum()) != total:
                break
        return other

    def sent(self, number: int, probe: DraftProbe) -> None:
        """Note that step `number` is the first of this probe."""
        self._saved_s -= probe.cost_s
        self._last = number
        self._num_probes += 1

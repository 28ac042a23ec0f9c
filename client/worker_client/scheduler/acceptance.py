"""The acceptance of drafts so far, of one request or of all, by the drafts' positions."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from worker_client.scheduler_output import DraftOutcome

FIRST_RATE: Final = 0.7
"""Rate before anything is known."""
OWN_GAIN: Final = 1 / 24
"""Weight of a new outcome in the mean of its position, of a request."""
OVERALL_GAIN: Final = 1 / 48
"""The same, of all requests."""
NUM_DEVIATIONS: Final = 1.5
"""Standard deviations by which a request's rate must differ from that of all to count at all."""
STOPS_AFTER: Final = 64
"""Steps in a row without drafts after which they count as given up."""
PAYS_AFTER: Final = 256
"""Steps in a row with drafts after which they have paid: nothing is left of FIRST_RATE."""
RESUMES_AFTER: Final = 16
"""Steps in a row with drafts after which they pay again."""


class Acceptance:
    """Exponential means of acceptance by position: for each position, the share of drafts there
    that are accepted where all drafts before them are."""

    __slots__ = ("_gain", "_in_a_row", "gains", "pays", "rates")

    def __init__(self, most: int, gain: float = OWN_GAIN) -> None:
        """most: positions; gain: weight of a new outcome, once there are many."""
        self.rates = [FIRST_RATE] * most
        self.gains = [1.0] * most
        """Weight of the last outcome in each mean: 1 / number of outcomes at first."""
        self.pays: bool | None = None
        """True if drafts are worth their cost, for good; None as long as they never were."""
        self._gain = gain
        self._in_a_row = 0

    def copy(self) -> "Acceptance":
        """Return what a new request begins with: these rates, soon replaced by its own."""
        other = Acceptance(len(self.rates))
        other.rates = self.rates.copy()
        return other

    def learn(self, outcome: DraftOutcome) -> None:
        """Take an outcome into account. Drafts behind a refused one tell nothing."""
        for place in range(min(outcome.num_drafted, outcome.num_accepted + 1)):
            gain = self.gains[place] = max(self._gain, self.gains[place] / (1 + self.gains[place]))
            self.rates[place] += ((place < outcome.num_accepted) - self.rates[place]) * gain

    def rates_of(self, requests: Sequence["Acceptance"]) -> NDArray[np.float64]:
        """Return the expected rates of requests, float64 [requests, positions]: these, as those of
        all, moved to a request's own as far as that differs by more than chance. Otherwise the
        most valuable drafts would be those of the requests that were lucky."""
        overall = np.array(self.rates)
        own = np.array([each.rates for each in requests]) - overall
        gains = np.array([each.gains for each in requests])
        noise = np.sqrt(np.maximum(overall * (1 - overall), 0.01) * gains / (2 - gains))
        moved = np.maximum(np.abs(own) - NUM_DEVIATIONS * noise, 0.0)
        rates: NDArray[np.float64] = np.clip(overall + np.sign(own) * moved, 0.0, 1.0)
        return rates

    def note_choice(self, *, has_drafts: bool) -> bool:
        """Note whether a step has drafts, where their cost is known. `pays` follows once enough
        steps in a row have contradicted it. Return True if drafts that have paid cease to, or pay
        again."""
        had_paid = self.pays is not None
        needed = (RESUMES_AFTER if had_paid else PAYS_AFTER) if has_drafts else STOPS_AFTER
        self._in_a_row = self._in_a_row + 1 if has_drafts != bool(self.pays) else 0
        if self._in_a_row < needed:
            return False
        self.pays, self._in_a_row = has_drafts, 0
        return had_paid

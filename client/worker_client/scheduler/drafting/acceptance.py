"""The acceptance of drafts so far, of each request and of all, by the drafts' positions.

What is known of the device's drafts says nothing about guesses of the driver, nor the reverse: each
source of drafts has an acceptance of all its requests.
"""

from collections.abc import Sequence
from enum import IntEnum
from itertools import chain
from typing import Final

import numpy as np
from numpy.typing import NDArray

from worker_client.scheduler.drafting.growing_arrays import grown
from worker_client.scheduler_output import DraftOutcome

Float64s = NDArray[np.float64]
Int64s = NDArray[np.int64]

FIRST_RATE: Final = 0.7
"""Rate before anything is known."""
OWN_GAIN: Final = 1 / 24
"""Weight of a new outcome in the mean of its position, of a request."""
OVERALL_GAIN: Final = 1 / 48
"""The same, of all requests."""
NUM_DEVIATIONS: Final = 1.5
"""Standard deviations by which a request's rate must differ from that of all to count at all."""
FORGOTTEN_AFTER: Final = 256
"""Steps without an outcome after which the earlier ones of a request weigh 1 / e of what they did.
Otherwise a request whose drafts are hardly ever tried would be known by very old ones."""
TRIED_FIRST: Final = 16
"""Requests that are tried at once as long as little is known. So many tell enough of all, and cost
a large step little."""
FIRST_ROWS: Final = 16


class Source(IntEnum):
    """Who makes a request's drafts."""

    DEVICE = 0
    DRIVER = 1


class Acceptance:
    """Exponential means of acceptance by position: for each position, the share of drafts there
    that are accepted where all drafts before them are. Each request has a row."""

    def __init__(self, most: int) -> None:
        """most: positions."""
        self._most = most
        self._overall = np.full((len(Source), most), FIRST_RATE)
        self._overall_gains = np.ones((len(Source), most))
        self._rates = np.zeros((FIRST_ROWS, most))
        self._gains = np.ones((FIRST_ROWS, most))
        """Weight of the last outcome in each mean: 1 / number of outcomes at first."""
        self._source = np.zeros(FIRST_ROWS, np.int64)
        self._last = np.zeros(FIRST_ROWS, np.int64)
        """Number of the step at which outcomes were counted last."""
        self._free: list[int] = [*range(FIRST_ROWS)][::-1]
        self._left: list[int] = []
        """Rows whose requests have ended, of which there may be outcomes that are not counted."""
        self._new: list[tuple[int, DraftOutcome]] = []
        """Outcomes that are not counted yet."""

    @property
    def num_rows(self) -> int:
        """Number of rows, used or not."""
        return len(self._rates)

    def begin(self, source: Source, number: int) -> int:
        """Return the row of a new request: it has the rates of all until there are outcomes of it.
        number: of the next step."""
        if not self._free:
            self.count_new(number)
        if not self._free:
            size = self.num_rows
            self._rates, self._gains = grown(self._rates, 2 * size), grown(self._gains, 2 * size)
            self._source = grown(self._source, 2 * size)
            self._last = grown(self._last, 2 * size)
            self._free = [*range(size, 2 * size)][::-1]
        row = self._free.pop()
        self._gains[row], self._source[row] = 1.0, source
        return row

    def end(self, row: int) -> None:
        """Forget a request."""
        self._left.append(row)

    def note(self, outcomes: Sequence[tuple[int, DraftOutcome]]) -> None:
        """Take outcomes of rows into account, with the next count_new(). Drafts behind a refused
        one tell nothing."""
        self._new += outcomes

    def count_new(self, number: int) -> None:
        """Take the outcomes into account that were noted. number: of the next step."""
        if self._new:
            rows, outcomes = zip(*self._new, strict=True)
            self._new.clear()
            numbers = np.fromiter(chain.from_iterable(outcomes), np.int64, 2 * len(rows))
            self._count(np.array(rows), numbers.reshape(-1, 2), number)
        if self._left:
            self._free += self._left
            self._left.clear()

    def _count(self, rows: Int64s, outcomes: Int64s, number: int) -> None:
        """Take outcomes into account. outcomes: int64 [outcomes, 2], as DraftOutcome."""
        num_tested = self._reaching(rows, np.minimum(outcomes[:, 0], outcomes[:, 1] + 1))
        num_accepted = self._reaching(rows, outcomes[:, 1])
        for source in Source:
            own = self._source == source
            self._overall[source], self._overall_gains[source] = _learned(
                self._overall[source],
                self._overall_gains[source],
                num_tested[own].sum(axis=0),
                num_accepted[own].sum(axis=0),
                OVERALL_GAIN,
            )
        is_new = self._gains[:, 0] == 1.0
        self._rates[is_new] = self._overall[self._source[is_new]]
        numbers = num_tested[:, 0].nonzero()[0]
        ages = ((number - self._last[numbers, None]) / FORGOTTEN_AFTER).clip(max=16)
        self._last[numbers] = number
        self._rates[numbers], self._gains[numbers] = _learned(
            self._rates[numbers],
            np.minimum(1.0, self._gains[numbers] * np.exp(ages)),
            num_tested[numbers],
            num_accepted[numbers],
            OWN_GAIN,
        )

    def _reaching(self, rows: Int64s, lengths: Int64s) -> Int64s:
        """Return how many of the lengths of each row reach beyond each position, int64 [rows,
        positions]."""
        width = self._most + 1
        counts = np.bincount(rows * width + lengths, minlength=self.num_rows * width)
        behind = counts.reshape(-1, width)[:, ::-1].cumsum(axis=1)[:, ::-1]
        return behind[:, 1:]

    def first_rate(self, source: Source) -> float:
        """Return the share of first drafts that are accepted, of all requests."""
        return float(self._overall[source, 0])

    def own_first_rate(self, row: int) -> float:
        """Return the same, of a request."""
        return float(self._rates[row, 0])

    def is_known(self, source: Source) -> bool:
        """Return True if outcomes of about TRIED_FIRST requests are known, or as many of one."""
        return bool(self._overall_gains[source, 0] <= 1 / TRIED_FIRST)

    def share_untried(self, rows: Int64s) -> float:
        """Return the share of these requests of which no outcome is known."""
        return float((self._gains[rows, 0] == 1.0).mean())

    def least_known(self, rows: Int64s) -> NDArray[np.bool_]:
        """Return which requests to try where nothing is expected of any: bool [rows], a quarter of
        them, those without outcomes first, then those whose last one is the oldest."""
        is_tried = self._gains[rows, 0] < 1.0
        chosen = np.zeros(rows.size, np.bool_)
        order = np.lexsort((self._last[rows], is_tried))
        chosen[order[: max(TRIED_FIRST, rows.size // 4)]] = True
        return chosen

    def rates(self, rows: Int64s) -> Float64s:
        """Return the expected rates of requests, float64 [requests, positions]: those of all, moved
        to a request's own as far as that differs by more than chance. Otherwise the most valuable
        drafts would be those of the requests that were lucky."""
        overall = self._overall[self._source[rows]]
        gains = self._gains[rows]
        own = np.where(gains < 1.0, self._rates[rows] - overall, 0.0)
        noise = np.sqrt(np.maximum(overall * (1 - overall), 0.01) * gains / (2 - gains))
        moved = np.maximum(np.abs(own) - NUM_DEVIATIONS * noise, 0.0)
        rates: Float64s = np.clip(overall + np.sign(own) * moved, 0.0, 1.0)
        return rates


def _learned(
    rates: Float64s, gains: Float64s, num: Int64s, num_accepted: Int64s, least_gain: float
) -> tuple[Float64s, Float64s]:
    """Return means and gains after so many outcomes each, as if these had come one after the other,
    all of them equal to their mean."""
    mean, weight = num_accepted / np.maximum(num, 1), 1 / gains
    num_equal = np.clip(1 / least_gain - weight, 0, num)  # so many count as much as earlier ones
    rates = (weight * rates + num_equal * mean) / (weight + num_equal)
    kept = (1 - least_gain) ** (num - num_equal)
    return rates * kept + mean * (1 - kept), 1 / (weight + num_equal)

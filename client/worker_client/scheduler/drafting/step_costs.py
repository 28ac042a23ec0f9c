"""Measures what steps that only decode take, by their rows and tokens, from one result to the
next."""

import math
from collections import deque
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker_client.scheduler.step_budget import Clock

Float64s = NDArray[np.float64]

STALE: Final = 512
"""Steps after which the time of a step without drafts is measured again."""
TIME_GAIN: Final = 1 / 8
"""Weight of a new time in the mean of its cell."""
OUTLIER: Final = 0.5
"""Relative error beyond which a time is believed only if the next one repeats it."""
NUM_FIRST: Final = 4
"""Times of a cell that are believed in any case."""
ROWS_PER_OCTAVE: Final = 4
"""Columns of the table for each doubling of a step's rows."""
MOST_EXACT: Final = 128
"""Up to so many tokens, each number has a cell of its own: graphs have sizes."""
TOKENS_PER_OCTAVE: Final = 32
"""Cells for each doubling of a step's tokens beyond."""


class _Cell:
    """Mean time of steps of about so many tokens."""

    def __init__(self) -> None:
        self.num_tokens = self.seconds = 0.0
        self.count = 0
        self._had_outlier = False

    def learn(self, num_tokens: int, seconds: float) -> None:
        is_far = self.count >= NUM_FIRST and abs(seconds - self.seconds) > OUTLIER * self.seconds
        ignored, self._had_outlier = is_far and not self._had_outlier, is_far
        if ignored:
            return
        self.count += 1
        gain = max(TIME_GAIN, 1 / self.count)
        self.num_tokens += (num_tokens - self.num_tokens) * gain
        self.seconds += (seconds - self.seconds) * gain


def column(num_rows: int) -> int:
    """Return the column of the table for steps of so many rows: those of a column take about as
    long."""
    return round(ROWS_PER_OCTAVE * math.log2(num_rows))


def _place(num_tokens: int) -> int:
    if num_tokens <= MOST_EXACT:
        return num_tokens
    return MOST_EXACT + round(TOKENS_PER_OCTAVE * math.log2(num_tokens / MOST_EXACT))


class StepCosts:
    """The measured times of steps that only decode, by their rows and tokens."""

    def __init__(self) -> None:
        self._by_rows: dict[int, dict[int, _Cell]] = {}
        self._undrafted: dict[int, int] = {}
        """By column, the number of the last step without drafts."""
        self._num_steps = 0
        self.has_slope = False
        """True if the cost of a token is known."""

    def learn(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Take the time of a step into account."""
        self._num_steps += 1
        cells = self._by_rows.setdefault(column(num_rows), {})
        cells.setdefault(_place(num_tokens), _Cell()).learn(num_tokens, seconds)
        self.has_slope = self.has_slope or len(cells) > 1
        if num_rows == num_tokens:
            self._undrafted[column(num_rows)] = self._num_steps

    def knows_undrafted(self, num_rows: int) -> bool:
        """Return True if the time of a step without drafts was measured lately."""
        last = self._undrafted.get(column(num_rows))
        return last is not None and self._num_steps - last < STALE

    def seconds(self, num_rows: int, num_tokens: Float64s) -> Float64s:
        """Return the expected times of steps: between measured cells on a line, beyond them with
        the slope of the nearest rows that have several. Before anything is measured, a step takes
        one second whatever its tokens."""
        if not self._by_rows:
            return np.ones(num_tokens.size)
        place = column(num_rows)
        nearest = sorted(self._by_rows, key=lambda rows: (abs(rows - place), rows))
        slope = next((s for rows in nearest if (s := self._slope(rows)) is not None), 0.0)
        tokens, times = self._curve(nearest[0])
        inside = np.interp(num_tokens, tokens, times)
        beyond = np.maximum(num_tokens - tokens[-1], 0) - np.maximum(tokens[0] - num_tokens, 0)
        expected: Float64s = np.maximum(inside + slope * beyond, times.min() / 2)
        return expected

    def _curve(self, rows: int) -> tuple[Float64s, Float64s]:
        cells = sorted(self._by_rows[rows].values(), key=lambda cell: cell.num_tokens)
        tokens = np.array([cell.num_tokens for cell in cells])
        return tokens, np.array([cell.seconds for cell in cells])

    def _slope(self, rows: int) -> float | None:
        """Return the seconds of a further token; None if only one cell is known."""
        tokens, times = self._curve(rows)
        if tokens.size < 2 or tokens[-1] <= tokens[0]:
            return None
        return max(0.0, float((times[-1] - times[0]) / (tokens[-1] - tokens[0])))


class TimedStep(NamedTuple):
    """A step in flight."""

    num_rows: int
    """Requests that decode."""
    num_tokens: int
    """Tokens of these, drafts included."""
    only_decodes: bool
    sent_s: float
    is_alone: bool
    """No other step was in flight when it was sent."""


class StepTimer:
    """The steps in flight, and what the oldest has taken."""

    def __init__(self, num_stages: int, clock: Clock) -> None:
        self._num_stages = num_stages
        self._clock = clock
        self._in_flight: deque[TimedStep] = deque()
        self._last_result_s = -math.inf

    def sent(self, num_rows: int, num_tokens: int, *, only_decodes: bool) -> None:
        """Note that a step is sent."""
        is_alone = not self._in_flight
        step = TimedStep(num_rows, num_tokens, only_decodes, self._clock(), is_alone)
        self._in_flight.append(step)

    def done(self) -> tuple[TimedStep, float] | None:
        """Note the result of the oldest step. Return it and its seconds, from the result before, if
        these tell what decodes cost."""
        if not self._in_flight:
            return None
        step, now_s = self._in_flight.popleft(), self._clock()
        seconds = now_s - max(step.sent_s, self._last_result_s)
        self._last_result_s = now_s
        if step.is_alone:  # it has passed all stages, one after the other
            seconds /= self._num_stages
        tells = step.num_rows and step.only_decodes and seconds > 0
        return (step, seconds) if tells else None

    def failed(self, num_steps: int) -> None:
        """Forget the last steps in flight: they have no result."""
        for _ in range(min(num_steps, len(self._in_flight))):
            self._in_flight.pop()

"""Measures what steps that only decode take, by their rows and tokens, from one result to the
next.

A step of another kind than the one before it takes longer: host and device prepare it anew. So a
cell prefers the times of steps that follow their like; and for steps without drafts, of those after
which the device makes none, as it does once it rests.
"""

import math
from collections import deque
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker_client.scheduler.step_budget import Clock

Float64s = NDArray[np.float64]

STALE: Final = 512
"""Steps after which the time of a step without drafts is measured again."""
OLD: Final = 2048
"""Steps after which the times of a cell are measured again if that is possible; and twice as many
after which it takes worse ones."""
WAKE_GAIN: Final = 1 / 4
"""Weight of a new time in the mean of what waking costs: it comes rarely."""
TIME_GAIN: Final = 1 / 8
"""Weight of a new time in the mean of its cell."""
OUTLIER: Final = 0.5
"""Relative error beyond which a time is believed only if the next one repeats it."""
MOST_LONGER: Final = 4.0
"""Times of a step that a change of kind takes at most, as far as is believed."""
BEST: Final = 2
"""The quality of a time that nothing else is part of (TimedStep.quality)."""
NUM_FIRST: Final = 4
"""Times of a cell that are believed in any case."""
ROWS_PER_OCTAVE: Final = 4
"""Columns of the table for each doubling of a step's rows."""
MOST_EXACT: Final = 128
"""Up to so many tokens, each number has a cell of its own: graphs have sizes."""
TOKENS_PER_OCTAVE: Final = 32
"""Cells for each doubling of a step's tokens beyond."""


class TimedStep(NamedTuple):
    """A step in flight."""

    num_rows: int
    """Requests that decode."""
    num_tokens: int
    """Tokens of these, drafts included."""
    only_decodes: bool
    makes_drafts: bool
    """The device makes drafts after it."""
    sent_s: float
    is_alone: bool
    """No other step was in flight when it was sent."""
    follows_its_like: bool
    """The step before, of the same group, had equal rows and tokens, and drafts as this one."""
    wakes: bool = False
    """The device makes drafts after it, and has made none after the step before."""

    @property
    def quality(self) -> int:
        """Rank of its time among those of steps of its rows and tokens: 0 to BEST."""
        is_usual = self.num_tokens > self.num_rows or not self.makes_drafts
        return self.follows_its_like * (1 + is_usual)


class _Cell:
    """Mean time of steps of about so many tokens."""

    def __init__(self) -> None:
        self.num_tokens = self.seconds = 0.0
        self.quality = 0
        """That of the times."""
        self._count = self._last = 0
        self._had_outlier = False

    def age(self, number: int) -> int:
        """Return the steps since the last time, before step `number`."""
        return number - self._last

    def learn(self, step: TimedStep, seconds: float, number: int) -> bool:
        """Take a step's time into account, unless better ones are known; return True if it was.
        number: of the steps learned from, for their age."""
        quality = step.quality
        if quality < self.quality and self.age(number) < 2 * OLD:
            return False
        if quality != self.quality:
            self._count, self.quality = 0, quality
        is_far = self._count >= NUM_FIRST and abs(seconds - self.seconds) > OUTLIER * self.seconds
        ignored, self._had_outlier = is_far and not self._had_outlier, is_far
        if ignored:
            return False
        self._count += 1
        self._last = number
        gain = max(TIME_GAIN, 1 / self._count)
        self.num_tokens += (step.num_tokens - self.num_tokens) * gain
        self.seconds += (seconds - self.seconds) * gain
        return True


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
        self.change_s = 0.0
        """Mean of what a step takes longer if the one before was of another kind."""
        self.wake_s = 0.0
        """Mean of what a step without drafts takes longer if the device makes drafts again after
        it: a draft model has missed the tokens since."""

    def learn(self, step: TimedStep, seconds: float) -> None:
        """Take the time of a step into account."""
        self._num_steps += 1
        if step.wakes and step.num_rows == step.num_tokens:
            self._learn_wake(step, seconds)
            return
        cells = self._by_rows.setdefault(column(step.num_rows), {})
        cell = cells.setdefault(_place(step.num_tokens), _Cell())
        if cell.quality > step.quality == 0:
            longer_s = min(max(0.0, seconds - cell.seconds), MOST_LONGER * cell.seconds)
            self.change_s += (longer_s - self.change_s) * TIME_GAIN
        is_taken = cell.learn(step, seconds, self._num_steps)
        self.has_slope = self.has_slope or len(cells) > 1
        if is_taken and step.num_rows == step.num_tokens:
            self._undrafted[column(step.num_rows)] = self._num_steps

    def _learn_wake(self, step: TimedStep, seconds: float) -> None:
        """Take a step after which the device makes drafts again into account: it tells nothing of
        other steps."""
        cell = self._by_rows.get(column(step.num_rows), {}).get(_place(step.num_tokens))
        if cell is not None and cell.quality == BEST:
            longer_s = max(0.0, seconds - cell.seconds)
            self.wake_s += (longer_s - self.wake_s) * (WAKE_GAIN if self.wake_s else 1.0)

    def knows_undrafted(self, num_rows: int) -> bool:
        """Return True if the time of a step without drafts was measured lately."""
        last = self._undrafted.get(column(num_rows))
        return last is not None and self._num_steps - last < STALE

    def knows(self, num_rows: int, num_tokens: int) -> bool:
        """Return True if the time of such steps was measured lately, as well as it can be."""
        cell = self._by_rows.get(column(num_rows), {}).get(_place(num_tokens))
        return cell is not None and cell.quality == BEST and cell.age(self._num_steps) < OLD

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
        """Return the tokens and times that are known of a column. More tokens take no less: where
        it seems so, steps have become slower since, or it is chance."""
        cells = sorted(self._by_rows[rows].values(), key=lambda cell: cell.num_tokens)
        tokens = np.array([cell.num_tokens for cell in cells])
        return tokens, np.maximum.accumulate([cell.seconds for cell in cells])

    def _slope(self, rows: int) -> float | None:
        """Return the seconds of a further token; None if only one cell is known."""
        tokens, times = self._curve(rows)
        if tokens.size < 2 or tokens[-1] <= tokens[0]:
            return None
        return max(0.0, float((times[-1] - times[0]) / (tokens[-1] - tokens[0])))


class StepTimer:
    """The steps in flight, and what the oldest has taken."""

    def __init__(self, num_stages: int, clock: Clock) -> None:
        self._num_stages = num_stages
        self._clock = clock
        self._in_flight: deque[TimedStep] = deque()
        self._last_result_s = -math.inf
        self._last: dict[int, TimedStep] = {}
        """The step of each group that was sent last."""

    def sent(
        self, group: int, num_rows: int, num_tokens: int, *, only_decodes: bool, makes_drafts: bool
    ) -> None:
        """Note that a step is sent. group: of the requests that decode in it."""
        kind = num_rows, num_tokens, only_decodes, makes_drafts
        last = self._last.get(group)
        follows_its_like = last is not None and last[:4] == kind
        wakes = makes_drafts and last is not None and not last.makes_drafts
        step = TimedStep(*kind, self._clock(), not self._in_flight, follows_its_like, wakes)
        self._in_flight.append(step)
        self._last[group] = step

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

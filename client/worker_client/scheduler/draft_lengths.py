"""The number of drafts that each request has in a step: as many as pay, by what has been accepted
of its drafts so far, and by what steps of so many rows and tokens have taken.

A request gains one token, and one more for each draft that is accepted. The chance that its j-th
draft is accepted is the product of its acceptance rates up to j, so each further draft is worth
less. Of all drafts, the most valuable ones are taken as long as they raise the tokens per second of
the whole step. What is known of the device's drafts says nothing about guesses of the host, nor the
reverse.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from worker_client.scheduler.acceptance import OVERALL_GAIN, Acceptance
from worker_client.scheduler.request import Request
from worker_client.scheduler.step_budget import Clock
from worker_client.scheduler_output import DraftOutcome

Float64s = NDArray[np.float64]

_LOG = logging.getLogger(__name__)

PROBE_SHARE: Final = 0.005
"""Share of the time that may be spent on steps which only find out more."""
PROBE_EVERY: Final = 16
"""Steps from one such step to the next at least, however little it costs."""
RESTS_AFTER: Final = 16
"""Steps in a row for which no drafts are chosen, after which the device makes none."""
MOST_SKIPPED: Final = 1024
"""Steps of which it is known that the device has made no drafts after them."""
FIRST_PROBE: Final = 3
"""Steps before the first one, which has no drafts and may cost what it will, and twice as many
before each further one until the cost of a token is known: steps with prompts tell nothing."""
MOST_SAVED: Final = 2.0
"""Steps whose time may be saved for such steps at most."""
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


class DraftingChange(NamedTuple):
    """Drafts that have paid do not any more, for good; or they pay again."""

    req_id: str | None
    """The request; None: all of them."""
    pays: bool
    acceptance: float
    """Share of first drafts that are accepted, as it is now."""


OnDraftingChange: TypeAlias = Callable[[DraftingChange], None]


def log_change(change: DraftingChange) -> None:
    """Log a change, as the event drafting_stopped or drafting_resumed; of a single request as
    request_drafting_stopped, ..."""
    whose = "drafts" if change.req_id is None else f"drafts of request {change.req_id!r}"
    what = "pay again" if change.pays else "do not pay any more, and are left out"
    event = "drafting_resumed" if change.pays else "drafting_stopped"
    if change.req_id is not None:
        event = f"request_{event}"
    share = 100 * change.acceptance
    _LOG.warning("%s %s: %.0f %% are accepted", whose, what, share, extra={"event": event})


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


def _column(num_rows: int) -> int:
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

    def learn(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """Take the time of a step into account."""
        self._num_steps += 1
        cells = self._by_rows.setdefault(_column(num_rows), {})
        cells.setdefault(_place(num_tokens), _Cell()).learn(num_tokens, seconds)
        if num_rows == num_tokens:
            self._undrafted[_column(num_rows)] = self._num_steps

    @property
    def has_slope(self) -> bool:
        """Return True if the cost of a token is known."""
        return any(len(cells) > 1 for cells in self._by_rows.values())

    def knows_undrafted(self, num_rows: int) -> bool:
        """Return True if the time of a step without drafts was measured lately."""
        last = self._undrafted.get(_column(num_rows))
        return last is not None and self._num_steps - last < STALE

    def seconds(self, num_rows: int, num_tokens: Float64s) -> Float64s:
        """Return the expected times of steps: between measured cells on a line, beyond them with
        the slope of the nearest rows that have several. Before anything is measured, a step takes
        one second whatever its tokens."""
        if not self._by_rows:
            return np.ones(num_tokens.size)
        place = _column(num_rows)
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


class _TimedStep(NamedTuple):
    num_rows: int
    num_tokens: int
    only_decodes: bool
    sent_s: float
    is_alone: bool
    """No other step was in flight when it was sent."""


class DraftLengths:
    """Chooses the drafts of each step, and learns from the steps' outcomes. Belongs to the
    scheduler; Request.acceptance is its own."""

    def __init__(
        self,
        most: int,
        num_stages: int = 1,
        clock: Clock = time.monotonic,
        on_change: OnDraftingChange = log_change,
    ) -> None:
        """most: drafts of a request in a step at most. on_change: is told what changes for good."""
        self._most = most
        self._num_stages = num_stages
        self._clock = clock
        self._costs = StepCosts()
        self._overall = Acceptance(most, OVERALL_GAIN)
        """That of all requests with drafts of the device, with which new ones begin."""
        self._guessed = Acceptance(most, OVERALL_GAIN)
        """The same of requests whose drafts are guesses of the driver."""
        self._in_flight: deque[_TimedStep] = deque()
        self._last_result_s = -math.inf
        self._saved_s = 0.0
        """Time that may be spent on probes."""
        self._num_choices = 0
        self._last_probe = self._num_probes = 0
        self._num_idle = 0
        """Choices in a row without drafts."""
        self._skipped: dict[int, None] = {}
        """Last steps after which the device has made no drafts, the oldest first."""
        self.asks = True
        """The device is to make drafts after the next step."""
        self._on_change = on_change

    def choose(self, requests: Sequence[Request]) -> Mapping[str, int]:
        """Return the drafts of each request that is to have some. requests: all that decode."""
        if not requests:
            return {}
        if self._rests(requests):
            return {}
        room = np.array([max(0, min(self._most, own.most_drafts)) for own in requests])
        if not room.any():
            return {}
        owners, values = self._values(requests, room)
        self._num_choices += 1
        order = np.argsort(-values, kind="stable")
        gained = len(requests) + np.concatenate(([0.0], np.cumsum(values[order])))
        times = self._costs.seconds(
            len(requests), len(requests) + np.arange(gained.size, dtype=float)
        )
        best = int(np.argmax(gained / times))
        counts = np.bincount(owners[order[:best]], minlength=len(requests))
        self._note_choice(requests, counts)
        on_device = np.array([own.traits.may_draft for own in requests])
        self._num_idle = 0 if counts[on_device].any() else self._num_idle + 1
        self.asks = self._num_idle < RESTS_AFTER or not self._costs.has_slope
        is_there = ~on_device | [own.last_step not in self._skipped for own in requests]
        rate = float(gained[best] / times[best])
        counts = self._probe(len(requests), counts, room, rate, is_there) * is_there
        return {request.id: n for request, n in zip(requests, counts.tolist(), strict=True) if n}

    def _rests(self, requests: Sequence[Request]) -> bool:
        """Return True if the device's drafts have not paid lately, no request has drafts that the
        driver brings, and it is not yet time to find out whether the device's would pay now."""
        if self.asks or self._num_choices + 1 - self._last_probe >= PROBE_EVERY:
            return False
        if any(request.num_expected for request in requests):
            return False
        if self._overall.note_choice(has_drafts=False):
            self._on_change(DraftingChange(None, False, self._overall.rates[0]))
        self._num_choices += 1
        return True

    def sent(self, number: int, num_rows: int, num_tokens: int, *, only_decodes: bool) -> None:
        """Note that a step is sent. num_tokens: of requests that decode, with their drafts."""
        if not self.asks:
            self._skipped[number] = None
            if len(self._skipped) > MOST_SKIPPED:
                del self._skipped[next(iter(self._skipped))]
        now_s, is_alone = self._clock(), not self._in_flight
        self._in_flight.append(_TimedStep(num_rows, num_tokens, only_decodes, now_s, is_alone))

    def done(self) -> None:
        """Note the result of the oldest step in flight, and learn from its time."""
        if not self._in_flight:
            return
        step, now_s = self._in_flight.popleft(), self._clock()
        seconds = now_s - max(step.sent_s, self._last_result_s)
        self._last_result_s = now_s
        if step.is_alone:  # it has passed all stages, one after the other
            seconds /= self._num_stages
        if step.num_rows and step.only_decodes and seconds > 0:
            self._costs.learn(step.num_rows, step.num_tokens, seconds)
            self._saved_s = min(self._saved_s + PROBE_SHARE * seconds, MOST_SAVED * seconds)

    def failed(self, num_steps: int) -> None:
        """Forget the last steps in flight: they have no result."""
        for _ in range(min(num_steps, len(self._in_flight))):
            self._in_flight.pop()

    def learn(self, request: Request, outcome: DraftOutcome) -> None:
        """Take the outcome of a request's drafts into account, without those that were certain."""
        self._own(request).learn(outcome)
        self._of_all(request).learn(outcome)

    def _of_all(self, request: Request) -> Acceptance:
        """Return the acceptance of all requests whose drafts have the same source."""
        return self._overall if request.traits.may_draft else self._guessed

    def _own(self, request: Request) -> Acceptance:
        if request.acceptance is None:
            request.acceptance = self._of_all(request).copy()
        return request.acceptance

    def _values(
        self, requests: Sequence[Request], room: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], Float64s]:
        """Return, for each draft that a request may have, the request's place and the tokens that
        it is expected to gain by it. room: drafts that each may have."""
        chances = np.cumprod(self._rates(requests), axis=1)
        owners, places = np.nonzero(np.arange(self._most) < room[:, None])
        return owners.astype(np.int64), chances[owners, places].astype(np.float64)

    def _rates(self, requests: Sequence[Request]) -> Float64s:
        """Return the expected acceptance rates of drafts, float64 [requests, positions]. A guess
        behind drafts that are certain counts as a first one."""
        rates = self._overall.rates_of([self._own(request) for request in requests])
        guessing = [i for i, request in enumerate(requests) if not request.traits.may_draft]
        if guessing:
            own = [self._own(requests[i]) for i in guessing]
            rates[guessing] = self._guessed.rates_of(own)
        for i in guessing:
            num_certain = min(requests[i].num_certain, self._most)
            if num_certain:
                rates[i, num_certain:] = rates[i, : self._most - num_certain]
                rates[i, :num_certain] = 1.0
        return rates

    def _probe(
        self,
        num_rows: int,
        counts: NDArray[np.int64],
        room: NDArray[np.int64],
        rate: float,
        is_there: NDArray[np.bool_],
    ) -> NDArray[np.int64]:
        """Return other counts, from time to time, to find out more: none at all if the time of
        such a step is not known; else the same number for each request, one after the other where
        drafts pay, and 1 where they do not. Drafts that are not there yet are asked for instead.
        rate: tokens per second of the best choice, as expected. is_there: bool [requests]."""
        total, is_first = int(counts.sum()), not self._costs.has_slope
        wait = FIRST_PROBE << min(self._num_probes, 16) if is_first else PROBE_EVERY
        if self._num_choices - self._last_probe < wait:
            return counts
        if total and not self._costs.knows_undrafted(num_rows):
            other = np.zeros_like(counts)
        else:
            other = np.minimum(1 + self._num_probes % self._most if total else 1, room)
        num_other = int(other.sum())
        if num_other == total:
            return counts
        best_s, other_s = self._costs.seconds(
            num_rows, num_rows + np.array([total, num_other], float)
        )
        # Drafts beyond the best choice are counted as if they gained nothing; with fewer, all are.
        gained = best_s * rate if num_other > total else num_rows
        cost_s = 0.0 if is_first else max(0.0, float(other_s - gained / rate))
        if cost_s > self._saved_s:
            return counts
        if (other > counts)[~is_there].any():
            self.asks = True
            return counts
        self._saved_s -= cost_s
        self._last_probe = self._num_choices
        self._num_probes += 1
        return other

    def _note_choice(self, requests: Sequence[Request], counts: NDArray[np.int64]) -> None:
        """Note which requests have drafts that are not certain, and what has changed for good."""
        if not self._costs.has_slope:
            return  # as long as drafts seem to cost nothing, their use shows nothing
        uses = list(zip(requests, counts.tolist(), strict=True))
        self._note_uses(self._overall, [(r, n > 0) for r, n in uses if r.traits.may_draft])
        guesses = [(r, n > r.num_certain) for r, n in uses if r.num_expected > r.num_certain]
        self._note_uses(self._guessed, guesses)

    def _note_uses(self, overall: Acceptance, uses: Sequence[tuple[Request, bool]]) -> None:
        """Note which requests have drafts of one source, of those that may. overall: that of the
        source."""
        if not uses:
            return
        drafts = any(has_drafts for _, has_drafts in uses)
        if overall.note_choice(has_drafts=drafts):
            self._on_change(DraftingChange(None, drafts, overall.rates[0]))
        if not (drafts and overall.pays):
            return  # a request is not to blame where nobody has any
        for request, has_drafts in uses:
            acceptance = self._own(request)
            if acceptance.note_choice(has_drafts=has_drafts):
                self._on_change(DraftingChange(request.id, has_drafts, acceptance.rates[0]))

"""The number of drafts that each request has in a step: as many as pay, by what has been accepted
of its drafts so far, and by what steps of so many rows and tokens have taken.

A request gains one token, and one more for each draft that is accepted. The chance that its j-th
draft is accepted is the product of its acceptance rates up to j, so each further draft is worth
less. Of all drafts, the most valuable ones are taken as long as they raise the tokens per second of
the whole step. The value of the last one is the step's price, by which the drafts of the next steps
are chosen too, until it is reviewed. drafting/ has the parts.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker_client.scheduler.drafting.acceptance import TRIED_FIRST, Acceptance, Source
from worker_client.scheduler.drafting.device_rest import DeviceRest
from worker_client.scheduler.drafting.payoffs import (
    DraftingChange,
    OnDraftingChange,
    Payoffs,
    log_change,
)
from worker_client.scheduler.drafting.probes import (
    HOPELESS,
    MANY_UNTRIED,
    DraftProbe,
    Probes,
)
from worker_client.scheduler.drafting.step_costs import StepCosts, StepTimer, column
from worker_client.scheduler.request import Request
from worker_client.scheduler.step_budget import Clock
from worker_client.scheduler_output import DraftOutcome

Float64s = NDArray[np.float64]
Int64s = NDArray[np.int64]

REVIEW_EVERY: Final = 8
"""Steps from one review of the price to the next, unless the number of rows changes before: in so
many, outcomes change little. Fewer at first: one more after each so many steps."""
RESTING_REVIEW_EVERY: Final = 32
"""The same while the device rests: no outcomes come, and only a probe may be due."""
LEAST_GAIN: Final = 0.01
"""Share of the tokens per second that drafts have to gain: times differ by more than by chance."""


class _Batch:
    """Requests that decode together, and their drafts by the price of their steps."""

    def __init__(self, requests: list[Request], before: "_Batch | None") -> None:
        """before: the batch of the step before."""
        self.requests = requests
        self.rows = np.array([own.drafts.row for own in requests], np.int64)
        """Row of each request in Acceptance."""
        self.on_device = np.array([own.traits.may_draft for own in requests], np.bool_)
        self.drafted = [own for own in requests if own.traits.may_draft]
        """Requests whose drafts the device makes."""
        self.guessed = [own for own in requests if not own.traits.may_draft]
        """Requests whose drafts the driver brings."""
        self.sources = [
            source
            for source, own in ((Source.DEVICE, self.drafted), (Source.DRIVER, self.guessed))
            if own
        ]
        """Those of their drafts."""
        self.column = column(len(requests))
        self.price: float = before.price if before is not None else 0.0
        """Least gain of a draft that pays, in tokens."""
        is_as_large = before is not None and before.column == self.column
        self.age: int = before.age if before is not None and is_as_large else -1
        """Steps since the review of the price; -1: it is due."""
        self.lost_s = 0.0
        """Seconds that the price has lost so far, as others would have done better."""
        self.wanted: Int64s = np.zeros(len(requests), np.int64)
        """Drafts of each that pay; those that are certain do not count."""
        self.counts: dict[str, int] = {}
        """Drafts of the device in the last step."""
        self.num_left = 0
        """Further steps for which there is room for any number of these."""
        self.num_skipped = -1
        """DeviceRest.num_skipped when the device had made drafts for all of them."""
        self.probe: DraftProbe | None = None
        """Rest of a probe: the steps that it still has."""

    @property
    def wants_device(self) -> bool:
        """True if drafts of the device pay, made or not."""
        return bool(self.wanted[self.on_device].any())

    def leave(self) -> None:
        """Drop the requests, one of which has ended; what is known of their steps stays."""
        self.requests, self.drafted, self.guessed = [], [], []

    def choose_by_price(self, chances: Float64s) -> None:
        """Choose drafts. chances: float64 [requests, positions]."""
        self.wanted = np.count_nonzero(chances >= self.price, axis=1)
        self.num_left = 0


class _Drafts(NamedTuple):
    """Drafts that the requests of a batch may have in its next step."""

    room: Int64s
    """int64 [requests]: their number."""
    certain: Int64s
    """Those of them that are accepted for certain, the first ones."""
    chances: Float64s
    """float64 [requests, positions]: the chance of each to be accepted, 0 where there is none."""


class DraftLengths:
    """Chooses the drafts of each step, and learns from the steps' outcomes. Belongs to the
    scheduler; RequestDrafts.row is its own."""

    def __init__(
        self,
        most: int,
        num_stages: int = 1,
        clock: Clock = time.monotonic,
        on_change: OnDraftingChange = log_change,
    ) -> None:
        """most: drafts of a request in a step at most. on_change: is told what changes for good."""
        self._most = most
        self._on_change = on_change
        self._timer = StepTimer(num_stages, clock)
        self._costs = StepCosts()
        self._acceptance = Acceptance(most)
        self._probes = Probes(most, self._costs)
        self._rest = DeviceRest()
        self._payoffs = Payoffs()
        self._overall_payoffs = Payoffs()
        self._batches: dict[int, _Batch] = {}
        """The requests that each group has decoded last."""
        self._num_steps = 0
        """Steps whose requests may have drafts."""
        self._num_priced = 0
        """Those of them since the cost of a token is known."""
        self._awaits_drafts = False
        """A probe is to follow, for which the device has to make drafts first."""

    @property
    def asks(self) -> bool:
        """True if the device is to make drafts after the next step."""
        return self._rest.asks

    def choose(self, requests: Sequence[Request], group: int = 0) -> Mapping[str, int]:
        """Return the drafts of each request that is to have some. requests: all that decode;
        group: those that decode together, in one step after the other."""
        if not requests:
            return {}
        batch = self._batches.get(group)
        if batch is None or batch.requests != requests:
            batch = self._batches[group] = self._begin(list(requests), batch)
        if not (
            batch.drafted
            or any(own.drafts.expected.count_from(own.num_tokens) for own in batch.guessed)
        ):
            return {}
        self._num_steps += 1
        self._num_priced += self._costs.has_slope
        if batch.probe is None and self._is_due(batch):
            self._review(batch)
        batch.age += 1
        if batch.probe is not None:
            return self._probe_drafts(batch, batch.probe)
        counts = self._device_drafts(batch)
        self._plan_rest(batch)
        return {**counts, **self._guesses(batch)} if batch.guessed else counts

    def sent(
        self, number: int, num_rows: int, num_tokens: int, *, only_decodes: bool, group: int = 0
    ) -> None:
        """Note that a step is sent. num_tokens: of requests that decode, with their drafts; group:
        see choose."""
        self._rest.sent(number)
        makes = self._rest.asks
        self._timer.sent(group, num_rows, num_tokens, only_decodes=only_decodes, makes_drafts=makes)

    def done(self) -> None:
        """Note the result of the oldest step in flight, and learn from its time."""
        timed = self._timer.done()
        if timed is not None:
            self._costs.learn(*timed)
            self._probes.save(timed[1])

    def failed(self, num_steps: int) -> None:
        """Forget the last steps in flight: they have no result."""
        self._timer.failed(num_steps)

    def learn(self, outcomes: Sequence[tuple[Request, DraftOutcome]]) -> None:
        """Take the outcomes of requests' drafts into account, without those that were certain."""
        known = [(own.drafts.row, outcome) for own, outcome in outcomes if own.drafts.row >= 0]
        self._acceptance.note(known)

    def forget(self, request: Request) -> None:
        """Note that a request has ended."""
        if request.drafts.row >= 0:
            for batch in self._batches.values():
                if request.drafts.row in batch.rows:
                    batch.leave()
            self._acceptance.end(request.drafts.row)
            request.drafts.row = -1

    def _begin(self, requests: list[Request], before: _Batch | None) -> _Batch:
        """Return the batch of these requests, after another one of their group."""
        for request in requests:
            if request.drafts.row < 0:
                source = Source.DEVICE if request.traits.may_draft else Source.DRIVER
                request.drafts.row = self._acceptance.begin(source, self._num_steps)
                self._payoffs.begin(request.drafts.row)
        batch = _Batch(requests, before)
        if batch.age >= 0:
            batch.choose_by_price(self._chances(batch))
        return batch

    def _is_due(self, batch: _Batch) -> bool:
        """Return True if the price of a batch is to be reviewed. As long as the cost of a token is
        not known, probes do not wait for that."""
        if batch.age < 0 or self._awaits_drafts:
            return True
        if not self._costs.has_slope:
            return self._probes.is_due(self._num_steps)
        is_resting = not self._rest.asks and not batch.guessed
        most = RESTING_REVIEW_EVERY if is_resting else REVIEW_EVERY
        return batch.age >= min(most, 1 + self._num_priced // REVIEW_EVERY)

    def _review(self, batch: _Batch) -> None:
        """Find the price of a batch by what is known now, and begin a probe if it is time for
        one."""
        self._acceptance.count_new(self._num_steps)
        chances = self._chances(batch)
        drafts = self._drafts(batch, chances)
        price, rate = self._price(drafts)
        if self._is_worth_a_change(batch, drafts, rate):
            batch.price, batch.lost_s = price, 0.0
            batch.choose_by_price(chances)
        counts = np.minimum(drafts.certain + batch.wanted, drafts.room)
        if self._costs.has_slope:  # as long as drafts seem to cost nothing, their use shows nothing
            self._note_uses(batch, drafts, counts)
        batch.age, self._awaits_drafts = 0, False
        is_hopeless = not counts.any() and self._are_hopeless(batch, chances)
        share_untried = self._acceptance.share_untried(batch.rows)
        may_wait = is_hopeless and share_untried < MANY_UNTRIED
        if not self._probes.is_due(self._num_steps, is_hopeless=may_wait):
            return
        room = drafts.room
        if is_hopeless:
            room = room * self._acceptance.least_known(batch.rows)
        wake_s = 0.0 if self._rest.asks or not batch.drafted else self._costs.wake_s
        probe = self._probes.find(counts, room, rate, wake_s, is_hopeless=is_hopeless)
        if probe is None:
            return
        made = np.ones(len(batch.requests), np.bool_)
        made[batch.on_device] = self._made(batch)
        if (probe.counts > counts)[~made].any():
            self._probes.pay(wake_s)
            self._awaits_drafts = True
            return
        self._probes.sent(self._num_steps, probe)
        batch.probe = probe

    def _is_worth_a_change(self, batch: _Batch, drafts: _Drafts, rate: float) -> bool:
        """Return True if the drafts so far have lost as much as one step of another kind costs,
        compared with those that make the most tokens per second, `rate`."""
        counts = np.minimum(drafts.certain + batch.wanted, drafts.room)
        num_rows, num_tokens = counts.size, np.array([counts.size + counts.sum()], float)
        gained = num_rows + drafts.chances[np.arange(self._most) < counts[:, None]].sum()
        lost_s = self._costs.seconds(num_rows, num_tokens)[0] - gained / rate
        batch.lost_s += max(1, batch.age) * max(0.0, float(lost_s))
        return batch.lost_s >= self._costs.change_s

    def _are_hopeless(self, batch: _Batch, chances: Float64s) -> bool:
        """Return True if hardly any drafts are accepted, in all and of each request."""
        best = max(self._acceptance.first_rate(source) for source in batch.sources)
        return max(best, float(chances[:, 0].max())) < HOPELESS

    def _probe_drafts(self, batch: _Batch, probe: DraftProbe) -> Mapping[str, int]:
        """Return the drafts of the next step of a probe. The device makes drafts for a probe's own
        steps only if they have some; after its last step, as ever."""
        goes_on = probe.num_steps > 1
        batch.probe = probe._replace(num_steps=probe.num_steps - 1) if goes_on else None
        self._rest.plan(
            is_used=batch.wants_device,
            must_ask=goes_on or not self._costs.has_slope,
            must_rest=goes_on and not probe.has_drafts,
        )
        if not probe.has_drafts:
            return {}
        made = np.ones(len(batch.requests), np.bool_)
        made[batch.on_device] = self._made(batch)
        room = np.array([own.most_drafts for own in batch.requests]).clip(0, self._most)
        return _by_id(batch.requests, np.minimum(probe.counts, room) * made)

    def _chances(self, batch: _Batch) -> Float64s:
        """Return the chances of uncertain drafts, float64 [requests, positions]; 0 of requests that
        have none until it is known what becomes of the others'."""
        chances: Float64s = self._acceptance.rates(batch.rows).cumprod(axis=1)
        for source in batch.sources:
            if not self._acceptance.is_known(source):
                own = np.flatnonzero(batch.on_device == (source is Source.DEVICE))
                chances[own[TRIED_FIRST:]] = 0.0
        return chances

    def _drafts(self, batch: _Batch, chances: Float64s) -> _Drafts:
        """Return the drafts that requests may have. A guess behind drafts that are certain counts
        as a first one."""
        room = np.array([own.most_drafts for own in batch.requests]).clip(0, self._most)
        certain = np.zeros(room.size, np.int64)
        if batch.guessed:
            certain = np.minimum([_num_certain(own) for own in batch.requests], room)
            chances = chances.copy()
            for place in np.flatnonzero(certain).tolist():
                num = int(certain[place])
                chances[place, num:] = chances[place, : self._most - num]
                chances[place, :num] = 1.0
        is_there = np.arange(self._most) < room[:, None]
        return _Drafts(room, certain, np.where(is_there, chances, 0.0))

    def _price(self, drafts: _Drafts) -> tuple[float, float]:
        """Return the price with which a step makes the most tokens per second, and how many it is
        expected to make. Drafts of equal value are taken together, so that equal requests have
        equal numbers."""
        values = np.sort(drafts.chances[drafts.chances > 0])[::-1]
        num_rows = drafts.room.size
        tokens = num_rows + np.arange(1 + drafts.chances.size, dtype=float)
        times = self._costs.seconds(num_rows, tokens)
        gained = num_rows + np.concatenate(([0.0], np.cumsum(values)))
        rates = gained / times[: gained.size]
        ends = np.append(np.flatnonzero(values[1:] < values[:-1]) + 1, values.size)
        ends = np.append(0, ends[ends > 0])
        best = int(ends[np.argmax(rates[ends])])
        if rates[best] > (1 + LEAST_GAIN) * rates[0]:
            return float(values[best - 1]), float(rates[best])
        # Below this price, so many drafts would not have paid, whatever their number.
        needed = ((1 + LEAST_GAIN) * times[1:] / times[0] - 1) * num_rows / np.arange(1, times.size)
        best_value = float(values[0]) if values.size else 0.0
        return max(float(needed.min()), np.nextafter(best_value, 2.0)), float(rates[0])

    def _device_drafts(self, batch: _Batch) -> dict[str, int]:
        """Return the drafts of the device that pay, as far as there is room and it has made
        some."""
        is_there = batch.num_skipped == self._rest.num_skipped or not batch.counts
        if batch.num_left and is_there:
            batch.num_left -= 1
            return batch.counts
        wanted = batch.wanted[batch.on_device]
        if not wanted.any():
            batch.counts, batch.num_left = {}, RESTING_REVIEW_EVERY
            return batch.counts
        made = self._made(batch)
        if made.all():
            batch.num_skipped = self._rest.num_skipped
        room = np.array([own.most_drafts for own in batch.drafted])
        batch.num_left = max(0, (int(room.min()) - self._most) // (1 + self._most))
        batch.counts = _by_id(batch.drafted, np.minimum(wanted, room) * made)
        return batch.counts

    def _made(self, batch: _Batch) -> NDArray[np.bool_]:
        """Return for each request whose drafts the device makes whether it has made some after the
        request's last step."""
        return np.array([self._rest.has_made(own.last_step) for own in batch.drafted], np.bool_)

    def _guesses(self, batch: _Batch) -> dict[str, int]:
        """Return the drafts of the driver that pay: those that are certain, and guesses behind
        them."""
        counts: dict[str, int] = {}
        wanted = batch.wanted[~batch.on_device].tolist()
        for own, num_guesses in zip(batch.guessed, wanted, strict=True):
            room = min(self._most, own.most_drafts)
            if room > 0:
                certain = _num_certain(own) if batch.price <= 1.0 else 0
                counts[own.id] = min(room, certain + num_guesses)
        return {req_id: count for req_id, count in counts.items() if count}

    def _plan_rest(self, batch: _Batch) -> None:
        """Decide whether the device makes drafts after the step."""
        must_ask = self._awaits_drafts or not self._costs.has_slope
        self._rest.plan(is_used=batch.wants_device, must_ask=must_ask)

    def _note_uses(self, batch: _Batch, drafts: _Drafts, counts: Int64s) -> None:
        """Note which requests have had drafts that are not certain since the last review, of those
        that may, and tell what has changed for good."""
        num_steps = max(1, batch.age)
        has, may = counts > drafts.certain, batch.on_device | (drafts.room > drafts.certain)
        for source in Source:
            uses = np.flatnonzero(may & (batch.on_device == (source is Source.DEVICE)))
            if not uses.size:
                continue
            some = np.array([has[uses].any()])
            number = np.array([source])
            if self._overall_payoffs.note(number, some, num_steps).size:
                first_rate = self._acceptance.first_rate(source)
                self._on_change(DraftingChange(None, bool(some[0]), first_rate))
            if not (some[0] and self._overall_payoffs.pays(source)):
                continue  # a request is not to blame where nobody has any
            for place in uses[self._payoffs.note(batch.rows[uses], has[uses], num_steps)].tolist():
                request = batch.requests[place]
                first_rate = self._acceptance.own_first_rate(request.drafts.row)
                self._on_change(DraftingChange(request.id, bool(has[place]), first_rate))


def _num_certain(request: Request) -> int:
    """Return how many drafts of a request's next step are certain, the first ones."""
    return request.drafts.expected.count_forced_from(request.num_tokens)


def _by_id(requests: Sequence[Request], counts: Int64s) -> dict[str, int]:
    """Return the counts that are not 0."""
    return {own.id: n for own, n in zip(requests, counts.tolist(), strict=True) if n > 0}

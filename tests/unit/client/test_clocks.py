"""Clock offsets from round trips: within the bound that they state, whatever the delays."""

import random

from hypothesis import given
from hypothesis import strategies as st

from worker_client.tracing.clocks import ClockMap, Offset, measure

NS = st.integers(0, 10**7)


class Pair:
    """Two clocks with offset and drift, and network delays between them."""

    def __init__(self, ahead: int, delays: list[tuple[int, int]], rate: float = 1.0) -> None:
        self.now = 10**12
        self.rate = rate
        self.ahead = ahead
        self._delays = iter(delays)

    def own(self) -> int:
        return self.now

    def theirs(self) -> int:
        return round(self.now * self.rate) + self.ahead

    def ask(self) -> int:
        there, back = next(self._delays)
        self.now += there
        answer = self.theirs()
        self.now += back
        return answer


@given(st.integers(-(10**18), 10**18), st.lists(st.tuples(NS, NS), min_size=1, max_size=8))
def test_offset_is_within_its_bound_which_is_half_the_fastest_round_trip(ahead, delays):
    pair = Pair(ahead, delays)
    offset = measure(pair.ask, pair.own, len(delays))
    assert abs(offset.ahead_ns - ahead) <= offset.bound_ns
    assert offset.bound_ns == min(map(sum, delays)) // 2 + 1


@given(st.floats(-1e-3, 1e-3), st.integers(-(10**15), 10**15), st.randoms())
def test_rates_that_differ_are_followed(drift, ahead, rng: random.Random):
    pair = Pair(ahead, [(rng.randrange(5000), rng.randrange(5000)) for _ in range(16)], 1 + drift)
    first = measure(pair.ask, pair.own, 8)
    pair.now += 5 * 10**9
    moments = []
    for _ in range(5):
        pair.now += rng.randrange(10**9)
        moments.append((pair.theirs(), pair.own()))
    last = measure(pair.ask, pair.own, 8)
    clock = ClockMap(first, last)
    for theirs, ours in moments:
        assert abs(clock.to_ours(theirs) - ours) <= 2 * clock.bound_ns + 10


def test_order_is_kept_and_one_measurement_is_enough():
    clock = ClockMap(Offset(100, 40, 3))
    assert [clock.to_ours(theirs) for theirs in (40, 41, 10**15)] == [0, 1, 10**15 - 40]
    assert clock.bound_ns == 3

"""The limit on an observer's control requests."""

import random

from worker_daemon.server.auth.request_rate import BURST, MAX_WAIT_S, RATE_PER_S, RequestRate


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_observers_that_ask_as_top_does_never_wait():
    clock = Clock()
    rate = RequestRate(clock)
    for _ in range(2000):
        clock.now += random.uniform(0.2, 0.3)  # 10 of them with one key, 4 requests each
        assert all(rate.wait_s("key") == 0.0 for _ in range(40))
    assert rate.num_dropped == 0


def test_one_that_waits_for_each_answer_is_delayed_and_never_dropped():
    clock = Clock()
    rate = RequestRate(clock)
    began = clock.now
    for _ in range(5000):
        wait_s = rate.wait_s("key")
        assert wait_s is not None and wait_s <= 1 / RATE_PER_S + 1e-6
        clock.now += wait_s
    assert abs((5000 - BURST) / RATE_PER_S - (clock.now - began)) < 0.01


def test_flood_of_one_key_is_bounded_and_delays_no_other():
    clock = Clock()
    rate = RequestRate(clock)
    answered = 0
    for _ in range(100_000):
        clock.now += 10.0 / 100_000
        wait_s = rate.wait_s("flooding")
        assert wait_s is None or wait_s <= MAX_WAIT_S
        answered += wait_s is not None
    assert answered <= BURST + (10.0 + MAX_WAIT_S) * RATE_PER_S + 1
    assert rate.num_dropped == 100_000 - answered
    assert rate.wait_s("other") == 0.0
    clock.now += 10.0
    assert rate.wait_s("flooding") == 0.0

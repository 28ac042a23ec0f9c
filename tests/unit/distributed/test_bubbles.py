"""The share of a stage's time that its waits take, by a clock that the tests move."""

import random

import pytest
import torch

from worker_daemon.distributed.bubbles import input_waits


class Clock:
    seconds = 0.0

    def __call__(self):
        return self.seconds


def run(waits, clock, steps):
    """Steps (seconds of wait, seconds of work)."""
    for waited, worked in steps:
        with waits.waiting():
            clock.seconds += waited
        clock.seconds += worked


@pytest.mark.parametrize("every", [1, 2, 7])
def test_share_is_that_of_the_sampled_steps(every):
    clock, rng = Clock(), random.Random(every)
    waits = input_waits(torch.device("cpu"), every=every, now=clock)
    steps = [(rng.random(), rng.random()) for _ in range(50)]
    run(waits, clock, [*steps, (0, 0)])
    sampled = steps[::every]
    expected = sum(waited for waited, _ in sampled) / sum(map(sum, sampled))
    assert waits.bubbles.waiting_share == pytest.approx(expected)
    assert waits.bubbles.num_samples == len(sampled)


def test_old_samples_are_forgotten():
    clock = Clock()
    waits = input_waits(torch.device("cpu"), every=1, now=clock)
    run(waits, clock, [(1.0, 0.0)] * 100)
    assert waits.bubbles.waiting_share == pytest.approx(1)
    run(waits, clock, [(0.0, 1.0)] * 100)
    assert waits.bubbles.waiting_share == pytest.approx(0)


def test_nothing_is_known_before_the_first_sample_ends():
    clock = Clock()
    waits = input_waits(torch.device("cpu"), every=4, now=clock)
    run(waits, clock, [(1.0, 1.0)])
    assert waits.bubbles == (0.0, 0)


def test_a_wait_that_fails_is_no_sample():
    clock = Clock()
    waits = input_waits(torch.device("cpu"), every=1, now=clock)
    with pytest.raises(ValueError, match="lost"), waits.waiting():
        raise ValueError("lost")
    run(waits, clock, [(1.0, 3.0), (0, 0)])
    assert waits.bubbles == (0.25, 1)

"""Requests that arrive by a Poisson process, and the times that are measured from their arrival."""

import math
import random
import time
from types import SimpleNamespace

import numpy as np

from worker_client.cli.arrivals import Arrivals, with_arrivals
from worker_client.cli.input_request import InputRequest
from worker_client.scheduler_output import StepResult
from worker_client.tracing import token_times
from worker_client.tracing.token_times import TokenTimes


def inputs_of(*names: str) -> list[InputRequest]:
    return [InputRequest(name, None) for name in names]


def test_gaps_are_those_of_a_poisson_process():
    seed = random.randrange(1 << 30)
    inputs = inputs_of(*map(str, range(4000)))
    found = with_arrivals(inputs, 20.0, seed)
    times = [entry.arrival_s for entry in found]
    gaps = np.diff(times)
    assert times[0] == 0 and gaps.min() >= 0, seed
    assert abs(gaps.mean() * 20 - 1) < 0.1, seed
    assert abs(gaps.std() * 20 - 1) < 0.15, (seed, "exponential: as wide as its mean")
    assert found == with_arrivals(inputs, 20.0, seed)
    assert found != with_arrivals(inputs, 20.0, seed + 1)
    assert with_arrivals(inputs, math.inf, seed) == inputs


def test_samples_of_a_prompt_arrive_together():
    found = with_arrivals(inputs_of("a#0", "a#1", "b", "c#0", "c#1"), 3.0, 1)
    a, also_a, b, c, also_c = (entry.arrival_s for entry in found)
    assert a == also_a < b < c == also_c


def test_requests_are_due_when_their_time_has_come():
    early, late = (InputRequest(name, None, arrival_s=at) for name, at in (("a", 0.0), ("b", 0.2)))
    arrivals = Arrivals([late, early], time.monotonic())
    assert arrivals.take_due() == [early] and arrivals.has_more
    while not (due := arrivals.take_due()):
        arrivals.wait()
    assert due == [late] and not arrivals.has_more
    assert time.monotonic() - arrivals._began >= 0.2


def test_gaps_between_tokens_are_those_between_results(monkeypatch):
    clock = iter([1.0, 1.5, 2.5, 3.0, 9.0])
    monkeypatch.setattr(token_times, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    times = TokenTimes()
    for req_ids in (("a", "b"), ("a", "a", "b"), ("b",), ("a", "c"), ("a", "b")):
        times.note(StepResult(req_ids, (7,) * len(req_ids)))
    gaps = times.gaps_s({"a": 4, "b": 3, "c": 1})
    assert sorted(gaps) == [0.5, 0.5, 1.0, 1.5], "two tokens at once are one gap; none past the end"
    assert times.gaps_s({}) == []

"""The workload whose requests arrive over time: its arrivals, and a pass of it on fake daemons."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from benchmarks import poisson, workloads
from tests.unit.client.conftest import connect, directory, fakes, worker_config
from worker_client.scheduler import scheduler_limits
from worker_client.scheduler_output import StepResult

__all__ = ["connect", "directory", "fakes"]


def test_arrivals_are_those_of_a_poisson_process():
    requests = workloads.poisson(100, 50.0, 40.0, 3, 5, seed=7)
    gaps = np.diff([0.0, *(request.arrival_s for request in requests)])
    assert requests == workloads.poisson(100, 50.0, 40.0, 3, 5, seed=7)
    assert all(before.arrival_s <= after.arrival_s < 40.0 for before, after in pairwise(requests))
    assert len(requests) == pytest.approx(2000, rel=0.1)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # of exponential gaps
    assert {len(request.prompt) for request in requests} == {3}
    assert {request.num_out for request in requests} == {5}


def test_sizes_are_the_workloads_unless_given():
    plain = poisson.parse_options(["--model", "m"])
    small = poisson.parse_options(["--model", "m", "--rate", "2", "--max-itl-ms", "20,40"])
    sizes = (plain.rate, plain.seconds, plain.tokens_in, plain.tokens_out)
    assert sizes == workloads.ARRIVALS["poisson_8rps"] == (8.0, 60.0, 1000, 200)
    assert (plain.title, plain.max_itl_ms) == ("poisson_8rps", [50.0])
    assert (small.rate, small.seconds, small.max_itl_ms) == (2.0, 60.0, [20.0, 40.0])
    assert small.title.startswith("poisson_2rps")


@pytest.mark.parametrize("max_itl_ms", [None, 50.0])
def test_a_pass_serves_all_requests_and_times_each_token(fakes, connect, max_itl_ms):
    config = worker_config(1, max_model_len=128)
    group = connect(fakes(1), 1)
    group.attach()
    loaded = group.prepare(config, num_gpu_blocks=64)
    limits = replace(scheduler_limits(loaded, config), max_itl_ms=max_itl_ms)
    requests = workloads.poisson(limits.vocab_size, 200.0, 0.2, 20, 6)
    latencies = poisson.serve(group, limits, requests)
    assert len(latencies.ttft_s) == len(requests) > 10
    assert len(latencies.itl_s) == 5 * len(requests)
    assert latencies.num_tokens == 6 * len(requests)
    assert min(*latencies.ttft_s, *latencies.itl_s) >= 0.0
    found = list(poisson.figures("name", latencies))
    assert [figure["unit"] for figure in found] == ["ms"] * 4 + ["tok/s out"]


def test_the_first_token_counts_from_the_arrival(monkeypatch):
    now = iter([3.0, 3.5, 5.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    latencies = poisson.Latencies()
    clock = poisson.TokenClock(latencies)
    clock.arrived("a", 1.0)
    clock.arrived("b", 3.25)
    for req_ids in (["a"], ["a", "b"], ["a", "b"]):
        clock.take(StepResult(req_ids, [7] * len(req_ids)))
    assert (latencies.ttft_s, latencies.itl_s) == ([2.0, 0.25], [0.5, 1.5, 1.5])

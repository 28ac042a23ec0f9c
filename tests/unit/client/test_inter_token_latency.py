"""The reference scheduler with a target for inter-token latency, over simulated devices whose steps
take a simulated time."""

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fake_daemon import next_token, reference_tokens
from worker_client.errors import ClientConfigError
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, SchedulerLimits
from worker_client.scheduler_output import StepResult

EXHAUSTIVE = pytest.mark.exhaustive
FLOOR = 64
"""Prompt tokens that a step always has room for."""


class Work(NamedTuple):
    now_s: float
    num_prompt: int
    num_decodes: int
    num_pairs: float
    """Pairs of a prompt token and one that it attends to."""


@dataclass
class Row:
    tokens: list[int]
    computed: int
    seed: int


@dataclass
class Simulation:
    """A scheduler, a clock, and a pipeline of devices that take a part of a step's time each."""

    cost_s: Callable[[Work], float]
    max_itl_ms: float | None
    pp: int = 1
    limits: dict = field(default_factory=dict)
    now_s: float = 0.0

    def __post_init__(self):
        fields = {
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
            "max_model_len": 40_000,
            "num_blocks": 100_000,
            "block_size": 16,
            "enable_prefix_caching": False,
        }
        fields |= {"pipeline_parallel_size": self.pp, "max_itl_ms": self.max_itl_ms}
        limits = SchedulerLimits(**{**fields, **self.limits})
        self.scheduler = Scheduler(limits, clock=lambda: self.now_s)
        self.rows: dict[str, Row] = {}
        self.steps: list[Work] = []
        self.gaps: list[tuple[float, float]] = []
        """(moment of the later token, time since the one before it)."""
        self.outputs = {}
        self._last: dict[str, float] = {}
        self._free_s = [0.0] * self.pp
        """Moment from which each stage is free."""
        self._in_flight: deque = deque()

    def run(self, arrivals):
        """Serve requests of (moment of arrival, request)."""
        waiting = deque(arrivals)
        while waiting or self._in_flight or self.scheduler.has_unfinished_requests():
            while waiting and waiting[0][0] <= self.now_s:
                self.scheduler.add_request(waiting.popleft()[1])
            self._fill()
            if self._in_flight:
                self._take()
            else:
                assert waiting, "the scheduler stalls"
                self.now_s = max(self.now_s, waiting[0][0])
        return self

    def _fill(self):
        while len(self._in_flight) <= self.pp and (output := self.scheduler.schedule()):
            self._in_flight.append((output, *self._execute(output)))

    def _execute(self, output):
        """The tokens of a step, and the moment of its result."""
        for req_id in (*output.finished_req_ids, *output.preempted_req_ids):
            self.rows.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            seed = SamplingParams.of(new.extensions).seed or 0
            self.rows[new.req_id] = Row(new.token_ids.tolist(), new.num_computed_tokens, seed)
        pairs, tokens = 0.0, {}
        counts = {**dict.fromkeys(output.decode_req_ids, 1), **output.num_scheduled_tokens}
        for req_id, count in counts.items():
            row = self.rows[req_id]
            if req_id in output.num_scheduled_tokens:
                pairs += count * (row.computed + count / 2)
            row.computed += count
            assert row.computed <= len(row.tokens)
            if row.computed == len(row.tokens):
                row.tokens.append(next_token(row.tokens, row.seed))
                tokens[req_id] = row.tokens[-1]
        num_prompt = sum(output.num_scheduled_tokens.values())
        work = Work(self.now_s, num_prompt, len(output.decode_req_ids), pairs)
        self.steps.append(work)
        moment, own_s = self.now_s, self.cost_s(work) / self.pp
        for stage in range(self.pp):
            moment = self._free_s[stage] = max(moment, self._free_s[stage]) + own_s
        return StepResult(list(tokens), list(tokens.values())), moment

    def _take(self):
        output, result, moment = self._in_flight.popleft()
        self.now_s = max(self.now_s, moment)
        for req_id in result.req_ids:
            if req_id in self._last:
                self.gaps.append((self.now_s, self.now_s - self._last[req_id]))
            self._last[req_id] = self.now_s
        for done in self.scheduler.update_from_output(output, result):
            self.outputs[done.req_id] = done

    def gap_ms(self, percent: float, after_s: float = 0.0, before_s: float = 1e9) -> float:
        gaps = [gap for moment, gap in self.gaps if after_s <= moment < before_s]
        return float(np.percentile(gaps, percent)) * 1e3

    @property
    def mixed(self) -> list[Work]:
        """Steps with prompt tokens and decodes."""
        return [step for step in self.steps if step.num_prompt and step.num_decodes]


def affine(base_s=5e-3, token_s=30e-6, pair_s=0.0, noise=0.0, seed=1):
    """The cost of a step: a constant, and one of each new token and pair, with normal noise."""
    rng = random.Random(seed)

    def cost_s(work: Work) -> float:
        tokens_s = token_s * (work.num_prompt + work.num_decodes) + pair_s * work.num_pairs
        return (base_s + tokens_s) * max(0.1, 1 + rng.gauss(0, noise))

    return cost_s


def request(name, num_prompt: int, num_out: int, seed: int = 0) -> GenerationRequest:
    prompt = (np.arange(num_prompt) % 97 + seed).astype(np.int32)
    return GenerationRequest(
        str(name), prompt, max_tokens=num_out, sampling=SamplingParams(ignore_eos=True)
    )


def poisson(rate: float, seconds: float, lengths, num_out: int, seed: int = 1):
    rng, moment, arrivals = random.Random(seed), 0.0, []
    while (moment := moment + rng.expovariate(rate)) < seconds:
        arrivals.append((moment, request(len(arrivals), rng.choice(lengths), num_out)))
    return arrivals


@pytest.mark.each_value
@pytest.mark.parametrize("noise", [0.0, pytest.param(0.03, marks=EXHAUSTIVE), 0.08])
@pytest.mark.parametrize("target", [20.0, 50.0])
def test_gaps_stay_under_the_target(target, noise):
    """Without it they do not; and it costs nobody a token."""
    arrivals = poisson(6.0, 15.0, [500, 1000, 8000], 60)
    plain = Simulation(affine(noise=noise), None).run(arrivals)
    paced = Simulation(affine(noise=noise), target).run(arrivals)
    assert plain.gap_ms(99) > 3 * target
    assert paced.gap_ms(99, after_s=1.0) <= target
    assert {name: each.token_ids for name, each in paced.outputs.items()} == {
        name: each.token_ids for name, each in plain.outputs.items()
    }
    assert len(paced.outputs) == len(arrivals)


@pytest.mark.parametrize(
    ("noise", "least"),
    [*(pytest.param(*case, marks=EXHAUSTIVE) for case in [(0.0, 0.9), (0.03, 0.8)]), (0.08, 0.6)],
)
def test_prompts_get_most_of_what_the_target_permits(noise, least):
    base_s, token_s, target_s = 5e-3, 30e-6, 50e-3
    run = Simulation(affine(base_s, token_s, noise=noise), target_s * 1e3)
    run.run([(0.0, request(index, 4000, 400)) for index in range(60)])
    saturated = run.mixed[10:-1]  # prompts wait behind each of these
    permitted = [(target_s - base_s) / token_s - step.num_decodes for step in saturated]
    assert len(saturated) > 100
    assert sum(step.num_prompt for step in saturated) >= least * sum(permitted)


def test_costs_that_change_are_followed():
    steady = affine(noise=0.03)

    def cost_s(work: Work) -> float:
        return steady(work) * (1.0 if work.now_s < 15 else 2.5 if work.now_s < 30 else 0.8)

    run = Simulation(cost_s, 40.0).run(poisson(6.0, 45.0, [1000, 6000], 60))
    for begin_s in (1, 16, 31):
        assert run.gap_ms(99, begin_s, begin_s + 14) <= 40.0

    def most(begin_s: float) -> int:
        now = (step for step in run.mixed if begin_s <= step.now_s < begin_s + 14)
        return max(step.num_prompt for step in now)

    assert most(16) < 0.6 * most(1) < 0.6 * most(31)


def test_attention_over_long_contexts_counts():
    run = Simulation(affine(pair_s=1e-9, noise=0.02), 40.0)
    run.run(poisson(0.8, 40.0, [500, 16_000, 32_000], 150))
    assert run.gap_ms(99, after_s=3.0) <= 40.0
    costs = [30e-6 + 1e-9 * step.num_pairs / step.num_prompt for step in run.mixed]
    assert max(costs) > 1.8 * min(costs)


def test_a_slow_step_now_and_then_does_not_shrink_the_others():
    rng, steady = random.Random(3), affine()

    def cost_s(work: Work) -> float:
        return steady(work) * (10 if rng.random() < 0.02 else 1)

    run = Simulation(cost_s, 50.0)
    run.run([(0.0, request(index, 4000, 400)) for index in range(60)])
    chunks = sorted(step.num_prompt for step in run.mixed[10:-1])
    assert chunks[len(chunks) // 10] >= 0.75 * (45e-3 / 30e-6)


@pytest.mark.parametrize(
    "pp",
    [
        2,
        pytest.param(3, marks=pytest.mark.exhaustive),
        pytest.param(4, marks=pytest.mark.exhaustive),
    ],
)
def test_gaps_in_a_pipeline_are_those_of_a_request(pp):
    arrivals = poisson(6.0, 15.0, [500, 1000, 8000], 60)
    plain = Simulation(affine(noise=0.02), None, pp).run(arrivals)
    paced = Simulation(affine(noise=0.02), 60.0, pp).run(arrivals)
    assert plain.gap_ms(99) > 100.0
    assert paced.gap_ms(99, after_s=1.0) <= 60.0
    assert len(paced.outputs) == len(arrivals)


def test_a_target_that_cannot_be_met_leaves_the_floor():
    arrivals = poisson(3.0, 10.0, [300, 900], 30)
    run = Simulation(affine(noise=0.03), 2.0).run(arrivals)
    assert len(run.outputs) == len(arrivals)
    assert {step.num_prompt for step in run.mixed} <= set(range(1, FLOOR + 1))
    assert sum(step.num_prompt == FLOOR for step in run.mixed) > len(run.mixed) / 2


def test_the_floor_keeps_to_the_token_limit():
    limits = {"max_num_batched_tokens": 24, "max_num_seqs": 16}
    arrivals = poisson(30.0, 1.0, [300], 30)
    run = Simulation(affine(), 0.001, limits=limits).run(arrivals)
    assert len(run.outputs) == len(arrivals)
    assert max(step.num_prompt + step.num_decodes for step in run.steps) == 24


def test_prompts_progress_in_every_step():
    """Even one of 32,000 tokens while 50 requests decode, and however slow prompts are."""
    run = Simulation(affine(token_s=5e-3), 10.0)
    decoding = [(0.0, request(index, 20, 400)) for index in range(50)]
    run.run([*decoding, (0.5, request("long", 32_000, 5))])
    assert len(run.outputs) == 51
    assert len(run.outputs["long"].token_ids) == 5
    first = next(index for index, step in enumerate(run.steps) if step.num_pairs > 1e4)
    chunks = [step.num_prompt for step in run.steps[first:] if step.num_pairs]
    beside = [step for step in run.steps[first:] if step.num_decodes > 1]
    assert min(chunks[:-1]) >= FLOOR
    assert all(step.num_prompt for step in beside)


def test_all_tokens_are_open_while_nothing_decodes():
    run = Simulation(affine(), 10.0).run([(0.0, request("a", 20_000, 5))])
    assert [step.num_prompt for step in run.steps if step.num_prompt] == [8192, 8192, 3616]


def test_chunks_grow_from_the_floor_by_doubling_at_most():
    run = Simulation(affine(), 50.0)
    run.run([(0.0, request("a", 20, 400)), (0.1, request("b", 8000, 5))])
    chunks = [step.num_prompt for step in run.mixed]
    assert chunks[0] == FLOOR and max(chunks) > 1200
    assert all(b <= 2 * max(FLOOR, a) for a, b in itertools.pairwise(chunks))


def unread() -> float:
    raise AssertionError("the clock is read without a target")


@pytest.mark.parametrize("pp", [1, 2])
def test_without_a_target_nothing_is_timed(pp):
    limits = SchedulerLimits(8, 512, 4000, 500, 16, pipeline_parallel_size=pp)
    scheduler = Scheduler(limits, clock=unread)
    scheduler.add_request(request("a", 20, 40))
    scheduler.add_request(request("b", 2000, 40))
    output = scheduler.schedule()
    scheduler.update_from_output(output, StepResult(["a"], [7]))
    both = [scheduler.schedule() for _ in range(2)]
    assert [output.total_num_scheduled_tokens for output in both] == [512, 512]


def test_a_jump_counts_as_a_decode():
    """A request whose grammar forces tokens waits for its next one: prompts stay cut."""
    now = itertools.count()
    limits = SchedulerLimits(8, 8192, 9000, 2000, 16, max_itl_ms=2000.0)
    scheduler = Scheduler(limits, clock=lambda: float(next(now)))
    scheduler.add_request(request("a", 20, 40))
    output = scheduler.schedule()
    scheduler.update_from_output(output, StepResult(["a"], [7]))
    scheduler.add_request(request("b", 8000, 4))
    assert scheduler.jump_forward("a", [8, 9, 10]).num_tokens == 3
    output = scheduler.schedule()
    assert output.num_scheduled_tokens["a"] == 4
    assert output.num_scheduled_tokens["b"] <= FLOOR


def test_failed_steps_are_not_measured():
    run = Simulation(affine(), 50.0)
    scheduler = run.scheduler
    scheduler.add_request(request("a", 5000, 100))
    outputs = [scheduler.schedule(), scheduler.schedule()]
    run.now_s = 60.0
    scheduler.step_failed(outputs, frozenset({"a"}))
    run.run([(60.0, request(index, 3000, 50)) for index in range(8)])
    assert len(run.outputs) == 9
    assert run.gap_ms(99) <= 50.0
    assert max(step.num_prompt for step in run.mixed) > 1000


def test_preempted_requests_end_under_a_target():
    limits = {"num_blocks": 70, "block_size": 4, "max_num_seqs": 12, "max_model_len": 260}
    arrivals = [(0.0, request(index, 40, 60)) for index in range(12)]
    run = Simulation(affine(1e-3, 50e-6), 8.0, limits=limits).run(arrivals)
    assert sum(output.num_preemptions for output in run.outputs.values()) > 0
    assert {len(output.token_ids) for output in run.outputs.values()} == {60}


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pp=st.integers(1, 3),
    target=st.sampled_from([0.5, 8.0, 30.0, 1e6]),
    num_blocks=st.sampled_from([70, 100, 400]),
    max_num_batched_tokens=st.sampled_from([16, 100, 512]),
    caching=st.booleans(),
    noise=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_requests_get_their_tokens_at_any_target(
    seed, pp, target, num_blocks, max_num_batched_tokens, caching, noise
):
    """With preemption, shared prefixes and full queues, under random arrivals and times."""
    rng = random.Random(seed)
    limits = {
        "num_blocks": num_blocks,
        "block_size": 4,
        "max_num_seqs": rng.choice([2, 12]),
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": 260,
        "enable_prefix_caching": caching,
    }
    arrivals, moment = [], 0.0
    for index in range(20):
        moment += rng.expovariate(100.0)
        each = request(index, rng.randint(1, 200), rng.randint(1, 50), rng.randrange(3))
        arrivals.append((moment, each))
    cost_s = affine(1e-3, 50e-6, noise=noise, seed=seed)
    run = Simulation(cost_s, target, pp, limits).run(arrivals)
    assert {name: output.token_ids for name, output in run.outputs.items()} == {
        each.id: reference_tokens(each.prompt.tolist(), each.max_tokens, frozenset(), 0)
        for _, each in arrivals
    }
    assert run.scheduler.num_free_blocks == num_blocks - 1
    sizes = [step.num_prompt + step.num_decodes for step in run.steps]
    assert max(sizes) <= max_num_batched_tokens


@pytest.mark.parametrize("target", [0, 0.0, -1.0, float("nan"), float("inf"), "50", True])
def test_a_target_is_positive_and_finite(target):
    with pytest.raises(ClientConfigError) as caught:
        Scheduler(SchedulerLimits(8, 64, 128, 64, 4, max_itl_ms=target))
    assert caught.value.field == "max_itl_ms"
    assert caught.value.value is target
    assert "milliseconds above 0" in str(caught.value)

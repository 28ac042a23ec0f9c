"""The reference scheduler over fake daemons: every request gets the tokens that it must, under
random load, for each pipeline size; and the rules that it keeps."""

import math
import random
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from rpc_schema.kv_cache import BlockGroup
from rpc_schema.lora_request import LoraRequest
from rpc_schema.sampling import GrammarMasks, StopTokens
from tests.support.exhaustive import seeds
from tests.support.fake_daemon import EOS, VOCAB_SIZE, next_token, reference_tokens
from tests.support.flat_requests import flat_request, path_of
from tests.unit.client.conftest import worker_config
from worker_client.driver import Driver
from worker_client.errors import RequestError, SchedulerStalled
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import NO_JUMP, Scheduler, SchedulerLimits, scheduler_limits
from worker_client.scheduler_output import StepResult
from worker_client.steps.step_checks import MAX_ADMITTED_TOKENS


def make_limits(**fields) -> SchedulerLimits:
    defaults = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": 128,
        "num_blocks": 64,
        "block_size": 4,
        "eos_token_ids": (EOS,),
    }
    return SchedulerLimits(**{**defaults, **fields})


def random_requests(rng: random.Random, count: int, longest: int = 60) -> list[GenerationRequest]:
    """Requests of which many share prefixes."""
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(40)] for _ in range(2)]
    requests = []
    for index in range(count):
        prompt = rng.choice(stems)[: rng.randrange(41)]
        prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 20))]
        seed = rng.randrange(4)
        requests.append(
            GenerationRequest(
                id=f"r{index}",
                prompt=np.array(prompt[:longest], np.int32),
                max_tokens=rng.randrange(1, 40),
                sampling=SamplingParams(
                    ignore_eos=rng.random() < 0.5,
                    stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 20]))),
                    temperature=float(seed > 0),
                    seed=seed,
                ),
            )
        )
    return requests


def expected(request: GenerationRequest, max_model_len: int = 10**9) -> list[int]:
    prompt = request.prompt.tolist()
    num = min(request.max_tokens, max_model_len - len(prompt))
    return reference_tokens(
        prompt, num, frozenset(request.sampling.stop_ids((EOS,))), request.sampling.seed
    )


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [200, 34])
def test_every_request_gets_its_tokens(fakes, connect, pp, num_blocks):
    daemons = fakes(pp)
    config = worker_config(pp, max_model_len=128)
    group = connect(daemons, pp)
    group.attach()
    model = group.prepare(config, num_gpu_blocks=num_blocks)
    scheduler = Scheduler(make_limits(num_blocks=num_blocks, pipeline_parallel_size=pp))
    driver = Driver(group, scheduler)
    requests = random_requests(random.Random(pp * 100 + num_blocks), 40)
    for request in requests:
        driver.add_request(request)
    outputs = {output.req_id: output for output in driver.run()}
    assert model.num_blocks == num_blocks
    assert driver.num_failures == 0
    assert {r.id: outputs[r.id].token_ids for r in requests} == {
        r.id: expected(r) for r in requests
    }
    assert sum(output.num_cached_tokens for output in outputs.values()) > 0
    if num_blocks == 34:
        assert sum(output.num_preemptions for output in outputs.values()) > 0
    assert scheduler.num_free_blocks == num_blocks - 1
    assert not daemons.daemons[-1].rows  # the others may be a step behind


class Suspending(Scheduler):
    """Suspends its running requests at random, as while they are recomputed."""

    def __init__(self, limits, rng):
        super().__init__(limits)
        self.rng, self.suspended, self.num_suspended = rng, set(), 0

    def schedule(self):
        running = sorted(self._queues.running)
        if self.rng.random() < 0.3:
            self.suspended = {each for each in running if self.rng.random() < 0.5}
            self.num_suspended += len(self.suspended)
            self.await_recompute(self.suspended | {"unknown"})
        for req_id in self.suspended:
            assert self.jump_forward(req_id, [5, 6, 7, 8, 9]) == NO_JUMP
        step = super().schedule()
        if step is None and not self._steps.numbers:
            self.suspended.clear()
            self.await_recompute(())
            step = super().schedule()
        if step is not None:
            admitted = {new.req_id for new in step.scheduled_new_reqs}
            scheduled = {*step.decode_req_ids, *step.num_scheduled_tokens} - admitted
            assert scheduled.isdisjoint(self.suspended)
            self.suspended -= {*step.preempted_req_ids, *step.finished_req_ids}
        return step


@pytest.mark.parametrize(("pp", "num_blocks"), [(1, 34), (2, 34), (3, 200)])
def test_suspended_requests_are_left_out_and_go_on(fakes, connect, pp, num_blocks):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    group = connect(fakes(pp), pp)
    group.attach()
    group.prepare(worker_config(pp, max_model_len=128), num_gpu_blocks=num_blocks)
    limits = make_limits(num_blocks=num_blocks, pipeline_parallel_size=pp)
    driver = Driver(group, scheduler := Suspending(limits, rng))
    requests = random_requests(rng, 40)
    for request in requests:
        driver.add_request(request)
    outputs = {output.req_id: output for output in driver.run()}
    assert driver.num_failures == 0 and scheduler.num_suspended > 40
    for request in requests:
        assert outputs[request.id].token_ids == expected(request)
    assert scheduler.num_free_blocks == num_blocks - 1


POISON = frozenset(range(100, 120))
"""2 % of the vocabulary."""


def until_poison(request: GenerationRequest) -> tuple[list[int], str]:
    """The tokens of a request alone on a model to which POISON is not a number, and whether that
    ended it."""
    if POISON.intersection(request.prompt.tolist()):
        return [], "error"
    tokens = expected(request)
    for count, token in enumerate(tokens[:-1], 1):
        if token in POISON:
            return tokens[:count], "error"
    return tokens, "stop" if tokens[-1] in request.sampling.stop_ids((EOS,)) else "length"


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [200, 34])
@pytest.mark.parametrize("max_num_batched_tokens", [32, 96])
def test_requests_without_numbers_fail_alone(
    fakes, connect, pp, num_blocks, max_num_batched_tokens
):
    """Whoever shares their first blocks, which they have spoilt, gets its tokens all the same."""
    daemons = fakes(pp)
    for daemon in daemons.daemons:
        daemon.poison = POISON
    config = worker_config(
        pp, max_model_len=128, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=6
    )
    group = connect(daemons, pp)
    group.attach()
    group.prepare(config, num_gpu_blocks=num_blocks)
    limits = make_limits(
        num_blocks=num_blocks,
        pipeline_parallel_size=pp,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=6,
    )
    driver = Driver(group, Scheduler(limits))
    rng = random.Random()
    requests, good = [], []
    while not good:  # all may begin alike, with poison in it
        requests = random_requests(rng, 60)
        prompts = [request.prompt for request in requests]
        good = [prompt for prompt in prompts if POISON.isdisjoint(prompt.tolist())]
    stem = max(good, key=len)
    for index, request in enumerate(requests):  # many that share a stem, every fifth one poisoned
        if index % 2:
            tail = [rng.randrange(200, VOCAB_SIZE) for _ in range(3)]
            bad = [min(POISON)] if index % 10 == 1 else []
            requests[index] = replace(request, prompt=np.array([*stem, *bad, *tail], np.int32))
    for request in requests:
        driver.add_request(request)
    outputs = {output.req_id: output for output in driver.run()}
    got = {r.id: (outputs[r.id].token_ids, outputs[r.id].finish_reason) for r in requests}
    assert got == {r.id: until_poison(r) for r in requests}
    assert driver.num_failures == 0
    failed = [output for output in outputs.values() if output.finish_reason == "error"]
    assert failed and all("is NaN or infinite" in output.error for output in failed)
    assert not any(output.error for output in outputs.values() if output not in failed)
    assert sum(output.num_cached_tokens for output in outputs.values()) > 0
    assert driver.scheduler.num_free_blocks == num_blocks - 1


def test_blocks_of_a_failed_request_are_not_shared(fakes, connect):
    daemons = fakes(1)
    daemons.daemons[0].poison = POISON
    group = connect(daemons, 1)
    group.attach()
    group.prepare(worker_config(1, max_model_len=128), num_gpu_blocks=64)
    driver = Driver(group, Scheduler(make_limits()))
    stem = list(range(200, 217))

    def run(req_id: str, prompt: list[int]):
        driver.add_request(
            GenerationRequest(
                req_id,
                np.array(prompt, np.int32),
                max_tokens=4,
                sampling=SamplingParams(ignore_eos=True),
            )
        )
        return next(iter(driver.run()))

    assert run("bad", [*stem, min(POISON), 300]).finish_reason == "error"
    first, second = run("first", [*stem, 301]), run("second", [*stem, 301])
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
    assert first.token_ids == second.token_ids == reference_tokens([*stem, 301], 4, frozenset())


class Model:
    """Runs a scheduler without any transport, and checks its rules at each step."""

    def __init__(self, limits: SchedulerLimits, latency: int) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits)
        self.latency = latency
        self.rows: dict[str, dict] = {}
        self.in_flight: deque = deque()
        self.kinds: list[tuple[int, int]] = []
        self.checkpoints: dict[int, list[int]] = {}
        """Tokens of the state that each block has."""
        self.num_hits = 0

    def check_and_run(self, output) -> StepResult:
        limits = self.limits
        for req_id in (*output.finished_req_ids, *output.preempted_req_ids):
            del self.rows[req_id]
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.rows
            self.check_start(new)
            self.rows[new.req_id] = {
                "tokens": new.token_ids.tolist(),
                "computed": new.num_computed_tokens,
                "blocks": list(new.block_ids),
                "seed": SamplingParams.of(new.extensions).seed or 0,
            }
        assert len(self.rows) <= limits.max_num_seqs
        for req_id, blocks in output.new_block_ids.items():
            self.rows[req_id]["blocks"] += blocks
        assert output.total_num_scheduled_tokens <= limits.max_num_batched_tokens
        counts = {**dict.fromkeys(output.decode_req_ids, 1), **output.num_scheduled_tokens}
        assert len(counts) == len(output.decode_req_ids) + len(output.num_scheduled_tokens)
        sampled = {}
        for req_id, count in counts.items():
            row = self.rows[req_id]
            assert 1 <= count <= len(row["tokens"]) - row["computed"]
            self.keep_checkpoint(row, count)
            row["computed"] += count
            assert row["computed"] <= len(row["blocks"]) * limits.block_size
            least = 0 if limits.groups else 1  # 0: a window has left it behind
            assert all(least <= block < limits.num_blocks for block in row["blocks"])
            if row["computed"] == len(row["tokens"]):
                row["tokens"].append(next_token(row["tokens"], row["seed"]))
                assert len(row["tokens"]) <= limits.max_model_len
                sampled[req_id] = row["tokens"][-1]
        written = [
            block
            for row in self.rows.values()
            for block in row["blocks"][row["computed"] // limits.block_size :]
        ]
        assert len(written) == len(set(written)), "a block that is not full has two owners"
        self.kinds.append((len(output.decode_req_ids), len(counts)))
        return StepResult(list(sampled), list(sampled.values()))

    def check_start(self, new):
        """A request of a model with states begins at position 0, or with the state that the block
        has which ends there."""
        begin, limits = new.num_computed_tokens, self.limits
        if limits.keeps_state and begin:
            border = new.block_ids[begin // limits.block_size - 1]
            assert begin % limits.border_tokens == border % limits.checkpoint_blocks == 0
            assert self.checkpoints[border] == new.token_ids[:begin].tolist()
            self.num_hits += 1

    def keep_checkpoint(self, row, count):
        limits = self.limits
        if not limits.border_tokens:
            return
        begin, end = row["computed"], row["computed"] + count
        assert begin // limits.border_tokens == (end - 1) // limits.border_tokens
        border = row["blocks"][end // limits.block_size - 1]
        if end % limits.border_tokens == border % limits.checkpoint_blocks == 0:
            self.checkpoints[border] = row["tokens"][:end]

    def run(self, requests) -> dict:
        outputs = {}
        for request in requests:
            self.scheduler.add_request(request)
        while self.scheduler.has_unfinished_requests() or self.in_flight:
            output = None
            if len(self.in_flight) < self.latency:
                output = self.scheduler.schedule()
            if output is not None:
                recent = [set(o.decode_req_ids) for o, _ in self.in_flight]
                recent = recent[max(0, len(recent) - self.limits.pipeline_parallel_size + 1) :]
                # Nobody is computed ahead while there is a prompt or somebody else to compute.
                repeated = not all(seen.isdisjoint(output.decode_req_ids) for seen in recent)
                assert not (repeated and output.num_scheduled_tokens)
                self.in_flight.append((output, self.check_and_run(output)))
                continue
            for done in self.scheduler.update_from_output(*self.in_flight.popleft()):
                outputs[done.req_id] = done
        return outputs


@pytest.mark.parametrize("seed", seeds(4, of=12))
def test_rules_hold_under_random_load(seed):
    rng = random.Random(seed)
    pp = rng.choice([1, 2, 3])
    limits = make_limits(
        max_num_seqs=rng.choice([1, 3, 8]),
        max_num_batched_tokens=rng.choice([4, 16, 64]),
        num_blocks=rng.choice([33, 40, 100]),
        pipeline_parallel_size=pp,
        enable_prefix_caching=rng.random() < 0.8,
        keeps_state=rng.random() < 0.2,
    )
    model = Model(limits, latency=rng.randrange(1, pp + 2))
    requests = random_requests(rng, 30)
    outputs = model.run(requests)
    assert {r.id: outputs[r.id].token_ids for r in requests} == {
        r.id: expected(r, limits.max_model_len) for r in requests
    }
    assert model.scheduler.num_free_blocks == limits.num_blocks - 1


@pytest.mark.parametrize("seed", seeds(4, of=12))
def test_states_are_those_of_checkpoints_under_random_load(seed):
    """Also when requests are preempted, and when the blocks with checkpoints are used up."""
    rng = random.Random(1000 + seed)
    pp = rng.choice([1, 2])
    limits = make_limits(
        max_num_batched_tokens=rng.choice([16, 64]),
        num_blocks=rng.choice([34, 50, 100]),
        pipeline_parallel_size=pp,
        keeps_state=True,
        checkpoint_blocks=rng.choice([1, 2, 3]),
        groups=rng.choice([(), (BlockGroup(4, 40),)]),
    )
    model = Model(limits, latency=rng.randrange(1, pp + 2))
    requests = random_requests(rng, 40)
    outputs = model.run(requests)
    assert {r.id: outputs[r.id].token_ids for r in requests} == {
        r.id: expected(r) for r in requests
    }
    assert model.num_hits and model.scheduler.num_free_blocks == limits.num_blocks - 1


def test_a_hit_begins_at_the_last_checkpoint_and_computes_the_rest():
    limits = make_limits(keeps_state=True, checkpoint_blocks=2, max_num_batched_tokens=64)
    model = Model(limits, latency=1)
    prompt = np.arange(24, dtype=np.int32)
    model.run([GenerationRequest(id="a", prompt=prompt, max_tokens=1)])
    model.scheduler.add_request(GenerationRequest(id="b", prompt=prompt, max_tokens=1))
    step = model.scheduler.schedule()
    (new,) = step.scheduled_new_reqs
    assert (new.num_computed_tokens, step.num_scheduled_tokens) == (16, {"b": 8})
    assert new.block_ids[1] % 2 == new.block_ids[3] % 2 == 0


def test_a_border_without_a_checkpoint_is_no_start_until_an_equal_block_has_one():
    """Of eleven blocks, short requests take all six without checkpoints, and the five with. Six of
    them end, and the border of the next request gets one of their blocks."""
    limits = make_limits(keeps_state=True, checkpoint_blocks=2, num_blocks=12, max_num_seqs=12)
    model, prompt = Model(limits, latency=1), np.arange(100, 109, dtype=np.int32)
    keeps_on = SamplingParams(ignore_eos=True)
    short = [
        GenerationRequest(str(i), np.array([i, i], np.int32), 1 + (i >= 6), keeps_on)
        for i in range(11)
    ]
    first, second, third = (GenerationRequest(name, prompt, max_tokens=1) for name in "abc")
    outputs = model.run([*short, first])
    assert len(outputs) == 12 and not model.checkpoints
    assert model.run([second])["b"].num_cached_tokens == 0
    assert model.run([third])["c"].num_cached_tokens == 8


def test_prefix_hits_leave_one_token_to_compute():
    model = Model(make_limits(), latency=1)
    prompt = np.arange(16, dtype=np.int32)
    first = GenerationRequest(id="a", prompt=prompt, max_tokens=1)
    again = GenerationRequest(id="b", prompt=prompt, max_tokens=1)
    model.run([first])
    assert model.run([again])["b"].num_cached_tokens == 12


def test_requests_whose_layers_keep_states_share_no_prefix_and_do_not_jump():
    model = Model(make_limits(keeps_state=True), latency=1)
    prompt = np.arange(16, dtype=np.int32)
    model.run([GenerationRequest(id="a", prompt=prompt, max_tokens=1)])
    scheduler = model.scheduler
    scheduler.add_request(GenerationRequest(id="b", prompt=prompt, max_tokens=4))
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert new.num_computed_tokens == 0
    assert scheduler.jump_forward("b", [7, 8, 9]) == NO_JUMP


def test_the_pipeline_is_filled_with_different_requests():
    model = Model(make_limits(pipeline_parallel_size=2, max_num_batched_tokens=64), latency=3)
    requests = [
        GenerationRequest(
            id=str(i),
            prompt=np.arange(4, dtype=np.int32) + i,
            max_tokens=20,
            sampling=SamplingParams(ignore_eos=True),
        )
        for i in range(8)
    ]
    model.run(requests)
    assert model.kinds.count((4, 4)) >= 30


def decoding(pp, num_requests):
    """A scheduler whose requests have their first tokens."""
    limits = make_limits(pipeline_parallel_size=pp, num_blocks=200, max_num_batched_tokens=64)
    scheduler = Scheduler(limits)
    for i in range(num_requests):
        scheduler.add_request(
            GenerationRequest(
                id=str(i),
                prompt=np.arange(5, dtype=np.int32) + i,
                max_tokens=40,
                sampling=SamplingParams(ignore_eos=True),
            )
        )
    output = scheduler.schedule()
    ids = list(output.num_scheduled_tokens)
    assert len(ids) == num_requests
    scheduler.update_from_output(output, StepResult(ids, [7] * num_requests))
    return scheduler


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_lone_request_is_computed_ahead_in_every_stage(pp):
    scheduler = decoding(pp, 1)
    steps = [scheduler.schedule().decode_req_ids for _ in range(pp + 1)]
    assert steps == [("0",)] * (pp + 1)


def test_nobody_is_computed_ahead_while_another_can_be_computed():
    scheduler = decoding(3, 2)
    steps = [scheduler.schedule().decode_req_ids for _ in range(6)]
    assert steps in ([("0",), ("1",)] * 3, [("1",), ("0",)] * 3)


def test_prompts_of_a_pipeline_come_in_short_steps_unless_one_is_long():
    limits = make_limits(
        pipeline_parallel_size=2,
        max_num_batched_tokens=8192,
        max_num_seqs=64,
        max_model_len=8192,
        num_blocks=20_000,
    )
    scheduler = Scheduler(limits)
    lengths = [900, 900, 900, 5000, 100, 2048, 2047, 1]
    for i, length in enumerate(lengths):
        prompt = np.full(length, i, np.int32)
        scheduler.add_request(GenerationRequest(id=str(i), prompt=prompt, max_tokens=9))
    steps = [scheduler.schedule() for _ in range(6)]
    prompts = [[lengths[int(new.req_id)] for new in s.scheduled_new_reqs] for s in steps]
    # A quarter of what waits, but at least 2048 tokens: 2974, 2524, 2299, 1049, ...
    assert prompts == [[900, 900, 900], [5000], [100], [2048], [2047, 1], []]


def chunks_of(lengths: list[int], num_steps: int) -> list[list[int]]:
    """The prompt tokens that each step of a budget of 32 computes, by request."""
    scheduler = Scheduler(make_limits())
    for i, length in enumerate(lengths):
        prompt = np.full(length, i, np.int32)
        scheduler.add_request(GenerationRequest(id=str(i), prompt=prompt, max_tokens=9))
    steps = [scheduler.schedule() for _ in range(num_steps)]
    return [list(step.num_scheduled_tokens.values()) for step in steps]


def test_a_nearly_full_step_begins_no_prompt_that_it_would_cut():
    assert chunks_of([28, 28, 28], 3) == [[28], [28], [28]]
    # From the third step on, decodes take some of the budget: the first prompt is cut in any case.
    assert chunks_of([30, 30, 30, 30], 5) == [[30], [30], [30], [29], [1]]
    assert chunks_of([60, 60], 4) == [[32], [28], [31], [29]]


def test_prompts_are_cut_where_much_is_left_and_fill_up_steps_where_they_fit():
    assert chunks_of([24, 24, 20], 3) == [[24, 8], [16, 15], [5]]
    assert chunks_of([28, 4, 20], 2) == [[28, 4], [20]]
    assert chunks_of([40], 2) == [[32], [8]]


def test_the_decode_tuple_is_reused_while_its_set_stays():
    scheduler = Scheduler(make_limits())
    for i in range(3):
        scheduler.add_request(
            GenerationRequest(
                id=str(i),
                prompt=np.arange(5, dtype=np.int32),
                max_tokens=30,
                sampling=SamplingParams(ignore_eos=True),
            )
        )
    outputs = [scheduler.schedule() for _ in range(10)]
    assert len({id(output.decode_req_ids) for output in outputs[1:]}) == 1


def test_requests_that_can_never_be_served_are_refused():
    scheduler = Scheduler(make_limits(num_blocks=5))
    prompt = np.zeros(16, np.int32)
    with pytest.raises(RequestError, match="blocks"):
        scheduler.add_request(GenerationRequest(id="a", prompt=prompt, max_tokens=5))
    with pytest.raises(RequestError, match="max_model_len"):
        scheduler.add_request(GenerationRequest(id="a", prompt=np.zeros(128, np.int32)))
    scheduler.add_request(GenerationRequest(id="a", prompt=prompt, max_tokens=1))
    with pytest.raises(RequestError, match="in use"):
        scheduler.add_request(GenerationRequest(id="a", prompt=prompt, max_tokens=1))


def test_aborted_requests_leave_nothing():
    scheduler = Scheduler(make_limits())
    for i in range(3):
        scheduler.add_request(GenerationRequest(id=str(i), prompt=np.arange(8, dtype=np.int32)))
    output = scheduler.schedule()
    for i in range(4):
        scheduler.abort_request(str(i))
    assert not scheduler.has_unfinished_requests()
    assert scheduler.update_from_output(output, StepResult(["0", "1", "2"], [1, 2, 3])) == []
    assert sorted(scheduler.schedule().finished_req_ids) == ["0", "1", "2"]
    assert scheduler.num_free_blocks == 63


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temperature": 9e-6}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"min_tokens": 99}, "min_tokens"),
        ({"stop_token_ids": (VOCAB_SIZE,)}, "stop_token_ids"),
        ({"prompt": np.array([1, VOCAB_SIZE], np.int32)}, "prompt"),
        ({"prompt": np.array([3, -1, 3], np.int32)}, "prompt"),
        ({"prompt": np.array([], np.int32)}, "prompt"),
    ],
)
def test_a_request_that_would_fail_its_whole_batch_is_refused(fields, field):
    scheduler = Scheduler(make_limits(vocab_size=VOCAB_SIZE))
    defaults = {"id": "a", "prompt": np.arange(3, dtype=np.int32)}
    with pytest.raises(RequestError) as caught:
        scheduler.add_request(flat_request(**{**defaults, **fields}))
    assert caught.value.field == path_of(field)
    assert not scheduler.has_unfinished_requests()


def test_stop_tokens_of_the_model_that_it_cannot_produce_are_ignored():
    scheduler = Scheduler(make_limits(vocab_size=VOCAB_SIZE, eos_token_ids=(EOS, VOCAB_SIZE)))
    prompt = np.arange(3, dtype=np.int32)
    scheduler.add_request(
        GenerationRequest(id="a", prompt=prompt, sampling=SamplingParams(temperature=1e-5))
    )
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert SamplingParams.of(new.extensions).stop_token_ids == (EOS,)


@pytest.mark.parametrize(
    ("features", "field"),
    [
        (5, "features"),
        ([], "features"),
        (("x",), "extensions"),
        ((GrammarMasks(slots=b"", indices=b""),), "extensions"),
        ((LoraRequest(name="a", lora_id=object(), version=1),), "LoraRequest.lora_id"),
        ((LoraRequest(name=math.nan, lora_id=1, version=1),), "LoraRequest.name"),
        ((LoraRequest(name="a", lora_id=1, version=1),) * 2, "extensions"),
        ((StopTokens(token_ids=(5,)),), "features"),  # beside those of the model
    ],
)
def test_features_that_no_daemon_would_take_are_refused_at_once(features, field):
    scheduler = Scheduler(make_limits(vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,)))
    request = GenerationRequest(id="a", prompt=np.arange(3, dtype=np.int32), features=features)
    with pytest.raises(RequestError) as refused:
        scheduler.add_request(request)
    assert refused.value.field == field
    assert not scheduler.has_unfinished_requests()


def test_what_no_step_can_admit_is_refused():
    scheduler = Scheduler(make_limits(max_model_len=10**7, num_blocks=4000, block_size=1024))
    long = np.zeros(MAX_ADMITTED_TOKENS + 1, np.int32)
    with pytest.raises(RequestError, match="admit") as caught:
        scheduler.add_request(GenerationRequest(id="a", prompt=long))
    assert caught.value.field == "prompt"
    with pytest.raises(RequestError, match="admit") as caught:
        scheduler.add_request(GenerationRequest(id="a", prompt=long[:-9], max_tokens=11))
    assert caught.value.field == "max_tokens"


def test_requests_get_a_seed_where_they_need_one():
    class Seeds(Scheduler):
        def add_request(self, request) -> None:
            seeds.append(request.sampling.seed)

    seeds = []
    driver = Driver(None, Seeds(make_limits()))
    prompt = np.arange(3, dtype=np.int32)
    wanted = ({}, {"seed": 5, "temperature": 1.0}, *[{"temperature": 1.0}] * 20)
    for number, fields in enumerate(wanted):
        driver.add_request(flat_request(id=str(number), prompt=prompt, **fields))
    assert seeds[:2] == [None, 5]
    assert len(set(seeds[2:])) == 20 and None not in seeds[2:]
    unseeded = GenerationRequest(id="a", prompt=prompt, sampling=SamplingParams(temperature=1.0))
    with pytest.raises(RequestError, match="seeded"):
        unseeded.extensions(())
    scheduler = Scheduler(make_limits())
    for name in "ab":
        scheduler.add_request(replace(unseeded, id=name))
    one, two = scheduler.schedule().scheduled_new_reqs
    assert one.extensions != two.extensions


def test_a_scheduler_that_is_stuck_ends_the_driver(fakes, connect):
    class Stuck(Scheduler):
        def schedule(self):
            return None

    group = connect(fakes(1))
    driver = Driver(group, Stuck(make_limits()))
    assert driver.step() == []
    driver.add_request(GenerationRequest(id="a", prompt=np.arange(3, dtype=np.int32)))
    with pytest.raises(SchedulerStalled):
        list(driver.run())


def test_a_driver_s_history_is_bounded(fakes, connect):
    config = worker_config(max_model_len=128)
    group = connect(fakes(1))
    group.attach()
    limits = scheduler_limits(group.prepare(config), config)
    assert (limits.vocab_size, limits.max_model_len, limits.max_num_seqs) == (VOCAB_SIZE, 128, 8)
    for max_history, kept in ((3, 3), (None, 6)):
        driver = Driver(group, Scheduler(limits), max_history=max_history)
        for request in random_requests(random.Random(1), 6):
            driver.add_request(request)
        finished = [output.req_id for output in driver.run()]
        assert list(driver.timings) == finished[-kept:]
        assert (len(driver.records) == 3) == (max_history == 3)


def test_blocks_of_requests_that_go_on_are_found_again_after_a_failure():
    scheduler = Scheduler(make_limits())
    prompt = np.arange(16, dtype=np.int32)
    scheduler.add_request(
        GenerationRequest(id="on", prompt=prompt, sampling=SamplingParams(ignore_eos=True))
    )
    scheduler.update_from_output(scheduler.schedule(), StepResult(["on"], [9]))
    scheduler.step_failed([scheduler.schedule()], frozenset())
    for _ in range(4):
        output = scheduler.schedule()
        scheduler.update_from_output(output, StepResult(output.decode_req_ids, [9]))
    scheduler.add_request(GenerationRequest(id="new", prompt=prompt))
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert new.num_computed_tokens == 12


@pytest.mark.parametrize("then", ["ended before", "aborted after"])
def test_a_step_after_a_failure_lets_workers_drop_the_rows_of_requests_that_have_ended(then):
    scheduler = Scheduler(make_limits())
    scheduler.add_request(GenerationRequest(id="a", prompt=np.arange(6, dtype=np.int32)))
    first = scheduler.schedule()
    if then == "ended before":
        scheduler.update_from_output(first, StepResult(["a"], [9]))
        scheduler.abort_request("a")
        last = scheduler.schedule()
        assert [*last.finished_req_ids] == ["a"]
        scheduler.step_failed([last], frozenset())
    else:
        scheduler.step_failed([first], frozenset({"a"}))
        scheduler.abort_request("a")
    output = scheduler.schedule()
    assert output is not None and not output.num_scheduled_tokens
    scheduler.update_from_output(output, StepResult([], []))
    assert scheduler.schedule() is None

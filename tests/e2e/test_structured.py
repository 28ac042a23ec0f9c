"""Structured output on real daemons: every text is what its grammar allows, by judges that are none
of ours, and no accident changes a token. test_mixed_features.py has them beside other requests."""

import json
import os
import random
import time
from contextlib import closing

import numpy as np
import pytest

from rpc_schema.config import SpeculativeConfig
from rpc_schema.step import NO_TOKEN
from tests.support.doomed_driver import Death
from tests.support.exhaustive import exhaustively
from tests.support.faulty_daemon import Fault, FaultyDaemons
from tests.support.killed_driver import DriverNursery, Plan, begin
from tests.support.serving import (
    LONG_LEASE,
    STEP_DEADLINE_MS,
    connect,
    scheduler_limits,
    worker_config,
)
from tests.support.structured import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    forced_schema,
    make_tokenizer,
    random_case,
    regex_case,
    schema_case,
)
from worker_client.driver import Driver
from worker_client.driver_parts.registry import DriverOptions
from worker_client.inputs.request_parser import RequestParser
from worker_client.scheduler import Scheduler
from worker_client.structured.grammars import GrammarLimits, Grammars
from worker_client.structured.matchers import GrammarMatcher
from worker_client.worker_group import WorkerGroup

NUM_CASES = int(os.environ.get("STRUCTURED_CASES", "60"))
"""Random grammars that are served; a run by hand takes 2,000."""
MAX_TOKENS = 120


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint(vocab_size=VOCAB_SIZE, eos_token_id=EOS_TOKEN_ID)


@pytest.fixture(scope="module")
def tokenizer(model):
    return make_tokenizer(model.path)


@pytest.fixture(scope="module")
def grammars(model, tokenizer):
    made = Grammars(model.path, VOCAB_SIZE, [EOS_TOKEN_ID])
    yield made
    made.close()


@pytest.fixture(scope="module")
def sampling(model, tokenizer):
    """Every token is sampled."""
    made = Grammars(model.path, VOCAB_SIZE, [EOS_TOKEN_ID], GrammarLimits(max_jump=0))
    yield made
    made.close()


def line(rng, name, options=None):
    """A request as an input line has it: greedy, or sampled by a seed."""
    fields = {
        "id": name,
        "prompt_token_ids": [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randint(1, 20))],
        "max_tokens": MAX_TOKENS if options else rng.randint(5, 30),
    }
    if rng.random() < 0.8:
        fields |= {"temperature": rng.choice([0.7, 1.0, 2.0]), "seed": rng.randrange(1 << 40)}
    return fields | ({"structured_outputs": options} if options else {})


def requests_of(lines):
    parser = RequestParser(None, seed=1)
    return [parser.from_fields(fields, index) for index, fields in enumerate(lines)]


def serve_all(group, loaded, grammars, lines, **limits):
    """Outputs by id, and the driver."""
    scheduler = Scheduler(scheduler_limits(group, loaded, **limits))
    driver = Driver(group, scheduler, options=DriverOptions(grammars))
    for request in requests_of(lines):
        driver.add_request(request)
    return {output.req_id: output for output in driver.run()}, driver


def text_of(tokenizer, output):
    assert output.token_ids[-1] == EOS_TOKEN_ID, output
    return tokenizer.decode(output.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("pp", [exhaustively(1), 2])
def test_texts_are_what_their_grammars_allow(serve, model, tokenizer, grammars, pp):
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    cases = {f"r{i}": random_case(rng) for i in range(NUM_CASES // (2 if pp == 2 else 1))}
    lines = [line(rng, name, case.options) for name, case in cases.items()]
    with serve(model.path, pp) as (group, loaded):
        outputs, _ = serve_all(group, loaded, grammars, lines)
    num_whole = 0
    for name, case in cases.items():
        output = outputs[name]
        assert output.finish_reason in ("stop", "length"), (seed, case.options, output)
        if output.finish_reason == "stop":
            num_whole += 1
            try:
                case.check(text_of(tokenizer, output))
            except Exception as error:
                raise AssertionError(
                    (seed, name, case.options, text_of(tokenizer, output))
                ) from error
    assert num_whole > 0.9 * len(cases), seed


def test_rows_without_a_mask_are_sampled_with_their_step(serve, model, grammars, monkeypatch):
    """Their tokens are in the step's reply; tokens of the other requests follow the masks."""
    rng = random.Random(5)
    lines = [line(rng, "masked", {"regex": "[ab]{40}"}), line(rng, "free")]
    seen = []
    with serve(model.path) as (group, loaded):
        take = group._steps.take_outcome

        def spy(reply, arrays, **kwargs):
            future = group._steps._futures.get(reply.seq)
            take(reply, arrays, **kwargs)
            if future is not None and future.value is not None and future.value.req_ids:
                seen.append((tuple(future.value.req_ids), future.step.is_later))

        monkeypatch.setattr(group._steps, "take_outcome", spy)
        outputs, _ = serve_all(group, loaded, grammars, lines)
    assert len(outputs["masked"].token_ids) == 41
    assert seen.count((("free",), False)) >= len(outputs["free"].token_ids) - 1
    assert seen.count((("masked",), True)) >= 39


@pytest.fixture(scope="module")
def nursery():
    nursery = DriverNursery()
    yield nursery
    nursery.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", ["none", "driver"])
@pytest.mark.parametrize("pp", [1, 2])
def test_killed_driver_costs_no_token(daemons, model, sampling, nursery, pp, method):
    """The next one has the grammars from the daemons, and its matchers from the tokens, some of
    which were not sampled, or were drafts."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    cases = [schema_case({"type": "array", "items": {"enum": [1, "two"]}, "minItems": 20})]
    cases += [regex_case("([ab]{3}-){12}"), random_case(rng)]
    cases += [schema_case(forced_schema(rng)) for _ in range(3)]
    lines = [line(rng, f"m{i}", case.options) for i, case in enumerate(cases)]
    lines += [line(rng, f"f{i}") for i in range(3)]
    drafts = SpeculativeConfig(method=method, num_speculative_tokens=3 if method != "none" else 0)
    config = worker_config(model.path, pp, step_deadline_ms=1000, speculative=drafts)
    plan = Plan(daemons.endpoints(pp), config, [json.dumps(fields) for fields in lines])
    with WorkerGroup(plan.endpoints, config.parallel, lease=LONG_LEASE) as group:
        group.attach(force=True)
        loaded = group.prepare(config, num_gpu_blocks=plan.num_gpu_blocks, reload=True)
        outputs, _ = serve_all(group, loaded, sampling, lines)
        expected = {name: output.token_ids for name, output in outputs.items()}
    ranks = rng.sample(range(pp), rng.randint(0, pp))
    nursery.live(Plan(**{**_fields(plan), "death": Death(rng.randint(4, 9), ranks, True)}))
    with WorkerGroup(plan.endpoints, config.parallel, lease=LONG_LEASE) as group:
        group.attach(keep_requests=True, force=True)
        loaded = group.prepare(config, num_gpu_blocks=plan.num_gpu_blocks)
        serving = begin(group, loaded, Plan(**{**_fields(plan), "adopt": True}))
        assert serving.adopted
        rest = {o.req_id: o.token_ids for o in [*serving.done, *serving.driver.run()]}
    assert rest == expected, seed


def test_a_driver_that_ends_with_late_masks_costs_no_token(daemons, model, grammars, monkeypatch):
    """Steps in flight sample nothing for requests whose masks are late: the next driver finds only
    tokens that their grammars allow, and makes the same tokens from these."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    lines = [line(rng, f"m{i}", {"regex": "[ab]{40}"}) for i in range(3)]
    config = worker_config(model.path)
    endpoints, is_late = daemons.endpoints(1), False
    is_known = GrammarMatcher.is_ready.fget
    monkeypatch.setattr(
        GrammarMatcher, "is_ready", property(lambda own: not is_late and is_known(own))
    )
    monkeypatch.setattr(GrammarMatcher, "is_overdue", True)
    with WorkerGroup(endpoints, config.parallel, lease=LONG_LEASE) as group:
        group.attach(force=True)
        loaded = group.prepare(config, num_gpu_blocks=200, reload=True)
        outputs, _ = serve_all(group, loaded, grammars, lines)
        expected = {name: output.token_ids for name, output in outputs.items()}
        driver, _ = driver_of(group, loaded, grammars)
        for request in requests_of(lines):
            driver.add_request(request)
        for _ in range(rng.randint(2, 8)):
            driver.step()
        is_late = True
        while driver.num_in_flight:
            assert driver.step() == []
        group.detach()
        is_late = False
    with WorkerGroup(endpoints, config.parallel, lease=LONG_LEASE) as group:
        group.attach(keep_requests=True)
        loaded = group.prepare(config, num_gpu_blocks=200)
        driver, scheduler = driver_of(group, loaded, grammars)
        adopted = group.adopt_requests()
        generated = {each.req_id: [*each.token_ids[each.num_prompt_tokens :]] for each in adopted}
        kept, lost = driver.claim(adopted)
        assert (scheduler.adopt_requests(kept), lost) == ([], [])
        assert {output.req_id: output.token_ids for output in driver.run()} == expected, seed
    assert all(NO_TOKEN in tokens for tokens in generated.values()), (seed, generated)


def driver_of(group, loaded, grammars):
    """A driver, and its scheduler."""
    scheduler = Scheduler(scheduler_limits(group, loaded))
    return Driver(group, scheduler, options=DriverOptions(grammars)), scheduler


def _fields(plan):
    return {name: getattr(plan, name) for name in plan.__struct_fields__}


@pytest.mark.exhaustive
def test_failed_steps_cost_no_token(model, grammars, sampling, model_root, tmp_path):
    """Also those that have deferred rows, and the sampling of these."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    lines = [line(rng, f"m{i}", {"regex": "([ab]{3}-){12}"}) for i in range(2)]
    lines += [line(rng, f"j{i}", schema_case(forced_schema(rng)).options) for i in range(3)]
    lines += [{**line(rng, f"f{i}"), "max_tokens": 30} for i in range(2)]
    with FaultyDaemons(2, model_root, tmp_path) as daemons:
        for pp in (1, 2):
            endpoints = daemons.endpoints[:pp]
            # Two ranks may wait for each other until the deadline, one for nobody.
            deadline_ms = 3000 if pp == 2 else STEP_DEADLINE_MS
            config = worker_config(model.path, pp, step_deadline_ms=deadline_ms)
            with connect(endpoints, config) as (group, loaded):
                expected, driver = serve_all(group, loaded, sampling, lines)
                assert driver.num_failures == 0
                for where in ("forward", "sample_tokens")[: 3 - pp]:
                    fault = Fault(where, "raise", calls_before=rng.randint(3, 15))
                    daemons.faults[rng.randrange(pp)].put(fault)
                    outputs, driver = serve_all(group, loaded, grammars, lines)
                    assert driver.num_failures == 1, (seed, where)
                    for name, output in outputs.items():
                        assert output.token_ids == expected[name].token_ids, (seed, where, name)


def test_a_grammar_that_fails_ends_its_request_alone(serve, model, tokenizer):
    limits = GrammarLimits(step_max_items=12, max_grammar_size=2000)
    grammars = Grammars(model.path, VOCAB_SIZE, [EOS_TOKEN_ID], limits)
    rng = random.Random(7)
    many = " ".join(f'("{i}" [a-z] | "-")' for i in range(1500))
    ambiguous = 'root ::= "a" | "b" | root root | "ab" | "ba"'
    lines = [
        line(rng, "explodes", {"grammar": ambiguous}),
        line(rng, "good", {"regex": "[0-9]{5}"}),
        line(rng, "malformed", {"regex": "(a"}),
        line(rng, "huge", {"grammar": f"root ::= {many}"}),
        line(rng, "free"),
        {**line(rng, "no_end", {"choice": ["a"]}), "min_tokens": 9},
    ]
    with serve(model.path) as (group, loaded):
        outputs, _ = serve_all(group, loaded, grammars, lines)
    grammars.close()
    assert outputs["good"].finish_reason == "stop" and len(outputs["good"].token_ids) == 6
    assert outputs["free"].finish_reason == "length"
    assert "too complex" in outputs["explodes"].error
    assert "unclosed group" in outputs["malformed"].error
    assert "structured_outputs.grammar" in outputs["huge"].error
    assert "may sample" in outputs["no_end"].error
    failed = ("explodes", "malformed", "huge", "no_end")
    assert all(outputs[name].finish_reason == "error" for name in failed)
    assert NO_TOKEN not in outputs["no_end"].token_ids


def test_requests_go_on_beside_slow_grammars(serve, checkpoint):
    """With and without grammars, at a step's pace: they gain tokens while a mask takes its second,
    which would stop all of them if it were computed in the driver's process."""
    sizes = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_TOKEN_ID}
    model = checkpoint(**sizes, max_position_embeddings=4096)
    make_tokenizer(model.path)
    bomb = "(a{1000}){1000}"
    slow = [{"regex": f"x{{9}}{bomb}"}, {"regex": f"(a|y){bomb}"}, {"regex": bomb}]
    slow.append({"json": {"type": "integer", "multipleOf": 62615533}})
    limits = GrammarLimits(max_jump=0, compile_s=3.0)
    rng = random.Random(3)
    fields = {"max_tokens": 3000, "ignore_eos": True}
    healthy = [{**line(rng, f"h{i}", {"regex": "[ab]{4000}"}), **fields} for i in range(2)]
    healthy.append({**line(rng, "free"), **fields})
    with (
        serve(model.path, max_model_len=4096, num_gpu_blocks=4000) as (group, loaded),
        closing(Grammars(model.path, VOCAB_SIZE, [EOS_TOKEN_ID], limits)) as grammars,
    ):
        gaps = Gaps({fields["id"] for fields in healthy})
        scheduler = Scheduler(scheduler_limits(group, loaded))
        driver = Driver(group, scheduler, gaps, options=DriverOptions(grammars))
        lines = [*healthy, *(line(rng, f"s{i}", options) for i, options in enumerate(slow))]
        for request in requests_of(lines):
            driver.add_request(request)
        outputs = {}
        while not all(f"s{i}" in outputs for i in range(len(slow))):
            outputs.update((output.req_id, output) for output in driver.step())
        print("longest, p99 and median gap in ms:", gaps.summary())
        for i in range(len(slow)):
            assert outputs[f"s{i}"].finish_reason == "error", outputs[f"s{i}"]
            error = outputs[f"s{i}"].error
            assert "structured_outputs." in error or "in time" in error
        assert min(len(times) for times in gaps.times.values()) > 20
        for fields in healthy:
            driver.abort_request(fields["id"])
        assert not list(driver.run())


class Gaps:
    """Times at which requests get their tokens."""

    def __init__(self, req_ids):
        self.times = {req_id: [] for req_id in req_ids}

    def __call__(self, result):
        for req_id in self.times.keys() & set(result.req_ids):
            self.times[req_id].append(time.monotonic())

    def summary(self):
        """The longest gap, the 99th percentile and the median, and how many, by request."""
        found = {}
        for name, times in self.times.items():
            gaps = np.diff(times) * 1e3
            places = [round(float(each), 1) for each in np.percentile(gaps, [100, 99, 50])]
            found[name] = (*places, len(gaps))
        return found

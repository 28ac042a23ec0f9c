"""Jump forward over fake daemons, whose tokens depend on what their blocks hold: requests that gain
tokens without sampling them get the same ones in fewer steps, whatever fails meanwhile."""

import random
from collections import defaultdict
from dataclasses import replace
from itertools import takewhile

import pytest

from examples.static_batches import StaticBatches
from rpc_schema.errors import ErrorCode
from rpc_schema.step import NO_TOKEN
from tests.support.exhaustive import seeds
from tests.support.fake_daemon import Fault
from tests.support.flat_requests import changed
from tests.support.mock_schedulers import RandomScheduler
from tests.unit.client.test_driver import spoiling
from tests.unit.client.test_masked_steps import HandGrammars, driver_of, run_on, with_grammars
from tests.unit.client.test_scheduler import POISON, expected, random_requests, until_poison
from worker_client.parts.registry import may_jump
from worker_client.scheduler import NO_JUMP, Jump, Scheduler


class Heard:
    """What a driver says of each request, as it comes."""

    def __init__(self):
        self.tokens = defaultdict(list)

    def __call__(self, result):
        for req_id, token in zip(result.req_ids, result.token_ids, strict=True):
            self.tokens[req_id].append(token)


def serve(fakes, connect, requests, grammars, kind=Scheduler, pp=1, faults=(), **options):
    """Outputs by id, what was heard, and the driver."""
    heard = Heard()
    daemons, driver = driver_of(fakes, connect, grammars, kind, pp, on_result=heard, **options)
    for daemon in daemons.daemons:
        daemon.faults = [Fault(n, code=ErrorCode.CAPACITY) for n in faults]
    for request in requests:
        driver.add_request(request)
    outputs = run_on(driver)
    last = daemons.daemons[-1]
    if last.num_executes - 1 not in faults:  # no step follows one that fails while requests end
        assert not last.rows
    assert not last.deferred
    return outputs, heard.tokens, driver


def reasons(outputs):
    return {name: (output.token_ids, output.finish_reason) for name, output in outputs.items()}


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("trouble", ["none", "few blocks", "failures", "refusals", "both"])
def test_requests_that_jump_get_the_same_tokens_in_fewer_places_of_steps(
    fakes, connect, pp, trouble
):
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    requests = with_grammars(random_requests(rng, 14), rng, share=0.7)
    wanted = {request.id: expected(request) for request in requests}
    kind = spoiling(Scheduler) if trouble in ("refusals", "both") else Scheduler
    first = rng.randint(2, 8)
    faults = [first, first + 9, first + 18] if trouble in ("failures", "both") else []
    options = {"num_blocks": 34 if trouble == "few blocks" else None}
    runs = {}
    for jumps in (None, lambda: rng.choice([0, 0, 1, 2, 3, 5, 9, 40])):
        grammars = HandGrammars(wanted, jumps)
        runs[jumps is None] = serve(fakes, connect, requests, grammars, kind, pp, faults, **options)
    (without, _, slow), (outputs, heard, driver) = runs[True], runs[False]
    assert reasons(outputs) == reasons(without), seed
    for name, tokens in wanted.items():
        assert outputs[name].token_ids == tokens, (seed, name)
        assert heard[name][: len(tokens)] == tokens, (seed, name)
    if trouble == "none":
        places = [sum(record.num_requests for record in each.records) for each in (driver, slow)]
        assert places[0] < places[1], seed


@pytest.mark.parametrize("pp", [1, 2])
def test_forced_tokens_of_a_lone_request_cost_one_step_each_jump(fakes, connect, pp):
    """Also in a pipeline, where a further step of the request is decided before a jump is known."""
    (request,) = with_grammars(random_requests(random.Random(3), 1), random.Random(3), share=1)
    request = changed(request, max_tokens=61, ignore_eos=True, stop_token_ids=())
    wanted = {request.id: expected(request)}
    num_steps = {}
    for length in (0, 10):
        grammars = HandGrammars(wanted, lambda length=length: length)
        outputs, heard, driver = serve(fakes, connect, [request], grammars, pp=pp)
        assert outputs[request.id].token_ids == heard[request.id] == wanted[request.id]
        num_steps[length] = len(driver.records)
    assert num_steps[0] >= 61
    assert num_steps[10] <= {1: 20, 2: 24}[pp]


def test_a_scheduler_that_cannot_jump_is_not_asked(fakes, connect):
    rng = random.Random(8)
    requests = with_grammars(random_requests(rng, 6), rng, share=1)
    wanted = {request.id: expected(request) for request in requests}
    grammars = HandGrammars(wanted, lambda: 9)
    outputs, heard, _ = serve(fakes, connect, requests, grammars, StaticBatches)
    assert {name: output.token_ids for name, output in outputs.items()} == wanted
    assert all(heard[name][: len(tokens)] == tokens for name, tokens in wanted.items())


class JumpingRandomly(RandomScheduler):
    """Another scheduler with the optional method, by what docs/scheduler.md says alone."""

    def __init__(self, limits):
        super().__init__(limits, seed=1)
        self.void = defaultdict(int)
        self.again = set()
        self.num_jumps = 0

    def jump_forward(self, req_id, token_ids):
        mock = self.requests.get(req_id)
        if mock is None or self.void[req_id]:
            return NO_JUMP
        room = self.limit(mock) - 1 - len(mock.tokens)
        stops = mock.request.sampling.stop_ids(self.limits.eos_token_ids)
        taken = list(takewhile(lambda token: token not in stops, token_ids[:room]))
        in_flight = mock.num_tokens - len(mock.tokens)
        if len(taken) <= in_flight:
            return NO_JUMP
        self.num_jumps += 1
        mock.tokens += taken
        mock.num_tokens = len(mock.tokens)
        self.void[req_id] = in_flight
        if mock.running:
            self.again.add(req_id)
        return Jump(len(taken))

    def compose(self, counts, preempted):
        self.again.difference_update(preempted)
        again = [req_id for req_id in counts if req_id in self.again]
        self.again.difference_update(again)
        for req_id in again:
            self.requests[req_id].running = False  # admit it, with the blocks that it has
        output = super().compose(counts, preempted)
        return replace(output, preempted_req_ids=[*output.preempted_req_ids, *again])

    def update_from_output(self, output, result):
        repeated = {req_id for req_id in result.sampled if self.void[req_id]}
        for req_id in repeated:
            self.void[req_id] -= 1
        return super().update_from_output(output, result.without(repeated))

    def end(self, mock, reason):
        self.again.discard(mock.request.id)
        return super().end(mock, reason)

    def step_failed(self, outputs, lost_req_ids):
        self.again.difference_update(lost_req_ids)
        self.void.clear()
        super().step_failed(outputs, lost_req_ids)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("faults", [[], [4, 20, 40]])
def test_any_scheduler_can_jump(fakes, connect, pp, faults):
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    requests = with_grammars(random_requests(rng, 10), rng, share=0.8)
    wanted = {request.id: expected(request) for request in requests}
    grammars = HandGrammars(wanted, lambda: rng.choice([0, 2, 5, 9]))
    outputs, heard, driver = serve(fakes, connect, requests, grammars, JumpingRandomly, pp, faults)
    for name, tokens in wanted.items():
        assert outputs[name].token_ids == tokens, (seed, name)
        assert heard[name][: len(tokens)] == tokens, (seed, name)
    assert driver.scheduler.num_jumps > 0, seed


def test_a_request_jumps_only_if_its_output_stays_the_same(fakes, connect):
    rng = random.Random(3)
    (request,) = with_grammars(random_requests(rng, 1), rng, share=1)
    request = changed(request, max_tokens=20, ignore_eos=True, stop_token_ids=())
    for fields in (
        {"logprobs": 1},
        {"logprob_token_ids": (5,)},
        {"prompt_logprobs": 1},
        {"bad_words": ((5, 6),)},
        {"allowed_token_ids": (1, 2)},
        {"logits_processors": ("own",)},
    ):
        assert not may_jump(changed(request, **fields).extensions(()))
    fields = {
        "temperature": 1.0,
        "seed": 1,
        "min_tokens": 3,
        "presence_penalty": 1.0,
        "logit_bias": {4: 2.0},
    }
    assert may_jump(changed(request, **fields).extensions((7,)))
    asked = []

    class Spy(Scheduler):
        def jump_forward(self, req_id, token_ids):
            asked.append(req_id)
            return super().jump_forward(req_id, token_ids)

    requests = [changed(request, id="a", logprobs=1), replace(request, id="b")]
    requests = with_grammars(requests, rng, share=1)
    wanted = {each.id: expected(each) for each in requests}
    grammars = HandGrammars(wanted, lambda: 9)
    outputs, _, _ = serve(fakes, connect, requests, grammars, Spy)
    assert {name: output.token_ids for name, output in outputs.items()} == wanted
    assert set(asked) == {"b"}
    assert len(outputs["a"].logprobs) == 20


@pytest.mark.parametrize("pp", [1, 2])
def test_a_token_that_is_none_ends_a_request_where_it_would_without_a_jump(fakes, connect, pp):
    """A jump is taken while the token in flight is none, which is known later. A request keeps what
    it gained if it shares blocks, and is computed again by itself; or if none was in flight."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    requests = [
        changed(request, ignore_eos=True)
        for request in with_grammars(random_requests(rng, 20), rng, share=1)
        if POISON.isdisjoint(request.prompt.tolist())
    ]
    wanted = {request.id: expected(request) for request in requests}
    ends = {request.id: until_poison(request) for request in requests}
    grammars = HandGrammars(wanted)

    def forced(matcher):
        known = len(matcher.tokens)
        tokens, reason = ends[matcher.text]
        return wanted[matcher.text][known:] if reason == "error" and known == len(tokens) else []

    grammars.forced = forced
    daemons, driver = driver_of(fakes, connect, grammars, pp=pp)
    for daemon in daemons.daemons:
        daemon.poison = POISON
    for request in requests:
        driver.add_request(request)
    outputs = run_on(driver)
    for name, (tokens, reason) in ends.items():
        output = outputs[name]
        assert output.finish_reason == reason, (seed, name)
        assert output.token_ids[: len(tokens)] == tokens, (seed, name)
        if pp == 1 and not output.num_cached_tokens:
            assert len(output.token_ids) == len(tokens), (seed, name)
        assert NO_TOKEN not in output.token_ids


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("loses_rows", [False, True])
def test_requests_that_have_jumped_begin_again_when_prefixes_are_forgotten(
    fakes, connect, pp, loses_rows
):
    """If the workers still have their rows, the next step drops those before it admits them."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    requests = with_grammars(random_requests(rng, 12), rng, share=0.8)
    wanted = {request.id: expected(request) for request in requests}
    grammars = HandGrammars(wanted, lambda: rng.choice([0, 5, 9, 40]))
    daemons, driver = driver_of(fakes, connect, grammars, pp=pp)
    for request in requests:
        driver.add_request(request)
    outputs, num_steps = {}, 0
    while driver.busy:
        outputs.update((output.req_id, output.token_ids) for output in driver.step())
        num_steps += 1
        if loses_rows and num_steps % 5:
            continue
        if loses_rows:
            driver.group.relink()
        driver.scheduler.forget_prefixes()
    assert not list(driver.run())  # sends the last finished ids
    assert outputs == wanted, seed
    if not loses_rows:
        assert driver.num_failures == 0, seed
        assert not daemons.daemons[-1].rows, seed


@pytest.mark.parametrize("seed", seeds(3, of=20))
def test_requests_that_are_given_up_go_on_where_they_were(fakes, connect, seed):
    """Again and again, under other names: nobody sees where."""
    rng = random.Random(seed)
    requests = with_grammars(random_requests(rng, 10), rng, share=0.7)
    wanted = {request.id: expected(request) for request in requests}
    grammars = HandGrammars(wanted, lambda: rng.choice([0, 0, 1, 2, 3, 5, 9, 40]))
    _, driver = driver_of(fakes, connect, grammars)
    present, ended = {request.id: request for request in requests}, {}
    for _ in range(8):
        for request in present.values():
            driver.add_request(request)
        for _ in range(rng.randint(0, 12)):
            if driver.busy:
                ended |= {output.req_id: output for output in driver.step()}
        given_up = driver.give_up_requests()
        assert not driver.scheduler.has_unfinished_requests()
        ended |= {output.req_id: output for output in driver.take_ended()}
        assert given_up.keys() == present.keys() - ended.keys()
        present = {
            f"{name}+": replace(
                present[name], id=f"{name}+", continues=each.output or present[name].continues
            )
            for name, each in given_up.items()
        }
        assert all(each.output is None or each.output.token_ids for each in given_up.values())
    for request in present.values():
        driver.add_request(request)
    ended |= run_on(driver)
    outputs = {name.rstrip("+"): output for name, output in ended.items()}
    assert {name: output.token_ids for name, output in outputs.items()} == wanted
    for output in ended.values():
        assert sum(run.num_tokens for run in output.weights_versions) == len(output.token_ids)

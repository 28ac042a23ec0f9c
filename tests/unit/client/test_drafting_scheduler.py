"""The reference scheduler with drafts, over a daemon that verifies them: requests have exactly the
tokens that they have without, whatever is accepted, under limits, stops, preemption, aborts,
failures, adoption and shared prefixes."""

import dataclasses
import itertools
import random
from collections import deque

import msgspec
import numpy as np
import pytest

from rpc_schema.identity import ContentIdentity
from rpc_schema.kv_cache import BlockGroup
from tests.support.drafting_daemon import DraftingDaemon
from tests.support.exhaustive import seeds
from tests.support.fake_daemon import EOS, VOCAB_SIZE, reference_tokens
from worker_client.group.adoption import AdoptedRequest
from worker_client.group.loras import GroupAdapter
from worker_client.inputs.grammar_options import read_structured_output
from worker_client.requests import GenerationRequest, SamplingParams, with_adapter
from worker_client.scheduler import Scheduler, SchedulerLimits
from worker_client.scheduler.admissions import admit
from worker_client.scheduler.drafting.expected_drafts import ExpectedDrafts
from worker_client.scheduler_output import DraftOutcome, StepResult
from worker_client.steps.encoded_step import decode_reply
from worker_client.steps.slots import SlotTable
from worker_client.steps.step_checks import GroupLimits

K = 4


def make_limits(**fields) -> SchedulerLimits:
    defaults = {
        "max_num_seqs": 6,
        "max_num_batched_tokens": 40,
        "max_model_len": 96,
        "num_blocks": 200,
        "block_size": 4,
        "eos_token_ids": (EOS,),
        "num_speculative_tokens": K,
    }
    return SchedulerLimits(**{**defaults, **fields})


class DraftingGroup:
    """A scheduler, a table of slots and a daemon, with steps in flight between them."""

    def __init__(self, rng, accuracy, limits, clock=lambda: 0.0, **daemon):
        """With a clock that stands still, requests have as many drafts as there is room for."""
        self.rng, self.limits = rng, limits
        self.bounds = GroupLimits(
            limits.max_num_batched_tokens,
            limits.max_model_len,
            VOCAB_SIZE,
            limits.num_blocks,
            limits.block_size,
            num_speculative_tokens=limits.num_speculative_tokens,
        )
        self.table = SlotTable(limits.max_num_seqs, self.bounds)
        self.daemon = DraftingDaemon(
            rng,
            accuracy,
            limits.num_speculative_tokens,
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            max_model_len=limits.max_model_len,
            **daemon,
        )
        self.scheduler = Scheduler(limits, clock=clock)
        self.outputs = {}
        self.in_flight = deque()
        self.seq = 0
        self.most = limits.pipeline_parallel_size + 1

    def send(self):
        """Send steps until the scheduler has none, or as many as may be are in flight."""
        while len(self.in_flight) < self.most:
            output = self.scheduler.schedule()
            if output is None:
                return
            self.seq += 1
            encoded = self.table.encode(output, epoch=1, link=1, seq=self.seq)
            self.in_flight.append((output, encoded))

    def take(self) -> StepResult:
        output, encoded = self.in_flight.popleft()
        result = decode_reply(encoded, *self.daemon.apply(encoded.frames))
        self.table.take_outcome(encoded.seq, result)
        self.keep(self.scheduler.update_from_output(output, result))
        return result

    def keep(self, outputs):
        for output in outputs:
            assert output.req_id not in self.outputs
            self.outputs[output.req_id] = output

    def fail(self):
        """Fail some of the steps in flight, which the daemon has not run. Rows of others stay."""
        for _ in range(self.rng.randrange(len(self.in_flight))):
            self.take()
        outputs = [output for output, _ in self.in_flight]
        self.in_flight.clear()
        self.scheduler.step_failed(outputs, self.table.fail(outputs))

    def run(self, fails=0.0, aborts=0.0, heard=lambda result: None):
        """heard: called with each result, except those of steps before a failure."""
        while self.scheduler.has_unfinished_requests() or self.in_flight:
            self.send()
            if self.in_flight and self.rng.random() < fails:
                self.fail()
            elif self.in_flight:
                heard(self.take())
            if aborts and self.rng.random() < aborts and self.table.req_ids:
                self.scheduler.abort_request(self.rng.choice(self.table.req_ids))
        self.send()
        while self.in_flight:
            self.take()


def random_requests(rng, count, longest=40):
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(24)] for _ in range(2)]
    requests = []
    for index in range(count):
        prompt = rng.choice(stems)[: rng.randrange(25)]
        prompt = prompt + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 16))]
        seed = rng.randrange(3)
        sampling = SamplingParams(
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), rng.choice([0, 40]))),
            temperature=float(seed > 0),
            seed=seed,
            logprobs=rng.choice([None, None, 1]),
        )
        prompt = np.array(prompt[:longest], np.int32)
        requests.append(GenerationRequest(f"r{index}", prompt, rng.randrange(1, 60), sampling))
    return requests


def expected(request, max_model_len=96):
    prompt = request.prompt.tolist()
    num = min(request.max_tokens, max_model_len - len(prompt))
    stops = frozenset(request.sampling.stop_ids((EOS,)))
    return reference_tokens(prompt, num, stops, request.sampling.seed or 0)


def check(group, requests):
    for request in requests:
        output = group.outputs.get(request.id)
        if output is None:
            continue
        tokens = expected(request)
        assert output.token_ids == tokens, request.id
        assert 0 <= output.num_accepted <= min(output.num_drafted, len(tokens))
        if request.sampling.logprobs is not None:
            assert [own.token_ids[0] for own in output.logprobs] == tokens
    assert group.scheduler.num_free_blocks == group.limits.num_blocks - 1
    assert not group.daemon.rows


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [200, 27])
@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
def test_every_request_gets_the_tokens_that_it_has_without_drafts(pp, num_blocks, accuracy):
    rng = random.Random(f"{pp} {num_blocks} {accuracy}")
    group = DraftingGroup(
        rng, accuracy, make_limits(num_blocks=num_blocks, pipeline_parallel_size=pp)
    )
    requests = random_requests(rng, 30)
    for request in requests:
        group.scheduler.add_request(request)
    group.run()
    assert len(group.outputs) == len(requests)
    check(group, requests)
    assert group.daemon.num_drafted > 100
    outputs = group.outputs.values()
    num_tokens = sum(len(output.token_ids) for output in outputs)
    assert sum(output.num_cached_tokens for output in outputs) > 0
    preemptions = sum(output.num_preemptions for output in outputs)
    assert (preemptions > 0) == (num_blocks == 27)
    if accuracy == 1.0:
        assert sum(output.num_accepted for output in outputs) > num_tokens / 2
    if accuracy == 0.0:
        assert sum(output.num_accepted for output in outputs) == 0


@pytest.mark.parametrize("seed", seeds(3, of=12))
def test_requests_survive_failures_and_aborts(seed):
    """Rows that take no part in failed steps are kept, with bounds as counts."""
    rng = random.Random(seed)
    limits = make_limits(num_blocks=60, pipeline_parallel_size=1 + seed % 3)
    times = itertools.count()
    group = DraftingGroup(rng, 0.6, limits, lambda: next(times) + rng.random())
    requests = random_requests(rng, 25)
    for request in requests:
        group.scheduler.add_request(request)
    group.run(fails=0.1, aborts=0.03)
    assert 10 < len(group.outputs) < 25
    check(group, requests)
    if limits.pipeline_parallel_size > 1:
        assert any(message.resync for message in group.daemon.messages)


@pytest.mark.parametrize("seed", seeds(2, of=6))
def test_a_window_keeps_what_tokens_after_refused_drafts_see(seed):
    """Blocks behind a window are freed by the tokens that are certain: those which the step sees
    even if all drafts before it are refused stay."""
    rng = random.Random(seed)
    window = 6
    groups = (BlockGroup(4, None), BlockGroup(4, window))
    scheduler = Scheduler(make_limits(groups=groups, num_blocks=400), clock=lambda: 0.0)
    for request in random_requests(rng, 6):
        plain = msgspec.structs.replace(request.sampling, logprobs=None)
        scheduler.add_request(dataclasses.replace(request, sampling=plain))
    places, in_flight = {}, deque()
    held = scheduler._queues.running
    for _ in range(200):
        while len(in_flight) < 2:
            output = scheduler.schedule()
            if output is None:
                break
            in_flight.append(output)
            for req_id in output.num_drafts:
                request = held[req_id]
                certain = request.num_tokens - request.drafts.num_in_flight - 1
                first = max(0, certain - 1 - window + 1) // 4
                assert all(request.blocks.by_group[1][first:])
                places[req_id] = len(request.tokens)
        if not in_flight:
            break
        output = in_flight.popleft()
        scheduler.update_from_output(output, refusing(scheduler, output))
    assert len(places) == 6


def refusing(scheduler, output) -> StepResult:
    """The result of a step whose drafts are all refused."""
    counts = {**dict.fromkeys(output.decode_req_ids, 1), **output.num_scheduled_tokens}
    drafts, names = output.num_drafts, []
    for req_id in counts:
        request = scheduler._queues.unfinished.get(req_id)
        if request is not None and request.num_tokens > len(request.tokens):
            names.append(req_id)
    outcomes = {name: DraftOutcome(count, 0) for name, count in drafts.items()}
    return StepResult(names, [11] * len(names), refused=drafts, drafts=outcomes)


@pytest.mark.parametrize("pp", [1, 2])
def test_steps_that_go_on_have_the_same_columns(pp):
    """Of requests with drafts: but for blocks, corrections and others' ends. Their mappings are the
    same objects."""
    limits = make_limits(max_model_len=512, num_blocks=800, pipeline_parallel_size=pp)
    group = DraftingGroup(random.Random(6), 0.6, limits)
    for index in range(6):
        options = SamplingParams(ignore_eos=True)
        group.scheduler.add_request(GenerationRequest(f"r{index}", np.arange(4), 200, options))
    outputs = []
    while group.scheduler.has_unfinished_requests() or group.in_flight:
        group.send()
        outputs.append(group.in_flight[0][0])
        group.take()
    messages = group.daemon.messages[: len(outputs)]
    changing = {"seq", "corrections", "new_block_slots", "new_block_ids", "finished"}
    kept = [name for name in messages[0].__struct_fields__ if name not in changing]
    num_same = 0
    for at in range(pp, len(outputs)):
        if outputs[at].num_drafts and outputs[at].num_drafts is outputs[at - pp].num_drafts:
            num_same += 1
            assert outputs[at].num_scheduled_tokens is outputs[at - pp].num_scheduled_tokens
            for name in kept:
                assert getattr(messages[at], name) == getattr(messages[at - pp], name)
    assert num_same > 0.6 * len(outputs) > 20


def test_blocks_end_before_the_kv_of_a_refused_draft():
    """A request ends, with its last step's drafts refused: the block whose last place holds the KV
    of a refused draft is not shared. One with the same tokens is computed from there."""
    rng = random.Random(4)
    group = DraftingGroup(rng, 0.0, make_limits(max_num_seqs=1))
    group.most = 1
    prompt = np.arange(5, dtype=np.int32)
    stop = reference_tokens(prompt.tolist(), 3, frozenset())[2]
    options = SamplingParams(ignore_eos=True, stop_token_ids=(stop,))
    first = GenerationRequest("a", prompt, 30, options)
    group.scheduler.add_request(first)
    group.run()
    tokens = group.outputs["a"].token_ids
    assert tokens == expected(first) and len(prompt) + len(tokens) == 8
    # The last of the eight tokens was never computed: a draft was, in its place.
    longer = np.array([*prompt, *tokens, 3], np.int32)
    second = GenerationRequest("b", longer, 4, SamplingParams(ignore_eos=True))
    group.scheduler.add_request(second)
    group.run()
    assert group.outputs["b"].token_ids == expected(second)
    assert group.outputs["b"].num_cached_tokens == 4


def test_drafts_stay_within_the_token_budget_and_the_limit():
    group = DraftingGroup(random.Random(1), 1.0, make_limits(max_num_batched_tokens=9))
    for name, most in (("a", 30), ("b", 3)):
        request = GenerationRequest(name, np.array([1, 2]), most, SamplingParams(ignore_eos=True))
        group.scheduler.add_request(request)
    seen = []
    group.most = 1
    while group.scheduler.has_unfinished_requests():
        group.send()
        seen.append(dict(group.in_flight[0][0].num_drafts))
        group.take()
    # b may have one draft: the step after its prompt samples two tokens, its last ones.
    assert seen[0] == {} and seen[1] == {"a": 4, "b": 1}
    assert all(sum(each.values()) <= 9 - len(each) for each in seen)
    assert group.outputs["a"].num_accepted == 30 - len(seen)


def test_drafts_use_only_blocks_that_nobody_else_needs():
    """A prompt takes the last blocks: the request that decodes has as many drafts as its own block
    has room for, and nobody is preempted."""
    group = DraftingGroup(random.Random(1), 0.0, make_limits(num_blocks=8))
    group.most = 1
    options = SamplingParams(ignore_eos=True)
    group.scheduler.add_request(GenerationRequest("a", np.arange(6), 5, options))
    group.send()
    group.take()
    group.scheduler.add_request(GenerationRequest("b", np.arange(20, 40), 1, options))
    drafts = []
    while group.scheduler.has_unfinished_requests():
        group.send()
        drafts.append(group.in_flight[0][0].num_drafts)
        group.take()
    assert {output.num_preemptions for output in group.outputs.values()} == {0}
    assert drafts[0] == {"a": 1}


def test_a_draft_model_has_blocks_for_the_drafts_that_it_makes():
    """Behind the tokens of each request that samples in a step, within its limit, as far as there
    are free ones."""
    for num_blocks, is_short in ((200, False), (18, True)):
        limits = make_limits(num_lookahead_tokens=K, num_blocks=num_blocks, max_model_len=40)
        group = DraftingGroup(random.Random(5), 0.7, limits)
        requests = random_requests(random.Random(3), 8)
        for request in requests:
            group.scheduler.add_request(request)
        most = {each.id: min(40, len(each.prompt) + each.max_tokens) for each in requests}
        num_without = 0
        while group.scheduler.has_unfinished_requests() or group.in_flight:
            group.send()
            if not group.in_flight:
                continue
            step = group.in_flight[0][0]
            names = {*step.num_scheduled_tokens, *step.decode_req_ids}
            group.take()
            for row in group.daemon.rows.values():
                if row.req_id in names and row.drafts and not step.skip_drafts:  # it has sampled
                    needed = min(row.num_computed + K, most[row.req_id] - 1)
                    num_without += len(row.blocks) * limits.block_size < needed
                assert (len(row.blocks) - 1) * limits.block_size < most[row.req_id]
        assert (num_without > 0) == is_short
        for request in requests:
            assert group.outputs[request.id].token_ids == expected(request, 40)


@pytest.mark.parametrize("drafter", ["lookup", "model", "driver"])
@pytest.mark.parametrize("slope", [0.02, 0.5])
def test_drafts_that_are_all_refused_cost_three_percent_at_most(slope, drafter):
    """Whatever a further token costs: they are soon left out, the device's and those of the
    driver. A model that has rested catches up before it makes some."""
    guesses = drafter == "driver"

    def seconds(num_speculative_tokens):
        limits = make_limits(
            max_model_len=700,
            num_blocks=1100,
            num_speculative_tokens=num_speculative_tokens,
            makes_drafts=not guesses,
        )
        now_s, num_missing = 0.0, 0
        group = DraftingGroup(random.Random(1), 0.0, limits, clock=lambda: now_s)
        options = SamplingParams(ignore_eos=True)
        for index in range(6):
            request = GenerationRequest(f"r{index}", np.arange(4) + index, 600, options)
            group.scheduler.add_request(request)
        while group.scheduler.has_unfinished_requests() or group.in_flight:
            group.send()
            step = group.in_flight[0][0]
            tokens = sum(step.num_scheduled_tokens.values()) + len(step.decode_req_ids)
            now_s += 0.005 * (1 + slope * tokens)
            if drafter == "model" and num_speculative_tokens:
                num_missing += tokens
                if not step.skip_drafts:
                    now_s += 0.005 * (0.3 + 0.002 * num_missing)
                    num_missing = 0
            for req_id in group.take().req_ids:
                group.scheduler.expect_tokens(req_id, [0] * K, 0)
        assert group.daemon.num_accepted <= 5 * guesses  # token 0 may be right
        assert (group.daemon.num_drafted > 0) == (num_speculative_tokens > 0)
        return now_s

    assert seconds(K) <= 1.03 * seconds(0)


def test_a_request_that_ends_within_accepted_drafts_has_no_more_tokens():
    """Stop tokens, and the tokens of steps that were sent before."""
    rng = random.Random(8)
    group = DraftingGroup(rng, 1.0, make_limits())
    prompt = np.array([5, 6, 7], np.int32)
    free = reference_tokens(prompt.tolist(), 20, frozenset())
    place = next(at for at in range(6, 12) if free[at] not in free[:at])
    sampling = SamplingParams(stop_token_ids=(free[place],), ignore_eos=True, logprobs=0)
    group.scheduler.add_request(GenerationRequest("a", prompt, 40, sampling))
    group.run()
    output = group.outputs["a"]
    assert output.token_ids == free[: place + 1] and output.finish_reason == "stop"
    assert len(output.logprobs) == place + 1
    assert output.num_accepted <= place + 1


def test_requests_without_numbers_fail_alone_in_the_middle_of_a_run():
    poison = frozenset(range(100, 130))
    rng = random.Random(3)
    group = DraftingGroup(rng, 0.9, make_limits(), poison=poison)
    requests = random_requests(rng, 20)
    for request in requests:
        group.scheduler.add_request(request)
    group.run()
    failed = 0
    for request in requests:
        tokens = expected(request)
        cut = next((n for n, token in enumerate(tokens[:-1], 1) if token in poison), None)
        if not poison.isdisjoint(request.prompt.tolist()):
            cut = 0
        output = group.outputs[request.id]
        assert output.token_ids == (tokens if cut is None else tokens[:cut])
        assert (output.finish_reason == "error") == (cut is not None)
        failed += cut is not None
    assert failed > 2


def left_requests(group):
    """The requests that run, as the next driver adopts them."""
    return [
        AdoptedRequest(
            row.req_id,
            np.array(row.tokens, np.int32),
            request.num_prompt_tokens,
            min(row.num_computed - row.num_over, len(row.tokens) - 1),
            tuple(row.blocks),
            request.extensions,
            admit(request, 0).note,
            slot,
        )
        for slot, row in group.daemon.rows.items()
        for request in [group.scheduler._queues.unfinished.get(row.req_id)]
        if request is not None and request.is_running
    ]


def adopting(group, left):
    """The group of the next driver, which adopts these requests."""
    again = DraftingGroup(group.rng, group.daemon.accuracy, group.limits)
    again.daemon.kv, again.daemon.rows = group.daemon.kv, group.daemon.rows
    again.table.require_resync()
    again.keep(again.scheduler.adopt_requests(left))
    return again


@pytest.mark.parametrize("seed", seeds(2, of=6))
def test_a_driver_continues_requests_with_drafts_of_another(seed):
    rng = random.Random(seed)
    limits = make_limits()
    group = DraftingGroup(rng, 0.6, limits)
    requests = random_requests(rng, 6)
    for request in requests:
        group.scheduler.add_request(request)
    for _ in range(rng.randrange(6, 14)):
        group.send()
        group.take()
    group.in_flight.clear()  # the driver dies; its last steps never arrive
    left = left_requests(group)
    done = group.outputs
    again = adopting(group, left)
    again.run()
    for request in requests:
        output = again.outputs.get(request.id) or done.get(request.id)
        if output is not None:
            assert output.token_ids == expected(request)
    assert left and again.daemon.num_drafted


def test_schedulers_without_drafts_plan_none():
    group = DraftingGroup(random.Random(0), 1.0, make_limits(num_speculative_tokens=0))
    requests = random_requests(random.Random(0), 8)
    for request in requests:
        group.scheduler.add_request(request)
    group.run()
    check(group, requests)
    assert not any(message.num_drafts or message.settled for message in group.daemon.messages)


def num_in_flight(group):
    """Tokens of request a that steps in flight gain if all drafts are accepted."""
    request = group.scheduler._queues.unfinished.get("a")
    return 0 if request is None else request.num_in_flight


def expect(group, tokens, *, certain):
    """Expect tokens of request a behind those in flight."""
    group.scheduler.expect_tokens("a", tokens, len(tokens) if certain else 0)


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [200, 27])
def test_guesses_change_no_token(pp, num_blocks):
    """Of which some are right, behind tokens that are certain or not; under failures, too."""
    rng = random.Random(f"{pp} {num_blocks}")
    limits = make_limits(num_blocks=num_blocks, pipeline_parallel_size=pp, makes_drafts=False)
    group = DraftingGroup(rng, 0.0, limits)
    requests = random_requests(rng, 20)
    outputs = {request.id: expected(request) for request in requests}
    for request in requests:
        group.scheduler.add_request(request)

    def guess(result):
        for req_id in sorted({*result.req_ids} & group.scheduler._queues.unfinished.keys()):
            request = group.scheduler._queues.unfinished[req_id]
            own = outputs[req_id][request.num_tokens - request.num_prompt_tokens :][: K + 1]
            own += [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(3))]
            guesses = [t if rng.random() < 0.8 else rng.randrange(VOCAB_SIZE) for t in own]
            group.scheduler.expect_tokens(req_id, guesses, 0)

    group.run(fails=0.05, heard=guess)
    check(group, requests)
    assert all(-1 not in np.frombuffer(m.draft_token_ids, "<i4") for m in group.daemon.messages)
    assert 50 < group.daemon.num_accepted < group.daemon.num_drafted - 20


def test_guesses_do_not_count_as_the_drafts_of_the_device():
    """Requests without a grammar keep theirs where all guesses are wrong."""
    now_s = 0.0
    group = DraftingGroup(
        random.Random(2), 0.9, make_limits(max_model_len=1400, num_blocks=1100), lambda: now_s
    )
    grammar = read_structured_output({"regex": "a*"})
    for index in range(4):
        own = SamplingParams(ignore_eos=True, structured_outputs=grammar if index % 2 else None)
        group.scheduler.add_request(GenerationRequest(f"r{index}", np.arange(4), 1200, own))
    drafts = []
    while group.scheduler.has_unfinished_requests() or group.in_flight:
        group.send()
        step = group.in_flight[0][0]
        tokens = sum(step.num_scheduled_tokens.values()) + len(step.decode_req_ids)
        now_s += 0.005 * (1 + 0.1 * tokens)
        drafts.append(step.num_drafts)
        for req_id in group.take().req_ids:
            group.scheduler.expect_tokens(req_id, [0] * K, 0)
    late = drafts[160:240]
    assert sum({"r0", "r2"} <= own.keys() for own in late) >= 72  # but for probes
    assert sum("r1" in own for own in late) <= 8


def fail_all(group):
    """Fail the steps in flight; the rows of all requests are lost, as by an update."""
    outputs = [output for output, _ in group.in_flight]
    group.in_flight.clear()
    group.scheduler.step_failed(outputs, group.table.fail(outputs))
    return group


def pause(group):
    """Pause the request as a driver does whose masks are late, until a step in flight is done."""
    group.scheduler.pause_request("a")
    group.take()
    group.scheduler.release_request("a")
    return group


ADAPTER = GroupAdapter("x", 1, 7, ContentIdentity(content=bytes(32)))


def update_adapter(group):
    """Update the weights of the request's adapter."""
    adapter = ADAPTER._replace(weights_version=group.seq)
    group.scheduler.use_adapter(adapter, "drop", len(group.in_flight))
    return group


def adopt(group):
    """Let another driver continue, which knows nothing of the steps in flight."""
    group.in_flight.clear()
    again = adopting(group, left_requests(group))
    again.outputs = {**group.outputs, **again.outputs}
    return again


EVENTS = {
    "failed steps": fail_all,
    "paused": pause,
    "adapter updated": update_adapter,
    "adopted": adopt,
    "none": lambda group: group,
}


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("event", EVENTS)
def test_the_device_drafts_for_no_request_with_a_grammar(pp, event):
    """Its driver must know its drafts to make their masks. Whatever becomes of drafts in flight,
    behind which tokens were expected, or none."""
    rng = random.Random(f"{pp} {event}")
    group = DraftingGroup(rng, 0.6, make_limits(pipeline_parallel_size=pp))
    guided = SamplingParams(
        ignore_eos=True, structured_outputs=read_structured_output({"regex": "a*"})
    )
    requests = [
        with_adapter(GenerationRequest("a", np.arange(4), 60, guided), ADAPTER.extension),
        GenerationRequest("b", np.arange(4), 60, SamplingParams(ignore_eos=True)),
        GenerationRequest("c", np.arange(4), 60, guided),
    ]
    for request in requests:
        group.scheduler.add_request(request)
    outputs = {request.id: expected(request) for request in requests}
    num_events = num_guided = num_device = 0
    while group.scheduler.has_unfinished_requests() or group.in_flight:
        group.send()
        for step, _ in group.in_flight:
            own = {name: count for name, count in step.num_drafts.items() if name != "b"}
            assert {name: len(given) for name, given in step.draft_token_ids.items()} == own
            num_guided += len(own)
            num_device += "b" in step.num_drafts
        num_drafted = sum("a" in step.num_drafts for step, _ in group.in_flight)
        if num_drafted == 2 and num_events < 4:
            group, num_events = EVENTS[event](group), num_events + 1
        if not group.in_flight:
            continue
        unfinished = group.scheduler._queues.unfinished
        void = {own.id for own in unfinished.values() if own.num_void}
        for req_id in sorted({*group.take().req_ids} & {"a", "c"} - void):
            request = unfinished.get(req_id)
            if request is not None:
                following = outputs[req_id][request.num_tokens - request.num_prompt_tokens :]
                guesses = [t if rng.random() < 0.7 else 0 for t in following[: K + 1]]
                group.scheduler.expect_tokens(req_id, rng.choice([guesses, guesses, []]), 0)
    group.run()  # tells the daemon who has ended
    check(group, requests)
    assert len(group.outputs) == len(requests) and num_events > 1
    assert num_guided > 10 and num_device > 10


def test_expected_tokens_hold_at_their_positions_alone():
    own = ExpectedDrafts([7, 8, 9], first=5, num_forced=2)
    counts = [(own.count_from(place), own.count_forced_from(place)) for place in range(3, 10)]
    assert counts == [(0, 0), (0, 0), (3, 2), (2, 1), (1, 0), (0, 0), (0, 0)]
    assert own.from_place(5, 2) == [7, 8] and own.from_place(7, 1) == [9]


@pytest.mark.parametrize("pp", [1, 2])
def test_expected_tokens_are_drafts_up_to_a_stop_token_or_the_limit(pp):
    """Each saves a step, and no jump is needed over as many as a step may have. The device makes
    none here."""
    for max_tokens, stop_at in ((33, None), (33, 14), (7, None)):
        limits = make_limits(makes_drafts=False, pipeline_parallel_size=pp)
        group = DraftingGroup(random.Random(0), 0.0, limits)
        plain = GenerationRequest("a", np.arange(9, dtype=np.int32), max_tokens)
        own = SamplingParams(ignore_eos=True)
        tokens = expected(dataclasses.replace(plain, sampling=own))
        if stop_at is not None:
            own = SamplingParams(ignore_eos=True, stop_token_ids=(tokens[stop_at],))
            tokens = tokens[: stop_at + 1]
        group.scheduler.add_request(dataclasses.replace(plain, sampling=own))
        group.scheduler.expect_tokens("b", [1], 1)
        num_steps = num_known = 0
        while group.scheduler.has_unfinished_requests():
            group.send()
            result = group.take()
            num_steps += 1
            num_known += len(result.req_ids)
            following = [*tokens[num_known:], *range(40)]
            expect(group, following[num_in_flight(group) :], certain=True)
            assert group.scheduler.jump_forward("a", following[: K + 1]).num_tokens == 0
        (output,) = group.outputs.values()
        assert output.token_ids == tokens
        assert output.num_drafted == output.num_accepted > 0
        assert num_steps <= len(tokens) - output.num_accepted + pp + 1
        assert all(-1 not in np.frombuffer(m.draft_token_ids, "<i4") for m in group.daemon.messages)

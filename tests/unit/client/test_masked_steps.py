"""Masks of a driver's steps, with hand-made grammars: each mask is sent once the tokens before it
are known, even after failures."""

import contextlib
import math
import random
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest

from examples.static_batches import StaticBatches
from rpc_schema.errors import ErrorCode
from rpc_schema.step import NO_TOKEN
from rpc_schema.structured import StructuredOutput
from tests.support.fake_daemon import VOCAB_SIZE, Fault
from tests.support.flat_requests import changed
from tests.support.waiting import wait_until
from tests.unit.client.conftest import worker_config
from tests.unit.client.test_driver import (
    EndlessScheduler,
    ScriptedFuture,
    ScriptedGroup,
    spoiling,
)
from tests.unit.client.test_scheduler import expected, make_limits, random_requests
from worker_client.driver import MAX_CONSECUTIVE_FAILURES, Driver
from worker_client.driver_parts.registry import DriverOptions
from worker_client.errors import InvalidSchedulerOutput, RequestError, StepFailed
from worker_client.replicas.lockstep import LockstepScheduler
from worker_client.requests import sample_id
from worker_client.scheduler import Scheduler, failed_request
from worker_client.scheduler_output import NewRequest, SchedulerOutput, StepResult
from worker_client.structured import masked_steps


@dataclass(eq=False)
class HandMatcher:
    """Accepts every token before the one that it must reject."""

    text: str
    tokens: list[int] = field(default_factory=list)
    rejects_at: int = 10**9
    fails_at: int = 10**9
    forced: list[int] = field(default_factory=list)
    num_waits: int = 0
    """Calls of proceed() before the mask is known."""
    is_overdue: bool = False
    note_mask: object = None
    """Called with the matcher when its mask is read."""

    @property
    def error(self):
        is_failed = not self.num_waits and len(self.tokens) >= self.fails_at
        return "its grammar is too complex: made up" if is_failed else ""

    @property
    def is_ready(self):
        return not self.num_waits

    @property
    def mask(self):
        assert self.is_ready
        self.note_mask(self)
        return np.full(HandGrammars.num_words, -1, np.int32)

    def allows(self, token):
        assert self.is_ready
        if self.forced:
            return token == self.forced[0]
        return len(self.tokens) < self.rejects_at


class HandGrammars:
    """A matcher for each request; notes at which token each mask was asked for."""

    num_words = -(-VOCAB_SIZE // 32)
    compile_s = 5.0

    def __init__(self, expected=None, jumps=None, lateness=lambda: 0, **matchers):
        """jumps: draws how many of the expected tokens a matcher forces. lateness: draws how many
        calls of proceed() a mask takes."""
        self.expected = expected
        self.jumps = jumps
        self.lateness = lateness
        self.matchers = matchers
        self.masks = set()
        self.begun = []

    def close(self):
        return None

    def compile(self, source):
        compiled = Future()
        compiled.set_result(None)
        return compiled

    def begin(self, source, tokens=()):
        model = self.matchers.get(source.text, HandMatcher(source.text))
        matcher = replace(model, tokens=list(tokens), note_mask=self.note)
        self.masks.update((source.text, number) for number in range(len(tokens)))
        self.begun.append(matcher)
        self.ask(matcher)
        return matcher

    def ask(self, matcher):
        matcher.forced = self.forced(matcher)
        matcher.num_waits = self.lateness()
        matcher.is_overdue = matcher.num_waits % 2 == 1

    def note(self, matcher):
        tokens = [*matcher.tokens, *matcher.forced]
        self.masks.add((matcher.text, len(tokens)))
        if self.expected is not None:
            assert tokens == self.expected[matcher.text][: len(tokens)]

    def take(self, matcher, tokens):
        assert matcher.is_ready
        for token in tokens:
            self.masks.add((matcher.text, len(matcher.tokens)))
            matcher.tokens.append(token)
            if matcher.forced:
                assert matcher.forced.pop(0) == token
            else:
                self.ask(matcher)

    def fork(self, matcher, tokens):
        taken = [*matcher.tokens, *matcher.forced, *tokens]
        forked = replace(matcher, tokens=taken)
        self.begun.append(forked)
        self.ask(forked)
        return forked

    def end(self, matcher):
        self.begun.remove(matcher)

    def proceed(self, timeout_s=0.0):
        for matcher in self.begun:
            matcher.num_waits = max(0, matcher.num_waits - 1)

    def forced_first(self, source):
        return self.forced(self.matchers.get(source.text, HandMatcher(source.text)))

    def forced(self, matcher):
        if self.jumps is None:
            return []
        known = len(matcher.tokens)
        return self.expected[matcher.text][known : known + self.jumps()]


def with_grammars(requests, rng, share=0.5):
    """Some requests get a grammar, whose text is their id."""
    return [
        changed(request, structured_outputs=StructuredOutput(kind="regex", text=request.id))
        if rng.random() < share
        else request
        for request in requests
    ]


def driver_of(
    fakes, connect, grammars, kind=Scheduler, pp=1, num_blocks=None, on_result=None, dp=1
):
    daemons = fakes(dp * pp)
    group = connect(daemons, pp, dp=dp)
    group.attach()
    model = group.prepare(worker_config(pp, max_model_len=128, dp=dp), num_gpu_blocks=num_blocks)
    limits = make_limits(num_blocks=model.num_blocks, pipeline_parallel_size=pp)
    options = DriverOptions(grammars=grammars)
    schedulers = [kind(limits) for _ in range(dp)]
    scheduler = schedulers[0] if dp == 1 else LockstepScheduler(schedulers)
    return daemons, Driver(group, scheduler, on_result, options=options)


def run_on(driver):
    """Outputs by id, over refused steps. Each request ends once."""
    outputs = []
    while driver.busy:
        with contextlib.suppress(InvalidSchedulerOutput):
            outputs += driver.step()
    outputs += driver.run()
    by_id = {output.req_id: output for output in outputs}
    assert len(by_id) == len(outputs)
    return by_id


TROUBLES = ("none", "few blocks", "failures", "refusals", "both")
LATENESS = {
    "in time": lambda rng: lambda: 0,
    "late": lambda rng: lambda: rng.choice([0, 0, 0, 1, 2, 3, 8, 9]),
}


@pytest.mark.parametrize(
    ("kind", "dp", "trouble"),
    [(kind, 1, trouble) for kind in (Scheduler, StaticBatches) for trouble in TROUBLES]
    + [(Scheduler, 2, trouble) for trouble in TROUBLES[:3]],
)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("lateness", LATENESS)
def test_every_token_of_a_request_has_its_mask(fakes, connect, kind, dp, pp, trouble, lateness):
    """Also if masks are late: then its requests are paused, or hold up their steps. Of replicas in
    lockstep, one samples what it has deferred in a step that is empty for the others."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    requests = with_grammars(random_requests(rng, 12), rng)
    wanted = {request.id: expected(request) for request in requests}
    grammars = HandGrammars(wanted, lateness=LATENESS[lateness](rng))
    made = spoiling(kind) if trouble in ("refusals", "both") else kind
    num_blocks = 34 if trouble == "few blocks" else None
    daemons, driver = driver_of(fakes, connect, grammars, made, pp, num_blocks, dp=dp)
    if trouble in ("failures", "both"):
        first = rng.randint(2, 8)
        at = [first, first + 9, first + 18]  # three failures in a row would be given up
        for daemon in daemons.daemons:
            daemon.faults = [Fault(n, code=ErrorCode.CAPACITY) for n in at]
    for request in requests:
        driver.add_request(request)
    outputs = run_on(driver)
    assert {name: output.token_ids for name, output in outputs.items()} == wanted, seed
    needed = {
        (request.id, index)
        for request in requests
        if request.sampling.structured_outputs is not None
        for index in range(len(wanted[request.id]))
    }
    assert needed <= grammars.masks, seed
    assert not grammars.begun, "all matchers were given up"
    # A rank that owes no outcome may be a step behind.
    no_rows = lambda: not any(daemon.rows or daemon.deferred for daemon in daemons.daemons)  # noqa: E731
    wait_until(no_rows, f"no daemon has rows, seed {seed}")


def test_requests_in_one_state_share_a_mask(fakes, connect, monkeypatch):
    """Those of one grammar with the same output so far."""
    rng = random.Random(random.randrange(1 << 30))
    first, *others = random_requests(rng, 5)
    first = replace(first, prompt=first.prompt[:1], max_tokens=9)
    alike = [changed(first, id=f"alike{n}", ignore_eos=True) for n in range(4)]
    numbers = []
    for text in ("one", None):
        requests = [
            changed(each, structured_outputs=StructuredOutput(kind="regex", text=text or each.id))
            for each in [*alike, *others]
        ]
        _, driver = driver_of(fakes, connect, HandGrammars())
        masks = []
        sample = driver.group.sample_tokens

        def counting(*args, masks=masks, sample=sample):
            masks.extend(mask for own in args[1][0].masks.values() for mask in own)
            return sample(*args)

        monkeypatch.setattr(driver.group, "sample_tokens", counting)
        for request in requests:
            driver.add_request(request)
        outputs = run_on(driver)
        for request in requests:
            assert outputs[request.id].token_ids == expected(request)
        numbers.append(len({id(mask) for mask in masks}))
    assert numbers[0] < numbers[1]


def test_requests_are_ended_by_their_grammars_alone(fakes, connect):
    """Also by a token that would be the last one."""
    rng = random.Random(4)
    requests = [
        changed(r, max_tokens=20, ignore_eos=True, stop_token_ids=())
        for r in with_grammars(random_requests(rng, 6), rng, share=1)
    ]
    grammars = HandGrammars(
        r0=HandMatcher("r0", rejects_at=19),
        r1=HandMatcher("r1", rejects_at=5),
        r2=HandMatcher("r2", fails_at=0),
        r3=HandMatcher("r3", fails_at=7),
    )
    _, driver = driver_of(fakes, connect, grammars)
    for request in requests:
        driver.add_request(request)
    outputs = run_on(driver)
    assert set(outputs) == {request.id for request in requests}
    for request in requests:
        output, whole = outputs[request.id], expected(request)
        if request.id not in ("r0", "r1", "r2", "r3"):
            assert (output.token_ids, output.finish_reason) == (whole, "length")
            continue
        assert output.finish_reason == "error" and output.error
        assert output.token_ids == whole[: {"r0": 19, "r1": 5, "r2": 0, "r3": 7}[request.id]]
    assert "does not allow the sampled token" in outputs["r1"].error
    assert "too complex: made up" in outputs["r3"].error


def test_a_step_waits_that_names_a_request_whose_mask_is_outstanding():
    """Also one that finishes it: its successor could defer too, and its last token be lost."""
    grammar = StructuredOutput(kind="regex", text="a")
    steps = masked_steps.MaskedSteps(HandGrammars())
    tokens = np.arange(3, dtype=np.int32)
    new = NewRequest(
        req_id="a",
        token_ids=tokens,
        num_prompt_tokens=3,
        num_computed_tokens=0,
        block_ids=[1],
        extensions=(grammar,),
    )
    outputs = [SchedulerOutput({"a": 3}, scheduled_new_reqs=[new])]
    outputs.append(SchedulerOutput(decode_req_ids=("a",)))
    planned = []
    for output in outputs:
        assert not steps.must_wait(output)
        planned.append(steps.plan(output))
        steps.sent(planned[-1])
    naming = [
        SchedulerOutput(decode_req_ids=("a",)),
        SchedulerOutput({"a": 1}),
        SchedulerOutput(preempted_req_ids=["a"]),
        SchedulerOutput(finished_req_ids=["a"]),
    ]
    assert [steps.must_wait(output) for output in naming] == [True] * 4
    assert not steps.must_wait(SchedulerOutput(finished_req_ids=["b"]))
    sampled = []
    steps.take(planned[0], StepResult(("a",), (5,)))
    steps.sample_ready(planned[1], lambda masks, req_ids: sampled.append((set(masks), req_ids)))
    assert sampled == [({"a"}, None)]
    assert [steps.must_wait(output) for output in naming] == [False] * 4


def admitted(steps, req_ids):
    """Admit requests with a grammar, and let each sample a token 5."""
    new = [
        NewRequest(
            req_id=req_id,
            token_ids=np.arange(3, dtype=np.int32),
            num_prompt_tokens=3,
            num_computed_tokens=0,
            block_ids=[1],
            extensions=(StructuredOutput(kind="regex", text=req_id),),
        )
        for req_id in req_ids
    ]
    first = steps.plan(SchedulerOutput(dict.fromkeys(req_ids, 3), scheduled_new_reqs=new))
    steps.sent(first)
    steps.take(first, StepResult(req_ids, [5] * len(req_ids)))


def test_what_follows_a_token_that_is_not_finite_ends_no_request():
    """Its scheduler may compute it again, without the blocks of others; the step in flight has
    sampled what its grammar does not allow there."""
    grammars = HandGrammars(a=HandMatcher("a", rejects_at=1))
    steps = masked_steps.MaskedSteps(grammars)
    admitted(steps, ("a",))
    planned = [steps.plan(SchedulerOutput(decode_req_ids=("a",))) for _ in range(2)]
    for step in planned:
        steps.sent(step)
    assert not steps.take(planned[0], StepResult(("a",), (NO_TOKEN,)))
    steps.sample_ready(planned[1], lambda masks, req_ids: None)
    assert steps.take(planned[1], StepResult(("a",), (7,))) == ["a"]
    again = NewRequest(
        req_id="a",
        token_ids=np.array([0, 1, 2, 5], np.int32),
        num_prompt_tokens=3,
        num_computed_tokens=0,
        block_ids=[1],
        extensions=(StructuredOutput(kind="regex", text="a"),),
    )
    output = SchedulerOutput({"a": 4}, scheduled_new_reqs=[again], preempted_req_ids=["a"])
    steps.sent(planned := steps.plan(output))
    assert not steps.take_faults()
    assert not steps.take(planned, StepResult(("a",), (7,)))
    assert "does not allow" in steps.take_faults()["a"].error


@pytest.mark.parametrize("leave", ["pause", "forget"])
def test_steps_sample_nothing_for_requests_that_have_left(leave):
    """Neither one that waits for their masks, with drafts or not, nor one that was scheduled before
    they left. The next step is not theirs."""
    grammars = HandGrammars()
    steps = masked_steps.MaskedSteps(grammars)
    admitted(steps, ("a", "b"))
    for matcher in grammars.begun:
        matcher.num_waits = 9
    drafts = {"num_drafts": {"a": 2}, "draft_token_ids": {"a": [6, 7]}}
    first = steps.plan(SchedulerOutput({"a": 3, "b": 1}, **drafts))
    steps.sent(first)
    for req_id in "ab":
        getattr(steps, leave)(req_id)
    sampled = {}
    steps.sample_ready(first, lambda masks, req_ids: sampled.update(masks))
    assert {req_id: len(own) for req_id, own in sampled.items()} == {"a": 3, "b": 1}
    assert not any(mask.any() for own in sampled.values() for mask in own)
    second = steps.plan(SchedulerOutput(decode_req_ids=("a",)))
    (values,) = second.output.extensions
    assert [mask.any() for mask in values.masks["a"]] == [False] and not values.deferred
    tokens = StepResult(("a", "b"), (NO_TOKEN, NO_TOKEN))
    assert [*steps.take(first, tokens)] == ["a", "b"]
    assert [*steps.take(second, StepResult(("a",), (NO_TOKEN,)))] == ["a"]
    assert not steps.plan(SchedulerOutput(decode_req_ids=("a",))).sampled
    assert not steps.take_faults()


@pytest.mark.parametrize("lateness", [0, 2])
def test_a_row_with_drafts_has_a_mask_behind_each(monkeypatch, lateness):
    """Within the bounds on messages. Its matcher takes what is sampled alone."""
    for bound in ("MAX_STEP_MASK_BYTES", "MAX_MASK_BYTES"):
        monkeypatch.setattr(masked_steps, bound, 12 * HandGrammars.num_words)
    grammars = HandGrammars()
    steps = masked_steps.MaskedSteps(grammars)
    admitted(steps, ("a", "b"))
    matchers = dict(zip("ab", grammars.begun, strict=True))
    grammars.lateness = lambda: lateness
    drafts = {"a": [6, 7], "b": [8, 9]}
    planned = steps.plan(
        SchedulerOutput({"a": 3, "b": 3}, num_drafts={"a": 2, "b": 2}, draft_token_ids=drafts)
    )
    steps.sent(planned)
    shapes = {}

    def sample(masks, req_ids):
        assert len(masks) == 1
        shapes.update({req_id: [mask.shape for mask in own] for req_id, own in masks.items()})

    (values,) = planned.output.extensions
    shapes.update({req_id: [mask.shape for mask in own] for req_id, own in values.masks.items()})
    assert set(values.deferred) == ({"a", "b"} if lateness else {"b"})
    assert len(grammars.begun) == 6
    steps.sample_ready(planned, sample)
    assert len(shapes) == (0 if lateness else 2)
    steps.await_masks()
    steps.sample_ready(planned, sample)
    assert shapes == dict.fromkeys("ab", [(HandGrammars.num_words,)] * 3)
    steps.take(planned, StepResult(["a", "a", "b"], [6, 2, 3]))
    assert [each.tokens for each in grammars.begun] == [[5, 3], [5, 6, 2]]
    assert matchers["b"] in grammars.begun and matchers["a"] not in grammars.begun
    for req_id in "ab":
        steps.forget(req_id)
    assert not grammars.begun


@pytest.mark.parametrize("num_gained", [1, 2, 3, 4])
def test_steps_behind_a_forced_token_that_could_not_be_sampled_are_void(num_gained):
    """Another rule of its request forbids it: a row gains no draft that a NO_TOKEN follows. The
    masks of the step in flight were those behind it."""
    grammars = HandGrammars()
    steps = masked_steps.MaskedSteps(grammars)
    admitted(steps, ("a", "b"))
    for matcher in grammars.begun:
        matcher.forced = [*range(11, 19)]
    planned = []
    for drafts in ([11, 12], [14, 15]):
        given = {"num_drafts": {"a": 2}, "draft_token_ids": {"a": drafts}}
        first = {"a": 3, "b": 1}
        planned.append(steps.plan(SchedulerOutput(first, **given)))
        steps.sent(planned[-1])
        assert not planned[-1].deferred
    gained = [11, 12, 13][:num_gained] if num_gained < 4 else [NO_TOKEN]
    steps.take(planned[0], StepResult(["a"] * len(gained) + ["b"], [*gained, 11]))
    is_short = num_gained < 3
    assert steps.take_stray() == (["a"] if is_short else [])
    assert not steps.take_stray()
    if not is_short:
        return
    leaves = steps.fail_stray if num_gained == 1 else steps.pause
    leaves("a")
    assert [*steps.take(planned[1], StepResult(["a", "a", "b"], [14, 15, 12]))] == ["a"]
    if num_gained == 1:
        ended = steps.take_faults()["a"]
        assert (ended.token_ids, ended.finish_reason) == ([5, 11], "error")
        return
    assert steps.take_resumed() == ["a"]
    known = [0, 1, 2, 5, *gained]
    again = NewRequest("a", np.array(known), 3, 0, [1], (StructuredOutput(kind="regex", text="a"),))
    (values,) = steps.plan(
        SchedulerOutput({"a": len(known)}, scheduled_new_reqs=[again])
    ).output.extensions
    (mask,) = values.masks["a"]
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [
        11 + num_gained
    ]


def test_guesses_follow_what_steps_in_flight_are_expected_to_gain():
    """Where the drafts of these turn out wrong, and behind forced tokens, too."""
    grammars = HandGrammars()
    steps = masked_steps.MaskedSteps(grammars)
    prompt = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 1, 7, 6, 5], np.int32)
    grammar = StructuredOutput(kind="regex", text="a")
    new = NewRequest("a", prompt, prompt.size, 0, [1], (grammar,))

    def send(*drafts):
        output = SchedulerOutput(
            {"a": 1 + len(drafts)}, num_drafts={"a": len(drafts)}, draft_token_ids={"a": drafts}
        )
        planned = steps.plan(output if drafts else SchedulerOutput(decode_req_ids=("a",)))
        steps.sent(planned)
        return planned

    def gain(step, *tokens, most=3):
        steps.sample_ready(step, lambda masks, req_ids: None)
        steps.take(step, StepResult(["a"] * len(tokens), tokens))
        ((_, found),) = steps.find_expected(most, num_running=1, jumps=False)
        return found

    first = steps.plan(SchedulerOutput({"a": prompt.size}, scheduled_new_reqs=[new]))
    steps.sent(first)
    second = send()
    assert gain(first, 1) == ([], 0)  # 5 1 never stood there before
    third = send()
    assert gain(second, 2) == ([4, 5, 6], 0)  # 1 2: the third step is to gain 3
    fourth = send(4, 5, 6)
    assert gain(third, 3) == ([8, 9, 3], 0)
    fifth = send(8, 9)
    assert gain(fourth, 1) == ([6, 5, 1], 0)  # 3 1: the fifth step is to gain 7, and not 8
    sixth = send(6, 5, 1)
    grammars.forced = lambda matcher: [6, 11, 12, 3, 4]
    assert gain(fifth, 7, most=5) == ([12, 3, 4, 5, 6], 3)  # the sixth is to gain 6 11
    seventh = send(12, 3, 4, 5)
    assert gain(sixth, 6, 11) == ([7, 8, 9], 0)  # the seventh is to gain 12 3 4 5 6
    steps.sample_ready(seventh, lambda masks, req_ids: None)
    steps.forget("a")
    assert not grammars.begun


def test_a_request_that_should_jump_has_no_drafts_meanwhile():
    """A long forced text; with few running requests, so that the jump pays."""
    grammars = HandGrammars()
    steps = masked_steps.MaskedSteps(grammars)
    admitted(steps, ("a",))
    drafts = {"num_drafts": {"a": 1}, "draft_token_ids": {"a": [7]}}
    planned = [steps.plan(SchedulerOutput({"a": 2}, **drafts)) for _ in range(2)]
    grammars.forced = lambda matcher: list(range(100, 140))
    steps.sample_ready(planned[0], lambda masks, req_ids: None)
    steps.take(planned[0], StepResult(["a"], [3]))
    cases = [(2, True), (2, False), (40, True)]
    found = [steps.find_expected(4, num_running=n, jumps=jumps) for n, jumps in cases]
    expected = [own.token_ids for ((_, own),) in found]
    assert expected == [[], [101, 102, 103, 104], [101, 102, 103, 104]]
    assert steps.find_jumps(2) == []  # until the step with drafts is done


@pytest.mark.parametrize(
    ("drafts", "field"),
    [({}, "num_drafts"), ({"a": [1]}, "draft_token_ids"), ({"a": [1, -2]}, "draft_token_ids")],
)
def test_drafts_that_masks_cannot_be_made_for_are_refused(drafts, field):
    steps = masked_steps.MaskedSteps(HandGrammars())
    admitted(steps, ("a",))
    with pytest.raises(InvalidSchedulerOutput) as refused:
        steps.plan(SchedulerOutput({"a": 3}, num_drafts={"a": 2}, draft_token_ids=drafts))
    assert (refused.value.field, refused.value.req_id) == (field, "a")
    steps.plan(SchedulerOutput(decode_req_ids=("a",)))


def test_masks_that_do_not_fit_into_a_message_are_split(fakes, connect, monkeypatch):
    monkeypatch.setattr(masked_steps, "MAX_STEP_MASK_BYTES", 4 * HandGrammars.num_words)
    monkeypatch.setattr(masked_steps, "MAX_MASK_BYTES", 8 * HandGrammars.num_words)
    rng = random.Random(9)
    requests = with_grammars(random_requests(rng, 7), rng, share=1)
    wanted = {request.id: expected(request) for request in requests}
    _, driver = driver_of(fakes, connect, HandGrammars(wanted))
    sizes = []
    sample = driver.group.sample_tokens

    def counting(deferred, extensions=(), req_ids=None):
        sizes.append(len(extensions[0].masks))
        return sample(deferred, extensions, req_ids)

    monkeypatch.setattr(driver.group, "sample_tokens", counting)
    for request in requests:
        driver.add_request(request)
    outputs = run_on(driver)
    assert {name: output.token_ids for name, output in outputs.items()} == wanted
    assert max(sizes) == 2 and sizes.count(2) > 10


def test_rows_that_share_a_mask_stay_in_one_message(fakes, connect, monkeypatch):
    """A message may have one mask: for one request, or for all that are in one state."""
    for bound in ("MAX_STEP_MASK_BYTES", "MAX_MASK_BYTES"):
        monkeypatch.setattr(masked_steps, bound, 4 * HandGrammars.num_words)
    (first,) = random_requests(random.Random(9), 1)
    first = replace(first, prompt=first.prompt[:1], max_tokens=9)
    wanted = expected(changed(first, ignore_eos=True))
    for text, most in (("one", 6), (None, 1)):
        requests = [changed(first, id=f"r{n}", ignore_eos=True) for n in range(6)]
        requests = [
            changed(each, structured_outputs=StructuredOutput(kind="regex", text=text or each.id))
            for each in requests
        ]
        _, driver = driver_of(fakes, connect, HandGrammars())
        sizes = []
        sample = driver.group.sample_tokens

        def counting(*args, sizes=sizes, sample=sample):
            sizes.append(len(args[1][0].masks))
            return sample(*args)

        monkeypatch.setattr(driver.group, "sample_tokens", counting)
        for request in requests:
            driver.add_request(request)
        outputs = run_on(driver)
        assert all(outputs[request.id].token_ids == wanted for request in requests)
        assert max(sizes) == most


class SlowGrammars(HandGrammars):
    """Compiles on request."""

    compile_s = 60.0

    def __init__(self):
        super().__init__()
        self.may_go = False
        self.compiling = []

    def compile(self, source):
        self.compiling.append((source, Future()))
        return self.compiling[-1][1]

    def proceed(self, timeout_s=0.0):
        super().proceed(timeout_s)
        compiling, self.compiling = (self.compiling, []) if self.may_go else ([], self.compiling)
        for source, future in compiling:
            if not future.set_running_or_notify_cancel():
                continue
            if source.text == "r1":
                refused = RequestError("made up", field="structured_outputs", value="", fix="none")
                future.set_exception(refused)
            else:
                future.set_result(None)


@pytest.mark.parametrize("in_time", [True, False])
def test_requests_wait_for_their_grammars_and_the_others_do_not(
    fakes, connect, monkeypatch, in_time
):
    rng = random.Random(11)
    requests = random_requests(rng, 3)
    requests[1:] = with_grammars(requests[1:], rng, share=1)
    grammars = SlowGrammars()
    _, driver = driver_of(fakes, connect, grammars)
    for request in requests:
        driver.add_request(request)
    with pytest.raises(RequestError, match="in use"):
        driver.add_request(requests[1])
    first = []
    while not first:
        first = driver.step()
    assert [output.req_id for output in first] == ["r0"]
    grammars.may_go = in_time
    if not in_time:
        monkeypatch.setattr("worker_client.structured.attended_clock.MOST_UNATTENDED_S", math.inf)
        late = SimpleNamespace(monotonic=lambda: math.inf)
        monkeypatch.setattr("worker_client.structured.attended_clock.time", late)
    outputs = run_on(driver)
    assert "made up" in outputs["r1"].error if in_time else "in time" in outputs["r1"].error
    if in_time:
        assert outputs["r2"].token_ids == expected(requests[2])


@pytest.mark.parametrize("kind", [Scheduler, StaticBatches])
def test_an_id_in_use_is_refused_at_once(fakes, connect, kind):
    """Whichever of the two waits for its grammar; and so is what the scheduler would refuse."""
    rng = random.Random(12)
    first, second, third = (replace(each, max_tokens=9) for each in random_requests(rng, 3))
    grammars = SlowGrammars()
    _, driver = driver_of(fakes, connect, grammars, kind)
    driver.add_request(first)
    driver.step()
    with_grammar = changed(first, structured_outputs=StructuredOutput(kind="regex", text="x"))
    with pytest.raises(RequestError, match="in use"):
        driver.add_request(with_grammar)
    waiting = replace(with_grammar, id=second.id)
    driver.add_request(waiting)
    for clashing in (second, waiting):
        with pytest.raises(RequestError, match="in use"):
            driver.add_request(clashing)
    driver.add_request(replace(third, id=sample_id(third.id, 1)))
    with pytest.raises(RequestError, match="in use"):
        driver.add_request(changed(with_grammar, id=third.id, n=2))
    driver.abort_request(sample_id(third.id, 1))
    too_long = replace(with_grammar, id="long", prompt=np.zeros(500, np.int32))
    with pytest.raises(RequestError) as refused:
        driver.add_request(too_long)
    assert refused.value.field == "prompt"
    driver.abort_request(second.id)
    driver.add_request(second)
    grammars.may_go = True
    outputs = run_on(driver)
    assert {name: output.token_ids for name, output in outputs.items()} == {
        each.id: expected(each) for each in (first, second)
    }


class LastWords(EndlessScheduler):
    """One request, which ends with the first result."""

    output = failed_request("a", "made up")

    def update_from_output(self, output, result):
        return [self.output]

    def step_failed(self, outputs, lost_req_ids):
        return None


def test_what_ends_before_a_failure_that_is_given_up_is_returned_first():
    """A step has sampled, and the sampling that it deferred fails."""
    group = ScriptedGroup(["fails"] * (MAX_CONSECUTIVE_FAILURES - 1) + ["works"])
    driver = Driver(group, LastWords(), options=DriverOptions(grammars=HandGrammars()))
    for _ in range(MAX_CONSECUTIVE_FAILURES - 1):
        assert driver.step() == []
    driver._fill()
    driver._steps.in_flight[0].later.append(ScriptedFuture("fails"))
    run = driver.run()
    assert next(run) is LastWords.output
    with pytest.raises(StepFailed, match="scripted"):
        next(run)


def test_a_driver_without_grammars_refuses_such_requests(fakes, connect):
    _, driver = driver_of(fakes, connect, None)
    (request,) = with_grammars(random_requests(random.Random(1), 1), random.Random(1), share=1)
    with pytest.raises(RequestError) as refused:
        driver.add_request(request)
    assert refused.value.field == "sampling.structured_outputs"
    assert not driver.busy

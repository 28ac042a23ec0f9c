"""Requests with values of every wrong type and size: each is refused by its field, and nothing of
it is left in a driver, its scheduler and its uploads."""

import random
from dataclasses import fields, replace

import numpy as np
import pytest

from rpc_schema.lora_request import LoraRequest
from rpc_schema.pooling import PoolingParams
from rpc_schema.prompt_embeds import PromptEmbeds
from rpc_schema.routed_experts import ReplayExperts, RoutedExpertsWanted
from rpc_schema.sampling import (
    FullLogprobsWanted,
    LogitsProcessors,
    LogprobsWanted,
    LogprobTokens,
    PromptLogprobsWanted,
    RandomSampling,
    StopTokens,
    TraceWanted,
)
from rpc_schema.structured import StructuredOutput
from rpc_schema.token_rules import AllowedTokens, BadWords, LogitBias, Penalties
from tests.support.flat_requests import flat_request, path_of
from tests.support.fuzz_requests import Listed, Number, Raising, odd_request
from tests.unit.client.test_request_uploads import Ranks, uploads_of
from worker_client.driver import Driver
from worker_client.errors import RequestError
from worker_client.group.loras import GroupLoras
from worker_client.inputs.host_tensor import HostTensor
from worker_client.inputs.request_checks import validated
from worker_client.parts.registry import KINDS
from worker_client.requests import GenerationRequest, RequestOutput, SamplingParams
from worker_client.scheduler import Scheduler, SchedulerLimits
from worker_client.scheduler.new_requests import group_bounds
from worker_client.steps.slots import SlotTable

LIMITS = SchedulerLimits(8, 64, 64, 64, 4, vocab_size=50, hidden_size=4)
NAN, INF = float("nan"), float("inf")
INTEGERS = (None, "1", 1.5, 1.0, True, np.bool_(True), np.float64(2), np.array(5), [1], NAN, 1j)
HUGE = 10**5000
ONE = np.int32(1).tobytes()
OWN_FIELDS = (
    AllowedTokens(token_ids=ONE),
    BadWords(lengths=bytes([1]), token_ids=ONE),
    FullLogprobsWanted(),
    LogitBias(token_ids=ONE, biases=np.float32(1).tobytes()),
    LogitsProcessors(names=("a",)),
    LogprobTokens(token_ids=ONE),
    LogprobsWanted(count=1),
    Penalties(presence_penalty=0.5),
    PoolingParams(task="embed"),
    PromptLogprobsWanted(count=1),
    RandomSampling(seed=1),
    ReplayExperts(num_positions=1, num_layers=1, top_k=1, max_expert=1, content_hash=bytes(32)),
    RoutedExpertsWanted(),
    StopTokens(token_ids=(1,)),
    StructuredOutput(kind="regex", text="a"),
    TraceWanted(num_tokens=1),
)
"""Extensions that requests have by fields: one of each."""


def output(**fields):
    """An output so far, of two tokens."""
    own = {"req_id": "r", "token_ids": [1, 2], "finish_reason": "abort", "num_prompt_tokens": 3}
    return RequestOutput(**{**own, **NO_STATISTICS, **fields})


NO_STATISTICS = {"num_cached_tokens": 0, "num_preemptions": 0, "logprobs": None}
WRONG = {
    "id": (None, 5, b"a", "", "\ud800", "x" * 257, ("a",), Raising(ValueError)),
    "prompt": (
        *(None, "123", b"123", 5, "", [], [1.0], [True], [None], ["1"], [[1]], [-1], [2**31]),
        *([HUGE], {1}, {1: 1}, range(3), (n for n in [1]), Listed([1]), Raising(MemoryError)),
        *(np.array([1.5]), np.array([[1]]), np.array(1), np.array([-1]), np.array([True])),
        *(np.array([], np.int64), np.array([2**63], np.uint64), np.array(["1"]), np.array([None])),
    ),
    "max_tokens": (*INTEGERS, 0, -1, 2**31, HUGE, Raising(TypeError)),
    "temperature": (None, "1", True, NAN, INF, -1, 1e7, HUGE, 1e-9, [1.0], np.array([1.0])),
    "top_p": (None, "1", True, NAN, 0, 2, HUGE),
    "top_k": (*INTEGERS, -1, HUGE),
    "min_p": (None, "1", True, NAN, -1, 1.5),
    "seed": (*INTEGERS[1:], -1, 2**63, HUGE),
    "min_tokens": (*INTEGERS, -1, 5),
    "ignore_eos": (None, 1, 0, "true", np.int64(1), Raising(ValueError)),
    "stop_token_ids": (None, 5, "12", (1.5,), (True,), ((1,),), (-1,), (HUGE,), {1: 1}),
    "logprobs": (*INTEGERS[1:], -1, 21),
    "lora": (5, "", b"a", "\ud800", "x" * 257, ("a",)),
    "structured_outputs": (
        *("[0-9]", {"regex": "a"}, StructuredOutput(kind="x", text="a")),
        *(StructuredOutput(kind="regex", text=text) for text in (5, "", "\ud800", "a" * 65537)),
    ),
    "pooling": ("embed", {"task": "embed"}, 5),
    "presence_penalty": (None, "1", NAN, 3),
    "frequency_penalty": (None, "1", NAN, -3),
    "repetition_penalty": (None, "1", NAN, 0),
    "logit_bias": (None, 5, [1], {"1": 1.0}, {1: "1"}, {1: NAN}, {1: 101}, {-1: 1.0}, {True: 1.0}),
    "allowed_token_ids": ((), 5, "12", (1.5,), (-1,), (True,)),
    "bad_words": (None, "x", ("x",), (1,), ((),), ((1.5,),), ((1,) * 17,), (((1,),),)),
    "logprob_token_ids": ((), 5, "12", (1.5,), (-1,)),
    "prompt_logprobs": (*INTEGERS[1:], -1, 21),
    "logits_processors": (None, "even", (1,), ("",), ("\ud800",), ("a",) * 9),
    "n": (*INTEGERS, 0, 65, HUGE),
    "index": (*INTEGERS[1:], -1),
    "stop": (None, "x", (1,), ("",), ("\ud800",), ("a",) * 17, ("a" * 513,)),
    "include_stop_str_in_output": (None, 1, "true"),
    "full_logprobs": (None, 1, "true"),
    "prompt_embeds": (
        *(5, "x", [[1.0]], np.zeros((2, 4)), np.zeros(4, np.float32), np.zeros((0, 4), np.float32)),
        *(HostTensor("float32", (1, 4), None, b"x" * 32), HostTensor(5, "ab", None, None)),
        HostTensor("float32", (1, 4), memoryview(bytes(16)), b"x"),
    ),
    "prompt_embeds_at": (None, 5, [1], [(0,)], [(0, 1, 2)], [(-1, 1)], [("0", 1)], [(0, 1)]),
    "features": (None, 5, [], "ab", *((extension,) for extension in OWN_FIELDS)),
    "sampling": (None, 5, {"temperature": 1.0}, PoolingParams(task="embed"), SamplingParams),
    "routed_experts": (None, 1, "true", True),  # the model keeps none
    "replay_experts": (
        *(5, "x", [[[1]]], np.zeros((1, 1, 1)), np.zeros((1, 1), np.int64), np.array([[["1"]]])),
        *(np.zeros((0, 1, 1), np.uint8), np.zeros((1, 0, 1), np.uint8), np.array([[[None]]])),
        *(np.full((1, 1, 1), -1), np.full((1, 1, 1), 2**15), np.full((1, 1, 1), 2**63, np.uint64)),
        *(np.zeros((4, 1, 1), np.uint8), np.zeros((1, 1, 1), np.bool_)),
        np.zeros((3, 1, 1), np.uint8),
    ),
    "output_token_ids": (None, 5, "12", [1.5], [True], [[1]], [-1], [HUGE], {1: 1}, [1] * 5),
    "continues": (
        *(5, "ab", [1, 2], {"token_ids": [1]}, output(token_ids=(1, 2)), output(token_ids=[])),
        *(output(token_ids=None), output(token_ids=[1.0]), output(token_ids=[-1])),
        *(output(token_ids=[50]), output(token_ids=[1] * 4), output(finish_reason="stop")),
        *(output(logprobs=[]), output(prompt_logprobs=[None]), output(full_logprobs=[])),
        output(token_id_logprobs=[np.zeros(1, np.float32)]),
    ),
    "priority": (*INTEGERS, -(2**31) - 1, 2**31, HUGE, Raising(TypeError)),
    "deadline": ("1", True, NAN, INF, -1, HUGE, np.array([1.0]), np.datetime64("2026-01-01")),
}
"""Values that are refused, by field."""

NEAR = {
    "prompt": (
        *([1, 2], (1, 2), [np.int64(1), 2], np.array([1, 2]), np.array([1, 2], np.uint8)),
        np.array([1, 9, 2], ">i4")[::2],
    ),
    "max_tokens": (4, np.int64(4), Number(4)),
    "temperature": (0, np.float32(0.5), np.int8(1)),
    "stop_token_ids": ([1, 2], (1, 2), np.array([1, 2]), [np.int32(1), 2]),
    "bad_words": ([[1, 2]], ((1, 2),), [np.array([1, 2])]),
    "stop": (["a"], ("a",)),
    "ignore_eos": (True, np.bool_(True)),
    "logit_bias": ({1: 2}, {np.int64(1): np.float32(2)}),
    "features": ((LoraRequest(name="a", lora_id=1, version=1),),),
    "output_token_ids": ([1, 2], np.array([1, 2]), (np.int64(1),)),
    "continues": (None, output()),
    "priority": (-3, np.int64(3)),
    "deadline": (None, 7, np.float32(0.5)),
}
"""Values that are taken, by field."""


def test_there_are_wrong_values_of_every_field():
    names = {field.name for field in fields(GenerationRequest)}
    assert names | {*SamplingParams.__struct_fields__} == WRONG.keys()


def request(**fields):
    own = {"id": "r", "prompt": np.array([1, 2, 3], np.int32), "max_tokens": 4}
    return flat_request(**{**own, **fields})


def state(driver):
    """Everything that a request changes."""
    queues, uploads = driver.scheduler._queues, uploads_of(driver)
    return (
        *(dict(queues.unfinished), list(queues.waiting), dict(queues._behind), dict(queues._held)),
        *(driver.scheduler.num_free_blocks, driver.scheduler.has_unfinished_requests()),
        *(dict(uploads._needs), dict(uploads._tensors), list(uploads._queue)),
        *(dict(driver._times._added), driver.busy),
    )


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_value_is_refused_by_its_field_and_leaves_nothing(field):
    driver = Driver(Ranks(), Scheduler(LIMITS))
    before = state(driver)
    for value in WRONG[field]:
        with pytest.raises(RequestError) as refused:
            driver.add_request(request(**{field: value}))
        assert refused.value.field == path_of(field), refused.value
        assert refused.value.fix and len(str(refused.value).encode()) < 2000
        assert state(driver) == before
        if field != "lora":  # whose adapter's id is missing anyway
            with pytest.raises(RequestError):
                Scheduler(LIMITS).add_request(request(**{field: value}))
    driver.add_request(request())
    with pytest.raises(RequestError, match="in use"):
        driver.add_request(request(max_tokens=5))
    assert list(driver.scheduler._queues.unfinished) == ["r"]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"logprobs": 1},
        {"prompt_logprobs": 1},
        {"stop_token_ids": (2,)},
        {"max_tokens": 2},
    ],
)
def test_an_output_that_is_not_the_request_s_is_refused(fields):
    driver = Driver(Ranks(), Scheduler(LIMITS))
    before = state(driver)
    with pytest.raises(RequestError) as refused:
        driver.add_request(request(continues=output(), **fields))
    assert refused.value.field == "continues"
    assert state(driver) == before


@pytest.mark.parametrize("field", NEAR)
def test_values_that_are_meant_become_plain_ones(field):
    for value in NEAR[field]:
        plain = validated(request(**{field: value}))
        found = getattr(plain if hasattr(plain, field) else plain.sampling, field)
        if field == "prompt":
            assert found.dtype == np.int32 and found.tolist() == [1, 2]
        else:
            assert not isinstance(found, np.generic | np.ndarray | list)
            assert validated(plain) is plain
        Driver(Ranks(), Scheduler(replace(LIMITS, max_loras=1), Texts())).add_request(plain)


class Texts:
    """A tokenizer of no words."""

    def stream(self):
        return self

    def push(self, token_id):
        return ""


class Failing(Scheduler):
    """A scheduler that fails after it has taken some requests."""

    def __init__(self, error, after):
        super().__init__(LIMITS)
        self.error, self.after = error, after

    def add_request(self, request):
        super().add_request(request)
        self.after -= 1
        if self.after < 0:
            raise self.error


@pytest.mark.parametrize("error", [TypeError("a"), MemoryError(), KeyError("a"), RecursionError()])
@pytest.mark.parametrize(
    "fields", [{}, {"n": 4}, {"prompt_embeds": np.ones((2, 4), np.float32), "n": 2}]
)
def test_whatever_a_scheduler_raises_is_the_requests_error(error, fields):
    scheduler = Failing(error, 0)
    driver = Driver(Ranks(), scheduler)
    before = state(driver)
    for after in range(fields.get("n", 1)):
        scheduler.after = after
        with pytest.raises(RequestError) as refused:
            driver.add_request(request(**fields))
        assert refused.value.__cause__ is error
        assert state(driver) == before
    scheduler.after = 100
    driver.add_request(request(**fields))
    assert len(scheduler._queues.unfinished) == fields.get("n", 1)
    driver.abort_request("r")
    assert state(driver) == before


@pytest.mark.parametrize("req_id", [None, 5, [], b"r", Raising(ValueError)])
def test_odd_ids_abort_nothing(req_id):
    driver = Driver(Ranks(), Scheduler(LIMITS))
    driver.add_request(request())
    before = state(driver)
    with pytest.raises(RequestError) as refused:
        driver.abort_request(req_id)
    assert refused.value.field == "id"
    for name in ("", "\ud800", "x" * 1000, "r#0"):
        driver.abort_request(name)
    assert state(driver) == before
    driver.abort_request("r")
    assert not driver.busy


def test_a_sample_does_not_wait_for_itself():
    """A request that says it is a later sample, under the id of the first."""
    scheduler = Scheduler(LIMITS)
    scheduler.add_request(request(id="a#0", index=1))
    assert [new.req_id for new in scheduler.schedule().scheduled_new_reqs] == ["a#0"]


def test_showing_a_wrong_value_costs_little():
    """A repr of the whole value would have millions of characters."""
    for value in (["x" * 100] * 10**6, dict.fromkeys(range(10**6), "x"), "x" * 10**7):
        with pytest.raises(RequestError) as refused:
            validated(request(ignore_eos=value))
        assert len(str(refused.value)) < 1000


@pytest.mark.parametrize(
    ("name", "lora_id", "field"),
    [
        *((name, None, "name") for name in ("", "\ud800", "x" * 257, 5, None, b"a")),
        *(("a", lora_id, "lora_id") for lora_id in (0, -1, 2**31, True, "1", 1.5)),
    ],
)
def test_adapters_that_no_message_can_carry(name, lora_id, field):
    adapters = GroupLoras(None)  # which it does not ask
    with pytest.raises(Exception, match="fix: give") as refused:
        adapters.begin_add(name, lora_id)
    assert refused.value.field == field
    for ask in (adapters.remove, adapters.pin):
        with pytest.raises(Exception, match="lora_id"):
            ask(0)


def test_random_values_are_taken_or_refused():
    """What is taken, a step can admit: one that cannot be sent would end all requests."""
    seed = random.randrange(10**6)

    rng = random.Random(seed)
    driver = Driver(Ranks(), Scheduler(LIMITS, Texts(), clock=lambda: -1.0))  # no deadline passes
    for number in range(500):
        before = state(driver)
        try:
            driver.add_request(odd_request(rng))
        except RequestError as error:
            assert error.field and error.fix, f"seed {seed}, number {number}"
            assert state(driver) == before, f"seed {seed}, number {number}"
        except Exception as error:
            error.add_note(f"seed {seed}, number {number}")
            raise
        else:
            output = driver.scheduler.schedule()
            if output is not None:  # it does not wait for its embeddings
                SlotTable(8, group_bounds(LIMITS)).encode(output, epoch=1, link=1, seq=number)
                driver.scheduler.step_failed([output], frozenset())
            for req_id in list(driver.scheduler._queues.unfinished):
                driver.abort_request(req_id)
            assert not driver.busy


class Text(str):
    """A text of a type of its own."""


@pytest.mark.parametrize(
    "fields",
    [
        *({name: Number(4)} for name in ("max_tokens", "priority", "deadline", "seed", "top_k")),
        *({"stop_token_ids": (Number(4),)}, {"logit_bias": {Number(1): 2.0}}),
        *({"id": Text("a")}, {"stop": (Text("a"),)}, {"stop": [Text("a")]}),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_equal_values_of_other_types_become_plain(fields):
    """A message carries numbers and texts, not what is derived from them."""
    driver = Driver(Ranks(), Scheduler(LIMITS, Texts(), clock=lambda: -1.0))
    driver.add_request(request(**fields))
    SlotTable(8, group_bounds(LIMITS)).encode(driver.scheduler.schedule(), epoch=1, link=1, seq=1)


def test_extensions_with_fields_are_all_known():
    features = {LoraRequest, PromptEmbeds}
    assert {*KINDS} - features == {type(each) for each in OWN_FIELDS}

"""Fields of vLLM's requests: translated, left to vLLM, or refused; and which requests are known."""

import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc_schema.pooling import MAX_POOLED_BYTES, PooledTask, PoolingParams, PoolingSupport
from rpc_schema.sampling import MAX_STOP_TOKEN_IDS
from rpc_schema.token_rules import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASED_TOKENS
from tests.support import vllm_shapes as vllm
from worker_client.errors import ClientError, RequestError
from worker_client.parts.interface import ModelBounds
from worker_client.requests import SamplingParams as Ours
from worker_client.steps.step_checks import MAX_ADMITTED_TOKENS, MAX_ID_LENGTH, id_fault
from worker_client.vllm.requests import (
    SAMPLING_FIELDS,
    Requests,
    check_fields,
    pooling_params,
    sampling_params,
    wire_id,
)

VOCAB_SIZE = 5000
BOUNDS = ModelBounds(
    VOCAB_SIZE,
    pooling=PoolingSupport(tasks=(PooledTask(task="embed", width=8, states="last"),)),
    logits_processors=("shout",),
)


def no_adapter(request: object) -> None:
    raise AssertionError(f"no request has an adapter: {request}")


@pytest.fixture
def requests():
    return Requests(BOUNDS, no_adapter)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {"temperature": 1.0, "seed": 11}),
        ({"temperature": 0.0}, {}),
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 5}, {}),
        (
            {"temperature": 0.7, "top_p": 0.0, "top_k": -1, "min_p": 0.25, "seed": 5},
            {"temperature": 0.7, "top_p": 1e-6, "top_k": 0, "min_p": 0.25, "seed": 5},
        ),
        ({"seed": -1}, {"temperature": 1.0, "seed": 2**63 - 1}),
        ({"seed": 2**63 + 7}, {"temperature": 1.0, "seed": 7}),
        ({"temperature": 0.0, "presence_penalty": -2.0}, {"presence_penalty": -2.0}),
        ({"temperature": 0.0, "frequency_penalty": 0.5}, {"frequency_penalty": 0.5}),
        ({"temperature": 0.0, "repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"temperature": 0.0, "logit_bias": {4: -1.5}}, {"logit_bias": {4: -1.5}}),
        ({"temperature": 0.0, "allowed_token_ids": [9, 2]}, {"allowed_token_ids": (9, 2)}),
        (
            {"temperature": 0.0, "bad_words": ["x"], "_bad_words_token_ids": [[1, 2], [3]]},
            {"bad_words": ((1, 2), (3,))},
        ),
        (
            {"temperature": 0.0, "min_tokens": 3, "_all_stop_token_ids": {7, 2}},
            {"min_tokens": 3, "stop_token_ids": (2, 7)},
        ),
        ({"temperature": 0.0, "_all_stop_token_ids": {7, 2}}, {}),
        ({"temperature": 0.0, "logprobs": 0}, {"logprobs": 0}),
        ({"temperature": 0.0, "logprobs": 20}, {"logprobs": 20}),
        ({"temperature": 0.0, "prompt_logprobs": 2}, {"prompt_logprobs": 2}),
        (
            {"temperature": 0.0, "logprob_token_ids": [5, 1], "logprobs": 3},
            {"logprob_token_ids": (5, 1), "logprobs": 0},
        ),
        (
            {"temperature": 0.0, "extra_args": {"logits_processors": ["shout"]}},
            {"logits_processors": ("shout",)},
        ),
        (
            {"temperature": 0.0, "extra_args": {"logits_processors": "shout"}},
            {"logits_processors": ("shout",)},
        ),
    ],
)
def test_sampling_fields_are_translated(theirs, ours):
    assert sampling_params(vllm.SamplingParams(**theirs), 11) == Ours(**ours)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 4, "max_tokens": None, "stop": ["x"], "stop_token_ids": [3], "ignore_eos": True},
        {"detokenize": False, "structured_outputs": object(), "skip_clone": True},
    ],
)
def test_fields_of_vllms_own_change_nothing(fields):
    plain = sampling_params(vllm.SamplingParams(), 11)
    assert sampling_params(vllm.SamplingParams(**fields), 11) == plain


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"watermarking": True}, "watermarking"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"thinking_token_budget": 0}, "thinking_token_budget"),
        ({"prompt_logprob_token_ids": [[1]]}, "prompt_logprob_token_ids"),
        ({"prompt_logprob_token_ids": np.zeros((2, 3))}, "prompt_logprob_token_ids"),
        ({"routed_experts_prompt_start": 2}, "routed_experts_prompt_start"),
        ({"logprobs": -1}, "logprobs"),
        ({"extra_args": {"kv_transfer_params": {}}}, "extra_args.kv_transfer_params"),
        ({"extra_args": {"logits_processors": [1]}}, "extra_args.logits_processors"),
        ({"extra_args": {"logits_processors": 1}}, "extra_args.logits_processors"),
        ({"extra_args": {"logits_processors": None}}, "extra_args.logits_processors"),
        ({"logprob_token_ids": [2**40]}, "logprob_token_ids"),
        ({"logit_bias": {2**40: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [-(2**40)]}, "allowed_token_ids"),
        ({"_bad_words_token_ids": [[1], list(range(300))]}, "bad_words"),
        ({"logit_bias": {1: 1e300}}, "logit_bias"),
    ],
)
def test_fields_that_are_not_served_are_refused_by_name(fields, named):
    with pytest.raises(RequestError) as caught:
        sampling_params(vllm.SamplingParams(**fields), 11)
    assert caught.value.field == named


def test_our_options_have_the_names_of_vllms():
    """As its golden file lists them. It has logits_processors in extra_args, and no place for
    full_logprobs in its outputs."""
    theirs = json.loads(Path("tests/vllm/surface.json").read_text())["structs"]["SamplingParams"]
    assert {*Ours.__struct_fields__} - {*theirs} == {"logits_processors", "full_logprobs"}


@pytest.mark.parametrize("value", [None, False])
def test_unserved_field_that_is_off_is_let_through(value):
    check_fields(vllm.SamplingParams(watermarking=value), SAMPLING_FIELDS)


def test_field_of_a_later_vllm_is_refused_once_it_is_set():
    later = msgspec.defstruct(
        "Later",
        [("dreams", int, 3), ("names", list, msgspec.field(default_factory=list))],
        bases=(vllm.SamplingParams,),
    )
    check_fields(later(), SAMPLING_FIELDS)
    for wrong in ({"dreams": 4}, {"dreams": 0}, {"names": ["a"]}):
        with pytest.raises(RequestError) as caught:
            check_fields(later(**wrong), SAMPLING_FIELDS)
        assert caught.value.field == next(iter(wrong))


def test_pooling_fields_are_translated():
    theirs = vllm.PoolingParams(
        task="embed", use_activation=False, dimensions=4, requires_token_ids=True
    )
    ours = PoolingParams(task="embed", use_activation=False, dimensions=4)
    assert pooling_params(theirs) == ours
    assert pooling_params(vllm.PoolingParams(task="classify")) == PoolingParams(task="classify")
    for start in (0, 7):
        pair = {"compressed_token_type_ids": start}
        theirs = vllm.PoolingParams(task="classify", extra_kwargs=pair)
        assert pooling_params(theirs) == PoolingParams(task="classify", second_start=start)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step_tag_id", 0),
        ("step_tag_id", 7),
        ("returned_token_ids", [3]),
        ("late_interaction_params", object()),
        ("late_chunking_params", object()),
        ("extra_kwargs", {"width": 8}),
        ("extra_kwargs", {"compressed_token_type_ids": 3, "width": 8}),
        ("extra_kwargs", {}),
    ],
)
def test_pooling_fields_that_are_not_served_are_refused(field, value):
    with pytest.raises(RequestError, match=field):
        pooling_params(vllm.PoolingParams(task="embed", **{field: value}))


@given(st.text() | st.text(alphabet=st.characters(codec=None)))
def test_every_id_has_one_that_may_travel(text):
    assert id_fault(wire_id(text)) is None


@pytest.mark.parametrize(
    ("text", "stays"),
    [
        ("cmpl-0-ab", True),
        ("x" * MAX_ID_LENGTH, True),
        ("x" * 300, False),
        ("a\nb", False),
        ("a\ud800b", False),
        ("", False),
        ("ключ", True),
    ],
)
def test_ids_that_may_travel_stay(text, stays):
    assert (wire_id(text) == text) == stays
    assert wire_id(text) == wire_id(str(text))
    assert wire_id(text) != wire_id(text + "y")


def refusal(requests, req_id="a", num_prompt_tokens=5, **fields):
    params = vllm.SamplingParams(**{"temperature": 0.0, **fields})
    return requests.find_refusal(vllm.Request(req_id, params, num_prompt_tokens=num_prompt_tokens))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"min_tokens": 1, "_all_stop_token_ids": set(range(MAX_STOP_TOKEN_IDS + 1))}, "token_ids"),
        ({"min_tokens": 1, "_all_stop_token_ids": {-4}}, "token_ids"),
        ({"min_tokens": 1, "_all_stop_token_ids": {2**40}}, "token_ids"),
        ({"logit_bias": dict.fromkeys(range(MAX_BIASED_TOKENS + 1), 1.0)}, "logit_bias"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ({"logit_bias": {2**40: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": list(range(4097))}, "allowed_token_ids"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
        ({"_bad_words_token_ids": [[1]] * (MAX_BAD_WORDS + 1)}, "bad_words"),
        ({"_bad_words_token_ids": [[1] * (MAX_BAD_WORD_TOKENS + 1)]}, "bad_words"),
        ({"logprob_token_ids": list(range(129))}, "logprob_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"temperature": 1e9}, "temperature"),
        ({"temperature": 1.0, "top_k": 2**40}, "top_k"),
        ({"repetition_penalty": 1e5}, "repetition_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"min_tokens": 2**40}, "min_tokens"),
        ({"extra_args": {"logits_processors": ["whisper"]}}, "whisper"),
        ({"thinking_token_budget": 3}, "thinking_token_budget"),
    ],
)
def test_values_out_of_bounds_are_refused(requests, fields, said):
    assert said in refusal(requests, **fields)
    assert requests.find("a") is None
    assert refusal(requests) == ""  # the id is free yet


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 1, "_all_stop_token_ids": set(range(MAX_STOP_TOKEN_IDS))},
        {"logit_bias": dict.fromkeys(range(MAX_BIASED_TOKENS), 1.0)},
        {"_bad_words_token_ids": [[1] * MAX_BAD_WORD_TOKENS] * MAX_BAD_WORDS},
        {"allowed_token_ids": list(range(4096))},
    ],
)
def test_values_at_their_bounds_are_taken(requests, fields):
    assert refusal(requests, **fields) == ""


def test_prompt_that_no_message_holds_is_refused(requests):
    assert refusal(requests, num_prompt_tokens=MAX_ADMITTED_TOKENS) == ""
    assert "too long" in refusal(requests, "b", num_prompt_tokens=MAX_ADMITTED_TOKENS + 1)


def test_pooling_task_that_the_model_lacks_is_refused(requests):
    def ask(req_id, task):
        params = vllm.PoolingParams(task=task)
        return requests.find_refusal(vllm.Request(req_id, pooling_params=params))

    assert ask("a", "embed") == ""
    assert requests["a"].extensions == (PoolingParams(task="embed"),)
    assert "classify" in ask("b", "classify")
    assert "plugin" in ask("c", "plugin")


@pytest.mark.parametrize(
    ("states", "whole", "skips"),
    [("last", False, False), ("mean", False, True), ("each", False, True), ("last", True, True)],
)
def test_output_of_all_states_takes_no_cached_prefix(states, whole, skips):
    task = PooledTask(task="embed", width=8, states=states)
    bounds = ModelBounds(VOCAB_SIZE, pooling=PoolingSupport(tasks=(task,), whole_prompts=whole))
    request = vllm.Request("a", pooling_params=vllm.PoolingParams(task="embed"))
    assert Requests(bounds, no_adapter).find_refusal(request) == ""
    assert request.skip_reading_prefix_cache is skips


def test_output_that_no_reply_holds_is_refused():
    task = PooledTask(task="token_embed", width=1 << 10, states="each")
    requests = Requests(ModelBounds(VOCAB_SIZE, pooling=PoolingSupport(tasks=(task,))), no_adapter)
    most = MAX_POOLED_BYTES >> 12

    def ask(req_id, num_prompt_tokens):
        params = vllm.PoolingParams(task="token_embed")
        return requests.find_refusal(vllm.Request(req_id, None, params, num_prompt_tokens))

    assert ask("a", most) == ""
    assert requests["a"].output_bytes == MAX_POOLED_BYTES
    assert f"at most {most} tokens" in ask("b", most + 1)


def test_seed_is_drawn_once_and_stays(requests):
    request = vllm.Request("a", vllm.SamplingParams())
    assert requests.find_refusal(request) == ""
    first = requests["a"].extensions
    assert requests.find_refusal(request) == ""
    assert requests["a"].extensions is first
    seeds = set()
    for index in range(8):
        requests.find_refusal(vllm.Request(str(index), vllm.SamplingParams()))
        seeds.add(Ours.of(requests[str(index)].extensions).seed)
    assert len(seeds) == 8


def test_session_that_replaces_its_parameters_is_translated_anew(requests):
    request = vllm.Request("a", vllm.SamplingParams(temperature=0.0))
    requests.find_refusal(request)
    request.sampling_params = vllm.SamplingParams(temperature=0.0, logprobs=2)
    assert requests.find_refusal(request) == ""
    assert Ours.of(requests["a"].extensions).logprobs == 2


def test_long_ids_are_found_and_forgotten(requests):
    long = "x" * 300
    refusal(requests, long)
    refusal(requests, "a")
    assert requests.find(wire_id(long)) is requests[long]
    assert requests.find("a") is requests["a"]
    requests.forget([long, "a", "unknown"])
    assert requests.find(wire_id(long)) is None
    assert requests.find("a") is None


def test_adapter_is_loaded_before_its_request_is_scheduled():
    asked = []

    def load(adapter):
        asked.append(adapter.lora_int_id)
        if adapter.lora_int_id == 2:
            raise ClientError("there is no such directory")

    requests = Requests(BOUNDS, load)
    for lora_id, said in ((1, ""), (2, "no such directory")):
        request = vllm.Request(
            str(lora_id), vllm.SamplingParams(), lora_request=SimpleNamespace(lora_int_id=lora_id)
        )
        assert said in requests.find_refusal(request)
    assert requests["1"].lora_id == 1
    assert asked == [1, 2]

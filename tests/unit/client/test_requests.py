"""Input lines: parsing, and the errors of wrong ones."""

import json

import numpy as np
import pytest

from tests.support.flat_requests import flat_request, path_of
from worker_client.cli.session import read_inputs
from worker_client.errors import RequestError
from worker_client.inputs.request_checks import check_fits
from worker_client.inputs.request_fields import flat
from worker_client.inputs.request_parser import RequestParser
from worker_client.requests import derived_seed
from worker_client.scheduler import Scheduler, SchedulerLimits


def parse(fields, **options):
    return RequestParser(lambda text: [ord(c) for c in text], **options).parse(
        json.dumps(fields), 4
    )


def test_fields_and_defaults():
    request = parse({"prompt": "ab"}, seed=9)
    assert (request.id, request.prompt.tolist()) == ("4", [97, 98])
    assert (request.sampling.temperature, request.sampling.seed) == (0.0, derived_seed(9, 4))
    given = {
        "id": "x", "prompt_token_ids": [3, 4], "max_tokens": 5, "temperature": 1, "top_p": 0.5,
        "top_k": 7, "min_p": 0.1, "seed": 8, "min_tokens": 2, "ignore_eos": True,
        "stop_token_ids": [1], "logprobs": 20, "presence_penalty": -1, "frequency_penalty": 2.0,
        "repetition_penalty": 1.5,
    }  # fmt: skip
    rules = {"logit_bias": {"3": 1, "70": -2.5}, "allowed_token_ids": [5, 3], "bad_words": [[4, 5]]}
    request = parse({**given, **rules})
    assert request.sampling.logit_bias == {3: 1.0, 70: -2.5}
    assert request.sampling.allowed_token_ids == (5, 3) and request.sampling.bad_words == ((4, 5),)
    assert request.prompt.tolist() == given.pop("prompt_token_ids")
    assert request.sampling.stop_token_ids == tuple(given.pop("stop_token_ids"))
    assert (request.id, request.max_tokens) == (given.pop("id"), given.pop("max_tokens"))
    assert all(getattr(request.sampling, field) == value for field, value in given.items())
    assert request.sampling.stop_ids([2]) == (1,)
    assert parse({"prompt": "a"}).sampling.stop_ids([2]) == (2,)


def test_requests_without_seeds_differ():
    seeds = {parse({"prompt": "a"}).sampling.seed for _ in range(20)}
    assert len(seeds) == 20
    one, two = (parse({"prompt": "a"}, seed=seed) for seed in (1, 2))
    assert one.sampling.seed != two.sampling.seed


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"prompt_token_ids": [1, -2]}, "prompt_token_ids"),
        ({"prompt_token_ids": [2**31]}, "prompt_token_ids"),
        ({"prompt_token_ids": [1.5]}, "prompt_token_ids"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids"),
        ({"prompt": "a", "id": [1]}, "id"),
        ({"prompt": "a", "id": "x" * 257}, "id"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "9"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
        ({"prompt": "a", "frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"1": float("nan")}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"1": 1e300}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
        ({"prompt": "a", "allowed_token_ids": [2**31]}, "allowed_token_ids"),
        ({"prompt": "a", "allowed_token_ids": [1] * 4097}, "allowed_token_ids"),
        ({"prompt": "a", "bad_words": [[]]}, "bad_words"),
        ({"prompt": "a", "bad_words": [[1] * 17]}, "bad_words"),
        ({"prompt": "a", "bad_words": [[1]] * 2 + [[n] for n in range(257)]}, "bad_words"),
        ({"prompt": "a", "bad_words": ["x"]}, "bad_words"),
        ({"prompt": "a", "bad_words": "x"}, "bad_words"),
        ({"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt": "a", "logprob_token_ids": []}, "logprob_token_ids"),
        ({"prompt": "a", "logprob_token_ids": [1] * 129}, "logprob_token_ids"),
        ({"prompt": "a", "logprob_token_ids": [-1]}, "logprob_token_ids"),
        ({"prompt": "a", "temperature": True}, "temperature"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "top_k": -1}, "top_k"),
        ({"prompt": "a", "min_p": 1.5}, "min_p"),
        ({"prompt": "a", "seed": -1}, "seed"),
        ({"prompt": "a", "min_tokens": 17}, "min_tokens"),
        ({"prompt": "a", "ignore_eos": 1}, "ignore_eos"),
        ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "max_token": 3}, "max_token"),
        ([], "line"),
    ],
)
def test_wrong_fields_are_named(fields, field):
    with pytest.raises(RequestError, match=r"^line 5: .*; fix: ") as caught:
        parse(fields)
    assert (caught.value.field, caught.value.line) == (field, 5)


@pytest.mark.parametrize("text", ["{", "nonsense", "[" * 100_000])
def test_lines_that_are_no_json(text):
    with pytest.raises(RequestError, match="line 1: not JSON"):
        RequestParser(None).parse(text, 0)


def test_text_needs_a_tokenizer():
    with pytest.raises(RequestError, match=r"tokenizer\.json"):
        RequestParser(None).parse('{"prompt": "a"}', 0)


def test_bad_words_of_text_are_banned_with_a_space_before_them_too():
    def encode(text):
        return [ord(c) for c in text]

    parser = RequestParser(encode, encode_word=encode)
    line = json.dumps({"prompt": "a", "bad_words": ["ab", " ab", [7, 8]]})
    assert set(parser.parse(line, 0).sampling.bad_words) == {(97, 98), (32, 97, 98), (7, 8)}


def test_rules_on_tokens_are_checked_against_the_model():
    """By what a scheduler asks, naming the field of the line."""
    limits = SchedulerLimits(4, 32, 64, 64, 4, vocab_size=12)
    for rules, field in (
        ({"logit_bias": {12: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (3, 12)}, "allowed_token_ids"),
        ({"logprob_token_ids": (3, 12)}, "logprob_token_ids"),
        ({"bad_words": ((3, 12),)}, "bad_words"),
    ):
        request = flat_request("a", np.array([5], np.int32), **rules)
        with pytest.raises(RequestError) as refused:
            Scheduler(limits).add_request(request)
        assert (refused.value.field, bool(refused.value.fix)) == (path_of(field), True)


def test_requests_are_checked_against_the_model():
    request = parse({"prompt_token_ids": [5] * 10, "stop_token_ids": [11]})
    check_fits(request, max_model_len=11, vocab_size=12)
    with pytest.raises(RequestError, match="max_model_len = 10"):
        check_fits(request, max_model_len=10, vocab_size=12)
    with pytest.raises(RequestError, match="from 0 to 4"):
        check_fits(request, max_model_len=11, vocab_size=5)
    with pytest.raises(RequestError, match="stop_token_ids"):
        check_fits(request, max_model_len=11, vocab_size=6)


def test_what_a_scheduler_refuses_has_the_names_of_json_too():
    scheduler = Scheduler(SchedulerLimits(4, 32, 16, 64, 4, vocab_size=12))
    for fields, path, name in (
        ({"stop": "x"}, "sampling.stop", "stop"),
        ({"logit_bias": {"12": 1}}, "sampling.logit_bias", "logit_bias"),
        ({"prompt_token_ids": [5] * 16}, "prompt", "prompt_token_ids"),
        ({"lora": "a"}, "lora", "lora"),
    ):
        with pytest.raises(RequestError) as refused:
            scheduler.add_request(parse({"prompt_token_ids": [5], **fields}))
        assert refused.value.field == path
        error = flat(refused.value, "prompt_token_ids")
        assert error.field == name and "sampling" not in str(error)


def test_priorities_are_read():
    assert parse({"prompt": "a", "priority": -3}).priority == -3
    for wrong in ({"priority": 1.5}, {"priority": 2**31}, {"deadline": 5.0}):
        with pytest.raises(RequestError) as refused:
            parse({"prompt": "a", **wrong})
        assert [refused.value.field] == [*wrong]


def test_wrong_lines_do_not_stop_the_others():
    lines = ['{"id": 1, "prompt_token_ids": [1]}', "", "{", '{"id": "1", "prompt_token_ids": [1]}']
    entries = read_inputs(lines, None, None)
    assert [entry.id for entry in entries] == ["1", "line 3", "line 4"]
    assert entries[0].request is not None
    assert "not JSON" in entries[1].error and "occurs twice" in entries[2].error

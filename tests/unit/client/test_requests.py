"""Input lines: what they become, and what is said of wrong ones."""

import json

import pytest

from worker_client.cli.session import read_inputs
from worker_client.errors import RequestError
from worker_client.requests import RequestParser, check_fits, derived_seed


def parse(fields, **options):
    return RequestParser(lambda text: [ord(c) for c in text], **options).parse(
        json.dumps(fields), 4
    )


def test_fields_and_defaults():
    request = parse({"prompt": "ab"}, seed=9)
    assert (request.id, request.prompt_token_ids.tolist()) == ("4", [97, 98])
    assert (request.temperature, request.seed) == (0.0, derived_seed(9, 4))
    given = {
        "id": "x", "prompt_token_ids": [3, 4], "max_tokens": 5, "temperature": 1, "top_p": 0.5,
        "top_k": 7, "min_p": 0.1, "seed": 8, "min_tokens": 2, "ignore_eos": True,
        "stop_token_ids": [1], "logprobs": 20,
    }  # fmt: skip
    request = parse(given)
    assert request.prompt_token_ids.tolist() == given.pop("prompt_token_ids")
    assert request.stop_token_ids == tuple(given.pop("stop_token_ids"))
    assert all(getattr(request, field) == value for field, value in given.items())
    assert request.stop_ids([2]) == (1,)
    assert parse({"prompt": "a"}).stop_ids([2]) == (2,)


def test_requests_without_seeds_differ():
    seeds = {parse({"prompt": "a"}).seed for _ in range(20)}
    assert len(seeds) == 20
    assert parse({"prompt": "a"}, seed=1).seed != parse({"prompt": "a"}, seed=2).seed


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ""}, "prompt_token_ids"),
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


def test_requests_are_checked_against_the_model():
    request = parse({"prompt_token_ids": [5] * 10, "stop_token_ids": [11]})
    check_fits(request, max_model_len=11, vocab_size=12)
    with pytest.raises(RequestError, match="max_model_len = 10"):
        check_fits(request, max_model_len=10, vocab_size=12)
    with pytest.raises(RequestError, match="vocabulary has 5"):
        check_fits(request, max_model_len=11, vocab_size=5)
    with pytest.raises(RequestError, match="stop_token_ids"):
        check_fits(request, max_model_len=11, vocab_size=6)


def test_wrong_lines_do_not_stop_the_others():
    lines = ['{"id": 1, "prompt_token_ids": [1]}', "", "{", '{"id": "1", "prompt_token_ids": [1]}']
    entries = read_inputs(lines, None, None)
    assert [entry.id for entry in entries] == ["1", "line 3", "line 4"]
    assert entries[0].request is not None
    assert "not JSON" in entries[1].error and "occurs twice" in entries[2].error

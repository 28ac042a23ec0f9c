"""Seeded sampling does not depend on the shape of the group or on the company in the batch; ends
and minimum lengths are transformers' own."""

import json

import numpy as np
import pytest

from tests.support.checkpoints import decisive_prompts, edit_config, make_checkpoint, prompts
from tests.support.exhaustive import exhaustively
from tests.support.serving import generate, greedy_request

MAX_TOKENS = 16
PARAMETERS = {
    "plain": {"temperature": 1.0},
    "hot": {"temperature": 1.7, "seed": 99},
    "top_k": {"temperature": 1.3, "top_k": 7},
    "top_p": {"temperature": 1.3, "top_p": 0.8},
    "min_p": {"temperature": 1.5, "min_p": 0.05},
    "all": {"temperature": 1.2, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 2**63 - 1},
    "cold": {"temperature": 0.01, "top_k": 1},
}


@pytest.fixture(scope="module")
def reference(checkpoint):
    return checkpoint("LlamaForCausalLM", seed=41)


def sampled_requests():
    texts = prompts(12, [6, 11, 3, 24, 17, 9, 30])
    return [
        greedy_request(name, prompt, MAX_TOKENS, **{"seed": 5, **parameters})
        for prompt, (name, parameters) in zip(texts, PARAMETERS.items(), strict=True)
    ]


@pytest.fixture(scope="module")
def alone(serve, reference):
    """Each request's tokens from one daemon, with nothing else in the batch."""
    tokens = {}
    with serve(reference.path) as (group, loaded):
        for request in sampled_requests():
            tokens |= generate(group, loaded, [request]).tokens
    return tokens


@pytest.mark.parametrize("shape", [*map(exhaustively, [(1, 1), (2, 1), (1, 2), (3, 1)]), (2, 2)])
def test_seeded_tokens_are_the_same_everywhere(serve, reference, alone, shape):
    company = [
        greedy_request(
            f"x{index}", prompt, 20, temperature=index % 3 * 0.7, seed=index, top_k=index
        )
        for index, prompt in enumerate(prompts(13, [2, 40, 13, 7, 21, 33]))
    ]
    mixed = [request for pair in zip(company, sampled_requests(), strict=False) for request in pair]
    with serve(reference.path, *shape, num_gpu_blocks=64) as (group, loaded):
        together = generate(group, loaded, sampled_requests()).tokens
        crowded = generate(
            group, loaded, [*mixed, sampled_requests()[-1]], max_num_batched_tokens=19
        ).tokens
    assert together == alone
    assert {name: crowded[name] for name in alone} == alone


def test_seeds_and_temperatures_matter(serve, reference, alone):
    prompt = prompts(14, [10])[0]
    requests = [
        greedy_request(f"seed{seed}", prompt, MAX_TOKENS, temperature=1.5, seed=seed)
        for seed in range(8)
    ]
    with serve(reference.path) as (group, loaded):
        tokens = generate(group, loaded, requests).tokens
    assert len({tuple(value) for value in tokens.values()}) == len(requests)
    cold = next(request for request in sampled_requests() if request.id == "cold")
    assert alone["cold"] == reference.greedy(cold.prompt.tolist(), MAX_TOKENS)


@pytest.fixture(scope="module")
def ending(reference):
    """A prompt, its greedy tokens, and two of them that come first in the middle."""
    prompt = decisive_prompts(reference, 15, [9], MAX_TOKENS)[0].tolist()
    tokens = reference.greedy(prompt, MAX_TOKENS)
    first = [tokens.index(token) for token in tokens]
    fresh = [i for i in range(3, MAX_TOKENS - 3) if first[i] == i]
    return prompt, tokens, [tokens[i] for i in fresh[:2]]


@pytest.mark.parametrize("shape", [exhaustively((1, 1)), (2, 1), exhaustively((1, 2))])
def test_ends(serve, reference, ending, shape):
    prompt, tokens, (stop, later) = ending
    requests = {
        "length": {},
        "stop": {"stop_token_ids": (stop,)},
        "first of two": {"stop_token_ids": (later, stop)},
        "too early": {"stop_token_ids": (stop,), "min_tokens": 12},
        "just in time": {"stop_token_ids": (stop,), "min_tokens": tokens.index(stop)},
        "one too late": {"stop_token_ids": (stop,), "min_tokens": tokens.index(stop) + 1},
    }
    with serve(reference.path, *shape) as (group, loaded):
        outputs = generate(
            group,
            loaded,
            [greedy_request(name, prompt, MAX_TOKENS, **f) for name, f in requests.items()],
        ).outputs
        single = generate(group, loaded, [greedy_request("one", prompt, 1)]).outputs["one"]
    for name, fields in requests.items():
        expected = reference.greedy(
            prompt,
            MAX_TOKENS,
            eos=fields.get("stop_token_ids", ()),
            min_tokens=fields.get("min_tokens", 0),
        )
        assert outputs[name].token_ids == expected, name
        ended = expected[-1] in fields.get("stop_token_ids", ())
        assert outputs[name].finish_reason == ("stop" if ended else "length"), name
    assert outputs["length"].token_ids == tokens
    assert outputs["stop"].token_ids == tokens[: tokens.index(stop) + 1]
    assert (single.token_ids, single.finish_reason) == (tokens[:1], "length")


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
def test_end_of_sequence_token(serve, model_root, ending, where):
    prompt, tokens, (stop, later) = ending
    copy = make_checkpoint(model_root, "LlamaForCausalLM", seed=41)
    if where == "config.json":
        edit_config(copy, eos_token_id=stop)
        (copy.path / "generation_config.json").unlink(missing_ok=True)
    else:
        edit_config(copy, eos_token_id=later)
        (copy.path / where).write_text(json.dumps({"eos_token_id": [stop, later]}))
    requests = [
        greedy_request("eos", prompt, MAX_TOKENS),
        greedy_request("ignored", prompt, MAX_TOKENS, ignore_eos=True),
        greedy_request("other", prompt, MAX_TOKENS, ignore_eos=True, stop_token_ids=(later,)),
    ]
    with serve(copy.path, 2) as (group, loaded):
        outputs = generate(group, loaded, requests).outputs
    assert outputs["eos"].token_ids == tokens[: tokens.index(stop) + 1]
    assert outputs["eos"].finish_reason == "stop"
    assert outputs["ignored"].token_ids == tokens
    assert outputs["other"].token_ids == tokens[: tokens.index(later) + 1]


def test_context_length_ends_a_request(serve, reference, ending):
    prompt, tokens, _ = ending
    with serve(reference.path, 2, max_model_len=len(prompt) + 5) as (group, loaded):
        output = generate(group, loaded, [greedy_request("a", prompt, 99)]).outputs["a"]
    assert output.token_ids == tokens[:5]
    assert output.finish_reason == "length"
    assert np.shape(output.token_ids) == (5,)

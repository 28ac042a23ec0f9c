"""Placement of requests on replicas: even loads in tokens, prefixes that return, and limits."""

import numpy as np
import pytest

from worker_client.inputs.request_checks import validated
from worker_client.replicas import placement
from worker_client.replicas.placement import PREFIX_TOKENS, ReplicaPlacement
from worker_client.requests import GenerationRequest, PoolingParams, SamplingParams

RNG = np.random.default_rng()


def tokens_of(count: int):
    return RNG.integers(0, 1000, count).astype(np.int32)


def request_of(name: str, prompt, max_tokens: int = 1, **fields) -> GenerationRequest:
    return validated(GenerationRequest(name, prompt, max_tokens, **fields))


def place(placed: ReplicaPlacement, name: str, prompt, max_tokens: int = 1, **fields) -> int:
    return placed.place(name, request_of(name, prompt, max_tokens, **fields), range(3))


def test_loads_stay_even_in_tokens_as_requests_come_and_go():
    placed, sizes = ReplicaPlacement(3), [{}, {}, {}]
    for number in range(500):
        name, prompt = f"r{number}", tokens_of(int(RNG.integers(1, 60)))
        max_tokens = int(RNG.choice([1, 20, 300, 2000]))
        loads = [sum(own.values()) for own in sizes]
        chosen = place(placed, name, prompt, max_tokens)
        assert loads[chosen] == min(loads)
        sizes[chosen][name] = len(prompt) + max_tokens
        if RNG.random() < 0.5:
            gone = str(RNG.choice([each for own in sizes for each in own]))
            placed.remove(gone)
            for own in sizes:
                own.pop(gone, None)
    placed.remove("nobody")


def test_a_prefix_returns_until_the_others_have_so_much_less_to_do():
    placed, prefix = ReplicaPlacement(3), tokens_of(10 * PREFIX_TOKENS)
    busy = [place(placed, f"busy{number}", tokens_of(5), 100) for number in range(3)]
    assert sorted(busy) == [0, 1, 2]
    home = place(placed, "first", prefix, 1)
    placed.remove("first")
    found = []
    for number in range(8):  # each leaves 200 tokens there, and 640 of the prefix are saved
        found.append(place(placed, f"r{number}", np.append(prefix, tokens_of(100)), 100))
    assert found[:4] == [home] * 4 and {*found[4:]} != {home}


def test_other_prompts_adapters_and_weights_share_no_prefix():
    placed, prompt = ReplicaPlacement(3), tokens_of(4 * PREFIX_TOKENS)
    place(placed, "busy", tokens_of(5), 50)
    home = place(placed, "first", prompt)
    placed.remove("first")
    assert home != 0
    placed.remove("busy")
    changed = prompt.copy()
    changed[0] += 1
    assert place(placed, "changed", changed) == 0
    placed.remove("changed")
    assert place(placed, "adapter", prompt, lora="a") == 0
    placed.remove("adapter")
    assert place(placed, "again", prompt) == home
    placed.remove("again")
    placed.forget_prefixes()
    assert place(placed, "updated", prompt) == 0


def test_embedded_prompts_have_no_prefix():
    placed, prompt = ReplicaPlacement(3), [0] * (2 * PREFIX_TOKENS)
    embeds = np.ones((len(prompt), 4), np.float32)
    place(placed, "busy", tokens_of(5), 50)
    home = place(placed, "first", prompt, prompt_embeds=embeds)
    for name in ("busy", "first"):
        placed.remove(name)
    assert home != 0 and place(placed, "again", prompt, prompt_embeds=embeds) == 0


def test_pooled_prompts_and_samples_count_what_they_compute():
    placed = ReplicaPlacement(2)
    pooled = GenerationRequest("p", tokens_of(20), 4000, pooling=PoolingParams(task="embed"))
    assert placed.place("p", pooled, [0, 1]) == 0
    three = GenerationRequest("s", tokens_of(5), 20, sampling=SamplingParams(n=3))
    assert placed.place("s", three, [0, 1]) == 1
    assert placed.place("next", request_of("next", tokens_of(5)), [0, 1]) == 0


def test_samples_follow_the_first_one_unless_its_replica_is_gone():
    placed, prompt = ReplicaPlacement(3), tokens_of(30)
    first = place(placed, "r#0", prompt, 500)
    assert place(placed, "r#1", prompt, 500) == first
    others = [each for each in range(3) if each != first]
    assert placed.place("r#2", request_of("r#2", prompt), others) in others


def test_only_so_many_prefixes_are_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(placement, "MAX_PREFIXES", 4)
    placed = ReplicaPlacement(2)
    prompts = [tokens_of(2 * PREFIX_TOKENS) for _ in range(3)]
    placed.place("busy", request_of("busy", [1], 50), [0])
    for number, prompt in enumerate(prompts):
        placed.place(f"r{number}", request_of(f"r{number}", prompt), [1])
        placed.remove(f"r{number}")
    placed.remove("busy")
    found = [placed.place("x", request_of("x", each), [0, 1]) for each in reversed(prompts)]
    assert found == [1, 1, 0]

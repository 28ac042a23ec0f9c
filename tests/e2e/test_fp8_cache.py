"""A KV cache in FP8: greedy tokens equal transformers' over keys and values that are rounded alike,
for every family, shape and form of scales, in whole prompts, chunks and after prefix hits; while
drivers are killed, groups sleep and weights are saved."""

import random

import pytest

from tests.support.checkpoints import decisive_prompts, make_checkpoint
from tests.support.rounded_caches import with_fp8_cache
from tests.support.serving import assert_greedy, generate, greedy_request, scheduler_limits
from tests.support.window_models import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MODELS,
    WINDOW,
    check_adoption,
    check_prefix_hits,
)
from worker_client.scheduler import Scheduler

LENGTHS = [3, 17, 40, 70]
MAX_TOKENS = 10


@pytest.fixture(scope="module")
def make_reference(model_root):
    """make_reference(architecture, form, **overrides) -> a new random RoundedCheckpoint."""

    def make(architecture, form, **overrides):
        seed = random.randrange(1 << 30)
        made = make_checkpoint(model_root, architecture, seed=seed, **overrides)
        return with_fp8_cache(made, form, seed + 1)

    return make


def requests_for(reference):
    prompts = decisive_prompts(reference, random.randrange(1 << 30), LENGTHS, MAX_TOKENS)
    return [greedy_request(f"r{index}", prompt, MAX_TOKENS) for index, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    ("architecture", "form", "shape", "overrides"),
    [
        ("LlamaForCausalLM", "none", (1, 1), {}),
        ("MistralForCausalLM", "layer", (2, 1), {"sliding_window": 13}),
        ("Qwen2ForCausalLM", "heads", (1, 2), {}),
        ("Qwen3ForCausalLM", "single", (1, 1), {"head_dim": 64}),
        ("LlamaForCausalLM", "heads", (1, 4), {"num_key_value_heads": 2}),
        ("Qwen3ForCausalLM", "projections", (2, 2), {"head_dim": 128}),
    ],
)
def test_greedy_tokens_equal_those_over_rounded_keys_and_values(
    serve, make_reference, architecture, form, shape, overrides
):
    reference = make_reference(architecture, form, **overrides)
    requests = requests_for(reference)
    with serve(reference.path, *shape, kv_cache_dtype="fp8") as (group, loaded):
        groups = [group for plan in loaded.kv_cache for group in plan.groups]
        assert {group.dtype for group in groups} == {"float8_e4m3fn"}
        scheduler = Scheduler(scheduler_limits(group, loaded))
        whole = generate(group, loaded, requests, scheduler)
        hits = generate(group, loaded, requests, scheduler)
        chunked = generate(group, loaded, requests, max_num_batched_tokens=11)
    for run in (whole, hits, chunked):
        assert_greedy(run, reference, requests)
    cached = [output.num_cached_tokens for output in hits.outputs.values()]
    assert sum(cached) > 0


@pytest.mark.parametrize("check", [check_prefix_hits, check_adoption])
def test_groups_of_different_layers(serve, make_reference, check):
    """Layers with and without a window, two stages: blocks behind windows are reused, prefixes are
    shared, drivers adopt each other's requests."""
    reference = make_reference(form="heads", **MODELS["mixed"], sliding_window=WINDOW)
    config = {"block_size": BLOCK_SIZE, "layer_partition": (5, 3), "kv_cache_dtype": "fp8"}
    config |= {"max_num_batched_tokens": 24, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8}
    with serve(reference.path, 2, **config) as served:
        check(served, reference, seed=random.randrange(1 << 30))

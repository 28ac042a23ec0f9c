"""LoRA adapters: the tokens are those of transformers with the adapter merged into its weights,
whatever runs beside it."""

import pytest

from rpc_schema.config import LoraConfig
from tests.support.lora_adapters import adapted_requests, make_adapter
from tests.support.serving import generate, scheduler_limits
from worker_client.scheduler import Scheduler

ROOM = LoraConfig(max_loras=3, max_lora_rank=16, max_cpu_loras=4)


@pytest.fixture(scope="module")
def base(checkpoint):
    return checkpoint("LlamaForCausalLM", seed=31)


@pytest.fixture(scope="module")
def merged(base):
    """Adapters of several ranks, modules and scales, by name."""
    import torch

    made = {
        "every": {"seed": 1, "rank": 8},
        "attention": {"seed": 2, "rank": 3, "targets": ("q_proj", "v_proj"), "use_rslora": True},
        "patterns": {
            "seed": 3,
            "rank": 4,
            "rank_pattern": {"down_proj": 16, "k_proj": 2},
            "alpha_pattern": {"up_proj": 24.0},
            "dtype": torch.float16,
        },
        "fourth": {"seed": 4, "rank": 1, "alpha": 3.0},
    }
    return {name: make_adapter(base, name, **options) for name, options in made.items()}


def added(group, merged, *names):
    """Pairs of a merged model and its adapter in the group, as adapted_requests takes them."""
    return [(merged[name], group.add_lora(name)) for name in names]


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
def test_adapters_of_several_ranks_beside_base_rows(serve, base, merged, shape):
    with serve(base.path, *shape, lora=ROOM, max_num_batched_tokens=32) as (group, loaded):
        models = [(base, None), *added(group, merged, "every", "attention", "patterns")]
        requests, expected = adapted_requests(models, 1, 12)
        run = generate(group, loaded, requests)
    assert run.tokens == expected
    assert run.driver.records and any(record.num_requests > 4 for record in run.driver.records)


def test_replicated_kv_heads(serve, checkpoint):
    base = checkpoint("Qwen2ForCausalLM", seed=33, num_key_value_heads=1)
    merged = {"replicated": make_adapter(base, "replicated", seed=5, rank=6)}
    with serve(base.path, 1, 2, lora=ROOM) as (group, loaded):
        models = [(base, None), *added(group, merged, "replicated")]
        requests, expected = adapted_requests(models, 2, 6)
        assert generate(group, loaded, requests).tokens == expected


def test_more_adapters_than_slots_wait_for_each_other(serve, base, merged):
    room = LoraConfig(max_loras=2, max_lora_rank=16, max_cpu_loras=4)
    config = {"block_size": 4, "num_gpu_blocks": 22, "max_num_seqs": 6, "max_model_len": 64}
    with serve(base.path, 2, lora=room, **config) as (group, loaded):
        models = [(base, None), *added(group, merged, *merged)]
        requests, expected = adapted_requests(models, 3, 12, max_tokens=12)
        run = generate(group, loaded, requests)
    assert run.tokens == expected
    assert sum(output.num_preemptions for output in run.outputs.values()) > 0


def test_prefixes_are_shared_within_an_adapter_alone(serve, base, merged):
    with serve(base.path, lora=ROOM, block_size=4) as (group, loaded):
        models = [(base, None), *added(group, merged, "every", "attention")]
        scheduler = Scheduler(scheduler_limits(group, loaded))
        requests, _ = adapted_requests(models[:1], 4, 1, lengths=[38])
        prompt = requests[0].prompt_token_ids.tolist()
        cached = []
        for seed in (5, 6):  # each adapter for the first time, then again
            requests, expected = adapted_requests(models, seed, 3, same_prompt=prompt)
            for request in requests:
                run = generate(group, loaded, [request], scheduler)
                assert run.tokens == {request.id: expected[request.id]}
                cached.append(run.outputs[request.id].num_cached_tokens)
    assert cached == [0, 0, 0, 36, 36, 36]

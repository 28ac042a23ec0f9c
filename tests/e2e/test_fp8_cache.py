"""A KV cache in FP8: greedy tokens equal transformers' over keys and values that are rounded alike,
for every family, shape and form of scales, in whole prompts, chunks and after prefix hits; while
drivers are killed, groups sleep and weights are saved."""

import json
import random

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from rpc_schema.errors import CheckpointError
from rpc_schema.weight_transfer import DiskEngine, DiskSource
from tests.support.checkpoints import (
    Checkpoint,
    decisive_prompts,
    edit_config,
    make_checkpoint,
    prompts,
)
from tests.support.doomed_driver import NUM_GPU_BLOCKS, Death
from tests.support.every_draft import every_draft
from tests.support.exhaustive import exhaustively
from tests.support.forked_daemons import ForkedDaemons
from tests.support.killed_driver import DriverNursery, Plan, begin
from tests.support.pooling_reference import pooling_request
from tests.support.quantized import quantize
from tests.support.rounded_caches import RoundedCheckpoint, with_fp8_cache
from tests.support.saving_daemons import saving_daemons
from tests.support.serving import (
    LONG_LEASE,
    assert_greedy,
    assert_greedy_tokens,
    connect,
    generate,
    greedy_request,
    scheduler_limits,
    worker_config,
)
from tests.support.window_models import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MODELS,
    WINDOW,
    check_adoption,
    check_prefix_hits,
)
from worker_client.errors import ConfigMismatchError
from worker_client.wire.worker_client import TensorList
from worker_client.worker_group import WorkerGroup

LENGTHS = [3, 17, 40, 70]
SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}
"""kv_cache_scheme of compressed-tensors."""
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


@pytest.mark.usefixtures("each_drafter")
@pytest.mark.parametrize(
    ("architecture", "form", "shape", "overrides"),
    [
        ("LlamaForCausalLM", "none", (1, 1), {}),
        exhaustively("MistralForCausalLM", "layer", (2, 1), {"sliding_window": 13}),
        exhaustively("Qwen2ForCausalLM", "heads", (1, 2), {}),
        exhaustively("Qwen3ForCausalLM", "single", (1, 1), {"head_dim": 64}),
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
        scheduler = every_draft(scheduler_limits(group, loaded))
        whole = generate(group, loaded, requests, scheduler)
        hits = generate(group, loaded, requests, scheduler)
        chunked = generate(group, loaded, requests, max_num_batched_tokens=11)
    for run in (whole, hits, chunked):
        assert_greedy(run, reference, requests)
    cached = [output.num_cached_tokens for output in hits.outputs.values()]
    assert sum(cached) > 0


@pytest.mark.usefixtures("each_drafter")
@pytest.mark.parametrize("check", [exhaustively(check_prefix_hits), check_adoption])
def test_groups_of_different_layers(serve, make_reference, check):
    """Layers with and without a window, two stages: blocks behind windows are reused, prefixes are
    shared, drivers adopt each other's requests."""
    reference = make_reference(form="heads", **MODELS["mixed"], sliding_window=WINDOW)
    config = {"block_size": BLOCK_SIZE, "layer_partition": (5, 3), "kv_cache_dtype": "fp8"}
    config |= {"max_num_batched_tokens": 24, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8}
    with serve(reference.path, 2, **config) as served:
        check(served, reference, seed=random.randrange(1 << 30))


def test_scales_and_rounding_matter(make_reference):
    """The other tests would see a cache that is not rounded, or scales that are ignored or those of
    another layer."""
    reference = make_reference("LlamaForCausalLM", "heads")
    shifted = {layer: reference.scales[layer - 1] for layer in range(1, 4)}
    wrong = [
        Checkpoint(reference.path, reference.model, least_margin=0.0),
        *(
            RoundedCheckpoint(reference.path, reference.model, least_margin=0.0, scales=scales)
            for scales in ({}, shifted)
        ),
    ]
    given = [request.prompt.tolist() for request in requests_for(reference)]
    for other in wrong:
        found = [other.greedy(prompt, MAX_TOKENS) for prompt in given]
        pairs = zip(given, found, strict=True)
        assert found != [reference.expected(prompt, MAX_TOKENS, each) for prompt, each in pairs]


def test_the_same_memory_holds_twice_the_tokens(serve, make_reference):
    reference = make_reference("LlamaForCausalLM", "none")
    num_tokens = {}
    for dtype in ("auto", "fp8"):
        sizes = {"kv_cache_memory_bytes": 1 << 22, "dtype": "bfloat16", "num_gpu_blocks": None}
        with serve(reference.path, kv_cache_dtype=dtype, **sizes) as (group, loaded):
            num_tokens[dtype] = loaded.num_blocks * loaded.block_size
            (status,) = group.get_status()
            assert status.memory_bytes["kv_cache"] == 1 << 22
    assert num_tokens["fp8"] == 2 * num_tokens["auto"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("pp", "tp"), [(1, 2), (2, 1)])
def test_killed_drivers_cost_no_token(model_root, make_reference, pp, tp):
    reference = make_reference("Qwen3ForCausalLM", "heads")
    rng = random.Random(random.randrange(1 << 30))
    requests = requests_for(reference)
    lines = [
        f'{{"id": "{each.id}", "prompt_token_ids": {each.prompt.tolist()}, '
        f'"max_tokens": {MAX_TOKENS}}}'
        for each in requests
    ]
    sizes = {"max_num_batched_tokens": 32, "step_deadline_ms": 1000, "kv_cache_dtype": "fp8"}
    config = worker_config(reference.path, pp, tp, **sizes)
    nursery = DriverNursery()
    with ForkedDaemons(["cpu"] * (pp * tp), model_root) as daemons:
        plan = Plan(daemons.endpoints, config, lines)
        deaths = [
            Death(rng.randint(3, 7), rng.sample(range(pp * tp), rng.randint(0, 2)), late)
            for late in (True, False)
        ]
        nursery.live(replace(plan, death=deaths[0]))
        nursery.live(replace(plan, death=deaths[1], adopt=True))
        with WorkerGroup(plan.endpoints, config.parallel, lease=LONG_LEASE) as group:
            group.attach(keep_requests=True)
            loaded = group.prepare(config, num_gpu_blocks=NUM_GPU_BLOCKS)
            serving = begin(group, loaded, replace(plan, adopt=True))
            outputs = [*serving.done, *serving.driver.run()]
    nursery.close()
    assert sum(request.num_computed_tokens for request in serving.adopted) > 0, deaths
    tokens = {output.req_id: output.token_ids for output in outputs}
    assert_greedy_tokens(tokens, reference, requests)


def test_a_driver_with_another_dtype_finds_no_loaded_configuration(serve, make_reference):
    """Its prefixes would be read in the wrong dtype."""
    reference = make_reference("LlamaForCausalLM", "layer")
    requests = requests_for(reference)
    with serve(reference.path, kv_cache_dtype="fp8") as (group, loaded):
        generate(group, loaded, requests)
        config = group.get_status()[0].config
        other = replace(config, cache=replace(config.cache, kv_cache_dtype="auto"))
        assert other.fingerprint() != config.fingerprint()
        with pytest.raises(ConfigMismatchError, match="kv_cache_dtype"):
            group.prepare(other, num_gpu_blocks=256)


@pytest.mark.usefixtures("each_drafter")
@pytest.mark.parametrize("level", [exhaustively(1), 2])
def test_a_group_sleeps(serve, make_reference, level):
    reference = make_reference("Qwen3ForCausalLM", "heads")
    requests = requests_for(reference)
    config = {"enable_sleep_mode": True, "kv_cache_dtype": "fp8"}
    with serve(reference.path, 1, 2, **config) as (group, loaded):
        assert_greedy(generate(group, loaded, requests), reference, requests)
        group.memory.sleep(level)
        group.memory.wake_up()
        if level == 2:
            group.weights.reload()
        assert_greedy(generate(group, loaded, requests), reference, requests)


@pytest.mark.usefixtures("each_drafter")
@pytest.mark.parametrize("level", [exhaustively(0), 2])
def test_weight_updates_keep_the_scales(serve, model_root, make_reference, level):
    """After a sleep of that level, if any. The update's checkpoint has no scales."""
    old = make_reference("Qwen3ForCausalLM", "heads")
    made = make_checkpoint(model_root, "Qwen3ForCausalLM", seed=random.randrange(1 << 30))
    new = RoundedCheckpoint(made.path, made.model, least_margin=0.0, scales=old.scales)
    config = {"enable_sleep_mode": True, "kv_cache_dtype": "fp8"}
    with serve(old.path, 1, 2, **config) as (group, loaded):
        if level:
            group.memory.sleep(level)
            group.memory.wake_up()
        group.weights.init_transfer_engine(DiskEngine())
        group.weights.start_update()
        group.weights.update(TensorList(), DiskSource(model=str(new.path)))
        group.weights.finish_update()
        requests = requests_for(new)
        assert_greedy(generate(group, loaded, requests), new, requests)


def test_saved_sets_have_the_scales(model_root, make_reference):
    reference = make_reference("Qwen2ForCausalLM", "heads")
    requests = requests_for(reference)
    save_root = model_root / "fp8-saves"
    options = {"kv_cache_dtype": "fp8", "load_format": "auto"}
    config = worker_config(reference.path, 1, 2, **options)
    with saving_daemons(model_root, save_root, save_root) as daemons:
        with connect(daemons.endpoints, config) as (group, loaded):
            group.weights.save_sharded_state("scaled")
            assert_greedy(generate(group, loaded, requests), reference, requests)
        options["load_format"] = "sharded_state"
        config = worker_config(save_root / "scaled", 1, 2, **options)
        with connect(daemons.endpoints, config) as (group, loaded):
            assert_greedy(generate(group, loaded, requests), reference, requests)
        plain = Checkpoint(reference.path, reference.model)
        requests = requests_for(plain)
        config = worker_config(save_root / "scaled", 1, 2, load_format="sharded_state")
        with connect(daemons.endpoints, config) as (group, loaded):
            assert_greedy(generate(group, loaded, requests), plain, requests)


def test_a_set_without_scales_gives_ones(model_root, make_reference):
    reference = make_reference("LlamaForCausalLM", "none")
    requests = requests_for(reference)
    save_root = model_root / "plain-saves"
    with saving_daemons(model_root, save_root) as daemons:
        with connect(daemons.endpoints, worker_config(reference.path)) as (group, _):
            group.weights.save_sharded_state("plain")
        options = {"kv_cache_dtype": "fp8", "load_format": "sharded_state"}
        config = worker_config(save_root / "plain", **options)
        with connect(daemons.endpoints, config) as (group, loaded):
            assert_greedy(generate(group, loaded, requests), reference, requests)


@pytest.mark.parametrize("value", [0.0, exhaustively(float("nan"))])
def test_a_scale_that_is_no_scale_is_refused(serve, make_reference, value):
    """The daemon goes on, and without FP8 the tensor is not read."""
    reference = make_reference("LlamaForCausalLM", "layer")
    path = reference.path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.v_scale"].fill_(value)
    save_file(tensors, path, metadata={"format": "pt"})
    with (
        pytest.raises(CheckpointError, match=r"not above 0 and finite.*v_scale"),
        serve(reference.path, kv_cache_dtype="fp8"),
    ):
        pass
    plain = Checkpoint(reference.path, reference.model)
    requests = requests_for(plain)
    with serve(reference.path) as (group, loaded):
        assert_greedy(generate(group, loaded, requests), plain, requests)


def test_models_without_a_cache_ignore_it(serve, checkpoint):
    encoder = checkpoint("BertForSequenceClassification", num_labels=4)
    (prompt,) = prompts(random.randrange(1 << 30), [20])
    request = pooling_request("a", prompt, "classify")
    found = []
    for dtype in ("auto", "fp8"):
        with serve(encoder.path, kv_cache_dtype=dtype) as (group, loaded):
            assert loaded.kv_cache[0].size_bytes == 0
            found.append(generate(group, loaded, [request]).outputs["a"].pooled)
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), exhaustively(1, 2)])
def test_weights_in_fp8_bring_the_scales_of_the_cache(serve, make_reference, pp, tp):
    reference = make_reference("Qwen3ForCausalLM", "projections")
    quantize(reference.path, reference.model, "compressed", "channel", "dynamic")
    config = json.loads((reference.path / "config.json").read_text())["quantization_config"]
    edit_config(reference, quantization_config={**config, "kv_cache_scheme": SCHEME})
    requests = requests_for(reference)
    with serve(reference.path, pp, tp, kv_cache_dtype="fp8") as (group, loaded):
        assert_greedy(generate(group, loaded, requests), reference, requests)

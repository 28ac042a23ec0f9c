"""Blocks in host memory: a request that begins with some gets the same tokens as one that computes
them, whatever became of them meanwhile."""

import random
import sys
from dataclasses import dataclass, replace

import pytest

from rpc_schema.config import LoraConfig
from rpc_schema.errors import CapacityError, ConfigError
from tests.support.checkpoints import make_checkpoint, prompts
from tests.support.exhaustive import exhaustively
from tests.support.flipping_daemon import FlippingDaemons
from tests.support.forked_daemons import ForkedDaemons
from tests.support.lora_adapters import adapted_requests, clear_prompt, make_adapter
from tests.support.rounded_caches import with_fp8_cache
from tests.support.serving import (
    LOOKUPS,
    connect,
    drafts_by,
    kill_and_wait,
    worker_config,
)
from tests.support.tiered_waves import (
    CONFIG,
    HOST_BYTES,
    NUM_GPU_BLOCKS,
    Waves,
    assert_right,
    new_driver,
    num_loaded,
    run_waves,
    tiers,
    tokens_of,
)
from tests.support.window_models import MODELS, WINDOW
from worker_client.errors import InvalidSchedulerOutput, KVPlanError
from worker_client.scheduler import prefix_loads
from worker_client.scheduler_output import NewRequest, SchedulerOutput
from worker_client.steps.block_moves import HostMoves, MovedBlocks


@pytest.fixture
def beside(monkeypatch):
    """All prefixes that lie in host memory are loaded beside steps, if there are any."""
    monkeypatch.setattr(prefix_loads, "LEAST_BLOCKS", 1)


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), exhaustively(2, 1), exhaustively(1, 2)])
def test_loaded_prefixes_give_the_same_tokens(serve, checkpoint, pp, tp, beside):
    waves, model = Waves(random.randrange(1 << 30)), checkpoint()
    with serve(model.path, pp, tp, num_gpu_blocks=NUM_GPU_BLOCKS, **CONFIG) as (group, loaded):
        assert loaded.num_host_blocks > loaded.num_blocks
        outputs = run_waves(new_driver(group, loaded), waves.requests)
        found = tiers(group)
    assert_right(outputs, model, waves)
    assert num_loaded(outputs) > 0, waves.seed
    assert all(tier.num_invalid == 0 < tier.num_loaded for tier in found), (waves.seed, found)
    for tier in found:
        block_bytes = tier.size_bytes // tier.num_slots
        for number, traffic in ((tier.num_stored, tier.stored), (tier.num_loaded, tier.loaded)):
            assert traffic.num_bytes == number * block_bytes and traffic.num_us > 0, found


@pytest.fixture(scope="module")
def flipping(model_root, tmp_path_factory):
    """Two daemons whose host memory changes bits when told."""
    with FlippingDaemons(2, model_root, tmp_path_factory.mktemp("flips")) as daemons:
        yield daemons


KINDS = {
    "preempted": ({}, {"num_gpu_blocks": 27}),
    "windows": (
        {**MODELS["mixed"], "sliding_window": WINDOW, "seed": 22},
        {"num_gpu_blocks": 150, "kv_host_memory_bytes": 2 * HOST_BYTES},
    ),
    "looked up": ({}, {"speculative": LOOKUPS["ngram"]}),
    "drafted": ({}, {"speculative": "draft_model", "num_gpu_blocks": 56}),
}
"""Fields of the checkpoint, and of the configuration."""


def model_of(checkpoint, kind):
    """A kind's checkpoint, and its configuration, with the number of blocks on a device."""
    fields, config = KINDS.get(kind, ({}, {}))
    model, config = checkpoint(**fields), {"num_gpu_blocks": NUM_GPU_BLOCKS, **CONFIG, **config}
    if config.get("speculative") == "draft_model":
        config["speculative"] = drafts_by("draft_model", model.path)
    return model, config


@pytest.mark.parametrize(
    ("kind", "pp", "tp"),
    [
        (None, 2, 1),
        (None, 1, 2),
        ("windows", 1, 1),
        *(exhaustively(kind, 2, 1) for kind in ("windows", "drafted")),
        *(exhaustively(kind, 1, 2) for kind in ("windows", "drafted")),
    ],
)
def test_changed_bits_cost_their_requests_a_computation(
    flipping, checkpoint, kind, pp, tp, request
):
    if pp == 2 or kind == "windows":
        request.getfixturevalue("beside")
    waves = Waves(random.randrange(1 << 30))
    model, config = model_of(checkpoint, kind)
    num_gpu_blocks = config.pop("num_gpu_blocks")
    config = worker_config(model.path, pp, tp, **config)
    for flips in flipping.flips:
        flips.put(one_of=4, seed=waves.seed)
    endpoints, before = flipping.endpoints[: pp * tp], [f.num_done for f in flipping.flips]
    with connect(endpoints, config, num_gpu_blocks=num_gpu_blocks) as (group, loaded):
        driver = new_driver(group, loaded)
        outputs = run_waves(driver, waves.requests)
        found = tiers(group)
        assert driver.scheduler.num_free_blocks == loaded.num_blocks - 1, waves.seed
    num_done = [f.num_done - n for f, n in zip(flipping.flips, before, strict=True)]
    assert_right(outputs, model, waves)
    assert [tier.num_invalid for tier in found] == num_done[: pp * tp], waves.seed
    assert sum(num_done) > 0, waves.seed


@pytest.mark.parametrize(
    ("kind", "pp", "tp"),
    [
        *((kind, 1, 1) for kind in KINDS if kind != "looked up"),
        exhaustively("looked up", 1, 1),
        *(exhaustively(kind, 2, 1) for kind in ("windows", "drafted")),
        *(exhaustively(kind, 1, 2) for kind in ("windows", "drafted")),
    ],
)
def test_kinds_of_blocks(serve, checkpoint, kind, pp, tp):
    model, config = model_of(checkpoint, kind)
    with serve(model.path, pp, tp, **config) as (group, loaded):
        driver, num_preemptions = new_driver(group, loaded), 0
        for _ in range(20 if kind == "preempted" else 1):  # one in eight has no preemption
            waves = Waves(random.randrange(1 << 30))
            outputs = run_waves(driver, waves.requests)
            assert_right(outputs, model, waves)
            assert num_loaded(outputs) > 0, waves.seed
            num_preemptions = sum(output.num_preemptions for output in outputs.values())
            if num_preemptions:
                break
        found = tiers(group)
    assert all(tier.num_invalid == 0 < tier.num_loaded for tier in found), (waves.seed, found)
    assert num_preemptions or kind != "preempted"


def test_caches_in_fp8(serve, model_root):
    waves = Waves(random.randrange(1 << 30))
    made = make_checkpoint(model_root, "LlamaForCausalLM", seed=waves.seed)
    model = with_fp8_cache(made, "heads", waves.seed + 1)
    config = {**CONFIG, "kv_cache_dtype": "fp8"}
    with serve(model.path, num_gpu_blocks=NUM_GPU_BLOCKS, **config) as (group, loaded):
        outputs = run_waves(new_driver(group, loaded), waves.requests)
        (found,) = tiers(group)
    assert_right(outputs, model, waves)
    assert found.num_invalid == 0 < found.num_loaded, (waves.seed, found)


def test_adapters_load_their_own_blocks(serve, checkpoint):
    base = checkpoint("LlamaForCausalLM", seed=31)
    merged = make_adapter(base, "tiered", seed=1, rank=8)
    seed = random.randrange(1 << 20)
    stem = clear_prompt([base, merged], seed, 40)
    lora = LoraConfig(max_loras=1, max_lora_rank=16)
    with serve(base.path, num_gpu_blocks=NUM_GPU_BLOCKS, lora=lora, **CONFIG) as (group, loaded):
        models = [(base, None), (merged, group.loras.add("tiered"))]
        driver = new_driver(group, loaded)
        num_done = 0
        for round_ in range(3):
            requests, expected = adapted_requests(models, seed + round_, 2, same_prompt=stem)
            outputs = run_waves(driver, [requests])
            assert tokens_of(outputs) == expected, seed
            num_done += num_loaded(outputs)
            others = Waves(seed + round_).requests[:2]  # evict the stem's blocks
            run_waves(driver, others)
    assert num_done > 0, seed


def test_updates_and_sleep(serve, models):
    """Blocks of other weights never match; those of the present ones stay while the group
    sleeps."""
    waves = Waves(random.randrange(1 << 30))
    old, new, _ = models
    config = {**CONFIG, "enable_sleep_mode": True}
    with serve(old.path, num_gpu_blocks=NUM_GPU_BLOCKS, **config) as (group, loaded):
        driver = new_driver(group, loaded)
        assert_right(run_waves(driver, waves.requests), old, waves)
        group.weights.reload(str(new.path))
        (found,) = tiers(group)
        assert found.num_held == 0
        outputs = run_waves(driver, waves.requests)
        assert_right(outputs, new, waves)
        (before,) = tiers(group)
        group.memory.sleep(1)
        group.memory.wake_up()
        driver.scheduler.forget_prefixes()
        outputs = run_waves(driver, waves.requests[:1])
        (after,) = tiers(group)
    assert before.num_held == after.num_held > 0
    assert num_loaded(outputs) > 0, waves.seed
    assert after.num_invalid == 0
    waves.requests = waves.requests[:1]
    assert_right(outputs, new, waves)


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), exhaustively(1, 2)])
def test_the_next_driver_loads_what_an_earlier_one_has_left(serve, daemons, checkpoint, pp, tp):
    waves, model = Waves(random.randrange(1 << 30)), checkpoint()
    with serve(model.path, pp, tp, num_gpu_blocks=NUM_GPU_BLOCKS, **CONFIG) as (group, loaded):
        run_waves(new_driver(group, loaded), waves.requests)
        before = tiers(group)
    config = worker_config(model.path, pp, tp, **CONFIG)
    endpoints = daemons.endpoints(pp * tp)
    with connect(endpoints, config, num_gpu_blocks=NUM_GPU_BLOCKS, reload=False) as served:
        driver = new_driver(*served)
        offered = served.group.prefixes.get(driver.scheduler.prefix_tag, in_host_tier=True)
        outputs = run_waves(driver, waves.requests)
        after = tiers(served.group)
    assert offered.block_ids.size == before[0].num_held > 0
    assert num_loaded({each.id: outputs[each.id] for each in waves.requests[0]}) > 0, waves.seed
    assert all(tier.num_invalid == 0 for tier in after)
    assert_right(outputs, model, waves)


@pytest.mark.parametrize("tells", [True, False], ids=["told", "untold"])
def test_a_replaced_rank_has_nothing_to_load(pair, checkpoint, tells):
    """Requests are computed again, whether the scheduler knows that a rank has lost its blocks or
    each of them finds out."""
    waves, model = Waves(random.randrange(1 << 30)), checkpoint()
    config = worker_config(model.path, 2, 1, **CONFIG)
    with connect(pair.endpoints, config, num_gpu_blocks=NUM_GPU_BLOCKS) as (group, loaded):
        driver = new_driver(group, loaded, recover=lambda died: replace_rank(pair, group, died))
        if not tells:
            driver.scheduler.forget_host_tier = lambda: None
        run_waves(driver, waves.requests[:-1])
        pair.kill(1)
        outputs = run_waves(driver, waves.requests)
        found = tiers(group)
    assert_right(outputs, model, waves)
    assert found[0].num_invalid == 0
    assert (found[1].num_invalid > 0) != tells, waves.seed


@pytest.fixture
def pair(model_root):
    """Two daemons that a test may kill."""
    with ForkedDaemons(["cpu", "cpu"], model_root) as daemons:
        yield KillablePair(daemons)


@dataclass
class KillablePair:
    daemons: ForkedDaemons

    @property
    def endpoints(self):
        return self.daemons.endpoints

    def kill(self, rank):
        kill_and_wait(self.daemons.pids[rank])


def replace_rank(pair, group, died):
    pair.daemons.restart_dead()
    group.replace(died.rank)


REFUSED = {
    "experts of tokens": (
        {"architecture": "Qwen3MoeForCausalLM"},
        {"enable_return_routed_experts": True},
        "leave out enable_return_routed_experts",
    ),
    "no room for a block": ({}, {"kv_host_memory_bytes": 64}, "a KV block takes"),
    "more than the host has": ({}, {"kv_host_memory_bytes": 1 << 60}, "the host has"),
}
"""Fields of the checkpoint, of the configuration, and what is said."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_by_name(serve, checkpoint, name):
    fields, config, said = REFUSED[name]
    refused = (ConfigError, CapacityError, KVPlanError)
    config = {"kv_host_memory_bytes": HOST_BYTES, **config}
    with pytest.raises(refused, match=said) as raised, serve(checkpoint(**fields).path, **config):
        pass
    assert f"cache.kv_host_memory_bytes = {config['kv_host_memory_bytes']}" in str(raised.value)


def test_the_operator_bounds_it(model_root, checkpoint):
    config = worker_config(checkpoint().path, kv_host_memory_bytes=1 << 20)

    def command(endpoint, device, pipe):
        options = ("--endpoint", endpoint, "--device", device, "--model-root", str(model_root))
        most = ("--max-kv-host-memory-bytes", str(1 << 19), "--exit-with-parent-fd", str(pipe))
        return (sys.executable, "-m", "worker_daemon", "serve", *options, *most)

    with ForkedDaemons(["cpu"], model_root, command=command) as daemons:
        with (
            pytest.raises(ConfigError, match="at most 524288"),
            connect(daemons.endpoints, config),
        ):
            pass
        config = worker_config(checkpoint().path, kv_host_memory_bytes=1 << 19)
        with connect(daemons.endpoints, config) as (group, _):
            (tier,) = tiers(group)
            assert 0 < tier.size_bytes <= 1 << 19


def test_a_step_that_fills_a_running_requests_block_is_refused(serve, checkpoint):
    """Nothing has changed then: the request goes on, and gets the same tokens."""
    model, prompt = checkpoint(), prompts(7, [9])[0]
    with serve(model.path, **CONFIG) as (group, loaded):
        new = NewRequest(
            req_id="a",
            token_ids=prompt,
            num_prompt_tokens=9,
            num_computed_tokens=0,
            block_ids=(1, 2, 3),
        )
        admitted = SchedulerOutput(num_scheduled_tokens={"a": 9}, scheduled_new_reqs=(new,))
        tokens = [*group.execute_model(admitted).result().token_ids]
        moves = HostMoves(b"tag", loaded=MovedBlocks((2,), (0,), (b"h",)))
        for block_id in (2, loaded.num_blocks):
            loads = replace(moves, loaded=MovedBlocks((block_id,), (0,), (b"h",)))
            step = SchedulerOutput(num_scheduled_tokens={"a": 1}, extensions=(loads,))
            with pytest.raises(InvalidSchedulerOutput, match=f"extensions = {block_id}"):
                group.execute_model(step)
        unaligned = replace(moves, loaded=MovedBlocks((5,), (0, 1), (b"h",)))
        step = SchedulerOutput(num_scheduled_tokens={"a": 1}, extensions=(unaligned,))
        with pytest.raises(InvalidSchedulerOutput, match="block_ids, slots, hashes of one length"):
            group.execute_model(step)
        # A slot that holds nothing: the block is invalid, and nobody reads it.
        loads = replace(moves, loaded=MovedBlocks((5,), (0,), (b"h",)))
        step = SchedulerOutput(num_scheduled_tokens={"a": 1}, extensions=(loads,))
        result = group.execute_model(step).result()
        assert result.invalid_blocks == [5]
        tokens += result.token_ids
    assert tokens == model.greedy(prompt.tolist(), 2)

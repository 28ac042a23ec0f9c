"""Blocks in files: a request that begins with some gets the same tokens as one that computes them,
in a new daemon and under a new driver too, whatever became of the files."""

import random
import resource
import shutil
import threading
from contextlib import suppress

import pytest

from rpc_schema.config import LoraConfig
from rpc_schema.errors import ConfigError
from tests.support.checkpoints import make_checkpoint
from tests.support.exhaustive import exhaustively, seeds
from tests.support.filing_daemons import FilingDaemons, damage, settled
from tests.support.lora_adapters import adapted_requests, clear_prompt, make_adapter
from tests.support.rounded_caches import with_fp8_cache
from tests.support.serving import connect, drafts_by, worker_config
from tests.support.tiered_waves import (
    NUM_GPU_BLOCKS,
    Waves,
    assert_right,
    new_driver,
    num_loaded,
    run_waves,
    tokens_of,
)
from tests.support.window_models import MODELS, WINDOW

CONFIG = {"kv_files": True, "max_model_len": 96, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def daemons_of_all(model_root, tmp_path_factory):
    """Two daemons that keep files."""
    directory = tmp_path_factory.mktemp("filed")
    with FilingDaemons(2, model_root, directory) as daemons:
        yield daemons


@pytest.fixture
def filing(daemons_of_all):
    """The two daemons, without files."""
    for path in daemons_of_all.files:
        path.unlink()
    yield daemons_of_all
    for directory in daemons_of_all.directories:
        for own in directory.iterdir():
            if own.is_dir():
                shutil.rmtree(own, ignore_errors=True)


def serving(filing, model, pp=1, tp=1, *, num_gpu_blocks=NUM_GPU_BLOCKS, **config):
    wanted = worker_config(model.path, pp, tp, **{**CONFIG, **config})
    return connect(filing.endpoints[: pp * tp], wanted, num_gpu_blocks=num_gpu_blocks)


@pytest.mark.parametrize(("pp", "tp"), [exhaustively(1, 1), (2, 1), exhaustively(1, 2)])
def test_new_daemons_and_drivers_load_what_killed_ones_have_left(filing, checkpoint, pp, tp):
    waves, model = Waves(random.randrange(1 << 30)), checkpoint()
    print("seed", waves.seed)
    with serving(filing, model, pp, tp) as (group, loaded):
        outputs = run_waves(new_driver(group, loaded), waves.requests)
        before = settled(group)
    assert_right(outputs, model, waves)
    assert all(each.num_stored > 0 == each.num_failed for each in before)
    assert all(each.written.num_bytes > each.num_stored for each in before)
    filing.kill()
    with serving(filing, model, pp, tp) as (group, loaded):
        outputs = run_waves(new_driver(group, loaded), waves.requests)
        after = settled(group)
    assert_right(outputs, model, waves)
    first = {each.id: outputs[each.id] for each in waves.requests[0]}
    assert all(output.num_loaded_tokens >= 32 for output in first.values())
    assert all(each.num_invalid == each.num_bad_files == 0 < each.num_loaded for each in after)


KINDS = {
    "preempted": ({}, {"num_gpu_blocks": 27}),
    "windows": ({**MODELS["mixed"], "sliding_window": WINDOW, "seed": 22}, {"num_gpu_blocks": 150}),
    "drafted": ({}, {"speculative": "draft_model", "num_gpu_blocks": 56}),
    "fp8": ({}, {"kv_cache_dtype": "fp8"}),
}
"""Fields of the checkpoint, and of the configuration."""


def model_of(checkpoint, model_root, kind, seed):
    """A kind's checkpoint, and its configuration."""
    fields, config = KINDS.get(kind, ({}, {}))
    model = checkpoint(**fields)
    if kind == "fp8":
        made = make_checkpoint(model_root, "LlamaForCausalLM", seed=seed)
        model = with_fp8_cache(made, "heads", seed + 1)
    if kind == "drafted":
        config = {**config, "speculative": drafts_by("draft_model", model.path)}
    return model, config


@pytest.mark.parametrize(
    ("kind", "pp", "tp"),
    [
        (None, 1, 2),
        exhaustively(None, 1, 1),
        exhaustively(None, 2, 1),
        *(exhaustively(kind, 2, 1) for kind in ("windows", "drafted")),
        *(exhaustively(kind, 1, 2) for kind in ("windows", "drafted")),
    ],
)
def test_damaged_files_cost_their_requests_a_computation(
    filing, checkpoint, model_root, kind, pp, tp
):
    waves = Waves(random.randrange(1 << 30))
    print("seed", waves.seed)
    model, config = model_of(checkpoint, model_root, kind, waves.seed)
    rng = random.Random(waves.seed)
    with serving(filing, model, pp, tp, **config) as (group, loaded):
        run_waves(new_driver(group, loaded), waves.requests)
        before = settled(group)
    for path in rng.sample(filing.files, len(filing.files) // 12):
        if path.is_file():
            damage(rng, path)
    with serving(filing, model, pp, tp, **config) as (group, loaded):
        driver = new_driver(group, loaded)
        outputs = run_waves(driver, waves.requests)
        after = settled(group)
        assert driver.scheduler.num_free_blocks == loaded.num_blocks - 1, waves.seed
    assert_right(outputs, model, waves)
    num_bad = sum(each.num_bad_files + each.num_invalid for each in after)
    assert num_bad > sum(each.num_bad_files for each in before), waves.seed
    assert num_loaded(outputs) > 0, waves.seed


@pytest.mark.parametrize("seed", seeds(0, of=30))
def test_files_that_change_while_they_are_used(filing, checkpoint, seed):
    rng, model = random.Random(seed), checkpoint()
    shape = rng.choice([(1, 1), (2, 1), (1, 2)])
    stop = threading.Event()

    def change():
        while not stop.wait(0.002):
            with suppress(OSError, IndexError, ValueError):
                damage(rng, rng.choice(filing.files))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(2):
            waves = Waves(rng.randrange(1 << 30))
            with serving(filing, model, *shape) as (group, loaded):
                for _ in range(2):
                    outputs = run_waves(new_driver(group, loaded), waves.requests)
                    assert_right(outputs, model, waves)
    finally:
        stop.set()
        thread.join()


def test_a_file_system_that_takes_nothing(filing, checkpoint):
    waves, model = Waves(random.randrange(1 << 30)), checkpoint()
    print("seed", waves.seed)
    with serving(filing, model) as (group, loaded):
        (before,) = settled(group)
        (limits,) = (resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in filing.pids[:1])
        resource.prlimit(filing.pids[0], resource.RLIMIT_FSIZE, (1000, limits[1]))
        outputs = run_waves(new_driver(group, loaded), waves.requests)
        (full,) = settled(group)
        assert_right(outputs, model, waves)
        assert full.num_failed > before.num_failed
        assert not [each for each in filing.directories[0].glob("*/*/*") if each.is_file()]
        resource.prlimit(filing.pids[0], resource.RLIMIT_FSIZE, limits)
        others = Waves(waves.seed + 1)
        assert_right(run_waves(new_driver(group, loaded), others.requests), model, others)
        settled(group)
        assert filing.files


def test_files_of_other_weights_never_match(filing, models):
    waves = Waves(random.randrange(1 << 30))
    print("seed", waves.seed)
    old, new, _ = models
    with serving(filing, old) as (group, loaded):
        driver = new_driver(group, loaded)
        assert_right(run_waves(driver, waves.requests), old, waves)
        (before,) = settled(group)
        group.weights.reload(str(new.path))
        outputs = run_waves(driver, waves.requests)
        assert_right(outputs, new, waves)
        (after,) = settled(group)
    # Each stem comes first among the first six requests: only the present weights' files are hits.
    assert after.num_files > before.num_files
    assert after.num_invalid == before.num_invalid
    first = {each.id: outputs[each.id] for each in waves.requests[0]}
    assert num_loaded(first) == 0, waves.seed
    with serving(filing, new) as (group, loaded):
        outputs = run_waves(new_driver(group, loaded), waves.requests[:1])
    waves.requests = waves.requests[:1]
    assert_right(outputs, new, waves)
    assert num_loaded(outputs) == 0, waves.seed


@pytest.mark.exhaustive
def test_adapters_load_their_own_blocks(filing, checkpoint):
    base = checkpoint("LlamaForCausalLM", seed=31)
    merged = make_adapter(base, "filed", seed=1, rank=8)
    seed = random.randrange(1 << 20)
    print("seed", seed)
    stem = clear_prompt([base, merged], seed, 40)
    lora = LoraConfig(max_loras=1, max_lora_rank=16)
    with serving(filing, base, lora=lora) as (group, loaded):
        models = [(base, None), (merged, group.loras.add("filed"))]
        driver = new_driver(group, loaded)
        num_done = 0
        for round_ in range(3):
            requests, expected = adapted_requests(models, seed + round_, 2, same_prompt=stem)
            outputs = run_waves(driver, [requests])
            assert tokens_of(outputs) == expected, seed
            num_done += num_loaded(outputs)
            settled(group)
            run_waves(driver, Waves(seed + round_).requests[:2])  # evict the stem's blocks
    assert num_done > 0, seed


@pytest.mark.parametrize(
    ("kind", "pp", "tp"),
    [
        ("windows", 1, 1),
        *(exhaustively(kind, 1, 1) for kind in KINDS if kind != "windows"),
        *(exhaustively(kind, 2, 1) for kind in ("windows", "drafted")),
        *(exhaustively(kind, 1, 2) for kind in ("windows", "drafted")),
    ],
)
def test_kinds_of_filed_blocks(filing, checkpoint, model_root, kind, pp, tp):
    waves = Waves(random.randrange(1 << 30))
    print("seed", waves.seed)
    model, config = model_of(checkpoint, model_root, kind, waves.seed)
    for _ in range(2):
        with serving(filing, model, pp, tp, **config) as (group, loaded):
            outputs = run_waves(new_driver(group, loaded), waves.requests)
            found = settled(group)
        assert_right(outputs, model, waves)
    assert num_loaded(outputs) > 0, waves.seed
    assert all(each.num_invalid == 0 for each in found), waves.seed


REFUSED = {
    "experts of tokens": (
        {"architecture": "Qwen3MoeForCausalLM"},
        {"enable_return_routed_experts": True},
        "leave out enable_return_routed_experts",
    ),
}
"""Fields of the checkpoint, of the configuration, and what is said."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_filed_is_refused_by_name(filing, checkpoint, name):
    fields, config, said = REFUSED[name]
    with (
        pytest.raises(ConfigError, match=said) as raised,
        serving(filing, checkpoint(**fields), **config),
    ):
        pass
    assert "cache.kv_files = True" in str(raised.value)


def test_a_daemon_without_a_directory_refuses_it(serve, checkpoint):
    refused = pytest.raises(ConfigError, match="start it with --kv-file-dir")
    with refused, serve(checkpoint().path, kv_files=True):
        pass

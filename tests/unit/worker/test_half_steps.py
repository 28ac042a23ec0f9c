"""A worker whose layers keep states of requests: after a step that failed half-way, its requests
begin again, at their first tokens or at a checkpoint, and the others go on."""

import pytest
import torch
from worker_driver import GREEDY, WorkerDriver

from rpc_schema import kv_cache, lifecycle
from rpc_schema.errors import ConfigError, InvalidStepError
from tests.support.decaying_reference import make_decaying
from tests.support.families import all_families
from worker_daemon.models import registry
from worker_daemon.runner.kv_cache import allocate_kv_caches

COUNT = 10
SIZES = {
    "vocab_size": 151,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


@pytest.fixture
def model(model_root):
    return make_decaying(model_root, "decaying", (0, 1), seed=61, **SIZES).model


BORDER = 32
"""Tokens from a border to the next, with checkpoints every second block."""


@pytest.fixture(params=[0])
def serving(request, monkeypatch, make_worker, model):
    """A worker with checkpoints every so many blocks."""
    monkeypatch.setattr(registry, "FAMILIES", all_families())
    driver = WorkerDriver(make_worker())
    driver.init_device()
    driver.load_model("decaying", dtype="float32")
    driver.profile()
    layers = driver.worker.get_kv_cache_spec(lifecycle.GetKVCacheSpec(**driver.ids())).layers
    groups = kv_cache.plan_groups([layers], driver.cache.block_size, 128, 64)
    states = kv_cache.rank_states(layers, driver.scheduler.max_num_seqs)
    every = request.param
    driver.allocate(kv_cache.build_kv_cache_config(groups, 0, driver.num_blocks, states, every))
    driver.warm_up()
    return driver


def test_states_and_pages_are_allocated_by_the_plan(serving):
    caches = {tuple(kv.cache.shape): kv.cache.dtype for kv in serving.worker._serving.kv.layers}
    assert caches == {(9, 40): torch.float32, (64, 2, 16, 2, 8): torch.float32}


def test_after_half_a_step_its_requests_begin_again_and_others_go_on(
    serving, model, prompts, reference
):
    stays, fails = prompts([7, 23], seed=62)
    tokens = [serving.execute({0: 7, 1: 10}, [(0, stays, GREEDY), (1, fails, GREEDY)])[0].token]
    tokens.append(serving.execute({0: 1})[0].token)
    last = serving.worker._model.stage._layers[-1]
    forward, last.forward = last.forward, None
    before = [kv.cache.clone() for kv in serving.worker._serving.kv.layers]
    with pytest.raises(TypeError):
        serving.execute({1: 9})
    last.forward = forward
    changed = [
        not torch.equal(kv.cache, old)
        for kv, old in zip(serving.worker._serving.kv.layers, before, strict=True)
    ]
    assert changed[0], "the step has got half-way"
    again = serving.execute({0: 1, 1: 23}, [(1, fails, GREEDY)], resync={0})
    others = [again[1].token]
    tokens.append(again[0].token)
    while len(others) < COUNT:
        both = serving.execute({0: 1, 1: 1})
        tokens.append(both[0].token)
        others.append(both[1].token)
    assert others == reference(model, fails, COUNT)
    assert tokens == reference(model, stays, len(tokens))


def tokens_of(serving, slot, computed, prompt, blocks):
    """The tokens of a request that begins at a border with these blocks, beside nobody."""
    for other in [*serving.blocks]:
        serving.release(other)
    serving.free_blocks = [each for each in serving.free_blocks if each not in blocks]
    new = [(slot, prompt, GREEDY, (computed, blocks))]
    left = len(prompt) - computed
    tokens = [serving.execute({slot: left}, new, resync=set())[slot].token]
    while len(tokens) < COUNT:
        tokens.append(serving.execute({slot: 1})[slot].token)
    return tokens


@pytest.mark.parametrize("serving", [2], indirect=True)
def test_requests_begin_at_the_checkpoints_of_others(serving, model, prompts, reference):
    """Whatever their row holds: a step has failed half-way, in the middle of a later chunk."""
    (stem,) = prompts([80], seed=63)
    tails = prompts([9, 30], seed=64)
    serving.execute({0: BORDER}, [(0, stem, GREEDY)])
    serving.execute({0: BORDER})
    blocks = list(serving.blocks[0])
    assert [block_id % 2 for block_id in blocks] == [1, 0, 1, 0], "the second of each two is even"
    last = serving.worker._model.stage._layers[-1]
    forward, last.forward = last.forward, None
    with pytest.raises(TypeError):
        serving.execute({0: 10})
    last.forward = forward
    for computed, tail in zip((2 * BORDER, BORDER), tails, strict=True):
        prompt = [*stem[:computed], *tail]
        ours = tokens_of(serving, 0, computed, prompt, blocks[: computed // 16])
        assert ours == reference(model, prompt, COUNT)


@pytest.mark.parametrize("serving", [2], indirect=True)
def test_a_decode_that_ends_at_a_border_keeps_a_checkpoint(serving, model, prompts, reference):
    (prompt,) = prompts([BORDER - 3], seed=65)
    token = serving.execute({0: len(prompt)}, [(0, prompt, GREEDY)])[0].token
    known = [*prompt, token]
    while len(known) <= BORDER:
        known.append(serving.execute({0: 1})[0].token)
    blocks = serving.blocks[0][:2]
    assert tokens_of(serving, 1, BORDER, known, blocks) == reference(model, known, COUNT)


@pytest.mark.parametrize("serving", [2], indirect=True)
def test_steps_that_pass_over_a_border_are_refused(serving, prompts):
    (prompt,) = prompts([60], seed=66)
    serving.execute({0: 10}, [(0, prompt, GREEDY)])
    with pytest.raises(InvalidStepError) as refused:
        serving.execute({0: 23})
    assert refused.value.field == "num_scheduled_tokens"
    assert refused.value.value == "slot 0: 23" and "at most 22" in refused.value.fix
    for computed, blocks, field in (
        (16, [62], "scheduled_new_reqs[request-1].num_computed_tokens"),
        (BORDER, [62, 61], "new_block_ids"),
    ):
        with pytest.raises(InvalidStepError) as refused:
            serving.execute({1: 5}, [(1, prompt, GREEDY, (computed, blocks))], resync=set())
        assert refused.value.field == field
        assert str(BORDER) in refused.value.fix or "a multiple of 2" in refused.value.fix
    assert serving.execute({2: BORDER}, [(2, prompt, GREEDY)], resync=set()) == {}


def test_borders_are_the_ends_of_blocks():
    plan = kv_cache.KVCacheConfig(
        num_blocks=8,
        block_size=16,
        groups=tuple(
            kv_cache.KVCacheGroup(
                layer_names=(), block_size=size, sliding_window=window, dtype="float32"
            )
            for size, window in ((16, None), (32, 64))
        ),
        size_bytes=0,
        checkpoint_blocks=3,
    )
    with pytest.raises(ConfigError, match="no whole number of blocks in each group") as refused:
        allocate_kv_caches(plan, (), torch.float32, 1, torch.zeros)
    assert refused.value.field == "kv_cache_config.checkpoint_blocks"

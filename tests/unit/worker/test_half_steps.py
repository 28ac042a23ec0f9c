"""A worker whose layers keep states of requests: after a step that failed half-way, its requests
begin again, and the others go on."""

import pytest
import torch
from worker_driver import GREEDY, WorkerDriver

from rpc_schema import kv_cache, lifecycle
from tests.support.decaying_reference import make_decaying
from tests.support.families import all_families
from worker_daemon.models import registry

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


@pytest.fixture
def serving(monkeypatch, make_worker, model):
    monkeypatch.setattr(registry, "FAMILIES", all_families())
    driver = WorkerDriver(make_worker())
    driver.init_device()
    driver.load_model("decaying", dtype="float32")
    driver.profile()
    layers = driver.worker.get_kv_cache_spec(lifecycle.GetKVCacheSpec(**driver.ids())).layers
    groups = kv_cache.plan_groups([layers], driver.cache.block_size, 128, 64)
    states = kv_cache.rank_states(layers, driver.scheduler.max_num_seqs)
    driver.allocate(kv_cache.build_kv_cache_config(groups, 0, driver.num_blocks, states))
    driver.warm_up()
    return driver


def test_states_and_pages_are_allocated_by_the_plan(serving):
    caches = {tuple(kv.cache.shape): kv.cache.dtype for kv in serving.worker._serving.kv}
    assert caches == {(9, 40): torch.float32, (64, 2, 16, 2, 8): torch.float32}


def test_after_half_a_step_its_requests_begin_again_and_others_go_on(
    serving, model, prompts, reference
):
    stays, fails = prompts([7, 23], seed=62)
    tokens = [serving.execute({0: 7, 1: 10}, [(0, stays, GREEDY), (1, fails, GREEDY)])[0].token]
    tokens.append(serving.execute({0: 1})[0].token)
    last = serving.worker._model.stage._layers[-1]
    forward, last.forward = last.forward, None
    before = [kv.cache.clone() for kv in serving.worker._serving.kv]
    with pytest.raises(TypeError):
        serving.execute({1: 9})
    last.forward = forward
    changed = [
        not torch.equal(kv.cache, old)
        for kv, old in zip(serving.worker._serving.kv, before, strict=True)
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

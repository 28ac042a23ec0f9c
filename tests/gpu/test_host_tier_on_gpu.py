"""The host tier on a GPU: copies to page-locked memory and back, ordered against the device's work,
leave every block as a model of it says; prompts that begin with loaded blocks get the same tokens
as transformers'."""

import random

import pytest
import torch

from tests.support.checkpoints import make_checkpoint
from tests.support.host_moves import ModelledTier
from tests.support.serving import SHARED_GPU, connect, worker_config
from tests.support.tiered_waves import (
    CONFIG,
    NUM_GPU_BLOCKS,
    Waves,
    assert_right,
    new_driver,
    num_loaded,
    run_waves,
    tiers,
)
from worker_client.launcher import LocalDaemons
from worker_daemon.runner.connectors import staging

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BUSY_SIDE = 4096
"""A product of such matrices takes the device milliseconds."""


@pytest.mark.parametrize("memory", ["host", "device"])
@pytest.mark.parametrize("staging_bytes", [1, 1 << 16, 1 << 24])
def test_blocks_are_what_a_model_of_them_says(staging_bytes, memory, monkeypatch):
    """The device is behind the host all the time: a copy that does not wait for what it depends on
    sees other contents."""
    seed = random.randrange(1 << 30)
    monkeypatch.setattr(staging, "STAGING_BYTES", staging_bytes)
    tier = ModelledTier(random.Random(seed), "cuda:0", words_per_page=1 << 14, memory=memory)
    busy = torch.rand(BUSY_SIDE, BUSY_SIDE, device="cuda:0")
    found = []
    for number in range(60):
        busy = torch.mm(busy, busy).clamp_(0, 1)
        tier.compute()
        if tier.slots and number % 7 == 0:
            tier.flip()
        found.append(tier.random_step())
        if number % 10 == 9:
            tier.check()
    torch.cuda.synchronize()
    for loaded, invalid in found:
        blocks = [] if loaded is None else loaded.invalid_blocks.tolist()
        assert sorted(blocks) == sorted(invalid), seed
    assert any(invalid for _, invalid in found), seed
    tier.tier.settle()
    tier.arrive()
    assert tier.num_invalid_beside and not tier.beside, seed
    tier.rows.close()


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_loaded_prefixes_give_the_same_tokens(tmp_path, dtype):
    waves = Waves(random.randrange(1 << 30))
    model = make_checkpoint(tmp_path, "LlamaForCausalLM", seed=waves.seed, head_dim=64)
    fields = {"gpu_memory_utilization": SHARED_GPU, "kv_cache_dtype": dtype}
    config = worker_config(model.path, **{**CONFIG, "block_size": 16}, **fields)
    with LocalDaemons(["cuda:0"], tmp_path) as daemons:
        served = connect(daemons.endpoints, config, num_gpu_blocks=NUM_GPU_BLOCKS // 4)
        with served as (group, loaded):
            outputs = run_waves(new_driver(group, loaded), waves.requests)
            (found,) = tiers(group)
    assert found.num_invalid == 0 < found.num_loaded, (waves.seed, found)
    assert num_loaded(outputs) > 0
    if dtype == "auto":
        assert_right(outputs, model, waves)

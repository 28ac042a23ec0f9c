"""Prompts that a group on another GPU computes, whose blocks are read from its memory by CUDA IPC,
give the tokens of transformers; either side may be killed meanwhile."""

import random

import pytest
import torch

from tests.support.checkpoints import make_checkpoint
from tests.support.prefill_pairs import (
    Prompts,
    assert_blocks_come,
    no_slots,
    prefill_pair,
    replaced,
    run,
    run_until_early,
)
from tests.support.serving import SHARED_GPU, kill_and_wait
from tests.support.tiered_waves import assert_right, num_loaded, tiers
from tests.support.waiting import wait_until
from worker_client.launcher import LocalDaemons

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(400)]
CHANGES = {
    "block_size": 16,
    "gpu_memory_utilization": SHARED_GPU,
    "kv_tier_memory": "device",
    "kv_host_memory_bytes": 64 << 20,
    "max_model_len": 192,
    "max_num_batched_tokens": 64,
    "num_gpu_blocks": 400,
}
LENGTHS = (30, 170)


@pytest.fixture
def model(tmp_path):
    return make_checkpoint(
        tmp_path, "LlamaForCausalLM", seed=random.randrange(1 << 30), head_dim=64
    )


def started(model, count):
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices")
    return LocalDaemons([f"cuda:{index}" for index in range(count)], model.path.parent)


@pytest.mark.parametrize("memory", ["device", "host"])
@pytest.mark.parametrize(
    ("source", "destination"), [((1, 1), (1, 1)), ((1, 2), (1, 1)), ((1, 1), (1, 2))]
)
def test_blocks_of_another_gpu_give_the_same_tokens(model, source, destination, memory):
    sent = Prompts(random.randrange(1 << 30), count=20, lengths=LENGTHS)
    both = (CHANGES | {"kv_tier_memory": memory},) * 2
    with started(model, source[1] + destination[1]) as daemons:
        pair = prefill_pair(daemons.endpoints, model, source, destination, changes=both)
        with pair as (driver, prefill):
            outputs = run(driver, sent.requests)
            found, counts = tiers(driver.group), prefill.counts.prompts
    assert_right(outputs, model, sent)
    assert num_loaded(outputs) > 0, sent.seed
    assert counts["moved"] == counts.total() > 0, (sent.seed, counts)
    for tier in found:
        assert tier.num_received > 0 == tier.num_invalid, (sent.seed, tier)
        assert tier.num_mapped == (tier.num_received if memory == "device" else 0)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_the_death_of_either_side_between_two_moves(model, side):
    """What is mapped of the dead does no harm, and its successor has all the memory it needs."""
    sent = Prompts(random.randrange(1 << 30), count=60, lengths=(120, 170))
    both, drivers = (CHANGES,) * 2, []
    with started(model, 2) as daemons:
        recover = replaced(daemons)
        options = {"recover": (recover, recover), "changes": both, "sources": drivers}
        pair = prefill_pair(daemons.endpoints, model, (1, 1), (1, 1), **options)
        with pair as (driver, prefill):
            assert_blocks_come(driver, sent.seed)
            outputs, _ = run_until_early(driver, prefill, sent)
            kill_and_wait(daemons.pids[side == "decode"])
            outputs |= {output.req_id: output for output in driver.run()}
            assert_right(outputs, model, sent)
            assert_blocks_come(driver, sent.seed + 1)
            (found,) = tiers(driver.group)
            wait_until(lambda: driver.step() == [] and no_slots([driver, *drivers]), sent.seed)
    assert found.num_mapped > 0, sent.seed

"""Models whose layers keep other things than keys and values (tests/support/families), on a daemon
with a GPU: tokens are those of the reference with and without CUDA graphs, in chunks, when requests
are preempted, when they begin at checkpoints of others, and with another driver."""

import random

import pytest
import torch
from msgspec.structs import replace

from rpc_schema.config import GraphConfig
from tests.support.checkpoints import decisive_prompts, make_checkpoint
from tests.support.decaying_reference import make_decaying
from tests.support.families import command
from tests.support.families.latent import SMALL
from tests.support.serving import (
    SHARED_GPU,
    assert_greedy,
    assert_greedy_tokens,
    connect,
    generate,
    greedy_request,
    scheduler_limits,
    worker_config,
)
from worker_client.driver import Driver
from worker_client.launcher import LocalDaemons
from worker_client.scheduler import Scheduler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SEED = random.randrange(1 << 20)
KINDS = ["latent", "state", "states"]
LENGTHS = [3, 9, 17, 40, 22]
MAX_TOKENS = 12
BLOCK_SIZE = 4
FEW_BLOCKS = 26
"""Too few for all requests at once."""
NUM_STEPS = 5
"""Steps before a driver leaves."""


@pytest.fixture(scope="module")
def endpoints(model_root):
    """Of a daemon with the families of tests."""
    with LocalDaemons(["cuda:0"], model_root, command=command(model_root)) as daemons:
        yield daemons.endpoints


@pytest.fixture(scope="module", params=KINDS)
def reference(request, model_root):
    """A model: state has layers with attention too, states has none."""
    print(f"seed {SEED}")
    if request.param == "latent":
        return make_checkpoint(model_root, "DeepseekV3ForCausalLM", seed=SEED, **SMALL)
    layers = (1, 2) if request.param == "state" else (0, 1, 2, 3)
    return make_decaying(model_root, request.param, layers, seed=SEED, checkpoint_blocks=2)


@pytest.fixture(scope="module")
def requests(reference):
    drawn = decisive_prompts(reference, SEED, LENGTHS, MAX_TOKENS)
    return [greedy_request(f"r{i}", prompt, MAX_TOKENS) for i, prompt in enumerate(drawn)]


def config_of(reference, *, enforce_eager=False):
    config = worker_config(
        reference.path,
        block_size=BLOCK_SIZE,
        max_model_len=64,
        max_num_batched_tokens=64,
        gpu_memory_utilization=SHARED_GPU,
        kv_cache_memory_bytes=64 << 20,
    )
    return replace(config, graph=GraphConfig(enforce_eager=enforce_eager))


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_tokens_are_those_of_the_reference(endpoints, reference, requests, enforce_eager):
    config = config_of(reference, enforce_eager=enforce_eager)
    with connect(endpoints, config, num_gpu_blocks=FEW_BLOCKS) as (group, loaded):
        runs = [
            generate(group, loaded, requests),
            generate(group, loaded, requests, max_num_batched_tokens=11),
        ]
        (status,) = group.get_status()
    assert (int(status.providers["graphs"]) == 0) == enforce_eager
    for run in runs:
        assert_greedy(run, reference, requests)
        assert sum(output.num_preemptions for output in run.outputs.values())


def test_prefixes_of_others_and_of_an_earlier_driver(endpoints, reference):
    stem = decisive_prompts(reference, SEED + 1, [21], MAX_TOKENS)[0].tolist()
    drawn = decisive_prompts(reference, SEED + 2, [22, 40, 26], MAX_TOKENS, prefix=stem)
    requests = [greedy_request(f"r{i}", prompt, MAX_TOKENS) for i, prompt in enumerate(drawn)]
    with connect(endpoints, config_of(reference)) as (group, loaded):
        runs = [generate(group, loaded, [request]) for request in requests]
    unit = BLOCK_SIZE * max(1, loaded.checkpoint_blocks)
    for run, request, shared in zip(runs, requests, (0, 1, 1), strict=True):
        assert_greedy(run, reference, [request])
        (output,) = run.outputs.values()
        assert output.num_cached_tokens == shared * (len(stem) // unit * unit)


def test_another_driver_goes_on(endpoints, reference, requests):
    config = config_of(reference)
    with connect(endpoints, config) as (group, loaded):
        limits = scheduler_limits(group, loaded)
        driver = Driver(group, Scheduler(limits))
        for request in requests:
            driver.add_request(request)
        outputs = [output for _ in range(NUM_STEPS) for output in driver.step()]
        group.attach(keep_requests=True)
        group.prepare(config)
        adopted = group.adopt_requests()
        scheduler = Scheduler(limits)
        outputs += scheduler.adopt_requests(adopted)
        outputs += Driver(group, scheduler).run()
    assert any(request.num_computed_tokens for request in adopted)
    tokens = {output.req_id: output.token_ids for output in outputs}
    assert_greedy_tokens(tokens, reference, requests)

"""Steps with drafts on a daemon with a GPU, with CUDA graphs and without: greedy tokens are those
of transformers, whatever drafts them, also when blocks are scarce; a model that drafts for itself
is always right."""

import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rpc_schema.config import GraphConfig, SpeculativeConfig
from tests.support.checkpoints import decisive_prompts, make_checkpoint
from tests.support.serving import (
    SHARED_GPU,
    assert_greedy,
    connect,
    generate,
    greedy_request,
    worker_config,
)
from worker_client.launcher import LocalDaemons

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SEED = random.randrange(1 << 20)
MAX_TOKENS = 24
FEW_BLOCKS = 22
METHODS = ["ngram", "suffix", "draft_model"]


@pytest.fixture(scope="module")
def model_root():
    path = Path(tempfile.mkdtemp(prefix="wd-models-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def endpoints(model_root):
    with LocalDaemons(["cuda:0"], model_root) as daemons:
        yield daemons.endpoints


@pytest.fixture(scope="module")
def reference(model_root):
    print(f"seed {SEED}")
    return make_checkpoint(model_root, "LlamaForCausalLM", seed=SEED)


@pytest.fixture(scope="module")
def requests(reference):
    """Prompts that end as they began, so that a lookup finds something."""
    made = []
    for index in range(6):
        head = np.random.default_rng([SEED, index]).integers(0, 331, 3 + index).tolist()
        text = head * 2
        (prompt,) = decisive_prompts(
            reference, SEED + index, [len(text) + 3], MAX_TOKENS, prefix=text
        )
        made.append(greedy_request(f"r{index}", prompt, MAX_TOKENS))
    return made


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_transformers(endpoints, reference, requests, method, enforce_eager):
    speculative = SpeculativeConfig(method=method, num_speculative_tokens=3, prompt_lookup_min=1)
    if method == "draft_model":
        speculative = replace(speculative, model=str(reference.path))
    config = worker_config(
        reference.path,
        block_size=4,
        max_model_len=64,
        max_num_batched_tokens=64,
        gpu_memory_utilization=SHARED_GPU,
        kv_cache_memory_bytes=64 << 20,
        speculative=speculative,
    )
    config = replace(config, graph=GraphConfig(enforce_eager=enforce_eager))
    with connect(endpoints, config) as (group, loaded):
        run = generate(group, loaded, requests)
        assert_greedy(run, reference, requests)
        scarce = generate(
            group, loaded, requests, num_blocks=FEW_BLOCKS, enable_prefix_caching=False
        )
        assert_greedy(scarce, reference, requests)
    accepted = sum(output.num_accepted for output in run.outputs.values())
    drafted = sum(output.num_drafted for output in run.outputs.values())
    assert accepted > (0.9 * drafted if method == "draft_model" else 0)

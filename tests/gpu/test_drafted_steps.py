"""Steps with drafts on a daemon with a GPU, with CUDA graphs and without: greedy tokens are those
of transformers, whatever drafts them, also when blocks are scarce; a model that drafts for itself
is always right, whether its passes are replayed or launched, and however rows sample."""

import random

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rpc_schema.config import GraphConfig, SpeculativeConfig
from tests.support.checkpoints import decisive_prompts, make_checkpoint
from tests.support.flat_requests import changed
from tests.support.resting_drafts import RestingScheduler
from tests.support.serving import (
    SHARED_GPU,
    assert_greedy,
    connect,
    generate,
    greedy_request,
    scheduler_limits,
    worker_config,
)

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
def reference(model_root):
    print(f"seed {SEED}")
    return make_checkpoint(model_root, "LlamaForCausalLM", seed=SEED)


@pytest.fixture(scope="module")
def requests(reference):
    """Prompts that end as they began, so that a lookup finds something."""
    heads = (
        np.random.default_rng([SEED, index]).integers(0, 331, 3 + index).tolist()
        for index in range(6)
    )
    return [repeating(reference, index, head) for index, head in enumerate(heads)]


def repeating(reference, index, head):
    """A request whose prompt ends as it began."""
    text = head * 2
    (prompt,) = decisive_prompts(reference, SEED + index, [len(text) + 3], MAX_TOKENS, prefix=text)
    return greedy_request(f"r{index}", prompt, MAX_TOKENS)


def config_of(reference, method, *, enforce_eager=False, most=3):
    speculative = SpeculativeConfig(method=method, num_speculative_tokens=most, prompt_lookup_min=1)
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
    return replace(config, graph=GraphConfig(enforce_eager=enforce_eager))


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_transformers(endpoints, reference, requests, method, enforce_eager):
    config = config_of(reference, method, enforce_eager=enforce_eager)
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


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_model_is_right_again_after_each_rest(endpoints, reference, requests, enforce_eager):
    """Its layers are in no plain decode; it has caught up once it makes drafts."""
    config = config_of(reference, "draft_model", enforce_eager=enforce_eager)
    with connect(endpoints, config) as (group, loaded):
        for own in (requests, requests[:1]):
            scheduler = RestingScheduler(scheduler_limits(group, loaded))
            run = generate(group, loaded, own, scheduler)
            assert_greedy(run, reference, own)
            accepted = sum(output.num_accepted for output in run.outputs.values())
            drafted = sum(output.num_drafted for output in run.outputs.values())
            assert scheduler.num_rests > 8
            assert accepted > 0.9 * drafted > 0


@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_graphs_verify_drafts_as_the_sampler_does(endpoints, reference, method, most):
    """Log probabilities of one row change no token, but all rows of its steps are then verified
    after the graph. Batches are padded to sizes of graphs, and shrink as requests end."""
    rng = np.random.default_rng([SEED, most])
    made = [
        repeating(reference, index, rng.integers(0, 331, 2 + index % 5).tolist())
        for index in range(16)
    ]
    with connect(endpoints, config_of(reference, method, most=most)) as (group, loaded):
        num_accepted = 0
        for count in (1, 2, 5, 16):
            own = [
                changed(request, max_tokens=int(rng.integers(MAX_TOKENS // 2, MAX_TOKENS + 1)))
                for request in made[:count]
            ]
            mixed = [changed(own[0], logprobs=1), *own[1:]]
            for requests in (own, mixed, own):
                run = generate(group, loaded, requests)
                assert_greedy(run, reference, own)
                num_accepted += sum(output.num_accepted for output in run.outputs.values())
    assert num_accepted


SAMPLING = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 0.9, "top_p": 0.8, "min_p": 0.02},
]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_model_agrees_with_itself_however_rows_sample(
    endpoints, reference, requests, enforce_eager
):
    """Rows of all kinds beside each other, so that most graphs' rows use some option and none uses
    all. Rounding may refuse a draft, when two tokens are about as likely."""
    config = config_of(reference, "draft_model", enforce_eager=enforce_eager, most=4)
    mixed = [
        changed(request, seed=SEED + index, **SAMPLING[index % 4])
        for index, request in enumerate(requests)
    ]
    with connect(endpoints, config) as (group, loaded):
        run = generate(group, loaded, mixed)
        alone = [generate(group, loaded, [request]) for request in mixed]
    for each in (run, *alone):
        accepted = sum(output.num_accepted for output in each.outputs.values())
        drafted = sum(output.num_drafted for output in each.outputs.values())
        assert accepted > 0.85 * drafted > 0


def num_graphs(group):
    return int(group.get_status()[0].providers["graphs"])


def test_drafts_have_graphs_of_their_own(endpoints, reference):
    """The passes of a draft model are captured beside the steps, and in none without one."""
    counts = {}
    for method in ("ngram", "draft_model"):
        with connect(endpoints, config_of(reference, method)) as (group, _):
            counts[method] = num_graphs(group)
    assert counts["draft_model"] > counts["ngram"] > 0

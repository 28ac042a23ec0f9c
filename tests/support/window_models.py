"""Small models whose layers see different parts of a context, and what daemons are to do with them
on any device: tokens are those of transformers while blocks behind windows go to others, prefixes
are shared, requests are preempted and adopted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rpc_schema.config import WorkerConfig
from rpc_schema.kv_cache import NULL_BLOCK, BlockGroup, request_blocks
from tests.support.checkpoints import Checkpoint, decisive_prompts, make_checkpoint
from tests.support.every_draft import every_draft
from tests.support.serving import (
    SHARED_GPU,
    Served,
    assert_greedy,
    assert_greedy_tokens,
    connect,
    generate,
    greedy_request,
    scheduler_limits,
    worker_config,
)
from worker_client.driver import Driver
from worker_client.group.adoption import AdoptedRequest
from worker_client.requests import GenerationRequest

BLOCK_SIZE = 4
WINDOW = 10
"""Two tokens more than two blocks: a scheduler with a window one token too short frees a block that
the next token sees."""
MAX_MODEL_LEN = 150
MAX_TOKENS = 40
STEP_TOKENS = 32
MIXED = ("full_attention", *["sliding_attention"] * 3) * 2
MODELS: Mapping[str, Mapping[str, object]] = {
    "mistral": {
        "architecture": "MistralForCausalLM",
        "num_hidden_layers": 5,
    },
    "mixed": {
        "architecture": "Qwen3ForCausalLM",
        "num_hidden_layers": len(MIXED),
        "layer_types": list(MIXED),
        "max_window_layers": 0,
        "use_sliding_window": True,
    },
    "upper": {
        "architecture": "Qwen2ForCausalLM",
        "num_hidden_layers": 5,
        "max_window_layers": 3,
        "use_sliding_window": True,
    },
}
"""All layers slide; one in four attends to everything; only the upper ones slide."""
NUM_GROUPS = {"mistral": (1,), "mixed": (4,), "upper": (2, 5)}
"""Allowed numbers of KV groups if one rank has all layers."""


def make_model(directory: Path, name: str, seed: int, window: int = WINDOW) -> Checkpoint:
    """Make one of MODELS."""
    return make_checkpoint(directory, seed=seed, sliding_window=window, **MODELS[name])


def make_requests(
    reference: Checkpoint,
    seed: int,
    lengths: Sequence[int],
    max_tokens: int = MAX_TOKENS,
    prefix: Sequence[int] = (),
) -> list[GenerationRequest]:
    """Return greedy requests without near ties, one for each prompt length."""
    prompts = decisive_prompts(reference, seed, lengths, max_tokens, prefix=prefix)
    return [
        greedy_request(f"{seed}-{index}", prompt, max_tokens)
        for index, prompt in enumerate(prompts)
    ]


def config_of(reference: Checkpoint) -> WorkerConfig:
    """Return the daemon's configuration; its steps hold a chunk of a prompt together with
    decodes."""
    return worker_config(
        reference.path,
        max_num_seqs=6,
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        gpu_memory_utilization=SHARED_GPU,
    )


def check_few_blocks(endpoint: str, reference: Checkpoint, name: str, seed: int) -> dict[str, str]:
    """Serve with few blocks, slightly more than the longest request needs: blocks behind a window
    are reused at once and, unless all layers slide, requests are preempted. Return the served
    group."""
    requests = make_requests(reference, seed, [61, 9, 40, 22, 5, 33, 14, 70])
    config = config_of(reference)
    with connect([endpoint], config) as (_, loaded):
        groups = loaded.groups
    assert len(groups) in NUM_GROUPS[name]
    longest, other = (request_blocks(n, groups, STEP_TOKENS) for n in (MAX_MODEL_LEN, 110))
    with connect([endpoint], config, num_gpu_blocks=2 + longest + other // 4) as (group, loaded):
        scheduler = every_draft(scheduler_limits(group, loaded))
        run = generate(group, loaded, requests, scheduler)
        assert_greedy(run, reference, requests)
        num_preemptions = sum(output.num_preemptions for output in run.outputs.values())
        assert num_preemptions > 0 or all(group.window is not None for group in groups)
        kinds = {record.kind for record in run.driver.records}
        assert {"decode", "mixed"} <= kinds
        assert scheduler.num_free_blocks == loaded.num_blocks - 1
        return group.get_status()[0].providers


def check_prefix_hits(served: Served, reference: Checkpoint, seed: int) -> None:
    """Share prefixes of several windows; repeat the first request after its first blocks were
    freed."""
    shared = np.random.default_rng(seed).integers(0, 331, 50).tolist()
    first = make_requests(reference, seed, [53], prefix=shared)
    others = make_requests(reference, seed + 1, [55, 56, 62, 80], prefix=shared)
    group, loaded = served
    scheduler = every_draft(scheduler_limits(group, loaded))
    assert_greedy(generate(group, loaded, first, scheduler), reference, first)
    run = generate(group, loaded, others, scheduler)
    assert_greedy(run, reference, others)
    cached = [run.outputs[request.id].num_cached_tokens for request in others]
    assert cached == [len(shared) // BLOCK_SIZE * BLOCK_SIZE] * len(others)
    again = [replace(request, id=f"again-{request.id}") for request in first]
    assert_greedy(generate(group, loaded, again, scheduler), reference, again)
    assert scheduler.num_free_blocks == loaded.num_blocks - 1


def check_adoption(served: Served, reference: Checkpoint, seed: int) -> None:
    """Let a new driver continue every few steps with the existing KV."""
    requests = make_requests(reference, seed, [61, 9, 40, 22])
    group, loaded = served
    config = group.get_status()[0].config
    assert config is not None, "a model is loaded"
    limits = scheduler_limits(group, loaded)
    tokens: dict[str, list[int]] = {}
    driver, num_steps, num_warm = Driver(group, every_draft(limits)), 0, 0
    for request in requests:
        driver.add_request(request)
    while driver.busy:
        tokens |= {output.req_id: output.token_ids for output in driver.step()}
        num_steps += 1
        if num_steps % 13 == 0:
            group.attach(keep_requests=True)
            group.prepare(config)
            adopted = group.adopt_requests()
            for request in adopted:
                num_warm += request.num_computed_tokens > 0
                assert_null_where_windows_are(request, loaded.groups)
            scheduler = every_draft(limits)
            done = scheduler.adopt_requests(adopted)
            tokens |= {output.req_id: output.token_ids for output in done}
            driver = Driver(group, scheduler)
            known = tokens.keys() | {request.req_id for request in adopted}
            for request in requests:
                if request.id not in known:
                    driver.add_request(request)
    assert num_warm > 0
    assert_greedy_tokens(tokens, reference, requests)


def assert_null_where_windows_are(request: AdoptedRequest, groups: Sequence[BlockGroup]) -> None:
    """Assert that the null block replaces exactly the blocks that no later token sees."""
    for of_group, group in zip(request.blocks_by_group, groups, strict=True):
        seen = 0
        if group.window is not None:
            seen = max(0, request.num_computed_tokens - group.window + 1) // group.block_size
        assert [block_id == NULL_BLOCK for block_id in of_group] == [
            place < seen for place in range(len(of_group))
        ]

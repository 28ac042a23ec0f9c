"""Models whose layers see different parts of a context: greedy tokens are transformers' own while
blocks behind windows go to others, prefixes are shared, requests are preempted, adopted and lost.
Contexts are several windows long."""

from dataclasses import replace

import numpy as np
import pytest

from rpc_schema.kv_cache import NULL_BLOCK, BlockGroup, request_blocks
from tests.support.checkpoints import Checkpoint, decisive_prompts
from tests.support.serving import assert_greedy, generate, greedy_request, scheduler_limits
from worker_client.driver import Driver
from worker_client.scheduler import Scheduler

BLOCK_SIZE = 4
WINDOW = 10
MAX_MODEL_LEN = 150
MIXED = ("full_attention", *["sliding_attention"] * 3) * 2
"""Two groups where all layers are on one rank: of which one is cut into three."""


@pytest.fixture(scope="module")
def models(checkpoint) -> dict[str, Checkpoint]:
    """All layers slide; one in four sees everything; the upper ones slide."""
    qwen = {"use_sliding_window": True, "sliding_window": WINDOW}
    return {
        "mistral": checkpoint(
            "MistralForCausalLM", num_hidden_layers=5, sliding_window=WINDOW, seed=21
        ),
        "mixed": checkpoint(
            "Qwen3ForCausalLM",
            num_hidden_layers=len(MIXED),
            layer_types=list(MIXED),
            max_window_layers=0,
            seed=22,
            **qwen,
        ),
        "upper": checkpoint(
            "Qwen2ForCausalLM", num_hidden_layers=5, max_window_layers=3, seed=23, **qwen
        ),
    }


CASES = [
    ("mistral", 1, None, (1,)),
    ("mistral", 2, None, (1,)),
    ("mixed", 1, None, (4,)),
    ("mixed", 2, (5, 3), (5,)),
    ("upper", 1, None, (2, 5)),
    ("upper", 2, (4, 1), (1, 2, 3, 4, 5)),
]
"""Model, stages, their layers, and how many groups there may be."""


def make_requests(reference, seed, lengths, max_tokens, prefix=()):
    return [
        greedy_request(
            f"s{seed}-{index}",
            decisive_prompts(reference, 100 * seed + index, [length], max_tokens, prefix=prefix)[0],
            max_tokens,
        )
        for index, length in enumerate(lengths)
    ]


class Holding:
    """A group that notes how many blocks requests have, as the scheduler that drives it knows."""

    def __init__(self, group, scheduler, groups, max_num_batched_tokens):
        self._group = group
        self.max_in_flight = group.max_in_flight
        self._blocks = scheduler._queues
        self._groups = groups
        self._most = max_num_batched_tokens
        self.num_reused = 0
        self._seen: set[int] = set()

    def execute_model(self, output):
        holders: dict[int, str] = {}
        for request in self._blocks.running.values():
            held = [
                block_id
                for of_group in request.blocks.by_group
                for block_id in of_group
                if block_id != NULL_BLOCK
            ]
            bound = request_blocks(request.num_tokens, self._groups, self._most)
            assert len(held) <= bound, f"{request.id} has {len(held)} blocks of {bound}"
            assert len(set(held)) == len(held)
            shared = request.blocks.num_shared
            if not shared:
                for block_id in held:
                    assert holders.setdefault(block_id, request.id) == request.id
        for of_group in (output.new_block_ids, *output.more_new_block_ids):
            for block_ids in of_group.values():
                self.num_reused += len(self._seen.intersection(block_ids))
                self._seen.update(block_ids)
        return self._group.execute_model(output)


@pytest.mark.parametrize(("name", "pp", "partition", "num_groups"), CASES)
def test_blocks_behind_windows_serve_others_while_the_first_goes_on(
    serve, models, name, pp, partition, num_groups
):
    """Few blocks, so that what windows let go is written by others at once: preemption, too."""
    reference: Checkpoint = models[name]
    requests = make_requests(reference, 3, [61, 9, 40, 22, 5, 33, 14, 70], 40)
    config = {
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 6,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": 16,
        "layer_partition": partition,
    }
    with serve(reference.path, pp, **config) as (group, loaded):
        groups = loaded.groups
        assert len(groups) in num_groups
    needed = request_blocks(110, groups, 16)
    config["num_gpu_blocks"] = 2 + request_blocks(MAX_MODEL_LEN, groups, 16) + needed // 2
    with serve(reference.path, pp, **config) as (group, loaded):
        assert loaded.groups == groups
        for enable in (True, False):
            limits = scheduler_limits(group, loaded, enable_prefix_caching=enable)
            scheduler = Scheduler(limits)
            holding = Holding(group, scheduler, groups, 16)
            driver = Driver(holding, scheduler)
            for request in requests:
                driver.add_request(replace(request, id=f"{request.id}.{enable}"))
            outputs = {output.req_id.partition(".")[0]: output for output in driver.run()}
            for request in requests:
                expected = reference.greedy(request.prompt_token_ids.tolist(), request.max_tokens)
                assert outputs[request.id].token_ids == expected, request.id
            assert scheduler.num_free_blocks == loaded.num_blocks - 1
            assert holding.num_reused > 0
        held = sum(status.num_kv_blocks_held for status in group.get_status())
        assert held == 0


class Forgetful(Scheduler):
    """Now and then forgets to send blocks: daemons refuse such a step, and those behind it fail."""

    def __init__(self, limits):
        super().__init__(limits)
        self.num_steps = self.num_failures = 0

    def schedule(self):
        output = super().schedule()
        self.num_steps += 1
        gives = output is not None and (output.new_block_ids or any(output.more_new_block_ids))
        if gives and self.num_steps % 29 == 0 and self.num_failures < 4:
            return replace(output, new_block_ids={}, more_new_block_ids=())
        return output

    def step_failed(self, outputs, lost_req_ids):
        self.num_failures += 1
        super().step_failed(outputs, lost_req_ids)


@pytest.mark.parametrize(("name", "pp", "partition", "num_groups"), CASES[1:4])
def test_requests_go_on_after_failed_steps(serve, models, name, pp, partition, num_groups):
    """Rows that took no part in them stay: the resynchronisation has the counts of each group."""
    reference: Checkpoint = models[name]
    requests = make_requests(reference, 6, [30, 9, 41, 22, 14], 30)
    config = {"block_size": BLOCK_SIZE, "layer_partition": partition, "max_num_seqs": 5}
    config |= {"max_num_batched_tokens": 5, "max_model_len": MAX_MODEL_LEN}
    with serve(reference.path, pp, **config) as (group, loaded):
        scheduler = Forgetful(scheduler_limits(group, loaded))
        run = generate(group, loaded, requests, scheduler)
        assert_greedy(run, reference, requests)
        assert scheduler.num_failures > 1
        assert scheduler.num_free_blocks == loaded.num_blocks - 1


@pytest.mark.parametrize(("name", "pp", "partition", "num_groups"), CASES[1:4])
def test_prefix_hits(serve, models, name, pp, partition, num_groups):
    reference: Checkpoint = models[name]
    shared = np.random.default_rng().integers(0, 331, 50).tolist()
    first = make_requests(reference, 1, [53], 30, prefix=shared)
    others = make_requests(reference, 2, [55, 56, 62, 80], 20, prefix=shared)
    config = {"block_size": BLOCK_SIZE, "layer_partition": partition}
    config |= {"max_num_batched_tokens": 24, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8}
    with serve(reference.path, pp, **config) as (group, loaded):
        scheduler = Scheduler(scheduler_limits(group, loaded))
        assert_greedy(generate(group, loaded, first, scheduler), reference, first)
        run = generate(group, loaded, others, scheduler)
        assert_greedy(run, reference, others)
        cached = [run.outputs[request.id].num_cached_tokens for request in others]
        assert cached == [len(shared) // BLOCK_SIZE * BLOCK_SIZE] * len(others)
        again = [replace(request, id=f"again-{request.id}") for request in first]
        assert_greedy(generate(group, loaded, again, scheduler), reference, again)
        assert scheduler.num_free_blocks == loaded.num_blocks - 1


@pytest.mark.parametrize(("name", "pp", "partition", "num_groups"), CASES[:4])
def test_another_driver_goes_on(serve, models, name, pp, partition, num_groups):
    reference: Checkpoint = models[name]
    requests = make_requests(reference, 5, [61, 9, 40, 22], 40)
    config = {
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": 32,
        "layer_partition": partition,
    }
    with serve(reference.path, pp, **config) as (group, loaded):
        outputs, steps, warm = {}, 0, 0
        driver = Driver(group, Scheduler(scheduler_limits(group, loaded)))
        for request in requests:
            driver.add_request(request)
        while driver.busy:
            steps += 1
            outputs |= {output.req_id: output for output in driver.step()}
            if steps % 11 == 0:
                group.attach(keep_requests=True)
                group.prepare(loaded_config(group))
                scheduler = Scheduler(scheduler_limits(group, loaded))
                adopted = group.adopt_requests()
                for request in adopted:
                    warm += request.num_computed_tokens > 0
                    assert_null_where_windows_are(request, loaded.groups)
                driver = Driver(group, scheduler)
                waiting = {r.id for r in requests} - set(outputs) - {r.req_id for r in adopted}
                for output in scheduler.adopt_requests(adopted):
                    outputs[output.req_id] = output
                for request in requests:
                    if request.id in waiting:
                        driver.add_request(request)
        assert warm > 0
        for request in requests:
            expected = reference.greedy(request.prompt_token_ids.tolist(), request.max_tokens)
            assert outputs[request.id].token_ids == expected


def loaded_config(group):
    return group.get_status()[0].config


def assert_null_where_windows_are(request, groups: tuple[BlockGroup, ...]) -> None:
    for of_group, group in zip(request.blocks_by_group, groups, strict=True):
        seen = 0
        if group.window is not None:
            seen = max(0, request.num_computed_tokens - group.window + 1) // group.block_size
        assert [block_id == NULL_BLOCK for block_id in of_group] == [
            place < seen for place in range(len(of_group))
        ]

"""Models whose layers see different parts of a context: greedy tokens equal transformers' while
blocks behind windows are reused, prefixes are shared, and requests are preempted, adopted and lost.
Contexts are several windows long."""

from dataclasses import replace

import pytest

from rpc_schema.kv_cache import NULL_BLOCK, request_blocks
from tests.support.checkpoints import Checkpoint
from tests.support.exhaustive import exhaustively
from tests.support.serving import assert_greedy, generate, scheduler_limits
from tests.support.window_models import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MODELS,
    WINDOW,
    check_adoption,
    check_prefix_hits,
    make_requests,
)
from worker_client.driver import Driver
from worker_client.scheduler import Scheduler


@pytest.fixture(scope="module")
def models(checkpoint) -> dict[str, Checkpoint]:
    """All layers slide; one in four sees everything; the upper ones slide."""
    return {
        name: checkpoint(**fields, sliding_window=WINDOW, seed=21 + index)
        for index, (name, fields) in enumerate(MODELS.items())
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
USUAL = CASES[3]
PIPELINES = [case if case is USUAL else exhaustively(*case) for case in CASES]
"""In `make test`, two stages with layers of both kinds: others repeat parts of it."""


class Holding:
    """A group that records how many blocks requests have, according to its scheduler."""

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
            shared = request.prefix.num_shared
            if not shared:
                for block_id in held:
                    assert holders.setdefault(block_id, request.id) == request.id
        for of_group in (output.new_block_ids, *output.more_new_block_ids):
            for block_ids in of_group.values():
                self.num_reused += len(self._seen.intersection(block_ids))
                self._seen.update(block_ids)
        return self._group.execute_model(output)


@pytest.mark.parametrize(("name", "pp", "partition", "num_groups"), PIPELINES)
def test_blocks_behind_windows_serve_others_while_the_first_goes_on(
    serve, models, name, pp, partition, num_groups
):
    """Few blocks, so that blocks freed by windows are reused immediately; also preemption."""
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
                expected = reference.greedy(request.prompt.tolist(), request.max_tokens)
                assert outputs[request.id].token_ids == expected, request.id
            assert scheduler.num_free_blocks == loaded.num_blocks - 1
            assert holding.num_reused > 0
        held = sum(status.num_kv_blocks_held for status in group.get_status())
        assert held == 0


class Forgetful(Scheduler):
    """Sometimes omits blocks: daemons refuse such a step, and the following ones fail."""

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


@pytest.mark.parametrize(("name", "pp", "partition", "num_groups"), PIPELINES[2:4])
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


@pytest.mark.usefixtures("each_drafter")
@pytest.mark.parametrize(("name", "pp", "partition", "num_groups"), PIPELINES[1:4])
def test_prefix_hits(serve, models, name, pp, partition, num_groups):
    config = {"block_size": BLOCK_SIZE, "layer_partition": partition}
    config |= {"max_num_batched_tokens": 24, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8}
    with serve(models[name].path, pp, **config) as served:
        check_prefix_hits(served, models[name], seed=1)


@pytest.mark.usefixtures("each_drafter")
@pytest.mark.parametrize(("name", "pp", "partition", "num_groups"), PIPELINES[:4])
def test_another_driver_goes_on(serve, models, name, pp, partition, num_groups):
    config = {
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": 32,
        "layer_partition": partition,
    }
    with serve(models[name].path, pp, **config) as served:
        check_adoption(served, models[name], seed=5)

"""A prefix cache that outlives its driver: prompts of the next driver begin with cached blocks, and
get the tokens of a cold run."""

import json
import os
import random
import signal
from functools import partial

import numpy as np
import pytest
from msgspec.structs import replace

from rpc_schema.cached_blocks import GetCachedBlocks, NoteCachedBlocks
from rpc_schema.errors import (
    ConfigError,
    FencedError,
)
from tests.support.checkpoints import prompts
from tests.support.doomed_driver import NUM_GPU_BLOCKS, Death
from tests.support.exhaustive import exhaustively
from tests.support.forked_daemons import ForkedDaemons
from tests.support.killed_driver import DriverNursery, Plan, begin
from tests.support.serving import LONG_LEASE, greedy_request, worker_config
from tests.support.waiting import wait_until
from worker_client.driver import Driver
from worker_client.driver_parts.registry import DriverOptions
from worker_client.errors import (
    ClientConfigError,
    WorkerDied,
)
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.steps.cached_blocks import CachedBlocks
from worker_client.worker_group import WorkerGroup

STEP_DEADLINE_MS = 1000
SHAPES = ((1, 1), (2, 1), (1, 2))


@pytest.fixture(scope="module")
def two_daemons(model_root):
    """Daemons for this module only."""
    with ForkedDaemons(["cpu", "cpu"], model_root) as daemons:
        yield daemons


@pytest.fixture(scope="module")
def nursery():
    nursery = DriverNursery()
    yield nursery
    nursery.close()


def random_lines(rng, stems, count, name):
    lines = []
    for index in range(count):
        tail = prompts(rng.randrange(1 << 20), [rng.randint(1, 12)])[0].tolist()
        line = {
            "id": f"{name}{index}",
            "prompt_token_ids": stems[index % len(stems)] + tail,
            "max_tokens": rng.randint(60, 70),
        }
        lines.append(json.dumps(line))
    return lines


@pytest.fixture
def make_plans(two_daemons, checkpoint):
    """make_plans(rng, pp, tp) -> plans of two drivers, whose prompts begin alike."""

    def make(rng, pp, tp, **config):
        sizes = {"max_num_batched_tokens": 64, "step_deadline_ms": STEP_DEADLINE_MS}
        config = worker_config(checkpoint().path, pp, tp, **sizes, **config)
        stems = [each.tolist() for each in prompts(rng.randrange(1 << 20), [37, 24, 51])]
        endpoints = two_daemons.endpoints[: pp * tp]
        first, second = (random_lines(rng, stems, 6, name) for name in "ab")
        plan = Plan(endpoints, config, first)
        return plan, replace(plan, lines=second)

    return make


def run(plan, reload=False, keep_requests=False):
    """The plan's outputs by id, and the blocks that the group offers at the start."""
    with WorkerGroup(plan.endpoints, plan.config.parallel, lease=LONG_LEASE) as group:
        group.attach(keep_requests=keep_requests)
        loaded = group.prepare(plan.config, num_gpu_blocks=NUM_GPU_BLOCKS, reload=reload)
        offered = group.prefixes.get(tag_of(plan, loaded))
        serving = begin(group, loaded, replace(plan, adopt=keep_requests))
        outputs = [*serving.done, *serving.driver.run()]
        return {output.req_id: output for output in outputs}, offered


def tag_of(plan, loaded):
    return Scheduler(scheduler_limits(loaded, plan.config)).prefix_tag


def tokens_of(outputs):
    return {name: output.token_ids for name, output in outputs.items()}


def num_cached(outputs):
    return sum(output.num_cached_tokens for output in outputs.values())


def clear(plan):
    """Make the daemons load again, with an empty cache."""
    with WorkerGroup(plan.endpoints, plan.config.parallel, lease=LONG_LEASE) as group:
        group.attach()
        group.prepare(plan.config, num_gpu_blocks=NUM_GPU_BLOCKS, reload=True)


def generate(group, loaded, config, prompt, max_tokens, **options):
    """Generate with a driver of its own."""
    scheduler = Scheduler(scheduler_limits(loaded, config))
    driver = Driver(group, scheduler, options=DriverOptions(**options))
    driver.add_request(greedy_request("a", prompt.tolist(), max_tokens))
    (output,) = driver.run()
    return output


@pytest.mark.parametrize(
    ("pp", "tp"), [*(exhaustively(*shape) for shape in SHAPES[:-1]), SHAPES[-1]]
)
def test_next_driver_begins_with_the_prefixes_of_a_killed_one(make_plans, nursery, pp, tp):
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    doomed, plan = make_plans(rng, pp, tp)
    cold, offered = run(plan, reload=True)
    assert offered.block_ids.size == 0
    clear(plan)
    ranks = rng.sample(range(pp * tp), rng.randint(0, pp * tp))
    death = Death(rng.randint(45, 60), ranks, after_receipt=rng.random() < 0.5)
    nursery.live(replace(doomed, death=death))
    warm, offered = run(plan)
    assert offered.block_ids.size > 0, seed
    assert num_cached(warm) > 0, seed
    assert tokens_of(warm) == tokens_of(cold), (seed, death)


def test_adopted_requests_and_restored_blocks_do_not_clash(make_plans, nursery):
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    doomed, plan = make_plans(rng, 2, 1)
    both = replace(plan, lines=[*doomed.lines, *plan.lines])
    cold, _ = run(both, reload=True)
    clear(plan)
    nursery.live(replace(doomed, death=Death(rng.randint(45, 60), [0], after_receipt=True)))
    warm, offered = run(both, keep_requests=True)
    assert offered.block_ids.size > 0, seed
    for name, output in warm.items():
        assert output.token_ids == cold[name].token_ids, (seed, name)
    assert num_cached(warm) > 0, seed


def test_nothing_is_offered_once_the_weights_or_the_memory_have_changed(serve, checkpoint):
    path = checkpoint().path
    config, prompt = worker_config(path, 2), prompts(5, [40])[0]
    with serve(path, pp=2, enable_sleep_mode=True, num_gpu_blocks=64) as (group, loaded):
        tag = Scheduler(scheduler_limits(loaded, config)).prefix_tag
        expected = generate(group, loaded, config, prompt, 8)
        assert expected.num_cached_tokens == 0
        for change, version in (
            (lambda: (group.memory.sleep(2), group.memory.wake_up(), group.weights.reload()), 1),
            (lambda: (group.memory.sleep(1), group.memory.wake_up()), 1),
            (lambda: group.weights.reload(), 2),
            (lambda: group.attach() and group.prepare(loaded_config(group), reload=True), 0),
        ):
            assert group.prefixes.get(tag).block_ids.size >= 40 // loaded.block_size
            assert group.prefixes.get(b"another tag").block_ids.size == 0
            change()
            assert group.prefixes.get(tag).block_ids.size == 0
            assert group.weights.version.number == version
            assert {each.weights.version for each in group.get_status()} == {version}
            again = generate(group, loaded, config, prompt, 8)
            assert (again.num_cached_tokens, again.token_ids) == (0, expected.token_ids)


def loaded_config(group):
    return group.get_status()[0].config


def test_replaced_rank_offers_nothing_until_blocks_are_filled_again(make_plans, two_daemons):
    plan, again = make_plans(random.Random(7), 2, 1)
    cold, _ = run(again, reload=True)
    with WorkerGroup(plan.endpoints, plan.config.parallel, lease=LONG_LEASE) as group:
        group.attach()
        loaded = group.prepare(plan.config, num_gpu_blocks=NUM_GPU_BLOCKS, reload=True)
        tag = tag_of(plan, loaded)
        assert list(begin(group, loaded, plan).driver.run())
        assert group.prefixes.get(tag).block_ids.size > 0
        os.kill(two_daemons.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            while True:
                group.look()
        two_daemons.restart_dead()
        group.replace(1)
        assert group.prefixes.get(tag).block_ids.size == 0
        outputs = {o.req_id: o for o in begin(group, loaded, again).driver.run()}
        assert tokens_of(outputs) == tokens_of(cold)
        assert group.prefixes.get(tag).block_ids.size > 0


class FutureKeeper:
    """A group that keeps the futures of its steps."""

    def __init__(self, group):
        self.group = group
        self.max_in_flight = group.max_in_flight
        self.futures = []

    def __getattr__(self, name):
        return getattr(self.group, name)

    def execute_model(self, output):
        self.futures.append(self.group.execute_model(output))
        return self.futures[-1]


def test_notes_of_any_hashes_in_any_order(serve, checkpoint):
    """The two methods alone, with the hashes of another scheduler."""
    rng, tag = np.random.default_rng(3), b"sha256 of another scheduler"
    config = worker_config(checkpoint().path, 2)
    with serve(checkpoint().path, pp=2, num_gpu_blocks=64) as (group, loaded):
        keeper = FutureKeeper(group)
        generate(keeper, loaded, config, prompts(5, [40])[0], 4, keeps_prefixes=False)
        first, last = keeper.futures[0], keeper.futures[-1]
        names = [rng.bytes(32) for _ in range(10)]
        blocks = CachedBlocks.of(range(1, 11), names)

        def offered():
            """A rank offers what is noted as of a step once its own part of the step is done."""
            seq = keeper.futures[-1].seq
            wait_until(lambda: all(s.last_seq >= seq for s in group.get_status()), "the last step")
            return group.prefixes.get(tag)

        assert group.prefixes.note(tag, blocks, last)
        assert offered().block_ids.tolist() == [*range(1, 11)]
        assert [*map(bytes, offered().hashes)] == names
        # Others take some of the blocks; notes as of earlier steps come too late.
        generate(keeper, loaded, config, prompts(6, [20])[0], 4, keeps_prefixes=False)
        left = offered()
        assert 0 < left.block_ids.size < 10
        for after in (first, last):
            assert group.prefixes.note(tag, blocks, after)
            assert offered().block_ids.tolist() == left.block_ids.tolist()
        assert group.prefixes.note(tag, blocks, keeper.futures[-1])
        assert offered().block_ids.size == 10
        none = blocks.only(blocks.block_ids < 0)
        assert group.prefixes.note(tag, none, last, distrusted=[2, 3])
        assert offered().block_ids.tolist() == [1, *range(4, 11)]
        with pytest.raises(ClientConfigError, match="block_ids"):
            group.prefixes.note(tag, CachedBlocks.of([64], [b"a"]), last)
        for wrong in (b"", b"t" * 65):
            with pytest.raises(ClientConfigError, match="tag"):
                group.prefixes.note(wrong, blocks, last)
        with pytest.raises(ClientConfigError, match="hashes"):
            group.prefixes.note(tag, CachedBlocks.of([1], [b"a" * 65]), last)
        assert offered().block_ids.tolist() == [1, *range(4, 11)]


def test_notes_as_of_steps_of_an_earlier_attach_are_void(serve, checkpoint):
    """Steps are counted anew with each attach: the same number is another step then."""
    config = worker_config(checkpoint().path)
    with serve(checkpoint().path, num_gpu_blocks=64) as (group, loaded):
        keeper = FutureKeeper(group)
        generate(keeper, loaded, config, prompts(5, [40])[0], 4, keeps_prefixes=False)
        earlier, blocks = keeper.futures[-1], CachedBlocks.of([1, 2], [b"aa", b"bb"])
        group.attach()
        group.prepare(config, num_gpu_blocks=64)
        generate(keeper, loaded, config, prompts(6, [40])[0], 12, keeps_prefixes=False)
        assert group.prefixes.note(b"t", blocks, earlier)
        assert group.prefixes.get(b"t").block_ids.size == 0
        assert group.prefixes.note(b"t", blocks, keeper.futures[-1])
        assert group.prefixes.get(b"t").block_ids.tolist() == [1, 2]


def test_bad_notes_are_refused_with_nothing_noted(serve, checkpoint):
    config = worker_config(checkpoint().path)
    with serve(checkpoint().path, num_gpu_blocks=64) as (group, loaded):
        generate(group, loaded, config, prompts(5, [40])[0], 4, keeps_prefixes=False)
        epoch = group.get_status()[0].epoch

        def note(ids, hashes, **fields):
            request = {"epoch": epoch, "block_tag": b"t", "after_seq": 1 << 40, "hash_bytes": 2}
            request |= {"block_ids": np.array(ids, "<i4").tobytes(), "hashes": hashes}
            request["weights_version"] = group.weights.version.number
            return group.clients[0].ask(partial(NoteCachedBlocks, **request | fields))

        for fields, field in (
            ({"ids": [1, 64], "hashes": b"aabb"}, "block_ids"),
            ({"ids": [0], "hashes": b"aa"}, "block_ids"),
            ({"ids": [1, 2], "hashes": b"aab"}, "hashes"),
            ({"ids": [1], "hashes": b"aa", "distrusted": b"abc"}, "distrusted"),
        ):
            with pytest.raises(ConfigError, match=field):
                note(**fields)
        with pytest.raises(FencedError):
            note([1], b"aa", epoch=epoch - 1)
        with pytest.raises(ClientConfigError):
            CachedBlocks.of([1, 2], [b"aa", b"b"])
        assert note([1], b"aa", weights_version=group.weights.version.number + 1).num_noted == 0
        reply = group.clients[0].ask(partial(GetCachedBlocks, epoch=epoch, block_tag=b"t"))
        assert (reply.block_ids, reply.next_block) == (b"", 0)
        assert note([1], b"aa").num_noted == 1  # and is offered once that step has run
        assert group.prefixes.get(b"t").block_ids.size == 0

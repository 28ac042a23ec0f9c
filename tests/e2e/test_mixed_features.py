"""All features in one batch: requests with random subsets of them, which come at random times,
share prefixes, are computed in chunks and preempted, each give the same tokens as the request
alone; in every parallel shape, with drafts by each method, and with drivers and ranks killed.

A few seeds are fixed. MIXED_SEED=n runs that one, MIXED_RUNS=n so many new ones.
"""

import contextlib
import os
import random

import pytest
from msgspec.structs import replace

from rpc_schema.weight_transfer import DiskEngine, DiskSource
from tests.support.doomed_driver import Death
from tests.support.exhaustive import exhaustively
from tests.support.installed_processors import NAMES
from tests.support.killed_driver import DriverNursery, Plan, adapted, begin
from tests.support.mixed_features import ROOM, Judge, Past, assert_same, make_adapters, random_mix
from tests.support.serving import (
    LONG_LEASE,
    LOOKUPS,
    connect,
    drafts_by,
    scheduler_limits,
    worker_config,
)
from tests.support.structured import EOS_TOKEN_ID, VOCAB_SIZE, make_tokenizer
from worker_client.driver import Driver, give_up
from worker_client.driver_parts.registry import DriverOptions
from worker_client.scheduler import Scheduler
from worker_client.structured.grammars import Grammars
from worker_client.wire.worker_client import TensorList
from worker_client.worker_group import WorkerGroup

pytestmark = pytest.mark.slow

SHAPES = ((2, 1), (1, 2), (2, 2))
COUNT = 18
TASKS = ("embed", "token_embed")
"""That a model for generation serves."""
NUM_BLOCKS = 20
"""Too few for two long requests."""
MAX_MODEL_LEN = 64
ARCHITECTURE = "Qwen3ForCausalLM"
MODEL = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_TOKEN_ID, "seed": 41}
FEATURES = {"lora": ROOM, "logits_processors": NAMES}
METHODS = ("none", *LOOKUPS, "draft_model", "driver")
"""Of drafts: each test has another one, by the seed and its turn."""
CROWDED = {"max_num_seqs": 16}
CROWDED_BLOCKS = 130
STEP_DEADLINE_MS = 2000
"""Deadline of ranks that lose a driver or a peer, and wait in a step until then."""
SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "max_model_len": MAX_MODEL_LEN}


def chosen_seeds():
    if "MIXED_SEED" in os.environ:
        return [int(os.environ["MIXED_SEED"])]
    if "MIXED_RUNS" in os.environ:
        return [random.randrange(1 << 30) for _ in range(int(os.environ["MIXED_RUNS"]))]
    return [20]


@pytest.fixture(scope="module")
def model(checkpoint):
    made = checkpoint(ARCHITECTURE, **MODEL)
    make_tokenizer(made.path)
    return made


@pytest.fixture(scope="module")
def grammars(model):
    made = Grammars(model.path, VOCAB_SIZE, [EOS_TOKEN_ID])
    yield made
    made.close()


@pytest.fixture(scope="module")
def nursery():
    nursery = DriverNursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="module", params=chosen_seeds(), ids="seed={}".format)
def seed(request):
    return request.param


@pytest.fixture(scope="module")
def judge(seed, model, grammars):
    return Judge(model, make_adapters(model, seed), grammars)


@pytest.fixture(scope="module")
def mix(seed, model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("embeds")
    hidden_size = model.model.config.hidden_size
    return random_mix(random.Random(seed), TASKS, COUNT, directory, hidden_size)


@pytest.fixture(scope="module")
def alone(serve, model, grammars, judge, mix):
    """Each request's output by itself."""
    outputs = {}
    with serve(model.path, max_model_len=MAX_MODEL_LEN, **FEATURES) as (group, loaded):
        for request in mix.requests.values():
            scheduler = Scheduler(scheduler_limits(group, loaded))
            driver = Driver(group, scheduler, options=DriverOptions(grammars))
            driver.add_request(adapted(group, request))
            outputs |= by_id(driver.run())
    return outputs


def by_id(outputs):
    return {output.req_id: output for output in outputs}


@pytest.fixture
def drafts_of(seed, model, checkpoint):
    """drafts_of(turn) -> a configuration, by METHODS. Drafts of a draft model are right, or nearly
    all wrong."""

    def choose(turn):
        other = checkpoint(ARCHITECTURE, **(MODEL | {"seed": 43}))
        draft_model = random.Random(seed + turn).choice((model, other))
        return drafts_by(METHODS[(seed + turn) % len(METHODS)], draft_model.path)

    return choose


@pytest.fixture
def make_plan(daemons, model, mix, drafts_of):
    """make_plan(shape, turn, ...) -> a plan to serve the mix with a turn's drafts, and fields of
    worker_config. crowded: many requests run at once, and all come at the start."""

    def make(shape, turn, *, crowded=False, **fields):
        sizes = SIZES | FEATURES | (CROWDED if crowded else {})
        return Plan(
            daemons.endpoints(shape[0] * shape[1]),
            worker_config(model.path, *shape, **sizes, speculative=drafts_of(turn), **fields),
            mix.texts,
            arrivals=[] if crowded else mix.arrivals,
            num_gpu_blocks=CROWDED_BLOCKS if crowded else NUM_BLOCKS,
            directory=str(mix.directory),
        )

    return make


@contextlib.contextmanager
def started(plan, recover=give_up):
    """The plan's group, loaded anew, and the driver that is to serve it."""
    with connect(plan.endpoints, plan.config, num_gpu_blocks=plan.num_gpu_blocks) as served:
        yield served.group, begin(*served, plan, recover)


def test_each_alone_is_what_its_request_asks_for(mix, alone, judge):
    for name, request in mix.requests.items():
        judge.check(request, alone[name])


@pytest.mark.parametrize(
    ("shape", "turn"),
    [
        ((1, 2), 0),
        exhaustively((1, 2), 1),
        exhaustively((2, 1), 2),
        exhaustively((2, 2), 2),
        ((2, 1), 3),
        exhaustively((1, 2), 4),
    ],
)
def test_mixed_requests_are_each_what_it_is_alone(make_plan, mix, alone, judge, shape, turn):
    with started(make_plan(shape, turn)) as (_, serving):
        outputs = by_id(output for done in serving.run() for output in done)
    assert sum(output.num_preemptions for output in outputs.values()) > 0
    assert_all_same(judge, mix, alone, outputs)


def test_killed_driver_costs_no_token(make_plan, nursery, seed, mix, alone, judge):
    """It dies at a step that some of the ranks got, or between two messages."""
    rng = random.Random(seed + 1)
    shape = rng.choice(SHAPES)
    plan = make_plan(shape, 1, step_deadline_ms=STEP_DEADLINE_MS)
    with started(plan):
        pass
    ranks = range(shape[0] * shape[1])
    if rng.random() < 0.5:
        told = rng.sample(ranks, rng.randint(0, len(ranks)))
        death = Death(rng.randint(4, 30), told, after_receipt=rng.random() < 0.5)
        nursery.live(replace(plan, death=death))
    else:
        nursery.live(
            replace(plan, num_results=rng.randint(4, 30), kill_after_s=rng.random() * 0.02)
        )
    with WorkerGroup(plan.endpoints, plan.config.parallel, lease=LONG_LEASE) as group:
        group.attach(keep_requests=True, force=True)
        loaded = group.prepare(plan.config, num_gpu_blocks=NUM_BLOCKS)
        serving = begin(group, loaded, replace(plan, adopt=True))
        outputs = by_id(serving.done) | by_id(o for done in serving.run() for o in done)
    assert serving.adopted
    assert_all_same(judge, mix, alone, outputs)


def test_killed_rank_costs_no_token(make_plan, daemons, seed, mix, alone, judge):
    rng = random.Random(seed + 2)
    rank, at = rng.randrange(2), rng.randint(4, 25)
    outputs, replaced = {}, []

    def recover(died):
        daemons.restart_dead()
        replaced.append(group.replace(died.rank))

    shape = rng.choice(SHAPES[:2])
    plan = make_plan(shape, 2, crowded=True, step_deadline_ms=STEP_DEADLINE_MS)
    with started(plan, recover) as (group, serving):
        for num_results, done in enumerate(serving.run()):
            outputs |= by_id(done)
            if num_results == at:
                assert_crowded(group)
                daemons.kill(rank)
    assert replaced
    assert_all_same(judge, mix, alone, outputs)


def test_sleep_costs_no_token(make_plan, seed, mix, alone, judge):
    """Of either level, with steps in flight: what ran begins again from its known tokens."""
    rng = random.Random(seed + 3)
    levels, outputs = rng.sample([1, 2], 2), {}
    moments = {rng.randint(5, 12): levels[0], rng.randint(16, 24): levels[1]}
    plan = make_plan(rng.choice(SHAPES[:2]), 3, crowded=True, enable_sleep_mode=True)
    with started(plan) as (group, serving):
        for num_results, done in enumerate(serving.run()):
            outputs |= by_id(done)
            level = moments.get(num_results)
            if level is not None:
                assert_crowded(group)
                group.memory.sleep(level)
                group.memory.wake_up()
            if level == 2:
                group.weights.reload()
    assert serving.driver.num_failures == len(moments)
    assert_all_same(judge, mix, alone, outputs)


def test_requests_go_on_with_new_weights(
    make_plan, seed, mix, alone, judge, checkpoint, grammars, monkeypatch
):
    """What ran at the update, with steps in flight, keeps its tokens: the new weights choose the
    next ones. What ended in these steps is of the old weights."""
    rng = random.Random(seed + 4)
    new = checkpoint(ARCHITECTURE, **(MODEL | {"seed": 42}))
    new_judge = Judge(new, make_adapters(new, seed), grammars)
    at, outputs, known, early = rng.randint(6, 16), {}, {}, set()
    with started(make_plan(rng.choice(SHAPES[:2]), 4, crowded=True)) as (group, serving):
        scheduler = serving.driver.scheduler
        step_failed = scheduler.step_failed

        def note(steps, lost_req_ids):
            unfinished = scheduler._queues.unfinished.values()
            known.update({r.id: len(r.tokens) - r.num_prompt_tokens for r in unfinished})
            early.update(outputs)
            step_failed(steps, lost_req_ids)

        monkeypatch.setattr(scheduler, "step_failed", note)
        for num_results, done in enumerate(serving.run()):
            outputs |= by_id(done)
            if num_results == at:
                assert_crowded(group)
                group.weights.init_transfer_engine(DiskEngine())
                group.weights.start_update()
                group.weights.update(TensorList(), DiskSource(model=str(new.path)))
                group.weights.finish_update()
    assert serving.driver.num_failures == 1 and any(known.values())
    for name, request in mix.requests.items():
        if name in early:
            assert_same(judge, request, alone[name], outputs[name])
        else:  # the scheduler may not have had it yet: its grammar was being compiled
            new_judge.check(request, outputs[name], Past(judge, known.get(name, 0)))


def assert_crowded(group):
    """Several rows, and steps in flight."""
    assert len(group.slots) > 1 and group.num_in_flight


def assert_all_same(judge, mix, alone, outputs):
    assert outputs.keys() == alone.keys()
    for name, request in mix.requests.items():
        assert_same(judge, request, alone[name], outputs[name])

"""All features in one batch: requests with random subsets of them, which come at random times,
share prefixes, are computed in chunks and preempted, each give the tokens of the same request
alone; in every parallel shape, and with drivers and ranks killed.

A few seeds are fixed. MIXED_SEED=n runs that one, MIXED_RUNS=n so many new ones.
"""

import os
import random
import shutil

import pytest
from msgspec.structs import replace

from tests.support.command_line import short_directory
from tests.support.doomed_driver import Death
from tests.support.killed_driver import DriverNursery, Plan, begin
from tests.support.mixed_features import Judge, assert_same, random_mix
from tests.support.serving import connect, scheduler_limits, worker_config
from tests.support.structured import EOS_TOKEN_ID, VOCAB_SIZE, make_tokenizer
from tests.support.supervised import Supervised
from worker_client.driver import Driver
from worker_client.scheduler import Scheduler
from worker_client.structured.grammars import Grammars
from worker_client.worker_group import WorkerGroup

pytestmark = pytest.mark.slow

SHAPES = ((2, 1), (1, 2), (2, 2))
COUNT = 18
TASKS = ("embed", "token_embed")
"""That a model for generation serves."""
NUM_BLOCKS = 20
"""Too few for two long requests."""
MAX_MODEL_LEN = 64
SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "max_model_len": MAX_MODEL_LEN}


def chosen_seeds():
    if "MIXED_SEED" in os.environ:
        return [int(os.environ["MIXED_SEED"])]
    if "MIXED_RUNS" in os.environ:
        return [random.randrange(1 << 30) for _ in range(int(os.environ["MIXED_RUNS"]))]
    return [20]


@pytest.fixture(scope="module")
def model(checkpoint):
    made = checkpoint("Qwen3ForCausalLM", vocab_size=VOCAB_SIZE, eos_token_id=EOS_TOKEN_ID, seed=41)
    make_tokenizer(made.path)
    return made


@pytest.fixture(scope="module")
def grammars(model):
    made = Grammars(model.path, VOCAB_SIZE, [EOS_TOKEN_ID])
    yield made
    made.close()


@pytest.fixture(scope="module")
def judge(model, grammars):
    return Judge(model, grammars)


@pytest.fixture(scope="module")
def mortals(model_root):
    """Two daemons, which may be killed."""
    directory = short_directory()
    daemons = Supervised(2, model_root, directory)
    yield daemons
    daemons.close()
    shutil.rmtree(directory)


@pytest.fixture(scope="module")
def nursery():
    nursery = DriverNursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="module", params=chosen_seeds(), ids="seed={}".format)
def seed(request):
    return request.param


@pytest.fixture(scope="module")
def mix(seed):
    return random_mix(random.Random(seed), TASKS, COUNT)


@pytest.fixture(scope="module")
def alone(serve, model, grammars, mix):
    """Each request's output when run alone."""
    outputs = {}
    with serve(model.path, max_model_len=MAX_MODEL_LEN) as (group, loaded):
        for request in mix.requests.values():
            scheduler = Scheduler(scheduler_limits(group, loaded))
            driver = Driver(group, scheduler, grammars=grammars)
            driver.add_request(request)
            outputs |= by_id(driver.run())
    return outputs


def by_id(outputs):
    return {output.req_id: output for output in outputs}


@pytest.fixture
def make_plan(daemons, model, mix):
    """make_plan(shape, endpoints) -> a plan to serve the mix."""

    def make(shape, endpoints=None):
        config = worker_config(model.path, *shape, **SIZES, step_deadline_ms=2000)
        endpoints = endpoints or daemons.endpoints(shape[0] * shape[1])
        served = {"arrivals": mix.arrivals, "num_gpu_blocks": NUM_BLOCKS}
        return Plan(endpoints, config, mix.texts, **served)

    return make


def test_each_alone_is_what_its_request_asks_for(mix, alone, judge):
    for name, request in mix.requests.items():
        judge.check(request, alone[name])


@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_requests_are_each_what_it_is_alone(make_plan, mix, alone, judge, shape):
    plan = make_plan(shape)
    with connect(plan.endpoints, plan.config, num_gpu_blocks=NUM_BLOCKS) as (group, loaded):
        serving = begin(group, loaded, plan)
        outputs = by_id(output for done in serving.run() for output in done)
    assert sum(output.num_preemptions for output in outputs.values()) > 0
    assert_all_same(judge, mix, alone, outputs)


def test_killed_driver_costs_no_token(make_plan, nursery, seed, mix, alone, judge):
    """It dies at a step that some of the ranks got, or between two messages."""
    rng = random.Random(seed + 1)
    shape = rng.choice(SHAPES)
    plan = make_plan(shape)
    with connect(plan.endpoints, plan.config, num_gpu_blocks=NUM_BLOCKS):
        pass
    ranks = range(shape[0] * shape[1])
    if rng.random() < 0.5:
        told = rng.sample(ranks, rng.randint(0, len(ranks)))
        death = Death(rng.randint(4, 30), told, after_receipt=rng.random() < 0.5)
        nursery.live(replace(plan, death=death))
    else:
        nursery.live(replace(plan, num_results=rng.randint(4, 30)), rng.random() * 0.02)
    with WorkerGroup(plan.endpoints, plan.config.parallel) as group:
        group.attach(keep_requests=True, force=True)
        loaded = group.prepare(plan.config, num_gpu_blocks=NUM_BLOCKS)
        serving = begin(group, loaded, replace(plan, adopt=True))
        outputs = by_id(serving.done) | by_id(o for done in serving.run() for o in done)
    assert serving.adopted
    assert_all_same(judge, mix, alone, outputs)


def test_killed_rank_costs_no_token(make_plan, mortals, seed, mix, alone, judge):
    rng = random.Random(seed + 2)
    rank, at = rng.randrange(2), rng.randint(2, 40)
    mortals.revive()
    plan = make_plan(rng.choice(SHAPES[:2]), mortals.endpoints)
    outputs, replaced = {}, []

    def recover(died):
        mortals.restart(died.rank)
        replaced.append(group.replace(died.rank))

    with connect(plan.endpoints, plan.config, num_gpu_blocks=NUM_BLOCKS) as (group, loaded):
        serving = begin(group, loaded, plan, recover)
        for num_results, done in enumerate(serving.run()):
            outputs |= by_id(done)
            if num_results == at:
                mortals.kill(rank)
    assert replaced
    assert_all_same(judge, mix, alone, outputs)


def assert_all_same(judge, mix, alone, outputs):
    assert outputs.keys() == alone.keys()
    for name, request in mix.requests.items():
        assert_same(judge, request, alone[name], outputs[name])

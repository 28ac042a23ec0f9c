"""All features in one batch of replicas that share experts: grammars, drafts, adapters, pooling,
preemption and the rest, with ranks and drivers killed. Each request gets the same tokens as
transformers'. MIXED_SEED=n runs that seed."""

import contextlib
import os
import random

import pytest
from msgspec.structs import replace

from tests.support.doomed_driver import Death
from tests.support.exhaustive import exhaustively
from tests.support.installed_processors import NAMES
from tests.support.killed_driver import DriverNursery, Plan, begin
from tests.support.lora_adapters import ATTENTION
from tests.support.mixed_features import ROOM, Judge, make_adapters, random_mix
from tests.support.serving import LONG_LEASE, LOOKUPS, connect, drafts_by, worker_config
from tests.support.structured import EOS_TOKEN_ID, VOCAB_SIZE, make_tokenizer
from worker_client.structured.grammars import Grammars
from worker_client.worker_group import WorkerGroup

pytestmark = pytest.mark.slow

ARCHITECTURE = "Qwen3MoeForCausalLM"
MODEL = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_TOKEN_ID, "num_experts": 7, "seed": 44}
COUNT = 18
TASKS = ("embed", "token_embed")
NUM_BLOCKS = 20
"""Of each replica: too few for two long requests."""
FEATURES = {"lora": ROOM, "logits_processors": NAMES, "enable_expert_parallel": True}
SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "max_model_len": 64}
METHODS = ("none", *LOOKUPS, "draft_model", "driver")
SHAPES = pytest.mark.parametrize(("pp", "tp"), [(1, 1), exhaustively(2, 1), exhaustively(1, 2)])
SEED = int(os.environ.get("MIXED_SEED", random.randrange(1 << 30)))


@pytest.fixture(scope="module")
def model(checkpoint):
    made = checkpoint(ARCHITECTURE, **MODEL)
    make_tokenizer(made.path)
    return made


@pytest.fixture(scope="module")
def judge(model):
    grammars = Grammars(model.path, VOCAB_SIZE, [EOS_TOKEN_ID])
    yield Judge(model, make_adapters(model, SEED, targets=ATTENTION), grammars)
    grammars.close()


@pytest.fixture
def plan(daemons, model, tmp_path, pp, tp):
    print(f"MIXED_SEED={SEED}")
    rng = random.Random(SEED)
    mix = random_mix(rng, TASKS, COUNT, tmp_path, model.model.config.hidden_size)
    drafts = drafts_by(rng.choice(METHODS), model.path)
    config = worker_config(model.path, pp, tp, speculative=drafts, **FEATURES, **SIZES)
    parallel = replace(config.parallel, data_parallel_size=2, data_parallel_lockstep=True)
    return Plan(
        daemons.endpoints(2 * pp * tp),
        replace(config, parallel=parallel),
        mix.texts,
        arrivals=mix.arrivals,
        num_gpu_blocks=NUM_BLOCKS,
        directory=str(mix.directory),
    ), mix.requests


@SHAPES
@pytest.mark.parametrize("kills", [False, exhaustively(True)])
def test_each_request_gets_what_it_asks_for(daemons, plan, judge, kills):
    """Also if a rank is killed: the others link anew, and its successor reads its experts. Grammars
    are compiled meanwhile."""
    (plan, requests), rng = plan, random.Random(SEED + 1)
    killed_at, rank = rng.randint(4, 25), rng.randrange(len(plan.endpoints))
    replaced, outputs = [], []

    def recover(died):
        daemons.restart_dead()
        replaced.append(group.replace(died.rank))

    with connect(plan.endpoints, plan.config, num_gpu_blocks=NUM_BLOCKS) as (group, loaded):
        serving = begin(group, loaded, plan, recover)
        for num_results, done in enumerate(serving.run()):
            outputs += done
            if kills and num_results == killed_at:
                daemons.kill(rank)
    assert [report.loaded_ranks for report in replaced] == [(rank,)] * kills
    assert_each(judge, requests, outputs)


@SHAPES
def test_next_driver_continues_what_a_killed_one_left(plan, judge):
    """It was killed in a step, perhaps one that only some ranks got."""
    (plan, requests), rng = plan, random.Random(SEED + 2)
    with connect(plan.endpoints, plan.config, num_gpu_blocks=NUM_BLOCKS):
        pass
    told = rng.sample(range(len(plan.endpoints)), rng.randint(0, len(plan.endpoints)))
    with contextlib.closing(DriverNursery()) as nursery:
        nursery.live(replace(plan, death=Death(rng.randint(4, 30), told, after_receipt=True)))
    with WorkerGroup(plan.endpoints, plan.config.parallel, lease=LONG_LEASE) as group:
        group.attach(keep_requests=True, force=True)
        loaded = group.prepare(plan.config, num_gpu_blocks=NUM_BLOCKS)
        serving = begin(group, loaded, replace(plan, adopt=True))
        assert serving.adopted
        outputs = [*serving.done, *(output for done in serving.run() for output in done)]
    assert_each(judge, requests, outputs)


def assert_each(judge, requests, outputs):
    assert sorted(output.req_id for output in outputs) == sorted(requests)
    for output in outputs:
        judge.check(requests[output.req_id], output)

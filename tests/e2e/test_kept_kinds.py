"""Models whose layers keep other things than keys and values (tests/support/families), on real
daemons: their tokens are those of the reference, in any shape of the group, after preemptions, and
after drivers and ranks were killed."""

import json
import os
import signal
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from tests.support.checkpoints import Checkpoint, decisive_prompts
from tests.support.decaying_reference import make_decaying
from tests.support.families import command
from tests.support.killed_driver import DriverNursery, Plan, begin
from tests.support.serving import (
    LONG_LEASE,
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
from worker_client.worker_group import WorkerGroup

SHAPES = [(2, 1), (1, 2)]
LENGTHS = [3, 9, 17, 40, 22]
MAX_TOKENS = 12
BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
FEW_BLOCKS = 26
"""Too few for all requests at once."""
STEPS_BEFORE = 5
"""Number of steps before a kill."""
LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "first_k_dense_replace": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
}


@dataclass(frozen=True)
class Case:
    """A model and its requests."""

    reference: Checkpoint
    requests: list

    def lines(self):
        """Return the requests as `worker-client generate --input` has them."""
        return [
            json.dumps(
                {
                    "id": request.id,
                    "prompt_token_ids": request.prompt.tolist(),
                    "max_tokens": request.max_tokens,
                    "temperature": 0,
                    "ignore_eos": True,
                }
            )
            for request in self.requests
        ]

    def check(self, tokens):
        assert_greedy_tokens(tokens, self.reference, self.requests)


@pytest.fixture(scope="module")
def two_daemons(model_root):
    """Daemons for this module only: they have the families of tests."""
    with LocalDaemons(["cpu", "cpu"], model_root, command=command(model_root)) as daemons:
        yield daemons


@pytest.fixture(scope="module")
def nursery():
    nursery = DriverNursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def references(model_root, checkpoint):
    """Models by what their layers keep: state has layers with attention too, states has none."""
    return {
        "latent": checkpoint("DeepseekV3ForCausalLM", seed=41, **LATENT),
        "state": make_decaying(model_root, "state", (1, 2), seed=43),
        "states": make_decaying(model_root, "states", (0, 1, 2, 3), seed=44),
    }


@pytest.fixture(params=["latent", "state"])
def case(request, references):
    reference = references[request.param]
    drawn = decisive_prompts(reference, 42, LENGTHS, MAX_TOKENS)
    requests = [greedy_request(f"r{i}", prompt, MAX_TOKENS) for i, prompt in enumerate(drawn)]
    return Case(reference, requests)


def config_of(case, pp, tp, **fields):
    sizes = {"block_size": BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN}
    return worker_config(case.reference.path, pp, tp, **sizes, **fields)


@pytest.mark.parametrize(("pp", "tp"), SHAPES)
def test_tokens_are_those_of_the_reference(two_daemons, case, pp, tp):
    """Also in chunks, and when requests are preempted."""
    config = config_of(case, pp, tp)
    with connect(two_daemons.endpoints, config, num_gpu_blocks=FEW_BLOCKS) as (group, loaded):
        runs = [
            generate(group, loaded, case.requests),
            generate(group, loaded, case.requests, max_num_batched_tokens=11),
        ]
    for run in runs:
        assert_greedy(run, case.reference, case.requests)
        assert sum(output.num_preemptions for output in run.outputs.values())


def test_states_sleep_and_wake_in_a_model_without_pages(two_daemons, references):
    """Requests share no prefix, although they begin alike: each is computed from its start."""
    reference = references["states"]
    first = decisive_prompts(reference, 45, [30], MAX_TOKENS)[0].tolist()
    drawn = decisive_prompts(reference, 46, [33, 35], MAX_TOKENS, prefix=first)
    requests = [greedy_request(f"r{i}", prompt, MAX_TOKENS) for i, prompt in enumerate(drawn)]
    config = config_of(Case(reference, requests), 2, 1, enable_sleep_mode=True)
    with connect(two_daemons.endpoints, config, num_gpu_blocks=None) as (group, loaded):
        assert loaded.keeps_state
        before = generate(group, loaded, requests)
        group.memory.sleep(1)
        group.memory.wake_up()
        after = generate(group, loaded, requests)
    for run in (before, after):
        assert_greedy(run, reference, requests)
        assert not any(output.num_cached_tokens for output in run.outputs.values())


@pytest.mark.each_value
@pytest.mark.parametrize(("pp", "tp"), SHAPES)
def test_requests_of_a_killed_driver_are_continued(two_daemons, nursery, case, pp, tp):
    config = config_of(case, pp, tp, step_deadline_ms=1000)
    plan = Plan(two_daemons.endpoints, config, case.lines(), num_results=STEPS_BEFORE)
    with connect(two_daemons.endpoints, config):
        pass
    nursery.live(plan)
    with WorkerGroup(plan.endpoints, config.parallel, lease=LONG_LEASE) as group:
        group.attach(keep_requests=True)
        loaded = group.prepare(config)
        serving = begin(group, loaded, replace(plan, adopt=True))
        outputs = [*serving.done, *serving.driver.run()]
    assert len(serving.adopted) == len(case.requests)
    kept = [request.num_computed_tokens > 0 for request in serving.adopted]
    assert any(kept) is not loaded.keeps_state
    case.check({output.req_id: output.token_ids for output in outputs})


@pytest.mark.each_value
@pytest.mark.parametrize(("pp", "tp"), SHAPES)
def test_a_killed_rank_is_replaced(two_daemons, case, pp, tp):
    config, results, replaced = config_of(case, pp, tp, step_deadline_ms=1000), [], []

    def kill(result):
        results.append(result)
        if len(results) == STEPS_BEFORE:
            os.kill(two_daemons.pids[1], signal.SIGKILL)

    def recover(died):
        two_daemons.restart_dead()
        replaced.append(group.replace(died.rank))

    with connect(two_daemons.endpoints, config) as (group, loaded):
        scheduler = Scheduler(scheduler_limits(group, loaded))
        driver = Driver(group, scheduler, kill, recover=recover)
        for request in case.requests:
            driver.add_request(request)
        outputs = list(driver.run())
    assert [each.loaded_ranks for each in replaced] == [(1,)]
    case.check({output.req_id: output.token_ids for output in outputs})

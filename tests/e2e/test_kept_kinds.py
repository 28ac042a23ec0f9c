"""Models whose layers keep other things than keys and values (tests/support/families), on real
daemons: their tokens are those of the reference, in any shape of the group, after preemptions, and
after drivers and ranks were killed."""

import json
import os
import signal
import time
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from tests.support.checkpoints import Checkpoint, decisive_prompts
from tests.support.decaying_reference import make_decaying
from tests.support.families import command
from tests.support.families.latent import SMALL
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
from worker_client.errors import ConfigMismatchError
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
        "latent": checkpoint("DeepseekV3ForCausalLM", seed=41, **SMALL),
        "state": make_decaying(model_root, "state", (1, 2), seed=43, checkpoint_blocks=2),
        "states": make_decaying(model_root, "states", (0, 1, 2, 3), seed=44, checkpoint_blocks=3),
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
    """Prefixes end at checkpoints, which a sleep discards."""
    reference = references["states"]
    first = decisive_prompts(reference, 45, [30], MAX_TOKENS)[0].tolist()
    drawn = decisive_prompts(reference, 46, [33, 35], MAX_TOKENS, prefix=first)
    requests = [greedy_request(f"r{i}", prompt, MAX_TOKENS) for i, prompt in enumerate(drawn)]
    config = config_of(Case(reference, requests), 2, 1, enable_sleep_mode=True)
    with connect(two_daemons.endpoints, config, num_gpu_blocks=None) as (group, loaded):
        assert loaded.keeps_state
        before = [generate(group, loaded, requests[:1]), generate(group, loaded, requests[1:])]
        group.memory.sleep(1)
        group.memory.wake_up()
        after = [generate(group, loaded, requests[1:]), generate(group, loaded, requests[:1])]
    found = []
    for run in (*before, *after):
        (output,) = run.outputs.values()
        (request,) = (each for each in requests if each.id == output.req_id)
        assert_greedy(run, reference, [request])
        found.append(output.num_cached_tokens)
    assert found == [0, 24, 0, 24], "a border every 12 of the 30 tokens that they share"


@pytest.mark.parametrize(("pp", "tp"), SHAPES)
def test_prefixes_are_shared_up_to_a_checkpoint(two_daemons, references, pp, tp):
    """Those that an earlier driver has noted, too. What a request shares is not computed again."""
    reference = references["state"]
    stem = decisive_prompts(reference, 47, [21], MAX_TOKENS)[0].tolist()
    drawn = decisive_prompts(reference, 48, [33, 26, 40], MAX_TOKENS, prefix=stem)
    requests = [greedy_request(f"r{i}", prompt, MAX_TOKENS) for i, prompt in enumerate(drawn)]
    config = config_of(Case(reference, requests), pp, tp)
    with connect(two_daemons.endpoints, config) as (group, loaded):
        first = generate(group, loaded, requests[:1])
        tag, until = first.driver.scheduler.prefix_tag, time.monotonic() + 20
        while not group.prefixes.get(tag).block_ids.size:  # a rank may not have ended its steps yet
            assert time.monotonic() < until
        others = generate(group, loaded, requests[1:])
    assert_greedy(first, reference, requests[:1])
    assert_greedy(others, reference, requests[1:])
    border = BLOCK_SIZE * loaded.checkpoint_blocks
    shared = len(stem) // border * border
    assert shared == 16
    assert [output.num_cached_tokens for output in others.outputs.values()] == [shared, shared]
    computed = sum(len(request.prompt) - shared + MAX_TOKENS - 1 for request in requests[1:])
    assert sum(record.num_tokens for record in others.driver.records) == computed


def test_samples_of_a_prompt_begin_at_its_last_checkpoint(two_daemons, references):
    """Unless there are none, for a scheduler that knows no borders."""
    reference = references["state"]
    prompt = decisive_prompts(reference, 49, [30], MAX_TOKENS)[0]
    wanted = {"n": 3, "temperature": 1.0, "seed": 5}
    request = greedy_request("r", prompt, MAX_TOKENS, **wanted)
    config = config_of(Case(reference, [request]), 2, 1)
    with connect(two_daemons.endpoints, config) as (group, loaded):
        alone = generate(group, loaded, [request], enable_prefix_caching=False)
        forked = generate(group, loaded, [request])
        with pytest.raises(ConfigMismatchError, match="state_checkpoints"):
            group.prepare(config, state_checkpoints=False)
        plain = group.prepare(config, state_checkpoints=False, reload=True, num_gpu_blocks=64)
        assert (plain.keeps_state, plain.checkpoint_blocks) == (True, 0)
        again = generate(group, plain, [request])
    assert again.tokens == alone.tokens
    assert not any(output.num_cached_tokens for output in again.outputs.values())
    assert forked.tokens == alone.tokens and len({*map(tuple, forked.tokens.values())}) == 3
    assert sorted(output.num_cached_tokens for output in forked.outputs.values()) == [0, 24, 24]


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
    kept = [request.num_computed_tokens for request in serving.adopted]
    assert any(kept)
    if loaded.keeps_state:  # a state is that of the last checkpoint
        assert loaded.checkpoint_blocks
        assert not any(count % (BLOCK_SIZE * loaded.checkpoint_blocks) for count in kept)
    case.check({output.req_id: output.token_ids for output in outputs})


@pytest.mark.each_value
@pytest.mark.parametrize(("pp", "tp"), SHAPES)
def test_a_killed_rank_is_replaced(two_daemons, case, pp, tp):
    short = {"step_deadline_ms": 1000, "max_num_batched_tokens": MAX_MODEL_LEN // 2}
    config, results, replaced = config_of(case, pp, tp, **short), [], []

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

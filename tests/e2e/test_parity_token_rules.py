"""Rules on tokens over real daemons: every greedy token is that of transformers with the same
processors, whatever becomes of steps and drivers. test_mixed_features.py has seeded ones."""

import numpy as np
import pytest
from msgspec.structs import asdict

from tests.support.checkpoints import VOCAB_SIZE, NearTie
from tests.support.faulty_daemon import Fault, FaultyDaemons
from tests.support.serving import (
    LONG_LEASE,
    connect,
    generate,
    greedy_request,
    scheduler_limits,
    worker_config,
)
from tests.support.token_rules import NUM_COMMON, RuleProcessor, random_params
from worker_client.driver import Driver
from worker_client.requests import SamplingParams
from worker_client.scheduler import Scheduler
from worker_client.worker_group import WorkerGroup

MAX_TOKENS = 20
RULES = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
)
SIZES = {"block_size": 4, "max_num_seqs": 5, "max_num_batched_tokens": 24, "max_model_len": 64}
NUM_BLOCKS = 30
"""Too few for the requests that may run."""


@pytest.fixture(scope="module")
def reference(checkpoint):
    return checkpoint(seed=77)


@pytest.fixture(scope="module")
def greedy(reference):
    """Greedy requests with their tokens; every third has no rules. Half of them begin alike."""
    rng = np.random.default_rng()
    found, stem = [], rng.integers(0, VOCAB_SIZE, 9).tolist()
    while len(found) < 9:
        tail = rng.integers(0, NUM_COMMON if rng.random() < 0.5 else VOCAB_SIZE, 1 + len(found))
        prompt = [*(stem if len(found) % 2 else []), *tail.tolist()]
        rules = {} if len(found) % 3 == 2 else rules_of(random_params(rng, VOCAB_SIZE))
        request = greedy_request(f"r{len(found)}", prompt, MAX_TOKENS, **rules)
        processor = RuleProcessor(params_of(request), len(prompt))
        try:
            found.append((request, reference.processed(prompt, MAX_TOKENS, processor)))
        except NearTie:
            continue
    return found


def rules_of(params):
    return {name: value for name, value in asdict(params).items() if name in RULES}


def params_of(request):
    return SamplingParams(**{name: getattr(request.sampling, name) for name in RULES})


@pytest.mark.usefixtures("each_drafter")
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2)])
def test_tokens_are_those_of_transformers(serve, reference, greedy, shape):
    requests, expected = zip(*greedy, strict=True)
    with serve(reference.path, *shape, num_gpu_blocks=NUM_BLOCKS, **SIZES) as (group, loaded):
        run = generate(group, loaded, requests)
    assert [run.tokens[request.id] for request in requests] == list(expected)
    assert sum(output.num_preemptions for output in run.outputs.values()) > 0


@pytest.mark.exhaustive
def test_failed_steps_and_another_driver_change_no_token(model_root, tmp_path, reference, greedy):
    requests, expected = zip(*greedy, strict=True)
    config = worker_config(reference.path, 2, **SIZES)
    with FaultyDaemons(2, model_root, tmp_path) as daemons:
        with connect(daemons.endpoints, config, num_gpu_blocks=NUM_BLOCKS) as (group, loaded):
            limits = scheduler_limits(group, loaded)
            driver, outputs = Driver(group, Scheduler(limits)), []
            for request in requests:
                driver.add_request(request)
            last_stage = daemons.faults[1]
            for calls in (7, 5):
                last_stage.put(Fault("argmax_tokens", "raise", calls))
                while last_stage.armed:
                    outputs += driver.step()
            while len(outputs) < 3:
                outputs += driver.step()
            assert driver.num_failures == 2
        with WorkerGroup(daemons.endpoints, config.parallel, lease=LONG_LEASE) as group:
            group.attach(keep_requests=True)
            group.prepare(config, num_gpu_blocks=NUM_BLOCKS)
            adopted, successor = group.adopt_requests(), Scheduler(limits)
            assert any(request.num_computed_tokens for request in adopted)
            done = {output.req_id for output in outputs}
            # A request may have ended since its last step was sent.
            outputs += successor.adopt_requests([a for a in adopted if a.req_id not in done])
            driver = Driver(group, successor)
            left = {request.req_id for request in adopted} | done
            for request in requests:
                if request.id not in left:
                    driver.add_request(request)
            outputs += driver.run()
    tokens = {output.req_id: output.token_ids for output in outputs}
    assert [tokens[request.id] for request in requests] == list(expected)

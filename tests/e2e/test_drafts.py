"""Requests with drafts gain the tokens that they gain without: transformers' if they are greedy,
those of a group without drafts if they are seeded; in every parallel shape, with preemption, shared
prefixes and every feature of sampling. test_adoption.py kills drivers of such groups."""

import random
from dataclasses import replace

import numpy as np
import pytest

from tests.support.checkpoints import decisive_prompts
from tests.support.exhaustive import exhaustively
from tests.support.flat_requests import changed
from tests.support.resting_drafts import RestingScheduler
from tests.support.serving import (
    LOOKUPS,
    assert_greedy,
    drafts_by,
    generate,
    greedy_request,
    scheduler_limits,
)
from worker_client.driver import Driver
from worker_client.errors import WorkerDied
from worker_client.requests import SamplingParams
from worker_client.scheduler import Scheduler

NGRAM, SUFFIX = LOOKUPS["ngram"], LOOKUPS["suffix"]
METHODS = (*LOOKUPS, "draft_model")
USUAL = [("ngram", (2, 1)), ("suffix", (2, 2)), ("draft_model", (2, 2))]
OTHERS = [
    exhaustively(method, shape)
    for method in METHODS
    for shape in ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2))
    if (method, shape) not in USUAL
]


@pytest.fixture(scope="module")
def reference(checkpoint):
    return checkpoint("MistralForCausalLM", num_hidden_layers=5, sliding_window=27, seed=19)


def repeating(reference, seed, count, max_tokens=24):
    """Prompts that end as they began, so that a lookup finds something from the first token on."""
    requests = []
    for index in range(count):
        head = np.random.default_rng([seed, index]).integers(0, 331, 3 + index % 5).tolist()
        text = head * 2
        prompt = decisive_prompts(
            reference, 100 * seed + index, [len(text) + 3], max_tokens, prefix=text
        )
        requests.append(greedy_request(f"r{seed}-{index}", prompt[0], max_tokens))
    return requests


@pytest.mark.parametrize(("method", "shape"), [*USUAL, *OTHERS])
def test_greedy_tokens_are_those_of_transformers(serve, reference, method, shape):
    requests = repeating(reference, 1, 6)
    # The model drafts for itself: its drafts are right unless the cache is scarce.
    speculative = drafts_by(method, reference.path)
    config = {"block_size": 4, "speculative": speculative, "max_num_seqs": 5}
    with serve(reference.path, *shape, reload=True, **config) as (group, loaded):
        run = generate(group, loaded, requests)
        assert_greedy(run, reference, requests)
        drafts = run.driver.drafts
        assert drafts.num_accepted > (0.99 * drafts.num_drafted if method == "draft_model" else 0)
        scarce = generate(group, loaded, requests, num_blocks=22, enable_prefix_caching=False)
        assert_greedy(scarce, reference, requests)
        assert sum(output.num_preemptions for output in scarce.outputs.values()) > 0
        skipping = SkippingScheduler(scheduler_limits(group, loaded), clock=lambda: 0.0)
        assert_greedy(generate(group, loaded, requests, skipping), reference, requests)
        rests = RestingScheduler(scheduler_limits(group, loaded))
        rested = generate(group, loaded, requests, rests)
        assert_greedy(rested, reference, requests)
        drafts = rested.driver.drafts
        assert rests.num_rests > 10 and drafts.num_drafted > 5
        assert drafts.num_accepted > 0.99 * drafts.num_drafted or method != "draft_model"


class SkippingScheduler(Scheduler):
    """Lets the device skip the drafts of steps at random, and lets steps verify old ones."""

    def schedule(self):
        output = super().schedule()
        return output and replace(output, skip_drafts=random.random() < 0.5)


def test_a_new_rank_drafts_what_its_peers_draft(serve, daemons, reference):
    """Output that only the older one has kept must not count: both verify the same drafts."""
    requests = repeating(reference, 4, 4)
    with serve(reference.path, 1, 2, reload=True, speculative=SUFFIX) as (group, loaded):
        assert_greedy(generate(group, loaded, requests), reference, requests)
        daemons.kill(1)
        with pytest.raises(WorkerDied):
            while True:
                group.look()
        daemons.restart_dead()
        group.replace(1)
        run = generate(group, loaded, requests)
        assert_greedy(run, reference, requests)
    assert sum(output.num_accepted for output in run.outputs.values()) > 0


SAMPLED = {
    "random": {"temperature": 1.2, "top_k": 40, "top_p": 0.95},
    "penalized": {
        "temperature": 0.8,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
    },
    "few": {"temperature": 0.6, "allowed_token_ids": (5, 60, 70, 81)},
    "bans": {"temperature": 1.0, "bad_words": ((5, 60), (60, 70, 5)), "logit_bias": {5: 9, 60: 9}},
    "stops": {"temperature": 0.9, "stop_token_ids": tuple(range(0, 331, 7)), "min_tokens": 12},
    "reported": {"temperature": 0.7, "logprobs": 3},
}


def sampled(reference, seed):
    requests = repeating(reference, seed, 2 * len(SAMPLED))
    kinds = [*SAMPLED.values()] * 2
    return [
        changed(request, sampling=SamplingParams(seed=7 * index + seed, **kind))
        for index, (request, kind) in enumerate(zip(requests, kinds, strict=True))
    ]


@pytest.fixture(scope="module")
def undrafted(reference, serve):
    """What sampled requests gain in a group without drafts."""
    requests = sampled(reference, 3)
    with serve(reference.path, 1, 1, reload=True) as (group, loaded):
        return generate(group, loaded, requests).outputs


@pytest.mark.parametrize("shape", [(1, 1), *map(exhaustively, ((2, 1), (1, 2), (2, 2)))])
def test_seeded_tokens_and_reports_are_those_without_drafts(serve, reference, undrafted, shape):
    requests = sampled(reference, 3)
    with serve(reference.path, *shape, reload=True, speculative=SUFFIX) as (group, loaded):
        outputs = generate(group, loaded, requests).outputs
    assert sum(output.num_accepted for output in outputs.values()) > 0
    for request in requests:
        own, alone = outputs[request.id], undrafted[request.id]
        assert own.token_ids == alone.token_ids and own.finish_reason == alone.finish_reason
        for mine, other in zip(own.logprobs or (), alone.logprobs or (), strict=True):
            assert mine.token_ids[0] == other.token_ids[0]
            assert mine.logprobs[0] == pytest.approx(other.logprobs[0], abs=1e-4)


class AskingGroup:
    """A group whose drafts are asked for before each step is sent."""

    def __init__(self, group):
        self._group = group
        self.asked = []

    def __getattr__(self, name):
        return getattr(self._group, name)

    def execute_model(self, output):
        drafts = self._group.drafts.take_token_ids()
        assert self._group.drafts.take_token_ids() == drafts
        self.asked.append((dict(zip(*drafts, strict=True)), output))
        return self._group.execute_model(output)


@pytest.mark.parametrize("shape", [(2, 1), *map(exhaustively, ((1, 1), (2, 2)))])
def test_drafts_can_be_read_before_the_step_that_verifies_them(serve, reference, shape):
    """Some requests end while others run: drafts are of those of the last step, which in a pipeline
    are others than those of the next."""
    requests, results = repeating(reference, 1, 6), []
    with serve(reference.path, *shape, reload=True, speculative=NGRAM) as (group, loaded):
        asking = AskingGroup(group)
        # While no time passes, a scheduler gives all drafts that fit.
        scheduler = Scheduler(scheduler_limits(group, loaded), clock=lambda: 0.0)
        driver = Driver(asking, scheduler, results.append)
        for request in requests:
            driver.add_request(request)
        outputs = {output.req_id: output for output in driver.run()}
        assert group.drafts.take_token_ids() == ([], [])  # the last step has ended requests
        statuses = group.get_status()
    num_accepted, last, known = 0, None, {}
    for (drafts, output), result in zip(asking.asked, results, strict=True):
        if last is not None:
            assert set(drafts) == set(last)
        known |= drafts
        last = {*output.decode_req_ids, *output.num_scheduled_tokens}
        for req_id, outcome in result.drafts.items():
            pairs = zip(result.req_ids, result.token_ids, strict=True)
            tokens = [token for owner, token in pairs if owner == req_id]
            own = known[req_id]
            assert own[: outcome.num_accepted] == tokens[:-1]
            refused = own[outcome.num_accepted : outcome.num_drafted]
            assert not refused or refused[0] != tokens[-1]
            num_accepted += outcome.num_accepted
    assert driver.drafts.num_accepted == num_accepted > 0
    for request in requests:
        assert len(outputs[request.id].token_ids) == request.max_tokens
    *others, counted = [status.drafts for status in statuses if status.drafts is not None]
    assert not others and counted == statuses[group.output_rank].drafts
    assert counted.num_drafted == driver.drafts.num_drafted
    assert list(counted.accepted_by_place) == driver.drafts.accepted_by_place


def test_a_group_without_a_drafter_has_no_drafts_to_read(serve, reference):
    with serve(reference.path, 1, 1, reload=True) as (group, loaded):
        generate(group, loaded, [greedy_request("a", [1, 2, 3], 2)])
        assert group.drafts.take_token_ids() is None
        assert group.get_status()[0].drafts is None

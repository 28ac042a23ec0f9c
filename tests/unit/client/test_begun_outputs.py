"""Requests that begin their output with a token that another group has sampled."""

import random

import pytest

from rpc_schema.kv_cache import BlockGroup
from tests.support.flat_requests import flat_request
from tests.support.serving import greedy_request
from worker_client.driver_parts.remote_prefill import first_token_sampling
from worker_client.inputs.sampling_params import SamplingParams
from worker_client.requests import with_sampling
from worker_client.scheduler import NO_JUMP, Scheduler, SchedulerLimits
from worker_client.scheduler_output import StepResult

BLOCK, EOS = 4, 9
LIMITS = SchedulerLimits(
    4, 64, 64, 60, BLOCK, groups=(BlockGroup(BLOCK),), eos_token_ids=(EOS,), num_host_blocks=40
)


def held(prompt, max_tokens=3, **sampling):
    """A scheduler that holds a request."""
    scheduler = Scheduler(LIMITS)
    request = greedy_request("r", prompt, max_tokens)
    scheduler.add_request(with_sampling(request, **sampling) if sampling else request)
    scheduler.hold_request("r")
    return scheduler


def test_a_request_goes_on_from_its_first_token():
    prompt = [random.randrange(9) for _ in range(11)]
    scheduler = held(prompt)
    assert scheduler.begin_output("r", 7) == (1, None)
    assert scheduler.begin_output("r", 7) is NO_JUMP  # it has one
    assert scheduler.generated_tokens("r", 0) == [7]
    assert scheduler.schedule() is None
    scheduler.release_request("r")
    step = scheduler.schedule()
    (new,) = step.scheduled_new_reqs
    assert new.token_ids.tolist() == [*prompt, 7]
    assert step.num_scheduled_tokens == {"r": 12}
    scheduler.update_from_output(step, StepResult(["r"], [8]))
    assert scheduler.begin_output("r", 7) is NO_JUMP  # it runs
    step = scheduler.schedule()
    (output,) = scheduler.update_from_output(step, StepResult(["r"], [6]))
    assert (output.token_ids, output.finish_reason) == ([7, 8, 6], "length")
    assert [run.num_tokens for run in output.weights_versions] == [3]


@pytest.mark.parametrize(
    ("token", "max_tokens", "sampling", "reason"),
    [
        (EOS, 3, {}, "stop"),
        (5, 3, {"stop_token_ids": (5,)}, "stop"),
        (5, 1, {}, "length"),
        (EOS, 3, {"ignore_eos": True}, None),
    ],
)
def test_the_token_ends_a_request_as_any_other(token, max_tokens, sampling, reason):
    scheduler = held([1, 2, 3], max_tokens, **sampling)
    count, output = scheduler.begin_output("r", token)
    assert count == 1 and (None if output is None else output.finish_reason) == reason
    assert scheduler.has_unfinished_requests() == (reason is None)
    if output is not None:
        assert output.token_ids == [token] and scheduler.num_free_blocks == 59


def test_only_new_requests_that_report_nothing_begin_so():
    assert held([1, 2, 3]).begin_output("other", 7) is NO_JUMP
    scheduler = held([1, 2, 3], logprobs=1)
    assert scheduler.begin_output("r", 7) is NO_JUMP
    assert scheduler.generated_tokens("r", 0) == []


def test_the_other_group_samples_by_what_the_first_token_depends_on():
    sampling = SamplingParams(temperature=0.7, seed=3, min_tokens=4, stop=("x",), top_k=5)
    request = with_sampling(flat_request("r", [1, 2], max_tokens=3), n=1)
    request = with_sampling(
        request, temperature=0.7, seed=3, min_tokens=4, stop=sampling.stop, top_k=5
    )
    wanted = first_token_sampling(request)
    assert wanted == SamplingParams(temperature=0.7, seed=3, min_tokens=1, top_k=5)
    for field in ({"logprobs": 0}, {"prompt_logprobs": 1}, {"full_logprobs": True}):
        assert first_token_sampling(with_sampling(request, **field)) is None
    assert first_token_sampling(with_sampling(request, logits_processors=("p",))) is None


def test_blocks_that_the_token_completes_are_wanted_if_others_are():
    scheduler = held([*range(2 * BLOCK)])
    exchange = scheduler.exchange
    assert len(exchange.lacking("r")) == 1
    assert len(exchange.lacking("r", has_token=True)) == 2
    assert exchange.lacking("r", has_token=True)[:1] == exchange.lacking("r")
    assert held([*range(BLOCK)]).exchange.lacking("r", has_token=True) == []

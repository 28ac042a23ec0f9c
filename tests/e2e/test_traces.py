"""A request that brings the tokens of an output gets the log probabilities with which it would have
sampled them: those of the decode that has, and of transformers. Generation goes on from a trace
with the same tokens."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from tests.support.checkpoints import VOCAB_SIZE, prompts
from tests.support.every_draft import every_draft
from tests.support.exhaustive import exhaustively
from tests.support.installed_processors import NAMES
from tests.support.serving import continue_one, generate, scheduler_limits
from tests.support.token_rules import random_params
from worker_client.driver import Driver
from worker_client.errors import RequestError
from worker_client.requests import GenerationRequest, SamplingParams, VersionRun
from worker_client.scheduler import Scheduler, SchedulerLimits

MAX_TOKENS = 30
SAME = 1e-5
SIZES = {
    "block_size": 4,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "max_model_len": 90,
    "logits_processors": NAMES,
}


@pytest.fixture(scope="module")
def reference(checkpoint):
    return checkpoint("Qwen2ForCausalLM", seed=31)


@pytest.fixture
def rng():
    seed = int(np.random.default_rng().integers(1 << 30))
    print("seed", seed)
    return np.random.default_rng(seed)


def sampling_of(rng):
    """Filters and rules, each of some requests. Several tokens are likely, so that each repeats."""
    options = {
        "temperature": rng.choice([0.0, 0.7, 1.3]),
        "top_k": int(rng.integers(2, 40)),
        "top_p": float(rng.uniform(0.4, 0.95)),
        "min_p": float(rng.uniform(0.01, 0.2)),
        "min_tokens": int(rng.integers(1, MAX_TOKENS)),
        "logits_processors": ("late",),
    }
    chosen = {name: value for name, value in options.items() if rng.random() < 0.6}
    rules = random_params(rng, VOCAB_SIZE) if rng.random() < 0.7 else SamplingParams()
    likely = dict.fromkeys(range(12), 3.0)
    return msgspec.structs.replace(
        rules,
        full_logprobs=True,
        seed=int(rng.integers(1 << 40)),
        logit_bias={**rules.logit_bias, **likely},
        **chosen,
    )


def requests_of(rng, count=10):
    """Half of them begin with the same tokens; the first half has outputs of MAX_TOKENS."""
    stem = rng.integers(0, VOCAB_SIZE, 11).tolist()
    own = prompts(int(rng.integers(1 << 30)), rng.integers(2, 16, count).tolist())
    return [
        GenerationRequest(
            f"r{index}",
            [*stem, *prompt] if index % 2 else prompt,
            MAX_TOKENS,
            sampling=msgspec.structs.replace(
                sampling_of(rng), **({"ignore_eos": True} if index < count // 2 else {})
            ),
        )
        for index, prompt in enumerate(own)
    ]


def traced(request, output, count=None):
    """The request with the first tokens of its output: all of them, and no more is generated."""
    given = tuple(output.token_ids[:count])
    most = len(given) if count is None else request.max_tokens
    return replace(request, id=f"{request.id} again", output_token_ids=given, max_tokens=most)


def assert_both(found, expected, request):
    np.testing.assert_allclose(found, expected, rtol=SAME, atol=SAME, err_msg=str(request))


@pytest.mark.usefixtures("each_drafter")
@pytest.mark.parametrize("shape", [exhaustively((1, 1)), (2, 1), exhaustively((1, 2))])
def test_a_trace_has_the_log_probabilities_of_its_decode(serve, reference, rng, shape):
    """In few steps, with cached prefixes, and with preemptions: of what is generated behind it
    too, which has the same tokens."""
    requests = requests_of(rng)
    with serve(reference.path, *shape, num_gpu_blocks=200, **SIZES) as (group, loaded):
        outputs = generate(group, loaded, requests).outputs
        whole = [traced(request, outputs[request.id]) for request in requests]
        again = generate(group, loaded, whole)
        part = [traced(r, outputs[r.id], int(rng.integers(1, 16))) for r in requests]
        gone_on = generate(group, loaded, part, num_blocks=28)
    num_tokens = sum(len(r.prompt) + len(r.output_token_ids) for r in whole)
    assert len(again.driver.records) < num_tokens / 10
    assert sum(output.num_cached_tokens for output in again.outputs.values()) > 0
    assert sum(output.num_preemptions for output in gone_on.outputs.values()) > 0
    for request, trace in zip(requests, whole, strict=True):
        output, found = outputs[request.id], again.outputs[trace.id]
        assert found.token_ids == output.token_ids
        assert found.finish_reason in ("length", output.finish_reason)
        assert found.weights_versions == (VersionRun(None, len(output.token_ids)),)
        assert_both(found.full_logprobs, output.full_logprobs, trace)
    for request, trace in zip(requests, part, strict=True):
        output, found = outputs[request.id], gone_on.outputs[trace.id]
        assert found.token_ids == output.token_ids, request
        assert found.finish_reason == output.finish_reason
        assert_both(found.full_logprobs, output.full_logprobs, trace)
        ours, *others = found.weights_versions
        assert ours == VersionRun(None, len(trace.output_token_ids))
        assert sum(run.num_tokens for run in others) == len(output.token_ids) - ours.num_tokens


def test_tokens_that_nobody_sampled(serve, reference, rng):
    """By transformers. What the filters drop could not have been sampled."""
    prompt, output = rng.integers(0, VOCAB_SIZE, 9), rng.integers(0, VOCAB_SIZE, 40).tolist()
    trace = GenerationRequest(
        "plain",
        prompt,
        len(output),
        output_token_ids=output,
        sampling=SamplingParams(temperature=1.0, seed=1, full_logprobs=True),
    )
    sampling = msgspec.structs.replace(trace.sampling, top_k=VOCAB_SIZE // 2)
    halved = replace(trace, id="halved", sampling=sampling)
    greedy = replace(trace, id="greedy", sampling=SamplingParams(full_logprobs=True))
    with serve(reference.path, **SIZES) as (group, loaded):
        outputs = generate(group, loaded, [trace, halved, greedy]).outputs
    logits = reference.logits([*prompt.tolist(), *output])[len(prompt) - 1 : -1]
    own = logits.log_softmax(-1).numpy()[np.arange(len(output)), output]
    for found in outputs.values():
        assert found.token_ids == output
        np.testing.assert_allclose([both.full for both in found.full_logprobs], own, atol=1e-4)
    np.testing.assert_allclose([b.sampled for b in outputs["plain"].full_logprobs], own, atol=1e-4)
    ordered = logits.sort(dim=-1, descending=True).values
    kept = ordered[:, : VOCAB_SIZE // 2].logsumexp(-1)
    least = ordered[:, VOCAB_SIZE // 2 - 1]
    for place, token in enumerate(output):
        value, sampled = logits[place, token], outputs["halved"].full_logprobs[place].sampled
        if abs(value - least[place]) > 1e-4:
            expected = float(value - kept[place]) if value > least[place] else -np.inf
            assert sampled == pytest.approx(expected, abs=1e-4)
    certain = [both.sampled for both in outputs["greedy"].full_logprobs]
    is_best = (logits.argmax(-1).numpy() == output).tolist()
    assert certain == [0.0 if best else -np.inf for best in is_best]
    assert -np.inf in [both.sampled for both in outputs["halved"].full_logprobs]


def test_an_adopting_driver_reports_the_whole_trace(serve, reference, rng):
    """Killed in the middle of the trace, and behind it: the same tokens and log probabilities."""
    request = requests_of(rng, 1)[0]
    request = replace(request, sampling=msgspec.structs.replace(request.sampling, min_tokens=20))
    with serve(reference.path, 2, num_gpu_blocks=80, **SIZES) as (group, loaded):
        limits, config = scheduler_limits(group, loaded), group.get_status()[0].config
        output = generate(group, loaded, [request]).outputs[request.id]
        trace = traced(request, output, 16)
        driver = Driver(group, every_draft(limits))
        driver.add_request(replace(trace, prompt=[*request.prompt]))
        driver.step()
    found = continue_one(serve.pool.endpoints(2), limits, config, 4)
    assert found.token_ids == output.token_ids
    assert_both(found.full_logprobs, output.full_logprobs, trace)


ENDS = {"stop_token_ids": (7,), "full_logprobs": True}
WRONG = {
    "more than max_tokens": ({"output_token_ids": [1] * 6}, "output_token_ids"),
    "unknown token": ({"output_token_ids": [VOCAB_SIZE]}, "output_token_ids"),
    "past its end": ({"output_token_ids": [1, 7, 2], "sampling": ENDS}, "output_token_ids"),
    "nothing to do": ({"output_token_ids": [1] * 5}, "output_token_ids"),
    "other reports": ({"output_token_ids": [1], "sampling": {"logprobs": 1}}, "sampling.logprobs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_traces_are_refused(name):
    fields, field = WRONG[name]
    sampling = SamplingParams(**fields.get("sampling", {}))
    request = GenerationRequest("a", [1, 2], 5, **{**fields, "sampling": sampling})
    limits = SchedulerLimits(4, 32, 64, 64, 4, vocab_size=VOCAB_SIZE)
    with pytest.raises(RequestError) as caught:
        Scheduler(limits).add_request(request)
    assert caught.value.field == field, caught.value

"""Log probabilities and ranks are those of transformers' log_softmax."""

import msgspec
import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.support.checkpoints import VOCAB_SIZE, prompts
from tests.support.every_draft import every_draft
from tests.support.exhaustive import exhaustively
from tests.support.serving import continue_one, generate, greedy_request, scheduler_limits
from tests.support.token_rules import RuleProcessor, random_params
from worker_client.driver import Driver
from worker_client.requests import GenerationRequest, SamplingParams

ATOL = 1e-4
WANTED = [None, 0, 1, 5, 20, None, 5, 0]
MAX_TOKENS = 10


@pytest.fixture(scope="module")
def reference(checkpoint):
    return checkpoint("Qwen2ForCausalLM", seed=31)


def make_requests():
    """Every second request has temperature 2, so that ranks other than 1 occur."""
    return [
        greedy_request(
            f"r{index}",
            prompt,
            MAX_TOKENS,
            logprobs=wanted,
            temperature=2.0 * (index % 2),
            seed=index,
        )
        for index, (prompt, wanted) in enumerate(
            zip(prompts(3, [4, 9, 17, 31, 8, 5, 23, 12]), WANTED, strict=True)
        )
    ]


@pytest.mark.usefixtures("each_drafter")
@pytest.mark.parametrize("shape", [*map(exhaustively, [(1, 1), (2, 1)]), (1, 2)])
def test_logprobs_equal_transformers(serve, reference, shape):
    requests = make_requests()
    with serve(reference.path, *shape) as (group, loaded):
        outputs = generate(group, loaded, requests, max_num_batched_tokens=40).outputs
    ranks = []
    for request in requests:
        output = outputs[request.id]
        assert len(output.token_ids) == MAX_TOKENS
        if request.sampling.logprobs is None:
            assert output.logprobs is None
            continue
        sequence = [*request.prompt.tolist(), *output.token_ids]
        exact = reference.logprobs(sequence)[len(request.prompt) - 1 : -1]
        for token, row, ours in zip(output.token_ids, exact, output.logprobs, strict=True):
            check_row(row, token, request.sampling.logprobs, ours)
            ranks.append(ours.rank)
    assert max(ranks) > 1
    assert min(ranks) == 1


@pytest.mark.usefixtures("each_drafter")
@pytest.mark.parametrize("shape", [exhaustively((1, 1)), (2, 1), exhaustively((1, 2))])
def test_logprobs_of_prompts_and_of_named_tokens(serve, reference, shape):
    """In chunks, with prefixes cached by other requests, and with preemption."""
    rng = np.random.default_rng()
    stem, requests = rng.integers(0, VOCAB_SIZE, 12).tolist(), []
    for index, length in enumerate([1, 30, 9, 44, 17, 2, 25, 11]):
        fields = {
            "prompt_logprobs": [None, 0, 3][index % 3] if index else 2,
            "logprob_token_ids": tuple(rng.integers(0, VOCAB_SIZE, 1 + index).tolist()),
            "logprobs": 1 if index % 2 else None,
        }
        prompt = (stem + rng.integers(0, VOCAB_SIZE, length).tolist())[-length:]
        if index % 2:
            prompt = stem + prompt
        requests.append(greedy_request(f"r{index}", prompt, 20, **fields))
    sizes = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 20, "max_model_len": 80}
    with serve(reference.path, *shape, num_gpu_blocks=26, **sizes) as (group, loaded):
        outputs = generate(group, loaded, requests).outputs
    for request in requests:
        output, prompt = outputs[request.id], request.prompt.tolist()
        exact = reference.logprobs([*prompt, *output.token_ids])
        if request.sampling.prompt_logprobs is None:
            assert output.prompt_logprobs is None
        else:
            first, *others = output.prompt_logprobs
            assert first is None and len(others) == len(prompt) - 1
            for row, token, ours in zip(exact, prompt[1:], others, strict=False):
                check_row(row, token, request.sampling.prompt_logprobs, ours)
            assert output.num_cached_tokens == 0
        ours, named = np.stack(output.token_id_logprobs), list(request.sampling.logprob_token_ids)
        np.testing.assert_allclose(ours, exact[len(prompt) - 1 : -1, named], atol=ATOL)
    assert sum(output.num_preemptions for output in outputs.values()) > 0


@pytest.mark.usefixtures("each_drafter")
def test_prompt_logprobs_are_reported_again_to_an_adopting_driver(serve, reference):
    """In the middle of the prompt, and after it."""
    prompt = prompts(21, [60])[0]
    request = greedy_request("long", prompt, 6, prompt_logprobs=1)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 80}
    exact = reference.logprobs(prompt)
    with serve(reference.path, 2, **sizes) as (group, loaded):
        limits, config = scheduler_limits(group, loaded), group.get_status()[0].config
        driver = Driver(group, every_draft(limits))
        driver.add_request(request)
        driver.step()
    output = continue_one(serve.pool.endpoints(2), limits, config, 6)
    for row, token, ours in zip(exact, prompt[1:], output.prompt_logprobs[1:], strict=False):
        check_row(row, token, 1, ours)
    assert len(output.prompt_logprobs) == len(prompt)


def test_logprobs_depend_on_the_batch_by_rounding_alone(serve, reference):
    """What docs/cli.md says under "The same tokens": alone, and in batches of 2 to 32."""
    me = greedy_request("me", prompts(8, [14])[0], MAX_TOKENS, logprobs=20)
    others = [greedy_request(f"o{n}", p, MAX_TOKENS) for n, p in enumerate(prompts(9, [14] * 31))]
    values = {}
    with serve(reference.path, max_num_batched_tokens=512) as (group, loaded):
        for size in (1, 2, 7, 32):
            run = generate(group, loaded, [*others[: size - 1], me], enable_prefix_caching=False)
            assert max(record.num_requests for record in run.driver.records) == size
            values[size] = [by_token(row) for row in run.outputs["me"].logprobs]
    alone = values.pop(1)
    for size, rows in values.items():
        for row, expected in zip(rows, alone, strict=True):
            common = row.keys() & expected.keys()
            assert len(common) >= 20, "more than a border moved"
            assert max(abs(row[token] - expected[token]) for token in common) < 5e-5, size


def sampling_of(rng):
    """Options that change what is sampled, each of some requests."""
    options = {
        "temperature": rng.choice([0.0, 0.7, 1.6]),
        "top_k": int(rng.integers(2, 40)),
        "top_p": float(rng.uniform(0.4, 0.95)),
        "min_p": float(rng.uniform(0.01, 0.2)),
    }
    chosen = {name: value for name, value in options.items() if rng.random() < 0.7}
    rules = random_params(rng, VOCAB_SIZE) if rng.random() < 0.6 else SamplingParams()
    return msgspec.structs.replace(
        rules, full_logprobs=True, seed=int(rng.integers(1 << 40)), **chosen
    )


def drawn(params, num_prompt, ids, logits, token):
    """The log probability of the token after ids, which was drawn, by transformers' processors: the
    least and the most that it may be, where rounding moves the border of a filter, or decides which
    of two tokens that are nearly tied there is kept."""
    ids = torch.tensor([ids])
    scores = RuleProcessor(params, num_prompt)(ids, logits[None])
    if not params.temperature:
        assert scores[0, token] >= scores.max() - ATOL
        return 0.0, 0.0
    scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
    bounds = []
    for slack in (-1e-4, 1e-4):
        filters = [TopKLogitsWarper(params.top_k)] if params.top_k else []
        if params.min_p:
            filters.insert(0, MinPLogitsWarper(params.min_p * (1 + slack)))
        if params.top_p < 1:
            filters.append(TopPLogitsWarper(params.top_p - slack))
        kept = scores
        for each in filters:
            kept = each(ids, kept)
        is_kept = kept[0].isfinite()
        if slack < 0:
            is_kept = scores[0] >= scores[0][is_kept].min() - ATOL
        elif not is_kept.all():
            is_kept = scores[0] > scores[0][~is_kept].max() + ATOL
        is_kept[token] = True
        bounds.append(float(scores[0].masked_fill(~is_kept, -torch.inf).log_softmax(-1)[token]))
    return bounds


@pytest.mark.usefixtures("each_drafter")
@pytest.mark.parametrize("shape", [exhaustively((1, 1)), (2, 1), exhaustively((1, 2))])
def test_full_logprobs_equal_transformers(serve, reference, shape):
    """Of the model alone, and of what was drawn from: with rules, filters and preemption."""
    seed = int(np.random.default_rng().integers(1 << 30))
    print("seed", seed)
    rng = np.random.default_rng(seed)
    requests = [
        GenerationRequest(f"r{index}", prompt, 16, sampling=sampling_of(rng))
        for index, prompt in enumerate(prompts(seed, [4, 9, 17, 31, 8, 5, 23, 12, 7, 2]))
    ]
    requests.append(greedy_request("plain", [1, 2, 3], 16))
    sizes = {"block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 32, "max_model_len": 60}
    with serve(reference.path, *shape, num_gpu_blocks=34, **sizes) as (group, loaded):
        outputs = generate(group, loaded, requests).outputs
    assert outputs["plain"].full_logprobs is None
    assert sum(output.num_preemptions for output in outputs.values()) > 0
    num_changed = 0
    for request in requests[:-1]:
        output, params, prompt = outputs[request.id], request.sampling, [*request.prompt]
        assert len(output.full_logprobs) == len(output.token_ids) == 16
        ids = [*prompt, *output.token_ids]
        logits = reference.logits(ids)[len(prompt) - 1 : -1]
        for place, (token, both) in enumerate(
            zip(output.token_ids, output.full_logprobs, strict=True)
        ):
            row, before = logits[place], ids[: len(prompt) + place]
            assert both.full == pytest.approx(float(row.log_softmax(-1)[token]), abs=ATOL)
            least, most = drawn(params, len(prompt), before, row, token)
            assert least - ATOL <= both.sampled <= most + ATOL, (request, place)
            num_changed += abs(both.full - both.sampled) > 0.01
    assert num_changed > 20


def by_token(ours):
    return dict(zip(ours.token_ids.tolist(), ours.logprobs.tolist(), strict=True))


def check_row(exact, token, num_top, ours):
    """exact: float32 [vocab_size]."""
    assert ours.token_ids.shape == ours.logprobs.shape == (num_top + 1,)
    assert ours.token_ids[0] == token
    np.testing.assert_allclose(ours.logprobs, exact[ours.token_ids.astype(np.int64)], atol=ATOL)
    np.testing.assert_allclose(ours.logprobs[1:], exact.topk(num_top).values, atol=ATOL)
    assert len(set(ours.token_ids[1:].tolist())) == num_top
    lead = exact - exact[token]
    above, near = (lead > ATOL).sum().item(), (lead.abs() <= ATOL).sum().item()
    assert above + 1 <= ours.rank <= above + near

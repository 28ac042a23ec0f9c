"""Log probabilities and ranks are those of transformers' log_softmax."""

import numpy as np
import pytest
import torch

from tests.support.checkpoints import prompts
from tests.support.serving import generate, greedy_request

ATOL = 1e-4
WANTED = [None, 0, 1, 5, 20, None, 5, 0]
MAX_TOKENS = 10


@pytest.fixture(scope="module")
def reference(checkpoint):
    return checkpoint("Qwen2ForCausalLM", seed=31)


def make_requests():
    """Every second one at temperature 2, so that ranks other than 1 occur."""
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


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2)])
def test_logprobs_equal_transformers(serve, reference, shape):
    requests = make_requests()
    with serve(reference.path, *shape) as (group, loaded):
        outputs = generate(group, loaded, requests, max_num_batched_tokens=40).outputs
    ranks = []
    for request in requests:
        output = outputs[request.id]
        assert len(output.token_ids) == MAX_TOKENS
        if request.logprobs is None:
            assert output.logprobs is None
            continue
        sequence = [*request.prompt_token_ids.tolist(), *output.token_ids]
        exact = reference.logprobs(sequence)[len(request.prompt_token_ids) - 1 : -1]
        for token, row, ours in zip(output.token_ids, exact, output.logprobs, strict=True):
            check_row(row, token, request.logprobs, ours)
            ranks.append(ours.rank)
    assert max(ranks) > 1
    assert min(ranks) == 1


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


def by_token(ours):
    return dict(zip(ours.token_ids.tolist(), ours.logprobs.tolist(), strict=True))


def check_row(exact, token, num_top, ours):
    """exact: float32 [vocab_size]."""
    assert ours.token_ids.shape == ours.logprobs.shape == (num_top + 1,)
    assert ours.token_ids[0] == token
    np.testing.assert_allclose(ours.logprobs, exact[ours.token_ids.astype(np.int64)], atol=ATOL)
    np.testing.assert_allclose(ours.logprobs[1:], exact.topk(num_top).values, atol=ATOL)
    assert len(set(ours.token_ids[1:].tolist())) == num_top
    above = torch.sum(exact > exact[token] + ATOL).item()
    near = torch.sum((exact - exact[token]).abs() <= ATOL).item()
    assert above + 1 <= ours.rank <= above + near

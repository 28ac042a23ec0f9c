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

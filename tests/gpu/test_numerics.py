"""Numerics on a GPU, end to end: as close to float32 as transformers is in the same precision."""

import numpy as np
import pytest
import torch

from tests.support.gpu_generation import (
    generate,
    gpu_group,
    make_requests,
    reference_logprobs,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_REQUESTS = 72
TOP_N = 20


def top_errors(outputs, exact, other=None):
    """Errors at the top-n tokens of each generated position: ours, or those of other, against
    exact."""
    errors = []
    for req_id, output in outputs.items():
        for row, entry in enumerate(output.logprobs):
            ids = torch.from_numpy(np.array(entry.token_ids, np.int64))
            ours = torch.from_numpy(np.array(entry.logprobs, np.float32))
            value = ours if other is None else other[req_id][row, ids]
            errors.append(value - exact[req_id][row, ids])
    return torch.stack(errors)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logprobs_are_as_exact_as_transformers(llama, dtype):
    requests = make_requests(NUM_REQUESTS, temperature=1.0, logprobs=TOP_N)
    with gpu_group(llama, 1, 1, dtype) as (_, group, model):
        outputs = generate(group, model, requests)
    exact = reference_logprobs(llama, torch.float32, requests, outputs)
    theirs = reference_logprobs(llama, getattr(torch, dtype), requests, outputs)
    our_errors, their_errors = top_errors(outputs, exact), top_errors(outputs, exact, theirs)
    rows = our_errors.shape[0]
    ours, other = (float(e.square().mean().sqrt()) for e in (our_errors, their_errors))
    print(
        f"{dtype}: {rows} rows, RMS error {ours:.5f}, transformers {other:.5f}, {ours / other:.3f}x"
    )
    assert rows >= 4096
    assert ours <= 1.5 * other


@pytest.mark.parametrize("logprobs", [None, 1])  # sampled in the graph, and beside it
def test_float32_greedy_tokens_equal_transformers(llama, logprobs):
    requests = make_requests(16, seed=1, logprobs=logprobs)
    with gpu_group(llama, 1, 1, "float32") as (_, group, model):
        outputs = generate(group, model, requests)
    exact = reference_logprobs(llama, torch.float32, requests, outputs)
    for request in requests:
        assert outputs[request.id].token_ids == exact[request.id].argmax(dim=-1).tolist()

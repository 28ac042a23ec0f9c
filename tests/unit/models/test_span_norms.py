"""Norms over all queries and all keys of a token, against transformers' OLMo-2: the operation, and
models whose heads are split over ranks."""

import pytest
import torch
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from worker_daemon.contracts.layer_ops import SpanNorms
from worker_daemon.layers.torch_ops import TorchOps

LENGTHS = (1, 5, 40, 13)
EPS = 1e-5


@pytest.fixture
def made(make_checkpoint):
    """(seed, overrides) -> a checkpoint of OLMo-2."""

    def make(seed, **overrides):
        return make_checkpoint("Olmo2ForCausalLM", seed=seed, rms_norm_eps=EPS, **overrides)

    return make


@pytest.mark.parametrize(
    ("num_kv_heads", "tp_size", "pp_size"),
    [(4, 1, 1), (2, 1, 2), (4, 2, 2), (2, 2, 1), (2, 4, 1), (1, 4, 2)],
)
def test_splits_agree_with_transformers(
    made,
    random_sequences,
    stages_of,
    paged_run,
    reference_logprobs,
    on_tensor_parallel_ranks,
    num_kv_heads,
    tp_size,
    pp_size,
):
    """With fewer KV heads than ranks, ranks hold copies of them."""
    checkpoint = made(seed=1, num_key_value_heads=num_kv_heads)
    sequences = random_sequences(LENGTHS, seed=2)
    expected = reference_logprobs(checkpoint.hf_model, sequences)

    def prefill(tp):
        stages = stages_of(checkpoint.path, pp_size, tp)
        if tp_size == 1:
            names = {name for stage in stages for name in stage.checkpoint_views()}
            assert names == set(checkpoint.hf_model.state_dict())
        return paged_run(stages, sequences).prefill()

    for ours in on_tensor_parallel_ranks(tp_size, prefill):
        for logits, reference in zip(ours, expected, strict=True):
            assert torch.allclose(logits.log_softmax(-1), reference, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_that_of_transformers(dtype):
    """Values are rounded once, after the weight."""
    generator = torch.Generator().manual_seed(3)
    qkv = (torch.randn(50, 96 + 2 * 32, generator=generator) * 3).to(dtype)
    expected = []
    for part in qkv[:, :128].split((96, 32), 1):
        norm = Olmo2RMSNorm(part.shape[1], EPS).to(dtype)
        with torch.no_grad():
            norm.weight.normal_(1.0, 0.3, generator=generator)
            expected.append((norm.weight, norm(part)))
    weights, normed = zip(*expected, strict=True)
    values = qkv[:, 128:].clone()
    out = TorchOps().norm_spans(qkv.clone(), SpanNorms(torch.cat(weights).detach(), EPS, 96))
    tolerance = 1e-6 if dtype == torch.float32 else 0.0
    torch.testing.assert_close(out[:, :128], torch.cat(normed, 1), rtol=tolerance, atol=tolerance)
    assert torch.equal(out[:, 128:], values)

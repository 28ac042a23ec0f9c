"""Norms over all queries and all keys of a token, against transformers' OLMo-2: the operation, and
models whose heads are split over ranks."""

from dataclasses import replace

import pytest
import torch
import transformers
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention, Olmo2RMSNorm

from tests.unit.models.conftest import SIZES, Checkpoint
from worker_daemon.contracts.layer_ops import SpanNorms
from worker_daemon.layers.norm import QKNormSpec
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models import registry
from worker_daemon.models.config_fields import decoder_config, dense_layer, head_sizes, num_layers
from worker_daemon.models.description import LayerSpec

ARCHITECTURE = "LlamaForCausalLM"
LENGTHS = (1, 5, 40, 13)
EPS = 1e-5


def describe(fields):
    dense = dense_layer(fields, head_sizes(fields))
    attention = replace(dense.attention, qk_norm=QKNormSpec(EPS, spans_heads=True))
    return decoder_config(fields, [LayerSpec(attention, dense.mlp)] * num_layers(fields))


@pytest.fixture
def made(monkeypatch, tmp_path):
    """(seed, overrides) -> a checkpoint of Llama with OLMo-2's attention."""
    monkeypatch.setattr(registry, "FAMILIES", {**registry.FAMILIES, ARCHITECTURE: describe})

    def make(seed, **overrides):
        config = transformers.LlamaConfig(**{**SIZES, **overrides}, rms_norm_eps=EPS)
        model = transformers.LlamaForCausalLM(config)
        for index, layer in enumerate(model.model.layers):
            layer.self_attn = Olmo2Attention(config, index)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                std = 0.3 if tensor.dim() == 1 else 0.2
                tensor.normal_(1.0 if "norm" in name else 0.0, std, generator=generator)
        model.save_pretrained(tmp_path)
        return Checkpoint(tmp_path, model.eval())

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

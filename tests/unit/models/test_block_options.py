"""Norms with an offset and after a block, GELU, a scaled embedding and capped logits, in half
precision and alone, against transformers' models that have them."""

import pytest
import torch

from worker_daemon.contracts.layer_ops import Norm, computed
from worker_daemon.layers.norm import BlockNorms, NormSpec
from worker_daemon.layers.setup import LayerSetup
from worker_daemon.layers.torch_ops import TorchOps

EPS = 1e-6
WINDOWS = ["sliding_attention", "full_attention"] * 2
GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 7,
    "layer_types": WINDOWS,
    "final_logit_softcapping": 3.0,
}


MODELS = {
    "Gemma2ForCausalLM": GEMMA,
    "Gemma3ForCausalLM": GEMMA,
    "Olmo2ForCausalLM": {"rms_norm_eps": EPS},
}


@pytest.fixture
def make(make_checkpoint):
    """(architecture, seed) -> a checkpoint."""

    def build(architecture, seed):
        return make_checkpoint(architecture, seed=seed, **MODELS[architecture])

    return build


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", MODELS)
def test_half_precision_is_no_worse_than_transformers(
    make, random_sequences, stages_of, paged_run, reference_logprobs, architecture, dtype
):
    made = make(architecture, seed=35)
    sequences = random_sequences((40, 60, 33), seed=36)
    exact = torch.cat(reference_logprobs(made.hf_model, sequences))
    run = paged_run(stages_of(made.path, dtype=dtype), sequences)
    run.caches = [[cache.to(dtype) for cache in caches] for caches in run.caches]
    ours = torch.cat(run.prefill()).float().log_softmax(-1)
    theirs = torch.cat(reference_logprobs(made.hf_model.to(dtype), sequences))
    assert (ours - exact).pow(2).mean().sqrt() <= 1.5 * (theirs - exact).pow(2).mean().sqrt()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_embeddings_have_the_bits_of_transformers(make, stages_of, dtype):
    made = make("Gemma2ForCausalLM", seed=37)
    stage = stages_of(made.path, dtype=dtype)[0]
    ids = torch.arange(131)
    with torch.no_grad():
        expected = made.hf_model.to(dtype).get_input_embeddings()(ids)
    assert torch.equal(stage.embed(ids), expected)


def test_every_way_to_the_logits_limits_them(make, stages_of):
    made = make("Gemma2ForCausalLM", seed=38)
    (stage,) = stages_of(made.path)
    hidden = torch.randn(7, 48) * 50
    out = stage.new_logits(9)[:7]
    logits = stage.gather_logits(stage.rank_logits(hidden, out))
    assert logits.data_ptr() == out.data_ptr()
    assert torch.equal(logits, stage.compute_logits(hidden))
    with torch.no_grad():
        exact = made.hf_model.lm_head(made.hf_model.model.norm(hidden))
    assert exact.abs().max() > 6
    assert torch.allclose(logits, 3 * torch.tanh(exact / 3), atol=1e-5)


@pytest.mark.parametrize("before", [None, NormSpec("before", EPS)])
@pytest.mark.parametrize("after", [None, NormSpec("after", EPS, 1.0)])
def test_a_block_reads_and_changes_the_stream_of_all_ranks(on_tensor_parallel_ranks, before, after):
    x, residual = torch.randn(2, 5, 16), torch.randn(5, 16)
    weight, ops = torch.rand(16), TorchOps()

    class Identity:
        def project(self, source):
            return computed(source, ops)

    def run(tp):
        setup = LayerSetup(16, tp, torch.float32, torch.device("cpu"), ops)
        norms = BlockNorms("model.layers.0", before, after, setup)
        for parameter in norms.parameters():
            parameter.data.copy_(weight)
        mine, stream = norms.project(Identity(), x[tp.rank], residual)
        part = norms.part(x[tp.rank])
        again, total = norms.project(Identity(), part, stream)
        return mine, stream, total, again

    stream = residual + x.sum(0)
    added = x.sum(0) if after is None else ops.rms_norm(x.sum(0), Norm(weight, EPS, 1.0))
    later = stream + added
    reads = [
        each if before is None else ops.rms_norm(each, Norm(weight, EPS))
        for each in (stream, later)
    ]
    for results in on_tensor_parallel_ranks(2, run):
        for ours, expected in zip(results, (reads[0], stream, later, reads[1]), strict=True):
            assert torch.allclose(ours, expected, atol=1e-5)

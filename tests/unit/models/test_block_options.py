"""Norms with an offset and after a block, GELU, a scaled embedding and capped logits: descriptions
with these options against transformers' models that have them."""

import json
from dataclasses import replace

import pytest
import torch

from worker_daemon.contracts.layer_ops import Norm
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.layers.attention import AttentionSpec
from worker_daemon.layers.mlp import MLPSpec
from worker_daemon.layers.norm import BlockNorms, NormSpec, QKNormSpec
from worker_daemon.layers.setup import LayerSetup
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models import registry
from worker_daemon.models.config_fields import decoder_config, head_sizes
from worker_daemon.models.description import LayerSpec

LENGTHS = (1, 5, 40, 13)
EPS = 1e-6
ROPE = {"rope_type": "default", "rope_theta": 1e4}
WINDOWS = ["sliding_attention", "full_attention"] * 2
GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 7,
    "layer_types": WINDOWS,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": 3.0,
}


def gemma_layer(fields, window, *, norms_heads):
    def norm(name):
        return NormSpec(name, EPS, 1.0)

    attention = AttentionSpec(
        norm("input_layernorm"),
        head_sizes(fields),
        qkv_bias=False,
        o_bias=False,
        qk_norm=QKNormSpec(EPS, 1.0) if norms_heads else None,
        sliding_window=window,
        post_norm=norm("post_attention_layernorm"),
    )
    mlp = MLPSpec(
        norm("pre_feedforward_layernorm"),
        fields.integer("intermediate_size"),
        mlp_bias=False,
        activation="gelu_tanh",
        post_norm=norm("post_feedforward_layernorm"),
    )
    return LayerSpec(attention, mlp)


def describe_gemma(fields, *, norms_heads=False):
    layers = [
        gemma_layer(fields, 7 if kind == "sliding_attention" else None, norms_heads=norms_heads)
        for kind in WINDOWS
    ]
    config = decoder_config(fields, layers)
    return replace(
        config,
        final_norm=NormSpec("norm", EPS, 1.0),
        tie_word_embeddings=True,
        embedding_scale=config.hidden_size**0.5,
        final_logit_softcap=3.0,
    )


def describe_gemma_with_normed_heads(fields):
    return describe_gemma(fields, norms_heads=True)


def describe_olmo(fields):
    """Of one head, so that a norm of each head is one of all heads."""
    attention = AttentionSpec(
        None,
        head_sizes(fields),
        qkv_bias=False,
        o_bias=False,
        qk_norm=QKNormSpec(EPS),
        post_norm=NormSpec("post_attention_layernorm", EPS),
    )
    mlp = MLPSpec(
        None,
        fields.integer("intermediate_size"),
        mlp_bias=False,
        post_norm=NormSpec("post_feedforward_layernorm", EPS),
    )
    return decoder_config(fields, [LayerSpec(attention, mlp)] * 4)


MODELS = {
    "Gemma2ForCausalLM": (describe_gemma, None, GEMMA),
    "Gemma3ForCausalLM": (
        describe_gemma_with_normed_heads,
        {"sliding_attention": ROPE, "full_attention": ROPE},
        GEMMA,
    ),
    "Olmo2ForCausalLM": (
        describe_olmo,
        None,
        {"num_attention_heads": 1, "num_key_value_heads": 1, "rms_norm_eps": EPS},
    ),
}


@pytest.fixture
def make(make_checkpoint, monkeypatch):
    """(architecture, seed) -> a checkpoint of a model described here."""
    families = {name: describe for name, (describe, *_) in MODELS.items()}
    monkeypatch.setattr(registry, "FAMILIES", {**registry.FAMILIES, **families})

    def build(architecture, seed):
        _, rope, overrides = MODELS[architecture]
        made = make_checkpoint(architecture, rope, seed=seed, **overrides)
        path = made.path / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "rope_parameters": ROPE}))
        return made

    return build


def assert_close(ours, reference):
    for logits, expected in zip(ours, reference, strict=True):
        assert torch.allclose(logits.log_softmax(-1), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "pp_size", "tp_size"),
    [
        ("Gemma2ForCausalLM", 1, 1),
        ("Gemma2ForCausalLM", 3, 1),
        ("Gemma2ForCausalLM", 2, 2),
        ("Gemma3ForCausalLM", 2, 2),
        ("Olmo2ForCausalLM", 2, 1),
    ],
)
def test_stages_agree_with_transformers(
    make,
    random_sequences,
    stages_of,
    paged_run,
    reference_logprobs,
    on_tensor_parallel_ranks,
    architecture,
    pp_size,
    tp_size,
):
    made = make(architecture, seed=31)
    sequences = random_sequences(LENGTHS, seed=32)

    def prefill(tp):
        return paged_run(stages_of(made.path, pp_size, tp), sequences).prefill()

    results = (
        [prefill(SingleRank())] if tp_size == 1 else on_tensor_parallel_ranks(tp_size, prefill)
    )
    for ours in results:
        assert_close(ours, reference_logprobs(made.hf_model, sequences))


@pytest.mark.parametrize("architecture", MODELS)
def test_chunks_and_decodes_agree_with_one_pass(
    make, random_sequences, stages_of, paged_run, reference_logprobs, architecture
):
    made = make(architecture, seed=33)
    sequences = random_sequences((11, 14), seed=34)
    run = paged_run(stages_of(made.path, 2, partition=[3, 1]), sequences)
    steps = [run.step(counts).split(counts) for counts in ([6, 9], [1, 1], [1, 1], [3, 3])]
    ours = [torch.cat(parts) for parts in zip(*steps, strict=True)]
    assert_close(ours, reference_logprobs(made.hf_model, sequences))


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
        def forward(self, x):
            return x

        def forward_normed(self, source):
            return ops.sum_and_norm(source)

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

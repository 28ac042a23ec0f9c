"""Our stages against transformers: logprobs of random tiny checkpoints, every architecture and
RoPE variant."""

import pytest
import torch

from worker_daemon.layers.attention import NullAttention
from worker_daemon.layers.torch_attention import TorchPagedAttention

pytestmark = pytest.mark.each_value  # make test-all runs every combination

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
    "yarn_full": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 24,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.5,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 24,
        "attention_factor": 0.7,
    },
}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 7}
GLM = {"head_dim": 16, "attention_bias": True}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
GPT_OSS = {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2}
MODELS = {
    "llama": ("LlamaForCausalLM", {}),
    "llama_bias_tied": (
        "LlamaForCausalLM",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama_head_dim": ("LlamaForCausalLM", {"head_dim": 16, "num_key_value_heads": 4}),
    "mistral_window": ("MistralForCausalLM", {"sliding_window": 6}),
    "mistral_full": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2_window_tied": ("Qwen2ForCausalLM", {**QWEN_WINDOW, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3_bias_window": (
        "Qwen3ForCausalLM",
        {**QWEN_WINDOW, "attention_bias": True, "head_dim": 20, "num_key_value_heads": 1},
    ),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA, "final_logit_softcapping": 3.0}),
    "gemma2_plain": (
        "Gemma2ForCausalLM",
        {
            "head_dim": 20,
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": ("Gemma3ForCausalLM", {**GEMMA, "sliding_window_pattern": 2}),
    "glm": ("GlmForCausalLM", {**GLM, "attention_bias": False}),
    "glm4": ("Glm4ForCausalLM", GLM),
    "olmo2": ("Olmo2ForCausalLM", {"rms_norm_eps": 1e-3}),
    "olmo2_bias": ("Olmo2ForCausalLM", {"attention_bias": True, "num_key_value_heads": 1}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 6}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral_window": ("MixtralForCausalLM", {"num_local_experts": 3, "sliding_window": 6}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", EXPERTS | {"shared_expert_intermediate_size": 40}),
    "qwen2_moe_mixed": (
        "Qwen2MoeForCausalLM",
        {
            **EXPERTS,
            **QWEN_WINDOW,
            "shared_expert_intermediate_size": 56,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe_mixed": (
        "Qwen3MoeForCausalLM",
        {**EXPERTS, **QWEN_WINDOW, "attention_bias": True, "mlp_only_layers": [0, 2]},
    ),
    "gpt_oss": ("GptOssForCausalLM", {**GPT_OSS, "sliding_window": 7}),
    "gpt_oss_limited": (
        "GptOssForCausalLM",
        {**GPT_OSS, "num_local_experts": 3, "swiglu_limit": 0.4, "swiglu_alpha": 0.9},
    ),
}
LENGTHS = (1, 5, 40, 13)
TOLERANCE = 1e-4


def assert_close(ours, reference):
    for logits, expected in zip(ours, reference, strict=True):
        assert (logits.log_softmax(-1) - expected).abs().max().item() <= TOLERANCE


@pytest.mark.parametrize("form", [4, 5])
@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"],
)
def test_every_rope_variant_in_both_config_forms(
    make_checkpoint,
    random_sequences,
    stages_of,
    paged_run,
    reference_logprobs,
    architecture,
    rope,
    form,
):
    made = make_checkpoint(architecture, rope, form, seed=1, num_hidden_layers=2)
    sequences = random_sequences(LENGTHS, seed=2)
    ours = paged_run(stages_of(made.path), sequences).prefill()
    assert_close(ours, reference_logprobs(made.hf_model, sequences))


@pytest.mark.parametrize("form", [4, 5])
@pytest.mark.parametrize("attention", [{}, {"factor": 5.0}, {"attention_factor": 1.3}], ids=str)
@pytest.mark.parametrize(
    ("original", "lengths"), [(12, (13, 40, 25)), (96, (1, 5, 40, 96))], ids=["long", "short"]
)
def test_longrope_chooses_its_factors_by_the_longest_context(
    make_checkpoint,
    random_sequences,
    stages_of,
    paged_run,
    reference_logprobs,
    original,
    lengths,
    attention,
    form,
):
    """The stages are built for contexts of 96 tokens. transformers chooses by each prompt."""
    factors = torch.rand(2, 6, generator=torch.Generator().manual_seed(original)) * 3 + 1
    rope = {
        "rope_type": "longrope",
        "short_factor": factors[0].tolist(),
        "long_factor": factors[1].tolist(),
        "original_max_position_embeddings": original,
        **attention,
    }
    made = make_checkpoint(
        "LlamaForCausalLM", rope, form, num_hidden_layers=2, max_position_embeddings=384
    )
    sequences = random_sequences(lengths, seed=2)
    ours = paged_run(stages_of(made.path), sequences).prefill()
    assert_close(ours, reference_logprobs(made.hf_model, sequences))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("pp_size", [1, 2, 3])
def test_every_architecture_split_over_pipeline_stages(
    make_checkpoint, random_sequences, stages_of, paged_run, reference_logprobs, model, pp_size
):
    architecture, overrides = model
    made = make_checkpoint(architecture, seed=3, **overrides)
    sequences = random_sequences(LENGTHS, seed=4)
    ours = paged_run(stages_of(made.path, pp_size), sequences).prefill()
    assert_close(ours, reference_logprobs(made.hf_model, sequences))
    whole = paged_run(stages_of(made.path), sequences).prefill()
    assert all(torch.equal(a, b) for a, b in zip(ours, whole, strict=True))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_chunked_prefill_and_decode_match_one_pass(
    make_checkpoint, random_sequences, stages_of, paged_run, reference_logprobs, model
):
    architecture, overrides = model
    made = make_checkpoint(architecture, seed=5, **overrides)
    sequences = random_sequences((11, 23, 17), seed=6)
    run = paged_run(stages_of(made.path, 2, partition=[3, 1]), sequences, seed=7)
    pieces = [[], [], []]
    while any(done < len(s) for done, s in zip(run.done, sequences, strict=True)):
        counts = [
            min(wish, len(s) - done)
            for wish, s, done in zip((1, 9, 4), sequences, run.done, strict=True)
        ]
        active = [count for count in counts if count]
        logits = iter(run.step(counts, num_padding=3).split(active))
        for parts, count in zip(pieces, counts, strict=True):
            if count:
                parts.append(next(logits))
    ours = [torch.cat(parts) for parts in pieces]
    assert_close(ours, reference_logprobs(made.hf_model, sequences))


@pytest.mark.parametrize(
    ("model", "tp_size", "overrides"),
    [
        ("llama_bias_tied", 2, {}),
        ("llama_bias_tied", 4, {}),
        ("mistral_window", 2, {}),
        ("qwen2", 4, {"vocab_size": 70}),
        ("qwen3", 2, {}),
        ("qwen3_bias_window", 2, {}),
        ("gemma2", 2, {}),
        ("gemma3", 4, {"num_key_value_heads": 2}),
        ("glm4", 2, {}),
        ("olmo2", 4, {}),
        ("phi3", 2, {}),
        ("mixtral", 2, {}),
        ("qwen2_moe", 2, {}),
        ("qwen2_moe_mixed", 4, {}),
        ("qwen3_moe", 2, {}),
        ("qwen3_moe_mixed", 2, {}),
    ],
)
def test_tensor_parallel_ranks_agree_with_transformers(
    make_checkpoint,
    random_sequences,
    stages_of,
    paged_run,
    reference_logprobs,
    on_tensor_parallel_ranks,
    model,
    tp_size,
    overrides,
):
    architecture, base = MODELS[model]
    made = make_checkpoint(architecture, seed=8, **{**base, **overrides})
    sequences = random_sequences(LENGTHS, seed=9, vocab_size=overrides.get("vocab_size", 131))

    def prefill(tp):
        return paged_run(stages_of(made.path, 2, tp), sequences).prefill()

    expected = reference_logprobs(made.hf_model, sequences)
    for ours in on_tensor_parallel_ranks(tp_size, prefill):
        assert_close(ours, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_transformers(
    make_checkpoint, random_sequences, stages_of, paged_run, reference_logprobs, dtype
):
    made = make_checkpoint("Qwen3ForCausalLM", seed=10, head_dim=16)
    sequences = random_sequences((40, 60, 33), seed=11)
    exact = torch.cat(reference_logprobs(made.hf_model, sequences))
    run = paged_run(stages_of(made.path, dtype=dtype), sequences)
    run.caches = [[cache.to(dtype) for cache in caches] for caches in run.caches]
    ours = torch.cat(run.prefill()).log_softmax(-1)
    theirs = torch.cat(reference_logprobs(made.hf_model.to(dtype), sequences))
    assert (ours - exact).pow(2).mean().sqrt() <= 1.5 * (theirs - exact).pow(2).mean().sqrt()


def test_a_sequence_does_not_depend_on_its_neighbours(
    make_checkpoint, random_sequences, stages_of, paged_run
):
    made = make_checkpoint("MistralForCausalLM", seed=12, sliding_window=8)
    stages = stages_of(made.path)
    sequences = random_sequences((19, 3, 31), seed=13)
    together = paged_run(stages, sequences, seed=14).prefill()
    alone = [paged_run(stages, [s], seed=15).prefill()[0] for s in sequences]
    assert_close(together, [logits.log_softmax(-1) for logits in alone])


def test_null_attention_needs_no_cache_and_can_be_replaced(
    make_checkpoint, random_sequences, stages_of, paged_run, reference_logprobs
):
    made = make_checkpoint("LlamaForCausalLM", seed=16)
    sequences = random_sequences((9,), seed=17)
    (stage,) = stages_of(made.path)
    run = paged_run([stage], sequences)
    caches = run.caches
    stage.set_attention(NullAttention())
    run.caches = [[]]
    assert torch.isfinite(run.prefill()[0]).all()
    stage.set_attention(TorchPagedAttention())
    run.caches, run.done = caches, [0]
    assert_close(run.prefill(), reference_logprobs(made.hf_model, sequences))


def test_stage_reports_its_size_and_cache_layers(make_checkpoint, stages_of):
    made = make_checkpoint("Qwen2ForCausalLM", seed=18, **QWEN_WINDOW, tie_word_embeddings=True)
    first, last = stages_of(made.path, 2, partition=[3, 1])
    assert [spec.name for spec in first.kv_layer_specs + last.kv_layer_specs] == [
        f"model.layers.{i}.self_attn" for i in range(4)
    ]
    assert [spec.window for spec in first.kv_layer_specs] == [None, None, 7]
    assert {(s.num_kv_heads, s.head_dim) for s in last.kv_layer_specs} == {(2, 12)}
    state = made.hf_model.state_dict()
    for stage in (first, last):
        views = stage.checkpoint_views()
        assert all(torch.equal(view, state[name]) for name, view in views.items())
        padding = (192 - 131) * 48 * 4
        assert stage.num_parameters_bytes == padding + sum(v.numel() * 4 for v in views.values())
    assert "model.embed_tokens.weight" in last.checkpoint_views()

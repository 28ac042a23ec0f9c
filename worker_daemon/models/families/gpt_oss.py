"""GPT-OSS (OpenAI, 2025), with experts in MXFP4 or unquantized."""

from worker_daemon.contracts.experts import ClampedSwiGLU
from worker_daemon.layers.expert_pieces import ExpertsForm
from worker_daemon.layers.mxfp4 import MXFP4_BLOCK
from worker_daemon.models.config_fields import (
    alternating_windows,
    decoder_config,
    dense_layer,
    head_sizes,
    intermediate_size,
    with_attention,
)
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.expert_fields import count_field, with_experts
from worker_daemon.models.fields import Fields
from worker_daemon.models.quantization import read_mxfp4

_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "torch_dtype": "bfloat16",
}
"""Fields that transformers fills in, the dtype from the tensors: OpenAI's config.json has none."""
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The rotation that transformers fills in."""


def describe(fields: Fields) -> DecoderConfig:
    """Return a decoder whose attention has sinks and, unless attention_bias is false, biases; all
    its layers have experts with biases. By layer_types, or else every second layer from the first,
    layers have a window. Routing weights are a softmax over the chosen experts, rounded to the
    model's dtype."""
    experts = count_field(fields)
    fields = fields.with_defaults({**_DEFAULTS, experts: 128})
    if fields.is_empty("rope_scaling") and fields.is_empty("rope_parameters"):
        fields = fields.with_values({"rope_parameters": _ROPE})
    bias = fields.flag("attention_bias", True)
    dense = dense_layer(fields, head_sizes(fields), qkv_bias=bias, o_bias=bias)
    dense = with_attention(dense, has_sinks=True)
    clamped = ClampedSwiGLU(fields.number("swiglu_alpha"), fields.number("swiglu_limit"))
    windows = alternating_windows(fields, period=2)
    layers = [
        with_experts(
            fields,
            with_attention(dense, sliding_window=window),
            count_field=experts,
            intermediate_size=intermediate_size(fields),
            renormalize=True,
            rounds_weights=True,
            router="router",
            has_biases=True,
            clamped=clamped,
            checkpoint_form=form,
        )
        for window, form in zip(windows, _forms(fields, len(windows)), strict=True)
    ]
    return decoder_config(fields, layers)


def _forms(fields: Fields, num_layers: int) -> list[ExpertsForm]:
    """Return the form of each layer's experts in the checkpoint."""
    names = [f"model.layers.{index}.mlp.experts" for index in range(num_layers)]
    ignored = read_mxfp4(fields, names)
    if ignored is None:
        return ["interleaved"] * num_layers
    for name in ("hidden_size", "intermediate_size"):
        if fields.integer(name) % MXFP4_BLOCK:
            problem = f"is not a multiple of {MXFP4_BLOCK}, the MXFP4 block size"
            raise fields.error(name, problem, "use the unquantized checkpoint")
    return ["interleaved" if ignored.has(name) else "mxfp4" for name in names]

"""GLM-4 (GLM Team, 2024)."""

from worker_daemon.layers.norm import NormSpec
from worker_daemon.models.config_fields import (
    decoder_config,
    dense_layer,
    head_sizes,
    model_rope,
    norm_eps,
    num_layers,
    with_attention,
    with_mlp,
)
from worker_daemon.models.description import DecoderConfig, LayerSpec
from worker_daemon.models.fields import Fields

_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
}
"""Fields that transformers fills in."""


def describe(fields: Fields) -> DecoderConfig:
    """Return identical layers of the models of 2024."""
    fields = fields.with_defaults(_DEFAULTS)
    return decoder_config(fields, [_layer(fields)] * num_layers(fields))


def describe_0414(fields: Fields) -> DecoderConfig:
    """Return identical layers of the models of April 2025, with norms after the blocks too."""
    fields = fields.with_defaults(_DEFAULTS)
    layer, eps = _layer(fields), norm_eps(fields)
    layer = with_attention(layer, post_norm=NormSpec("post_self_attn_layernorm", eps))
    layer = with_mlp(layer, post_norm=NormSpec("post_mlp_layernorm", eps))
    return decoder_config(fields, [layer] * num_layers(fields))


def _layer(fields: Fields) -> LayerSpec:
    """Return a layer that rotates adjacent elements of half of each head; gate and up are one
    tensor."""
    heads, bias = head_sizes(fields), fields.flag("attention_bias", True)
    rope = model_rope(fields, heads.head_dim, default_share=0.5, interleaved=True)
    layer = dense_layer(fields, heads, qkv_bias=bias, rope=rope)
    return with_mlp(layer, fused_gate_up=True)

"""Gemma 2 (Gemma Team, 2024) and the text model of Gemma 3 (Gemma Team, 2025)."""

from collections.abc import Sequence
from dataclasses import replace

from worker_daemon.layers.attention import AttentionSpec, HeadSizes
from worker_daemon.layers.mlp import MLPSpec
from worker_daemon.layers.norm import NormSpec, QKNormSpec
from worker_daemon.layers.rotary import Rope
from worker_daemon.models.config_fields import (
    alternating_windows,
    decoder_config,
    head_sizes,
    intermediate_size,
    layer_type_ropes,
    model_rope,
    norm_eps,
    require_text,
    with_attention,
)
from worker_daemon.models.description import DecoderConfig, LayerSpec
from worker_daemon.models.fields import Fields

_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
}
"""Fields that transformers fills in, of both releases. Published multimodal checkpoints of Gemma 3
leave out whatever equals a default, even sizes."""
_GEMMA2_DEFAULTS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window_pattern": 6,
}


def describe_gemma2(fields: Fields) -> DecoderConfig:
    """Return layers of which every other one has a window; attention scores and logits are
    soft-capped."""
    fields = fields.with_defaults(_DEFAULTS | _GEMMA2_DEFAULTS)
    heads = head_sizes(fields)
    layer = _layer(fields, heads, model_rope(fields, heads.head_dim))
    softcap = fields.optional_number("attn_logit_softcapping")
    layers = [
        with_attention(layer, sliding_window=window, logit_softcap=softcap)
        for window in alternating_windows(fields, period=2)
    ]
    return _config(fields, layers)


def describe_gemma3(fields: Fields) -> DecoderConfig:
    """Return layers with norms on the heads. Those with a window, five of six, have a rotation of
    their own."""
    fields = fields.with_defaults(_DEFAULTS | _GEMMA3_DEFAULTS)
    if fields.optional_number("attn_logit_softcapping") is not None:
        raise fields.error("attn_logit_softcapping", "is not supported in Gemma 3", "use null")
    heads = head_sizes(fields)
    qk_norm = QKNormSpec(norm_eps(fields), weight_offset=1.0)
    full, sliding = (
        with_attention(_layer(fields, heads, rope), qk_norm=qk_norm)
        for rope in layer_type_ropes(fields, heads.head_dim)
    )
    layers = [
        full if window is None else with_attention(sliding, sliding_window=window)
        for window in alternating_windows(fields, fields.integer("sliding_window_pattern"))
    ]
    return _config(fields, layers)


def _layer(fields: Fields, heads: HeadSizes, rope: Rope) -> LayerSpec:
    """Return a layer without a window."""
    require_text(fields, "hidden_activation", "gelu_pytorch_tanh")
    bias = fields.flag("attention_bias", False)
    attention = AttentionSpec(
        norm=_norm(fields, "input_layernorm"),
        heads=heads,
        qkv_bias=bias,
        o_bias=bias,
        rope=rope,
        post_norm=_norm(fields, "post_attention_layernorm"),
        scale=fields.number("query_pre_attn_scalar") ** -0.5,
    )
    mlp = MLPSpec(
        norm=_norm(fields, "pre_feedforward_layernorm"),
        intermediate_size=intermediate_size(fields),
        mlp_bias=False,
        activation="gelu_tanh",
        post_norm=_norm(fields, "post_feedforward_layernorm"),
    )
    return LayerSpec(attention, mlp)


def _norm(fields: Fields, name: str) -> NormSpec:
    """Return a norm whose checkpoint has its weights minus 1."""
    return NormSpec(name, norm_eps(fields), weight_offset=1.0)


def _config(fields: Fields, layers: Sequence[LayerSpec]) -> DecoderConfig:
    """Return the decoder, which scales embeddings by the root of their size."""
    if fields.flag("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention", "is not supported", "use a decoder")
    config = decoder_config(fields, layers)
    return replace(
        config,
        final_norm=_norm(fields, "norm"),
        embedding_scale=config.hidden_size**0.5,
        final_logit_softcap=fields.optional_number("final_logit_softcapping"),
    )

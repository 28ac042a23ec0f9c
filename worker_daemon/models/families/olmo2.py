"""OLMo 2 (OLMo Team, 2025)."""

from worker_daemon.layers.norm import NormSpec, QKNormSpec
from worker_daemon.models.config_fields import (
    decoder_config,
    dense_layer,
    head_sizes,
    norm_eps,
    num_layers,
    with_attention,
    with_mlp,
)
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.fields import Fields

_DEFAULTS = {"rms_norm_eps": 1e-5, "eos_token_id": 50279}
"""Fields that transformers fills in."""


def describe(fields: Fields) -> DecoderConfig:
    """Return identical layers with norms after their blocks, none before, and one norm on all
    queries and one on all keys."""
    fields = fields.with_defaults(_DEFAULTS)
    bias, eps = fields.flag("attention_bias", False), norm_eps(fields)
    layer = dense_layer(fields, head_sizes(fields), qkv_bias=bias, o_bias=bias)
    layer = with_attention(
        layer,
        norm=None,
        post_norm=NormSpec("post_attention_layernorm", eps),
        qk_norm=QKNormSpec(eps, spans_heads=True),
    )
    layer = with_mlp(layer, norm=None, post_norm=NormSpec("post_feedforward_layernorm", eps))
    return decoder_config(fields, [layer] * num_layers(fields))

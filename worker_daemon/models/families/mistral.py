"""Mistral (Jiang et al., 2023)."""

from worker_daemon.layers.attention import AttentionSpec
from worker_daemon.layers.mlp import MLPSpec
from worker_daemon.layers.norm import NormSpec
from worker_daemon.models.config_fields import (
    decoder_config,
    head_sizes,
    intermediate_size,
    norm_eps,
    num_layers,
    sliding_window,
)
from worker_daemon.models.description import DecoderConfig, LayerSpec
from worker_daemon.models.fields import Fields


def describe(fields: Fields) -> DecoderConfig:
    """Identical layers without biases; all have the window."""
    eps = norm_eps(fields)
    attention = AttentionSpec(
        norm=NormSpec("input_layernorm", eps),
        heads=head_sizes(fields, default_num_kv_heads=8),
        qkv_bias=False,
        o_bias=False,
        sliding_window=sliding_window(fields),
    )
    mlp = MLPSpec(
        norm=NormSpec("post_attention_layernorm", eps),
        intermediate_size=intermediate_size(fields),
        mlp_bias=False,
    )
    layers = [LayerSpec(attention, mlp)] * num_layers(fields)
    return decoder_config(fields, layers, default_eos_token_ids=(2,))

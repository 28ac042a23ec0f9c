"""Llama 1 to 3 (Touvron et al., 2023; Grattafiori et al., 2024)."""

from worker_daemon.layers.attention import AttentionSpec
from worker_daemon.layers.mlp import MLPSpec
from worker_daemon.layers.norm import NormSpec
from worker_daemon.models.config_fields import (
    decoder_config,
    head_sizes,
    intermediate_size,
    norm_eps,
    num_layers,
)
from worker_daemon.models.description import DecoderConfig, LayerSpec
from worker_daemon.models.fields import Fields


def describe(fields: Fields) -> DecoderConfig:
    """Identical layers; one switch for the biases of attention, one for those of the MLP."""
    eps = norm_eps(fields)
    attention_bias = fields.flag("attention_bias", False)
    attention = AttentionSpec(
        norm=NormSpec("input_layernorm", eps),
        heads=head_sizes(fields),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
    )
    mlp = MLPSpec(
        norm=NormSpec("post_attention_layernorm", eps),
        intermediate_size=intermediate_size(fields),
        mlp_bias=fields.flag("mlp_bias", False),
    )
    layers = [LayerSpec(attention, mlp)] * num_layers(fields)
    return decoder_config(fields, layers, default_eos_token_ids=(2,))

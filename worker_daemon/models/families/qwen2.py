"""Qwen2 and Qwen2.5 (Yang et al., 2024)."""

from dataclasses import replace

from worker_daemon.layers.attention import AttentionSpec
from worker_daemon.layers.mlp import MLPSpec
from worker_daemon.layers.norm import NormSpec
from worker_daemon.models.config_fields import (
    decoder_config,
    head_sizes,
    intermediate_size,
    norm_eps,
    upper_layer_windows,
)
from worker_daemon.models.description import DecoderConfig, LayerSpec
from worker_daemon.models.fields import Fields


def describe(fields: Fields) -> DecoderConfig:
    """Biases only of the query, key and value projections; some layers may have a window."""
    eps = norm_eps(fields)
    attention = AttentionSpec(
        norm=NormSpec("input_layernorm", eps),
        heads=head_sizes(fields, default_num_kv_heads=32),
        qkv_bias=True,
        o_bias=False,
    )
    mlp = MLPSpec(
        norm=NormSpec("post_attention_layernorm", eps),
        intermediate_size=intermediate_size(fields),
        mlp_bias=False,
    )
    windows = upper_layer_windows(fields)
    layers = [LayerSpec(replace(attention, sliding_window=window), mlp) for window in windows]
    return decoder_config(fields, layers)

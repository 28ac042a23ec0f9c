"""Phi-3 (Abdin et al., 2024), also the architecture of Phi-3.5, Phi-4 and Phi-4-mini."""

from worker_daemon.models.config_fields import (
    decoder_config,
    dense_layer,
    head_sizes,
    model_rope,
    num_layers,
    sliding_window,
    with_attention,
    with_mlp,
)
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.fields import Fields

_DEFAULTS = {"rms_norm_eps": 1e-5, "eos_token_id": 32000, "original_max_position_embeddings": 4096}
"""Fields that transformers fills in."""


def describe(fields: Fields) -> DecoderConfig:
    """Return identical layers without biases; query, key and value projections are one tensor, gate
    and up another."""
    fields = _with_current_name(fields.with_defaults(_DEFAULTS))
    heads, window = head_sizes(fields), sliding_window(fields)
    rope = model_rope(fields, heads.head_dim, default_share=1.0)
    layer = dense_layer(fields, heads, window=window, rope=rope)
    layer = with_mlp(with_attention(layer, fused_qkv=True), fused_gate_up=True)
    return decoder_config(fields, [layer] * num_layers(fields))


def _with_current_name(fields: Fields) -> Fields:
    """Return the fields with LongRoPE under its name: early checkpoints call it su, or yarn."""
    scaling = fields.optional_object("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type")) not in ("su", "yarn"):
        return fields
    return fields.with_values({"rope_scaling": {**scaling, "rope_type": "longrope"}})

"""Mixtral (Jiang et al., 2024)."""

from worker_daemon.models.config_fields import (
    decoder_config,
    dense_layer,
    head_sizes,
    intermediate_size,
    num_layers,
)
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.expert_fields import with_experts
from worker_daemon.models.fields import Fields


def describe(fields: Fields) -> DecoderConfig:
    """Return identical layers with experts, without biases; all have the window, if there is one.
    Weights are those of the chosen experts alone, in float32."""
    fields = fields.with_defaults({"rms_norm_eps": 1e-5, "rope_theta": 1e6})
    window = fields.optional_integer("sliding_window")
    dense = dense_layer(fields, head_sizes(fields, default_num_kv_heads=8), window=window)
    layer = with_experts(
        fields,
        dense,
        count_field="num_local_experts",
        default_count=8,
        default_top_k=2,
        intermediate_size=intermediate_size(fields),
        renormalize=True,
        rounds_weights=False,
    )
    return decoder_config(fields, [layer] * num_layers(fields), default_eos_token_ids=(2,))

"""Qwen3 with experts (Yang et al., 2025)."""

from worker_daemon.models.config_fields import (
    decoder_config,
    dense_layer,
    head_sizes,
    num_layers,
    sliding_window,
)
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.expert_fields import (
    count_field,
    expert_size,
    with_experts,
    with_sparse_layers,
)
from worker_daemon.models.fields import Fields

_DEFAULTS = {
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
"""Fields that transformers fills in."""


def describe(fields: Fields) -> DecoderConfig:
    """Return layers with norms on the query and key heads and one switch for attention biases; all
    have the window, if it is used. Some layers may have an MLP instead of experts."""
    experts = count_field(fields)
    fields = fields.with_defaults({**_DEFAULTS, experts: 128})
    bias = fields.flag("attention_bias", False)
    window = sliding_window(fields) if fields.flag("use_sliding_window", False) else None
    heads = head_sizes(fields)
    dense = dense_layer(fields, heads, qkv_bias=bias, o_bias=bias, head_norms=True, window=window)
    sparse = with_experts(
        fields,
        dense,
        count_field=experts,
        intermediate_size=expert_size(fields, "moe_intermediate_size"),
        renormalize=fields.flag("norm_topk_prob", False),
        rounds_weights=True,
    )
    count = num_layers(fields)
    return decoder_config(fields, with_sparse_layers(fields, [dense] * count, [sparse] * count))

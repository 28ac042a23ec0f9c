"""Qwen1.5 and Qwen2 with experts (Yang et al., 2024)."""

from worker_daemon.layers.experts import SharedExpertSpec
from worker_daemon.models.config_fields import (
    decoder_config,
    dense_layer,
    head_sizes,
    num_layers,
    upper_layer_windows,
)
from worker_daemon.models.description import DecoderConfig, LayerSpec
from worker_daemon.models.expert_fields import (
    count_field,
    expert_size,
    with_experts,
    with_sparse_layers,
)
from worker_daemon.models.fields import Fields

_DEFAULTS = {
    "num_key_value_heads": 16,
    "qkv_bias": True,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
"""Fields that transformers fills in."""


def describe(fields: Fields) -> DecoderConfig:
    """Return layers with a switch for the biases of the query, key and value projections, and a
    shared expert beside the others. Some layers may have a window, or an MLP instead of experts."""
    experts = count_field(fields)
    fields = fields.with_defaults({**_DEFAULTS, experts: 60})
    heads, bias = head_sizes(fields), fields.flag("qkv_bias", True)
    windows = _windows(fields)
    dense = [dense_layer(fields, heads, qkv_bias=bias, window=window) for window in windows]
    sparse = [_with_experts(fields, layer, experts) for layer in dense]
    return decoder_config(fields, with_sparse_layers(fields, dense, sparse))


def _with_experts(fields: Fields, dense: LayerSpec, experts: str) -> LayerSpec:
    shared = expert_size(fields, "shared_expert_intermediate_size")
    return with_experts(
        fields,
        dense,
        count_field=experts,
        intermediate_size=expert_size(fields, "moe_intermediate_size"),
        renormalize=fields.flag("norm_topk_prob", False),
        rounds_weights=True,
        shared=SharedExpertSpec(shared),
    )


def _windows(fields: Fields) -> tuple[int | None, ...]:
    """Return each layer's window. Without layer_types, every other one of the lower layers has it;
    transformers saves a window that is not used as 0."""
    if not fields.flag("use_sliding_window", False):
        return (None,) * num_layers(fields)
    if fields.optional_texts("layer_types") is not None:
        return upper_layer_windows(fields)
    window = fields.integer("sliding_window")
    lower = fields.integer("max_window_layers", minimum=0)
    return tuple(
        window if layer % 2 == 0 and layer < lower else None for layer in range(num_layers(fields))
    )

"""Fields of config.json that families with experts share. All functions raise ConfigError, which
names field and fix."""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from worker_daemon.contracts.experts import ClampedSwiGLU, Routing
from worker_daemon.layers.expert_pieces import ExpertsForm
from worker_daemon.layers.experts import ExpertsSpec, SharedExpertSpec
from worker_daemon.layers.mlp import MLPSpec
from worker_daemon.models.description import LayerSpec
from worker_daemon.models.expert_tensors import MAX_EXPERTS
from worker_daemon.models.fields import Fields

_MAX_WIDTH: Final = 1 << 20
_ROUTERS: Final = MappingProxyType({"scoring_func": "softmax", "topk_method": "greedy"})
_FACTORS: Final = ("n_group", "topk_group", "routed_scaling_factor")
"""Options of other families' routers; these families' routers have none, or their neutral value."""


def with_experts(
    fields: Fields,
    layer: LayerSpec,
    *,
    count_field: str,
    intermediate_size: int,
    renormalize: bool,
    rounds_weights: bool,
    shared: SharedExpertSpec | None = None,
    router: str = "gate",
    has_biases: bool = False,
    clamped: ClampedSwiGLU | None = None,
    checkpoint_form: ExpertsForm = "separate",
) -> LayerSpec:
    """Return the layer with experts in place of its MLP, after the same norm. count_field: name of
    the field with the number of experts; the others: see ExpertsSpec and Routing."""
    _refuse_other_routers(fields)
    num_experts = fields.integer(count_field, maximum=MAX_EXPERTS)
    top_k = fields.integer("num_experts_per_tok")
    if top_k > num_experts:
        problem = f"is more than the {num_experts} experts of {count_field}"
        raise fields.error("num_experts_per_tok", problem, f"at most {num_experts}")
    assert isinstance(layer.mlp, MLPSpec) and layer.mlp.norm is not None
    experts = ExpertsSpec(
        norm=layer.mlp.norm,
        num_experts=num_experts,
        intermediate_size=intermediate_size,
        routing=Routing(top_k, renormalize, rounds_weights),
        shared=shared,
        router=router,
        has_biases=has_biases,
        clamped=clamped,
        checkpoint_form=checkpoint_form,
    )
    return replace(layer, mlp=experts)


def expert_size(fields: Fields, name: str) -> int:
    """Return the inner size of an expert."""
    return fields.integer(name, maximum=_MAX_WIDTH)


def with_sparse_layers(
    fields: Fields, dense: Sequence[LayerSpec], sparse: Sequence[LayerSpec]
) -> list[LayerSpec]:
    """Return each layer from one of two sequences: every decoder_sparse_step-th has experts, unless
    mlp_only_layers has its index."""
    step = fields.integer("decoder_sparse_step", 1)
    dense_indices = fields.optional_integers("mlp_only_layers") or ()
    return [
        without if index in dense_indices or (index + 1) % step else with_
        for index, (without, with_) in enumerate(zip(dense, sparse, strict=True))
    ]


def count_field(fields: Fields) -> str:
    """Return the field with the number of experts: transformers 5 saves Qwen3's under Mixtral's
    name."""
    return "num_experts" if fields.has("num_experts") else "num_local_experts"


def _refuse_other_routers(fields: Fields) -> None:
    for name, known in _ROUTERS.items():
        if fields.text(name, known) != known:
            raise fields.error(name, "is not supported", f"use a checkpoint with {known}")
    for name in _FACTORS:
        if fields.number(name, 1.0) != 1.0:
            raise fields.error(name, "is not supported", "use a checkpoint with 1")

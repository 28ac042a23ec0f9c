"""Counts of the tokens routed to each expert, from transformers' routers."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
import transformers

LEAST_MARGIN = 1e-5
"""Least difference between the scores of the last chosen expert and the next one, far above the
rounding of float32."""


class NearTie(Exception):
    """An expert is not clearly among the best: choose another prompt."""


def expected_loads(
    model: transformers.PreTrainedModel,
    sequences: Iterable[Sequence[int]],
    least_margin: float = LEAST_MARGIN,
) -> dict[int, list[int]]:
    """Return the tokens routed to each expert, by layer, if every token of these sequences is
    computed once.

    Raises:
        NearTie: rounding could change them.
    """
    found: dict[int, np.ndarray] = {}
    top_k = model.config.num_experts_per_tok
    for sequence in sequences:
        with torch.no_grad():
            output = model(torch.tensor([list(sequence)]), output_router_logits=True)
        scores = [each.reshape(len(sequence), -1).float() for each in output.router_logits]
        for layer, own in zip(_sparse_layers(model), scores, strict=True):
            best = own.topk(top_k + 1)
            if (best.values[:, -2] - best.values[:, -1]).min() < least_margin:
                raise NearTie(f"layer {layer}")
            counts = np.bincount(best.indices[:, :-1].flatten(), minlength=own.shape[1])
            found[layer] = found.get(layer, 0) + counts
    return {layer: counts.tolist() for layer, counts in found.items()}


def _sparse_layers(model: transformers.PreTrainedModel) -> list[int]:
    dense = getattr(model.config, "mlp_only_layers", None) or []
    return [layer for layer in range(model.config.num_hidden_layers) if layer not in dense]


def read_counts(by_layer: Mapping[int, bytes]) -> dict[int, list[int]]:
    """Return the counts of a worker's description."""
    return {layer: np.frombuffer(own, "<i8").tolist() for layer, own in by_layer.items()}

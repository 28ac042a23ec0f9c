"""The experts of tokens, from transformers' routers."""

from collections.abc import Sequence

import numpy as np
import torch
import transformers

LEAST_MARGIN = 1e-5
"""Least difference between the scores of an expert and the next one, far above the rounding of
float32."""


def chosen_experts(
    model: transformers.PreTrainedModel, token_ids: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the experts of each token, [tokens, layers with experts, top_k], the best first, and
    where rounding could change none of a layer's, bool [tokens, layers]."""
    top_k = model.config.num_experts_per_tok
    with torch.no_grad():
        output = model(torch.tensor([list(token_ids)]), output_router_logits=True)
    experts, clear = [], []
    for each in output.router_logits:
        best = each.reshape(len(token_ids), -1).float().topk(top_k + 1)
        experts.append(best.indices[:, :-1].numpy())
        clear.append(-best.values.diff().numpy().max(-1) >= LEAST_MARGIN)
    return np.stack(experts, 1), np.stack(clear, 1)


def assert_experts(
    model: transformers.PreTrainedModel, token_ids: Sequence[int], found: np.ndarray
) -> None:
    """Check the experts reported for a request with these tokens, the last of which none has been
    computed of."""
    expected, clear = chosen_experts(model, token_ids)
    assert found.shape == (len(token_ids) - 1, *expected.shape[1:])
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(found[clear[:-1]], expected[:-1][clear[:-1]])

"""The experts of tokens, from transformers' routers, which may be forced to take others."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import transformers

LEAST_MARGIN = 1e-5
"""Least difference between the scores of an expert and the next one, far above the rounding of
float32."""


@contextmanager
def forced(experts: np.ndarray | None) -> Iterator[None]:
    """Let the routers of one forward pass take these experts for the first tokens, [P, layers with
    experts, top_k]: their own code computes the weights. None forces nothing."""
    if experts is None:
        yield
        return
    layers, choose = iter(range(experts.shape[1])), torch.topk

    def topk(scores, k, dim):
        layer = next(layers, None)
        if layer is None:  # the loss, which the routers' scores bring with them
            return choose(scores, k, dim=dim)
        own = torch.from_numpy(experts[:, layer].astype(np.int64))
        indices = torch.cat((own, choose(scores, k, dim=dim).indices[len(own) :]))
        return scores.gather(1, indices), indices

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "topk", topk)
        yield
    assert next(layers, None) is None, "every router was asked"


def chosen_experts(
    model: transformers.PreTrainedModel,
    token_ids: Sequence[int],
    replayed: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """Return the experts of each token, [tokens, layers with experts, top_k], the best first, where
    rounding could change none of a layer's, bool [tokens, layers], and the log probabilities of the
    next tokens. replayed: experts of the first tokens."""
    top_k = model.config.num_experts_per_tok
    with torch.no_grad(), forced(replayed):
        output = model(torch.tensor([list(token_ids)]), output_router_logits=True)
    experts, clear = [], []
    for each in output.router_logits:
        best = each.reshape(len(token_ids), -1).float().topk(top_k + 1)
        experts.append(best.indices[:, :-1].numpy())
        clear.append(-best.values.diff().numpy().max(-1) >= LEAST_MARGIN)
    found, is_clear = np.stack(experts, 1), np.stack(clear, 1)
    if replayed is not None:
        found[: len(replayed)], is_clear[: len(replayed)] = replayed, True
    return found, is_clear, output.logits[0].float().log_softmax(-1)


def assert_experts(
    model: transformers.PreTrainedModel,
    token_ids: Sequence[int],
    found: np.ndarray,
    replayed: np.ndarray | None = None,
) -> torch.Tensor:
    """Check the experts reported for a request with these tokens, the last of which no step has
    computed. Return the log probabilities of the next tokens."""
    expected, clear, logprobs = chosen_experts(model, token_ids, replayed)
    assert found.shape == (len(token_ids) - 1, *expected.shape[1:])
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(found[clear[:-1]], expected[:-1][clear[:-1]])
    return logprobs

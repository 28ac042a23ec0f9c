"""Paged batches as inputs of attention backends, for their tests."""

from dataclasses import dataclass

import torch

from benchmarks.paged_reference import PagedBatch, Shape
from worker_daemon.contracts.attention import AttentionLayer
from worker_daemon.layers.torch_ops import TorchOps


@dataclass(frozen=True)
class GivenSinks:
    """AttentionSinks with these values."""

    values: torch.Tensor  # [Hq]


def random_sinks(
    num_q_heads: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> GivenSinks:
    """Return sinks of which some outweigh hundreds of keys, and some hardly count."""
    random = torch.Generator(device).manual_seed(seed)
    values = torch.randn(num_q_heads, generator=random, device=device) * 3
    values[0] = 7.0
    return GivenSinks(values.to(dtype))


def layer_of(
    shape: Shape,
    window: int | None = None,
    logit_softcap: float | None = None,
    sinks: GivenSinks | None = None,
) -> AttentionLayer:
    """Return a layer whose queries, keys and values are given."""
    return AttentionLayer(
        TorchOps(),
        shape.num_kv_heads,
        shape.head_dim,
        shape.scale,
        window,
        norms=None,
        logit_softcap=logit_softcap,
        sinks=sinks,
    )


def token_rows(batch: PagedBatch) -> list[torch.Tensor]:
    """Return the indices of each sequence's tokens in the step."""
    tokens = torch.arange(batch.num_real_tokens, device=batch.q.device)
    return list(tokens.split(batch.query_lens))

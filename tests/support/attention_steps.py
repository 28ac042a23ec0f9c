"""Paged batches as inputs of attention backends, for their tests."""

import torch

from benchmarks.paged_reference import PagedBatch, Shape
from worker_daemon.contracts.attention import AttentionLayer
from worker_daemon.layers.torch_ops import TorchOps


def layer_of(shape: Shape, window: int | None = None) -> AttentionLayer:
    """Return a layer whose queries, keys and values are given."""
    return AttentionLayer(TorchOps(), shape.num_kv_heads, shape.scale, window, norms=None)


def token_rows(batch: PagedBatch) -> list[torch.Tensor]:
    """Return the indices of each sequence's tokens in the step."""
    tokens = torch.arange(batch.num_real_tokens, device=batch.q.device)
    return list(tokens.split(batch.query_lens))

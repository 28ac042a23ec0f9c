"""Paged batches as backends of attention get them, for their tests."""

import torch

from benchmarks.paged_reference import PagedBatch, Shape
from worker_daemon.contracts.attention import AttentionLayer
from worker_daemon.layers.torch_ops import TorchOps


def layer_of(shape: Shape, window: int | None = None) -> AttentionLayer:
    """A layer whose queries, keys and values are there already."""
    return AttentionLayer(TorchOps(), shape.num_kv_heads, shape.scale, window, norms=None)


def token_rows(batch: PagedBatch) -> list[torch.Tensor]:
    """The indices of each sequence's tokens in the step."""
    tokens = torch.arange(batch.num_real_tokens, device=batch.q.device)
    return list(tokens.split(batch.query_lens))

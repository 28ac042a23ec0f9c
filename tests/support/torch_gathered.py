"""GatheredAttention in plain torch, in place of the GPU's."""

import torch
from torch.nn import functional

from worker_daemon.contracts.attention import AttentionLayer, AttentionMetadata, KeyRange


class TorchGathered:
    """Keeps what it was called with."""

    def __init__(self) -> None:
        self.gathered: list[KeyRange] = []
        self.attended: list[tuple[int, int, int | None]] = []
        """Queries, keys and window of each chunk."""

    def gather(
        self,
        kv_cache: torch.Tensor,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        keys: KeyRange,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        self.gathered.append(keys)
        position = torch.arange(keys.first, keys.end, device=kv_cache.device)
        table = metadata.block_table[metadata.seq_rows[keys.seq].long()]
        block = table[position // kv_cache.shape[2]].long()
        rows = kv_cache[block, :, position % kv_cache.shape[2]].transpose(0, 1)
        if layer.kv_scales is not None:
            rows = rows.float() * layer.kv_scales.values[:, None, :, None]
        out = rows.new_zeros((2, keys.num_rows, *kv_cache.shape[3:]), dtype=dtype)
        out[:, : position.numel()] = rows
        return out

    def attend(
        self,
        q: torch.Tensor,
        context: torch.Tensor,
        layer: AttentionLayer,
        window: int | None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_queries, num_keys = q.shape[0], context.shape[1]
        self.attended.append((num_queries, num_keys, window))
        queries = torch.arange(num_keys - num_queries, num_keys, device=q.device).unsqueeze(1)
        keys = torch.arange(num_keys, device=q.device)
        visible = keys <= queries
        if window is not None:
            visible &= keys > queries - window
        if lse is not None or layer.logit_softcap is not None or layer.sinks is not None:
            return self._attend_eagerly(q, context, layer, visible, lse)
        parts = (rows.transpose(0, 1).unsqueeze(0) for rows in (q, *context))
        out = functional.scaled_dot_product_attention(
            *parts, attn_mask=visible, scale=layer.scale, enable_gqa=True
        )
        return out.squeeze(0).transpose(0, 1)

    @staticmethod
    def _attend_eagerly(
        q: torch.Tensor,
        context: torch.Tensor,
        layer: AttentionLayer,
        visible: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        """Add the sinks to a softmax that was computed without them, by its log-sum-exp."""
        copies = q.shape[1] // context.shape[2]
        keys, values = context.double().repeat_interleave(copies, 2).unbind(0)
        scores = torch.einsum("lhd,rhd->hlr", q.double(), keys) * layer.scale
        if (cap := layer.logit_softcap) is not None:
            scores = (scores / cap).tanh() * cap
        scores = scores.masked_fill(~visible, float("-inf"))
        weights, sums = scores.softmax(-1), scores.logsumexp(-1)
        if layer.sinks is not None:
            sinks = layer.sinks.values.view(-1, 1)
            weights *= (sums - sinks).sigmoid()[..., None]
            sums = sums.logaddexp(sinks.double())
        if lse is not None:
            lse.copy_(sums.t())
        return torch.einsum("hlr,rhd->lhd", weights, values).to(q.dtype)

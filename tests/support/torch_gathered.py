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
        self, q: torch.Tensor, context: torch.Tensor, scale: float, window: int | None
    ) -> torch.Tensor:
        num_queries, num_keys = q.shape[0], context.shape[1]
        self.attended.append((num_queries, num_keys, window))
        queries = torch.arange(num_keys - num_queries, num_keys, device=q.device).unsqueeze(1)
        keys = torch.arange(num_keys, device=q.device)
        visible = keys <= queries
        if window is not None:
            visible &= keys > queries - window
        parts = (rows.transpose(0, 1).unsqueeze(0) for rows in (q, *context))
        out = functional.scaled_dot_product_attention(
            *parts, attn_mask=visible, scale=scale, enable_gqa=True
        )
        return out.squeeze(0).transpose(0, 1)

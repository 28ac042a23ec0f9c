"""Paged attention in plain torch, for the CPU and as the reference for faster backends.

It calls scaled_dot_product_attention once per sequence, so that a sequence's result does not depend
on the others.
"""

import torch
from torch import Tensor
from torch.nn import functional

from worker_daemon.contracts.attention import AttentionLayer, AttentionMetadata, AttentionStep
from worker_daemon.layers.fp8_cache import dequantize


class TorchPagedAttention:
    """AttentionBackend on any device. Host work grows with the number of sequences, and the host
    waits for the device to read their lengths."""

    def attend(
        self, q: Tensor, kv_cache: Tensor, layer: AttentionLayer, metadata: AttentionMetadata
    ) -> Tensor:
        out = torch.zeros_like(q)
        start = 0
        query_lens = metadata.query_lens_np.tolist()
        seq_lens = metadata.seq_lens[: len(query_lens)].tolist()
        for seq, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            tokens = slice(start, start + query_len)
            start += query_len
            if query_len:
                blocks = metadata.block_table[metadata.seq_rows[seq]]
                out[tokens] = _attend(q[tokens], kv_cache, blocks, seq_len, layer)
        return out

    def rotate_and_attend(
        self, qkv: Tensor, kv_cache: Tensor, layer: AttentionLayer, step: AttentionStep
    ) -> Tensor:
        q = layer.rotate_and_store(qkv, kv_cache, step)
        return self.attend(q, kv_cache, layer, step.metadata)


def _attend(
    q: Tensor, kv_cache: Tensor, blocks: Tensor, seq_len: int, layer: AttentionLayer
) -> Tensor:
    """q [L, Hq, D] at positions seq_len - L to seq_len - 1 -> [L, Hq, D], in float32 if the cache
    is in FP8."""
    query_len, window = q.shape[0], layer.window
    first_position = seq_len - query_len
    first_block = 0
    block_size = kv_cache.shape[2]
    if window is not None:
        first_block = max(0, first_position - window + 1) // block_size
    first_key = first_block * block_size
    num_keys = seq_len - first_key
    pages = kv_cache[blocks[first_block : -(-seq_len // block_size)]]
    keys, values = pages.unbind(1)
    if layer.kv_scales is not None:
        of_keys, of_values = layer.kv_scales.values
        q, keys, values = q.float(), dequantize(keys, of_keys), dequantize(values, of_values)
    keys, values = (
        half.flatten(0, 1)[:num_keys].transpose(0, 1).unsqueeze(0) for half in (keys, values)
    )
    is_causal = query_len == num_keys > 1 and window is None
    mask = None
    if window is not None or not (is_causal or query_len == 1):
        mask = _visible(query_len, num_keys, window, q.device)
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        keys,
        values,
        attn_mask=mask,
        is_causal=is_causal,
        scale=layer.scale,
        enable_gqa=q.shape[1] != keys.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)


def _visible(query_len: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return bool [L, S]: True if query i sees key j; the last query is at the last key."""
    queries = torch.arange(num_keys - query_len, num_keys, device=device).unsqueeze(1)
    keys = torch.arange(num_keys, device=device)
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)

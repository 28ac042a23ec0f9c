"""Paged attention in plain torch, for the CPU and as the reference for faster backends.

It calls scaled_dot_product_attention once per sequence, so that a sequence's result does not depend
on the others. That function neither caps scores nor knows sinks nor returns a log-sum-exp: layers
with either, and calls for it, have a separate softmax, in float32.
"""

import torch
from torch import Tensor
from torch.nn import functional

from worker_daemon.contracts.attention import AttentionLayer, AttentionMetadata, AttentionStep
from worker_daemon.layers.fp8_cache import dequantize

_QUERIES_AT_ONCE = 256
"""Bounds the scores that are in memory at once, unless torch computes them."""


class TorchPagedAttention:
    """AttentionBackend on any device. Host work grows with the number of sequences, and the host
    waits for the device to read their lengths."""

    def attend(
        self,
        q: Tensor,
        kv_cache: Tensor,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        lse: Tensor | None = None,
    ) -> Tensor:
        out = torch.zeros_like(q)
        if lse is not None:
            lse.fill_(-torch.inf)
        start = 0
        query_lens = metadata.query_lens_np.tolist()
        seq_lens = metadata.seq_lens[: len(query_lens)].tolist()
        for seq, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            tokens = slice(start, start + query_len)
            start += query_len
            if query_len:
                blocks = metadata.block_table[metadata.seq_rows[seq]]
                of_seq = None if lse is None else lse[tokens]
                out[tokens] = _attend(q[tokens], kv_cache, blocks, seq_len, layer, of_seq)
        return out

    def rotate_and_attend(
        self,
        qkv: Tensor,
        kv_cache: Tensor,
        layer: AttentionLayer,
        step: AttentionStep,
        lse: Tensor | None = None,
    ) -> Tensor:
        q = layer.rotate_and_store(qkv, kv_cache, step)
        return self.attend(q, kv_cache, layer, step.metadata, lse)

    def merge(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        lse = lses.logsumexp(0)
        # Without keys, the softmax is NaN.
        weights = lses.softmax(0).masked_fill_(lse.isneginf(), 0.0)
        return torch.einsum("pnh,pnhd->nhd", weights, outs.float()).to(outs.dtype), lse


def _attend(
    q: Tensor,
    kv_cache: Tensor,
    blocks: Tensor,
    seq_len: int,
    layer: AttentionLayer,
    lse: Tensor | None,
) -> Tensor:
    """q [L, Hq, D] at positions seq_len - L to seq_len - 1 -> [L, Hq, D], in float32 if the cache
    is in FP8 or the softmax is our own. lse [L, Hq]: see AttentionBackend."""
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
    keys, values = (half.flatten(0, 1)[:num_keys].transpose(0, 1) for half in (keys, values))
    if lse is not None or layer.logit_softcap is not None or layer.sinks is not None:
        return _softmax_of_own(q, keys.float(), values.float(), layer, lse)
    keys, values = keys.unsqueeze(0), values.unsqueeze(0)
    is_causal = query_len == num_keys > 1 and window is None
    mask = None
    if window is not None or not (is_causal or query_len == 1):
        mask = _visible(range(num_keys - query_len, num_keys), num_keys, window, q.device)
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


def _softmax_of_own(
    q: Tensor, keys: Tensor, values: Tensor, layer: AttentionLayer, lse: Tensor | None
) -> Tensor:
    """q [L, Hq, D] at positions S - L to S - 1; keys and values float32 [Hkv, S, D] -> float32 [L,
    Hq, D]. lse [L, Hq]: see AttentionBackend."""
    num_kv_heads, num_keys = keys.shape[:2]
    num_queries, num_q_heads = q.shape[:2]
    sinks = None if layer.sinks is None else layer.sinks.values.float()
    first_row = first = num_keys - num_queries
    pieces = []
    for some in torch.split(q.float(), _QUERIES_AT_ONCE):
        rows = range(first, first + len(some))
        heads = _grouped(some.transpose(0, 1), num_kv_heads)
        scores = (heads @ keys.unsqueeze(1).transpose(2, 3)).flatten(0, 1) * layer.scale
        if layer.logit_softcap is not None:
            scores = (scores / layer.logit_softcap).tanh() * layer.logit_softcap
        scores.masked_fill_(~_visible(rows, num_keys, layer.window, q.device), float("-inf"))
        if sinks is not None:
            of_rows = sinks.view(-1, 1, 1).expand(num_q_heads, len(some), 1)
            scores = torch.cat((scores, of_rows), dim=-1)
        weights = scores.softmax(dim=-1)
        if lse is not None:
            sums = scores.logsumexp(dim=-1)
            lse[rows.start - first_row : rows.stop - first_row] = sums.t()
            # Without keys, the softmax is NaN.
            weights.masked_fill_(sums.isneginf().unsqueeze(-1), 0.0)
        weights = _grouped(weights[..., :num_keys], num_kv_heads)
        pieces.append((weights @ values.unsqueeze(1)).flatten(0, 1).transpose(0, 1))
        first = rows.stop
    return torch.cat(pieces)


def _grouped(heads: Tensor, num_kv_heads: int) -> Tensor:
    """Return [Hq, ...] as [Hkv, G, ...]."""
    return heads.reshape(num_kv_heads, heads.shape[0] // num_kv_heads, *heads.shape[1:])


def _visible(rows: range, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return bool [L, S]: True if the i-th query, at the position rows[i], sees key j."""
    queries = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1)
    keys = torch.arange(num_keys, device=device)
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)

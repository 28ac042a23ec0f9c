"""An attention for tests of steps that are replayed."""

import torch


class TensorAttention:
    """Attention that reads a step only from its device tensors, as a kernel does."""

    def attend(self, q, kv_cache, layer, metadata):
        out = torch.zeros_like(q)
        bounds, size = metadata.query_start_loc.tolist(), kv_cache.shape[2]
        for seq in metadata.seq_order.tolist():
            first, last = bounds[seq], bounds[seq + 1]
            length = int(metadata.seq_lens[seq])
            position = torch.arange(length)
            row = metadata.block_table[metadata.seq_rows[seq].long()].long()
            cached = kv_cache[row[position // size], :, position % size]
            group = q.shape[1] // cached.shape[2]
            k, v = cached.repeat_interleave(group, dim=2).unbind(1)
            scores = torch.einsum("qhd,khd->hqk", q[first:last], k) * layer.scale
            seen = position <= torch.arange(length - (last - first), length).unsqueeze(1)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[first:last] = torch.einsum("hqk,khd->qhd", weights, v)
        return out

    def rotate_and_attend(self, qkv, kv_cache, layer, step):
        q = layer.rotate_and_store(qkv, kv_cache, step)
        return self.attend(q, kv_cache, layer, step.metadata)

"""Attention of whole prompts by an unpaged kernel, for sequences that have all of their context in
one step. All other tokens go to a paged backend.

Shapes: N tokens in the step, Hq query and Hkv KV heads, D head_dim, P the tokens of a plan.

An unpaged kernel needs a plan for each length, and cuDNN takes tenths of a second to make one, so
only a few lengths are served (PLAN_TOKENS). A prompt slightly shorter than a plan is padded, since
a causal query never sees later rows. If it is longer, the plan serves its first tokens (called its
head here, not to be confused with attention heads), and the rest is an ordinary chunk. These
prompt heads read keys and values back from the cache, so that other steps need not keep rotated
keys. At 8,192 tokens with the attention heads of Llama 8B this moves 67 MB, about 16 us on an
H200, compared with 1 ms of attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from worker_daemon.contracts.attention import (
    AttentionBackend,
    AttentionLayer,
    AttentionMetadata,
    AttentionStep,
)
from worker_daemon.contracts.fp8 import FP8
from worker_daemon.contracts.kv_scales import KVScales
from worker_daemon.device.pinned import upload
from worker_daemon.layers.fp8_cache import dequantize

PLAN_TOKENS = (1024, 2048, 4096, 8192, 16384)
"""Ascending powers of two. The warm-up runs all of these sizes, so it makes every plan that a step
may need. Shorter prompts are bound by launches, and the paged kernel needs fewer."""

_PADDED_EIGHTHS = 7
"""A prompt must have at least this many eighths of a plan's length. Padding then costs up to 1.3
times the prompt's attention, while cuDNN is 1.4 times as fast as the paged kernel (560 and 400
TFLOP/s on an H200)."""

WholeAttention = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(q [1, Hq, P, D], k and v [1, Hkv, P, D], scale) -> [1, Hq, P, D], causal; the last dimension is
contiguous, the others have any strides."""


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """WholeAttention by cuDNN. A plan is usable only on the thread that made it.

    Raises:
        RuntimeError: cuDNN has no kernel for these tensors.
    """
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


class PromptAttention:
    """AttentionBackend that computes heads of whole prompts by a WholeAttention, one at a time, and
    all other tokens of the step by one call to a paged backend, which also serves layers with a
    window.

    One object serves all layers, on the step thread only. It keeps the last step's split, which the
    layers share, and with it that step's metadata.
    """

    def __init__(self, paged: AttentionBackend, whole: WholeAttention) -> None:
        self._paged = paged
        self._whole = whole
        self._last: tuple[AttentionMetadata, _Split] | None = None

    def attend(
        self, q: Tensor, kv_cache: Tensor, layer: AttentionLayer, metadata: AttentionMetadata
    ) -> Tensor:
        """See AttentionBackend. kv_cache is contiguous; all layers have the same block size."""
        if not _may_have_heads(metadata, layer.window):
            return self._paged.attend(q, kv_cache, layer, metadata)
        split = self._split(metadata, kv_cache.shape[2])
        if not split.heads:
            return self._paged.attend(q, kv_cache, layer, metadata)
        heads = [self._attend_head(q, kv_cache, head, layer) for head in split.heads]
        gaps = self._attend_gaps(q, kv_cache, layer, split)
        ordered = [gaps[0]]
        for head, gap in zip(heads, gaps[1:], strict=True):
            ordered += [head, gap]
        pieces = [piece for piece in ordered if piece.shape[0]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def rotate_and_attend(
        self, qkv: Tensor, kv_cache: Tensor, layer: AttentionLayer, step: AttentionStep
    ) -> Tensor:
        if not _may_have_heads(step.metadata, layer.window):
            return self._paged.rotate_and_attend(qkv, kv_cache, layer, step)
        q = layer.rotate_and_store(qkv, kv_cache, step)
        return self.attend(q, kv_cache, layer, step.metadata)

    def _split(self, metadata: AttentionMetadata, block_size: int) -> "_Split":
        if self._last is None or self._last[0] is not metadata:
            self._last = metadata, _split_step(metadata, block_size)
        return self._last[1]

    def _attend_head(
        self, q: Tensor, kv_cache: Tensor, head: "_Head", layer: AttentionLayer
    ) -> Tensor:
        """Return the attention output of a head, [length, Hq, D]."""
        if layer.kv_scales is None:
            keys, values = _gather(kv_cache, head)
        else:
            keys, values = _gather_fp8(kv_cache, head, layer.kv_scales, q.dtype)
        queries = _queries(q, head)
        out = self._whole(_one_batch(queries), _one_batch(keys), _one_batch(values), layer.scale)
        return out.squeeze(0).transpose(0, 1)[: head.length]

    def _attend_gaps(
        self, q: Tensor, kv_cache: Tensor, layer: AttentionLayer, split: "_Split"
    ) -> tuple[Tensor, ...]:
        """Return the rows before each head, then those after the last one; each may be empty."""
        queries = [q[gap] for gap in split.gaps]
        filled = [part for part in queries if part.shape[0]]
        if not filled:
            return tuple(queries)
        together = filled[0] if len(filled) == 1 else torch.cat(filled)
        out = self._paged.attend(together, kv_cache, layer, split.others)
        return torch.split(out, [part.shape[0] for part in queries])


class _HeadRange(NamedTuple):
    """A head's place in its step."""

    seq: int
    start: int
    """Its first token."""
    length: int
    """Its tokens, at most num_planned."""
    num_planned: int
    """P"""

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class _Head:
    start: int
    length: int
    num_planned: int
    """See _HeadRange."""
    pages: Tensor
    """int64 [2, P / block_size, rounded up], device: twice the id of each block of its context,
    then the same plus one. Entries past its end are the null block's."""


@dataclass(frozen=True, slots=True)
class _Split:
    heads: tuple[_Head, ...]
    """In the order of their tokens."""
    gaps: tuple[slice, ...]
    """The tokens before each head, then those after the last one."""
    others: AttentionMetadata
    """The metadata of the gaps alone, joined."""


def _may_have_heads(metadata: AttentionMetadata, window: int | None) -> bool:
    return window is None and metadata.max_query_len >= PLAN_TOKENS[0]


def _split_step(metadata: AttentionMetadata, block_size: int) -> _Split:
    query_lens, seq_lens = metadata.query_lens_np, metadata.seq_lens_np
    places = _places(query_lens, seq_lens)
    if not places:
        return _Split((), (), metadata)
    starts = [0, *(place.end for place in places)]
    ends = [*(place.start for place in places), None]
    left = query_lens.copy()
    for place in places:
        left[place.seq] -= place.length
    return _Split(
        tuple(_head(place, metadata, block_size) for place in places),
        tuple(slice(start, end) for start, end in zip(starts, ends, strict=True)),
        _select(metadata, left),
    )


def _places(query_lens: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32]) -> list[_HeadRange]:
    """Return the heads of all whole prompts that are long enough."""
    lengths = query_lens.tolist()
    starts = [0, *accumulate(lengths)]
    chosen = np.flatnonzero((query_lens == seq_lens) & (query_lens >= PLAN_TOKENS[0])).tolist()
    planned = [_num_planned(lengths[seq]) for seq in chosen]
    return [
        _HeadRange(seq, starts[seq], min(lengths[seq], num_planned), num_planned)
        for seq, num_planned in zip(chosen, planned, strict=True)
    ]


def _num_planned(length: int) -> int:
    """Return the largest plan that a prompt of PLAN_TOKENS[0] or more fills, or nearly fills."""
    return max(plan for plan in PLAN_TOKENS if plan * _PADDED_EIGHTHS <= length * 8)


def _head(place: _HeadRange, metadata: AttentionMetadata, block_size: int) -> _Head:
    row = metadata.block_table.index_select(0, metadata.seq_rows[place.seq : place.seq + 1])[0]
    num_blocks = -(-place.length // block_size)
    padding = -(-place.num_planned // block_size) - num_blocks
    blocks = functional.pad(row[:num_blocks].long(), (0, padding))
    pages = torch.stack((2 * blocks, 2 * blocks + 1))
    return _Head(place.start, place.length, place.num_planned, pages)


def _select(metadata: AttentionMetadata, query_lens: npt.NDArray[np.int32]) -> AttentionMetadata:
    """Return the metadata of the sequences that have query tokens left, with that many tokens."""
    seqs = np.flatnonzero(query_lens)
    query_lens, seq_lens = query_lens[seqs], metadata.seq_lens_np[seqs]
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    order = np.argsort(-seq_lens, kind="stable")
    device = metadata.seq_rows.device
    columns = upload(np.concatenate((starts, order, seqs)).astype(np.int32), device)
    query_start_loc, seq_order, seqs_there = torch.split(
        columns, [seqs.size + 1, seqs.size, seqs.size]
    )
    return AttentionMetadata(
        query_start_loc=query_start_loc,
        seq_lens=metadata.seq_lens.index_select(0, seqs_there),
        seq_order=seq_order,
        block_table=metadata.block_table,
        seq_rows=metadata.seq_rows.index_select(0, seqs_there),
        slot_mapping=metadata.slot_mapping[:0],
        num_seqs=seqs.size,
        max_query_len=int(query_lens.max(initial=0)),
        max_seq_len=int(seq_lens.max(initial=0)),
        query_lens_np=query_lens,
        seq_lens_np=seq_lens,
    )


def _gather(kv_cache: Tensor, head: _Head) -> tuple[Tensor, Tensor]:
    """Return keys and values [P, Hkv, D] of a head, zero after its end.

    The kernel multiplies rows past the end by zero, but the rest of a sequence's last block may
    hold NaN.
    """
    block_size, num_kv_heads, head_dim = kv_cache.shape[2:]
    pages = kv_cache.view(-1, block_size * num_kv_heads * head_dim)
    gathered = pages.index_select(0, head.pages.flatten())
    both = gathered.view(2, -1, num_kv_heads, head_dim)[:, : head.num_planned]
    if head.length < head.num_planned:
        both[:, head.length :].zero_()
    return both[0], both[1]


def _gather_fp8(
    kv_cache: Tensor, head: _Head, scales: KVScales, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a cache in FP8 as _gather does, times their scales, in
    dtype."""
    # Not all of torch's operations take FP8, but all take bytes, and zero is the same in both.
    stored = _gather(kv_cache.view(torch.uint8), head)
    keys, values = (
        dequantize(half.view(FP8), scale).to(dtype)
        for half, scale in zip(stored, scales.values, strict=True)
    )
    return keys, values


def _queries(q: Tensor, head: _Head) -> Tensor:
    """Return [P, Hq, D] with the strides of q, on which a plan depends.

    Queries do not affect each other: the rows after the head's end belong to the next sequence, or
    are undefined if the step is too short.
    """
    end = head.start + head.num_planned
    if end <= q.shape[0]:
        return q[head.start : end]
    padded = torch.empty_strided(
        (head.num_planned, *q.shape[1:]), q.stride(), dtype=q.dtype, device=q.device
    )
    padded[: head.length].copy_(q[head.start : head.start + head.length])
    return padded


def _one_batch(rows: Tensor) -> Tensor:
    """[P, heads, D] -> [1, heads, P, D]."""
    return rows.transpose(0, 1).unsqueeze(0)

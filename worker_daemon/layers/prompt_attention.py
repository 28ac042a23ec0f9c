"""Attention of long prompts by unpaged kernels. All other tokens go to a paged backend.

Shapes: N tokens in the step, Hq query and Hkv KV heads, D head_dim, P the tokens of a plan.

A sequence with MIN_TOKENS or more in the step, or fewer after a long context, is a long chunk: a
prompt, or a part of one. Its keys and values are gathered out of the cache into contiguous memory
once a layer, in the model's dtype or, for products in FP8, as they are. At 8,192 tokens with the
attention heads of Llama 8B this moves 67 MB, 20 to 30 us on an H200, compared with 1 ms of
attention. cuDNN needs a plan for each length, so it computes only whole prompts near a few lengths
(PLAN_TOKENS), padded: a causal query never sees later rows. A GatheredAttention computes the
others: after earlier context, with a window, of other lengths, in a layer with a cap or sinks, or
with a log-sum-exp.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

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
    GatheredAttention,
    KeyRange,
)
from worker_daemon.device.pinned import upload

MIN_TOKENS = 1024
"""Shorter chunks are bound by launches, and the paged kernel needs fewer: one for all of them."""

MIN_LATER_TOKENS, LONG_CONTEXT = 256, 16384
"""Chunks of fewer tokens than MIN_TOKENS are long too if their context has LONG_CONTEXT tokens or
more: their attention, which libraries compute faster, then takes most of a layer's time."""

PLAN_TOKENS = (1024, 2048, 4096, 8192, 16384)
"""Ascending powers of two. The warm-up runs all of these sizes, so it makes every plan that a step
may need."""

_PADDED_SIXTEENTHS = 15
"""A prompt must have at least this many sixteenths of a plan's length. Padding then costs up to
1.14 times the prompt's attention, while cuDNN is 1.13 times as fast as our kernel (600 and 530
TFLOP/s on an H200)."""

WholeAttention = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(q [1, Hq, P, D], k and v [1, Hkv, P, D], scale) -> [1, Hq, P, D], causal; the last dimension is
contiguous, the others have any strides."""


def are_long_chunks(
    query_lens: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32]
) -> npt.NDArray[np.bool_]:
    """Return which sequences [B] of a step are long chunks, by their tokens in the step and their
    contexts."""
    fewest = np.where(seq_lens < LONG_CONTEXT, MIN_TOKENS, MIN_LATER_TOKENS)
    # Gathered keys are at least as many as the queries.
    return (query_lens >= fewest) & (seq_lens >= query_lens)


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
    """AttentionBackend that computes long chunks one at a time, and all other tokens of the step by
    one call to a paged backend.

    One object serves all layers, on the step thread only. It keeps the last step's split, which the
    layers share, and with it that step's metadata.
    """

    def __init__(
        self,
        paged: AttentionBackend,
        gathered: GatheredAttention[Any],
        whole: WholeAttention | None = None,
    ) -> None:
        """whole: for whole prompts near a plan's length, over the Tensors that `gathered` then
        gathers; None if there is none."""
        self._paged = paged
        self._gathered = gathered
        self._whole = whole
        self._last: _Split | None = None

    def attend(
        self,
        q: Tensor,
        kv_cache: Tensor,
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        lse: Tensor | None = None,
    ) -> Tensor:
        """See AttentionBackend. kv_cache is contiguous."""
        if not _may_have_chunks(metadata):
            return self._paged.attend(q, kv_cache, layer, metadata, lse)
        split = self._split(metadata)
        if not split.chunks:
            return self._paged.attend(q, kv_cache, layer, metadata, lse)
        chunks = [
            self._attend_chunk(q, kv_cache, chunk, layer, metadata, lse) for chunk in split.chunks
        ]
        others = split.others
        if others.block_table is not metadata.block_table:
            # Groups of layers differ only in their block tables.
            others = replace(others, block_table=metadata.block_table)
        gaps = self._attend_gaps(q, kv_cache, layer, split.gaps, others, lse)
        ordered = [gaps[0]]
        for chunk, gap in zip(chunks, gaps[1:], strict=True):
            ordered += [chunk, gap]
        pieces = [piece for piece in ordered if piece.shape[0]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def rotate_and_attend(
        self,
        qkv: Tensor,
        kv_cache: Tensor,
        layer: AttentionLayer,
        step: AttentionStep,
        lse: Tensor | None = None,
    ) -> Tensor:
        if not _may_have_chunks(step.metadata):
            return self._paged.rotate_and_attend(qkv, kv_cache, layer, step, lse)
        q = layer.rotate_and_store(qkv, kv_cache, step)
        return self.attend(q, kv_cache, layer, step.metadata, lse)

    def merge(self, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        return self._paged.merge(outs, lses)

    def _split(self, metadata: AttentionMetadata) -> "_Split":
        # All layers share the step's arrays, so their identity tells if the split is of this step.
        if self._last is None or self._last.seq_lens is not metadata.seq_lens_np:
            self._last = _split_step(metadata)
        return self._last

    def _attend_chunk(
        self,
        q: Tensor,
        kv_cache: Tensor,
        chunk: "_LongChunk",
        layer: AttentionLayer,
        metadata: AttentionMetadata,
        lse: Tensor | None,
    ) -> Tensor:
        """Return the attention output of a chunk, [length, Hq, D]. lse [N, Hq]: of the step."""
        window = layer.window
        if window is not None and window >= chunk.seq_len:
            window = None
        is_plain = window is None and layer.logit_softcap is None and layer.sinks is None
        if self._whole is not None and is_plain and lse is None and chunk.num_planned:
            keys = KeyRange(chunk.seq, 0, chunk.seq_len, chunk.num_planned)
            context = self._gathered.gather(kv_cache, layer, metadata, keys, q.dtype)
            queries, (k, v) = _padded_queries(q, chunk), context.unbind(0)
            out = self._whole(_one_batch(queries), _one_batch(k), _one_batch(v), layer.scale)
            return out.squeeze(0).transpose(0, 1)[: chunk.length]
        past = chunk.seq_len - chunk.length
        first = 0 if window is None else max(0, past - window + 1)
        keys = KeyRange(chunk.seq, first, chunk.seq_len, chunk.seq_len - first)
        context = self._gathered.gather(kv_cache, layer, metadata, keys, q.dtype)
        rows = slice(chunk.start, chunk.start + chunk.length)
        of_chunk = None if lse is None else lse[rows]
        return self._gathered.attend(q[rows], context, layer, window, of_chunk)

    def _attend_gaps(
        self,
        q: Tensor,
        kv_cache: Tensor,
        layer: AttentionLayer,
        gaps: tuple[slice, ...],
        others: AttentionMetadata,
        lse: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Return the rows before each chunk, then those after the last one; each may be empty. lse
        [N, Hq]: of the step."""
        queries = [q[gap] for gap in gaps]
        filled = [part for part in queries if part.shape[0]]
        if not filled:
            return tuple(queries)
        together = filled[0] if len(filled) == 1 else torch.cat(filled)
        lengths = [part.shape[0] for part in queries]
        of_gaps = None if lse is None else lse.new_empty(together.shape[:2])
        out = self._paged.attend(together, kv_cache, layer, others, of_gaps)
        if lse is not None and of_gaps is not None:
            for gap, rows in zip(gaps, torch.split(of_gaps, lengths), strict=True):
                lse[gap] = rows
        return torch.split(out, lengths)


@dataclass(frozen=True, slots=True)
class _LongChunk:
    """A long chunk's place in its step."""

    seq: int
    start: int
    """Its first token in the step."""
    length: int
    """Its tokens in the step."""
    seq_len: int
    """Its sequence's tokens, earlier ones included. Exact, though seq_lens_np may be a bound: a
    sequence that has sampled does not compute so many tokens at once."""
    num_planned: int
    """P, or 0 if no plan fits."""


@dataclass(frozen=True, slots=True)
class _Split:
    seq_lens: npt.NDArray[np.int32]
    """The step's seq_lens_np, by which it is known."""
    chunks: tuple[_LongChunk, ...]
    """In the order of their tokens."""
    gaps: tuple[slice, ...]
    """The tokens before each chunk, then those after the last one."""
    others: AttentionMetadata
    """The metadata of the gaps alone, joined."""


def _may_have_chunks(metadata: AttentionMetadata) -> bool:
    """Return False if the step's bounds exclude long chunks."""
    fewest = MIN_TOKENS if metadata.max_seq_len < LONG_CONTEXT else MIN_LATER_TOKENS
    return metadata.max_query_len >= fewest


def _split_step(metadata: AttentionMetadata) -> _Split:
    chunks = _long_chunks(metadata.query_lens_np, metadata.seq_lens_np)
    if not chunks:
        return _Split(metadata.seq_lens_np, (), (), metadata)
    starts = [0, *(chunk.start + chunk.length for chunk in chunks)]
    ends = [*(chunk.start for chunk in chunks), None]
    left = metadata.query_lens_np.copy()
    left[[chunk.seq for chunk in chunks]] = 0
    gaps = tuple(slice(start, end) for start, end in zip(starts, ends, strict=True))
    return _Split(metadata.seq_lens_np, tuple(chunks), gaps, _select(metadata, left))


def _long_chunks(
    query_lens: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32]
) -> list[_LongChunk]:
    are_long = are_long_chunks(query_lens, seq_lens)
    lengths, totals = query_lens.tolist(), seq_lens.tolist()
    starts = [0, *accumulate(lengths)]
    return [
        _LongChunk(
            seq,
            starts[seq],
            lengths[seq],
            totals[seq],
            _num_planned(lengths[seq]) if lengths[seq] == totals[seq] else 0,
        )
        for seq in np.flatnonzero(are_long).tolist()
    ]


def _num_planned(length: int) -> int:
    """Return the plan that a whole prompt fills, or nearly fills, or 0."""
    nearly = (plan for plan in PLAN_TOKENS if plan * _PADDED_SIXTEENTHS <= length * 16)
    plan = max(nearly, default=0)
    return plan if length <= plan else 0


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


def _padded_queries(q: Tensor, chunk: _LongChunk) -> Tensor:
    """Return [P, Hq, D] with the strides of q, on which a plan depends.

    Queries do not affect each other: the rows after the chunk's end belong to the next sequence, or
    are undefined if the step is too short.
    """
    end = chunk.start + chunk.num_planned
    if end <= q.shape[0]:
        return q[chunk.start : end]
    padded = torch.empty_strided(
        (chunk.num_planned, *q.shape[1:]), q.stride(), dtype=q.dtype, device=q.device
    )
    padded[: chunk.length].copy_(q[chunk.start : chunk.start + chunk.length])
    return padded


def _one_batch(rows: Tensor) -> Tensor:
    """[P, heads, D] -> [1, heads, P, D]."""
    return rows.transpose(0, 1).unsqueeze(0)

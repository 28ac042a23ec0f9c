"""Random paged-attention batches and a dense fp64 reference, for the kernels' tests and benchmark.

They follow the cache layout and the rule of visibility, independent of the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from worker_daemon.contracts.attention import AttentionMetadata, AttentionSinks

QUERIES_AT_ONCE = 1024
"""Bounds the score matrix of the reference."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a model's attention and of its cache's blocks."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True)
class PagedBatch:
    """One step's inputs for an attention backend, and the K and V that they represent."""

    shape: Shape
    q: torch.Tensor  # [N, Hq, D], a slice of one projection, like k and v
    k: torch.Tensor  # [N, Hkv, D]
    v: torch.Tensor  # [N, Hkv, D]
    kv_cache: torch.Tensor  # [num_blocks, 2, block_size, Hkv, D], NaN wherever nothing was written
    slot_mapping: torch.Tensor  # [N] int64, -1 = padding
    block_table: torch.Tensor  # [rows, max_blocks] int32
    seq_rows: torch.Tensor  # [B] int32, distinct rows of the block table
    query_start_loc: torch.Tensor  # [B + 1] int32
    seq_lens: torch.Tensor  # [B] int32
    seq_order: torch.Tensor  # [B] int32, a permutation
    num_seqs: int
    max_query_len: int
    max_seq_len: int
    query_lens: list[int]
    history: list[torch.Tensor]  # for each sequence [2, seq_len, Hkv, D]

    @cached_property
    def metadata(self) -> AttentionMetadata:
        """Return the runner's metadata of such a step."""
        return AttentionMetadata(
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            seq_order=self.seq_order,
            block_table=self.block_table,
            seq_rows=self.seq_rows,
            slot_mapping=self.slot_mapping,
            num_seqs=self.num_seqs,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            query_lens_np=np.array(self.query_lens, np.int32),
            seq_lens_np=np.array([both.shape[1] for both in self.history], np.int32),
        )

    @property
    def num_real_tokens(self) -> int:
        return sum(self.query_lens)

    def store(self) -> None:
        """Write this step's k and v to their slots, as the layer operations do before attention."""
        slots = self.slot_mapping[: self.num_real_tokens]
        block, offset = slots // self.shape.block_size, slots % self.shape.block_size
        self.kv_cache[block, 0, offset] = self.k[: self.num_real_tokens]
        self.kv_cache[block, 1, offset] = self.v[: self.num_real_tokens]


def make_batch(
    shape: Shape,
    lengths: list[tuple[int, int]],
    *,
    dtype: torch.dtype,
    device: str,
    seed: int,
    num_padding: int = 0,
) -> PagedBatch:
    """Return a batch of sequences of (query_len, seq_len) in random blocks, then num_padding rows.

    The cache holds what earlier steps wrote; every other slot, the null block's too, is NaN.
    """
    generator = torch.Generator(device).manual_seed(seed)
    query_lens = [query_len for query_len, _ in lengths]
    seq_lens = [seq_len for _, seq_len in lengths]
    num_tokens = sum(query_lens) + num_padding
    heads = shape.num_q_heads, shape.num_kv_heads, shape.num_kv_heads
    projected = torch.randn(
        num_tokens, sum(heads) * shape.head_dim, generator=generator, device=device, dtype=dtype
    )
    widths = [count * shape.head_dim for count in heads]
    q, k, v = (part.unflatten(1, (-1, shape.head_dim)) for part in projected.split(widths, dim=1))

    tables = _random_tables(seq_lens, shape.block_size, generator, device)
    seq_rows = torch.randperm(len(lengths) + 2, generator=generator, device=device)[: len(lengths)]
    block_table = torch.full((len(lengths) + 2, tables.shape[1]), -1, device=device).int()
    block_table[seq_rows] = tables
    num_blocks = 1 + max(1, int(tables.max()) if tables.numel() else 1)
    cache = torch.full(
        (num_blocks, 2, shape.block_size, shape.num_kv_heads, shape.head_dim),
        float("nan"),
        dtype=dtype,
        device=device,
    )
    slots = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
    starts = [0]
    history = []
    for row, (query_len, seq_len) in enumerate(lengths):
        position = torch.arange(seq_len, device=device)
        seq_slots = tables[row, position // shape.block_size].long() * shape.block_size
        seq_slots += position % shape.block_size
        first, last = starts[-1], starts[-1] + query_len
        past = torch.randn(
            2,
            seq_len - query_len,
            *cache.shape[3:],
            generator=generator,
            device=device,
            dtype=dtype,
        )
        past_slots = seq_slots[: seq_len - query_len]
        block, offset = past_slots // shape.block_size, past_slots % shape.block_size
        cache[block, 0, offset], cache[block, 1, offset] = past
        slots[first:last] = seq_slots[seq_len - query_len :]
        history.append(torch.cat([past, torch.stack([k[first:last], v[first:last]])], dim=1))
        starts.append(last)
    return PagedBatch(
        shape=shape,
        q=q,
        k=k,
        v=v,
        kv_cache=cache,
        slot_mapping=slots,
        block_table=block_table,
        seq_rows=seq_rows.int(),
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        seq_order=torch.randperm(len(lengths), generator=generator, device=device).int(),
        num_seqs=len(lengths),
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
        query_lens=query_lens,
        history=history,
    )


def _random_tables(
    seq_lens: list[int], block_size: int, generator: torch.Generator, device: str
) -> torch.Tensor:
    """Return [B, max_blocks] int32: distinct blocks >= 1 in random order, rows padded with block
    0."""
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    blocks = 1 + torch.randperm(sum(counts) + 3, generator=generator, device=device)
    tables = torch.zeros(len(seq_lens), max(counts, default=1), dtype=torch.int32, device=device)
    taken = 0
    for row, count in enumerate(counts):
        tables[row, :count] = blocks[taken : taken + count]
        taken += count
    return tables


def dense_attention(
    batch: PagedBatch,
    window: int | None,
    *,
    logit_softcap: float | None = None,
    sinks: AttentionSinks | None = None,
) -> torch.Tensor:
    """Return [N, Hq, D] fp64: a plain softmax over each sequence's keys, and over the sinks; 0 in
    padding rows. logit_softcap: scores become cap * tanh(score / cap)."""
    return dense_with_lse(batch, window, logit_softcap=logit_softcap, sinks=sinks)[0]


def dense_with_lse(
    batch: PagedBatch,
    window: int | None,
    *,
    logit_softcap: float | None = None,
    sinks: AttentionSinks | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dense_attention, and [N, Hq] fp64: the natural logarithm of each softmax's
    denominator, -inf in padding rows."""
    out = torch.zeros(batch.q.shape, dtype=torch.float64, device=batch.q.device)
    lse = torch.full_like(out[..., 0], -torch.inf)
    first = 0
    for query_len, (keys, values) in zip(batch.query_lens, batch.history, strict=True):
        past = len(keys) - query_len
        for chunk in range(0, query_len, QUERIES_AT_ONCE):
            stop = min(chunk + QUERIES_AT_ONCE, query_len)
            queries = batch.q[first + chunk : first + stop]
            rows = slice(first + chunk, first + stop)
            out[rows], lse[rows] = _dense_rows(
                queries,
                keys,
                values,
                past + chunk,
                window,
                batch.shape.scale,
                logit_softcap,
                None if sinks is None else sinks.values,
            )
        first += query_len
    return out, lse


def _dense_rows(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first_pos: int,
    window: int | None,
    scale: float,
    logit_softcap: float | None,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [n, Hq, D] and [n, Hq] fp64 for n queries from position first_pos on over keys and
    values [L, Hkv, D]."""
    grouped = queries.double().unflatten(1, (keys.shape[1], -1)).permute(1, 2, 0, 3)  # Hkv G n D
    key_pos = torch.arange(len(keys), device=keys.device)
    query_pos = first_pos + torch.arange(len(queries), device=keys.device)[:, None]
    visible = key_pos <= query_pos
    if window is not None:
        visible &= key_pos > query_pos - window
    scores = grouped @ keys.double().permute(1, 2, 0)[:, None] * scale  # Hkv G n L
    if logit_softcap is not None:
        scores = logit_softcap * torch.tanh(scores / logit_softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        own = sinks.double().view(*scores.shape[:2], 1, 1).expand(-1, -1, len(queries), 1)
        scores = torch.cat((scores, own), dim=-1)
    weights = scores.softmax(-1)[..., : len(keys)]
    result = weights @ values.double().permute(1, 0, 2)[:, None]  # Hkv G n D
    lse = scores.logsumexp(-1)  # Hkv G n
    return result.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ||got - expected|| / ||expected||; NaN if got has one."""
    difference = torch.linalg.vector_norm(got.double() - expected.double())
    return float(difference / torch.linalg.vector_norm(expected.double()))

"""Attention over parts of the keys of paged batches, as split keys and ranks have them, and checks
of log-sum-exps and of merged parts; for any backend, on any device."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch

from benchmarks.paged_reference import PagedBatch, dense_with_lse, relative_error
from tests.support.attention_steps import GivenSinks
from tests.support.rotated_decodes import RotatedDecode
from worker_daemon.contracts.attention import (
    AttentionBackend,
    AttentionLayer,
    AttentionMetadata,
)

Attended: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Outputs [N, Hq, D] and log-sum-exps [N, Hq]."""


def attend_with_lse(
    backend: AttentionBackend,
    batch: PagedBatch,
    layer: AttentionLayer,
    metadata: AttentionMetadata | None = None,
) -> Attended:
    """Attend with the queries of the batch, which is stored already; log-sum-exps begin as NaN.
    metadata: of other sequences than the batch's, with tokens in the same order."""
    lse = torch.full(batch.q.shape[:2], torch.nan, device=batch.q.device)
    out = backend.attend(batch.q, batch.kv_cache, layer, metadata or batch.metadata, lse)
    assert out.dtype == batch.q.dtype
    return out, lse


def rotate_with_lse(
    backend: AttentionBackend, step: RotatedDecode, layer: AttentionLayer
) -> Attended:
    """Rotate, store and attend; the step is overwritten."""
    lse = torch.full(step.batch.q.shape[:2], torch.nan, device=step.qkv.device)
    out = backend.rotate_and_attend(step.qkv, step.batch.kv_cache, layer, step.step, lse)
    return out, lse


def check_attended(
    out: torch.Tensor,
    lse: torch.Tensor,
    expected: Attended,
    bound: float,
    lse_bound: float | None = None,
) -> None:
    """Check the relative error of an output, and the difference of log-sum-exps, which is the
    relative error of their exp, by lse_bound or the same bound; rows without a key exactly."""
    wanted, sums = expected
    empty = sums.isneginf()
    assert torch.equal(lse.isneginf(), empty)
    assert not out[empty].any()
    assert float((lse - sums)[~empty].abs().max()) < (lse_bound or bound)
    assert relative_error(out, wanted) < bound


def keys_between(
    batch: PagedBatch, metadata: AttentionMetadata, first: int, end: int
) -> AttentionMetadata:
    """Return metadata with the keys first .. end - 1 of each sequence; first is the start of a
    block. If sequences have several query tokens, all keys must be before `end`."""
    lens = np.clip(np.minimum(metadata.seq_lens_np, end) - first, 0, None).astype(np.int32)
    return replace(
        metadata,
        block_table=metadata.block_table[:, first // batch.shape.block_size :],
        seq_lens=torch.from_numpy(lens).to(metadata.seq_lens.device),
        seq_lens_np=lens,
        max_seq_len=int(lens.max()),
    )


def keys_from(batch: PagedBatch, first: int) -> AttentionMetadata:
    """Return the batch's metadata with the keys from `first`, the start of a block, on: queries
    before it see none."""
    return keys_between(batch, batch.metadata, first, batch.max_seq_len)


def as_decodes(batch: PagedBatch) -> AttentionMetadata:
    """Return metadata in which each query token of the batch is a sequence of its own, with the
    same keys."""
    counts = np.array(batch.query_lens)
    first = batch.metadata.seq_lens_np - counts
    lens = np.concatenate([np.arange(n) + past + 1 for n, past in zip(counts, first, strict=True)])
    num_seqs, device = lens.size, batch.q.device
    lens = lens.astype(np.int32)
    return replace(
        batch.metadata,
        query_start_loc=torch.arange(num_seqs + 1, dtype=torch.int32, device=device),
        seq_lens=torch.from_numpy(lens).to(device),
        seq_order=torch.randperm(num_seqs, device=device).int(),
        seq_rows=batch.seq_rows.repeat_interleave(torch.from_numpy(counts).to(device)),
        num_seqs=num_seqs,
        max_query_len=1,
        query_lens_np=np.ones(num_seqs, np.int32),
        seq_lens_np=lens,
    )


def random_borders(batch: PagedBatch, count: int, rng: random.Random) -> list[int]:
    """Return starts of blocks, ascending, some perhaps equal, some beyond most sequences."""
    size = batch.shape.block_size
    return sorted(size * rng.randint(0, batch.max_seq_len // size) for _ in range(count))


def merged(backend: AttentionBackend, parts: Sequence[Attended]) -> Attended:
    outs, lses = zip(*parts, strict=True)
    return backend.merge(torch.stack(outs), torch.stack(lses))


def check_parts(
    backend: AttentionBackend,
    batch: PagedBatch,
    layer: AttentionLayer,
    borders: Sequence[int],
    bound: float,
) -> None:
    """Check that attention over keys divided at the borders is, merged at once or one after
    another, attention over all keys: every query by itself, and with the last part causal. A sink
    is in one of the parts, or is a part of its own. The layer has no window."""
    options = {"logit_softcap": layer.logit_softcap, "sinks": layer.sinks}
    expected = dense_with_lse(batch, None, **options)
    without, edges = replace(layer, sinks=None), [0, *borders, batch.max_seq_len]
    single = as_decodes(batch)

    def attend(over: AttentionLayer, first: int, end: int) -> Attended:
        return attend_with_lse(backend, batch, over, keys_between(batch, single, first, end))

    parts = [
        attend(layer if number == 1 else without, first, end)
        for number, (first, end) in enumerate(pairwise(edges))
    ]
    lse_bound = min(bound, 1e-3)
    check_attended(*merged(backend, parts), expected, bound, lse_bound)
    sequence = parts[0]
    for part in parts[1:]:
        sequence = merged(backend, (sequence, part))
    check_attended(*sequence, expected, bound, lse_bound)

    last = attend_with_lse(backend, batch, without, keys_from(batch, borders[-1]))
    parts = [attend(without, 0, borders[-1]), last]
    if isinstance(layer.sinks, GivenSinks):
        lse = torch.full_like(last[1], -torch.inf)
        lse[: batch.num_real_tokens] = layer.sinks.values.float()
        parts.append((torch.zeros_like(last[0]), lse))
    check_attended(*merged(backend, parts), expected, bound, lse_bound)


def check_merge(backend: AttentionBackend, dtype: torch.dtype, device: str, bound: float) -> None:
    """Check merges of any numbers of parts, of log-sum-exps that differ by much, and of parts
    without keys."""
    random_rows = torch.Generator(device).manual_seed(7)
    for num_parts, head_dim in ((1, 8), (2, 64), (5, 80), (70, 16)):
        shape = (num_parts, 7, 2, head_dim)
        outs = torch.randn(shape, generator=random_rows, device=device).to(dtype)
        lses = torch.randn(shape[:3], generator=random_rows, device=device) * 3
        lses[0, 0] += 1e4
        lses[-1, 1] -= 1e4
        lses[:, 2] -= 5e4
        lses[-1, 3] = -torch.inf
        lses[:, 4] = -torch.inf
        lses[0, 4, 0] = -3e4
        lses[:, 5] = -torch.inf
        outs[lses.isneginf()] = 3.0  # finite: has no effect
        exact = lses.double()
        highest = exact.amax(0).nan_to_num(neginf=0.0)
        weights = (exact - highest).exp()
        total = weights.sum(0)
        out = (weights[..., None] * outs.double()).sum(0) / total.clamp(min=1e-300)[..., None]
        before = outs.clone(), lses.clone()
        got, lse = backend.merge(outs, lses)
        assert got.dtype == dtype
        assert lse.dtype == torch.float32
        assert torch.equal(outs, before[0])
        assert torch.equal(lses, before[1])
        expected = highest + total.log()
        assert torch.equal(lse.isneginf(), expected.isneginf())
        assert torch.equal(lse.isneginf(), lses.isneginf().all(0))
        assert not got[lse.isneginf()].any()
        difference = (lse.double() - expected).nan_to_num(nan=0.0).abs()
        assert (difference <= 1e-6 * (1 + expected.nan_to_num(neginf=0.0).abs())).all()
        for row in range(shape[1]):
            if out[row].any():
                assert relative_error(got[row], out[row]) < bound
    empty = backend.merge(outs[:, :0], lses[:, :0])
    assert [tuple(part.shape) for part in empty] == [(0, 2, head_dim), (0, 2)]

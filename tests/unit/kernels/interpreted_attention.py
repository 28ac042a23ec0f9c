"""Paged attention under Triton's interpreter against a dense fp64 softmax; conftest.py runs it.

fp32 and fp16 only: the interpreter's dot reads bf16 operands as integers. The GPU tests cover bf16.
"""

import random
from dataclasses import replace

import pytest
import torch

from benchmarks.paged_reference import (
    PagedBatch,
    Shape,
    dense_attention,
    make_batch,
    relative_error,
)
from tests.support.attention_steps import GivenSinks, layer_of, random_sinks
from tests.support.exhaustive import exhaustively, seeds
from worker_daemon.kernels.paged_attention import TritonAttention, paged_attention
from worker_daemon.kernels.paged_decode import workspace_elements
from worker_daemon.kernels.tiles import Tile

pytestmark = pytest.mark.each_value  # make test-all runs every combination

BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3}
# A score is exact to 2^-23 of its cap.
CAPPED_BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3}
OPTIONS = pytest.mark.parametrize(
    ("logit_softcap", "has_sinks"), [(1.5, False), (50.0, False), (None, True), (5.0, True)]
)

# Whole prompts, chunks after a cached prefix, decodes, no tokens at all, lengths at tiles' edges.
MIXED = [(37, 37), (1, 65), (20, 150), (0, 9), (1, 1), (64, 64), (1, 128), (5, 133)]
SHORTER = [(18, 70), (1, 65), (0, 9), (1, 1), (5, 64)]
DECODES = [(1, 1), (1, 63), (1, 64), (1, 65), (1, 300)]


def build(
    shape: Shape,
    lengths: list[tuple[int, int]],
    seed: int,
    dtype: torch.dtype = torch.float32,
    num_padding: int = 0,
) -> PagedBatch:
    return make_batch(shape, lengths, dtype=dtype, device="cpu", seed=seed, num_padding=num_padding)


def attend(batch: PagedBatch, window: int | None, **overrides: object) -> torch.Tensor:
    """Writes K and V, attends into an output full of NaN."""
    batch.store()
    out = torch.full(batch.q.shape, float("nan"), dtype=batch.q.dtype)
    result = paged_attention(
        batch.q,
        batch.kv_cache,
        batch.metadata,
        scale=batch.shape.scale,
        window=window,
        out=out,
        **overrides,
    )
    assert result is out
    return out


def check(
    batch: PagedBatch,
    window: int | None,
    *,
    logit_softcap: float | None = None,
    has_sinks: bool = False,
    **overrides: object,
) -> None:
    sinks = random_sinks(batch.shape.num_q_heads, batch.q.dtype) if has_sinks else None
    options = {"logit_softcap": logit_softcap, "sinks": sinks}
    out = attend(batch, window, **options, **overrides)
    bound = (BOUNDS if logit_softcap is None else CAPPED_BOUNDS)[out.dtype]
    assert relative_error(out, dense_attention(batch, window, **options)) < bound
    assert torch.equal(out[batch.num_real_tokens :], torch.zeros_like(out[batch.num_real_tokens :]))


@pytest.mark.parametrize(("group_size", "window"), [(1, 24), exhaustively(4, 24), (7, None)])
def test_mixed_batch_groups(group_size: int, window: int | None) -> None:
    lengths = MIXED if group_size == 4 else SHORTER
    check(build(Shape(2 * group_size, 2, 64), lengths, seed=group_size, num_padding=3), window)


@pytest.mark.parametrize(
    ("head_dim", "block_size"),
    [
        *((8, 8), (8, 128), (80, 8), (80, 32), (96, 16), (256, 8), (256, 128)),
        exhaustively(64, 16),
        exhaustively(128, 32),
    ],
)
def test_head_dims_and_block_sizes(head_dim: int, block_size: int) -> None:
    shape = Shape(4, 2, head_dim, block_size)
    check(build(shape, [(18, 70), (1, 129)], seed=head_dim + block_size, num_padding=1), None)
    check(build(shape, [(1, 40), (1, 129)], seed=head_dim - block_size), None)


@pytest.mark.parametrize(
    ("window", "num_splits"), [(None, 1), (1, 3), exhaustively(16, 9), (100, 9)]
)
def test_decode_splits(window: int | None, num_splits: int) -> None:
    batch = build(Shape(4, 2, 64), DECODES, seed=num_splits, num_padding=2)
    check(batch, window, num_splits=num_splits)


@OPTIONS
@pytest.mark.parametrize(("head_dim", "window"), [(64, None), (256, 24)])
def test_capped_scores_and_sinks_of_mixed_batches(
    head_dim: int, window: int | None, logit_softcap: float | None, has_sinks: bool
) -> None:
    """Those of GPT-OSS and Gemma 2, with fewer heads."""
    batch = build(Shape(6, 2, head_dim), SHORTER, seed=head_dim, num_padding=3)
    check(batch, window, logit_softcap=logit_softcap, has_sinks=has_sinks)


@OPTIONS
@pytest.mark.parametrize(
    ("window", "num_splits"), [(None, 1), (1, 3), (16, 9), exhaustively(None, 24)]
)
def test_capped_scores_and_sinks_of_split_decodes(
    window: int | None, num_splits: int, logit_softcap: float | None, has_sinks: bool
) -> None:
    """A sink counts once, whatever the number of splits, and if the first ones have no key."""
    batch = build(Shape(6, 2, 64), [*DECODES, (0, 7)], seed=num_splits, num_padding=2)
    options = {"logit_softcap": logit_softcap, "has_sinks": has_sinks}
    check(batch, window, num_splits=num_splits, tile=Tile(16, 16, 4, 3), **options)


def test_sinks_in_fp16() -> None:
    for lengths in (SHORTER, DECODES):
        batch = build(Shape(4, 2, 64), lengths, 13, torch.float16, num_padding=1)
        check(batch, 31, logit_softcap=3.0, has_sinks=True)


@pytest.mark.parametrize("value", [*map(exhaustively, [-100.0, 0.0]), 80.0, float("-inf")])
def test_sinks_of_any_size(value: float) -> None:
    for lengths in (SHORTER, DECODES):
        batch = build(Shape(4, 2, 64), lengths, seed=14, num_padding=1)
        sinks = GivenSinks(torch.full((4,), value))
        out = attend(batch, None, sinks=sinks)
        assert relative_error(out, dense_attention(batch, None, sinks=sinks)) < 1e-5


def test_default_splits_of_a_long_decode() -> None:
    check(build(Shape(4, 1, 64), [(1, 1500)], seed=11), None)


def test_more_splits_than_the_merge_takes_at_once() -> None:
    batch = build(Shape(4, 1, 64), [(1, 700)], seed=12)
    check(batch, None, num_splits=40, tile=Tile(16, 16, 4, 3))


def test_decode_with_empty_sequences_clears_every_padding_row() -> None:
    lengths = [(0, 5), (1, 33), (0, 0), (0, 80), (1, 2), (0, 1)]
    for num_padding, num_splits in ((0, 1), (1, 2), (4, 2), (9, 1)):
        batch = build(Shape(4, 2, 64), lengths, seed=num_padding, num_padding=num_padding)
        check(batch, None, num_splits=num_splits)


@pytest.mark.parametrize(
    ("window", "num_splits"), [exhaustively(None, 1), (21, 1), (None, 3), (40, 2)]
)
def test_a_few_queries_of_a_sequence_share_a_tile(window: int | None, num_splits: int) -> None:
    """As after drafts: as many as a sequence has, down to one; the tile has 16 rows or more."""
    for shape, lengths in (
        (Shape(4, 2, 64), [(3, 90), (1, 33), (5, 5), (2, 200)]),
        (Shape(6, 2, 72, 8), [(1, 1), (4, 61), (0, 0), (6, 130)]),
        (Shape(8, 1, 64), [(8, 77), (7, 300)]),
    ):
        batch = build(shape, lengths, seed=num_splits, num_padding=3)
        check(batch, window, num_splits=num_splits)
        check(batch, window, num_splits=num_splits, logit_softcap=2.0, has_sinks=True)


def test_batch_of_padding_only() -> None:
    batch = build(Shape(4, 2, 64), [], seed=3, num_padding=5)
    assert torch.equal(attend(batch, None), torch.zeros(batch.q.shape))


@pytest.mark.parametrize("num_padding", [exhaustively(0), 40])
def test_callers_workspace_is_used(num_padding: int) -> None:
    """Padding, of which a step with long prompts may have much, needs none of it."""
    batch = build(Shape(4, 2, 80), DECODES, seed=5, num_padding=num_padding)
    needed = workspace_elements(len(DECODES), 4, 80, 3)
    memory = torch.full((100 * needed,), float("nan"))
    check(batch, None, num_splits=3, workspace=memory)
    assert not memory[:needed].isnan().any()
    assert memory[needed:].isnan().all()


def test_runs_are_bit_equal_whatever_the_rest_of_the_cache_holds() -> None:
    batch = build(Shape(8, 2, 64), DECODES[1:4], seed=6)
    first = attend(batch, None, num_splits=3)
    unused = batch.kv_cache.isnan()
    other = replace(batch, kv_cache=batch.kv_cache.masked_fill(unused, 7.0))
    assert torch.equal(first, attend(other, None, num_splits=3))


@pytest.mark.parametrize(
    "tile", [exhaustively(Tile(16, 16, 4, 1)), Tile(64, 32, 4, 3), Tile(256, 128, 8, 3)]
)
def test_any_tile_gives_the_same(tile: Tile) -> None:
    check(build(Shape(8, 2, 64), SHORTER, seed=7), None, tile=tile)
    check(build(Shape(8, 2, 64), DECODES, seed=8), 40, tile=tile)


@pytest.mark.parametrize("seed", seeds(2, of=3))
def test_random_batches(seed: int) -> None:
    rng = random.Random(seed)
    num_kv_heads = rng.choice([1, 2, 3])
    shape = Shape(
        num_kv_heads * rng.choice([1, 2, 3, 5]),
        num_kv_heads,
        rng.choice([16, 24, 64, 72, 128]),
        rng.choice([8, 16, 32]),
    )
    lengths = [(3, 50)]
    for _ in range(rng.randint(1, 9)):
        query_len = rng.choice([0, 1, 1, 1, rng.randint(2, 90)])
        lengths.append((query_len, query_len + rng.choice([0, rng.randint(0, 200)])))
    dtype = rng.choice([torch.float32, torch.float16])
    batch = build(shape, lengths, seed, dtype, num_padding=1 + rng.randrange(4))
    check(batch, rng.choice([None, rng.randint(1, 150)]))


@pytest.mark.parametrize("lengths", [MIXED, DECODES])
def test_blocks_behind_the_window_are_not_seen(lengths: list[tuple[int, int]]) -> None:
    """They now belong to another sequence or are the null block: their content must not matter."""
    window, shape = 21, Shape(8, 2, 64, 8)
    batch = build(shape, lengths, seed=10)
    batch.store()
    expected = dense_attention(batch, window)
    spoilt = batch.kv_cache.new_full((1, *batch.kv_cache.shape[1:]), float("nan"))
    cache = torch.cat((batch.kv_cache, spoilt))
    table = batch.block_table.clone()
    for seq, (query_len, seq_len) in enumerate(lengths):
        behind = max(0, seq_len - query_len - window + 1) // shape.block_size
        table[batch.seq_rows[seq], :behind] = len(cache) - 1
    assert (table == len(cache) - 1).any()
    out = torch.full(batch.q.shape, float("nan"))
    moved = replace(batch, kv_cache=cache, block_table=table)
    paged_attention(batch.q, cache, moved, scale=shape.scale, window=window, out=out)
    assert relative_error(out, expected) < BOUNDS[torch.float32]


@pytest.mark.parametrize("lengths", [SHORTER, DECODES, exhaustively(DECODES[:1])])
@pytest.mark.parametrize("window", [None, 31])
def test_the_backend_attends(lengths: list[tuple[int, int]], window: int | None) -> None:
    batch = build(Shape(8, 2, 64), lengths, seed=9, num_padding=4)
    batch.store()
    backend = TritonAttention(torch.device("cpu"))
    for options in ({}, {"logit_softcap": 2.0, "sinks": random_sinks(8, torch.float32)}):
        layer = layer_of(batch.shape, window, **options)
        out = backend.attend(batch.q, batch.kv_cache, layer, batch.metadata)
        assert out.is_contiguous()
        assert relative_error(out, dense_attention(batch, window, **options)) < BOUNDS[out.dtype]

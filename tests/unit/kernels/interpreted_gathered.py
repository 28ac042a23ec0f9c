"""Attention over gathered keys under Triton's interpreter, against a dense fp64 softmax and copies
by torch; conftest.py runs it.

fp32 and fp16 only, as in interpreted_attention.
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
from tests.support.attention_steps import layer_of, random_sinks
from tests.support.exhaustive import exhaustively
from tests.support.fp8_caches import in_fp8, random_scales, store
from worker_daemon.contracts.attention import KeyRange
from worker_daemon.kernels.gathered_prefill import TritonGathered, gathered_attention
from worker_daemon.kernels.tiles import Tile

pytestmark = pytest.mark.each_value  # make test-all runs every combination

CPU = torch.device("cpu")
SEED = random.randrange(1 << 30)
BOUNDS = {torch.float32: 1e-6, torch.float16: 1e-3}
TILES = [Tile(16, 16, 4, 1), Tile(64, 16, 4, 2), Tile(16, 64, 4, 2)]


def build(
    shape: Shape, lengths: list[tuple[int, int]], dtype: torch.dtype = torch.float32
) -> PagedBatch:
    batch = make_batch(shape, lengths, dtype=dtype, device="cpu", seed=SEED)
    batch.store()
    return batch


def check(batch: PagedBatch, window: int | None, tile: Tile, **options: object) -> None:
    (context,) = batch.history
    scale = batch.shape.scale
    out = gathered_attention(
        batch.q, context.contiguous(), scale=scale, window=window, tile=tile, **options
    )
    assert out.is_contiguous()
    assert relative_error(out, dense_attention(batch, window, **options)) < BOUNDS[out.dtype]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("window", [None, 1, *map(exhaustively, [5, 16]), 33, 1000])
def test_windows_and_tiles(window: int | None, tile: Tile) -> None:
    for lengths in [(37, 37), (1, 40), (50, 101), (17, 64), (64, 128)]:
        check(build(Shape(4, 2, 16), [lengths]), window, tile)


@pytest.mark.parametrize(
    "shape", [Shape(3, 3, 8), Shape(5, 1, 80), Shape(4, 2, 96), Shape(4, 4, 64), Shape(2, 1, 256)]
)
def test_heads(shape: Shape) -> None:
    check(build(shape, [(21, 70)], torch.float16), None, Tile(16, 32, 4, 2))
    check(build(shape, [(21, 70)]), 30, Tile(32, 16, 4, 2))


@pytest.mark.parametrize("window", [None, 1, 33])
@pytest.mark.parametrize(("logit_softcap", "has_sinks"), [(1.5, False), (None, True), (3.0, True)])
def test_capped_scores_and_sinks(
    logit_softcap: float | None, has_sinks: bool, window: int | None
) -> None:
    sinks = random_sinks(4, torch.float32, seed=SEED) if has_sinks else None
    for lengths in [(37, 37), (1, 40), (1, 1), (17, 64)]:
        batch = build(Shape(4, 2, 16), [lengths])
        check(batch, window, TILES[0], logit_softcap=logit_softcap, sinks=sinks)


@pytest.mark.parametrize("block_size", [8, 16, 128])
@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
def test_gathering(block_size: int, num_kv_heads: int) -> None:
    shape = Shape(num_kv_heads, num_kv_heads, 24, block_size)
    batch = build(shape, [(3, 50), (40, 201), (1, 5)])
    backend, layer = TritonGathered(CPU), layer_of(shape)
    for seq, first, end, num_rows in [(1, 0, 201, 201), (1, 33, 201, 180), (0, 0, 50, 64)]:
        keys = KeyRange(seq, first, end, num_rows)
        out = backend.gather(batch.kv_cache, layer, batch.metadata, keys, torch.float32)
        assert torch.equal(out[:, : end - first], batch.history[seq][:, first:end])
        assert not out[:, end - first :].any()


def test_gathering_from_fp8() -> None:
    shape, scales = Shape(4, 2, 64), random_scales(2, "cpu", SEED)
    batch = in_fp8(build(shape, [(1, 9), (40, 201)], torch.float16), scales)
    store(batch, scales)
    layer = replace(layer_of(shape), kv_scales=scales)
    keys = KeyRange(1, 7, 201, 200)
    out = TritonGathered(CPU).gather(batch.kv_cache, layer, batch.metadata, keys, torch.float16)
    # in_fp8's history has what readers of earlier tokens see; this step's are rounded likewise.
    assert relative_error(out[:, :154], batch.history[1][:, 7:161]) < 1e-3
    assert torch.equal(out[:, 194:], torch.zeros_like(out[:, 194:]))


def test_the_backend_attends() -> None:
    batch = build(Shape(4, 2, 64), [(30, 100)])
    backend = TritonGathered(CPU)
    for options in ({}, {"logit_softcap": 2.0, "sinks": random_sinks(4, torch.float32)}):
        layer = layer_of(batch.shape, 300, **options)
        keys = KeyRange(0, 0, 100, 100)
        context = backend.gather(batch.kv_cache, layer, batch.metadata, keys, torch.float32)
        out = backend.attend(batch.q, context, layer, None)
        assert relative_error(out, dense_attention(batch, None, **options)) < BOUNDS[out.dtype]

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
    dense_with_lse,
    make_batch,
    relative_error,
)
from tests.support.attention_steps import layer_of, random_sinks
from tests.support.exhaustive import exhaustively
from tests.support.fp8_caches import in_fp8, random_scales, store
from worker_daemon.contracts.attention import KeyRange
from worker_daemon.contracts.fp8 import FP8
from worker_daemon.kernels.gathered_prefill import (
    TritonFP8Gathered,
    TritonGathered,
    gathered_attention,
)
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


def rounded_queries(q: torch.Tensor) -> torch.Tensor:
    """Return [L, Hq, D] as products in FP8 take them: rounded, with a scale for each row."""
    factor = q.float().abs().amax(-1, keepdim=True) / 448.0
    return (q.float() * (1.0 / factor)).to(FP8).float() * factor


def absolute(batch: PagedBatch) -> PagedBatch:
    """Return the batch with the magnitudes of its values."""
    ((keys, values),) = batch.history
    return replace(batch, history=[torch.stack([keys, values.abs()])])


def check_in_fp8(
    shape: Shape, lengths: tuple[int, int], window: int | None, tile: Tile, **options: object
) -> None:
    """Weights are rounded to three bits, or to 2^-18 of a query's largest: a result is off by as
    much of what it sums in magnitude. With exact queries, by some per cent of its norm."""
    scales = random_scales(shape.num_kv_heads, "cpu", SEED)
    batch = in_fp8(build(shape, [lengths], torch.float16), scales)
    store(batch, scales)
    layer = replace(layer_of(shape, window), kv_scales=scales)
    query_len, seq_len = lengths
    first = 0 if window is None else max(0, seq_len - query_len - window + 1)
    keys = KeyRange(0, first, seq_len, seq_len - first)
    context = TritonFP8Gathered(CPU).gather(
        batch.kv_cache, layer, batch.metadata, keys, torch.float16
    )
    lse = torch.full(batch.q.shape[:2], torch.nan)
    out = gathered_attention(
        batch.q, context, scale=shape.scale, window=window, lse=lse, tile=tile,
        **options,
    )  # fmt: skip
    assert out.is_contiguous()
    rounded = replace(batch, q=rounded_queries(batch.q))
    expected, expected_lse = dense_with_lse(rounded, window, **options)
    largest = batch.history[0][1].abs().amax().item()
    bound = dense_attention(absolute(rounded), window, **options) / 16
    bound += 2**-18 * seq_len * largest + expected.abs() * 2**-10 + 1e-6
    assert ((out.double() - expected).abs() <= bound).all()
    assert torch.allclose(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    if seq_len >= 64:
        assert relative_error(out, dense_attention(batch, window, **options)) < 0.08


@pytest.mark.parametrize("tile", [Tile(16, 32, 4, 2), Tile(64, 64, 4, 3)])
@pytest.mark.parametrize("window", [None, 1, 33, 1000])
def test_products_in_fp8(window: int | None, tile: Tile) -> None:
    for lengths in [(37, 37), (1, 40), (50, 101), (64, 128)]:
        check_in_fp8(Shape(4, 2, 32), lengths, window, tile)


@pytest.mark.parametrize("shape", [Shape(5, 1, 80), Shape(4, 2, 96, 8), Shape(2, 1, 256)])
@pytest.mark.parametrize(("logit_softcap", "has_sinks"), [(1.5, False), (None, True), (3.0, True)])
def test_heads_caps_and_sinks_in_fp8(
    shape: Shape, logit_softcap: float | None, has_sinks: bool
) -> None:
    sinks = random_sinks(shape.num_q_heads, torch.float32, seed=SEED) if has_sinks else None
    options = {"logit_softcap": logit_softcap, "sinks": sinks}
    check_in_fp8(shape, (21, 70), None, Tile(16, 32, 4, 2), **options)
    check_in_fp8(shape, (21, 70), 30, Tile(32, 32, 4, 2), **options)


def test_gathering_for_products_in_fp8() -> None:
    shape, scales = Shape(4, 2, 48), random_scales(2, "cpu", SEED)
    batch = in_fp8(build(shape, [(1, 9), (40, 201)], torch.float16), scales)
    store(batch, scales)
    layer = replace(layer_of(shape), kv_scales=scales)
    for seq, first, end, num_rows in [(1, 0, 201, 201), (1, 33, 190, 160), (0, 0, 9, 9)]:
        keys = KeyRange(seq, first, end, num_rows)
        context = TritonFP8Gathered(CPU).gather(
            batch.kv_cache, layer, batch.metadata, keys, torch.float16
        )
        assert context.values.stride(0) % 16 == 0
        both = torch.stack([context.keys, context.values.T]).view(2, num_rows, 2, 48).float()
        seen = (both * scales.values[:, None, :, None])[:, : end - first]
        assert torch.equal(seen, batch.history[seq][:, first:end].float())
        assert not both[:, end - first :].any()


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_unbounded_queries_in_fp8_are_not_a_number() -> None:
    """As in other dtypes: what watches for failures of a model sees them. The interpreter reads
    FP8's NaN as 480: tests/gpu/test_fp8_cache.py has them."""
    shape, scales = Shape(4, 2, 32), random_scales(2, "cpu", SEED)
    batch = in_fp8(build(shape, [(9, 40)], torch.float16), scales)
    store(batch, scales)
    layer = replace(layer_of(shape), kv_scales=scales)
    backend = TritonFP8Gathered(CPU)
    context = backend.gather(
        batch.kv_cache, layer, batch.metadata, KeyRange(0, 0, 40, 40), torch.float16
    )
    batch.q[5, 1, 3] = torch.inf
    out = backend.attend(batch.q, context, layer, None)
    is_bad = torch.zeros(out.shape[:2], dtype=torch.bool)
    is_bad[5, 1] = True
    assert torch.equal(out.isnan().all(-1), is_bad) and torch.equal(out.isnan().any(-1), is_bad)


def test_the_backend_attends() -> None:
    batch = build(Shape(4, 2, 64), [(30, 100)])
    backend = TritonGathered(CPU)
    for options in ({}, {"logit_softcap": 2.0, "sinks": random_sinks(4, torch.float32)}):
        layer = layer_of(batch.shape, 300, **options)
        keys = KeyRange(0, 0, 100, 100)
        context = backend.gather(batch.kv_cache, layer, batch.metadata, keys, torch.float32)
        out = backend.attend(batch.q, context, layer, None)
        assert relative_error(out, dense_attention(batch, None, **options)) < BOUNDS[out.dtype]

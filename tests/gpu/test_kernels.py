"""The attention kernels on a GPU at real sizes, in every dtype, against a dense fp64 softmax."""

import pytest
import torch

from benchmarks.paged_reference import (
    PagedBatch,
    Shape,
    dense_attention,
    make_batch,
    relative_error,
)
from tests.support.attention_steps import layer_of
from worker_daemon.kernels.paged_attention import TritonAttention, paged_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.kernels,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Rounding of the inputs' products and of the output; TF32 in an fp32 dot would show as 3e-4.
BOUNDS = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}

LLAMA_8B = Shape(32, 8, 128)
MIXED = [(1, 1500), (1, 3), (700, 700), (1, 257), (512, 2000), (0, 40), (33, 1000), (1, 64), (5, 5)]
DECODES = [(1, length) for length in (1, 15, 16, 17, 63, 64, 65, 500, 2047, 2048, 4000)]

DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


def build(
    shape: Shape,
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
    seed: int,
    num_padding: int = 0,
) -> PagedBatch:
    return make_batch(
        shape, lengths, dtype=dtype, device="cuda", seed=seed, num_padding=num_padding
    )


def attend(batch: PagedBatch, window: int | None, **overrides: object) -> torch.Tensor:
    """Writes K and V, attends into an output full of NaN."""
    batch.store()
    return paged_attention(
        batch.q,
        batch.kv_cache,
        batch.metadata,
        scale=batch.shape.scale,
        window=window,
        out=torch.full(batch.q.shape, float("nan"), dtype=batch.q.dtype, device="cuda"),
        **overrides,
    )


def check(batch: PagedBatch, window: int | None, **overrides: object) -> None:
    out = attend(batch, window, **overrides)
    assert relative_error(out, dense_attention(batch, window)) < BOUNDS[out.dtype]
    padding = out[batch.num_real_tokens :]
    assert torch.equal(padding, torch.zeros_like(padding))


@DTYPES
@pytest.mark.parametrize("window", [None, 300])
def test_mixed_batch(dtype: torch.dtype, window: int | None) -> None:
    check(build(LLAMA_8B, MIXED, dtype, seed=1, num_padding=21), window)


@DTYPES
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_large_prefill(dtype: torch.dtype, window: int | None, head_dim: int) -> None:
    shape = Shape(32, 8, head_dim)
    check(build(shape, [(3000, 3000), (2503, 4001)], dtype, seed=6, num_padding=3), window)


@DTYPES
@pytest.mark.parametrize("queries", [2, 5, 8, 16])
def test_a_few_queries_of_a_sequence(dtype: torch.dtype, queries: int) -> None:
    """As after drafts: they share a tile; few sequences are split, many are not."""
    for lengths in (
        [(queries, 1000)],
        [(queries, 9000), (1, 700), (max(1, queries // 2), 333), (queries, queries)],
        [(queries - i % 2, 200 + 11 * i) for i in range(64)],
    ):
        for window in (None, 100):
            check(build(LLAMA_8B, lengths, dtype, seed=queries, num_padding=7), window)


@DTYPES
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("num_splits", [None, 1, 5, 64])
def test_decode(dtype: torch.dtype, window: int | None, num_splits: int | None) -> None:
    batch = build(LLAMA_8B, DECODES, dtype, seed=2, num_padding=5)
    check(batch, window, num_splits=num_splits)


HEAD_SHAPES = [
    (torch.bfloat16, head_dim, heads)
    for head_dim in (8, 64, 80, 96, 128, 256)
    for heads in ((4, 4), (14, 2), (8, 1), (64, 4))
]
HEAD_SHAPES += [
    (dtype, head_dim, heads)
    for dtype in (torch.float32, torch.float16)
    for head_dim, heads in ((8, (4, 4)), (80, (14, 2)), (256, (8, 1)))
]


@pytest.mark.parametrize(("dtype", "head_dim", "heads"), HEAD_SHAPES, ids=str)
def test_head_shapes(dtype: torch.dtype, head_dim: int, heads: tuple[int, int]) -> None:
    shape = Shape(*heads, head_dim)
    check(build(shape, [(300, 300), (1, 700), (70, 333)], dtype, seed=head_dim), None)
    check(build(shape, [(1, 300), (1, 700), (1, 9)], dtype, seed=head_dim), None)
    check(build(shape, [(3, 40), (2, 9)], dtype, seed=head_dim), None)


@DTYPES
@pytest.mark.parametrize("block_size", [8, 32, 128])
def test_block_sizes(dtype: torch.dtype, block_size: int) -> None:
    shape = Shape(16, 4, 128, block_size)
    check(build(shape, MIXED, dtype, seed=block_size), None)
    check(build(shape, DECODES, dtype, seed=block_size), None)


@pytest.mark.parametrize("lengths", [MIXED, DECODES], ids=["mixed", "decode"])
def test_repeated_runs_are_bit_equal(lengths: list[tuple[int, int]]) -> None:
    batch = build(LLAMA_8B, lengths, torch.bfloat16, seed=3)
    first = attend(batch, None)
    for _ in range(20):
        assert torch.equal(attend(batch, None), first)


@pytest.mark.whole_gpu
def test_many_sequences_beyond_the_first_two_gibielements() -> None:
    shape = Shape(8, 8, 128, 16)
    batch = build(shape, [(1, 5000)] * 200 + [(2, 6000)] * 20, torch.bfloat16, seed=4)
    assert batch.kv_cache.numel() > 2**31
    check(batch, None)


def test_the_backend_runs_in_a_cuda_graph() -> None:
    batch = build(LLAMA_8B, DECODES, torch.bfloat16, seed=5, num_padding=5)
    batch.store()
    backend = TritonAttention(torch.device("cuda"))

    def step() -> torch.Tensor:
        return backend.attend(batch.q, batch.kv_cache, layer_of(batch.shape), batch.metadata)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    out.fill_(float("nan"))
    graph.replay()
    expected = dense_attention(batch, None)
    assert relative_error(out, expected) < BOUNDS[torch.bfloat16]

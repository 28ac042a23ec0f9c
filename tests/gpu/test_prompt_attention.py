"""Long prompts by cuDNN and over gathered keys, beside our paged kernels, at real sizes, against a
dense fp64 softmax."""

import pytest
import torch

from benchmarks.paged_reference import (
    PagedBatch,
    Shape,
    dense_attention,
    make_batch,
    relative_error,
)
from tests.support.attention_steps import layer_of, token_rows
from worker_daemon.backend import choose_backend
from worker_daemon.contracts.attention import AttentionBackend
from worker_daemon.layers.attention import HeadSizes
from worker_daemon.layers.attention_choice import choose_attention
from worker_daemon.layers.prompt_attention import PromptAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.kernels,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 6e-3}
LLAMA_8B = Shape(32, 8, 128)
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
MIXED = [
    (1, 1500), (1, 3), (1024, 1024), (1, 257), (512, 2000), (0, 40),
    (1950, 1950), (33, 1000), (700, 700), (1500, 1500), (1, 64), (1024, 1025), (1100, 6000),
]  # fmt: skip


def backend_of(shape: Shape, dtype: torch.dtype) -> AttentionBackend:
    heads = HeadSizes(shape.num_q_heads, shape.num_kv_heads, shape.head_dim)
    chosen = choose_attention(choose_backend(CUDA).attention, CUDA, heads, dtype)
    assert chosen.name == "triton+cudnn"
    assert isinstance(chosen.backend, PromptAttention)
    return chosen.backend


def build(
    shape: Shape, lengths: list[tuple[int, int]], dtype: torch.dtype, seed: int, padding: int = 0
) -> PagedBatch:
    batch = make_batch(shape, lengths, dtype=dtype, device="cuda", seed=seed, num_padding=padding)
    batch.store()
    return batch


@torch.inference_mode()
def attend(backend: AttentionBackend, batch: PagedBatch, window: int | None) -> torch.Tensor:
    return backend.attend(batch.q, batch.kv_cache, layer_of(batch.shape, window), batch.metadata)


def check(backend: AttentionBackend, batch: PagedBatch, window: int | None = None) -> None:
    """Compare each sequence separately: errors in a short one would be hidden by long ones."""
    out = attend(backend, batch, window)
    assert out.shape == batch.q.shape
    assert out.isfinite().all()
    expected = dense_attention(batch, window)
    for rows in token_rows(batch):
        if rows.numel():
            assert relative_error(out[rows], expected[rows]) < BOUNDS[out.dtype]


@DTYPES
@pytest.mark.parametrize(
    "length", [1023, 1024, 1025, 1919, 1920, 2047, 2048, 2049, 3839, 3840, 4096, 5000, 8191, 8192]
)
def test_lengths_around_the_plans(dtype: torch.dtype, length: int) -> None:
    backend = backend_of(LLAMA_8B, dtype)
    check(backend, build(LLAMA_8B, [(length, length)], dtype, seed=length))
    check(backend, build(LLAMA_8B, [(1, 77), (length, length)], dtype, seed=length))


@DTYPES
@pytest.mark.parametrize(
    ("query_len", "seq_len"), [(1024, 1025), (1024, 9000), (1999, 2900), (4096, 8192), (8000, 8192)]
)
@pytest.mark.parametrize("window", [None, 1, 100, 1024, 4097])
def test_chunks_after_earlier_context(
    dtype: torch.dtype, query_len: int, seq_len: int, window: int | None
) -> None:
    backend = backend_of(LLAMA_8B, dtype)
    check(backend, build(LLAMA_8B, [(query_len, seq_len)], dtype, seed=query_len), window)


@DTYPES
@pytest.mark.parametrize("window", [None, 300])
def test_mixed_steps(dtype: torch.dtype, window: int | None) -> None:
    backend = backend_of(LLAMA_8B, dtype)
    check(backend, build(LLAMA_8B, MIXED, dtype, seed=1, padding=21), window)
    check(backend, build(LLAMA_8B, MIXED[::-1], dtype, seed=2), window)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(16, 8, 128), Shape(4, 4, 64, 32), Shape(14, 2, 64), Shape(8, 1, 96, 8),
        Shape(16, 8, 256), Shape(8, 4, 80),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("window", [None, 700])
def test_other_heads(shape: Shape, window: int | None) -> None:
    backend = backend_of(shape, torch.bfloat16)
    lengths = [(1, 9), (2048, 2048), (1100, 1100), (1500, 4000)]
    check(backend, build(shape, lengths, torch.bfloat16, seed=3), window)


def test_rows_behind_a_prompts_end_may_hold_anything() -> None:
    backend = backend_of(LLAMA_8B, torch.bfloat16)
    batch = build(LLAMA_8B, [(1950, 1950), (1950, 1950)], torch.bfloat16, seed=4)
    expected = attend(backend, batch, None)
    for part in (batch.q, batch.k, batch.v):
        part[1950:] = torch.nan
    batch.store()
    out = attend(backend, batch, None)
    assert relative_error(out[:1950], expected[:1950]) < BOUNDS[torch.bfloat16]


def test_repeated_runs_are_bit_equal() -> None:
    backend = backend_of(LLAMA_8B, torch.bfloat16)
    batch = build(LLAMA_8B, MIXED, torch.bfloat16, seed=5)
    first = attend(backend, batch, None)
    for _ in range(20):
        assert torch.equal(attend(backend, batch, None), first)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_never_waits_for_the_device() -> None:
    backend = backend_of(LLAMA_8B, torch.bfloat16)
    batch = build(LLAMA_8B, MIXED, torch.bfloat16, seed=6)
    attend(backend, batch, None)  # makes the plans
    layer = layer_of(batch.shape)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            backend.attend(batch.q, batch.kv_cache, layer, batch.metadata)
    finally:
        torch.cuda.set_sync_debug_mode("default")

"""Decodes that turn and store their own heads, on a GPU at real sizes, against fp64."""

import pytest
import torch

from benchmarks.paged_reference import Shape, relative_error
from tests.support.model_attention import MODEL_ATTENTION, ModelAttention
from tests.support.rotated_decodes import (
    BOUNDS,
    RotatedDecode,
    check_cache,
    check_fused,
    check_output,
    make_decode,
    run_apart,
    run_fused,
)
from worker_daemon.contracts.layer_ops import Epilogue, Norm
from worker_daemon.kernels.ops import TritonOps
from worker_daemon.kernels.paged_attention import TritonAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.kernels,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
MODELS = pytest.mark.parametrize(
    ("shape", "is_normed"), [(Shape(32, 8, 128), False), (Shape(16, 8, 128), True)], ids=str
)
CHAINED = {
    "llama-8b": ModelAttention(Shape(32, 8, 128)),
    "qwen3-0.6b": ModelAttention(Shape(16, 8, 128), is_normed=True),
    **MODEL_ATTENTION,
}
SEQ_LENS = [1, 2, 15, 16, 17, 63, 64, 65, 129, 500, 2047, 2048, 2049, 4000]


def build(
    shape: Shape, seq_lens: list[int], dtype: torch.dtype, seed: int, **how: int
) -> RotatedDecode:
    return make_decode(shape, seq_lens, dtype=dtype, device="cuda", seed=seed, **how)


@DTYPES
@MODELS
@pytest.mark.parametrize("window", [None, 1, 300])
@pytest.mark.parametrize("num_splits", [None, 1, 5, 64])
def test_decodes(
    dtype: torch.dtype, shape: Shape, is_normed: bool, window: int | None, num_splits: int | None
) -> None:
    step = build(shape, SEQ_LENS, dtype, 1, is_normed=is_normed, num_padding=5, num_idle=2)
    step.batch.slot_mapping[-5:] = 0
    check_fused(step, window, num_splits=num_splits, pdl=True)


@DTYPES
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 256])
@pytest.mark.parametrize("heads", [(4, 4), (14, 2), (8, 1), (64, 4)], ids=str)
def test_head_shapes(
    dtype: torch.dtype, is_normed: bool, head_dim: int, heads: tuple[int, int]
) -> None:
    check_fused(
        build(Shape(*heads, head_dim), [300, 1, 700, 9], dtype, 2, is_normed=is_normed), None
    )


@DTYPES
@pytest.mark.parametrize("shape", [Shape(8, 4, 256), Shape(4, 1, 128)], ids=str)
def test_norms_with_an_offset(dtype: torch.dtype, shape: Shape) -> None:
    step = make_decode(
        shape, [300, 1, 700, 9], dtype=dtype, device="cuda", seed=3,
        is_normed=True, weight_offset=1.0,
    )  # fmt: skip
    check_fused(step, None, pdl=True)


@MODELS
@pytest.mark.parametrize("num_seqs", [1, 8, 64, 127, 128, 256])
def test_the_backend_and_two_kernels_agree(shape: Shape, is_normed: bool, num_seqs: int) -> None:
    step = build(shape, [160] * num_seqs, torch.bfloat16, num_seqs, is_normed=is_normed)
    before, given = step.batch.kv_cache.clone(), step.qkv.clone()
    backend, ops = TritonAttention(torch.device("cuda")), TritonOps(torch.device("cuda"))
    expected = run_apart(step.on_copies(), backend, ops, None)
    layer = step.layer(ops, None)
    out = backend.rotate_and_attend(step.qkv, step.batch.kv_cache, layer, step.step)
    assert out.is_contiguous()
    step.qkv.copy_(given)
    check_output(step, out, None)
    check_cache(step, before)
    assert relative_error(out, expected) < BOUNDS[torch.bfloat16]


def test_a_slot_below_zero_is_not_stored() -> None:
    step = build(Shape(32, 8, 128), SEQ_LENS, torch.bfloat16, 3)
    step.batch.slot_mapping[1::2] = -1
    check_fused(step, None)


@MODELS
@pytest.mark.parametrize("seq_lens", [[160], [2048], [160] * 64, SEQ_LENS], ids=len)
def test_repeated_runs_are_bit_equal(shape: Shape, is_normed: bool, seq_lens: list[int]) -> None:
    step = build(shape, seq_lens, torch.bfloat16, 4, is_normed=is_normed)
    first = run_fused(step, None, pdl=True)
    cache = step.batch.kv_cache.clone().nan_to_num()
    for _ in range(50):
        assert torch.equal(run_fused(step, None, pdl=True), first)
        assert torch.equal(step.batch.kv_cache.nan_to_num(), cache)


@pytest.mark.parametrize("model", CHAINED.values(), ids=CHAINED)
@pytest.mark.parametrize("num_seqs", [1, 7, 64])
def test_a_chain_in_a_cuda_graph_gives_the_same_bits_every_time(
    model: ModelAttention, num_seqs: int
) -> None:
    """Each kernel reads what the one before wrote, which may still run: a missing wait shows."""
    seq_lens, shape = [160, 2048, 33, 1, 65, 500, 17] * 10, model.shape
    step = model.decode(seq_lens[:num_seqs], torch.bfloat16, "cuda", seed=5)
    if step.head_norms is not None:
        # larger scores would blow one layer's rounding up in the next
        step.head_norms.weight.fill_(1 - model.weight_offset)
    caches = [step.batch.kv_cache.clone() for _ in range(6)]
    backend, ops = TritonAttention(torch.device("cuda")), TritonOps(torch.device("cuda"))
    layer, width = step.layer(ops, model.window), step.qkv.shape[1]
    inner = shape.num_q_heads * shape.head_dim
    random = torch.Generator("cuda").manual_seed(6)
    weight = torch.randn(width, inner, generator=random, device="cuda").bfloat16() / inner**0.5
    norm = Norm(torch.ones(inner, dtype=torch.bfloat16, device="cuda"), 1e-5)
    start = torch.randn(num_seqs, inner, generator=random, device="cuda").bfloat16()

    def chain(*, is_fused: bool) -> torch.Tensor:
        attended = start
        for kv_cache in caches:
            qkv, _ = ops.product(ops.rms_norm(attended, norm), weight, Epilogue())
            assert isinstance(qkv, torch.Tensor)
            if is_fused:
                out = backend.rotate_and_attend(qkv, kv_cache, layer, step.step)
            else:
                q = layer.rotate_and_store(qkv, kv_cache, step.step)
                out = backend.attend(q, kv_cache, layer, step.batch.metadata)
            attended = out.flatten(1)
        return attended

    assert relative_error(chain(is_fused=True), chain(is_fused=False)) < 2e-2
    first = chain(is_fused=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(is_fused=True)
    expected = [kv_cache.clone().nan_to_num() for kv_cache in caches]
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first)
    for kv_cache, cache in zip(caches, expected, strict=True):
        assert torch.equal(kv_cache.nan_to_num(), cache)

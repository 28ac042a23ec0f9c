"""Kernels over a KV cache in FP8, on a GPU at real sizes, against fp64 over the same cache in
float32."""

import random
from dataclasses import replace

import pytest
import torch

from benchmarks.layer_reference import Heads, make_projected
from benchmarks.paged_reference import Shape, dense_attention, make_batch, relative_error
from tests.support.attention_steps import layer_of
from tests.support.fp8_caches import (
    BOUNDS,
    check_paged,
    fp8_decode,
    in_fp8,
    random_scales,
    store,
    to_fp8,
)
from tests.support.layer_checks import run_projection
from tests.support.rotated_decodes import make_decode
from worker_daemon.kernels.gathered_prefill import TritonFP8Gathered, TritonGathered
from worker_daemon.kernels.ops import TritonOps
from worker_daemon.kernels.paged_attention import TritonAttention
from worker_daemon.layers.prompt_attention import PromptAttention, cudnn_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.kernels,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SEED = random.randrange(1 << 30)
MIXED = [(1, 1500), (1, 3), (700, 700), (1, 257), (512, 2000), (0, 40), (33, 1000), (5, 5)]
DECODES = [1, 2, 15, 16, 17, 63, 64, 65, 129, 500, 2047, 2048, 2049, 4000]
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
SHAPES = pytest.mark.parametrize(
    "shape", [Shape(32, 8, 128), Shape(14, 2, 64), Shape(8, 4, 256), Shape(4, 4, 80)], ids=str
)
WINDOWS = pytest.mark.parametrize("window", [None, 300])


@DTYPES
@SHAPES
@WINDOWS
def test_paged_attention(dtype: torch.dtype, shape: Shape, window: int | None) -> None:
    for lengths in (MIXED, [(1, length) for length in DECODES]):
        batch = make_batch(shape, lengths, dtype=dtype, device="cuda", seed=SEED, num_padding=3)
        scales = random_scales(shape.num_kv_heads, "cuda", SEED)
        check_paged(in_fp8(batch, scales), scales, window, pdl=True)


@DTYPES
@SHAPES
@WINDOWS
@pytest.mark.parametrize("num_splits", [None, 1, 5])
def test_decodes_that_store(
    dtype: torch.dtype, shape: Shape, window: int | None, num_splits: int | None
) -> None:
    wide = make_decode(
        shape, DECODES, dtype=dtype, device="cuda", seed=SEED, num_padding=5, num_idle=2
    )
    wide.batch.slot_mapping[-5:] = 0
    fp8_decode(wide, SEED).check(window, num_splits=num_splits, pdl=True)


@pytest.mark.parametrize("num_seqs", [1, 8, 64, 256])
@pytest.mark.parametrize("is_normed", [False, True])
def test_one_kernel_and_two_agree(num_seqs: int, is_normed: bool) -> None:
    wide = make_decode(
        Shape(32, 8, 128), [160] * num_seqs, dtype=torch.bfloat16, device="cuda", seed=SEED,
        is_normed=is_normed,
    )  # fmt: skip
    step = fp8_decode(wide, SEED)
    apart = step.on_copies()
    backend, ops = TritonAttention(torch.device("cuda")), TritonOps(torch.device("cuda"))
    expected = apart.run_apart(backend, ops, None)
    out = step.run_fused(None)
    assert relative_error(out, expected) < BOUNDS[torch.bfloat16]
    same = step.batch.kv_cache.view(torch.uint8) == apart.batch.kv_cache.view(torch.uint8)
    assert same.float().mean() > 0.9999  # the order of a norm's sum moves keys across ties


@DTYPES
def test_stored_values_equal_the_definition(dtype: torch.dtype) -> None:
    """Also those beyond the range, infinite, NaN or below the smallest step."""
    heads = Heads(8, 4, 128)
    random_rows = torch.Generator("cuda").manual_seed(SEED)
    step = make_projected(heads, 64, dtype, random_rows)
    values = step.qkv.view(64, -1, 128)[:, -4:]
    values[:4] *= 1e4
    values[4:8] *= 1e-4
    values[8, :, 0], values[9, :, 0] = float("inf"), float("nan")
    values[10, :, 0] = -float("inf")
    scales = random_scales(4, "cuda", SEED)
    expected = to_fp8(values, scales.values[1])
    cache = torch.zeros(step.kv_cache.shape, dtype=torch.float8_e4m3fn, device="cuda")
    ops = TritonOps(torch.device("cuda"))
    run_projection(ops, step, cache, kv_scales=scales)
    block, offset = step.slot_mapping // heads.block_size, step.slot_mapping % heads.block_size
    got = cache.view(torch.uint8)[block, 1, offset].view(torch.float8_e4m3fn).float()
    assert torch.equal(got.isnan(), expected.float().isnan())
    assert torch.equal(got.nan_to_num(), expected.float().nan_to_num())


@pytest.mark.parametrize("window", [None, 300])
def test_long_prompts(window: int | None) -> None:
    """By cuDNN, and over gathered keys."""
    shape = Shape(32, 8, 128)
    lengths = [(1100, 1100), (1, 40), (2048, 2048), (1500, 5000)]
    batch = make_batch(shape, lengths, dtype=torch.bfloat16, device="cuda", seed=SEED)
    scales = random_scales(8, "cuda", SEED)
    batch = in_fp8(batch, scales)
    store(batch, scales)
    device = torch.device("cuda")
    backend = PromptAttention(TritonAttention(device), TritonGathered(device), cudnn_attention)
    layer = replace(layer_of(shape, window), kv_scales=scales)
    out = backend.attend(batch.q, batch.kv_cache, layer, batch.metadata)
    assert relative_error(out, dense_attention(batch, window)) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (3000, None), (None, 30.0)])
def test_long_prompts_with_products_in_fp8(
    head_dim: int, window: int | None, cap: float | None
) -> None:
    """A result is off by three bits' rounding of the weights, of what it sums in magnitude, and by
    that of the queries; of NaN and infinite queries it is NaN."""
    shape = Shape(16, 4, head_dim)
    lengths = [(1100, 1100), (1, 40), (2048, 30_000)]
    batch = make_batch(shape, lengths, dtype=torch.bfloat16, device="cuda", seed=SEED)
    scales = random_scales(4, "cuda", SEED)
    batch = in_fp8(batch, scales)
    store(batch, scales)
    device = torch.device("cuda")
    backend = PromptAttention(TritonAttention(device), TritonFP8Gathered(device))
    layer = replace(layer_of(shape, window, logit_softcap=cap), kv_scales=scales)
    out = backend.attend(batch.q, batch.kv_cache, layer, batch.metadata)
    expected = dense_attention(batch, window, logit_softcap=cap)
    assert 1e-3 < relative_error(out, expected) < 0.08
    batch.q[7, 2, 5], batch.q[1500, 3, 0] = torch.nan, torch.inf
    poisoned = backend.attend(batch.q, batch.kv_cache, layer, batch.metadata)
    is_bad = torch.zeros(out.shape[:2], dtype=torch.bool, device="cuda")
    is_bad[7, 2] = is_bad[1500, 3] = True
    assert poisoned[is_bad].isnan().all()
    assert torch.equal(poisoned[~is_bad], out[~is_bad])

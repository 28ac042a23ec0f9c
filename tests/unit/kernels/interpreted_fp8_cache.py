"""Attention over a KV cache in FP8 under Triton's interpreter, against fp64 over the same cache in
float32; conftest.py runs it.

Queries in bfloat16 become float16, so that the interpreter's dot takes them too (see
interpreted_attention).
"""

import random
from dataclasses import replace

import pytest
import torch

from benchmarks.paged_reference import Shape, dense_attention, make_batch, relative_error
from tests.support.attention_steps import random_sinks
from tests.support.exhaustive import exhaustively
from tests.support.fp8_caches import (
    BOUNDS,
    check_paged,
    fp8_decode,
    in_fp8,
    random_scales,
    store,
)
from tests.support.rotated_decodes import make_decode
from worker_daemon.kernels.ops import TritonOps
from worker_daemon.kernels.paged_attention import TritonAttention, paged_attention
from worker_daemon.kernels.tiles import DeviceLimits

pytestmark = pytest.mark.each_value  # make test-all runs every combination

CPU = torch.device("cpu")
SEED = random.randrange(1 << 30)
MIXED = [(18, 70), (1, 65), (0, 9), (1, 1), (5, 64), (20, 20)]
DECODES = [(1, 1), (1, 64), (1, 65), (0, 7), (1, 150)]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("dtype", "window"), [(torch.float16, None), (torch.float32, 21), (torch.bfloat16, None)]
)
def test_prefills_and_decodes(head_dim: int, dtype: torch.dtype, window: int | None) -> None:
    shape = Shape(4, 2, head_dim)
    for number, lengths in enumerate((MIXED, DECODES)):
        batch = make_batch(
            shape, lengths, dtype=dtype, device="cpu", seed=SEED + number, num_padding=2
        )
        scales = random_scales(2, "cpu", SEED + number)
        check_paged(in_fp8(batch, scales), scales, window)


@pytest.mark.parametrize(
    ("dtype", "window"), [(torch.float16, 21), (torch.float32, None), (torch.bfloat16, None)]
)
def test_capped_scores_and_sinks(dtype: torch.dtype, window: int | None) -> None:
    scales, sinks = random_scales(2, "cpu", SEED), random_sinks(6, dtype, seed=SEED)
    for number, lengths in enumerate((MIXED, DECODES)):
        batch = make_batch(
            Shape(6, 2, 64), lengths, dtype=dtype, device="cpu", seed=SEED + number, num_padding=2
        )
        narrow = in_fp8(batch, scales)
        check_paged(narrow, scales, window, logit_softcap=2.0, sinks=sinks)


@pytest.mark.parametrize(("num_splits", "window"), [(1, None), (3, 40)])
@pytest.mark.parametrize(
    ("rotary_dim", "interleaved", "logit_softcap", "has_sinks"),
    [(64, False, 2.0, True), (48, False, None, True), (32, True, None, False)],
)
def test_decodes_with_options(
    rotary_dim: int,
    interleaved: bool,
    logit_softcap: float | None,
    has_sinks: bool,
    num_splits: int,
    window: int | None,
) -> None:
    wide = make_decode(
        Shape(6, 2, 64), [1, 17, 64, 65, 90], dtype=torch.float16, device="cpu", seed=SEED,
        num_padding=2, rotary_dim=rotary_dim, interleaved=interleaved,
        logit_softcap=logit_softcap, has_sinks=has_sinks,
    )  # fmt: skip
    fp8_decode(wide, SEED).check(window, num_splits=num_splits)


@pytest.mark.parametrize(("window", "num_splits"), [(None, 3), (16, 2)])
def test_decode_splits(window: int | None, num_splits: int) -> None:
    batch = make_batch(Shape(4, 2, 64), DECODES, dtype=torch.float16, device="cpu", seed=SEED)
    scales = random_scales(2, "cpu", SEED)
    check_paged(in_fp8(batch, scales), scales, window, num_splits=num_splits)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("num_splits", "window"), [(1, None), (2, 40)])
def test_decodes_that_store(head_dim: int, num_splits: int, window: int | None) -> None:
    wide = make_decode(
        Shape(4, 2, head_dim), [1, 17, 64, 65, 90], dtype=torch.float16, device="cpu", seed=SEED,
        is_normed=True, num_padding=2,
    )  # fmt: skip
    fp8_decode(wide, SEED).check(window, num_splits=num_splits)


@pytest.mark.parametrize(("num_splits", "window"), [(1, None), (2, 40)])
def test_decodes_in_bfloat16(num_splits: int, window: int | None) -> None:
    """Output only: the interpreter does not round what is stored to bfloat16 as devices do."""
    wide = make_decode(
        Shape(4, 2, 64), [1, 17, 64, 65, 90], dtype=torch.bfloat16, device="cpu", seed=SEED,
        num_padding=2,
    )  # fmt: skip
    step = fp8_decode(wide, SEED)
    step.check_output(step.run_fused(window, num_splits=num_splits), window)


@pytest.mark.parametrize("magnitude", [0.0, 1e-20, *map(exhaustively, [1e-6, 1e-2]), 1e6])
def test_queries_of_any_magnitude(magnitude: float) -> None:
    """Queries that float16 does not have: scores of small ones are near zero, those of large ones
    become as large as elsewhere."""
    shape = Shape(4, 2, 64)
    batch = make_batch(shape, [(20, 70), (1, 65)], dtype=torch.bfloat16, device="cpu", seed=SEED)
    scales = random_scales(2, "cpu", SEED)
    batch = in_fp8(replace(batch, q=batch.q * magnitude), scales)
    scale = shape.scale / max(1.0, magnitude)
    store(batch, scales)
    out = paged_attention(
        batch.q, batch.kv_cache, batch.metadata, scale=scale, window=None, kv_scales=scales
    )
    # The reference has the shape's scale.
    same = replace(batch, q=batch.q.double() * (scale / shape.scale))
    assert relative_error(out, dense_attention(same, None)) < BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("num_sms", [1, 1024])
def test_the_backend(num_sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, ops = TritonAttention(CPU), TritonOps(CPU)
    monkeypatch.setattr(backend, "_limits", DeviceLimits(num_sms, 96 * 1024))
    wide = make_decode(Shape(4, 2, 32), [1, 17, 64], dtype=torch.float16, device="cpu", seed=SEED)
    step = fp8_decode(wide, SEED)
    before, given = step.batch.kv_cache.clone(), wide.qkv.clone()
    layer = step.layer(ops, None)
    out = backend.rotate_and_attend(wide.qkv, step.batch.kv_cache, layer, wide.step)
    wide.qkv.copy_(given)
    step.check_output(out, None)
    step.check_cache(before)

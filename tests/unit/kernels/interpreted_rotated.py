"""Decodes that turn and store their own heads, under Triton's interpreter; conftest.py runs it.

fp32 and fp16 only: the interpreter's dot reads bf16 operands as integers. The GPU tests cover bf16.
"""

from dataclasses import replace

import pytest
import torch

from benchmarks.paged_reference import Shape, make_batch, relative_error
from tests.support.exhaustive import exhaustively
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
from worker_daemon.kernels.ops import TritonOps
from worker_daemon.kernels.paged_attention import TritonAttention
from worker_daemon.kernels.tiles import DeviceLimits, Tile

pytestmark = pytest.mark.each_value  # make test-all runs every combination

CPU = torch.device("cpu")
BACKEND = TritonAttention(CPU)
OPS = TritonOps(CPU)

# No cached key at all, blocks that are new or just full, tiles that are.
SEQ_LENS = [1, 17, 64, 65, 150, 2]


def build(
    shape: Shape, seq_lens: list[int], seed: int, dtype: torch.dtype = torch.float16, **how: object
) -> RotatedDecode:
    return make_decode(shape, seq_lens, dtype=dtype, device="cpu", seed=seed, **how)


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim"),
    [
        *((2, 2, 64), (7, 1, 32), (16, 1, 64), (4, 2, 8), (2, 1, 256)),
        exhaustively(4, 1, 128),
        exhaustively(2, 1, 80),
    ],
)
def test_head_shapes(is_normed: bool, num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
    shape = Shape(num_q_heads, num_kv_heads, head_dim)
    check_fused(build(shape, [1, 33], head_dim, is_normed=is_normed), None)


@pytest.mark.parametrize("head_dim", [32, exhaustively(80)])
def test_norms_with_an_offset(head_dim: int) -> None:
    shape = Shape(4, 2, head_dim)
    step = make_decode(
        shape, SEQ_LENS, dtype=torch.float16, device="cpu", seed=20,
        is_normed=True, weight_offset=1.0,
    )  # fmt: skip
    check_fused(step, None)


@pytest.mark.parametrize(
    ("window", "num_splits"),
    [
        *((None, 1), (1, 1), (16, 1), (1, 3), (100, 4)),
        exhaustively(2, 1),
        exhaustively(None, 4),
    ],
)
def test_splits_and_windows(window: int | None, num_splits: int) -> None:
    step = build(Shape(2, 1, 32), SEQ_LENS, 10 * num_splits + (window or 0), is_normed=True)
    check_fused(step, window, num_splits=num_splits, tile=Tile(16, 32, 2, 3))


ROTATIONS = pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "interleaved"),
    [
        (128, 96, False),
        exhaustively(80, 2, False),
        exhaustively(128, 64, True),
        (80, 80, True),
        (8, 2, True),
    ],
)


@ROTATIONS
@pytest.mark.parametrize("is_normed", [False, True])
def test_other_rotations(
    is_normed: bool, head_dim: int, rotary_dim: int, interleaved: bool
) -> None:
    shape, how = Shape(4, 1, head_dim), {"rotary_dim": rotary_dim, "interleaved": interleaved}
    check_fused(build(shape, SEQ_LENS, rotary_dim, is_normed=is_normed, **how), 40)


@pytest.mark.parametrize(
    ("window", "num_splits"),
    [(None, 1), (1, 3), (100, 9), *(exhaustively(*case) for case in [(1, 1), (16, 1), (None, 4)])],
)
@pytest.mark.parametrize(("logit_softcap", "has_sinks"), [(1.5, False), (None, True), (5.0, True)])
def test_capped_scores_and_sinks(
    logit_softcap: float | None, has_sinks: bool, window: int | None, num_splits: int
) -> None:
    """The last split starts with the newest key, the first one with the sink."""
    how = {"logit_softcap": logit_softcap, "has_sinks": has_sinks, "num_padding": 2}
    step = build(Shape(6, 2, 32), SEQ_LENS, 10 * num_splits + (window or 0), **how)
    check_fused(step, window, num_splits=num_splits, tile=Tile(16, 32, 2, 3))


@pytest.mark.parametrize(("num_padding", "num_idle", "num_splits"), [(3, 0, 1), (5, 3, 2)])
def test_padding_and_idle_sequences(num_padding: int, num_idle: int, num_splits: int) -> None:
    step = build(Shape(4, 2, 32), SEQ_LENS, 5, num_padding=num_padding, num_idle=num_idle)
    # As in a daemon: padding points into block 0, of which nothing may be stored or read.
    step.batch.slot_mapping[-num_padding:] = 0
    check_fused(step, None, num_splits=num_splits)


def test_a_slot_below_zero_is_not_stored() -> None:
    step = build(Shape(4, 2, 32), SEQ_LENS, 6)
    step.batch.slot_mapping[1::2] = -1
    check_fused(step, None)


def test_positions_and_slots_of_the_other_width() -> None:
    step = build(Shape(4, 2, 32, 8), SEQ_LENS, 7)
    batch = replace(step.batch, slot_mapping=step.batch.slot_mapping.int())
    check_fused(replace(step, batch=batch, positions=step.positions.long()), None)


@pytest.mark.parametrize(("dtype", "window"), [(torch.float16, None), (torch.float32, 40)])
def test_one_kernel_and_two_agree(dtype: torch.dtype, window: int | None) -> None:
    step = build(Shape(4, 2, 64), SEQ_LENS, 8, dtype, is_normed=True, num_padding=2)
    apart = step.on_copies()
    expected = run_apart(apart, BACKEND, OPS, window)
    out = run_fused(step, window)
    # As close as two orders of one sum in float32 come, and seldom one more bit of an output.
    assert relative_error(out, expected) < {torch.float16: 2e-4, torch.float32: 1e-6}[dtype]
    keys, expected_keys = (cache.batch.kv_cache.nan_to_num() for cache in (step, apart))
    assert relative_error(keys, expected_keys) < {torch.float16: 1e-4, torch.float32: 1e-6}[dtype]


def test_what_else_the_cache_holds_has_no_effect() -> None:
    step = build(Shape(8, 1, 32), SEQ_LENS, 9)
    other = step.on_copies()
    other.batch.kv_cache.nan_to_num_(nan=7.0)
    assert torch.equal(run_fused(step, None), run_fused(other, None))


def attend(step: RotatedDecode, window: int | None = None) -> torch.Tensor:
    layer = step.layer(OPS, window)
    return BACKEND.rotate_and_attend(step.qkv, step.batch.kv_cache, layer, step.step)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rotary_dim": 24, "has_sinks": True},
        {"rotary_dim": 16, "interleaved": True, "logit_softcap": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_sms", [1, 1024])
def test_the_backend_serves_steps_of_decodes(
    num_sms: int, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BACKEND, "_limits", DeviceLimits(num_sms, 96 * 1024))
    step = build(Shape(4, 2, 32), SEQ_LENS, 11, is_normed=True, **options)
    given, before = step.qkv.clone(), step.batch.kv_cache.clone()
    out = attend(step, 30)
    is_fused = torch.equal(step.qkv, given)  # apart, the queries are turned in their place
    assert is_fused == (num_sms == 1024)
    step.qkv.copy_(given)
    check_output(step, out, 30)
    check_cache(step, before)


def test_the_backend_serves_mixed_steps() -> None:
    lengths = [(1, 40), (5, 30), (3, 3)]
    batch = make_batch(Shape(4, 2, 32), lengths, dtype=torch.float16, device="cpu", seed=12)
    decode = build(Shape(4, 2, 32), [64], 12)
    starts = [seq_len - query_len for query_len, seq_len in lengths]
    positions = torch.cat([torch.arange(s, n) for s, (_, n) in zip(starts, lengths, strict=True)])
    qkv = torch.cat((batch.q, batch.k, batch.v), dim=1).flatten(1)
    step = replace(decode, batch=batch, qkv=qkv, positions=positions.int())
    expected = run_apart(step.on_copies(), BACKEND, OPS, None)
    assert relative_error(attend(step), expected) < BOUNDS[torch.float16]

"""The layer kernels under Triton's interpreter against torch in fp64; conftest.py runs it."""

from typing import get_args

import pytest
import torch

from benchmarks.layer_reference import Heads, make_projected, rotated
from benchmarks.paged_reference import relative_error
from tests.support.exhaustive import exhaustively
from tests.support.layer_checks import (
    BOUNDS,
    check_activation,
    check_norms,
    check_products,
    check_projection,
    check_span_norms,
    generator,
    run_projection,
)
from worker_daemon.contracts.layer_ops import Activation, Norm, NormedSum
from worker_daemon.kernels.ops import TritonOps

# A gate far below 0 makes exp infinite, and its sigmoid 0.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.each_value,
]  # make test-all runs every combination
OPS = TritonOps(torch.device("cpu"))
# The interpreter cuts bf16 off where a device rounds.
LOOSER = {torch.bfloat16: 8e-3}
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
OFFSETS = pytest.mark.parametrize("weight_offset", [0.0, 1.0])
ACTIVATIONS = pytest.mark.parametrize("activation", get_args(Activation))


@DTYPES
@pytest.mark.parametrize(
    ("num_rows", "size"),
    [(3, 64), exhaustively(2, 1024), (5, 72), exhaustively(1, 5120), (2, 16384)],
)
@OFFSETS
def test_norms(dtype: torch.dtype, num_rows: int, size: int, weight_offset: float) -> None:
    check_norms(
        OPS, "cpu", dtype, num_rows, size,
        seed=size, bound=LOOSER.get(dtype), weight_offset=weight_offset,
    )  # fmt: skip


@DTYPES
@pytest.mark.parametrize(
    ("heads", "num_ranks"),
    [((4, 4, 16), 1), ((5, 1, 24), 1), ((8, 2, 16), 2), ((8, 2, 8), 8), ((40, 8, 128), 1)],
)
def test_span_norms(dtype: torch.dtype, heads: tuple[int, int, int], num_ranks: int) -> None:
    check_span_norms(OPS, "cpu", dtype, heads, num_ranks, seed=heads[0], bound=LOOSER.get(dtype))


@DTYPES
@pytest.mark.parametrize(("num_rows", "size"), [(3, 64), (2, 1024), (4, 24), (3, 1720)])
@ACTIVATIONS
def test_activation(dtype: torch.dtype, num_rows: int, size: int, activation: Activation) -> None:
    check_activation(
        OPS, activation, "cpu", dtype, num_rows, size, seed=size, bound=LOOSER.get(dtype)
    )


@DTYPES
@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "num_outputs"),
    [(1, 64, 32), (1, 40, 18), (3, 64, 32), (1, 1096, 22)],
)
@pytest.mark.parametrize(("activation", "weight_offset"), [("silu", 0.0), ("gelu_tanh", 1.0)])
def test_products(
    dtype: torch.dtype,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    activation: Activation,
    weight_offset: float,
) -> None:
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    check_products(
        OPS, "cpu", dtype, num_rows, num_inputs, num_outputs,
        seed=1, bound=bound, activation=activation, weight_offset=weight_offset,
    )  # fmt: skip


@DTYPES
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "block_size"),
    [(4, 2, 8, 8), (6, 3, 80, 16), exhaustively(16, 2, 128, 16), (7, 1, 24, 32), (2, 2, 256, 4)],
)
def test_projection(
    dtype: torch.dtype,
    is_normed: bool,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
) -> None:
    heads = Heads(num_q_heads, num_kv_heads, head_dim, is_normed, block_size)
    check_projection(OPS, "cpu", dtype, heads, 15, seed=head_dim, bound=LOOSER.get(dtype))


@DTYPES
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "interleaved"),
    [
        (128, 96, False),
        (80, 2, False),
        (24, 16, False),
        (128, 64, True),
        (80, 80, True),
        (8, 2, True),
    ],
)
def test_other_rotations(
    dtype: torch.dtype, is_normed: bool, head_dim: int, rotary_dim: int, interleaved: bool
) -> None:
    heads = Heads(6, 2, head_dim, is_normed, rotary_dim=rotary_dim, interleaved=interleaved)
    check_projection(OPS, "cpu", dtype, heads, 15, seed=head_dim, bound=LOOSER.get(dtype))


@DTYPES
def test_a_projection_whose_norms_have_an_offset(dtype: torch.dtype) -> None:
    heads = Heads(6, 3, 80, is_normed=True)
    check_projection(
        OPS, "cpu", dtype, heads, 15, seed=5, bound=LOOSER.get(dtype), weight_offset=1.0
    )


def test_positions_and_slots_may_be_int32() -> None:
    heads = Heads(4, 2, 16)
    check_projection(OPS, "cpu", torch.float32, heads, 9, seed=1, integers=torch.int32)


@pytest.mark.parametrize("rotary_dim", [32, 24])
def test_without_a_cache_only_the_queries_are_made(rotary_dim: int) -> None:
    heads = Heads(4, 2, 32, is_normed=True, rotary_dim=rotary_dim)
    step = make_projected(heads, 5, torch.float32, generator("cpu", 2))
    expected = rotated(step)[0]
    out = run_projection(OPS, step, torch.empty(0))
    assert relative_error(out, expected) < BOUNDS[torch.float32]


def test_no_tokens() -> None:
    empty = torch.ones(0, 64)
    norm = Norm(torch.ones(64), 1e-6)
    assert OPS.rms_norm(empty, norm).shape == (0, 64)
    for part in (None, empty):
        source = NormedSum(part, empty, norm)
        assert [t.shape for t in OPS.sum_and_norm(source)] == [(0, 64)] * 2
    assert OPS.rms_norm_add(empty, empty, norm).shape == (0, 64)
    assert OPS.act_and_mul(empty, "silu").shape == (0, 32)
    step = make_projected(Heads(2, 1, 16), 0, torch.float32, generator("cpu", 3))
    before = step.kv_cache.clone()
    assert run_projection(OPS, step, step.kv_cache).shape == (0, 2, 16)
    assert torch.equal(step.kv_cache, before)


@DTYPES
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    x = torch.randn(6, 320, generator=generator("cpu", 4)).to(dtype)
    norm = Norm(torch.ones(320, dtype=dtype), 1e-6)
    assert torch.equal(OPS.rms_norm(x, norm)[3:4], OPS.rms_norm(x[3:4], norm))

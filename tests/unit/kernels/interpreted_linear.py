"""Skinny GEMMs under Triton's interpreter against fp64; conftest.py runs it.

The interpreter multiplies bf16 tiles wrongly (it holds them as integers), so matrix tiles run in
fp16 here and in bf16 in tests/gpu/test_linear_kernels.py. It also cuts a bf16 result off where a
GPU rounds it, which is up to 2**-7 of each element.
"""

from typing import get_args

import pytest
import torch

from benchmarks.layer_reference import activated
from worker_daemon.contracts.layer_ops import Activation
from worker_daemon.kernels.linear import ThinLinear, launch_matrix
from worker_daemon.kernels.row_linear import launch_row
from worker_daemon.kernels.tuning import MatrixTile, Tuning, VectorTile

pytestmark = pytest.mark.each_value  # make test-all runs every combination

BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 2**-7}

BIAS = pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])


def draw(
    num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    x = torch.randn(num_rows, num_inputs).to(dtype)
    weight = (torch.randn(num_outputs, num_inputs) / num_inputs**0.5).to(dtype)
    return x, weight, torch.randn(num_outputs).to(dtype) if has_bias else None


def check(
    y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias.double()
    assert (y.double() - expected).norm() / expected.norm() < BOUNDS[y.dtype]


@BIAS
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "tile"),
    [
        (64, 256, VectorTile(2, 128, 4)),
        (37, 200, VectorTile(4, 64, 4)),
        (5, 72, VectorTile(1, 128, 4)),
        (7, 33, VectorTile(1, 16, 4)),
    ],
)
def test_one_row(
    num_outputs: int, num_inputs: int, tile: VectorTile, dtype: torch.dtype, has_bias: bool
) -> None:
    x, weight, bias = draw(1, num_outputs, num_inputs, dtype, has_bias)
    y = torch.full((1, num_outputs), torch.nan, dtype=dtype)
    launch_row(y, x, weight, bias, tile, pdl=False)
    check(y, x, weight, bias)


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("block_o", [1, 2, 8])
def test_one_gated_row(block_o: int, activation: Activation) -> None:
    x, weight, bias = draw(1, 36, 96, torch.float16, True)
    assert bias is not None
    y = torch.full((1, 18), torch.nan, dtype=torch.float16)
    launch_row(y, x, weight, bias, VectorTile(block_o, 32, 4), pdl=False, gate=activation)
    expected = activated(x.double() @ weight.double().T + bias.double(), activation)
    assert (y.double() - expected).norm() / expected.norm() < 3 * BOUNDS[torch.float16]


@BIAS
@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), [(2, 32, 96), (21, 40, 122)])
@pytest.mark.parametrize("num_splits", [1, 2, 3])
def test_several_rows(
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    num_splits: int,
    has_bias: bool,
) -> None:
    x, weight, bias = draw(num_rows, num_outputs, num_inputs, torch.float16, has_bias)
    arrivals = torch.zeros(16, dtype=torch.int32)
    tile = MatrixTile(16, 16, num_splits, num_warps=4, num_stages=2, prefetch=0)
    for _ in range(2):
        y = torch.full((num_rows, num_outputs), torch.nan, dtype=x.dtype)
        launch_matrix(y, x, weight, bias, tile, False, arrivals)
        check(y, x, weight, bias)
        assert not arrivals.any()


def test_rows_do_not_depend_on_each_other() -> None:
    x, weight, _ = draw(9, 64, 128, torch.float16, False)
    tile = MatrixTile(16, 32, 2, 4, 2, prefetch=0)
    linear = ThinLinear(torch.device("cpu"), Tuning({(64, 128, 16): tile})).linear
    together = linear(x, weight)
    assert torch.equal(linear(x[3:5], weight), together[3:5])


def test_input_rows_may_lie_apart() -> None:
    x, weight, _ = draw(6, 32, 64, torch.float16, False)
    tile = MatrixTile(16, 32, 1, 4, 2, prefetch=0)
    apart = torch.cat([x, x], dim=1)[:, :64]
    linear = ThinLinear(torch.device("cpu"), Tuning({(32, 64, 16): tile})).linear
    assert torch.equal(linear(apart, weight), linear(x, weight))


@pytest.mark.parametrize("num_rows", [0, 1, 5, 64, 65])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_what_is_not_tuned_is_right_too(num_rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = draw(num_rows, 24, 40, dtype, True)
    y = ThinLinear(torch.device("cpu")).linear(x, weight, bias)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize("num_rows", [0, 1, 5, 65])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_product_into_memory_that_is_given(num_rows: int, dtype: torch.dtype) -> None:
    """The same bits, by every kernel and by torch."""
    x, weight, _ = draw(num_rows, 32, 64, dtype, False)
    tile = MatrixTile(16, 32, 2, 4, 2, prefetch=0)
    linear = ThinLinear(torch.device("cpu"), Tuning({(32, 64, 16): tile})).linear
    memory = torch.full((70, 32), 7, dtype=dtype)
    y = linear(x, weight, None, memory[:num_rows])
    assert y.data_ptr() == memory.data_ptr() or not num_rows
    assert torch.equal(y, linear(x, weight))
    assert (memory[num_rows:] == 7).all()


def test_weights_that_are_not_contiguous() -> None:
    x, weight, _ = draw(1, 24, 40, torch.float16, False)
    transposed = weight.T.contiguous().T
    y = ThinLinear(torch.device("cpu")).linear(x, transposed)
    check(y, x, weight, None)

"""Products with weights in 4 bits on a GPU, at real sizes, against fp64."""

import pytest
import torch

from tests.support.int4_products import draw_int4, expected_int4
from worker_daemon.kernels.int4_linear import Int4Linear, dequantize
from worker_daemon.kernels.launch import has_dependent_launch
from worker_daemon.kernels.tuning import MatrixTile, VectorTile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.kernels,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda")
BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 6e-3}
SHAPES = [(6144, 4096, 128), (4096, 14336, 128), (1000, 1088, 32), (1003, 1152, 64), (77, 96, 96)]
TILES = [
    None,
    MatrixTile(32, 32, 2, 2, 4, 512),
    MatrixTile(64, 32, 1, 4, 3, 0),
    VectorTile(4, 4096, 4),
]


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("has_zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 33, 64, 65])
def test_products_against_fp64(
    num_rows: int, shape: tuple[int, int, int], has_zeros: bool, dtype: torch.dtype
) -> None:
    matrix, weight = draw_int4(*shape, dtype, DEVICE, has_zeros=has_zeros)
    x = torch.randn(num_rows, shape[1], device=DEVICE).to(dtype)
    bias = torch.randn(shape[0], device=DEVICE).to(dtype)
    for tile in TILES:
        linear = Int4Linear(DEVICE, tile)
        for given in (None, bias):
            y = linear.linear(x, matrix, given)
            assert relative_error(y, expected_int4(x, weight, given)) < BOUNDS[dtype]
            assert torch.equal(linear.linear(x, matrix, given), y)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantized_weights_are_exact(shape: tuple[int, int, int]) -> None:
    matrix, weight = draw_int4(*shape, torch.bfloat16, DEVICE)
    ours = dequantize(matrix, torch.bfloat16, has_dependent_launch(DEVICE))
    assert torch.equal(ours, weight.float().bfloat16())


@pytest.mark.parametrize("num_rows", [3, 40])
def test_a_row_does_not_depend_on_its_neighbors(num_rows: int) -> None:
    matrix, _ = draw_int4(4096, 4096, 128, torch.bfloat16, DEVICE)
    x = torch.randn(num_rows, 4096, device=DEVICE).bfloat16()
    y = Int4Linear(DEVICE).linear(x, matrix, None)
    x[1:] = torch.nan
    assert torch.equal(Int4Linear(DEVICE).linear(x, matrix, None)[0], y[0])

"""Products with weights in 4 bits under Triton's interpreter against fp64; conftest.py runs it.

The interpreter multiplies bf16 tiles wrongly (see interpreted_linear.py), so these run in fp16, and
in bf16 in tests/gpu/test_int4_kernels.py, where values are converted by instructions of the device.
"""

import pytest
import torch

from tests.support.int4_products import draw_int4, expected_int4
from worker_daemon.contracts.layer_ops import Epilogue
from worker_daemon.kernels.int4_linear import Int4Linear, choose_tile
from worker_daemon.kernels.int4_row import choose_row_tile
from worker_daemon.kernels.ops import TritonOps
from worker_daemon.kernels.tuning import MatrixTile, Tile, VectorTile
from worker_daemon.layers.torch_ops import TorchOps

pytestmark = pytest.mark.each_value  # make test-all runs every combination

CPU = torch.device("cpu")
BOUND = 1e-3


def check(y: torch.Tensor, expected: torch.Tensor) -> None:
    assert (y.double() - expected).norm() / expected.norm() < BOUND


@pytest.mark.parametrize(
    ("has_zeros", "has_bias"), [(False, True), (True, False)], ids=["symmetric", "zeros"]
)
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs", "group_size"),
    [(1, 96, 256, 128), (5, 37, 192, 32), (17, 300, 384, 64), (3, 32, 96, 96)],
)
@pytest.mark.parametrize(
    "tile", [MatrixTile(32, 32, 2, 2, 2, 0), VectorTile(2, 128, 1), None], ids=str
)
def test_few_rows(
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    group_size: int,
    tile: Tile | None,
    has_bias: bool,
    has_zeros: bool,
) -> None:
    x = torch.randn(num_rows, num_inputs).half()
    matrix, weight = draw_int4(
        num_outputs, num_inputs, group_size, torch.float16, CPU, has_zeros=has_zeros
    )
    bias = torch.randn(num_outputs).half() if has_bias else None
    linear = Int4Linear(CPU, tile)
    for _ in range(2):  # the counters are zero again
        check(linear.linear(x, matrix, bias), expected_int4(x, weight, bias))


@pytest.mark.parametrize("has_zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_many_rows_dequantize(dtype: torch.dtype, has_zeros: bool) -> None:
    x = torch.randn(70, 192).to(dtype)
    matrix, weight = draw_int4(150, 192, 64, dtype, CPU, has_zeros=has_zeros)
    check(Int4Linear(CPU).linear(x, matrix, None), expected_int4(x, weight, None))
    assert torch.equal(matrix.dequantized(dtype), weight.float().to(dtype))


def test_rows_of_nothing() -> None:
    matrix, _ = draw_int4(32, 64, 32, torch.float16, CPU)
    assert Int4Linear(CPU).linear(torch.empty(0, 64).half(), matrix, None).shape == (0, 32)


@pytest.mark.parametrize("num_rows", [2, 16, 33, 64])
@pytest.mark.parametrize("shape", [(4096, 4096), (28672, 8192), (64, 128), (1 << 20, 64)])
def test_chosen_tiles_fit_the_device(num_rows: int, shape: tuple[int, int]) -> None:
    words = torch.empty(shape[0], shape[1] // 8, dtype=torch.int32, device="meta")
    groups = torch.empty(shape[1] // 64, shape[0], 2, device="meta")
    matrix, _ = draw_int4(32, 64, 32, torch.float16, CPU)
    tile = choose_tile(num_rows, matrix._replace(values=words, groups=groups), 132)
    assert 1 <= tile.num_splits <= max(1, shape[1] // tile.block_i)
    assert 64 % tile.block_i == 0
    assert tile.block_o // tile.num_warps >= 16


@pytest.mark.parametrize("shape", [(4096, 4096), (6144, 64), (77, 96), (8192, 53248)])
def test_chosen_tiles_of_one_row_take_at_most_four_steps(shape: tuple[int, int]) -> None:
    tile = choose_row_tile(shape, 132)
    assert -(-shape[1] // tile.block_i) <= 4
    assert tile.block_i <= 32 * 32 * tile.num_warps
    assert tile.block_o == (16 if shape[0] == 6144 else 8)


@pytest.mark.parametrize("num_rows", [1, 9, 70])
def test_the_operations_of_a_layer_agree_with_torch(num_rows: int) -> None:
    matrix, _ = draw_int4(96, 64, 32, torch.float16, CPU)
    x = torch.randn(num_rows, 64).half()
    shuffled = matrix._replace(order=torch.randperm(64, dtype=torch.int32))
    for each in (matrix, shuffled):
        ours, _ = TritonOps(CPU).product(x, each, Epilogue())
        assert isinstance(ours, torch.Tensor)
        check(ours, TorchOps().product(x, each, Epilogue())[0])

"""Products with weights in FP8 under Triton's interpreter against fp64; run by test_interpreted.

The interpreter multiplies bf16 tiles wrongly (see interpreted_linear.py), so these run in fp16, and
in bf16 in tests/gpu/test_fp8_kernels.py.
"""

import pytest
import torch

from tests.support.adapter_products import draw
from tests.support.fp8_products import draw_matrix, expected_product
from worker_daemon.contracts.layer_ops import NormedSum
from worker_daemon.kernels.fp8_linear import Fp8Linear, choose_tile
from worker_daemon.kernels.fp8_rows import quantize_rows
from worker_daemon.kernels.ops import TritonOps
from worker_daemon.kernels.tuning import MatrixTile
from worker_daemon.layers.torch_ops import TorchOps

CPU = torch.device("cpu")
BOUND = 1e-3


def check(y: torch.Tensor, expected: torch.Tensor) -> None:
    assert (y.double() - expected).norm() / expected.norm() < BOUND


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"), [(1, 96, 256), (5, 37, 200), (17, 300, 384)]
)
@pytest.mark.parametrize(
    "tile", [MatrixTile(16, 64, 1, 1, 1, 0), MatrixTile(32, 128, 2, 1, 2, 0), None], ids=str
)
def test_few_rows(
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    scales: str,
    tile: MatrixTile | None,
    has_bias: bool,
) -> None:
    x = torch.randn(num_rows, num_inputs).half()
    matrix = draw_matrix(num_outputs, num_inputs, scales, CPU)
    bias = torch.randn(num_outputs).half() if has_bias else None
    linear = Fp8Linear(CPU, tile)
    for _ in range(2):  # the counters are zero again
        check(linear.linear(x, matrix, bias), expected_product(x, matrix, bias))


@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_many_rows_dequantize(dtype: torch.dtype, scales: str) -> None:
    x = torch.randn(70, 200).to(dtype)
    matrix = draw_matrix(150, 200, scales, CPU)
    check(Fp8Linear(CPU).linear(x, matrix, None), expected_product(x, matrix, None))


def test_rows_of_nothing() -> None:
    matrix = draw_matrix(32, 64, "row", CPU)
    assert Fp8Linear(CPU).linear(torch.empty(0, 64).half(), matrix, None).shape == (0, 32)


def assert_rounded(values: torch.Tensor, wanted: torch.Tensor) -> None:
    """The interpreter loses carries, so a few values are wrong; tests/gpu/test_fp8_kernels.py has
    the exact test."""
    is_equal = values.float() == wanted.to(values.dtype).float()
    assert is_equal.float().mean() > 0.9


@pytest.mark.parametrize("num_columns", [64, 100, 5000])
def test_quantized_rows(num_columns: int) -> None:
    x = torch.randn(7, num_columns) * torch.logspace(-3, 3, 7).unsqueeze(1)
    x[3] = 0
    values, scale = quantize_rows(x, None, pdl=False)
    assert torch.equal(values[3].float(), torch.zeros(num_columns))
    assert torch.allclose(scale[:3], x[:3].abs().amax(1) / 448)
    wanted = x / scale.unsqueeze(1)
    assert_rounded(values, wanted)


def test_rows_quantized_by_the_largest_given_scale() -> None:
    x = torch.randn(3, 64)
    values, scale = quantize_rows(x, torch.tensor([0.001, 0.02, 0.01]), pdl=False)
    assert torch.equal(scale, torch.full((3,), 0.02))
    assert_rounded(values, (x / 0.02).clamp(-448, 448))
    saturated, _ = quantize_rows(x * 1e6, torch.tensor([0.02]), pdl=False)
    assert (saturated.float().abs() >= 384).all()


@pytest.mark.parametrize("num_rows", [1, 16, 33, 64])
@pytest.mark.parametrize("shape", [(4096, 4096), (28672, 8192), (64, 128), (1 << 20, 64)])
def test_chosen_tiles_fill_the_device(num_rows: int, shape: tuple[int, int]) -> None:
    tile = choose_tile(num_rows, shape, 132)
    num_steps = -(-shape[1] // tile.block_i)
    assert 1 <= tile.num_splits <= max(1, num_steps)
    assert 128 % tile.block_i == 0
    assert tile.block_o // tile.num_warps >= 16


@pytest.mark.parametrize("num_rows", [1, 9, 70])
def test_the_operations_of_a_layer_agree_with_torch(num_rows: int) -> None:
    ours, plain = TritonOps(CPU), TorchOps()
    matrix = draw_matrix(96, 64, "row", CPU)
    part, residual = torch.randn(2, num_rows, 64).half()
    source = NormedSum(part, residual, torch.rand(64).half(), 1e-5)
    case = draw(num_rows, 2, 8, (48, 48), 64, torch.float16, "cpu", seed=num_rows)
    slots = case.token_slots.clamp(min=0)
    results = []
    for ops in (ours, plain):
        normed, total = ops.sum_and_norm(source)
        y = ops.fp8_linear(normed, matrix, None)
        ops.add_adapters(y, normed, case.adapters, slots)
        results.append((normed, total, y))
    for mine, theirs in zip(*results, strict=True):
        check(mine, theirs.double())

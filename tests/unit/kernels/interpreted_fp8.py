"""Products with weights in FP8 under Triton's interpreter against fp64; conftest.py runs it.

The interpreter multiplies bf16 tiles wrongly (see interpreted_linear.py), so these run in fp16 with
values that bf16 has too, and in bf16 in tests/gpu/test_fp8_kernels.py.
"""

from typing import get_args

import pytest
import torch

from tests.support.adapter_products import draw
from tests.support.exhaustive import exhaustively
from tests.support.fp8_products import block_rounded, draw_matrix, expected_product
from worker_daemon.contracts.layer_ops import (
    Activation,
    Epilogue,
    GateUp,
    LayerOps,
    Norm,
    NormedSum,
    RowAdapters,
    computed,
)
from worker_daemon.kernels.fp8_blocks import BlockTile, choose_block_tile, multiply_blocks
from worker_daemon.kernels.fp8_linear import Fp8Linear, choose_tile
from worker_daemon.kernels.fp8_rows import (
    BLOCK_SCALED_ROWS,
    SPLIT_ROWS,
    TERM_RATIO,
    Fp8Rows,
    RowForm,
    fp8_gate_rows,
    fp8_norm_rows,
    fp8_rows,
)
from worker_daemon.kernels.fp8_weights import dequantize
from worker_daemon.kernels.ops import TritonOps
from worker_daemon.kernels.tiles import DeviceLimits
from worker_daemon.kernels.tuning import MatrixTile, Tile, VectorTile
from worker_daemon.layers.torch_ops import TorchOps

EXHAUSTIVE = pytest.mark.exhaustive
pytestmark = pytest.mark.each_value  # make test-all runs every combination

CPU = torch.device("cpu")
BOUND = 1e-3
ROUNDED_BOUND = 1e-2
"""A few inputs are rounded to FP8 otherwise than in torch: the interpreter loses carries."""
LAYER_BOUND = 6e-3
"""Norms in fp16 have more bits than two terms."""


def draw_rows(*shape: int) -> torch.Tensor:
    """Return random values that bf16 and fp16 both have."""
    return torch.randn(shape).bfloat16().half()


def check(y: torch.Tensor, expected: torch.Tensor) -> None:
    assert (y.double() - expected).norm() / expected.norm() < BOUND


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"),
    [(1, 96, 256), (5, 37, 200), exhaustively(17, 300, 384)],
)
@pytest.mark.parametrize(
    "tile",
    [MatrixTile(16, 64, 1, 1, 1, 0), MatrixTile(32, 128, 2, 1, 2, 0), VectorTile(4, 128, 1), None],
    ids=str,
)
def test_few_rows(
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    scales: str,
    tile: Tile | None,
    has_bias: bool,
) -> None:
    x = draw_rows(num_rows, num_inputs)
    matrix = draw_matrix(num_outputs, num_inputs, scales, CPU)
    bias = torch.randn(num_outputs).half() if has_bias else None
    linear = Fp8Linear(CPU, tile)
    for _ in range(2):  # the counters are zero again
        check(linear.linear(x, matrix, bias), expected_product(x, matrix, bias))


@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_many_rows_dequantize(dtype: torch.dtype, scales: str) -> None:
    x = torch.randn(70, 200).to(dtype)
    matrix = draw_matrix(150, 200, scales, CPU, activations="none")
    check(Fp8Linear(CPU).linear(x, matrix, None), expected_product(x, matrix, None))


@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize("shape", [(150, 200), exhaustively((3, 1100)), (9, 40)])
def test_dequantized_weights_have_the_bits_of_torch(shape: tuple[int, int], scales: str) -> None:
    matrix = draw_matrix(*shape, scales, CPU)
    for dtype in (torch.float16, torch.float32):
        assert torch.equal(dequantize(matrix, dtype, pdl=False), matrix.dequantized(dtype))


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs"),
    [pytest.param(130, 72, 200, marks=EXHAUSTIVE), (65, 150, 256)],
)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of undefined rows of padding
def test_many_rows_with_scales_of_blocks(
    num_rows: int, num_outputs: int, num_inputs: int, splits: int
) -> None:
    """The same arithmetic in fp64, with the same rounded inputs; and as chosen by the sizes."""
    x = draw_rows(num_rows, num_inputs) * torch.logspace(-2, 2, num_inputs).half()
    matrix = draw_matrix(num_outputs, num_inputs, "block", CPU)
    bias = torch.randn(num_outputs).half() if splits == 2 else None
    expected = expected_product(block_rounded(x), matrix, bias)
    rows = fp8_rows(x, BLOCK_SCALED_ROWS, pdl=False)
    rows.values.view(torch.uint8)[num_rows:] = 0x7E
    rows.scale[:, num_rows:] = torch.inf
    arrivals = torch.zeros(64, dtype=torch.int32)
    tile = BlockTile(64, 64, splits, 4, 2)
    for _ in range(2):  # the counters are zero again
        y = torch.empty(rows.num_rows, num_outputs, dtype=torch.float16)
        multiply_blocks(y, rows, matrix, bias, tile, arrivals, pdl=False)
        error = y[:num_rows].double() - expected
        assert error.norm() / expected.norm() < ROUNDED_BOUND
    y = Fp8Linear(CPU).linear(x, matrix, bias)
    assert (y.double() - expected).norm() / expected.norm() < ROUNDED_BOUND


@pytest.mark.parametrize("num_rows", [65, 128, 256, 1024, 8192])
@pytest.mark.parametrize("shape", [(4096, 14336), (28672, 4096), (64, 128), (1 << 20, 64)])
def test_chosen_block_tiles_split_while_the_device_has_room(
    num_rows: int, shape: tuple[int, int]
) -> None:
    tile = choose_block_tile(num_rows, shape, DeviceLimits(132, 227 * 1024))
    num_tiles = max(128, num_rows) // 128 * -(-shape[0] // 64)
    assert tile.num_splits * num_tiles <= max(132, num_tiles)
    assert 4 * tile.num_splits <= max(4, -(-shape[1] // 128))
    assert tile.num_stages == (5 if tile.num_splits * num_tiles <= 132 else 4)
    small = choose_block_tile(num_rows, shape, DeviceLimits(132, 99 * 1024))
    assert small.num_stages == 3


def test_rows_of_nothing() -> None:
    matrix = draw_matrix(32, 64, "row", CPU)
    assert Fp8Linear(CPU).linear(torch.empty(0, 64).half(), matrix, None).shape == (0, 32)


def assert_rounded(values: torch.Tensor, wanted: torch.Tensor) -> None:
    """The interpreter loses carries, so a few values are wrong; tests/gpu/test_fp8_kernels.py has
    the exact test."""
    is_equal = values.float() == wanted.to(values.dtype).float()
    assert is_equal.float().mean() > 0.9


def sum_of_terms(rows: Fp8Rows) -> torch.Tensor:
    first, second = rows.values.double().chunk(2)
    return (first + second / TERM_RATIO) * rows.scale.double().unsqueeze(1)


@pytest.mark.parametrize("num_columns", [64, 100, pytest.param(5000, marks=EXHAUSTIVE)])
def test_two_terms_are_exact(num_columns: int) -> None:
    x = draw_rows(7, num_columns) * torch.logspace(-3, 3, 7).bfloat16().unsqueeze(1)
    x = x.bfloat16()
    x[3] = 0
    rows = fp8_rows(x, SPLIT_ROWS, pdl=False)
    largest = x.abs().amax(1, keepdim=True)
    error = (sum_of_terms(rows) - x.double()).abs()
    assert (error <= largest / 2**19).all()  # of 2^20, as the interpreter does not round
    assert (error[x.abs() > largest / 2**12] == 0).all()


def test_a_row_with_nan_is_nan() -> None:
    x = draw_rows(4, 100)
    x[1, 7] = torch.nan
    for form in (SPLIT_ROWS, RowForm(1, None), BLOCK_SCALED_ROWS):
        rows = fp8_rows(x, form, pdl=False)
        scale = rows.scale[0] if form.has_blocks else rows.scale
        product = rows.values.float().chunk(form.num_terms)[0].sum(1) * scale
        assert product.isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("num_columns", [64, 100, pytest.param(5000, marks=EXHAUSTIVE)])
def test_one_term(num_columns: int) -> None:
    x = torch.randn(7, num_columns) * torch.logspace(-3, 3, 7).unsqueeze(1)
    x[3] = 0
    values, scale = fp8_rows(x, RowForm(1, None), pdl=False)
    assert torch.equal(values[3].float(), torch.zeros(num_columns))
    assert torch.allclose(scale[:3], x[:3].abs().amax(1) / 448)
    wanted = x / scale.unsqueeze(1)
    assert_rounded(values, wanted)


@pytest.mark.parametrize("num_columns", [64, 384, *map(exhaustively, [4200, 17000])])
def test_one_term_with_scales_of_blocks(num_columns: int) -> None:
    x = draw_rows(4, num_columns) * torch.logspace(-3, 3, 4).half().unsqueeze(1)
    x[1] = 0
    values, scale = fp8_rows(x, BLOCK_SCALED_ROWS, pdl=False)
    blocks = x.float().split(128, dim=1)
    largest = torch.stack([part.abs().amax(1) for part in blocks])
    assert torch.allclose(scale, (largest / 448).clamp(min=1e-12))
    spread = scale.T.repeat_interleave(128, 1)[:, :num_columns]
    assert_rounded(values, x.float() / spread)
    not_contiguous = x.repeat(1, 2)[:, :num_columns]
    apart = fp8_rows(not_contiguous, BLOCK_SCALED_ROWS, pdl=False)
    assert_equal_rows(apart, Fp8Rows(values, scale))


def test_rows_by_the_largest_given_scale() -> None:
    x = torch.randn(3, 64)
    form = RowForm(1, torch.tensor([0.001, 0.02, 0.01]))
    values, scale = fp8_rows(x, form, pdl=False)
    assert torch.equal(scale, torch.full((3,), 0.02))
    assert_rounded(values, (x / 0.02).clamp(-448, 448))
    large = x.sign() * (1 + x.abs()) * 1e6
    saturated, _ = fp8_rows(large, RowForm(1, torch.tensor([0.02])), pdl=False)
    assert (saturated.float().abs() >= 384).all()


@pytest.mark.parametrize(
    "form", [SPLIT_ROWS, RowForm(1, None), RowForm(1, torch.tensor([0.02])), BLOCK_SCALED_ROWS]
)
@pytest.mark.parametrize("num_columns", [exhaustively(64), 100, 384])
def test_fused_rows_have_the_bits_of_two_operations(num_columns: int, form: RowForm) -> None:
    plain = TritonOps(CPU)
    part, residual = draw_rows(2, 8, num_columns)
    weight = torch.rand(num_columns).half()
    norms = [Norm(weight, 1e-5, offset) for offset in (0.0, 1.0)]
    sources = [NormedSum(added, residual, norm) for added in (part, None) for norm in norms]
    sources.append(NormedSum(part, residual, *norms))
    for source in sources:
        normed, total = plain.sum_and_norm(source)
        rows, also_total = fp8_norm_rows(source, form, pdl=False)
        assert torch.equal(total, also_total)
        assert_equal_rows(rows, fp8_rows(normed, form, pdl=False))
    for activation in get_args(Activation):
        gate_up = GateUp(draw_rows(8, 2 * num_columns), activation)
        gated, _ = computed(gate_up, plain)
        assert_equal_rows(fp8_gate_rows(gate_up, form, pdl=False), fp8_rows(gated, form, pdl=False))


def assert_equal_rows(rows: Fp8Rows, others: Fp8Rows) -> None:
    assert torch.equal(rows.values.view(torch.uint8), others.values.view(torch.uint8))
    assert torch.equal(rows.scale, others.scale)


@pytest.mark.parametrize("num_rows", [1, 16, 33, 64])
@pytest.mark.parametrize("shape", [(4096, 4096), (28672, 8192), (64, 128), (1 << 20, 64)])
def test_chosen_tiles_fill_the_device(num_rows: int, shape: tuple[int, int]) -> None:
    tile = choose_tile(num_rows, shape, 132)
    num_steps = -(-shape[1] // tile.block_i)
    assert 1 <= tile.num_splits <= max(1, num_steps)
    assert 128 % tile.block_i == 0
    assert tile.block_o // tile.num_warps >= 16


@pytest.mark.parametrize(("activation", "weight_offset"), [("silu", 0.0), ("gelu_tanh", 1.0)])
@pytest.mark.parametrize("num_rows", [1, 9, 70])
def test_the_operations_of_a_layer_agree_with_torch(
    num_rows: int, activation: Activation, weight_offset: float
) -> None:
    ours, plain = TritonOps(CPU), TorchOps()
    matrix = draw_matrix(96, 64, "row", CPU)
    part, residual = draw_rows(2, num_rows, 64)
    source = NormedSum(part, residual, Norm(torch.rand(64).half(), 1e-5, weight_offset))
    case = draw(num_rows, 2, 8, (48, 48), 64, torch.float16, "cpu", seed=num_rows)
    slots = case.token_slots.clamp(min=0)
    down = draw_matrix(64, 48, "row", CPU)
    results = []
    each: tuple[LayerOps, ...] = (ours, plain)
    for ops in each:
        normed, total = ops.sum_and_norm(source)
        adapters = RowAdapters(case.adapters, slots)
        y, also_normed = ops.product(normed, matrix, Epilogue(adapters=adapters))
        assert also_normed is normed
        fused, also_total = ops.product(source, matrix, Epilogue())
        assert isinstance(y, torch.Tensor) and isinstance(fused, torch.Tensor)
        gated, third_total = ops.product(source, matrix, Epilogue(activation=activation))
        also_gated, _ = ops.product(normed, matrix, Epilogue(y[0], activation=activation))
        totals = (total, also_total, third_total)
        of_gates = (ops.product(gate, down, Epilogue())[0] for gate in (gated, also_gated))
        gates = (computed(gate, ops)[0] for gate in (gated, also_gated))
        results.append((normed, y, fused, *totals, *gates, *of_gates))
    for mine, theirs in zip(*results, strict=True):
        assert (mine - theirs).double().norm() / theirs.double().norm() < LAYER_BOUND

"""Products with weights in FP8 on a GPU, at real sizes, against fp64; quantized rows against
torch."""

from typing import get_args

import pytest
import torch

from tests.support.fp8_products import block_rounded, draw_matrix, expected_product
from worker_daemon.contracts.layer_ops import Activation, GateUp, Norm, NormedSum, computed
from worker_daemon.kernels.fp8_blocks import choose_block_tile, multiply_blocks
from worker_daemon.kernels.fp8_linear import Fp8Linear
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
from worker_daemon.kernels.launch import has_dependent_launch
from worker_daemon.kernels.ops import TritonOps
from worker_daemon.kernels.tiles import DeviceLimits
from worker_daemon.kernels.tuning import MatrixTile, VectorTile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.kernels,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BOUNDS = {torch.float16: 6e-3, torch.bfloat16: 6e-3}
"""Two terms round fp16 to about bf16."""
QUANTIZED_BOUND = 6e-2
"""Bound for a product whose inputs have three bits of mantissa."""
SHAPES = [(6144, 4096), (4096, 14336), (1024, 2048), (1000, 1096), (1003, 1104), (77, 40)]
TILES = [
    None,
    MatrixTile(16, 128, 4, 1, 4, 512),
    MatrixTile(64, 64, 1, 4, 3, 0),
    VectorTile(4, 1024, 4),
]


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 33, 64])
def test_few_rows_against_fp64(
    num_rows: int, shape: tuple[int, int], scales: str, dtype: torch.dtype
) -> None:
    device = torch.device("cuda")
    matrix = draw_matrix(*shape, scales, device)
    x = torch.randn(num_rows, shape[1], device=device).to(dtype)
    bias = torch.randn(shape[0], device=device).to(dtype)
    for tile in TILES:
        linear = Fp8Linear(device, tile)
        for given in (None, bias):
            y = linear.linear(x, matrix, given)
            assert relative_error(y, expected_product(x, matrix, given)) < BOUNDS[dtype]
            assert torch.equal(linear.linear(x, matrix, given), y)


@pytest.mark.parametrize("num_rows", [3, 40])
def test_a_row_does_not_depend_on_its_neighbors(num_rows: int) -> None:
    device = torch.device("cuda")
    matrix = draw_matrix(4096, 4096, "row", device)
    x = torch.randn(num_rows, 4096, device=device).bfloat16()
    y = Fp8Linear(device).linear(x, matrix, None)
    x[1:] = torch.nan
    assert torch.equal(Fp8Linear(device).linear(x, matrix, None)[0], y[0])


@pytest.mark.parametrize("activations", ["none", "dynamic", "static"])
@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_many_rows_against_fp64(shape: tuple[int, int], scales: str, activations: str) -> None:
    device = torch.device("cuda")
    matrix = draw_matrix(*shape, scales, device, activations)
    bias = torch.randn(shape[0], device=device).bfloat16()
    for num_rows in (65, 200, 1024, 1100):
        x = torch.randn(num_rows, shape[1], device=device).bfloat16()
        y = Fp8Linear(device).linear(x, matrix, bias)
        is_exact = activations == "none" or (scales == "block" and activations == "static")
        bound = BOUNDS[torch.bfloat16] if is_exact else QUANTIZED_BOUND
        assert relative_error(y, expected_product(x, matrix, bias)) < bound


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", [65, 128, 300, 1024, 2100])
def test_blocks_against_the_same_arithmetic_in_fp64(
    num_rows: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    device = torch.device("cuda")
    pdl = has_dependent_launch(device)
    matrix = draw_matrix(*shape, "block", device)
    x = torch.randn(num_rows, shape[1], device=device).to(dtype)
    x *= torch.logspace(-2, 2, shape[1], device=device).to(dtype)
    bias = torch.randn(shape[0], device=device).to(dtype)
    expected = expected_product(block_rounded(x), matrix, bias)
    rows = fp8_rows(x, BLOCK_SCALED_ROWS, pdl=pdl)
    chosen = choose_block_tile(num_rows, shape, DeviceLimits.of(device))
    arrivals = torch.zeros(4096, dtype=torch.int32, device=device)
    for splits in {chosen.num_splits, 1, min(3, -(-shape[1] // 128))}:
        for _ in range(2):  # the counters are zero again
            y = torch.empty(rows.num_rows, shape[0], dtype=dtype, device=device)
            tile = chosen._replace(num_splits=splits)
            multiply_blocks(y, rows, matrix, bias, tile, arrivals, pdl=pdl)
            assert relative_error(y[:num_rows], expected) < BOUNDS[dtype]
    assert int(arrivals.sum()) == 0
    y = Fp8Linear(device).linear(x, matrix, bias)
    assert relative_error(y, expected) < BOUNDS[dtype]


@pytest.mark.parametrize("scales", ["row", "block"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantized_weights_have_the_bits_of_torch(shape: tuple[int, int], scales: str) -> None:
    device = torch.device("cuda")
    matrix = draw_matrix(*shape, scales, device)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        ours = dequantize(matrix, dtype, pdl=has_dependent_launch(device))
        assert torch.equal(ours, matrix.dequantized(dtype))


@pytest.mark.parametrize("num_columns", [40, 4096, 14336, 5000])
@pytest.mark.parametrize("is_given", [False, True])
def test_quantized_rows(num_columns: int, is_given: bool) -> None:
    device = torch.device("cuda")
    x = torch.randn(70, num_columns, device=device).bfloat16()
    x[3] = 0
    given = torch.tensor([0.004, 0.003], device=device) if is_given else None
    values, scale = fp8_rows(x, RowForm(1, given), pdl=has_dependent_launch(device))
    largest = x.float().abs().amax(1) / 448
    wanted = torch.full_like(largest, 0.004) if is_given else largest.clamp(min=1e-12)
    assert torch.allclose(scale, wanted, rtol=1e-6)
    quotient = (x.float() / scale.unsqueeze(1)).clamp(-448, 448)
    differs = values.float() != quotient.to(torch.float8_e4m3fn).float()
    assert differs.float().mean() < 1e-3  # quotients may be rounded differently


@pytest.mark.parametrize("num_columns", [40, 4096, 14336, 5000])
def test_two_terms_are_exact(num_columns: int) -> None:
    device = torch.device("cuda")
    x = torch.randn(70, num_columns, device=device).bfloat16()
    values, scale = fp8_rows(x, SPLIT_ROWS, pdl=has_dependent_launch(device))
    first, second = values.double().chunk(2)
    error = ((first + second / TERM_RATIO) * scale.unsqueeze(1) - x.double()).abs()
    largest = x.abs().amax(1, keepdim=True)
    assert (error <= largest / 2**20).all()
    assert (error[x.abs() > largest / 2**12] == 0).all()


@pytest.mark.parametrize("num_columns", [40, 4096, 14336])
@pytest.mark.parametrize(
    "form",
    [SPLIT_ROWS, RowForm(1, None), BLOCK_SCALED_ROWS],
    ids=["two terms", "one", "blocks"],
)
def test_fused_rows_equal_two_operations(num_columns: int, form: RowForm) -> None:
    """A few values may be rounded differently."""
    device = torch.device("cuda")
    pdl, ops = has_dependent_launch(device), TritonOps(device)
    part, residual = torch.randn(2, 72, num_columns, device=device).bfloat16()
    weight = torch.rand(num_columns, device=device).bfloat16()
    gate_up = torch.randn(72, 2 * num_columns, device=device).bfloat16()
    gates = [GateUp(gate_up, activation) for activation in get_args(Activation)]
    cases = [(fp8_gate_rows(gate, form, pdl=pdl), computed(gate, ops)[0]) for gate in gates]
    norms = [Norm(weight, 1e-5, offset) for offset in (0.0, 1.0)]
    sources = [NormedSum(added, residual, norm) for added in (part, None) for norm in norms]
    sources.append(NormedSum(part, residual, *norms))
    for source in sources:
        normed, total = ops.sum_and_norm(source)
        rows, also_total = fp8_norm_rows(source, form, pdl=pdl)
        assert torch.equal(total, also_total)
        cases.append((rows, normed))
    for rows, x in cases:
        apart = fp8_rows(x, form, pdl=pdl)
        assert relative_error(restored(rows), restored(apart)) < 1e-3


def restored(rows: Fp8Rows) -> torch.Tensor:
    first, *second = rows.values.double().split(rows.num_rows)
    scale = rows.scale.double().unsqueeze(1)
    if rows.scale.dim() == 2:
        scale = rows.scale.double().T.repeat_interleave(128, 1)[:, : first.shape[1]]
    return (first + sum(second) / TERM_RATIO) * scale


@pytest.mark.parametrize("scales", ["row", "block"])
def test_a_graph_replays_products_of_any_number_of_rows(scales: str) -> None:
    device = torch.device("cuda")
    matrix = draw_matrix(2048, 2048, scales, device)
    linear = Fp8Linear(device)
    for num_rows in (1, 64, 128):
        x = torch.randn(num_rows, 2048, device=device).bfloat16()
        linear.linear(x, matrix, None)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = linear.linear(x, matrix, None)
        x.normal_()
        graph.replay()
        assert torch.equal(y, linear.linear(x, matrix, None))

"""Skinny GEMMs and greedy tokens on a GPU at real sizes, against fp64 and torch."""

import pytest
import torch

from worker_daemon.kernels.argmax import greedy_tokens
from worker_daemon.kernels.launch import has_dependent_launch
from worker_daemon.kernels.linear import ThinLinear
from worker_daemon.kernels.tuning import MatrixTile, Tuning, VectorTile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.kernels,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 6e-3}
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)
SHAPES = [(6144, 4096), (4096, 14336), (1024, 2048), (1000, 1096), (1003, 1104), (77, 40)]
ROWS = [1, 2, 16, 17, 32, 50, 64]

TILES = {
    1: [VectorTile(1, 2048, 4), VectorTile(8, 512, 4), VectorTile(16, 256, 4)],
    16: [MatrixTile(16, 512, 1, 1, 3, 512), MatrixTile(64, 128, 4, 4, 4, 512)],
    32: [MatrixTile(32, 256, 1, 2, 4, 512), MatrixTile(64, 128, 3, 4, 4, 0)],
    64: [MatrixTile(64, 128, 2, 4, 4, 512), MatrixTile(128, 64, 1, 8, 4, 0)],
}


def draw(
    num_rows: int, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_outputs, num_inputs = shape
    x = torch.randn(num_rows, num_inputs, device="cuda").to(dtype)
    weight = (torch.randn(num_outputs, num_inputs, device="cuda") / num_inputs**0.5).to(dtype)
    return x, weight, torch.randn(num_outputs, device="cuda").to(dtype)


def relative_error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm())


def kernels(shape: tuple[int, int], num_rows: int) -> list[ThinLinear]:
    """One for each tile of the bucket that num_rows falls into, and the shipped choice."""
    bucket = min(bucket for bucket in TILES if bucket >= num_rows)
    tunings = [Tuning({(*shape, bucket): tile}) for tile in TILES[bucket]]
    return [ThinLinear(torch.device("cuda"), tuning) for tuning in [*tunings, None]]


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", ROWS)
def test_against_fp64(dtype: torch.dtype, shape: tuple[int, int], num_rows: int) -> None:
    x, weight, bias = draw(num_rows, shape, dtype)
    expected = x.double() @ weight.double().T
    for kernel in kernels(shape, num_rows):
        assert relative_error(kernel.linear(x, weight), expected) < BOUNDS[dtype]
        assert relative_error(kernel.linear(x, weight, bias), expected + bias) < BOUNDS[dtype]


@pytest.mark.parametrize("num_rows", [1, 16, 64])
def test_repeated_runs_are_bit_equal(num_rows: int) -> None:
    x, weight, _ = draw(num_rows, (4096, 4096), torch.bfloat16)
    for kernel in kernels((4096, 4096), num_rows):
        first = kernel.linear(x, weight)
        for _ in range(50):
            assert torch.equal(kernel.linear(x, weight), first)


@pytest.mark.parametrize("num_rows", [1, 16, 64, 65, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_into_memory_that_is_given(num_rows: int, dtype: torch.dtype) -> None:
    """The same bits, by every kernel and by torch."""
    x, weight, _ = draw(num_rows, (4096, 4096), dtype)
    tuned = kernels((4096, 4096), num_rows) if num_rows <= 64 else []
    for kernel in [*tuned, ThinLinear(torch.device("cuda"))]:
        memory = torch.full((num_rows + 3, 4096), 7, dtype=dtype, device="cuda")
        y = kernel.linear(x, weight, None, memory[:num_rows])
        assert y.data_ptr() == memory.data_ptr()
        assert torch.equal(y, kernel.linear(x, weight))
        assert (memory[num_rows:] == 7).all()


@pytest.mark.parametrize("num_rows", [16, 64])
def test_rows_do_not_depend_on_each_other(num_rows: int) -> None:
    x, weight, _ = draw(num_rows, (4096, 4096), torch.bfloat16)
    other = torch.randn_like(x)
    other[3] = x[3]
    for kernel in kernels((4096, 4096), num_rows)[:-1]:
        assert torch.equal(kernel.linear(x, weight)[3], kernel.linear(other, weight)[3])


@pytest.mark.parametrize("num_rows", [1, 8, 64])
def test_a_chain_in_a_cuda_graph_equals_one_launch_at_a_time(num_rows: int) -> None:
    """Each product reads the one before it, so a kernel that starts too early shows."""
    weights = [draw(num_rows, (2048, 2048), torch.bfloat16)[1] for _ in range(24)]
    x = torch.randn(num_rows, 2048, device="cuda").to(torch.bfloat16)
    for kernel in kernels((2048, 2048), num_rows):
        expected = x
        for weight in weights:
            expected = kernel.linear(expected, weight)
            torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x
            for weight in weights:
                y = kernel.linear(y, weight)
        for _ in range(10):
            y.fill_(torch.nan)
            graph.replay()
            assert torch.equal(y, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 64, 300])
@pytest.mark.parametrize("vocab_size", [11, 4096, 128256, 262144])
def test_greedy_tokens(dtype: torch.dtype, num_rows: int, vocab_size: int) -> None:
    padded = torch.randn(num_rows, vocab_size + 64, device="cuda").to(dtype)
    padded[:, vocab_size:] = torch.inf
    real = padded[:, :vocab_size].float()
    largest = real == real.amax(dim=1, keepdim=True)
    expected = largest.int().argmax(dim=1)
    pdl = has_dependent_launch(padded.device)
    for _ in range(3):
        assert torch.equal(greedy_tokens(padded, vocab_size, pdl=pdl), expected)

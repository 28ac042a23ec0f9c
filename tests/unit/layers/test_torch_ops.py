"""The layer operations of the CPU against fp64, and which ones the probe gives a device."""

import pytest
import torch

from benchmarks.layer_reference import Heads, make_projected, rotated
from benchmarks.paged_reference import relative_error
from tests.support.layer_checks import (
    BOUNDS,
    check_norms,
    check_products,
    check_projection,
    check_span_norms,
    generator,
    run_projection,
)
from worker_daemon.backend import choose_backend
from worker_daemon.layers.torch_ops import TorchOps

OPS = TorchOps()
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


@DTYPES
@pytest.mark.parametrize(("num_rows", "size"), [(3, 64), (1, 5120)])
def test_norms(dtype: torch.dtype, num_rows: int, size: int) -> None:
    check_norms(OPS, "cpu", dtype, num_rows, size, seed=size)


@DTYPES
@pytest.mark.parametrize(("heads", "num_ranks"), [((4, 4, 16), 1), ((8, 2, 16), 2), ((8, 2, 8), 4)])
def test_span_norms(dtype: torch.dtype, heads: tuple[int, int, int], num_ranks: int) -> None:
    check_span_norms(OPS, "cpu", dtype, heads, num_ranks, seed=num_ranks)


@DTYPES
@pytest.mark.parametrize("num_rows", [1, 3])
def test_products(dtype: torch.dtype, num_rows: int) -> None:
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    check_products(OPS, "cpu", dtype, num_rows, 200, 1720, seed=1, bound=bound)


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(4, 2, 8), (7, 1, 80)])
def test_projection(is_normed: bool, num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
    heads = Heads(num_q_heads, num_kv_heads, head_dim, is_normed, block_size=8)
    check_projection(OPS, "cpu", torch.float32, heads, 15, seed=head_dim, pads=False)


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 12, 16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_other_rotations(interleaved: bool, rotary_dim: int, is_normed: bool) -> None:
    heads = Heads(4, 2, 16, is_normed, rotary_dim=rotary_dim, interleaved=interleaved)
    check_projection(OPS, "cpu", torch.float32, heads, 15, seed=rotary_dim, pads=False)


@pytest.mark.parametrize("rotary_dim", [32, 24])
def test_without_a_cache_only_the_queries_are_made(rotary_dim: int) -> None:
    heads = Heads(4, 2, 32, is_normed=True, rotary_dim=rotary_dim)
    step = make_projected(heads, 5, torch.float32, generator("cpu", 2))
    expected = rotated(step)[0]
    assert relative_error(run_projection(OPS, step, torch.empty(0)), expected) < 1e-6


def test_linear_adds_the_bias() -> None:
    random = generator("cpu", 3)
    x, weight, bias = (torch.randn(shape, generator=random) for shape in ((5, 16), (7, 16), (7,)))
    exact = x.double() @ weight.double().T
    assert relative_error(OPS.linear(x, weight, None), exact) < 1e-6
    assert relative_error(OPS.linear(x, weight, bias), exact + bias.double()) < 1e-6


def test_a_cpu_gets_plain_torch() -> None:
    ops = choose_backend(torch.device("cpu")).make_ops()
    assert ops.name == "torch"
    assert isinstance(ops, TorchOps)

"""The layer operations of the CPU against fp64, and which ones the probe gives a device."""

from typing import get_args

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from benchmarks.layer_reference import Heads, make_projected, make_rows, rotated
from benchmarks.paged_reference import relative_error
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
from worker_daemon.backend import choose_backend
from worker_daemon.contracts.layer_ops import Activation, Epilogue, Norm
from worker_daemon.layers.torch_ops import TorchOps

OPS = TorchOps()
OFFSETS = pytest.mark.parametrize("weight_offset", [0.0, 1.0])
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


@DTYPES
@pytest.mark.parametrize(("num_rows", "size"), [(3, 64), (1, 5120)])
@OFFSETS
def test_norms(dtype: torch.dtype, num_rows: int, size: int, weight_offset: float) -> None:
    check_norms(OPS, "cpu", dtype, num_rows, size, seed=size, weight_offset=weight_offset)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_norm_with_an_offset_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    random = generator("cpu", 4)
    x = make_rows(30, 320, dtype, random)
    theirs = Gemma2RMSNorm(320, eps=1e-6).to(dtype)
    theirs.weight.data.copy_(make_rows(1, 320, dtype, random)[0])
    ours = OPS.rms_norm(x, Norm(theirs.weight.detach(), 1e-6, 1.0))
    assert (ours == theirs(x)).float().mean() > 0.99  # another order of the sum


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_activation(dtype: torch.dtype, activation: Activation) -> None:
    bound = {torch.float32: None, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    check_activation(OPS, activation, "cpu", dtype, 5, 1720, seed=5, bound=bound)


@DTYPES
@pytest.mark.parametrize(("heads", "num_ranks"), [((4, 4, 16), 1), ((8, 2, 16), 2), ((8, 2, 8), 4)])
def test_span_norms(dtype: torch.dtype, heads: tuple[int, int, int], num_ranks: int) -> None:
    check_span_norms(OPS, "cpu", dtype, heads, num_ranks, seed=num_ranks)


@DTYPES
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(("activation", "weight_offset"), [("silu", 0.0), ("gelu_tanh", 1.0)])
def test_products(
    dtype: torch.dtype, num_rows: int, activation: Activation, weight_offset: float
) -> None:
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    check_products(
        OPS, "cpu", dtype, num_rows, 200, 1720,
        seed=1, bound=bound, activation=activation, weight_offset=weight_offset,
    )  # fmt: skip


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(4, 2, 8), (7, 1, 80)])
def test_projection(is_normed: bool, num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
    heads = Heads(num_q_heads, num_kv_heads, head_dim, is_normed, block_size=8)
    for weight_offset in (0.0, 1.0):
        check_projection(
            OPS, "cpu", torch.float32, heads, 15,
            seed=head_dim, pads=False, weight_offset=weight_offset,
        )  # fmt: skip


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
    assert relative_error(OPS.product(x, weight, Epilogue())[0], exact) < 1e-6
    assert relative_error(OPS.product(x, weight, Epilogue(bias))[0], exact + bias.double()) < 1e-6


def test_a_cpu_gets_plain_torch() -> None:
    ops = choose_backend(torch.device("cpu")).make_ops()
    assert ops.name == "torch"
    assert isinstance(ops, TorchOps)

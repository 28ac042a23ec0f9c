"""Linear methods in 4 bits against unquantized ones with the dequantized matrix, with and without
LoRA adapters; columns in another order than inputs."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from worker_daemon.contracts.int4 import Int4Matrix
from worker_daemon.contracts.layer_ops import Activation, Norm, NormedSum
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.layers.adapters import AdapterLayout
from worker_daemon.layers.parameter import Piece
from worker_daemon.layers.quantization import Int4Quantization
from worker_daemon.layers.setup import LayerSetup
from worker_daemon.layers.torch_ops import TorchOps

SHAPE = (32, 64)
NUM_TOKENS = 5


def pieces():
    """Two merged matrices [16, 64]."""
    columns = slice(0, SHAPE[1])
    return [
        Piece(
            f"model.layers.0.mlp.{name}.weight",
            (16, SHAPE[1]),
            (slice(0, 16), columns),
            (slice(start, start + 16), columns),
        )
        for name, start in (("gate_proj", 0), ("up_proj", 16))
    ]


def make_methods(adapters_of, has_order):
    """The same random matrix in 4 bits and unquantized."""
    setup = LayerSetup(SHAPE[1], SingleRank(), torch.float32, torch.device("cpu"), TorchOps())
    quantization = Int4Quantization("gptq", 32, has_zeros=True, has_order=has_order)
    quantized = replace(setup, quantization=quantization, adapters=adapters_of()).linear_method(
        "model.layers.0.mlp.gate_up_proj", SHAPE, pieces(), None
    )
    plain = replace(setup, adapters=adapters_of()).linear_method("gate_up", SHAPE, pieces(), None)
    values, groups, *order = (parameter.data for parameter in quantized.parameters())
    values.random_()
    groups.copy_(torch.stack((torch.rand(2, 32) / 100, torch.randint(0, 16, (2, 32))), 2))
    weight = Int4Matrix(values, groups, True).dequantized(torch.float32)
    if has_order:
        order[0].copy_(torch.randperm(SHAPE[1]))
        weight = torch.empty_like(weight).index_copy_(1, order[0].long(), weight)
    next(plain.parameters()).data.copy_(weight)
    return quantized, plain


def assert_equal_products(quantized, plain):
    x, residual = torch.randn(2, NUM_TOKENS, SHAPE[1])
    norm = Norm(torch.rand(SHAPE[1]) + 0.5, 1e-5)
    assert torch.allclose(quantized.forward(x), plain.forward(x), atol=1e-5)
    for part in (None, x):
        source = NormedSum(part, residual, norm)
        assert_close(quantized.project(source), plain.project(source))
    for activation in get_args(Activation):
        for each in (x, source):
            assert_close(*(m.project_gated(each, activation) for m in (quantized, plain)))


def assert_close(ours, theirs):
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("has_order", [False, True])
def test_products_equal_those_of_the_dequantized_matrix(has_order):
    torch.manual_seed(1)
    assert_equal_products(*make_methods(lambda: None, has_order))


@pytest.mark.parametrize("has_order", [False, True])
@pytest.mark.parametrize("slots", [None, [0] * NUM_TOKENS, [0, 1, 2, 2, 1]], ids=str)
def test_products_with_adapters(slots, has_order):
    torch.manual_seed(2)
    layouts = []

    def make_layout():
        layouts.append(AdapterLayout(2, 4))
        return layouts[-1]

    quantized, plain = make_methods(make_layout, has_order)
    values = torch.randn(2, layouts[0].slot_size)
    for layout in layouts:
        layout.bind(values.clone())
        layout.token_slots = None if slots is None else torch.tensor(slots, dtype=torch.int32)
    assert layouts[0].shapes == layouts[1].shapes
    assert_equal_products(quantized, plain)

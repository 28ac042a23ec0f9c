"""Linear methods in FP8 against unquantized ones with the dequantized matrix, with and without LoRA
adapters."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from worker_daemon.contracts.layer_ops import Activation, Norm, NormedSum
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.layers.adapters import AdapterLayout
from worker_daemon.layers.parameter import Piece
from worker_daemon.layers.quantization import WeightQuantization
from worker_daemon.layers.setup import LayerSetup
from worker_daemon.layers.torch_ops import TorchOps

SHAPE = (24, 16)
NUM_TOKENS = 5


def pieces():
    """Two merged matrices [12, 16]."""
    columns = slice(0, SHAPE[1])
    return [
        Piece(
            f"model.layers.0.mlp.{name}.weight",
            (12, SHAPE[1]),
            (slice(0, 12), columns),
            (slice(start, start + 12), columns),
        )
        for name, start in (("gate_proj", 0), ("up_proj", 12))
    ]


def make_methods(adapters_of):
    """The same random matrix in FP8 and unquantized."""
    setup = LayerSetup(SHAPE[1], SingleRank(), torch.float32, torch.device("cpu"), TorchOps())
    quantized = replace(
        setup, quantization=WeightQuantization("channel", "dynamic"), adapters=adapters_of()
    ).linear_method("model.layers.0.mlp.gate_up_proj", SHAPE, pieces(), None)
    plain = replace(setup, adapters=adapters_of()).linear_method("gate_up", SHAPE, pieces(), None)
    weight, scale = (parameter.data for parameter in quantized.parameters())
    weight.copy_(torch.randn(SHAPE) * 100)
    scale.uniform_(0.001, 0.002)
    next(plain.parameters()).data.copy_(weight.float() * scale.unsqueeze(1))
    return quantized, plain


def assert_equal_products(quantized, plain):
    x, residual = torch.randn(2, NUM_TOKENS, SHAPE[1])
    norm = Norm(torch.rand(SHAPE[1]) + 0.5, 1e-5)
    assert torch.allclose(quantized.forward(x), plain.forward(x), atol=1e-6)
    for part in (None, x):
        source = NormedSum(part, residual, norm)
        assert_close(quantized.project(source), plain.project(source))
    for activation in get_args(Activation):
        for each in (x, source):
            assert_close(*(m.project_gated(each, activation) for m in (quantized, plain)))


def assert_close(ours, theirs):
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))


def test_products_equal_those_of_the_dequantized_matrix():
    torch.manual_seed(1)
    assert_equal_products(*make_methods(lambda: None))


@pytest.mark.parametrize("slots", [None, [0] * NUM_TOKENS, [0, 1, 2, 2, 1]], ids=str)
def test_products_with_adapters(slots):
    torch.manual_seed(2)
    layouts = []

    def make_layout():
        layouts.append(AdapterLayout(2, 4))
        return layouts[-1]

    quantized, plain = make_methods(make_layout)
    values = torch.randn(2, layouts[0].slot_size)
    for layout in layouts:
        layout.bind(values.clone())
        layout.token_slots = None if slots is None else torch.tensor(slots, dtype=torch.int32)
    assert_equal_products(quantized, plain)

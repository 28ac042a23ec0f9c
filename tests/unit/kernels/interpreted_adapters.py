"""Matrix products with LoRA adapters under Triton's interpreter against fp64; conftest.py
runs it.

The interpreter holds bf16 as integers and multiplies those; here it multiplies their values.
"""

from typing import Any, get_args

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from benchmarks.lora import dry_setting, time_layer
from tests.support.adapter_products import check, draw
from worker_daemon.contracts.layer_ops import Activation, Epilogue, RowAdapters
from worker_daemon.kernels.activation import act_and_mul
from worker_daemon.kernels.adapted_linear import AdaptedLinear
from worker_daemon.kernels.linear import ThinLinear
from worker_daemon.kernels.lora import AdapterProducts
from worker_daemon.kernels.ops import TritonOps
from worker_daemon.kernels.tuning import MatrixTile, Tuning

pytestmark = pytest.mark.each_value  # make test-all runs every combination

CPU = torch.device("cpu")
ONE_SHARE = MatrixTile(16, 32, num_splits=1, num_warps=4, num_stages=2, prefetch=0)
TWO_SHARES = MatrixTile(32, 16, num_splits=2, num_warps=4, num_stages=2, prefetch=0)


@pytest.fixture(autouse=True)
def products_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    create = interpreter.InterpreterBuilder.create_dot

    def values(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create(self, values(a), values(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "num_slots", "rank", "outputs", "num_inputs"),
    [
        (1, 1, 16, (64,), 128),
        (5, 3, 8, (40, 24, 24), 200),
        (64, 8, 4, (70, 20), 72),
        (130, 2, 80, (33,), 200),
    ],
)
def test_a_product_that_is_added(
    num_rows: int,
    num_slots: int,
    rank: int,
    outputs: tuple[int, ...],
    num_inputs: int,
    dtype: torch.dtype,
) -> None:
    case = draw(num_rows, num_slots, rank, outputs, num_inputs, dtype, "cpu", seed=num_rows)
    base = torch.nn.functional.linear(case.x, case.weight, case.bias)
    products = AdapterProducts(CPU)
    for _ in range(2):  # the counters are zero again
        y = base.clone()
        products.add(y, case.x, case.adapters, case.token_slots)
        check(y, base, case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "num_slots", "rank", "outputs", "num_inputs", "tile"),
    [
        (5, 3, 8, (40, 24, 24), 200, TWO_SHARES),
        (2, 1, 16, (64,), 128, ONE_SHARE),
        (64, 8, 4, (70, 20), 72, ONE_SHARE),
        (17, 9, 24, (48, 16, 16), 96, TWO_SHARES),
        (21, 3, 80, (33,), 72, ONE_SHARE),
    ],
)
def test_a_product_that_shrinks_too(
    num_rows: int,
    num_slots: int,
    rank: int,
    outputs: tuple[int, ...],
    num_inputs: int,
    dtype: torch.dtype,
    tile: MatrixTile,
) -> None:
    case = draw(num_rows, num_slots, rank, outputs, num_inputs, dtype, "cpu", seed=num_rows)
    shape = (*case.weight.shape, 1 << max(4, (num_rows - 1).bit_length()))
    thin = ThinLinear(CPU, Tuning({shape: tile}))
    base = thin.linear(case.x, case.weight, case.bias)
    adapted = AdaptedLinear(CPU, thin)
    for _ in range(2):
        check(adapted.linear(*case[:-1]), base, case)


@pytest.mark.parametrize("activation", get_args(Activation))
def test_a_gate_behind_a_product(activation: Activation) -> None:
    case = draw(5, 3, 8, (40, 40), 200, torch.float16, "cpu", seed=5)
    adapters, ops = RowAdapters(case.adapters, case.token_slots), TritonOps(CPU)
    y, gated = (
        ops.product(case.x, case.weight, Epilogue(case.bias, adapters, gate))[0]
        for gate in (None, activation)
    )
    assert isinstance(y, torch.Tensor) and isinstance(gated, torch.Tensor)
    missing = case.token_slots < 0
    assert bool(gated[missing].isnan().all())
    expected = act_and_mul(y, activation)
    assert torch.equal(gated[~missing], expected[~missing])


def test_the_benchmark_runs() -> None:
    """It compares each result with fp64."""
    names = {figure.name for figure in time_layer(dry_setting())}
    assert {"layer alone", "layer adapters", "layer floor"} <= names

"""Matrix products with LoRA adapters on a GPU at real sizes against fp64. Tiles are those of the
H200, on any GPU."""

from typing import get_args

import pytest
import torch

from benchmarks.layer_reference import activated
from benchmarks.paged_reference import relative_error
from tests.support.adapter_products import BOUNDS, Case, check, draw
from worker_daemon.contracts.layer_ops import Activation, AdapterWeights, Epilogue, RowAdapters
from worker_daemon.kernels.adapted_linear import AdaptedLinear
from worker_daemon.kernels.linear import ThinLinear
from worker_daemon.kernels.ops import TritonOps
from worker_daemon.kernels.tuning import load_tuning

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.kernels,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

QKV, GATE_UP, DOWN = ((4096, 1024, 1024), 4096), ((14336, 14336), 4096), ((4096,), 14336)


def thin() -> ThinLinear:
    return ThinLinear(torch.device("cuda"), load_tuning("NVIDIA H200"))


@pytest.mark.parametrize(
    ("outputs", "num_inputs"), [QKV, GATE_UP, DOWN], ids=["qkv", "mlp", "down"]
)
@pytest.mark.parametrize(
    ("dtype", "num_rows", "num_slots", "rank"),
    [
        (torch.bfloat16, 64, 8, 16),
        (torch.bfloat16, 1, 8, 16),
        (torch.bfloat16, 33, 3, 64),
        (torch.bfloat16, 12, 20, 24),
        (torch.bfloat16, 5, 1, 16),
        (torch.float16, 64, 8, 16),
        (torch.float32, 33, 3, 64),
    ],
    ids=str,
)
def test_decodes(
    num_rows: int,
    num_slots: int,
    rank: int,
    outputs: tuple[int, ...],
    num_inputs: int,
    dtype: torch.dtype,
) -> None:
    case = draw(num_rows, num_slots, rank, outputs, num_inputs, dtype, "cuda", seed=num_rows)
    linear = thin()
    base = linear.linear(case.x, case.weight, case.bias)
    adapted = AdaptedLinear(torch.device("cuda"), linear)
    for _ in range(3):
        check(adapted.linear(*case[:-1]), base, case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_rows", "num_slots", "rank"), [(64, 8, 16), (9, 20, 64), (17, 2, 8)])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_gated_decodes(
    num_rows: int, num_slots: int, rank: int, dtype: torch.dtype, activation: Activation
) -> None:
    case = draw(num_rows, num_slots, rank, *GATE_UP, dtype, "cuda", seed=num_rows)
    y = gated_product(case, case.token_slots, activation)
    expected = activated(case.expected, activation)
    there = case.token_slots >= 0
    assert bool(y[~there].isnan().all())
    assert relative_error(y[there], expected[there]) < BOUNDS[dtype]
    base = gated_product(case, torch.zeros_like(case.token_slots), activation)
    is_base = case.token_slots == 0
    assert torch.equal(y[is_base], base[is_base])


def gated_product(case: Case, token_slots: torch.Tensor, activation: Activation) -> torch.Tensor:
    adapters = RowAdapters(case.adapters, token_slots)
    epilogue = Epilogue(case.bias, adapters, activation)
    y, _ = TritonOps(torch.device("cuda")).product(case.x, case.weight, epilogue)
    assert isinstance(y, torch.Tensor)
    return y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_rows", [65, 700, 8192])
def test_prompts(num_rows: int, dtype: torch.dtype) -> None:
    case = draw(num_rows, 4, 16, (1024, 256, 256), 1024, dtype, "cuda", seed=num_rows)
    linear = thin()
    base = linear.linear(case.x, case.weight, case.bias)
    adapted = AdaptedLinear(torch.device("cuda"), linear)
    for _ in range(3):
        check(adapted.linear(*case[:-1]), base, case)


@pytest.mark.parametrize(
    ("outputs", "num_inputs"), [QKV, GATE_UP, DOWN], ids=["qkv", "mlp", "down"]
)
def test_equal_inputs_give_equal_bits(outputs: tuple[int, ...], num_inputs: int) -> None:
    """In graphs too, which replay while the previous replay's last kernels still run."""
    case = draw(64, 8, 16, outputs, num_inputs, torch.bfloat16, "cuda", seed=9)
    adapted = AdaptedLinear(torch.device("cuda"), thin())
    results = [adapted.linear(*case[:-1]) for _ in range(10)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [adapted.linear(*case[:-1]) for _ in range(4)]
    for _ in range(5):
        graph.replay()
        results += [y.clone() for y in captured]
    assert all(torch.equal(y.nan_to_num(), results[0].nan_to_num()) for y in results)


def test_rows_do_not_depend_on_other_rows_or_on_their_slot() -> None:
    case = draw(64, 8, 16, *QKV, torch.bfloat16, "cuda", seed=10)
    adapted = AdaptedLinear(torch.device("cuda"), thin())
    together = adapted.linear(*case[:-1])
    slots = case.token_slots.tolist()
    row = next(index for index, slot in enumerate(slots) if slot > 0)
    a, b, ends = case.adapters
    turned = torch.cat((a.flatten(1), b.flatten(1)), dim=1).nan_to_num().roll(1, dims=0)
    moved_a, moved_b = turned[:, : a[0].numel()], turned[:, a[0].numel() :]
    moved = AdapterWeights(moved_a.view(a.shape), moved_b.view(b.shape), ends)
    alone = torch.zeros_like(case.token_slots)
    alone[row] = slots[row] % 8 + 1
    others = torch.randn_like(case.x)
    others[row] = case.x[row]
    again = adapted.linear(others, case.weight, case.bias, moved, alone)
    assert torch.equal(again[row], together[row])

"""Products with LoRA adapters on a GPU at real sizes, against fp64."""

import pytest
import torch

from tests.support.adapter_products import check, draw
from worker_daemon.kernels.lora import AdapterProducts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.kernels,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

QKV, GATE_UP, DOWN = ((4096, 1024, 1024), 4096), ((14336, 14336), 4096), ((4096,), 14336)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("outputs", "num_inputs"), [QKV, GATE_UP, DOWN], ids=["qkv", "mlp", "down"]
)
@pytest.mark.parametrize(("num_rows", "num_slots", "rank"), [(64, 8, 16), (1, 8, 16), (33, 3, 64)])
def test_decodes(
    num_rows: int,
    num_slots: int,
    rank: int,
    outputs: tuple[int, ...],
    num_inputs: int,
    dtype: torch.dtype,
) -> None:
    products = AdapterProducts(torch.device("cuda"))
    case = draw(num_rows, num_slots, rank, outputs, num_inputs, dtype, "cuda", seed=num_rows)
    for _ in range(3):
        check(products, case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_rows", [65, 700, 8192])
def test_prompts(num_rows: int, dtype: torch.dtype) -> None:
    products = AdapterProducts(torch.device("cuda"))
    case = draw(num_rows, 4, 16, (1024, 256, 256), 1024, dtype, "cuda", seed=num_rows)
    for _ in range(3):
        check(products, case)


def test_equal_inputs_give_equal_bits() -> None:
    products = AdapterProducts(torch.device("cuda"))
    case = draw(64, 8, 16, *QKV, torch.bfloat16, "cuda", seed=9)
    results = []
    for _ in range(20):
        y = case.y.clone()
        products.add(y, case.x, case.weights, case.token_slots)
        results.append(y)
    assert all(torch.equal(y.nan_to_num(), results[0].nan_to_num()) for y in results)

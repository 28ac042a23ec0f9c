"""Products with LoRA adapters under Triton's interpreter against fp64; run by test_interpreted.

The interpreter multiplies bf16 tiles wrongly, so they run in bf16 in tests/gpu/test_adapters.py.
"""

import pytest
import torch

from tests.support.adapter_products import check, draw
from worker_daemon.kernels.lora import AdapterProducts

PRODUCTS = AdapterProducts(torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "num_slots", "rank", "outputs", "num_inputs"),
    [
        (5, 3, 8, (40, 24, 24), 200),
        (1, 1, 16, (64,), 128),
        (64, 8, 4, (130, 130), 72),
        (150, 4, 20, (48, 16, 16), 96),
        (130, 2, 80, (33,), 260),
    ],
)
def test_rows_get_the_product_of_their_adapter(
    num_rows: int,
    num_slots: int,
    rank: int,
    outputs: tuple[int, ...],
    num_inputs: int,
    dtype: torch.dtype,
) -> None:
    case = draw(num_rows, num_slots, rank, outputs, num_inputs, dtype, "cpu", seed=num_rows)
    for _ in range(2):  # the counters are zero again
        check(PRODUCTS, case)

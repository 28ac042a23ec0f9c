"""Random LoRA adapters in slots, and a check of matrix products with them against fp64."""

from typing import NamedTuple

import torch
from torch import Tensor

from worker_daemon.contracts.layer_ops import AdapterWeights

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


class Case(NamedTuple):
    """One product with adapters, and its expected result."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    adapters: AdapterWeights
    token_slots: Tensor
    expected: Tensor


def draw(
    num_rows: int,
    num_slots: int,
    rank: int,
    outputs: tuple[int, ...],
    num_inputs: int,
    dtype: torch.dtype,
    device: str,
    seed: int,
) -> Case:
    """Draw rows of some of the slots, including base rows and a missing adapter, and a bias if the
    seed is odd. The slots are rows of one buffer, as in daemons; unused ones hold NaN."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    num_ranks, num_outputs = len(outputs) * rank, sum(outputs)
    a_size, b_size = num_ranks * num_inputs, num_outputs * rank
    b_at = -(-a_size // 64) * 64
    buffer = torch.zeros(num_slots, b_at + -(-b_size // 64) * 64, device=device).to(dtype)
    a = buffer[:, :a_size].view(num_slots, num_ranks, num_inputs)
    b = buffer[:, b_at : b_at + b_size].view(num_slots, num_outputs, rank)
    a.copy_(normal(*a.shape) / num_inputs**0.5)
    b.copy_(normal(*b.shape) / rank**0.5)
    ends = tuple(sum(outputs[: index + 1]) for index in range(len(outputs)))
    x = normal(num_rows, num_inputs).to(dtype)
    weight = (normal(num_outputs, num_inputs) / num_inputs**0.5).to(dtype)
    bias = normal(num_outputs).to(dtype) if seed % 2 else None
    slots = torch.randint(
        0, num_slots + 1, (num_rows,), generator=generator, device=device, dtype=torch.int32
    )
    slots[slots == num_slots // 2 + 1] = 0 if num_slots > 1 else 1
    if num_rows > 2:
        slots[num_rows // 2] = -1
        slots[0] = 0
    for slot in set(range(1, num_slots + 1)) - set(slots.tolist()):
        buffer[slot - 1] = torch.nan
    expected = x.double() @ weight.double().T
    if bias is not None:
        expected += bias.double()
    for row, slot in enumerate(slots.tolist()):
        if slot > 0:
            shrunk = a[slot - 1].double() @ x[row].double()
            for index, (begin, end) in enumerate(zip((0, *ends), ends, strict=False)):
                own = shrunk[index * rank : (index + 1) * rank]
                expected[row, begin:end] += b[slot - 1, begin:end].double() @ own
    return Case(x, weight, bias, AdapterWeights(a, b, ends), slots, expected)


def check(y: Tensor, base: Tensor, case: Case) -> None:
    """Check a result; rows without an adapter have the bits of the base model's product, and those
    of a missing one are NaN."""
    is_base, missing = case.token_slots == 0, case.token_slots < 0
    assert y.dtype == base.dtype
    assert torch.equal(y[is_base], base[is_base])
    assert bool(y[missing].isnan().all())
    own = case.token_slots > 0
    error = (y[own].double() - case.expected[own]).norm() / case.expected[own].norm()
    assert not own.any() or error < BOUNDS[y.dtype]

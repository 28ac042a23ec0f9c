"""Random matrices in 4 bits and their products in fp64, computed without the code under test."""

import torch

from worker_daemon.contracts.int4 import Int4Matrix


def draw_int4(
    num_outputs: int,
    num_inputs: int,
    group_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_zeros: bool = True,
) -> tuple[Int4Matrix, torch.Tensor]:
    """Return a random matrix [O, I], and its values in fp64."""
    values = torch.randint(0, 16, (num_outputs, num_inputs))
    shape = (num_inputs // group_size, num_outputs)
    scale = ((torch.rand(shape) + 0.5) / num_inputs**0.5).to(dtype)
    zero = torch.randint(0, 16, shape) if has_zeros else torch.full(shape, 8)
    group = torch.arange(num_inputs) // group_size
    weight = (values - zero.T[:, group]).double() * scale.T.double()[:, group]
    column = torch.arange(num_inputs).view(-1, 2, 16)
    low, high = (values[:, column[:, half].flatten()] for half in (0, 1))
    packed = (low + 16 * high).to(torch.uint8).view(torch.int32)
    groups = torch.stack((scale, zero.to(dtype) if has_zeros else torch.zeros_like(scale)), 2)
    matrix = Int4Matrix(packed.to(device), groups.to(device), has_zeros)
    return matrix, weight.to(device)


def expected_int4(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x W^T + b in fp64."""
    y = x.double() @ weight.T
    return y if bias is None else y + bias.double()

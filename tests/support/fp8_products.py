"""Random matrices in FP8 and their products in fp64, computed without the code under test."""

import torch

from worker_daemon.contracts.layer_ops import Fp8Matrix


def draw_matrix(
    num_outputs: int,
    num_inputs: int,
    scales: str,
    device: torch.device,
    activations: str = "dynamic",
) -> Fp8Matrix:
    """Return a random matrix [O, I] with scales of rows ("row") or blocks ("block")."""
    weight = (torch.randn(num_outputs, num_inputs, device=device) * 100).clamp(-448, 448)
    shape = (num_outputs,) if scales == "row" else (-(-num_outputs // 128), -(-num_inputs // 128))
    scale = (torch.rand(shape, device=device) + 0.5) / 100 / num_inputs**0.5
    inputs = torch.tensor([0.01, 0.02], device=device) if activations == "static" else None
    return Fp8Matrix(weight.to(torch.float8_e4m3fn), scale, inputs, activations)  # type: ignore[arg-type]


def restored(matrix: Fp8Matrix) -> torch.Tensor:
    """Return values times scales in fp64."""
    weight = matrix.weight.double()
    row = torch.arange(weight.shape[0], device=weight.device)
    column = torch.arange(weight.shape[1], device=weight.device)
    if matrix.scale.dim() == 1:
        return weight * matrix.scale.double()[row].unsqueeze(1)
    return weight * matrix.scale.double()[row // 128][:, column // 128]


def expected_product(x: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x W^T + b in fp64."""
    y = x.double() @ restored(matrix).T
    return y if bias is None else y + bias.double()


def block_rounded(x: torch.Tensor) -> torch.Tensor:
    """Return x [N, K] as FP8 with a scale for each block of 128 values of a row has it, in fp64."""
    parts = []
    for part in x.float().split(128, dim=1):
        scale = (part.abs().amax(1, keepdim=True) / 448).clamp(min=1e-12)
        values = (part / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        parts.append(values.double() * scale.double())
    return torch.cat(parts, 1)

"""Random inputs of the layer operations and fp64 references, for the kernels' tests and benchmark.

They follow the cache layout and the pairing of the rotation, independent of the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from worker_daemon.contracts.layer_ops import Activation, HeadNorms, Norm

EPS = 1e-5


@dataclass(frozen=True)
class Heads:
    """The sizes of a model's attention and of its cache's blocks."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    is_normed: bool = False
    block_size: int = 16
    rotary_dim: int | None = None  # rotated elements of a head; None = all
    interleaved: bool = False  # the rotation pairs adjacent elements

    @property
    def width(self) -> int:
        """Elements of one token's projection."""
        return (self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True)
class ProjectedStep:
    """The arguments of rotate_and_store."""

    heads: Heads
    qkv: torch.Tensor  # [N, (Hq + 2 Hkv) D]
    positions: torch.Tensor  # [N] int64
    rotary_table: torch.Tensor  # [P, 2, R / 2] fp32
    head_norms: HeadNorms | None
    kv_cache: torch.Tensor  # [num_blocks, 2, block_size, Hkv, D], random everywhere
    slot_mapping: torch.Tensor  # [N] int64, negative = not stored


def make_rows(
    num_rows: int, size: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """Return [num_rows, size], normally distributed, each row with a different scale."""
    device = generator.device
    scales = torch.rand(num_rows, 1, generator=generator, device=device) * 4 + 0.1
    rows = torch.randn(num_rows, size, generator=generator, device=device)
    return (rows * scales).to(dtype)


def make_projected(
    heads: Heads,
    num_tokens: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    *,
    pads: bool = False,
    max_position: int = 500,
    weight_offset: float = 0.0,
    rotary_table: torch.Tensor | None = None,
) -> ProjectedStep:
    """Return num_tokens tokens at random positions and slots; pads: every seventh slot is
    negative. weight_offset: that of the heads' norms; rotary_table: in place of one with random
    angles."""
    device = generator.device
    if rotary_table is None:
        half = (heads.rotary_dim or heads.head_dim) // 2
        angles = torch.rand(max_position, half, generator=generator, device=device) * 6.3
        rotary_table = torch.stack((angles.cos(), angles.sin()), dim=1)
    max_position = rotary_table.shape[0]
    num_blocks = -(-num_tokens // heads.block_size) + 2
    cache_shape = (num_blocks, 2, heads.block_size, heads.num_kv_heads, heads.head_dim)
    slots = torch.randperm(num_blocks * heads.block_size, generator=generator, device=device)
    slots = slots[:num_tokens]
    if pads:
        slots[6::7] = -1
    norms = Norm(make_rows(2, heads.head_dim, dtype, generator), EPS, weight_offset)
    return ProjectedStep(
        heads=heads,
        qkv=make_rows(num_tokens, heads.width, dtype, generator),
        positions=torch.randint(max_position, (num_tokens,), generator=generator, device=device),
        rotary_table=rotary_table,
        head_norms=norms if heads.is_normed else None,
        kv_cache=torch.randn(cache_shape, generator=generator, device=device).to(dtype),
        slot_mapping=slots,
    )


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Return the norm of the last dimension, fp64."""
    gain = norm.weight.double() + norm.weight_offset
    return functional.rms_norm(x.double(), gain.shape, gain, norm.eps)


def activated(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """[N, I] fp64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    return functional.silu(gate) * up


def rotated(step: ProjectedStep) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q [N, Hq, D] and k [N, Hkv, D] in fp64 after norm and rotation, and v [N, Hkv, D]
    unchanged."""
    heads = step.heads
    counts = [heads.num_q_heads, heads.num_kv_heads, heads.num_kv_heads]
    q, k, v = step.qkv.view(len(step.qkv), -1, heads.head_dim).split(counts, dim=1)
    angle = torch.complex(*step.rotary_table[step.positions].double().unbind(1)).unsqueeze(1)
    results = []
    for part, row in ((q, 0), (k, 1)):
        exact = part.double()
        if step.head_norms is not None:
            weight, eps = step.head_norms.weight[row], step.head_norms.eps
            exact = normed(part, Norm(weight, eps, step.head_norms.weight_offset))
        turning, rest = exact.tensor_split([heads.rotary_dim or heads.head_dim], dim=-1)
        if heads.interleaved:
            number = torch.view_as_complex(turning.unflatten(-1, (-1, 2)).contiguous()) * angle
            turned = torch.view_as_real(number).flatten(-2)
        else:
            # Elements i and i + R / 2 are the real and imaginary part of a complex number.
            number = torch.complex(*turning.chunk(2, dim=-1)) * angle
            turned = torch.cat((number.real, number.imag), dim=-1)
        results.append(torch.cat((turned, rest), dim=-1))
    return results[0], results[1], v

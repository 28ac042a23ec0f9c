"""The gated activation of an MLP: a function of one half of a projection times the other half."""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import math

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.layer_ops import Activation
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import await_previous, launch_options, start_next

_BLOCK = 2048
_NUM_WARPS = 8
_TWICE_ROOT = tl.constexpr(2 * (2 / math.pi) ** 0.5)


def act_and_mul(
    gate_up: torch.Tensor, activation: Activation, *, pdl: bool = False
) -> torch.Tensor:
    """activation(gate) * up, in float32, rounded once.

    Args:
        gate_up: [N, 2 I] contiguous, fp32, bf16 or fp16: gate in the first I columns, then up.
        activation: function of the gate.
        pdl: launch as a dependent of the previous kernel (see launch.py).

    Returns:
        [N, I], dtype of gate_up.
    """
    num_rows, width = gate_up.shape
    assert width % 2 == 0
    assert gate_up.is_contiguous()
    size = width // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows == 0:
        return out
    block = min(_BLOCK, triton.next_power_of_2(size))
    _act_and_mul_kernel[(num_rows * triton.cdiv(size, block),)](
        out,
        gate_up,
        SIZE=size,
        BLOCK=block,
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=True,
        **launch_options(pdl),
    )
    return out


@launched
@triton.jit
def _act_and_mul_kernel(
    out,
    gate_up,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    # One grid axis for rows and their chunks: only the first axis may exceed 65535.
    CHUNKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    row = (program // CHUNKS).to(tl.int64)
    column = (program % CHUNKS) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    source = gate_up + row * (2 * SIZE) + column
    await_previous(PDL)
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + SIZE, mask=inside, other=0.0).to(tl.float32)
    result = activate(gate, ACTIVATION) * up
    tl.store(out + row * SIZE + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    """Return the activation of a gate, both float32."""
    if ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 u), with u = sqrt(2 / pi) (gate + 0.044715 gate^3)
        slope = _TWICE_ROOT * gate * (1.0 + 0.044715 * gate * gate)
    else:
        tl.static_assert(ACTIVATION == "silu")
        slope = gate
    return gate * tl.sigmoid(slope)


@triton.jit
def activate_pair(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return an expert's activation of gate and up, float32: ClampedSwiGLU, or silu(gate) * up if
    ALPHA and LIMIT are None."""
    if LIMIT is None:
        result = gate * tl.sigmoid(gate) * up
    else:
        # Comparisons leave a NaN, which tl.minimum would drop.
        limited = tl.where(gate > LIMIT, LIMIT, gate)
        shifted = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
        result = limited * tl.sigmoid(ALPHA * limited) * shifted
    return result

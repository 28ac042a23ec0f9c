"""The gated activation of an MLP: silu of one half of a projection times the other half."""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import await_previous, launch_options, start_next

_BLOCK = 2048
_NUM_WARPS = 8


def silu_and_mul(gate_up: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """silu(gate) * up, in float32, rounded once.

    Args:
        gate_up: [N, 2 I] contiguous, fp32, bf16 or fp16: gate in the first I columns, then up.
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
    _silu_and_mul_kernel[(num_rows * triton.cdiv(size, block),)](
        out,
        gate_up,
        SIZE=size,
        BLOCK=block,
        PDL=pdl,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=True,
        **launch_options(pdl),
    )
    return out


@launched
@triton.jit
def _silu_and_mul_kernel(out, gate_up, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
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
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * SIZE + column, result.to(out.dtype.element_ty), mask=inside)

"""Matrix products with weights in FP8.

Up to 64 rows are bound by reading the weights: a kernel like linear.py's converts them in registers
and multiplies inputs that are not quantized. More rows quantize their inputs, if the checkpoint
permits it and torch multiplies FP8 by rows on this device; otherwise weights are dequantized first.

Letters: y[M, O] = x[M, I] W[O, I]^T + bias.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import Final

import torch
import triton
import triton.language as tl
from torch.nn import functional

from worker_daemon.contracts.fp8 import FP8_BLOCK
from worker_daemon.contracts.layer_ops import Fp8Matrix
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.fp8_rows import quantize_rows
from worker_daemon.kernels.launch import (
    HOPPER,
    await_previous,
    has_dependent_launch,
    launch_options,
    start_next,
)
from worker_daemon.kernels.linear import MAX_TILES, add_splits, has_aligned_rows
from worker_daemon.kernels.prefetch import prefetch
from worker_daemon.kernels.tiles import DeviceLimits
from worker_daemon.kernels.tuning import MatrixTile, row_bucket

_LEAST_FP8: Final = (8, 9)
"""Compute capability from which Triton converts float8_e4m3fn."""
_MULTIPLE: Final = 16
"""torch's product in FP8 needs multiples of it in both sizes of the matrix."""
_PROGRAMS_PER_SM: Final = 2
_MAX_SPLITS: Final = 8
_OUTPUTS_PER_WARP: Final = 16
"""With fewer, Triton 3.6 has compiled wrong products (benchmarks/NOTES.md)."""
_LEAST_STEPS: Final = 4
"""Steps of BLOCK_I columns in a split; fewer cost more in the sum than they gain."""


class Fp8Linear:
    """The products of all layers with matrices in FP8; one object per daemon, on one stream.

    Owns MAX_TILES int32 counters on the device, which are zero between launches.
    """

    def __init__(self, device: torch.device, tile: MatrixTile | None = None) -> None:
        """device is that of all tensors; tile replaces the choice by shape."""
        is_cuda = device.type == "cuda"
        capability = torch.cuda.get_device_capability(device) if is_cuda else _LEAST_FP8
        self._pdl = has_dependent_launch(device)
        self._converts = capability >= _LEAST_FP8
        self._multiplies = capability >= HOPPER
        self._num_sms = DeviceLimits.of(device).num_sms
        self._tile = tile
        self._arrivals = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)

    def linear(self, x: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        """y [M, O], contiguous, of x [M, I] and bias [O], both of one dtype. Up to 64 rows, a row
        of y depends only on its row of x and on the bucket of M."""
        num_rows = x.shape[0]
        has_half = x.dtype in (torch.bfloat16, torch.float16)
        if self._converts and has_half and num_rows and row_bucket(num_rows) is not None:
            y = x.new_empty(num_rows, matrix.weight.shape[0])
            tile = self._tile or choose_tile(num_rows, matrix.weight.shape, self._num_sms)
            launch_fp8_matrix(y, x, matrix, bias, tile, self._pdl, self._arrivals)
            return y
        if self._may_quantize(x, matrix):
            return self._multiply_quantized(x, matrix, bias)
        return functional.linear(x, matrix.dequantized(x.dtype), bias)

    def _may_quantize(self, x: torch.Tensor, matrix: Fp8Matrix) -> bool:
        return (
            self._multiplies
            and x.shape[0] > 0
            and x.dtype == torch.bfloat16
            and matrix.activations != "none"
            and matrix.scale.dim() == 1
            and all(size % _MULTIPLE == 0 for size in matrix.weight.shape)
        )

    def _multiply_quantized(
        self, x: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None
    ) -> torch.Tensor:
        values, scale = quantize_rows(x, matrix.input_scale, pdl=self._pdl)
        y = torch._scaled_mm(
            values,
            matrix.weight.t(),
            scale_a=scale.unsqueeze(1),
            scale_b=matrix.scale.unsqueeze(0),
            out_dtype=x.dtype,
        )
        return y if bias is None else y.add_(bias)


def choose_tile(num_rows: int, shape: tuple[int, ...], num_sms: int) -> MatrixTile:
    """Return the tile of a product of M rows with a matrix [O, I], by arithmetic on the sizes:
    enough programs to fill the device, and steps of one block."""
    num_outputs, num_inputs = shape
    block_o = 32 if num_rows <= 32 else 64
    num_tiles = triton.cdiv(num_outputs, block_o)
    num_steps = triton.cdiv(num_inputs, FP8_BLOCK)
    wanted = _PROGRAMS_PER_SM * num_sms // num_tiles
    splits = max(1, min(wanted, num_steps // _LEAST_STEPS, _MAX_SPLITS))
    if num_tiles > MAX_TILES:
        splits = 1
    num_warps = block_o // _OUTPUTS_PER_WARP
    return MatrixTile(block_o, FP8_BLOCK, splits, num_warps, num_stages=3, prefetch=512)


def launch_fp8_matrix(
    y: torch.Tensor,
    x: torch.Tensor,
    matrix: Fp8Matrix,
    bias: torch.Tensor | None,
    tile: MatrixTile,
    pdl: bool,
    arrivals: torch.Tensor,
) -> None:
    """Compute y [M, O] = x [M, I] W [O, I]^T + bias [O], each row contiguous. arrivals: as for
    launch_matrix. A tile's block_i divides 128, or there are scales of rows."""
    num_rows, num_inputs = x.shape
    weight, scale = matrix.weight, matrix.scale
    num_outputs = weight.shape[0]
    has_blocks = scale.dim() == 2
    assert x.stride(1) == weight.stride(1) == y.stride(1) == 1
    assert scale.stride(-1) == 1
    assert not has_blocks or FP8_BLOCK % tile.block_i == 0
    num_tiles = triton.cdiv(num_outputs, tile.block_o)
    splits = tile.num_splits
    assert splits == 1 or num_tiles <= arrivals.shape[0]
    block_m = max(16, triton.next_power_of_2(num_rows))
    parts = num_tiles * splits * block_m * tile.block_o if splits > 1 else 0
    _fp8_kernel[(num_tiles, splits)](
        y,
        torch.empty(parts, dtype=torch.float32, device=x.device),
        arrivals,
        x,
        weight,
        scale,
        x if bias is None else bias,
        num_rows,
        num_outputs,
        num_inputs,
        x.stride(0),
        y.stride(0),
        weight.stride(0),
        scale.stride(0),
        HAS_BIAS=bias is not None,
        EVEN=num_outputs % tile.block_o == 0 and num_inputs % tile.block_i == 0,
        SCALE_BLOCK=FP8_BLOCK if has_blocks else 0,
        SPLITS=splits,
        BLOCK_M=block_m,
        BLOCK_O=tile.block_o,
        BLOCK_I=tile.block_i,
        STAGES=tile.num_stages,
        PREFETCH=tile.prefetch if pdl and has_aligned_rows(weight) else 0,
        LANES=str(tile.block_o),
        PDL=pdl,
        num_warps=tile.num_warps,
        enable_fp_fusion=True,
        **launch_options(pdl),
    )


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _fp8_kernel(
    y,
    parts,
    arrivals,
    x,
    weight,
    scale,
    bias,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    y_stride,
    weight_stride,
    scale_stride,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Like linear.py's kernel. SCALE_BLOCK: 0 for scales of rows."""
    start_next(PDL)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    is_output = row < num_outputs
    weight_row = weight + row.to(tl.int64) * weight_stride
    num_steps = tl.cdiv(num_inputs, BLOCK_I)
    first = (split * num_steps // SPLITS) * BLOCK_I
    last = ((split + 1) * num_steps // SPLITS) * BLOCK_I
    if PREFETCH > 0:
        num_bytes = tl.minimum(PREFETCH, tl.minimum(last, num_inputs) - first)
        prefetch(weight_row + first, tl.where(is_output, num_bytes, 0), LANES)
    await_previous(PDL)
    m = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_I)[None, :]
    weight_here = weight_row[:, None] + column
    x_here = x + m[:, None] * x_stride + column
    is_row = (m < num_rows)[:, None]
    acc = tl.zeros([BLOCK_O, BLOCK_M], tl.float32)
    for start in tl.range(first, last, BLOCK_I, num_stages=STAGES):
        if EVEN:
            w = tl.load(weight_here + start, eviction_policy="evict_first")
            value = tl.load(x_here + start, mask=is_row, other=0.0)
        else:
            inside = column + start < num_inputs
            w = tl.load(
                weight_here + start,
                mask=is_output[:, None] & inside,
                other=0.0,
                eviction_policy="evict_first",
            )
            value = tl.load(x_here + start, mask=is_row & inside, other=0.0)
        if SCALE_BLOCK > 0:
            block = scale + (row // SCALE_BLOCK) * scale_stride + start // SCALE_BLOCK
            product = tl.dot(w.to(x.dtype.element_ty), tl.trans(value))
            acc += product * tl.load(block, mask=is_output, other=0.0)[:, None]
        else:
            acc = tl.dot(w.to(x.dtype.element_ty), tl.trans(value), acc)
    if SCALE_BLOCK == 0:
        acc *= tl.load(scale + row, mask=is_output, other=0.0)[:, None]
    add_splits(
        acc,
        y,
        parts,
        arrivals,
        bias,
        tile,
        split,
        num_rows,
        num_outputs,
        y_stride,
        HAS_BIAS,
        SPLITS,
        BLOCK_M,
        BLOCK_O,
    )

"""Matrix products with weights in FP8, alone or fused with the norm before and the gate after.

One row is multiplied in float32 (row_linear.py). Other inputs are converted to FP8 where possible,
so that no weight is converted. Up to 64 rows are bound by reading the weights. They are split into
two FP8 terms (fp8_rows.py), which makes the products as exact as those of inputs in bf16. More rows
are rounded to one term, if the checkpoint permits it: with block scales if the weights have them,
otherwise with a scale for each row. torch multiplies them if the device has such a GEMM. Otherwise
our own kernel multiplies those with block scales (fp8_blocks.py), and for others the weights are
dequantized first (fp8_weights.py).

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
from worker_daemon.contracts.layer_ops import Activation, Fp8Matrix, GateUp, NormedSum, Source
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.fp8_blocks import choose_block_tile, multiply_blocks
from worker_daemon.kernels.fp8_rows import (
    BLOCK_SCALED_ROWS,
    MAX_SIZE,
    SPLIT_ROWS,
    TERM_RATIO,
    Fp8Rows,
    RowForm,
    fp8_gate_rows,
    fp8_norm_rows,
    fp8_rows,
)
from worker_daemon.kernels.fp8_weights import dequantize
from worker_daemon.kernels.launch import (
    HOPPER,
    await_previous,
    has_dependent_launch,
    launch_options,
    start_next,
)
from worker_daemon.kernels.linear import MAX_TILES, add_splits, has_aligned_rows
from worker_daemon.kernels.norm import sum_and_norm
from worker_daemon.kernels.prefetch import prefetch
from worker_daemon.kernels.row_linear import launch_row, row_norm
from worker_daemon.kernels.tiles import DeviceLimits
from worker_daemon.kernels.tuning import (
    MatrixTile,
    Tile,
    VectorTile,
    load_tuning,
    row_bucket,
)

_LEAST_FP8: Final = (8, 9)
"""Compute capability from which Triton multiplies float8_e4m3fn."""
_LEAST_BLOCK_GEMM: Final = (12, 9)
"""Version of CUDA whose cuBLAS has FP8 products with block scales; Hopper alone has them."""
_MULTIPLE: Final = 16
"""torch's product in FP8 needs multiples of it in both sizes of the matrix."""
_MAX_SPLITS: Final = 8
_LEAST_STEPS: Final = 4
"""Fewest steps of BLOCK_I columns in a split. With fewer, the split-K reduction costs more than the
split gains."""
_MOST_FUSED_PROGRAMS: Final = 2048
"""With more, a norm of one row is a separate kernel: each program of a fused one reads the row,
the residual and the norm's weights."""
_RATIO = tl.constexpr(TERM_RATIO)


class Fp8Linear:
    """The products of all layers with matrices in FP8. One object per daemon, on one stream.

    Owns MAX_TILES int32 counters on the device, which are zero between launches.
    """

    def __init__(self, device: torch.device, tile: Tile | None = None) -> None:
        """device is that of all tensors; tile replaces the choice by shape."""
        is_cuda = device.type == "cuda"
        capability = torch.cuda.get_device_capability(device) if is_cuda else _LEAST_FP8
        self._pdl = has_dependent_launch(device)
        self._has_fp8 = capability >= _LEAST_FP8
        self._has_scaled_mm = capability >= HOPPER
        self._has_block_mm = is_cuda and has_block_gemm(capability, torch.version.cuda)
        self._limits = DeviceLimits.of(device)
        self._tile = tile
        name = torch.cuda.get_device_name(device) if is_cuda else device.type
        self._tuning = load_tuning(f"{name} fp8")
        self._arrivals = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)

    def linear(self, x: torch.Tensor, matrix: Fp8Matrix, bias: torch.Tensor | None) -> torch.Tensor:
        """y [M, O], contiguous, of x [M, I] and bias [O], both of one dtype. Up to 64 rows, a row
        of y depends only on its row of x and on the bucket of M."""
        fused = self.fused(x, matrix, bias, None)
        if fused is None:
            return functional.linear(x, self._dequantized(matrix, x.dtype), bias)
        y, _ = fused
        assert isinstance(y, torch.Tensor), "no activation was asked for"
        return y

    def fused(
        self,
        source: Source,
        matrix: Fp8Matrix,
        bias: torch.Tensor | None,
        activation: Activation | None,
    ) -> tuple[torch.Tensor | GateUp, torch.Tensor] | None:
        """Return LayerOps.product, without a separate launch for the norm or the gate of the
        source; None if the weights must be dequantized, or if rows have more than MAX_SIZE values
        to compute. An activation is part of the launch of one row, and left to the next product of
        several rows."""
        if isinstance(source, GateUp):
            given = source.values
        else:
            given = source.residual if isinstance(source, NormedSum) else source
            tile = self._row_tile(given, matrix)
            if tile is not None:
                return self._row_product(source, matrix, bias, tile, activation)
        form = self._row_form(given, matrix)
        if form is None:
            return None
        if isinstance(source, torch.Tensor):
            rows, total = fp8_rows(source, form, pdl=self._pdl), source
        elif matrix.weight.shape[1] > MAX_SIZE:
            return None
        elif isinstance(source, NormedSum):
            rows, total = fp8_norm_rows(source, form, pdl=self._pdl)
        else:
            rows, total = fp8_gate_rows(source, form, pdl=self._pdl), source.values
        y = self._multiply(rows, given.shape[0], matrix, bias, given.dtype)
        return (y if activation is None else GateUp(y, activation)), total

    def _row_product(
        self,
        source: torch.Tensor | NormedSum,
        matrix: Fp8Matrix,
        bias: torch.Tensor | None,
        tile: VectorTile,
        activation: Activation | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_outputs, norm = matrix.weight.shape[0], None
        if isinstance(source, torch.Tensor):
            x = total = source
        elif activation is not None and num_outputs > _MOST_FUSED_PROGRAMS * tile.block_o:
            x, total = sum_and_norm(source, pdl=self._pdl)
        else:
            x, norm = row_norm(source, pdl=self._pdl)
            total = norm.total
        y = x.new_empty(1, num_outputs // (1 if activation is None else 2))
        launch_row(
            y,
            x,
            matrix.weight,
            bias,
            tile,
            pdl=self._pdl,
            norm=norm,
            gate=activation,
            scale=matrix.scale,
        )
        return y, total

    def _row_tile(self, x: torch.Tensor, matrix: Fp8Matrix) -> VectorTile | None:
        """Return the tile of a product of one row; None if there are more."""
        if x.shape[0] != 1 or not self._multiplies(x):
            return None
        tile = self._tile or choose_row_tile(matrix.weight.shape, self._limits.num_sms)
        return tile if isinstance(tile, VectorTile) else None

    def _row_form(self, x: torch.Tensor, matrix: Fp8Matrix) -> RowForm | None:
        """Return the form of the inputs of a product in FP8; None to dequantize the weights."""
        if not self._multiplies(x):
            return None
        if row_bucket(x.shape[0]) is not None:
            return SPLIT_ROWS
        if matrix.scale.dim() == 2:
            return BLOCK_SCALED_ROWS if matrix.activations == "dynamic" else None
        may_round = (
            self._has_scaled_mm
            and x.dtype == torch.bfloat16
            and matrix.activations != "none"
            and all(size % _MULTIPLE == 0 for size in matrix.weight.shape)
        )
        return RowForm(1, matrix.input_scale) if may_round else None

    def _dequantized(self, matrix: Fp8Matrix, dtype: torch.dtype) -> torch.Tensor:
        if self._has_fp8:
            return dequantize(matrix, dtype, pdl=self._pdl)
        return matrix.dequantized(dtype)

    def _multiplies(self, x: torch.Tensor) -> bool:
        has_half = x.dtype in (torch.bfloat16, torch.float16)
        return self._has_fp8 and has_half and x.shape[0] > 0

    def _multiply(
        self,
        x: Fp8Rows,
        num_rows: int,
        matrix: Fp8Matrix,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the product [num_rows, O] in dtype; x may have more rows, which pad it."""
        shape, has_blocks = matrix.weight.shape, x.scale.dim() == 2
        if has_blocks and not self._has_block_product(shape, dtype):
            y = torch.empty(x.num_rows, shape[0], dtype=dtype, device=x.values.device)
            chosen = choose_block_tile(num_rows, shape, self._limits)
            multiply_blocks(y, x, matrix, bias, chosen, self._arrivals, pdl=self._pdl)
            return y[:num_rows]
        if x.values.shape[0] > x.num_rows:
            y = torch.empty(num_rows, shape[0], dtype=dtype, device=x.values.device)
            tile = self._tile or self._tuning.tile(max(2, num_rows), *shape)
            if not isinstance(tile, MatrixTile):
                tile = choose_tile(num_rows, shape, self._limits.num_sms)
            launch_fp8_matrix(y, x, matrix, bias, tile, self._pdl, self._arrivals)
            return y
        y = torch._scaled_mm(
            x.values,
            matrix.weight.t(),
            scale_a=x.scale.t() if has_blocks else x.scale.unsqueeze(1),
            scale_b=matrix.scale.t() if has_blocks else matrix.scale.unsqueeze(0),
            out_dtype=dtype,
            use_fast_accum=not has_blocks,
        )[:num_rows]
        return y if bias is None else y.add_(bias)

    def _has_block_product(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Return True if torch has the product with a matrix [O, I] with block scales."""
        num_outputs, num_inputs = shape
        is_aligned = num_outputs % FP8_BLOCK == 0 and num_inputs % (4 * FP8_BLOCK) == 0
        return self._has_block_mm and dtype == torch.bfloat16 and is_aligned


def has_block_gemm(capability: tuple[int, int], cuda_version: str | None) -> bool:
    """Return True if a torch that was built with this version of CUDA multiplies by block scales in
    FP8: on Hopper, with cuBLAS from CUDA 12.9 on."""
    version = tuple(map(int, (cuda_version or "0").split(".")))
    return capability == HOPPER and version >= _LEAST_BLOCK_GEMM


def choose_row_tile(shape: tuple[int, ...], num_sms: int) -> VectorTile:
    """Return the tile of a product of one row with a matrix [O, I]: whole rows of weights, and at
    least two programs for each SM. Measured in layers (benchmarks/NOTES.md)."""
    num_outputs, num_inputs = shape
    block_i = min(16384, triton.next_power_of_2(num_inputs))
    if block_i > 4096:
        return VectorTile(2, block_i, block_i // 2048)
    most = max(2, num_outputs // (2 * num_sms))
    return VectorTile(min(8, 1 << (most.bit_length() - 1)), block_i, 4)


def choose_tile(num_rows: int, shape: tuple[int, ...], num_sms: int) -> MatrixTile:
    """Return the tile of a product of M rows with a matrix [O, I], by arithmetic on the sizes: at
    least a program for each SM, and steps of one block."""
    num_outputs, num_inputs = shape
    block_o = 128 if num_rows > 32 and num_outputs >= 128 * num_sms else 64
    num_tiles = triton.cdiv(num_outputs, block_o)
    num_steps = triton.cdiv(num_inputs, FP8_BLOCK)
    wanted = triton.cdiv(num_sms, num_tiles)
    splits = max(1, min(wanted, num_steps // _LEAST_STEPS, _MAX_SPLITS))
    if num_tiles > MAX_TILES:
        splits = 1
    num_stages = 3 if splits == 1 else 5
    return MatrixTile(block_o, FP8_BLOCK, splits, 4, num_stages, prefetch=512)


def launch_fp8_matrix(
    y: torch.Tensor,
    x: Fp8Rows,
    matrix: Fp8Matrix,
    bias: torch.Tensor | None,
    tile: MatrixTile,
    pdl: bool,
    arrivals: torch.Tensor,
) -> None:
    """Compute y [M, O] = x [M, I] W [O, I]^T + bias [O], each row contiguous; x has two terms.
    arrivals: as for launch_matrix. With block scales, a tile's block_i is capped at 128."""
    num_rows = y.shape[0]
    weight, scale = matrix.weight, matrix.scale
    num_outputs, num_inputs = weight.shape
    has_blocks = scale.dim() == 2
    assert x.values.shape == (2 * num_rows, num_inputs)
    assert weight.stride(1) == y.stride(1) == 1
    assert scale.stride(-1) == 1
    block_i = min(tile.block_i, FP8_BLOCK) if has_blocks else tile.block_i
    num_tiles = triton.cdiv(num_outputs, tile.block_o)
    splits = tile.num_splits
    assert splits == 1 or num_tiles <= arrivals.shape[0]
    block_m = max(16, triton.next_power_of_2(num_rows))
    parts = num_tiles * splits * block_m * tile.block_o if splits > 1 else 0
    _fp8_kernel[(num_tiles, splits)](
        y,
        torch.empty(parts, dtype=torch.float32, device=y.device),
        arrivals,
        *x,
        weight,
        scale,
        y if bias is None else bias,
        num_rows,
        num_outputs,
        num_inputs,
        y.stride(0),
        weight.stride(0),
        scale.stride(0),
        HAS_BIAS=bias is not None,
        EVEN=num_outputs % tile.block_o == 0 and num_inputs % block_i == 0,
        SCALE_BLOCK=FP8_BLOCK if has_blocks else 0,
        SPLITS=splits,
        BLOCK_M=block_m,
        BLOCK_O=tile.block_o,
        BLOCK_I=block_i,
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
    x_scale,
    weight,
    scale,
    bias,
    num_rows,
    num_outputs,
    num_inputs,
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
    """Like linear.py's kernel, but for inputs in two terms. SCALE_BLOCK: 128, or 0 for scales of
    rows."""
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
    if SCALE_BLOCK == 0:
        factor = tl.load(scale + row, mask=is_output, other=0.0)
    await_previous(PDL)
    m = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_I)[None, :]
    weight_here = weight_row[:, None] + column
    x_here = x + m[:, None] * num_inputs + column
    second = num_rows * num_inputs
    is_row = (m < num_rows)[:, None]
    acc = tl.zeros([BLOCK_O, BLOCK_M], tl.float32)
    rest = tl.zeros([BLOCK_O, BLOCK_M], tl.float32)
    for start in tl.range(first, last, BLOCK_I, num_stages=STAGES):
        if EVEN:
            w = tl.load(weight_here + start, eviction_policy="evict_first")
            value = tl.load(x_here + start, mask=is_row, other=0.0)
            small = tl.load(x_here + second + start, mask=is_row, other=0.0)
        else:
            inside = column + start < num_inputs
            w = tl.load(
                weight_here + start,
                mask=is_output[:, None] & inside,
                other=0.0,
                eviction_policy="evict_first",
            )
            value = tl.load(x_here + start, mask=is_row & inside, other=0.0)
            small = tl.load(x_here + second + start, mask=is_row & inside, other=0.0)
        if SCALE_BLOCK > 0:
            block = scale + (row // SCALE_BLOCK) * scale_stride + start // SCALE_BLOCK
            factor = tl.load(block, mask=is_output, other=0.0)[:, None]
            acc += tl.dot(w, tl.trans(value)) * factor
            rest += tl.dot(w, tl.trans(small)) * factor
        else:
            acc = tl.dot(w, tl.trans(value), acc)
            rest = tl.dot(w, tl.trans(small), rest)
    acc += rest * (1.0 / _RATIO)
    if SCALE_BLOCK == 0:
        acc *= factor[:, None]
    acc *= tl.load(x_scale + m, mask=m < num_rows, other=0.0)[None, :]
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

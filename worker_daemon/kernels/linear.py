"""Matrix products of few rows (skinny GEMMs), bound by reading the weights once.

One row uses dot products (row_linear.py), up to 64 rows use MMA instructions, and torch computes
the rest. Partial sums of several programs are added in a fixed order, so equal inputs give equal
bits.

Letters: y[M, O] = x[M, I] W[O, I]^T + bias.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch.nn import functional

from worker_daemon.contracts.layer_ops import Activation, NormedSum, Source
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import (
    await_previous,
    has_dependent_launch,
    launch_options,
    start_next,
)
from worker_daemon.kernels.prefetch import prefetch
from worker_daemon.kernels.row_linear import launch_row, row_norm
from worker_daemon.kernels.tuning import MatrixTile, Tile, Tuning, VectorTile, load_tuning

MAX_TILES = 16384
"""Tiles along O whose arrivals one launch can count."""


class ThinLinear:
    """The linear products of all layers; one object per daemon, on one stream.

    Owns MAX_TILES int32 counters on the device, which are zero between launches.
    """

    def __init__(self, device: torch.device, tuning: Tuning | None = None) -> None:
        """device is that of all tensors; tuning defaults to the one shipped for it."""
        self._pdl = has_dependent_launch(device)
        self._tuning = _shipped_tuning(device) if tuning is None else tuning
        self._arrivals = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """y [M, O], contiguous, of x [M, I], weight [O, I] and bias [O], all of one dtype. out,
        contiguous, becomes y; given only without a bias.

        Sums are kept in fp32 and rounded once. A row of y depends only on its row of x and on the
        bucket of M. torch computes fp32, more than 64 rows, and weights that are not contiguous.
        """
        tile = self._choose(x, weight)
        assert out is None or bias is None
        if tile is None:
            if out is None:
                return functional.linear(x, weight, bias)
            return torch.mm(x, weight.t(), out=out)
        y = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
        if isinstance(tile, VectorTile):
            launch_row(y, x, weight, bias, tile, pdl=self._pdl)
        else:
            launch_matrix(y, x, weight, bias, tile, self._pdl, self._arrivals)
        return y

    def fused(
        self,
        source: Source,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation | None,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return LayerOps.product in one launch, as row_linear.py has it of one row with its norm,
        its activation or both; None if it takes several."""
        if isinstance(source, torch.Tensor):
            if activation is None:
                return self.linear(source, weight, bias, out), source
            x = source
        elif isinstance(source, NormedSum):
            x = source.residual
        else:
            return None
        tile = self._choose(x, weight)
        if not isinstance(tile, VectorTile):
            return None
        norm = None
        if isinstance(source, NormedSum):
            x, norm = row_norm(source, pdl=self._pdl)
        y = x.new_empty(1, weight.shape[0] // (1 if activation is None else 2))
        launch_row(y, x, weight, bias, tile, pdl=self._pdl, norm=norm, gate=activation)
        return y, x if norm is None else norm.total

    def matrix_tile(self, x: torch.Tensor, weight: torch.Tensor) -> MatrixTile | None:
        """Return the tile of a product of several rows x [M, I]; None for one row, or if torch
        computes it."""
        tile = self._choose(x, weight)
        return tile if isinstance(tile, MatrixTile) else None

    def _choose(self, x: torch.Tensor, weight: torch.Tensor) -> Tile | None:
        num_rows, num_inputs = x.shape
        if weight.dtype == torch.float32 or num_rows == 0 or not weight.is_contiguous():
            return None
        return self._tuning.tile(num_rows, weight.shape[0], num_inputs)


def _shipped_tuning(device: torch.device) -> Tuning:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return load_tuning(name)


def launch_matrix(
    y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: MatrixTile,
    pdl: bool,
    arrivals: torch.Tensor,
) -> None:
    """Compute y [M, O] = x [M, I] weight [O, I]^T + bias [O], each row contiguous.

    arrivals is int32, zero, with an entry for each of O / block_o tiles; it is zero again at the
    end. One stream at a time may use it.
    """
    num_rows, num_inputs = x.shape
    num_outputs = weight.shape[0]
    assert x.dtype == weight.dtype
    assert x.stride(1) == weight.stride(1) == y.stride(1) == 1
    num_tiles = triton.cdiv(num_outputs, tile.block_o)
    splits = tile.num_splits
    assert splits == 1 or num_tiles <= arrivals.shape[0]
    block_m = max(16, triton.next_power_of_2(num_rows))
    parts = num_tiles * splits * block_m * tile.block_o if splits > 1 else 0
    _matrix_kernel[(num_tiles, splits)](
        y,
        torch.empty(parts, dtype=torch.float32, device=x.device),
        arrivals,
        x,
        weight,
        x if bias is None else bias,
        num_rows,
        num_outputs,
        num_inputs,
        x.stride(0),
        y.stride(0),
        weight.stride(0),
        HAS_BIAS=bias is not None,
        EVEN=num_outputs % tile.block_o == 0 and num_inputs % tile.block_i == 0,
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


def has_aligned_rows(weight: torch.Tensor) -> bool:
    """Return True if vectors of 16 bytes can be read from each row."""
    return weight.data_ptr() % 16 == 0 and weight.stride(0) * weight.itemsize % 16 == 0


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _matrix_kernel(
    y,
    parts,
    arrivals,
    x,
    weight,
    bias,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    y_stride,
    weight_stride,
    HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum over this program's share of the columns, one of SPLITS; a tile's last program to finish
    adds the sums."""
    start_next(PDL)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    weight_row = weight + row.to(tl.int64) * weight_stride
    num_steps = tl.cdiv(num_inputs, BLOCK_I)
    first = (split * num_steps // SPLITS) * BLOCK_I
    last = ((split + 1) * num_steps // SPLITS) * BLOCK_I
    if PREFETCH > 0:
        num_bytes = tl.minimum(PREFETCH, tl.minimum(last, num_inputs) - first) * 2
        prefetch(weight_row + first, tl.where(row < num_outputs, num_bytes, 0), LANES)
    await_previous(PDL)
    acc = add_columns(
        weight_row,
        x,
        row < num_outputs,
        num_rows,
        num_inputs,
        x_stride,
        first,
        last,
        EVEN,
        BLOCK_M,
        BLOCK_O,
        BLOCK_I,
        STAGES,
    )
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


@triton.jit
def add_splits(
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
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """Store a tile's sum of the acc [BLOCK_O, BLOCK_M] of SPLITS programs, by the last one to
    finish. parts: float32, of all tiles and splits; arrivals as for launch_matrix."""
    if SPLITS > 1:
        m = tl.arange(0, BLOCK_M)
        element = tl.arange(0, BLOCK_O)[:, None] * BLOCK_M + m[None, :]
        here = parts + tile * (SPLITS * BLOCK_O * BLOCK_M) + element
        tl.store(here + split * (BLOCK_O * BLOCK_M), acc)
        # All threads write their parts before the count, and read other programs' parts after it.
        tl.debug_barrier()
        before = tl.atomic_add(arrivals + tile, 1, sem="acq_rel")
        tl.debug_barrier()
        if before == SPLITS - 1:
            total = tl.zeros([BLOCK_O, BLOCK_M], tl.float32)
            for part in tl.static_range(SPLITS):
                total += tl.load(here + part * (BLOCK_O * BLOCK_M), cache_modifier=".cg")
            store_tile(total, y, bias, tile, num_rows, num_outputs, y_stride, HAS_BIAS)
            tl.store(arrivals + tile, 0)
    else:
        store_tile(acc, y, bias, tile, num_rows, num_outputs, y_stride, HAS_BIAS)


@triton.jit
def add_columns(
    weight_row,
    x,
    is_output,
    num_rows,
    num_inputs,
    x_stride,
    first,
    last,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return the product [BLOCK_O, BLOCK_M] of the columns from first to last. weight_row: each
    row's first weight. EVEN: all columns and rows of the tile exist."""
    m = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_I)[None, :]
    weight_here = weight_row[:, None] + column
    x_here = x + m[:, None] * x_stride + column
    is_output = is_output[:, None]
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
                mask=is_output & inside,
                other=0.0,
                eviction_policy="evict_first",
            )
            value = tl.load(x_here + start, mask=is_row & inside, other=0.0)
        acc = tl.dot(w, tl.trans(value), acc)
    return acc


@triton.jit
def store_tile(acc, y, bias, tile, num_rows, num_outputs, y_stride, HAS_BIAS: tl.constexpr):
    """Round acc [BLOCK_O, BLOCK_M] plus the bias into its place in y."""
    row = tile * acc.shape[0] + tl.arange(0, acc.shape[0])
    m = tl.arange(0, acc.shape[1])
    if HAS_BIAS:
        acc += tl.load(bias + row, mask=row < num_outputs, other=0.0).to(tl.float32)[:, None]
    stored = (m < num_rows)[None, :] & (row < num_outputs)[:, None]
    tl.store(y + m[None, :] * y_stride + row[:, None], acc.to(y.dtype.element_ty), mask=stored)

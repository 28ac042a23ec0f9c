"""The operations of experts on a GPU: routing, then products grouped by expert.

One row has separate kernels (multiply_row). Of several rows, those of an expert are divided into
tiles (expert_routing.py), whose sizes expert_tiles.py chooses (multiply_rows). Weights in FP8 are
converted in registers. Scales of rows multiply the sums. Scales of blocks multiply the sum over
each block or, for one row, its inputs. Biases are added to float32 sums. benchmarks/NOTES.md has
the floors.

Letters: N tokens, H hidden size, I inner size, L experts of this rank, K experts of a token, T
tiles, M rows of a tile, O outputs. In _ProductStack, I is the number of inputs of the product.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.experts import (
    ClampedSwiGLU,
    ExpertMatrices,
    RoutedTokens,
    Routing,
)
from worker_daemon.contracts.fp8 import FP8_BLOCK
from worker_daemon.contracts.layer_ops import NormedSum
from worker_daemon.kernels.activation import activate_pair
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.expert_routing import TilePlan, plan_tiles, route, route_row
from worker_daemon.kernels.expert_tiles import (
    DOWN_ROW,
    GATE_UP_ROW,
    ExpertTiles,
    RowTile,
    choose_tiles,
)
from worker_daemon.kernels.launch import (
    await_previous,
    has_dependent_launch,
    launch_options,
    start_next,
)
from worker_daemon.kernels.tiles import DeviceLimits
from worker_daemon.kernels.tma_experts import can_use_tma, multiply_by_tma

_SUM_BLOCK: Final = 1024
"""Outputs of a token that one program adds."""


class TritonExperts:
    """ExpertOps on one CUDA device, on one stream. Owns route_row's counter, which is zero between
    launches."""

    def __init__(self, device: torch.device) -> None:
        """device is that of all tensors."""
        self._pdl = has_dependent_launch(device)
        self._limits = DeviceLimits.of(device)
        self._arrivals = torch.zeros(1, dtype=torch.int32, device=device)

    def route(
        self,
        scores: torch.Tensor,
        routing: Routing,
        query_start_loc: torch.Tensor,
        loads: torch.Tensor | None = None,
        replayed: torch.Tensor | None = None,
    ) -> RoutedTokens:
        """scores [N, E], query_start_loc int32 [B + 1], replayed int16 [N, K] -> experts and
        weights [N, K]. Replay is plain torch: few steps have some."""
        if replayed is None:
            return route(scores, routing, query_start_loc, loads, pdl=self._pdl)
        chosen = route(scores, routing, query_start_loc, pdl=self._pdl).experts
        experts = torch.where(replayed < 0, chosen, replayed.to(torch.int32))
        if loads is not None:
            flat = experts.flatten()
            loads.scatter_add_(0, flat.clamp(min=0).long(), (flat >= 0).to(loads.dtype))
        return routing.given_to(experts, scores)

    def route_row(
        self,
        source: NormedSum,
        router: torch.Tensor,
        bias: torch.Tensor | None,
        routing: Routing,
        query_start_loc: torch.Tensor,
        loads: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, RoutedTokens]:
        """See LayerOps.route; source has one row [1, H]."""
        args = source, router, bias, routing, query_start_loc, loads
        return route_row(*args, self._arrivals, pdl=self._pdl)

    def multiply(
        self, x: torch.Tensor, routed: RoutedTokens, matrices: ExpertMatrices
    ) -> torch.Tensor:
        """See ExpertOps.multiply: x [N, H] -> this rank's part of the sum, [N, H]."""
        num_tokens, top_k = routed.experts.shape
        if not num_tokens:
            return torch.empty_like(x)
        if num_tokens == 1 and x.dtype != torch.float32:
            return multiply_row(x, routed, matrices, pdl=self._pdl)
        tiles = choose_tiles(num_tokens * top_k, matrices, x.dtype, self._limits)
        return multiply_rows(x, routed, matrices, tiles, pdl=self._pdl)


def multiply_row(
    x: torch.Tensor,
    routed: RoutedTokens,
    matrices: ExpertMatrices,
    gate_up_tile: RowTile = GATE_UP_ROW,
    down_tile: RowTile = DOWN_ROW,
    *,
    pdl: bool,
) -> torch.Tensor:
    """Return ExpertOps.multiply of one row x [1, H]: matrix-vector products, first the activation
    of gate and up for all of its experts, then down and the weighted sum."""
    top_k = routed.experts.shape[1]
    count, hidden, inner = matrices.down.shape
    h, y = x.new_empty(top_k, inner), torch.empty_like(x)
    gate_up, down = _stacks(matrices)
    _row_gate_up_kernel[(triton.cdiv(inner, gate_up_tile.block_o), top_k)](
        h,
        x,
        *gate_up.arguments(x),
        routed.experts,
        matrices.first,
        count,
        inner,
        SIZE=hidden,
        BLOCK_O=gate_up_tile.block_o,
        BLOCK_I=gate_up_tile.block_i,
        **_activation_options(matrices.clamped),
        **gate_up.options(gate_up_tile.num_warps, pdl=pdl),
    )
    _row_down_kernel[(triton.cdiv(hidden, down_tile.block_o),)](
        y,
        h,
        *down.arguments(x),
        routed.experts,
        routed.weights,
        matrices.first,
        count,
        hidden,
        SIZE=inner,
        TOP_K=top_k,
        BLOCK_O=down_tile.block_o,
        BLOCK_K=triton.next_power_of_2(top_k),
        BLOCK_I=down_tile.block_i,
        **down.options(down_tile.num_warps, pdl=pdl),
    )
    return y


def multiply_rows(
    x: torch.Tensor,
    routed: RoutedTokens,
    matrices: ExpertMatrices,
    tiles: ExpertTiles,
    *,
    pdl: bool,
) -> torch.Tensor:
    """Return ExpertOps.multiply of rows x [N, H], N >= 1. Each tile is multiplied by its expert's
    gate and up at once, then by down. The weighted sum has a fixed order, so that equal inputs give
    equal bits."""
    num_tokens, top_k = routed.experts.shape
    count, hidden, inner = matrices.down.shape
    plan = plan_tiles(routed.experts, matrices.first, count, tiles.block_m, pdl=pdl)
    h = x.new_empty(plan.num_tiles * plan.block_m, inner)
    multiply_tiles(h, x, matrices, plan, tiles, pdl=pdl, gated=True)
    y = x.new_empty(num_tokens * top_k, hidden)
    multiply_tiles(y, h, matrices, plan, tiles, pdl=pdl, gated=False)
    return add_experts(y, x, routed, matrices, pdl=pdl)


def multiply_tiles(
    y: torch.Tensor,
    x: torch.Tensor,
    matrices: ExpertMatrices,
    plan: TilePlan,
    tiles: ExpertTiles,
    *,
    pdl: bool,
    gated: bool,
) -> None:
    """Multiply each tile of the plan by the matrices of its expert, and write the result to y.

    gated: x [N, H] are tokens, y [T * M, I] the activation of their products with gate and up, in
    the order of the plan. Otherwise: x [T * M, I] is such a y, and y [N * K, H] its product with
    down, row n * K + k for the k-th expert of token n; rows of other ranks' experts are not
    written. With block scales, block_o and block_i of the tile are at most 128.
    """
    num_outputs, num_inputs = y.shape[1], x.shape[1]
    stack = _stacks(matrices)[0 if gated else 1]
    tile = tiles.gate_up if gated else tiles.down
    activation = _activation_options(matrices.clamped if gated else None)
    if not tiles.weights_left and can_use_tma(x, stack.weight):
        multiply_by_tma(
            y, x, stack.weight, stack.bias, plan, tile, activation, pdl=pdl, gated=gated
        )
        return
    assert stack.scale_form != "block" or max(tile.block_o, tile.block_i) <= FP8_BLOCK
    num_blocks = triton.cdiv(num_outputs, tile.block_o)
    _product_kernel[(plan.num_tiles * num_blocks,)](
        y,
        x,
        *stack.arguments(x),
        plan.entries,
        plan.num_tiles,
        num_outputs,
        num_inputs,
        num_blocks,
        TOP_K=plan.top_k,
        GATED=gated,
        LEFT=tiles.weights_left,
        EVEN=num_outputs % tile.block_o == 0 and num_inputs % tile.block_i == 0,
        EXACT=x.dtype == torch.float32,
        BLOCK_M=plan.block_m,
        BLOCK_O=tile.block_o,
        BLOCK_I=tile.block_i,
        STAGES=tile.num_stages,
        **activation,
        **stack.options(tile.num_warps, pdl=pdl),
    )


class _ProductStack(NamedTuple):
    """The matrices [L, O, I] of a product, their scales and biases."""

    weight: torch.Tensor
    scale: torch.Tensor | None
    bias: torch.Tensor | None

    @property
    def scale_form(self) -> str:
        """The scales: "none", one for each "row" of a matrix, or one for each "block"."""
        if self.scale is None:
            return "none"
        return "row" if self.scale.dim() == 2 else "block"

    def arguments(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int, int, torch.Tensor | None]:
        """Return the arguments of a kernel: weights, scales (x if there are none), the scales'
        strides of experts and of rows, and biases."""
        if self.scale is None:
            return self.weight, x, 0, 0, self.bias
        return self.weight, self.scale, self.scale.stride(0), self.scale.stride(1), self.bias

    def options(self, num_warps: int, *, pdl: bool) -> dict[str, Any]:
        """Return the constants and options of a launch."""
        return {
            "SCALES": self.scale_form,
            "SCALE_BLOCK": FP8_BLOCK,
            "PDL": pdl,
            "num_warps": num_warps,
            "enable_fp_fusion": True,
            **launch_options(pdl),
        }


def _stacks(matrices: ExpertMatrices) -> tuple[_ProductStack, _ProductStack]:
    """Return the matrices of gate and up, and those of down."""
    return (
        _ProductStack(matrices.gate_up, matrices.gate_up_scale, matrices.gate_up_bias),
        _ProductStack(matrices.down, matrices.down_scale, matrices.down_bias),
    )


def _activation_options(clamped: ClampedSwiGLU | None) -> dict[str, float | None]:
    """Return the constants of the activation; None: silu(gate) * up."""
    if clamped is None:
        return {"ALPHA": None, "LIMIT": None}
    return {"ALPHA": clamped.alpha, "LIMIT": clamped.limit}


def add_experts(
    y: torch.Tensor,
    x: torch.Tensor,
    routed: RoutedTokens,
    matrices: ExpertMatrices,
    *,
    pdl: bool,
) -> torch.Tensor:
    """Return the weighted sum [N, H] of each token's rows of y [N * K, H], like x [N, H] in shape
    and dtype."""
    (num_tokens, hidden), top_k = x.shape, routed.experts.shape[1]
    total = torch.empty_like(x)
    block = min(_SUM_BLOCK, triton.next_power_of_2(hidden))
    _sum_kernel[(num_tokens, triton.cdiv(hidden, block))](
        total,
        y,
        routed.experts,
        routed.weights,
        matrices.first,
        matrices.down.shape[0],
        hidden,
        TOP_K=top_k,
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    return total


@launched
@triton.jit(do_not_specialize=["num_tiles", "num_blocks"])
def _product_kernel(
    y,
    x,
    weight,
    scale,
    scale_size,
    scale_stride,
    bias,
    entries,
    num_tiles,
    num_outputs,
    num_inputs,
    num_blocks,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    LEFT: tl.constexpr,
    EVEN: tl.constexpr,
    EXACT: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes a block of a tile's outputs. The programs of a tile are neighbors in
    the grid, so that its rows are read from memory once. The tiles of an expert are neighbors too,
    so that its weights are."""
    start_next(PDL)
    tile = tl.program_id(0) // num_blocks
    block = tl.program_id(0) % num_blocks
    await_previous(PDL)
    expert = tl.load(entries + tile).to(tl.int64)
    if expert >= 0:
        m = tl.arange(0, BLOCK_M)
        is_row = m < tl.load(entries + num_tiles + tile)
        place = tile * BLOCK_M + m
        pair = tl.load(entries + 2 * num_tiles + place, mask=is_row, other=0)
        x_row = (pair // TOP_K if GATED else place).to(tl.int64)
        output = block * BLOCK_O + tl.arange(0, BLOCK_O)
        is_output = output < num_outputs
        column = tl.arange(0, BLOCK_I)[None, :]
        first_output = expert * num_outputs * (2 if GATED else 1)
        scale_here = scale + expert * scale_size
        acc, other_acc = _add_columns(
            x + x_row[:, None] * num_inputs + column,
            weight + (first_output + output)[:, None] * num_inputs + column,
            scale_here + block * BLOCK_O // SCALE_BLOCK * scale_stride,
            num_outputs // SCALE_BLOCK * scale_stride,
            is_row,
            is_output,
            num_outputs,
            num_inputs,
            GATED,
            LEFT,
            EVEN,
            EXACT,
            SCALES,
            SCALE_BLOCK,
            BLOCK_M,
            BLOCK_O,
            BLOCK_I,
            STAGES,
        )
        if SCALES == "row":
            acc *= _load_per_output(scale_here, output, is_output, LEFT)
        if bias is not None:
            acc += _load_per_output(bias + first_output, output, is_output, LEFT)
        if GATED:
            if SCALES == "row":
                other_acc *= _load_per_output(scale_here + num_outputs, output, is_output, LEFT)
            if bias is not None:
                up_bias = bias + first_output + num_outputs
                other_acc += _load_per_output(up_bias, output, is_output, LEFT)
            gate = acc.to(y.dtype.element_ty).to(tl.float32)
            up = other_acc.to(y.dtype.element_ty).to(tl.float32)
            acc = activate_pair(gate, up, ALPHA, LIMIT)
        if LEFT:
            acc = tl.trans(acc)
        y_row = (place if GATED else pair).to(tl.int64)
        y_here = y + y_row[:, None] * num_outputs + output[None, :]
        stored = is_row[:, None] & is_output[None, :]
        tl.store(y_here, acc.to(y.dtype.element_ty), mask=stored)


@triton.jit
def _add_columns(
    x_here,
    weight_here,
    block_scale,
    up_blocks,
    is_row,
    is_output,
    num_outputs,
    num_inputs,
    GATED: tl.constexpr,
    LEFT: tl.constexpr,
    EVEN: tl.constexpr,
    EXACT: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return two float32 sums: the products with the first matrix (gate, or down) and, if GATED,
    with up, which is num_outputs rows below and whose scales are up_blocks further. If not GATED,
    the second sum means nothing."""
    column = tl.arange(0, BLOCK_I)[None, :]
    other_here = weight_here + num_outputs * num_inputs
    if LEFT:
        acc = tl.zeros([BLOCK_O, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_O], tl.float32)
    other_acc = acc
    for start in tl.range(0, num_inputs, BLOCK_I, num_stages=STAGES):
        is_weight = is_output[:, None]
        is_value = is_row[:, None]
        if not EVEN:
            is_weight &= column + start < num_inputs
            is_value &= column + start < num_inputs
        value = tl.load(x_here + start, mask=is_value, other=0.0)
        w = _load_weights(weight_here + start, is_weight, EVEN)
        factor = block_scale + start // SCALE_BLOCK
        acc = _multiply(acc, value, w, factor, LEFT, EXACT, SCALES)
        if GATED:
            w = _load_weights(other_here + start, is_weight, EVEN)
            other_acc = _multiply(other_acc, value, w, factor + up_blocks, LEFT, EXACT, SCALES)
    return acc, other_acc


@triton.jit
def _load_weights(here, mask, EVEN: tl.constexpr):
    return tl.load(here) if EVEN else tl.load(here, mask=mask, other=0.0)


@triton.jit
def _load_per_output(values, output, is_output, LEFT: tl.constexpr):
    """Load one float32 value for each output, shaped to broadcast over acc."""
    loaded = tl.load(values + output, mask=is_output, other=0.0).to(tl.float32)
    return loaded[:, None] if LEFT else loaded[None, :]


@triton.jit
def _multiply(
    acc,
    value,
    w,
    factor,
    LEFT: tl.constexpr,
    EXACT: tl.constexpr,
    SCALES: tl.constexpr,
):
    """Add value [M, I] times w [O, I] transposed to acc [M, O], or [O, M] if LEFT. factor: pointer
    to the scale of w, read if SCALES is "block"."""
    PRECISION: tl.constexpr = "ieee" if EXACT else None
    if SCALES != "none":
        w = w.to(value.dtype)
    if SCALES == "block":
        part = tl.zeros_like(acc)
        if LEFT:
            part = tl.dot(w, tl.trans(value), part, input_precision=PRECISION)
        else:
            part = tl.dot(value, tl.trans(w), part, input_precision=PRECISION)
        acc += part * tl.load(factor)
    elif LEFT:
        acc = tl.dot(w, tl.trans(value), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(value, tl.trans(w), acc, input_precision=PRECISION)
    return acc


@launched
@triton.jit(do_not_specialize=["first", "count"])
def _sum_kernel(
    total,
    y,
    experts,
    weights,
    first,
    count,
    size,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add a token's rows of y [N * K, size] by their weights, without those of other ranks."""
    start_next(PDL)
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    await_previous(PDL)
    acc = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        local = tl.load(experts + token * TOP_K + k) - first
        is_here = (local >= 0) & (local < count)
        row = y + (token * TOP_K + k).to(tl.int64) * size
        value = tl.load(row + column, mask=column < tl.where(is_here, size, 0), other=0.0)
        weight = tl.load(weights + token * TOP_K + k)
        acc += tl.where(is_here, weight, 0.0) * value.to(tl.float32)
    here = total + token.to(tl.int64) * size + column
    tl.store(here, acc.to(total.dtype.element_ty), mask=column < size)


@launched
@triton.jit(do_not_specialize=["first", "count"])
def _row_gate_up_kernel(
    h,
    x,
    weight,
    scale,
    scale_size,
    scale_stride,
    bias,
    experts,
    first,
    count,
    num_outputs,
    SIZE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the activation of gate and up for one row and one of its experts. start_next comes
    after await_previous here: so the next kernel may read the routing before this one ends."""
    k = tl.program_id(1)
    output = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    column = tl.arange(0, BLOCK_I)
    is_output = (output < num_outputs)[:, None]
    await_previous(PDL)
    start_next(PDL)
    local = tl.load(experts + k) - first
    if (local >= 0) & (local < count):
        gate_here = weight + (local.to(tl.int64) * 2 * num_outputs + output)[:, None] * SIZE
        up_here = gate_here + num_outputs * SIZE
        if SCALES != "none":
            gate_scale = scale + local.to(tl.int64) * scale_size
            up_scale = gate_scale + num_outputs
        if SCALES == "block":
            gate_scale += tl.program_id(0) * BLOCK_O // SCALE_BLOCK * scale_stride
            up_scale = gate_scale + num_outputs // SCALE_BLOCK * scale_stride
        gates = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
        ups = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
        for start in tl.static_range(0, SIZE, BLOCK_I):
            here = start + column
            inside = is_output & (here < SIZE)[None, :]
            value = tl.load(x + here, mask=here < SIZE, other=0.0).to(tl.float32)
            gate_w = tl.load(gate_here + here[None, :], mask=inside, other=0.0)
            up_w = tl.load(up_here + here[None, :], mask=inside, other=0.0)
            if SCALES == "block":
                part = here // SCALE_BLOCK
                of_gate = tl.load(gate_scale + part, mask=here < SIZE, other=0.0)
                of_up = tl.load(up_scale + part, mask=here < SIZE, other=0.0)
                gates += gate_w.to(tl.float32) * (value * of_gate)[None, :]
                ups += up_w.to(tl.float32) * (value * of_up)[None, :]
            else:
                gates += gate_w.to(tl.float32) * value[None, :]
                ups += up_w.to(tl.float32) * value[None, :]
        gate = tl.sum(gates, 1)
        up = tl.sum(ups, 1)
        if SCALES == "row":
            gate *= tl.load(gate_scale + output, mask=output < num_outputs, other=0.0)
            up *= tl.load(up_scale + output, mask=output < num_outputs, other=0.0)
        if bias is not None:
            bias_here = bias + local.to(tl.int64) * 2 * num_outputs + output
            gate += tl.load(bias_here, mask=output < num_outputs, other=0.0).to(tl.float32)
            up_bias = tl.load(bias_here + num_outputs, mask=output < num_outputs, other=0.0)
            up += up_bias.to(tl.float32)
        gate = gate.to(h.dtype.element_ty).to(tl.float32)
        up = up.to(h.dtype.element_ty).to(tl.float32)
        activated = activate_pair(gate, up, ALPHA, LIMIT)
        tl.store(
            h + k * num_outputs + output,
            activated.to(h.dtype.element_ty),
            mask=output < num_outputs,
        )


@launched
@triton.jit(do_not_specialize=["first", "count"])
def _row_down_kernel(
    y,
    h,
    weight,
    scale,
    scale_size,
    scale_stride,
    bias,
    experts,
    weights,
    first,
    count,
    num_outputs,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_I: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute outputs of one row, summed over its experts by their weights. All experts are read at
    once. Their first columns are read before await_previous, since the previous kernel has waited
    for the routing (launch.py)."""
    start_next(PDL)
    line = tl.arange(0, BLOCK_O * BLOCK_K)  # an output of an expert
    k = line % BLOCK_K
    output = tl.program_id(0) * BLOCK_O + line // BLOCK_K
    is_k = (k < TOP_K) & (output < num_outputs)
    local = tl.load(experts + k, mask=is_k, other=-1, cache_modifier=".cg") - first
    is_here = (local >= 0) & (local < count) & is_k
    index = tl.where(is_here, local, 0).to(tl.int64)
    factor = tl.load(weights + k, mask=is_here, other=0.0, cache_modifier=".cg")
    column = tl.arange(0, BLOCK_I)[None, :]
    weight_here = weight + (index * num_outputs + output)[:, None] * SIZE + column
    w = tl.load(weight_here, mask=is_here[:, None] & (column < SIZE), other=0.0)
    await_previous(PDL)
    scale_here = scale + index * scale_size
    if SCALES == "block":
        scale_here += output // SCALE_BLOCK * scale_stride
    sums = tl.zeros([BLOCK_O * BLOCK_K, BLOCK_I], tl.float32)
    for start in tl.static_range(0, SIZE, BLOCK_I):
        here = start + column
        inside = is_here[:, None] & (here < SIZE)
        if start > 0:
            w = tl.load(weight_here + start, mask=inside, other=0.0)
        value = tl.load(h + k[:, None] * SIZE + here, mask=inside, other=0.0).to(tl.float32)
        if SCALES == "block":
            part = scale_here[:, None] + here // SCALE_BLOCK
            value *= tl.load(part, mask=inside, other=0.0)
        sums += w.to(tl.float32) * value
    # Rounded before the sum, as multiply_rows does.
    product = tl.sum(sums, 1)
    if SCALES == "row":
        product *= tl.load(scale_here + output, mask=is_here, other=0.0)
    if bias is not None:
        bias_here = bias + index * num_outputs + output
        product += tl.load(bias_here, mask=is_here, other=0.0).to(tl.float32)
    product = factor * product.to(y.dtype.element_ty).to(tl.float32)
    total = tl.sum(tl.reshape(product, [BLOCK_O, BLOCK_K]), 1)
    own = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    tl.store(y + own, total.to(y.dtype.element_ty), mask=own < num_outputs)

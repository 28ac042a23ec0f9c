"""Routing of tokens to experts, and the order of their rows for grouped products.

A grouped product works on tiles of up to BLOCK_M rows of one expert. The plan of a step lists the
tiles: experts in ascending order, each expert's rows in the order of its tokens. Launches depend on
the number of tokens alone, so that CUDA graphs can capture them; unused tiles have no expert.

Rows are counted in chunks. One program places the rows of one expert in one chunk: the counts give
the tiles of the experts before it and its rows in the chunks before, running sums the place of each
row. So equal inputs give equal plans. Expert loads are added atomically: sums of integers do not
depend on their order.

Letters: N tokens, E experts, K experts of a token, T tiles, M rows of a tile.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.experts import RoutedTokens, Routing
from worker_daemon.contracts.layer_ops import NormedSum
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import (
    await_previous,
    launch_options,
    row_warps,
    start_next,
)
from worker_daemon.kernels.norm import offset_gain
from worker_daemon.kernels.row_linear import row_norm

_CHUNK_ROWS: Final = 4096
"""Rows of a chunk, 32 for each thread."""
_MIN_CHUNK_ROWS: Final = 128
_COUNTED_CHUNKS: Final = 16
"""Chunks whose counts are added at a time."""
_BLOCK_T: Final = 32
"""Tiles that a program describes at a time."""
_COMPARED: Final = 32
"""Experts that all others are compared with at a time."""


class TilePlan(NamedTuple):
    """The tiles of a step: T, M, K, and their rows."""

    entries: torch.Tensor
    """int32 [T + T + T * M]: each tile's expert, or -1; its number of rows; its rows, which are
    n * K + k for the k-th expert of token n."""
    num_tiles: int
    block_m: int
    top_k: int


def route(
    scores: torch.Tensor,
    routing: Routing,
    query_start_loc: torch.Tensor,
    loads: torch.Tensor | None = None,
    *,
    pdl: bool,
) -> RoutedTokens:
    """See ExpertOps.route: scores [N, E], rows contiguous; loads int64 [E] or None."""
    num_rows, num_experts = scores.shape
    shape = (num_rows, routing.top_k)
    experts = torch.empty(shape, dtype=torch.int32, device=scores.device)
    weights = torch.empty(shape, dtype=torch.float32, device=scores.device)
    if num_rows:
        _route_kernel[(num_rows,)](
            experts,
            weights,
            scores,
            query_start_loc,
            loads,
            query_start_loc.shape[0] - 1,
            scores.stride(0),
            **_routing_options(routing, num_experts),
            PDL=pdl,
            num_warps=4,
            **launch_options(pdl),
        )
    return RoutedTokens(experts, weights)


def route_row(
    source: NormedSum,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    routing: Routing,
    query_start_loc: torch.Tensor,
    loads: torch.Tensor | None,
    arrivals: torch.Tensor,
    *,
    pdl: bool,
) -> tuple[torch.Tensor, torch.Tensor, RoutedTokens]:
    """Return the norm and the sum of one row [1, H], and its experts: router [E, H], bias [E].
    arrivals: int32 [1], zero, also at the end; one stream at a time may use it."""
    (num_experts, hidden), device = router.shape, router.device
    x, norm = row_norm(source, pdl=pdl)
    normed, scores = torch.empty_like(x), x.new_empty(num_experts)
    experts = torch.empty(1, routing.top_k, dtype=torch.int32, device=device)
    weights = torch.empty(1, routing.top_k, dtype=torch.float32, device=device)
    block = triton.next_power_of_2(hidden)
    _route_row_kernel[(num_experts,)](
        experts,
        weights,
        normed,
        norm.total,
        scores,
        arrivals,
        x,
        norm.residual,
        norm.norm.weight,
        router,
        bias,
        query_start_loc,
        loads,
        query_start_loc.shape[0] - 1,
        norm.norm.eps,
        **_routing_options(routing, num_experts),
        WEIGHT_OFFSET=norm.norm.weight_offset,
        SIZE=hidden,
        BLOCK=block,
        PDL=pdl,
        num_warps=row_warps(block),
        enable_fp_fusion=True,
        **launch_options(pdl),
    )
    return normed, norm.total, RoutedTokens(experts, weights)


def _routing_options(routing: Routing, num_experts: int) -> dict[str, int | bool]:
    """Return the constants of the choice of experts."""
    block_e = triton.next_power_of_2(num_experts)
    return {
        "NUM_EXPERTS": num_experts,
        "TOP_K": routing.top_k,
        "RENORMALIZE": routing.renormalize,
        "ROUND": routing.rounds_weights,
        "BLOCK_E": block_e,
        "BLOCK_C": min(_COMPARED, block_e),
    }


def max_tiles(num_tokens: int, top_k: int, num_experts: int, block_m: int) -> int:
    """Return the largest number of tiles that any choice of experts can need. num_experts: those of
    this rank."""
    pairs = num_tokens * top_k
    return min(pairs, (pairs + num_experts * (block_m - 1)) // block_m)


def plan_tiles(
    experts: torch.Tensor, first: int, num_experts: int, block_m: int, *, pdl: bool
) -> TilePlan:
    """Return the tiles of the rows that go to the num_experts experts from first on: experts int32
    [N, K], N >= 1; those of other ranks, and -1, have no tiles."""
    num_tokens, top_k = experts.shape
    num_tiles = max_tiles(num_tokens, top_k, num_experts, block_m)
    block_e = max(16, triton.next_power_of_2(num_experts))
    num_rows = num_tokens * top_k
    block_r = min(_CHUNK_ROWS, max(_MIN_CHUNK_ROWS, triton.next_power_of_2(num_rows)))
    num_chunks = triton.cdiv(num_rows, block_r)
    entries = torch.empty((2 + block_m) * num_tiles, dtype=torch.int32, device=experts.device)
    counts = entries
    if num_chunks > 1:
        counts = torch.empty(num_chunks * block_e, dtype=torch.int32, device=experts.device)
        _count_kernel[(num_chunks,)](
            counts,
            experts,
            first,
            num_experts,
            num_rows,
            BLOCK_R=block_r,
            BLOCK_E=block_e,
            PDL=pdl,
            num_warps=4,
            **launch_options(pdl),
        )
    _place_kernel[(num_experts, num_chunks)](
        entries,
        counts,
        experts,
        first,
        num_experts,
        num_rows,
        num_tiles,
        num_chunks,
        SINGLE=num_chunks == 1,
        BLOCK_M=block_m,
        BLOCK_R=block_r,
        BLOCK_E=block_e,
        BLOCK_C=_COUNTED_CHUNKS,
        BLOCK_T=_BLOCK_T,
        PDL=pdl,
        num_warps=4 if num_chunks == 1 else 8,
        **launch_options(pdl),
    )
    return TilePlan(entries, num_tiles, block_m, top_k)


@launched
@triton.jit(do_not_specialize=["last"])
def _route_kernel(
    experts,
    weights,
    scores,
    query_start_loc,
    loads,
    last,
    scores_stride,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the experts of one row."""
    start_next(PDL)
    row = tl.program_id(0)
    await_previous(PDL)
    _choose(
        experts + row * TOP_K,
        weights + row * TOP_K,
        scores + row.to(tl.int64) * scores_stride,
        row < tl.load(query_start_loc + last),
        loads,
        NUM_EXPERTS,
        TOP_K,
        RENORMALIZE,
        ROUND,
        BLOCK_E,
        BLOCK_C,
    )


@launched
@triton.jit(do_not_specialize=["last", "eps"])
def _route_row_kernel(
    experts,
    weights,
    normed,
    total,
    scores,
    arrivals,
    x,
    residual,
    gain,
    router,
    bias,
    query_start_loc,
    loads,
    last,
    eps,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program norms the row, and scores one expert; the last one to finish chooses."""
    start_next(PDL)
    expert = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    w = tl.load(router + expert * SIZE + column, mask=inside, other=0.0)
    g = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    g = offset_gain(g, WEIGHT_OFFSET)
    await_previous(PDL)
    stored = column < tl.where(expert == 0, SIZE, 0)
    value = tl.load(x + column, mask=inside, other=0.0)
    if residual is not None:
        value = tl.load(residual + column, mask=inside, other=0.0).to(tl.float32) + value
        value = value.to(x.dtype.element_ty)
        tl.store(total + column, value, mask=stored)
    value = value.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value) / SIZE + eps)
    value = (value * g).to(x.dtype.element_ty)
    tl.store(normed + column, value, mask=stored)
    score = tl.sum(w.to(tl.float32) * value.to(tl.float32))
    if bias is not None:
        score += tl.load(bias + expert).to(tl.float32)
    tl.store(scores + expert, score.to(scores.dtype.element_ty))
    # The score is written before the count, and others' scores are read after it.
    tl.debug_barrier()
    before = tl.atomic_add(arrivals, 1, sem="acq_rel")
    tl.debug_barrier()
    if before == NUM_EXPERTS - 1:
        tl.store(arrivals, 0)
        _choose(
            experts,
            weights,
            scores,
            tl.load(query_start_loc + last) > 0,
            loads,
            NUM_EXPERTS,
            TOP_K,
            RENORMALIZE,
            ROUND,
            BLOCK_E,
            BLOCK_C,
        )


@triton.jit
def _choose(
    experts,
    weights,
    scores,
    is_token,
    loads,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Store the experts of a row with these scores, and their shares of the softmax. An expert's
    place is the number of those before it. loads: None, or int64 [E], to which a token is added."""
    column = tl.arange(0, BLOCK_E)
    is_expert = column < NUM_EXPERTS
    score, is_number = _load_scores(scores, column, NUM_EXPERTS)
    largest = tl.max(score, 0)
    is_finite = (tl.min(is_number.to(tl.int32), 0) > 0) & (largest > float("-inf"))
    share = tl.exp(score - tl.where(largest > float("-inf"), largest, 0.0))
    total = tl.sum(share, 0)
    share /= tl.where(total > 0.0, total, 1.0)
    num_before = tl.zeros([BLOCK_C, BLOCK_E], tl.int32)
    for start in tl.static_range(0, BLOCK_E, BLOCK_C):
        other = start + tl.arange(0, BLOCK_C)
        other_score, _ = _load_scores(scores, other, NUM_EXPERTS)
        is_before = other_score[:, None] > score[None, :]
        is_equal = other_score[:, None] == score[None, :]
        num_before += is_before | (is_equal & (other[:, None] < column[None, :]))
    place = tl.sum(num_before, 0)
    is_chosen = is_expert & (place < TOP_K)
    if RENORMALIZE:
        chosen_total = tl.sum(tl.where(is_chosen, share, 0.0), 0)
        share /= tl.where(chosen_total > 0.0, chosen_total, 1.0)
    if ROUND:
        share = share.to(scores.dtype.element_ty).to(tl.float32)
    share = tl.where(is_finite, share, float("nan"))
    tl.store(experts + place, tl.where(is_token, column, -1), mask=is_chosen)
    tl.store(weights + place, tl.where(is_token, share, 0.0), mask=is_chosen)
    if loads is not None:
        # Relaxed order: the kernel's end is the fence.
        tokens = tl.where(is_token & is_chosen, 1, 0).to(tl.int64)
        tl.atomic_add(loads + column, tokens, mask=tokens > 0, sem="relaxed")


@triton.jit
def _load_scores(scores, column, NUM_EXPERTS: tl.constexpr):
    """Return scores in float32, and True where they are numbers. A NaN or an infinite score makes
    all weights NaN; it is chosen like 0."""
    here = scores + column
    score = tl.load(here, mask=column < NUM_EXPERTS, other=float("-inf"), cache_modifier=".cg")
    score = score.to(tl.float32)
    is_number = score < float("inf")
    return tl.where(is_number, score, 0.0), is_number


@triton.jit
def _load_chunk(experts, chunk, first, num_rows, BLOCK_R: tl.constexpr):
    """Return a chunk's rows, and their experts as numbers of this rank; negative beyond the
    last."""
    row = chunk * BLOCK_R + tl.arange(0, BLOCK_R)
    return row, tl.load(experts + row, mask=row < num_rows, other=-1) - first


@triton.jit
def _count(expert, num_experts, BLOCK_E: tl.constexpr):
    """Return each expert's rows; experts of other ranks are not counted."""
    return tl.histogram(expert, BLOCK_E, mask=(expert >= 0) & (expert < num_experts))


@launched
@triton.jit(do_not_specialize=["first", "num_experts", "num_rows"])
def _count_kernel(
    counts,
    experts,
    first,
    num_experts,
    num_rows,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store each expert's rows in a chunk."""
    start_next(PDL)
    chunk = tl.program_id(0)
    await_previous(PDL)
    _, expert = _load_chunk(experts, chunk, first, num_rows, BLOCK_R)
    column = tl.arange(0, BLOCK_E)
    tl.store(counts + chunk * BLOCK_E + column, _count(expert, num_experts, BLOCK_E))


@launched
@triton.jit(do_not_specialize=["first", "num_experts", "num_rows", "num_tiles", "num_chunks"])
def _place_kernel(
    entries,
    counts,
    experts,
    first,
    num_experts,
    num_rows,
    num_tiles,
    num_chunks,
    SINGLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the places of an expert's rows in a chunk. The programs of the first chunk also store
    the expert's tiles, and a share of the unused ones."""
    start_next(PDL)
    expert = tl.program_id(0)
    chunk = tl.program_id(1)
    column = tl.arange(0, BLOCK_E)
    await_previous(PDL)
    row, chosen = _load_chunk(experts, chunk, first, num_rows, BLOCK_R)
    before = 0
    if SINGLE:
        total = _count(chosen, num_experts, BLOCK_E)
    else:
        total = tl.zeros([BLOCK_E], tl.int32)
        for start in range(0, num_chunks, BLOCK_C):
            other = (start + tl.arange(0, BLOCK_C))[:, None]
            count = tl.load(counts + other * BLOCK_E + column, mask=other < num_chunks, other=0)
            total += tl.sum(count, 0)
            before += tl.sum(tl.where((other < chunk) & (column == expert), count, 0))
    tiles = (total + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.sum(tl.where(column < expert, tiles, 0))
    is_own = (chosen == expert).to(tl.int32)
    place = first_tile * BLOCK_M + before + tl.cumsum(is_own, 0) - is_own
    tl.store(entries + 2 * num_tiles + place, row, mask=is_own > 0)
    if chunk == 0:
        own_rows = tl.sum(tl.where(column == expert, total, 0))
        for start in range(0, tl.cdiv(own_rows, BLOCK_M), BLOCK_T):
            tile = start + tl.arange(0, BLOCK_T)
            left = own_rows - tile * BLOCK_M
            here = entries + first_tile + tile
            tl.store(here, expert, mask=left > 0)
            tl.store(here + num_tiles, tl.minimum(left, BLOCK_M), mask=left > 0)
        unused = tl.sum(tiles) + expert * BLOCK_T
        for start in range(unused, num_tiles, num_experts * BLOCK_T):
            tile = start + tl.arange(0, BLOCK_T)
            tl.store(entries + tile, -1, mask=tile < num_tiles)

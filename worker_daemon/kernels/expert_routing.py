"""Routing of tokens to experts, and the order of their rows for grouped products.

In a plan, a row is a token for one of its experts: n * K + k is token n for its k-th. A grouped
product works on tiles of up to BLOCK_M rows of one expert. The plan of a step lists the tiles:
experts in ascending order, each expert's rows in the order of its tokens. Launches depend on the
number of tokens alone, so that CUDA graphs can capture them; unused tiles have no expert. Equal
inputs give equal plans. Expert loads are added atomically: sums of integers do not depend on the
order.

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

_CHUNK_ROWS: Final = 2048
"""Rows of a chunk, 16 for each thread."""
_MIN_CHUNK_ROWS: Final = 128
_COUNTED_CHUNKS: Final = 16
"""Chunks whose counts are added at a time."""
_BLOCK_T: Final = 16
"""Tiles whose expert and size a program stores at a time."""
_GROUP: Final = 4
"""Experts whose rows one program places."""
_FEW_ROWS: Final = 512
"""Up to as many tokens, each is routed by a separate program."""
_NUMBER_BITS = tl.constexpr(13)
"""Low bits of a key that hold an expert's number: there are at most 8,192 experts."""


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
    rows = 1 if num_rows <= _FEW_ROWS else 4
    if num_rows:
        _route_kernel[(triton.cdiv(num_rows, rows),)](
            experts,
            weights,
            scores,
            query_start_loc,
            loads,
            query_start_loc.shape[0] - 1,
            num_rows,
            scores.stride(0),
            **_routing_options(routing, num_experts),
            ROWS=rows,
            PDL=pdl,
            num_warps=1 if rows * num_experts <= 256 else 4,
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
    arrivals: int32 [1], a counter that is zero before and after; one stream at a time uses it."""
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
    return {
        "NUM_EXPERTS": num_experts,
        "TOP_K": routing.top_k,
        "RENORMALIZE": routing.renormalize,
        "ROUND": routing.rounds_weights,
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "BLOCK_K": triton.next_power_of_2(routing.top_k),
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
    [N, K], N >= 1; those of other ranks, and -1, have no tiles.

    Rows are divided into chunks. One kernel counts each expert's rows in each chunk. In the next, a
    program places the rows that a few experts have in one chunk: the counts give each expert's
    first tile and its rows in earlier chunks, a running sum gives a row's place in its own chunk. A
    single chunk needs the second kernel alone.
    """
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
    _place_kernel[(triton.cdiv(num_experts, _GROUP), num_chunks)](
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
        GROUP=_GROUP,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    return TilePlan(entries, num_tiles, block_m, top_k)


@launched
@triton.jit(do_not_specialize=["last", "num_rows"])
def _route_kernel(
    experts,
    weights,
    scores,
    query_start_loc,
    loads,
    last,
    num_rows,
    scores_stride,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the experts of ROWS tokens."""
    start_next(PDL)
    await_previous(PDL)
    _choose(
        experts,
        weights,
        scores,
        scores_stride,
        loads,
        tl.program_id(0) * ROWS + tl.arange(0, ROWS),
        num_rows,
        tl.load(query_start_loc + last),
        NUM_EXPERTS,
        TOP_K,
        RENORMALIZE,
        ROUND,
        BLOCK_E,
        BLOCK_K,
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
    BLOCK_K: tl.constexpr,
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
            0,
            loads,
            tl.arange(0, 1),
            1,
            tl.load(query_start_loc + last),
            NUM_EXPERTS,
            TOP_K,
            RENORMALIZE,
            ROUND,
            BLOCK_E,
            BLOCK_K,
        )


@triton.jit
def _choose(
    experts,
    weights,
    scores,
    scores_stride,
    loads,
    row,
    num_rows,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute the softmax of each row, and select the experts with the largest scores, one after
    another. loads: None, or int64 [E], to which each program adds its tokens with one atomic add
    per expert."""
    column = tl.arange(0, BLOCK_E)[None, :]
    place = tl.arange(0, BLOCK_K)[None, :]
    is_row = row < num_rows
    is_expert = column < NUM_EXPERTS
    # Other programs of this kernel may have written the scores: .cg does not read L1.
    score = tl.load(
        scores + row.to(tl.int64)[:, None] * scores_stride + column,
        mask=is_row[:, None] & is_expert,
        other=float("-inf"),
        cache_modifier=".cg",
    ).to(tl.float32)
    # A NaN or a score of +infinity is chosen as if it were 0, and makes all weights NaN.
    is_number = score < float("inf")
    score = tl.where(is_number & (score != 0.0), score, 0.0)
    largest = tl.max(score, 1)
    is_finite = (tl.min(is_number.to(tl.int32), 1) > 0) & (largest > float("-inf"))
    largest = tl.where(largest > float("-inf"), largest, 0.0)
    total = tl.sum(tl.exp(score - largest[:, None]), 1)
    total = tl.where(total > 0.0, total, 1.0)
    SHORT: tl.constexpr = scores.dtype.element_ty.primitive_bitwidth == 16
    key = _sort_keys(score, column, SHORT)
    LEAST: tl.constexpr = -(2**31) if SHORT else -(2**62)
    key = tl.where(is_expert, key, LEAST)
    chosen = tl.zeros([row.shape[0], BLOCK_K], tl.int32)
    value = tl.zeros([row.shape[0], BLOCK_K], tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.max(key, 1)
        best_score, index = _sorted_score(best, SHORT)
        chosen = tl.where(place == k, index[:, None], chosen)
        share = tl.exp(best_score - largest) / total
        value = tl.where(place == k, share[:, None], value)
        key = tl.where(key == best[:, None], LEAST, key)
    if RENORMALIZE:
        chosen_total = tl.sum(value, 1)
        value = value / tl.where(chosen_total > 0.0, chosen_total, 1.0)[:, None]
    if ROUND:
        value = value.to(scores.dtype.element_ty).to(tl.float32)
    value = tl.where(is_finite[:, None], value, float("nan"))
    is_token = (row < num_tokens)[:, None]
    target = row[:, None] * TOP_K + place
    stored = is_row[:, None] & (place < TOP_K)
    tl.store(experts + target, tl.where(is_token, chosen, -1), mask=stored)
    tl.store(weights + target, tl.where(is_token, value, 0.0), mask=stored)
    if loads is not None:
        is_chosen = (key == LEAST) & is_expert & is_token
        num_chosen = tl.sum(is_chosen.to(tl.int32), 0)
        # Relaxed order: the kernel's end is the fence.
        here = loads + tl.arange(0, BLOCK_E)
        tl.atomic_add(here, num_chosen.to(tl.int64), num_chosen > 0, sem="relaxed")


@triton.jit
def _sort_keys(score, column, SHORT: tl.constexpr):
    """Return an integer for each score. A larger score has a larger one and, among equal scores,
    the expert with the lower number; so one integer maximum, which takes few instructions, finds
    both. SHORT: scores had 16 bits, the last 13 bits of their float32 are zero, and int32 holds
    score and number; otherwise int64 does."""
    LAST: tl.constexpr = 2**_NUMBER_BITS - 1
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if SHORT:
        key = (ordered & (-1 - LAST)) | (LAST - column)
    else:
        key = (ordered.to(tl.int64) << _NUMBER_BITS) | (LAST - column)
    return key


@triton.jit
def _sorted_score(key, SHORT: tl.constexpr):
    """Return the score (float32) and the expert's number (int32) of a key of _sort_keys."""
    LAST: tl.constexpr = 2**_NUMBER_BITS - 1
    index = LAST - (key & LAST).to(tl.int32)
    if SHORT:
        bits = (key ^ ((key >> 31) & 0x7FFFFFFF)) & (-1 - LAST)
    else:
        ordered = (key >> _NUMBER_BITS).to(tl.int32)
        bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True), index


@triton.jit
def _load_chunk(experts, chunk, first, num_rows, BLOCK_R: tl.constexpr):
    """Return a chunk's rows, and their experts, counted from the first one of this rank. Beyond the
    last row, experts are negative."""
    row = chunk * BLOCK_R + tl.arange(0, BLOCK_R)
    return row, tl.load(experts + row, mask=row < num_rows, other=-1) - first


@triton.jit
def _count(expert, num_experts, BLOCK_E: tl.constexpr):
    """Return each expert's number of rows, int32 [BLOCK_E], without experts of other ranks."""
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
    """Store each expert's number of rows in a chunk."""
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
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the rows that GROUP experts have in a chunk at their places, and a share of the tiles'
    experts and sizes. One running sum counts for all experts of the group, each in 16 bits of an
    int64."""
    start_next(PDL)
    group = tl.program_id(0)
    chunk = tl.program_id(1)
    column = tl.arange(0, BLOCK_E)
    await_previous(PDL)
    row, expert = _load_chunk(experts, chunk, first, num_rows, BLOCK_R)
    before = tl.zeros([BLOCK_E], tl.int32)
    if SINGLE:
        total = _count(expert, num_experts, BLOCK_E)
    else:
        total = tl.zeros([BLOCK_E], tl.int32)
        for start in range(0, num_chunks, BLOCK_C):
            other = (start + tl.arange(0, BLOCK_C))[:, None]
            count = tl.load(counts + other * BLOCK_E + column, mask=other < num_chunks, other=0)
            total += tl.sum(count, 0)
            before += tl.sum(tl.where(other < chunk, count, 0), 0)
    tiles = (total + BLOCK_M - 1) // BLOCK_M
    tile_end = tl.cumsum(tiles, 0)
    first_tile = tile_end - tiles
    member = expert - group * GROUP
    is_own = (member >= 0) & (member < GROUP) & (expert < num_experts)
    shift = tl.where(is_own, member, 0).to(tl.int64) * 16
    one = tl.where(is_own, 1, 0).to(tl.int64) << shift
    nth = (((tl.cumsum(one, 0) - one) >> shift) & 0xFFFF).to(tl.int32)
    place = nth + tl.gather(first_tile * BLOCK_M + before, tl.where(is_own, expert, 0), 0)
    tl.store(entries + 2 * num_tiles + place, row, mask=is_own)
    program = chunk * tl.num_programs(0) + group
    for start in range(program * BLOCK_T, num_tiles, num_chunks * tl.num_programs(0) * BLOCK_T):
        tile = start + tl.arange(0, BLOCK_T)
        owner = tl.sum((tile_end[None, :] <= tile[:, None]).to(tl.int32), 1)
        known = tl.minimum(owner, BLOCK_E - 1)
        left = tl.gather(total, known, 0) - (tile - tl.gather(first_tile, known, 0)) * BLOCK_M
        stored = tile < num_tiles
        tl.store(entries + tile, tl.where(owner < BLOCK_E, owner, -1), mask=stored)
        tl.store(entries + num_tiles + tile, tl.minimum(left, BLOCK_M), mask=stored)

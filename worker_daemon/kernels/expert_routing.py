"""Routing of tokens to experts, and the order of their rows for grouped products.

A grouped product works on tiles of up to BLOCK_M rows of one expert. The plan of a step lists the
tiles: experts in ascending order, each expert's rows in the order of its tokens. Launches depend on
the number of tokens alone, so that CUDA graphs can capture them; unused tiles have no expert.

Each token chooses an expert at most once. A chunk of tokens is a matrix [tokens, experts] of zeros
and ones, whose sums over tokens are the experts' rows, and whose running sums are each row's place.
Nothing of a plan is added atomically, so equal inputs give equal plans. Expert loads are:
sums of integers do not depend on their order.

Letters: N tokens, E experts, K experts of a token, T tiles, M rows of a tile.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.experts import RoutedTokens, Routing
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import await_previous, launch_options, start_next

_CHUNK_ELEMENTS: Final = 8192
"""Elements of a chunk's matrix: a program's registers hold a few such."""
_MAX_CHUNK_ROWS: Final = 64
_COUNT_ROWS: Final = 16
"""Rows of counts to add at a time."""
_FEW_ROWS: Final = 512
"""Up to here each row is routed by a program of its own."""


class TilePlan(NamedTuple):
    """The tiles of a step: T, M, and their rows."""

    entries: torch.Tensor
    """int32 [T + T + T * M]: each tile's expert, or -1; its number of rows; its rows, which are
    n * K + k for the k-th expert of token n."""
    num_tiles: int
    block_m: int


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
            NUM_EXPERTS=num_experts,
            TOP_K=routing.top_k,
            RENORMALIZE=routing.renormalize,
            ROUND=routing.rounds_weights,
            ROWS=rows,
            BLOCK_E=triton.next_power_of_2(num_experts),
            BLOCK_K=triton.next_power_of_2(routing.top_k),
            PDL=pdl,
            num_warps=1 if rows * num_experts <= 256 else 4,
            **launch_options(pdl),
        )
    return RoutedTokens(experts, weights)


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
    rows = min(_MAX_CHUNK_ROWS, max(2, _CHUNK_ELEMENTS // block_e))
    rows = min(rows, max(2, triton.next_power_of_2(num_tokens)))
    num_chunks = triton.cdiv(num_tokens, rows)
    num_entries = (2 + block_m) * num_tiles
    entries = torch.empty(num_entries, dtype=torch.int32, device=experts.device)
    counts = entries
    if num_chunks > 1:
        counts = torch.empty(num_chunks * block_e, dtype=torch.int32, device=experts.device)
        _count_kernel[(num_chunks,)](
            counts,
            experts,
            first,
            num_experts,
            num_tokens,
            TOP_K=top_k,
            ROWS=rows,
            BLOCK_E=block_e,
            PDL=pdl,
            num_warps=8,
            **launch_options(pdl),
        )
    _place_kernel[(num_chunks,)](
        entries,
        counts,
        experts,
        first,
        num_experts,
        num_tokens,
        num_tiles,
        num_chunks,
        TOP_K=top_k,
        ROWS=rows,
        COUNT_ROWS=_COUNT_ROWS,
        SINGLE=num_chunks == 1,
        BLOCK_M=block_m,
        BLOCK_E=block_e,
        PDL=pdl,
        num_warps=8,
        **launch_options(pdl),
    )
    return TilePlan(entries, num_tiles, block_m)


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
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the softmax of each row and select its largest values, one after another. loads:
    None, or int64 [E], to which each program adds its tokens with one atomic add per expert."""
    start_next(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_E)
    place = tl.arange(0, BLOCK_K)
    is_row = row < num_rows
    is_expert = (column < NUM_EXPERTS)[None, :]
    await_previous(PDL)
    num_tokens = tl.load(query_start_loc + last)
    score = tl.load(
        scores + row.to(tl.int64)[:, None] * scores_stride + column[None, :],
        mask=is_row[:, None] & is_expert,
        other=float("-inf"),
    ).to(tl.float32)
    # A NaN or an infinite score makes all weights NaN, and takes no part in the choice.
    is_number = score < float("inf")
    score = tl.where(is_number, score, 0.0)
    largest = tl.max(score, 1)
    is_finite = (tl.min(is_number.to(tl.int32), 1) > 0) & (largest > float("-inf"))
    exponential = tl.exp(score - tl.where(largest > float("-inf"), largest, 0.0)[:, None])
    total = tl.sum(exponential, 1)
    share = exponential / tl.where(total > 0.0, total, 1.0)[:, None]
    share = tl.where(is_expert, share, -1.0)
    chosen = tl.zeros([ROWS, BLOCK_K], tl.int32)
    value = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for k in tl.static_range(TOP_K):
        most, index = tl.max(share, 1, return_indices=True, return_indices_tie_break_left=True)
        here = (place == k)[None, :]
        chosen = tl.where(here, index[:, None], chosen)
        value = tl.where(here, most[:, None], value)
        share = tl.where(column[None, :] == index[:, None], -1.0, share)
    if RENORMALIZE:
        chosen_total = tl.sum(value, 1)
        value = value / tl.where(chosen_total > 0.0, chosen_total, 1.0)[:, None]
    if ROUND:
        value = value.to(scores.dtype.element_ty).to(tl.float32)
    value = tl.where(is_finite[:, None], value, float("nan"))
    is_token = (row < num_tokens)[:, None]
    target = row[:, None] * TOP_K + place[None, :]
    stored = is_row[:, None] & (place < TOP_K)[None, :]
    tl.store(experts + target, tl.where(is_token, chosen, -1), mask=stored)
    tl.store(weights + target, tl.where(is_token, value, 0.0), mask=stored)
    if loads is not None:
        # The shares of chosen experts are -1, like those of columns that are no expert's.
        is_chosen = (share < 0.0) & is_expert & is_token
        num_chosen = tl.sum(is_chosen.to(tl.int32), 0)
        # Relaxed order: the kernel's end is the fence.
        tl.atomic_add(loads + column, num_chosen.to(tl.int64), num_chosen > 0, sem="relaxed")


@triton.jit
def _choices(
    experts,
    row,
    first,
    num_experts,
    num_tokens,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Return int32 [ROWS, BLOCK_E] twice: 1 where the token chooses the expert, and its k."""
    column = tl.arange(0, BLOCK_E)[None, :]
    hit = tl.zeros([ROWS, BLOCK_E], tl.int32)
    place = tl.zeros([ROWS, BLOCK_E], tl.int32)
    for k in tl.static_range(TOP_K):
        number = tl.load(experts + row * TOP_K + k, mask=row < num_tokens, other=-1)
        # Experts of other ranks are outside the columns, or beyond the last one of this rank.
        is_here = (number >= first) & (number < first + num_experts)
        chosen = is_here[:, None] & (column == (number - first)[:, None])
        hit = tl.where(chosen, 1, hit)
        place = tl.where(chosen, k, place)
    return hit, place


@launched
@triton.jit(do_not_specialize=["first", "num_experts", "num_tokens"])
def _count_kernel(
    counts,
    experts,
    first,
    num_experts,
    num_tokens,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store each expert's rows among a chunk of tokens."""
    start_next(PDL)
    chunk = tl.program_id(0)
    row = chunk * ROWS + tl.arange(0, ROWS)
    await_previous(PDL)
    hit, _ = _choices(experts, row, first, num_experts, num_tokens, TOP_K, ROWS, BLOCK_E)
    tl.store(counts + chunk * BLOCK_E + tl.arange(0, BLOCK_E), tl.sum(hit, 0))


@launched
@triton.jit(do_not_specialize=["first", "num_experts", "num_tokens", "num_tiles", "num_chunks"])
def _place_kernel(
    entries,
    counts,
    experts,
    first,
    num_experts,
    num_tokens,
    num_tiles,
    num_chunks,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COUNT_ROWS: tl.constexpr,
    SINGLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the places of a chunk's rows, and this program's share of the tiles."""
    start_next(PDL)
    chunk = tl.program_id(0)
    column = tl.arange(0, BLOCK_E)
    row = chunk * ROWS + tl.arange(0, ROWS)
    await_previous(PDL)
    hit, place = _choices(experts, row, first, num_experts, num_tokens, TOP_K, ROWS, BLOCK_E)
    if SINGLE:
        total = tl.sum(hit, 0)
        before = tl.zeros([BLOCK_E], tl.int32)
    else:
        total = tl.zeros([BLOCK_E], tl.int32)
        before = tl.zeros([BLOCK_E], tl.int32)
        for start in range(0, num_chunks, COUNT_ROWS):
            other = start + tl.arange(0, COUNT_ROWS)
            count = tl.load(
                counts + other[:, None] * BLOCK_E + column[None, :],
                mask=(other < num_chunks)[:, None],
                other=0,
            )
            total += tl.sum(count, 0)
            before += tl.sum(tl.where((other < chunk)[:, None], count, 0), 0)
    tiles = (total + BLOCK_M - 1) // BLOCK_M
    tile_end = tl.cumsum(tiles, 0)
    tile_start = tile_end - tiles
    position = (tile_start * BLOCK_M + before)[None, :] + tl.cumsum(hit, 0) - hit
    pair = row[:, None] * TOP_K + place
    tl.store(entries + 2 * num_tiles + position, pair, mask=hit > 0)
    for start in range(chunk * ROWS, num_tiles, num_chunks * ROWS):
        tile = start + tl.arange(0, ROWS)
        expert = tl.sum((tile_end[None, :] <= tile[:, None]).to(tl.int32), 1)
        is_own = column[None, :] == expert[:, None]
        left = (total + tile_start * BLOCK_M)[None, :] - tile[:, None] * BLOCK_M
        rows = tl.sum(tl.where(is_own, left, 0), 1)
        stored = tile < num_tiles
        tl.store(entries + tile, tl.where(expert < BLOCK_E, expert, -1), mask=stored)
        tl.store(entries + num_tiles + tile, tl.minimum(rows, BLOCK_M), mask=stored)

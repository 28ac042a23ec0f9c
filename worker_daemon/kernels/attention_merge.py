"""Merges attention over parts of the keys by log-sum-exp, in Triton: the splits of decodes, the
pieces of a schedule, and parts that were computed apart, as on several ranks.

Letters: P parts, N tokens, B sequences, Hq query heads, D head dimension.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.attention import AttentionMetadata
from worker_daemon.kernels.attention_tiles import LOG_OF_2, NO_SCORE, store_log_sum_exp
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.decode_schedule import Schedule, find_cut, load_item
from worker_daemon.kernels.launch import await_previous, launch_options, start_next
from worker_daemon.kernels.scores import LOG2_OF_E
from worker_daemon.kernels.tiles import next_power_of_two, padded_head_dim

_MOST_AT_ONCE = 64
"""Parts that a program merges at a time."""

_ELEMENTS_PER_WARP = 1024
"""Elements of the rows that a program loads at a time."""

_MOST_WARPS = 4

_ROWS_AT_ONCE, _ELEMENTS_PER_THREAD = 8, 64
"""Rows of a program that merges several queries, and elements that a thread loads at a time."""

_PARTIALS_PER_PROGRAM = 4
"""Partial results that a program looks at: few are a sequence's first, and programs that find none
cost their start."""


def merge_parts(
    outs: torch.Tensor, lses: torch.Tensor, *, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint parts of the keys; see AttentionBackend.merge.

    Args:
        outs: [P, N, Hq, D] fp32, bf16 or fp16, contiguous, P >= 1.
        lses: [P, N, Hq] fp32, contiguous; natural logarithms.
        pdl: launch as launch.has_dependent_launch allows on this device.

    Returns:
        [N, Hq, D], dtype of outs, and [N, Hq] fp32, contiguous.
    """
    num_parts, num_tokens = outs.shape[:2]
    assert num_parts > 0
    assert lses.shape == outs.shape[:3] and lses.dtype == torch.float32
    assert outs.is_contiguous() and lses.is_contiguous()
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    if lse.numel():
        chunk = min(_MOST_AT_ONCE, next_power_of_two(num_parts))
        _launch(out, lse, outs, lses, None, num_tokens, num_parts, chunk, pdl)
    return out, lse


def launch_merge_splits(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    batch: AttentionMetadata,
    queries: int,
    num_splits: int,
    pdl: bool,
) -> None:
    """Set the row of each query in out [N, Hq, D], and in lse [N, Hq] if given, to the merge of its
    splits: partial_out [N, Hq, num_splits, D] and partial_lse [N, Hq, num_splits], flat, fp32,
    in log2 units; NO_SCORE marks a split without keys. No sequence has more queries than
    `queries`."""
    starts, chunk = batch.query_start_loc, _MOST_AT_ONCE
    num_rows = batch.num_seqs * queries
    _launch(out, lse, partial_out, partial_lse, starts, num_rows, num_splits, chunk, pdl, queries)


def launch_merge_items(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    schedule: Schedule,
    queries: int,
    num_kv_heads: int,
    pdl: bool,
) -> None:
    """Set the rows of the queries in out [N, Hq, D], and in lse [N, Hq] if given, whose sequences a
    schedule has cut, to the merge of their pieces: partial_out [num_partial, queries, Hq, D] and
    partial_lse [num_partial, queries, Hq], flat, fp32, in log2 units. No sequence has more queries
    than `queries`, above 1."""
    num_q_heads, head_dim = out.shape[1:]
    group_size, block_d = num_q_heads // num_kv_heads, padded_head_dim(head_dim)
    rows = next_power_of_two(group_size)
    at_once = max(1, min(next_power_of_two(queries), _ROWS_AT_ONCE // rows))
    elements = _MOST_WARPS * 32 * _ELEMENTS_PER_THREAD
    num_programs = triton.cdiv(schedule.num_partial, _PARTIALS_PER_PROGRAM)
    _merge_items_kernel[(num_programs, num_kv_heads, triton.cdiv(queries, at_once))](
        out,
        lse,
        partial_out,
        partial_lse,
        schedule.entries,
        schedule.num_items,
        schedule.num_partial,
        *out.stride()[:2],
        NUM_Q_HEADS=num_q_heads,
        GROUP=group_size,
        PARTIALS=_PARTIALS_PER_PROGRAM,
        QUERIES=queries,
        HEAD_DIM=head_dim,
        ROWS=rows,
        AT_ONCE=at_once,
        CHUNK=max(1, elements // (rows * at_once * block_d)),
        BLOCK_D=block_d,
        PDL=pdl,
        num_warps=_MOST_WARPS,
        enable_fp_fusion=True,
        **launch_options(pdl),
    )


def _launch(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    num_rows: int,
    num_parts: int,
    chunk: int,
    pdl: bool,
    queries: int = 1,
) -> None:
    """Launch one program per (row, head). Rows are decodes, `queries` of each sequence; or
    tokens."""
    num_q_heads, head_dim = out.shape[1:]
    block_d = padded_head_dim(head_dim)
    warps = next_power_of_two(max(1, chunk * block_d // _ELEMENTS_PER_WARP))
    _merge_parts_kernel[(num_rows, num_q_heads)](
        out,
        lse,
        part_out,
        part_lse,
        query_start_loc,
        num_parts,
        *out.stride()[:2],
        NUM_Q_HEADS=num_q_heads,
        HEAD_DIM=head_dim,
        QUERIES=queries,
        CHUNK=chunk,
        BLOCK_D=block_d,
        PDL=pdl,
        num_warps=_MOST_WARPS if query_start_loc is not None else min(_MOST_WARPS, warps),
        enable_fp_fusion=True,
        **launch_options(pdl),
    )


@launched
@triton.jit(
    do_not_specialize=["num_parts"],
    do_not_specialize_on_alignment=["lse", "part_lse", "query_start_loc"],
)
def _merge_parts_kernel(
    out,
    lse,
    part_out,
    part_lse,
    query_start_loc,
    num_parts,
    out_token_stride,
    out_head_stride,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Set out[token, head] to the mean of its rows in the parts, weighted by exp of their
    log-sum-exps; and lse[token, head] to the log-sum-exp of these.

    query_start_loc: the rows are decodes, of which a row's parts lie one after another, with
    log-sum-exps in log2 units. None: the rows are tokens, and each part has all of them, with
    natural logarithms.
    """
    start_next(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    if query_start_loc is None:
        await_previous(PDL)
        token = row.to(tl.int64)
        step = tl.num_programs(0).to(tl.int64) * NUM_Q_HEADS
        exponent, unit = LOG2_OF_E, 1.0
    else:
        token = tl.load(query_start_loc + row // QUERIES) + row % QUERIES
        next_token = tl.load(query_start_loc + row // QUERIES + 1)
        await_previous(PDL)
        if next_token <= token:
            return
        token = token.to(tl.int64)
        step = 1
        exponent, unit = 1.0, LOG_OF_2
    dim = tl.arange(0, BLOCK_D)
    first = token * NUM_Q_HEADS + head
    if query_start_loc is not None:
        first *= num_parts
    acc = tl.zeros([BLOCK_D], tl.float32)
    total = 0.0
    top = NO_SCORE
    for chunk in range(0, num_parts, CHUNK):
        part = chunk + tl.arange(0, CHUNK)
        present = part < num_parts
        part *= step
        sums = tl.load(part_lse + first + part, mask=present, other=float("-inf"))
        part_ptr = part_out + ((first + part) * HEAD_DIM)[:, None] + dim[None, :]
        inside = present[:, None] & (dim < HEAD_DIM)[None, :]
        values = tl.load(part_ptr, mask=inside, other=0.0).to(tl.float32)
        new_top = tl.maximum(top, tl.max(sums, 0))
        weights = tl.exp2((sums - new_top) * exponent)
        rescale = tl.exp2((top - new_top) * exponent)
        total = total * rescale + tl.sum(weights, 0)
        acc = acc * rescale + tl.sum(values * weights[:, None], 0)
        top = new_top
    result = acc / tl.where(total == 0.0, 1.0, total)
    out_ptr = out + token * out_token_stride + head * out_head_stride + dim
    tl.store(out_ptr, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
    store_log_sum_exp(lse, token * NUM_Q_HEADS + head, top, total, True, unit)


@triton.jit
def merge_pieces(
    out,
    lse,
    place,
    partial_out,
    partial_lse,
    first,
    num_pieces,
    is_row,
    STEP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Set the rows at which out [ROWS] points, and lse + place, to the merge of their pieces, which
    other programs of the same kernel wrote: rows first [ROWS], first + STEP, .. of partial_out and
    partial_lse, as launch_merge_splits has them. CHUNK pieces are loaded at a time."""
    dim = tl.arange(0, BLOCK_D)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], NO_SCORE, tl.float32)
    for chunk in range(0, num_pieces, CHUNK):
        piece = chunk + tl.arange(0, CHUNK)
        row = first[None, :] + (piece * STEP)[:, None]
        is_here = (piece < num_pieces)[:, None] & is_row[None, :]
        inside = is_here[:, :, None] & (dim < HEAD_DIM)[None, None, :]
        sums = tl.load(partial_lse + row, mask=is_here, other=float("-inf"), cache_modifier=".cg")
        values = tl.load(
            partial_out + (row * HEAD_DIM)[:, :, None] + dim[None, None, :],
            mask=inside, other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(sums, 0))
        weights = tl.exp2(sums - new_top[None, :])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weights, 0)
        acc = acc * rescale[:, None] + tl.sum(values * weights[:, :, None], 0)
        top = new_top
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    inside = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(out[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=inside)
    store_log_sum_exp(lse, place, top, total, is_row)


@launched
@triton.jit(
    do_not_specialize=["num_items", "num_partial"],
    do_not_specialize_on_alignment=["lse", "partial_lse"],
)
def _merge_items_kernel(
    out,
    lse,
    partial_out,
    partial_lse,
    schedule,
    num_items,
    num_partial,
    out_token_stride,
    out_head_stride,
    NUM_Q_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PARTIALS: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has AT_ONCE queries and a KV head of the sequences whose pieces begin at PARTIALS
    partial results. ROWS: GROUP, padded to a power of two."""
    start_next(PDL)
    await_previous(PDL)
    first = tl.program_id(0) * PARTIALS
    row = tl.arange(0, ROWS * AT_ONCE)
    query = tl.program_id(2) * AT_ONCE + row // ROWS
    head = tl.program_id(1) * GROUP + row % ROWS
    for partial in range(first, tl.minimum(first + PARTIALS, num_partial)):
        item = find_cut(schedule, partial, NUM_Q_HEADS // GROUP)
        if item >= 0:
            token, next_token, _, _, _, num_pieces, _, _ = load_item(
                schedule, item, num_items, NUM_Q_HEADS // GROUP
            )
            tokens = (token + query).to(tl.int64)
            if tl.program_id(2) * AT_ONCE < next_token - token:
                merge_pieces(
                    out + tokens * out_token_stride + head * out_head_stride,
                    lse, tokens * NUM_Q_HEADS + head, partial_out, partial_lse,
                    (partial * QUERIES + query) * NUM_Q_HEADS + head, num_pieces,
                    (row % ROWS < GROUP) & (token + query < next_token),
                    QUERIES * NUM_Q_HEADS, HEAD_DIM, ROWS * AT_ONCE, CHUNK, BLOCK_D,
                )  # fmt: skip

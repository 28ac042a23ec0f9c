"""The most likely token of each row of logits.

A maximum is exact in any order, so a row's token depends on that row alone and not on the batch.

Letters: R rows, V vocabulary.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.layer_ops import NO_TOKEN
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import await_previous, launch_options, start_next

BLOCK = 4096
"""Logits of a row that a program reads at a time."""

MAX_SPLITS = 64
"""Parts of a row that one program merges."""

ENOUGH_PROGRAMS = 1024
"""With this many programs a launch reads as fast as memory allows; rows are not split further."""

_BEYOND = tl.constexpr(2**31 - 1)
"""Greater than any token id."""
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_INFINITY = tl.constexpr(float("inf"))


def greedy_tokens(logits: torch.Tensor, vocab_size: int, *, pdl: bool = False) -> torch.Tensor:
    """Return int64 [R]: the id below vocab_size of each row's largest logit, the lowest among
    equals.

    A row gives NO_TOKEN if one of its logits is NaN or the largest is infinite. Never waits for the
    device.

    Args:
        logits: [R, >= vocab_size], bf16, fp16 or fp32, each row contiguous; R may be 0.
        vocab_size: V, 1 .. 2^30; columns from there on are padding.
        pdl: launch as launch.has_dependent_launch allows on this device.
    """
    num_rows = logits.shape[0]
    assert 0 < vocab_size <= min(logits.shape[1], 2**30)
    assert logits.stride(1) == 1
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return tokens
    num_splits = _num_splits(num_rows, vocab_size)
    blocks = triton.cdiv(triton.cdiv(vocab_size, BLOCK), num_splits)
    is_split = num_splits > 1
    parts = torch.empty(2, num_rows, num_splits, dtype=torch.float32, device=logits.device)
    best, ids = parts[0], parts[1].view(torch.int32)
    _scan_kernel[(num_rows, num_splits)](
        tokens,
        best,
        ids,
        logits,
        vocab_size,
        logits.stride(0),
        blocks,
        SPLIT=is_split,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=8,
        **launch_options(pdl),
    )
    if is_split:
        _merge_kernel[(num_rows,)](
            tokens,
            best,
            ids,
            num_splits,
            BLOCK=MAX_SPLITS,
            PDL=pdl,
            num_warps=1,
            **launch_options(pdl),
        )
    return tokens


def _num_splits(num_rows: int, vocab_size: int) -> int:
    wanted = max(1, ENOUGH_PROGRAMS // num_rows)
    return min(wanted, MAX_SPLITS, -(-vocab_size // BLOCK))


@launched
@triton.jit(do_not_specialize=["num_blocks"])
def _scan_kernel(
    tokens,
    best,
    ids,
    logits,
    vocab_size,
    row_stride,
    num_blocks,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each lane keeps the largest value of its columns, infinity for a NaN; then the lanes
    compare."""
    start_next(PDL)
    row = tl.program_id(0)
    split = tl.program_id(1)
    first = split * num_blocks * BLOCK
    column = first + tl.arange(0, BLOCK)
    await_previous(PDL)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    where = column
    for _ in range(num_blocks):
        value = tl.load(
            logits + row.to(tl.int64) * row_stride + column,
            mask=column < vocab_size,
            other=float("-inf"),
            eviction_policy="evict_first",
        ).to(tl.float32)
        value = tl.where(value == value, value, _INFINITY)  # noqa: PLR0124  # not so for NaN
        is_larger = value > largest
        largest = tl.where(is_larger, value, largest)
        where = tl.where(is_larger, column, where)
        column += BLOCK
    top = tl.max(largest, 0)
    token = tl.min(tl.where(largest == top, where, _BEYOND), 0)
    if SPLIT:
        part = row * tl.num_programs(1) + split
        tl.store(best + part, top)
        tl.store(ids + part, token)
    else:
        tl.store(tokens + row, _chosen(token, top))


@launched
@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(tokens, best, ids, num_splits, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    row = tl.program_id(0)
    split = tl.arange(0, BLOCK)
    is_part = split < num_splits
    await_previous(PDL)
    value = tl.load(best + row * num_splits + split, mask=is_part, other=float("-inf"))
    token = tl.load(ids + row * num_splits + split, mask=is_part, other=_BEYOND)
    top = tl.max(value, 0)
    tl.store(tokens + row, _chosen(tl.min(tl.where(value == top, token, _BEYOND), 0), top))


@triton.jit
def _chosen(token, top):
    """Return the token whose logit is top, int64, or NO_TOKEN if top is not finite."""
    return tl.where(tl.abs(top) < _INFINITY, token, _NO_TOKEN).to(tl.int64)

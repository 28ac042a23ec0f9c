"""Samples tokens from rows of logits without a sort: the logits are read twice, or four times.

The result equals that of the torch path in worker_daemon/sample/sampler.py, bit for bit if both use
the device's own exp and log. Sums over the vocabulary are of integers and every other reduction is
a maximum, so a row's token depends on that row alone, however rows are batched and split.

Tokens are compared by their distance: (the row's largest logit - logit) / temperature. The
distance's float32 bits, read as an integer, are the token's key: smaller keys are more likely.

Letters: R rows, V vocabulary, S splits of a row.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from worker_daemon.contracts.layer_ops import NO_TOKEN
from worker_daemon.contracts.sampling import DraftsBefore, PenaltyTables, SamplingMetadata
from worker_daemon.kernels import penalties
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import (
    await_previous,
    has_dependent_launch,
    launch_options,
    start_next,
)
from worker_daemon.kernels.token_masks import masked

_MAX_SPLITS = tl.constexpr(64)
"""Parts of a row that one program merges."""

ENOUGH_PROGRAMS = 2048
"""With this many programs a launch fills the device twice; rows are not split further."""

MAX_LISTED = 1 << 26
"""Maximum number of listed keys, 4 bytes each; further rows are sampled in turn."""

READ_BLOCK = 4096
LIST_BLOCK = 2048
DRAW_BLOCK = 1024

_NUM_SUMS = tl.constexpr(8)
"""Number of distance limits of a row; counts and masses are summed below each. All are fixed but
the last, which covers all tokens that the row's filters can keep."""
_STEP = tl.constexpr(1.25)
"""The step between those distances: a factor of 3.5 in probability."""
_ROW_SUMS = tl.constexpr(17)
"""int64 values per row: _NUM_SUMS counts, _NUM_SUMS masses, the number of listed keys."""

_WEIGHT_ONE = tl.constexpr(2.0**40)
_WEIGHTLESS = tl.constexpr(28.0)
"""Beyond this distance a token has no weight: exp(-28) is below 2^-40."""
_NOISE_SPAN = tl.constexpr(26.0)
"""Beyond this distance no noise can make a token the largest: noise is between -2.9 and 22.9."""
_LARGEST_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
_UNIFORM_STEP = tl.constexpr(2.0**-32)
_LAST_KEY = tl.constexpr(2**31 - 1)
_INFINITY = tl.constexpr(float("inf"))
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_HEAVIEST = tl.constexpr(2**62)


class TritonSampling:
    """Triton kernels; stateless. Scratch memory comes from the caching allocator: 4 bytes per
    logit, at most MAX_LISTED logits, if a row has a top-k or top-p, otherwise a few bytes per
    row."""

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        """device is that of all tensors."""
        self._pdl = has_dependent_launch(device)

    def masked(
        self, logits: torch.Tensor, words: torch.Tensor, mask_of_row: torch.Tensor
    ) -> torch.Tensor:
        """Return [R, V], as the torch path does: see token_masks.py."""
        return masked(logits, words, mask_of_row)

    def tokens(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """Return int64 [R], the same tokens as the torch path; -1 in rows with a NaN or an infinite
        maximum. Never waits for the device.

        Args:
            logits: [R, V], bf16, fp16 or fp32, each row contiguous; R may be 0, V is below 2^23.
        """
        num_rows, vocab_size = logits.shape
        assert 0 < vocab_size < 2**23
        tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        # A multiple of 16, so that all slices have the same alignment and share one compilation.
        step = max(16, MAX_LISTED // vocab_size // 16 * 16)
        columns = _columns(metadata)
        narrows = metadata.any_top_k or metadata.any_top_p
        for start in range(0, num_rows, step):
            part = slice(start, start + step)
            _sample(
                tokens[part],
                logits[part],
                _Columns(*(c[part] for c in columns)),
                narrows,
                self._pdl,
            )
        return tokens

    def penalized(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        tables: PenaltyTables,
        drafts: DraftsBefore | None = None,
    ) -> torch.Tensor:
        """Return float32 [R, V]; see Sampling."""
        return penalties.penalized(logits, slots, tables, drafts)

    def count_tokens(
        self, slots: torch.Tensor, token_ids: torch.Tensor, tables: PenaltyTables, most: int = 1
    ) -> None:
        """See Sampling."""
        penalties.count_tokens(slots, token_ids, tables, most)


class _Columns(NamedTuple):
    """SamplingMetadata's tensors. temperature, top_p and min_p have one stride; seeds and positions
    are contiguous."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor


def _columns(rows: SamplingMetadata) -> _Columns:
    temperature, top_p, min_p = rows.temperature, rows.top_p, rows.min_p
    if not temperature.stride(0) == top_p.stride(0) == min_p.stride(0):
        temperature, top_p, min_p = (c.contiguous() for c in (temperature, top_p, min_p))
    seeds, positions = rows.seeds.contiguous(), rows.positions.contiguous()
    return _Columns(temperature, top_p, min_p, rows.top_k, seeds, positions)


class _Grid(NamedTuple):
    """The division of rows among programs."""

    num_splits: int
    num_blocks: int
    """Blocks of one split."""


def _grid(num_rows: int, vocab_size: int, block: int) -> _Grid:
    all_blocks = triton.cdiv(vocab_size, block)
    num_splits = max(1, min(_MAX_SPLITS.value, all_blocks, ENOUGH_PROGRAMS // num_rows))
    num_blocks = triton.cdiv(all_blocks, num_splits)
    return _Grid(triton.cdiv(all_blocks, num_blocks), num_blocks)


def _sample(
    tokens: torch.Tensor, logits: torch.Tensor, columns: _Columns, narrows: bool, pdl: bool
) -> None:
    """Draw among the keys up to each row's threshold.

    With a top-k or top-p, the threshold is found in three steps: sum counts and weights below a few
    fixed distances, list the keys between the two distances that enclose the threshold, and search
    that list (selection by several pivots, after Floyd and Rivest, 1975).
    """
    (num_rows, vocab_size), device = logits.shape, logits.device
    assert logits.stride(1) == 1
    native = logits.is_cuda
    read, draw = (_grid(num_rows, vocab_size, block) for block in (READ_BLOCK, DRAW_BLOCK))
    per_split = torch.empty(3, num_rows, _MAX_SPLITS.value, dtype=torch.float32, device=device)
    largest, best, ids = per_split[0], per_split[1], per_split[2].view(torch.int32)
    thresholds = torch.empty(num_rows, dtype=torch.int32, device=device)
    options = launch_options(pdl)
    source = (logits, vocab_size, logits.stride(0))
    settings = (*columns[:4], columns.temperature.stride(0), columns.top_k.stride(0))
    _largest_kernel[(num_rows, read.num_splits)](
        largest, *source, read.num_blocks, BLOCK=READ_BLOCK, PDL=pdl, num_warps=8, **options
    )
    parts = (largest, read.num_splits)
    if narrows:
        sums = torch.zeros(num_rows, _ROW_SUMS.value, dtype=torch.int64, device=device)
        listed = torch.empty(num_rows, vocab_size, dtype=torch.int32, device=device)
        for kernel in (_spread_kernel, _collect_kernel):
            kernel[(num_rows, read.num_splits)](
                sums,
                listed,
                *source,
                *parts,
                *settings,
                read.num_blocks,
                BLOCK=READ_BLOCK,
                NATIVE=native,
                PDL=pdl,
                num_warps=8,
                **options,
            )
        _select_kernel[(num_rows,)](
            thresholds,
            sums,
            listed,
            vocab_size,
            *settings,
            BLOCK=LIST_BLOCK,
            NATIVE=native,
            PDL=pdl,
            num_warps=8,
            **options,
        )
    _draw_kernel[(num_rows, draw.num_splits)](
        best,
        ids,
        thresholds,
        int(narrows),
        *source,
        *parts,
        *settings,
        columns.seeds,
        columns.positions,
        draw.num_blocks,
        BLOCK=DRAW_BLOCK,
        NATIVE=native,
        PDL=pdl,
        num_warps=4,
        **options,
    )
    _merge_kernel[(num_rows,)](tokens, best, ids, draw.num_splits, PDL=pdl, num_warps=1, **options)


@launched
@triton.jit(do_not_specialize=["num_blocks"])
def _largest_kernel(
    largest, logits, vocab_size, row_stride, num_blocks, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Write largest [R, S]: the largest logit of each split; infinity if one is NaN."""
    start_next(PDL)
    row = tl.program_id(0)
    split = tl.program_id(1)
    column = split * num_blocks * BLOCK + tl.arange(0, BLOCK)
    await_previous(PDL)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for _ in range(num_blocks):
        value = _load_logits(logits, row, row_stride, column, vocab_size)
        value = tl.where(value == value, value, _INFINITY)  # noqa: PLR0124  # not so for NaN
        top = tl.where(value > top, value, top)
        column += BLOCK
    tl.store(largest + row * _MAX_SPLITS + split, tl.max(top, 0))


@launched
@triton.jit(do_not_specialize=["num_splits", "float_stride", "top_k_stride", "num_blocks"])
def _spread_kernel(
    sums,
    listed,
    logits,
    vocab_size,
    row_stride,
    largest,
    num_splits,
    temperatures,
    top_ps,
    min_ps,
    top_ks,
    float_stride,
    top_k_stride,
    num_blocks,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """For rows with a top-k or top-p, add to sums the number and the weight of the tokens below
    each fixed distance, and of all within reach."""
    start_next(PDL)
    row = tl.program_id(0)
    column = tl.program_id(1) * num_blocks * BLOCK + tl.arange(0, BLOCK)
    await_previous(PDL)
    temperature = tl.load(temperatures + row * float_stride)
    top_p = tl.load(top_ps + row * float_stride)
    top_k = tl.load(top_ks + row * top_k_stride)
    if _is_narrowed(temperature, top_k, top_p):
        top = _row_largest(largest, row, num_splits)
        reach = _reach(tl.load(min_ps + row * float_stride))
        counts = sums + row * _ROW_SUMS
        masses = counts + _NUM_SUMS
        for _ in range(num_blocks):
            logit = _load_logits(logits, row, row_stride, column, vocab_size)
            distance = _distance(logit, top, temperature)
            distance = tl.where(_key(distance) <= reach, distance, _INFINITY)
            nearest = tl.min(distance, 0)
            if nearest <= _WEIGHTLESS:
                if top_k > 0:
                    if nearest < _STEP * (_NUM_SUMS - 1):
                        for i in tl.static_range(_NUM_SUMS - 1):
                            near = (distance < (i + 1) * _STEP).to(tl.int32)
                            _add(counts + i, tl.sum(near, 0).to(tl.int64))
                    within = (distance < _INFINITY).to(tl.int32)
                    _add(counts + _NUM_SUMS - 1, tl.sum(within, 0).to(tl.int64))
                if top_p < 1:
                    weight = _weight(distance, NATIVE)
                    if nearest < _STEP * (_NUM_SUMS - 1):
                        for i in tl.static_range(_NUM_SUMS - 1):
                            part = tl.where(distance < (i + 1) * _STEP, weight, 0)
                            _add(masses + i, tl.sum(part, 0))
                    _add(masses + _NUM_SUMS - 1, tl.sum(weight, 0))
            column += BLOCK


@launched
@triton.jit(do_not_specialize=["num_splits", "float_stride", "top_k_stride", "num_blocks"])
def _collect_kernel(
    sums,
    listed,
    logits,
    vocab_size,
    row_stride,
    largest,
    num_splits,
    temperatures,
    top_ps,
    min_ps,
    top_ks,
    float_stride,
    top_k_stride,
    num_blocks,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write listed [R, V]: the keys between the distances that enclose the row's threshold, in any
    order, and their number."""
    start_next(PDL)
    row = tl.program_id(0)
    column = tl.program_id(1) * num_blocks * BLOCK + tl.arange(0, BLOCK)
    await_previous(PDL)
    temperature = tl.load(temperatures + row * float_stride)
    top_p = tl.load(top_ps + row * float_stride)
    top_k = tl.load(top_ks + row * top_k_stride)
    if _is_narrowed(temperature, top_k, top_p):
        top = _row_largest(largest, row, num_splits)
        reach = _reach(tl.load(min_ps + row * float_stride))
        row_sums = sums + row * _ROW_SUMS
        _, _, _, _, first, end, _, _ = _enclose(row_sums, reach, top_k, top_p)
        row_list = listed + row.to(tl.int64) * vocab_size
        for _ in range(num_blocks):
            logit = _load_logits(logits, row, row_stride, column, vocab_size)
            key = _key(_distance(logit, top, temperature))
            inside = ((key >= first) & (key < end)).to(tl.int32)
            count = tl.sum(inside, 0)
            if count > 0:
                start = _add(row_sums + 2 * _NUM_SUMS, count.to(tl.int64))
                place = start + tl.cumsum(inside, 0) - 1
                tl.store(row_list + place, key, mask=inside > 0)
            column += BLOCK


@launched
@triton.jit(do_not_specialize=["float_stride", "top_k_stride"])
def _select_kernel(
    thresholds,
    sums,
    listed,
    vocab_size,
    temperatures,
    top_ps,
    min_ps,
    top_ks,
    float_stride,
    top_k_stride,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write thresholds [R]: the last key that a row's min-p, top-k and top-p keep.

    For top-k it is the last key below which there are fewer than k tokens. For top-p it is the last
    key below which there is less than top_p of the mass that top-k kept. Both searches keep a first
    key for which this holds and an end for which it does not, and test three keys between them.
    """
    start_next(PDL)
    row = tl.program_id(0)
    await_previous(PDL)
    temperature = tl.load(temperatures + row * float_stride)
    top_p = tl.load(top_ps + row * float_stride)
    top_k = tl.load(top_ks + row * top_k_stride)
    if _is_narrowed(temperature, top_k, top_p):
        reach = _reach(tl.load(min_ps + row * float_stride))
        row_sums = sums + row * _ROW_SUMS
        last, last_end, mass_first, mass_end, _, _, below, mass = _enclose(
            row_sums, reach, top_k, top_p
        )
        num_listed = tl.load(row_sums + 2 * _NUM_SUMS).to(tl.int32)
        row_list = listed + row.to(tl.int64) * vocab_size

        last = _last_in_count(row_list, num_listed, below, top_k, last, last_end, BLOCK)
        if top_p < 1:
            # If the threshold is the reach, top-k drops nothing and keeps all the mass.
            left = tl.load(row_sums + 2 * _NUM_SUMS - 1)
            if last < reach:
                left = mass + _mass_through(row_list, num_listed, last, BLOCK, NATIVE)
            limit = left.to(tl.float64) * top_p.to(tl.float64)
            last = _last_in_mass(
                row_list, num_listed, mass, limit, mass_first, mass_end, BLOCK, NATIVE
            )
        tl.store(thresholds + row, last)


@launched
@triton.jit(
    do_not_specialize=["narrows", "num_splits", "float_stride", "top_k_stride", "num_blocks"]
)
def _draw_kernel(
    best,
    ids,
    thresholds,
    narrows,
    logits,
    vocab_size,
    row_stride,
    largest,
    num_splits,
    temperatures,
    top_ps,
    min_ps,
    top_ks,
    float_stride,
    top_k_stride,
    seeds,
    positions,
    num_blocks,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write best and ids [R, S]: the largest noise - distance of each split among the kept tokens,
    and the first token that has it. A greedy row keeps distance 0 and has no noise. A row whose
    largest logit is infinite has _NO_TOKEN in every split."""
    start_next(PDL)
    row = tl.program_id(0)
    split = tl.program_id(1)
    column = split * num_blocks * BLOCK + tl.arange(0, BLOCK)
    await_previous(PDL)
    temperature = tl.load(temperatures + row * float_stride)
    top_p = tl.load(top_ps + row * float_stride)
    top_k = tl.load(top_ks + row * top_k_stride)
    is_random = temperature > 0
    threshold = tl.minimum(_reach(tl.load(min_ps + row * float_stride)), _float_key(_NOISE_SPAN))
    has_threshold = (narrows != 0) & _is_narrowed(temperature, top_k, top_p)
    threshold = tl.minimum(
        threshold, tl.load(thresholds + row, mask=has_threshold, other=_LAST_KEY)
    )
    threshold = tl.where(is_random, threshold, 0)
    divisor = tl.where(is_random, temperature, 1.0)
    seed = tl.load(seeds + row)
    position = tl.load(positions + row).to(tl.int32)
    largest_logit = _row_largest(largest, row, num_splits)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    where = column
    for _ in range(num_blocks):
        logit = _load_logits(logits, row, row_stride, column, vocab_size)
        distance = _distance(logit, largest_logit, divisor)
        is_kept = _key(distance) <= threshold
        if tl.max(is_kept.to(tl.int32), 0) > 0:
            first = tl.min(column, 0)
            noise = tl.where(is_random, _gumbel_noise(seed, position, first, BLOCK, NATIVE), 0.0)
            score = tl.where(is_kept, noise - distance, float("-inf"))
            is_larger = score > top
            top = tl.where(is_larger, score, top)
            where = tl.where(is_larger, column, where)
        column += BLOCK
    score = tl.max(top, 0)
    token = tl.min(tl.where(top == score, where, _LAST_KEY), 0)
    is_number = largest_logit < _INFINITY
    part = row * _MAX_SPLITS + split
    tl.store(best + part, tl.where(is_number, score, _INFINITY))
    tl.store(ids + part, tl.where(is_number, token, _NO_TOKEN))


@launched
@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(tokens, best, ids, num_splits, PDL: tl.constexpr):
    start_next(PDL)
    row = tl.program_id(0)
    split = tl.arange(0, _MAX_SPLITS)
    is_part = split < num_splits
    await_previous(PDL)
    score = tl.load(best + row * _MAX_SPLITS + split, mask=is_part, other=float("-inf"))
    token = tl.load(ids + row * _MAX_SPLITS + split, mask=is_part, other=_LAST_KEY)
    top = tl.max(score, 0)
    tl.store(tokens + row, tl.min(tl.where(score == top, token, _LAST_KEY), 0).to(tl.int64))


@triton.jit
def _last_in_count(row_list, num_listed, below, top_k, last, end, BLOCK: tl.constexpr):
    """Return the last key of [last, end) below which there are fewer than top_k tokens, `below` of
    them before the list."""
    lane = tl.arange(0, BLOCK)
    while end - last > 1:
        q1, q2, q3 = _between(last, end)
        less1 = tl.zeros([BLOCK], tl.int32)
        less2 = tl.zeros([BLOCK], tl.int32)
        less3 = tl.zeros([BLOCK], tl.int32)
        for start in range(0, num_listed, BLOCK):
            key = _load_keys(row_list, start + lane, num_listed)
            less1 += (key < q1).to(tl.int32)
            less2 += (key < q2).to(tl.int32)
            less3 += (key < q3).to(tl.int32)
        fits1 = below + tl.sum(less1, 0) < top_k
        fits2 = below + tl.sum(less2, 0) < top_k
        fits3 = below + tl.sum(less3, 0) < top_k
        last, end = _narrow(last, end, q1, q2, q3, fits1, fits2, fits3)
    return last


@triton.jit
def _mass_through(row_list, num_listed, last, BLOCK: tl.constexpr, NATIVE: tl.constexpr):
    """Return the weight of the listed keys up to last."""
    lane = tl.arange(0, BLOCK)
    part = tl.zeros([BLOCK], tl.int64)
    for start in range(0, num_listed, BLOCK):
        key = _load_keys(row_list, start + lane, num_listed)
        part += tl.where(key <= last, _key_weight(key, NATIVE), 0)
    return tl.sum(part, 0)


@triton.jit
def _last_in_mass(
    row_list, num_listed, mass, limit, last, end, BLOCK: tl.constexpr, NATIVE: tl.constexpr
):
    """Return the last key of [last, end) below which there is less than limit, `mass` of it before
    the list. Overwrites the list."""
    lane = tl.arange(0, BLOCK)
    while end - last > 1:
        q1, q2, q3 = _between(last, end)
        part1 = tl.zeros([BLOCK], tl.int64)
        part2 = tl.zeros([BLOCK], tl.int64)
        part3 = tl.zeros([BLOCK], tl.int64)
        for start in range(0, num_listed, BLOCK):
            key = _load_keys(row_list, start + lane, num_listed)
            weight = _key_weight(key, NATIVE)
            part1 += tl.where(key < q1, weight, 0)
            part2 += tl.where(key < q2, weight, 0)
            part3 += tl.where(key < q3, weight, 0)
        mass1 = mass + tl.sum(part1, 0)
        mass2 = mass + tl.sum(part2, 0)
        mass3 = mass + tl.sum(part3, 0)
        fits1 = mass1.to(tl.float64) < limit
        fits2 = mass2.to(tl.float64) < limit
        fits3 = mass3.to(tl.float64) < limit
        last, end = _narrow(last, end, q1, q2, q3, fits1, fits2, fits3)
        if num_listed > BLOCK:
            # Each round reads a shorter list: the keys between last and end.
            mass = tl.where(fits1, mass1, mass)
            mass = tl.where(fits2, mass2, mass)
            mass = tl.where(fits3, mass3, mass)
            num_listed = _keep(row_list, num_listed, last, end, BLOCK)
    return last


@triton.jit
def _keep(row_list, num_listed, first, end, BLOCK: tl.constexpr):
    """Move the keys of [first, end) to the front of the list and return their number."""
    lane = tl.arange(0, BLOCK)
    num_kept = 0
    for start in range(0, num_listed, BLOCK):
        key = _load_keys(row_list, start + lane, num_listed)
        inside = ((key >= first) & (key < end)).to(tl.int32)
        place = num_kept + tl.cumsum(inside, 0) - 1
        tl.debug_barrier()  # wait until all threads have read the block that is written next
        tl.store(row_list + place, key, mask=inside > 0)
        num_kept += tl.sum(inside, 0)
    tl.debug_barrier()
    return num_kept


@triton.jit
def _add(sum, value):
    """Add atomically and return the previous sum. Relaxed order: the kernel's end is the fence."""
    return tl.atomic_add(sum, value, sem="relaxed")


@triton.jit
def _load_logits(logits, row, row_stride, column, vocab_size):
    """Return float32 [BLOCK]; -inf beyond the vocabulary."""
    start = logits + row.to(tl.int64) * row_stride
    return tl.load(start + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _row_largest(largest, row, num_splits):
    """Return the row's largest logit, or infinity if no token can be chosen. Then every distance is
    infinite, except those of infinite logits."""
    split = tl.arange(0, _MAX_SPLITS)
    parts = tl.load(
        largest + row * _MAX_SPLITS + split, mask=split < num_splits, other=float("-inf")
    )
    top = tl.max(parts, 0)
    return tl.where(top > float("-inf"), top, _INFINITY)


@triton.jit
def _is_narrowed(temperature, top_k, top_p):
    """Return True if a row needs a threshold that is not known in advance."""
    return (temperature > 0) & ((top_k > 0) | (top_p < 1))


@triton.jit
def _distance(logit, largest, temperature):
    """Return minus the scaled logit, rounded like it; infinite for NaN."""
    distance = tl.div_rn(largest - logit, temperature)
    distance = tl.where(logit == largest, 0.0, distance)
    return tl.where(distance >= 0, distance, _INFINITY)


@triton.jit
def _key(distance):
    """Return int32 keys in the order of the distances, which are not negative."""
    return distance.to(tl.int32, bitcast=True)


@triton.jit
def _float_key(distance):
    return _key(tl.full([], distance, tl.float32))


@triton.jit
def _reach(min_p):
    """Return the last key that is within min-p and has weight: at distance -log(min_p), computed in
    float64 and rounded to float32."""
    behind = 0.0 - tl.log(tl.where(min_p > 0, min_p, 1.0).to(tl.float64)).to(tl.float32)
    bound = tl.where(min_p > 0, behind, _WEIGHTLESS)
    return tl.minimum(_key(bound), _float_key(_WEIGHTLESS))


@triton.jit
def _weight(distance, NATIVE: tl.constexpr):
    """Return int64 fixed point, 2^40 for the most likely token."""
    exponential = libdevice.exp(-distance) if NATIVE else tl.exp(-distance)
    return (exponential * _WEIGHT_ONE).to(tl.int64)


@triton.jit
def _key_weight(key, NATIVE: tl.constexpr):
    """Return _weight of _load_keys' keys; 0 beyond the end of a list."""
    distance = key.to(tl.float32, bitcast=True)
    return _weight(tl.where(distance <= _WEIGHTLESS, distance, _INFINITY), NATIVE)


@triton.jit
def _load_keys(row_list, index, num_listed):
    return tl.load(row_list + index, mask=index < num_listed, other=_LAST_KEY)


@triton.jit
def _enclose(row_sums, reach, top_k, top_p):
    """Return the bounds that the sums give for a row's thresholds.

    Returns:
        The first key and the end between which top-k's threshold lies, or reach and its successor
        if it drops nothing; the same of top-p, whose end may lie behind top-k's threshold; the
        first key and the end of those to list; the number and the weight of the tokens before that
        first key.
    """
    index = tl.arange(0, _NUM_SUMS)
    everything = reach + 1
    edge = tl.where(index < _NUM_SUMS - 1, _key((index + 1).to(tl.float32) * _STEP), everything)
    count = tl.load(row_sums + index)
    mass = tl.load(row_sums + _NUM_SUMS + index)
    total = tl.max(mass, 0)

    drops = (top_k > 0) & (tl.max(count, 0) >= top_k)
    few = count < top_k
    k_first = tl.where(drops, tl.max(tl.where(few, edge, 0), 0), reach)
    k_end = tl.where(drops, tl.min(tl.where(few, _LAST_KEY, edge), 0), everything)
    least = tl.where(drops, tl.max(tl.where(edge <= k_first, mass, 0), 0), total)
    most = tl.where(drops, tl.min(tl.where(edge >= k_end, mass, _HEAVIEST), 0), total)

    is_little = mass.to(tl.float64) < least.to(tl.float64) * top_p.to(tl.float64)
    is_much = mass.to(tl.float64) >= most.to(tl.float64) * top_p.to(tl.float64)
    p_first = tl.max(tl.where(is_little, edge, 0), 0)
    p_end = tl.min(tl.where(is_much, edge, everything), 0)

    has_top_p = top_p < 1
    first = tl.where(has_top_p, p_first, k_first)
    end = tl.where(drops, k_end, tl.where(has_top_p, p_end, first))
    is_before = edge <= first
    below = tl.max(tl.where(is_before, count, 0), 0)
    before = tl.max(tl.where(is_before, mass, 0), 0)
    return k_first, k_end, p_first, p_end, first, end, below, before


@triton.jit
def _between(first, end):
    """Return three keys that quarter [first, end), which is longer than 1; the second is inside."""
    half = (end - first) // 2
    quarter = half // 2
    return first + quarter, first + half, first + half + quarter


@triton.jit
def _narrow(first, end, q1, q2, q3, fits1, fits2, fits3):
    """Return the quarter between the last key that fits and the next; once fits is false it stays
    false."""
    new_first = tl.where(fits3, q3, tl.where(fits2, q2, tl.where(fits1, q1, first)))
    new_end = tl.where(fits3, end, tl.where(fits2, q3, tl.where(fits1, q2, q1)))
    return new_first, new_end


@triton.jit
def _gumbel_noise(seed, position, first, BLOCK: tl.constexpr, NATIVE: tl.constexpr):
    """Return the noise of sample/noise.py, float32 [BLOCK], for the tokens from first on, a
    multiple of 4."""
    group = first // 4 + tl.arange(0, BLOCK // 4)
    zero = tl.zeros([BLOCK // 4], tl.int32)
    a, b, c, d = tl.philox(seed, group, zero + position, zero, zero)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK])
    uniform = (words.to(tl.float32) + 0.5) * _UNIFORM_STEP
    uniform = tl.minimum(uniform, _LARGEST_BELOW_ONE)
    if NATIVE:
        noise = -libdevice.log(-libdevice.log1p(-uniform))
    else:
        # The interpreter has neither: log1p in float64 by Kahan's correction of 1 - uniform.
        exact = uniform.to(tl.float64)
        rest = 1.0 - exact
        exponential = (tl.log(rest) * exact / (rest - 1.0)).to(tl.float32)
        noise = -tl.log(exponential.to(tl.float64)).to(tl.float32)
    return noise

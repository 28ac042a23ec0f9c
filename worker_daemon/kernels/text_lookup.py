"""Keeps the request rows' texts on the device, and finds the last place of each that is most like
its end. The results equal those of worker_daemon/drafting/torch_text.py, bit for bit.

A search reads each token of a text once from memory, and again from L1 only where the previous one
was equal: 131,072 tokens are 0.5 MB, 0.2 us of an H100's memory, so that the time of one row is
that of two launches; 256 rows of them, 134 MB, take 40 us. Programs share a text block by block,
keep the best place by an atomic maximum, and the last of them to arrive writes the drafts.

Letters: S request rows, W tokens of a text, Q sequences that sampled, K drafts of each.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.drafting import KeptTable, Matching, TextTable
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.suffix_lookup import keep_tokens, vote
from worker_daemon.kernels.text_search import matched_before

BLOCK = 2048
"""Tokens of a text that a program compares at a time."""

ENOUGH_PROGRAMS = 2048
"""With this many programs a launch reads as fast as memory allows; texts are not split further."""

_COPY_BLOCK = 1024
_GAIN_BLOCK = 32
_PLACE_BITS = tl.constexpr(32)
"""Lower bits of a score, which hold the place; the length of its match is above them."""


class TritonTextKernels:
    """One launch per method; stateless. TextKernels (contracts/drafting.py) defines shapes and
    meaning."""

    def place(
        self, table: TextTable, rows: torch.Tensor, bounds: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Replace the texts of rows int32 [B] by tokens int32, cut at bounds int32 [B + 1]."""
        num_blocks = triton.cdiv(table.tokens.shape[1], _COPY_BLOCK)
        num_parts = min(num_blocks, max(1, ENOUGH_PROGRAMS // rows.shape[0]))
        _place_kernel[(rows.shape[0], num_parts)](
            table.tokens,
            table.lengths,
            rows,
            bounds,
            tokens,
            table.tokens.stride(0),
            BLOCK=_COPY_BLOCK,
        )

    def append(
        self,
        table: TextTable,
        rows: torch.Tensor,
        token_ids: torch.Tensor,
        counts: torch.Tensor,
        lengths: torch.Tensor,
    ) -> None:
        """Append the first counts int32 [Q] of token_ids int64 [Q, 1 + K] to rows int32 [Q], which
        have lengths int32 [Q] then."""
        num_seqs, num_columns = token_ids.shape
        if not num_seqs:
            return
        assert token_ids.stride(1) == 1
        _append_kernel[(triton.cdiv(num_seqs, _GAIN_BLOCK),)](
            table.tokens,
            table.lengths,
            rows,
            token_ids,
            counts,
            lengths,
            num_seqs,
            num_columns,
            table.tokens.shape[1],
            table.tokens.stride(0),
            token_ids.stride(0),
            BLOCK=_GAIN_BLOCK,
            COLUMNS=triton.next_power_of_2(num_columns),
        )

    def continue_texts(
        self, table: TextTable, rows: torch.Tensor, matching: Matching
    ) -> torch.Tensor:
        """Return int64 [Q, K] for rows int32 [Q]."""
        num_seqs, num_drafts = rows.shape[0], matching.num_drafts
        drafts = torch.empty((num_seqs, num_drafts), dtype=torch.int64, device=rows.device)
        if not num_seqs:
            return drafts
        num_blocks = triton.cdiv(table.tokens.shape[1], BLOCK)
        num_splits = min(num_blocks, max(1, ENOUGH_PROGRAMS // num_seqs))
        best, arrivals = table.scratch
        _continue_kernel[(num_seqs, num_splits)](
            drafts,
            best,
            arrivals,
            table.tokens,
            table.lengths,
            rows,
            table.tokens.stride(0),
            num_drafts,
            matching.longest,
            matching.shortest,
            BLOCK=BLOCK,
            DRAFTS=triton.next_power_of_2(num_drafts),
        )
        return drafts

    def keep(
        self,
        table: TextTable,
        kept: KeptTable,
        rows: torch.Tensor,
        ends: torch.Tensor | None = None,
    ) -> None:
        """Keep the texts of rows int32 [Q] up to ends int32 [Q]."""
        keep_tokens(table, kept, rows, ends)

    def vote(
        self, table: TextTable, kept: KeptTable, rows: torch.Tensor, matching: Matching
    ) -> torch.Tensor:
        """Return int64 [Q, K] for rows int32 [Q]."""
        return vote(table, kept, rows, matching)


@launched
@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["rows", "bounds", "given"],
)
def _place_kernel(tokens, lengths, rows, bounds, given, width, BLOCK: tl.constexpr):
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    first = tl.load(bounds + tl.program_id(0))
    length = tl.load(bounds + tl.program_id(0) + 1) - first
    part = tl.program_id(1)
    for start in range(part * BLOCK, length, tl.num_programs(1) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < length
        token = tl.load(given + first + place, mask=inside, other=0)
        tl.store(tokens + row * width + place, token, mask=inside)
    if part == 0:
        tl.store(lengths + row, length)


@launched
@triton.jit(
    do_not_specialize=["num_seqs", "num_columns", "width", "stride", "gain_stride"],
    do_not_specialize_on_alignment=["rows", "token_ids", "counts", "new_lengths"],
)
def _append_kernel(
    tokens,
    lengths,
    rows,
    token_ids,
    counts,
    new_lengths,
    num_seqs,
    num_columns,
    width,
    stride,
    gain_stride,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = seq < num_seqs
    row = tl.load(rows + seq, mask=inside, other=0).to(tl.int64)
    gained = tl.load(counts + seq, mask=inside, other=0)
    length = tl.load(new_lengths + seq, mask=inside, other=0) - gained
    length = tl.minimum(length, width)
    gain = token_ids + seq.to(tl.int64) * gain_stride
    has_failed = tl.load(gain, mask=inside, other=-1) < 0
    gained = tl.minimum(tl.where(has_failed, 0, gained), width - length)
    column = tl.arange(0, COLUMNS)[None, :]
    is_gained = inside[:, None] & (column < gained[:, None]) & (column < num_columns)
    token = tl.load(gain[:, None] + column, mask=is_gained, other=0).to(tl.int32)
    target = tokens + (row * stride + length)[:, None] + column
    tl.store(target, token, mask=is_gained)
    tl.store(lengths + row, length + gained, mask=inside)


@launched
@triton.jit(
    do_not_specialize=["stride", "num_drafts", "longest", "shortest"],
    do_not_specialize_on_alignment=["arrivals", "rows"],
)
def _continue_kernel(
    drafts,
    best,
    arrivals,
    tokens,
    lengths,
    rows,
    stride,
    num_drafts,
    longest,
    shortest,
    BLOCK: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    """`best` and `arrivals` [S + 1] are zeros before and after. A score of 0 is no match. Rows
    without a text, which several sequences may name, use neither."""
    seq = tl.program_id(0)
    num_splits = tl.num_programs(1)
    row = tl.load(rows + seq).to(tl.int64)
    length = tl.load(lengths + row)
    text = tokens + row * stride
    ahead = tl.arange(0, DRAFTS)
    inside = ahead < num_drafts
    out = drafts + seq.to(tl.int64) * num_drafts + ahead
    if length == 0:
        tl.store(out, tl.zeros([DRAFTS], tl.int64), mask=inside)
        return
    top = tl.zeros([BLOCK], tl.int64)
    for start in range(tl.program_id(1) * BLOCK, length, num_splits * BLOCK):
        place = start + tl.arange(0, BLOCK)
        matched = matched_before(text, place, text, length, longest)
        score = (matched.to(tl.int64) << _PLACE_BITS) | place
        top = tl.maximum(top, tl.where(matched >= shortest, score, 0))
    tl.atomic_max(best + row, tl.max(top, 0))
    if tl.atomic_add(arrivals + row, 1) == num_splits - 1:
        found = tl.atomic_xchg(best + row, 0)
        tl.store(arrivals + row, 0)
        end = (found & 0xFFFFFFFF).to(tl.int32)
        period = tl.maximum(length - end, 1)
        draft = tl.load(text + end + ahead % period, mask=inside, other=0).to(tl.int64)
        tl.store(out, tl.where(found > 0, draft, 0), mask=inside)

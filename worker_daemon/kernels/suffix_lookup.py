"""Keeps the output of requests on the device, and lets the places like a text's end vote on drafts.
The results equal those of worker_daemon/drafting/torch_votes.py, bit for bit.

A search compares the kept tokens with each row's last two, and goes on only in blocks that have
them. The default 262,144 kept tokens are 1 MB, which stays in L2: 64 rows read 64 MB from there,
12 us of an H100's 5.5 TB/s. An index would save some of that, and would have to be kept.

Letters: S request rows, P pages, Q sequences that sampled, K drafts of each, C places that vote.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.drafting import (
    MAX_VOTES,
    PAGE_TOKENS,
    KeptTable,
    Matching,
    TextTable,
)
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.text_search import matched_before

BLOCK = 1024
"""Tokens that a program compares at a time."""

ENOUGH_PROGRAMS = 1024
"""Programs that search texts, and as many kept tokens: more would not read faster."""

MAX_SPLITS = 64
"""Programs of one row that search its text, and as many kept tokens: one program merges what they
find."""

_KEEP_BLOCK = 64
_MERGE_BLOCK = 2048
_PLACE_BITS = tl.constexpr(40)
"""Lower bits of a score, which hold the place. Above them are a bit for places in the row's text,
and the length of the match."""
_PLACE_MASK = tl.constexpr(2**40 - 1)


def keep_tokens(
    table: TextTable, kept: KeptTable, rows: torch.Tensor, ends: torch.Tensor | None
) -> None:
    """See TextKernels.keep. One program, since pages are numbered in the order of rows."""
    num_seqs = rows.shape[0]
    if num_seqs:
        _keep_kernel[(1,)](
            kept.tokens,
            kept.owners,
            kept.before,
            kept.after,
            kept.clock,
            kept.writing,
            kept.filled,
            kept.ends,
            kept.requests,
            table.tokens,
            rows,
            table.lengths if ends is None else ends,
            num_seqs,
            table.tokens.stride(0),
            kept.tokens.shape[0],
            ENDS_BY_ROW=ends is None,
            BLOCK=_KEEP_BLOCK,
            PAGE=PAGE_TOKENS,
        )


def vote(table: TextTable, kept: KeptTable, rows: torch.Tensor, matching: Matching) -> torch.Tensor:
    """See TextKernels.vote. Programs share a row's text, others the kept tokens; each keeps its
    best places, and the last one to arrive merges them and lets them vote."""
    num_seqs, num_drafts = rows.shape[0], matching.num_drafts
    drafts = torch.empty((num_seqs, num_drafts), dtype=torch.int64, device=rows.device)
    if not num_seqs:
        return drafts
    most = min(MAX_SPLITS, max(1, ENOUGH_PROGRAMS // num_seqs))
    num_own = min(most, triton.cdiv(table.tokens.shape[1], BLOCK))
    num_splits = num_own + min(most, triton.cdiv(kept.tokens.numel(), BLOCK))
    parts = torch.empty((num_seqs, num_splits, MAX_VOTES), dtype=torch.int64, device=rows.device)
    _vote_kernel[(num_seqs, num_splits)](
        drafts,
        parts,
        table.scratch,
        table.tokens,
        table.lengths,
        kept.tokens,
        kept.owners,
        kept.before,
        kept.after,
        kept.clock,
        kept.requests,
        rows,
        table.tokens.stride(0),
        kept.tokens.shape[0],
        num_own,
        num_drafts,
        matching.longest,
        matching.shortest,
        BLOCK=BLOCK,
        PAGE=PAGE_TOKENS,
        VOTES=MAX_VOTES,
        MERGE=_MERGE_BLOCK,
        DRAFTS=triton.next_power_of_2(num_drafts),
    )
    return drafts


@launched
@triton.jit(
    do_not_specialize=["num_seqs", "stride", "num_pages"],
    do_not_specialize_on_alignment=["rows", "ends"],
)
def _keep_kernel(
    kept,
    owners,
    before,
    after,
    clock,
    writing,
    filled,
    kept_ends,
    requests,
    tokens,
    rows,
    ends,
    num_seqs,
    stride,
    num_pages,
    ENDS_BY_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
):
    now = tl.load(clock)
    later = now
    for start in range(0, num_seqs, BLOCK):
        seq = start + tl.arange(0, BLOCK)
        inside = seq < num_seqs
        row = tl.load(rows + seq, mask=inside, other=0).to(tl.int64)
        first, gained = _unkept(
            kept_ends, requests, row, ends + (row if ENDS_BY_ROW else seq), inside, PAGE
        )
        _, _, _, fits = _room(writing, filled, row, gained, now, num_pages, inside, PAGE)
        later += tl.sum((gained > fits).to(tl.int64), 0)
    tl.debug_barrier()  # all threads have read what is written below
    oldest = tl.maximum(later - num_pages, 0)
    offset = tl.arange(0, PAGE)[None, :]
    number = now
    for start in range(0, num_seqs, BLOCK):
        seq = start + tl.arange(0, BLOCK)
        inside = seq < num_seqs
        row = tl.load(rows + seq, mask=inside, other=0).to(tl.int64)
        first, gained = _unkept(
            kept_ends, requests, row, ends + (row if ENDS_BY_ROW else seq), inside, PAGE
        )
        page, used, has_page, fits = _room(
            writing, filled, row, gained, now, num_pages, inside, PAGE
        )
        begins = gained > fits
        begun = number + tl.cumsum(begins.to(tl.int64), 0) - 1
        number += tl.sum(begins.to(tl.int64), 0)

        is_there = has_page & (page >= oldest)
        place = tl.where(is_there, page % num_pages, 0)
        source = tokens + (row * stride + first)[:, None] + offset
        is_written = is_there[:, None] & (offset < fits[:, None])
        token = tl.load(source, mask=is_written, other=0)
        tl.store(kept + (place * PAGE + used)[:, None] + offset, token, mask=is_written)
        tl.store(after + place, begun, mask=is_there & begins)

        # A new page is written whole, by one store.
        is_new = begins & (begun >= oldest)
        place = tl.where(is_new, begun % num_pages, 0)
        is_gained = is_new[:, None] & (fits[:, None] + offset < gained[:, None])
        token = tl.load(source + fits[:, None], mask=is_gained, other=-1)
        tl.store(kept + (place * PAGE)[:, None] + offset, token, mask=is_new[:, None])
        tl.store(owners + place, tl.load(requests + row, mask=is_new, other=0), mask=is_new)
        tl.store(before + place, tl.where(has_page, page, -1), mask=is_new)
        tl.store(after + place, tl.full([BLOCK], -1, tl.int64), mask=is_new)

        tl.debug_barrier()  # all threads have read the rows' pages and ends
        tl.store(kept_ends + row, first + gained, mask=inside)
        tl.store(writing + row, tl.where(begins, begun, page), mask=inside)
        tl.store(filled + row, tl.where(begins, gained - fits, used + fits), mask=inside)
    tl.store(clock, later)


@triton.jit
def _unkept(kept_ends, requests, row, end, inside, PAGE: tl.constexpr):
    """Return the first token of each row's text that is not kept yet, and how many are now."""
    first = tl.load(kept_ends + row, mask=inside, other=0)
    left = tl.load(end, mask=inside, other=0) - first
    request = tl.load(requests + row, mask=inside, other=0)
    return first, tl.where(request == 0, 0, tl.minimum(tl.maximum(left, 0), PAGE))


@triton.jit
def _room(writing, filled, row, gained, now, num_pages, inside, PAGE: tl.constexpr):
    """Return each row's page, the tokens in it, whether it is still there, and how many of the
    gained ones fit in it."""
    page = tl.load(writing + row, mask=inside, other=-1)
    used = tl.load(filled + row, mask=inside, other=0)
    has_page = (page >= 0) & (page >= now - num_pages)
    return page, used, has_page, tl.minimum(gained, tl.where(has_page, PAGE - used, 0))


@launched
@triton.jit(
    do_not_specialize=["stride", "num_pages", "num_own", "num_drafts", "longest", "shortest"],
    do_not_specialize_on_alignment=["rows"],
)
def _vote_kernel(
    drafts,
    parts,
    arrivals,
    tokens,
    lengths,
    kept,
    owners,
    before,
    after,
    clock,
    requests,
    rows,
    stride,
    num_pages,
    num_own,
    num_drafts,
    longest,
    shortest,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    VOTES: tl.constexpr,
    MERGE: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    """`arrivals` [S + 1] are zeros before and after. A score of 0 is no place. Rows without a text,
    which several sequences may name, use none."""
    seq = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)
    row = tl.load(rows + seq).to(tl.int64)
    length = tl.load(lengths + row)
    ahead = tl.arange(0, DRAFTS)[None, :]
    if length == 0:
        none = tl.zeros([1, DRAFTS], tl.int64)
        tl.store(drafts + seq * num_drafts + ahead, none, mask=ahead < num_drafts)
        return
    text = tokens + row * stride
    now = tl.load(clock)
    best = tl.zeros([VOTES], tl.int64)
    # The last places come first, so that few replace others.
    if split < num_own:
        num_blocks = tl.cdiv(length, BLOCK)
        for index in range(split, num_blocks, num_own):
            place = (num_blocks - 1 - index) * BLOCK + tl.arange(0, BLOCK)
            matched = matched_before(text, place, text, length, longest)
            best = _with_best(best, _scores(matched, 1, place, shortest), VOTES)
    else:
        request = tl.load(requests + row)
        num_kept = tl.minimum(now, num_pages).to(tl.int32) * PAGE
        num_blocks = tl.cdiv(num_kept, BLOCK)
        for index in range(split - num_own, num_blocks, num_splits - num_own):
            place = num_pages * PAGE - (index + 1) * BLOCK + tl.arange(0, BLOCK)
            is_kept = place >= num_pages * PAGE - num_kept
            matched = _matched_kept(
                kept, owners, before, after, text, length, place, is_kept, now, request, num_pages,
                longest, shortest, PAGE,
            )  # fmt: skip
            best = _with_best(best, _scores(matched, 0, place, shortest), VOTES)
    lane = tl.arange(0, VOTES)
    own_parts = parts + seq * num_splits * VOTES
    tl.store(own_parts + split * VOTES + lane, best)
    # All threads write their places before the count, and read other programs' after it.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel")
    tl.debug_barrier()
    if arrived == num_splits - 1:
        tl.store(arrivals + row, 0)
        best = tl.zeros([VOTES], tl.int64)
        for start in range(0, num_splits * VOTES, MERGE):
            part = start + tl.arange(0, MERGE)
            score = tl.load(
                own_parts + part, mask=part < num_splits * VOTES, other=0, cache_modifier=".cg"
            )
            best = _with_best(best, score, VOTES)
        window = _followers(
            kept, after, text, length, best, ahead, now, num_drafts, num_pages, PAGE
        )
        _draft(drafts + seq * num_drafts, best, window, ahead, num_drafts, longest, shortest)


@triton.jit
def _scores(matched, is_own, place, shortest):
    score = ((matched * 2 + is_own).to(tl.int64) << _PLACE_BITS) | place
    return tl.where(matched >= shortest, score, 0)


@triton.jit
def _with_best(best, scores, VOTES: tl.constexpr):
    """Return the greatest of both."""
    lane = tl.arange(0, VOTES)
    top, least = tl.max(scores, 0), tl.min(best, 0)
    while top > least:
        which = tl.argmin(best, 0)
        best = tl.where(lane == which, top, best)
        scores = tl.where(scores == top, 0, scores)
        top, least = tl.max(scores, 0), tl.min(best, 0)
    return best


@triton.jit
def _matched_kept(
    kept,
    owners,
    before,
    after,
    text,
    length,
    place,
    is_kept,
    now,
    request,
    num_pages,
    longest,
    shortest,
    PAGE: tl.constexpr,
):
    """Return how many tokens up to each place equal the text's last ones, at most `longest`; 0 for
    places with fewer than `shortest`, without a token after them, or in pages of the row's own
    request. place: counted from the oldest page's first one."""
    slot, offset = _slot(place, now, num_pages, PAGE)
    slot = tl.where(is_kept, slot, 0)
    token = tl.load(kept + slot * PAGE + offset, mask=is_kept, other=-1)
    previous = tl.load(kept + slot * PAGE + offset - 1, mask=is_kept & (offset > 0), other=-1)
    wanted = _last_but(text, length, 1)
    previous = tl.where(shortest > 1, tl.where(offset > 0, previous, wanted), wanted)
    is_equal = is_kept & (token == _last_but(text, length, 0)) & (previous == wanted)
    matched = tl.zeros_like(place)
    if tl.max(is_equal.to(tl.int32), 0) > 0:
        is_equal = is_equal & (tl.load(owners + slot, mask=is_equal, other=0) != request)
        follower = _token_at(kept, after, slot, offset + 1, is_equal, num_pages, PAGE)
        is_equal = is_equal & (follower >= 0)
        page = tl.load(before + slot, mask=is_equal, other=-1)
        has_page = (page >= 0) & (page >= now - num_pages)
        earlier = tl.where(has_page, page % num_pages, 0).to(tl.int32)
        matched += is_equal.to(tl.int32)
        back = 1
        goes_on = back < longest
        while goes_on:
            at = offset - back
            is_equal = is_equal & ((at >= 0) | has_page)
            address = tl.where(at >= 0, slot * PAGE + at, earlier * PAGE + PAGE + at)
            found = tl.load(kept + address, mask=is_equal, other=-1)
            is_equal = is_equal & (found == _last_but(text, length, back))
            matched += is_equal.to(tl.int32)
            back += 1
            goes_on = (back < longest) & (tl.max(is_equal.to(tl.int32), 0) > 0)
    return matched


@triton.jit
def _last_but(text, length, back):
    """Return the token `back` before a text's last one; one that no page has before its start."""
    return tl.where(back < length, tl.load(text + tl.maximum(length - 1 - back, 0)), -2)


@triton.jit
def _slot(place, now, num_pages, PAGE: tl.constexpr):
    """Return a place's index of its page, and its offset in it."""
    return ((place // PAGE + now) % num_pages).to(tl.int32), place % PAGE


@triton.jit
def _token_at(kept, after, slot, offset, mask, num_pages, PAGE: tl.constexpr):
    """Return the tokens at offsets of a page, or of the one after it from PAGE on; -1 if there are
    none."""
    page = tl.load(after + slot, mask=mask, other=-1)
    is_next = offset >= PAGE
    index = tl.where(is_next, tl.maximum(page, 0) % num_pages, slot).to(tl.int32)
    address = index * PAGE + offset % PAGE
    return tl.load(kept + address, mask=mask & ((page >= 0) | (offset < PAGE)), other=-1)


@triton.jit
def _followers(
    kept, after, text, length, best, ahead, now, num_drafts, num_pages, PAGE: tl.constexpr
):
    """Return [C, DRAFTS]: the tokens after each place; -1 if there are none."""
    is_own = ((best >> _PLACE_BITS) & 1) != 0
    place = (best & _PLACE_MASK).to(tl.int32)
    inside = (best > 0)[:, None] & (ahead < num_drafts)
    end = tl.where(is_own, place, 0)
    period = tl.maximum(length - end, 1)
    own = tl.load(
        text + end[:, None] + ahead % period[:, None], mask=inside & is_own[:, None], other=-1
    )
    slot, offset = _slot(tl.where(is_own, 0, place), now, num_pages, PAGE)
    others = _token_at(
        kept,
        after,
        slot[:, None],
        (offset + 1)[:, None] + ahead,
        inside & (best > 0)[:, None],
        num_pages,
        PAGE,
    )
    return tl.where(is_own[:, None], own, others)


@triton.jit
def _draft(out, best, window, ahead, num_drafts, longest, shortest):
    """Store the drafts on which places vote: scores int64 [C], followers window [C, DRAFTS]."""
    matched = (best >> (_PLACE_BITS + 1)).to(tl.int32)
    for index in range(num_drafts):
        token = tl.sum(tl.where(ahead == index, window, 0), 1)
        is_voter = (token >= 0) & (matched >= shortest)
        most = tl.max(tl.where(is_voter, matched, 0), 0)
        is_voter = is_voter & (matched == most)
        agrees = (token[:, None] == token[None, :]) & is_voter[None, :]
        votes = tl.where(is_voter, tl.sum(agrees.to(tl.int32), 1), 0)
        is_leader = is_voter & (votes == tl.max(votes, 0))
        leader = tl.max(tl.where(is_leader, best, 0), 0)
        draft = tl.max(tl.where(is_leader & (best == leader), token, -1), 0)
        tl.store(out + index, tl.maximum(draft, 0).to(tl.int64))
        goes_on = (token == draft) & (draft >= 0)
        matched = tl.where(goes_on, tl.minimum(matched + 1, longest), 0)

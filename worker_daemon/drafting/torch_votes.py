"""Keeps the output of requests, and votes on drafts, in plain torch: TextKernels.keep and vote
(contracts/drafting.py). For the CPU and as the reference of kernels/suffix_lookup.py.

Letters as there; U pages that are filled, C places that vote.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from worker_daemon.contracts.drafting import (
    MAX_VOTES,
    PAGE_TOKENS,
    KeptTable,
    Matching,
    TextTable,
)

_PLACE_BITS: Final = 40
"""Lower bits of a score, which hold the place. Above them are a bit for places in the row's text,
and the length of the match."""

_MOST_COMPARED: Final = 1 << 22
"""Kept tokens, each for one row, that are compared at a time: 32 MB for a column of them."""


def keep_tokens(table: TextTable, kept: KeptTable, rows: Tensor, ends: Tensor) -> None:
    """See TextKernels.keep."""
    rows, num_pages = rows.long(), kept.tokens.shape[0]
    starts = kept.ends[rows]
    left = (ends - starts).clamp(0, PAGE_TOKENS)
    gained = torch.where(kept.requests[rows] == 0, 0, left)
    kept.ends[rows] = starts + gained
    page, filled = kept.writing[rows], kept.filled[rows]
    has_page = (page >= 0) & (page >= kept.clock - num_pages)
    fits = torch.minimum(gained, torch.where(has_page, PAGE_TOKENS - filled, 0))
    begins = gained > fits
    begun = kept.clock + begins.cumsum(0) - 1
    kept.clock.add_(begins.sum())
    oldest = (kept.clock - num_pages).clamp(min=0)

    new = torch.nonzero(begins & (begun >= oldest))[:, 0]
    slots = begun[new] % num_pages
    kept.tokens[slots] = -1
    kept.owners[slots] = kept.requests[rows[new]]
    kept.before[slots] = torch.where(has_page, page, -1)[new]
    kept.after[slots] = -1
    left = torch.nonzero(begins & has_page & (page >= oldest))[:, 0]
    kept.after[page[left] % num_pages] = begun[left]

    columns = torch.arange(PAGE_TOKENS, device=rows.device)
    places = (starts[:, None] + columns).clamp(max=table.tokens.shape[1] - 1)
    token_ids = table.tokens[rows[:, None], places]
    is_first = columns < fits[:, None]
    number = torch.where(is_first, page[:, None], begun[:, None])
    offset = torch.where(is_first, filled[:, None] + columns, columns - fits[:, None])
    written = (columns < gained[:, None]) & (number >= oldest)
    kept.tokens[number[written] % num_pages, offset[written]] = token_ids[written]
    kept.writing[rows] = torch.where(begins, begun, page)
    kept.filled[rows] = torch.where(begins, gained - fits, filled + fits)


class _Places(NamedTuple):
    """Places of a source that may vote, V of them in each row."""

    scores: Tensor
    """int64 [Q, V]; 0 for a place without a match."""
    followers: Tensor
    """int64 [Q, V, K]: the tokens after each place; -1 where there are none."""


def vote(table: TextTable, kept: KeptTable, rows: Tensor, matching: Matching) -> Tensor:
    """See TextKernels.vote."""
    at_once = max(1, _MOST_COMPARED // kept.tokens.numel())
    pieces = torch.split(rows, at_once)
    return torch.cat([_vote(table, kept, some, matching) for some in pieces])


def _vote(table: TextTable, kept: KeptTable, rows: Tensor, matching: Matching) -> Tensor:
    num_seqs, num_drafts = rows.shape[0], matching.num_drafts
    drafts = torch.zeros((num_seqs, num_drafts), dtype=torch.int64, device=rows.device)
    lengths = table.lengths[rows.long()].long()
    width = int(lengths.max()) if num_seqs else 0
    if not width:
        return drafts
    texts = table.tokens[rows.long(), :width].long()
    sources = (
        _own_places(texts, lengths, matching),
        _kept_places(texts, lengths, kept, kept.requests[rows.long()], matching),
    )
    scores = torch.cat([source.scores for source in sources], 1)
    order = torch.sort(scores, 1, descending=True)[1][:, :MAX_VOTES]
    scores = scores.gather(1, order)
    followers = torch.cat([source.followers for source in sources], 1)
    followers = followers.gather(1, order[:, :, None].expand(-1, -1, num_drafts))
    matched = scores >> (_PLACE_BITS + 1)
    for index in range(num_drafts):
        token = followers[:, :, index]
        is_voter = (token >= 0) & (matched >= matching.shortest)
        is_voter &= matched == torch.where(is_voter, matched, 0).amax(1, keepdim=True)
        agreeing = (token[:, :, None] == token[:, None, :]) & is_voter[:, None, :]
        votes = torch.where(is_voter, agreeing.sum(2), 0)
        leader = (votes == votes.amax(1, keepdim=True)).int().argmax(1, keepdim=True)
        draft = torch.where(votes.amax(1, keepdim=True) > 0, token.gather(1, leader), -1)
        drafts[:, index : index + 1] = draft.clamp(min=0)
        matched = torch.where(token == draft, matched + 1, 0).clamp(max=matching.longest)
        matched = torch.where(draft >= 0, matched, 0)
    return drafts


def _best(scores: Tensor) -> Tensor:
    """Return the places int64 [Q, V] of the best scores, in any order."""
    return torch.topk(scores, min(MAX_VOTES, scores.shape[1]), 1, sorted=False)[1]


def _own_places(texts: Tensor, lengths: Tensor, matching: Matching) -> _Places:
    """Return the places in the rows' own texts int64 [Q, L]."""
    ends = torch.arange(texts.shape[1], device=texts.device)
    matched = matched_before(texts, lengths, matching.longest)
    scores = (matched * 2 + 1) << _PLACE_BITS | ends
    scores = torch.where(matched >= matching.shortest, scores, 0)
    places = _best(scores)
    scores = scores.gather(1, places)
    ahead = torch.arange(matching.num_drafts, device=texts.device)
    periods = (lengths[:, None] - places).clamp(min=1)[:, :, None]
    places = (places[:, :, None] + ahead % periods).clamp(max=texts.shape[1] - 1)
    followers = texts.gather(1, places.flatten(1)).view(places.shape)
    return _Places(scores, torch.where(scores[:, :, None] > 0, followers, -1))


def _kept_places(
    texts: Tensor, lengths: Tensor, kept: KeptTable, requests: Tensor, matching: Matching
) -> _Places:
    """Return the places in the output of other requests than int32 [Q]."""
    num_pages, clock = kept.tokens.shape[0], int(kept.clock)
    oldest = max(0, clock - num_pages)
    numbers = torch.arange(oldest, clock, device=texts.device)
    slots = numbers % num_pages
    pieces = [
        _pages(kept, kept.before[slots], oldest),
        kept.tokens[slots],
        _pages(kept, kept.after[slots], oldest),
    ]
    spans = torch.cat(pieces, 1).long()
    here = range(PAGE_TOKENS, 2 * PAGE_TOKENS)
    is_equal = (spans[:, here.start + 1 : here.stop + 1] >= 0).expand(len(texts), -1, -1)
    is_equal = is_equal & (kept.owners[slots] != requests[:, None])[:, :, None]
    matched = torch.zeros(is_equal.shape, dtype=torch.int64, device=texts.device)
    for back in range(matching.longest):
        wanted = texts.gather(1, (lengths - 1 - back).clamp(min=0)[:, None])
        wanted = torch.where(lengths[:, None] > back, wanted, -2)
        is_equal &= spans[:, here.start - back : here.stop - back] == wanted[:, :, None]
        matched += is_equal
    matched = matched.flatten(1)
    if not matched.shape[1]:
        return _Places(matched, matched[:, :, None].expand(-1, -1, matching.num_drafts))
    places = torch.arange(matched.shape[1], device=texts.device)
    newness = places + (num_pages - numbers.shape[0]) * PAGE_TOKENS
    scores = (matched * 2) << _PLACE_BITS | newness
    scores = torch.where(matched >= matching.shortest, scores, 0)
    places = _best(scores)
    scores = scores.gather(1, places)
    ahead = torch.arange(matching.num_drafts, device=texts.device)
    offsets = here.start + 1 + (places % PAGE_TOKENS)[:, :, None] + ahead
    followers = spans[(places // PAGE_TOKENS)[:, :, None], offsets]
    return _Places(scores, torch.where(scores[:, :, None] > 0, followers, -1))


def _pages(kept: KeptTable, numbers: Tensor, oldest: int) -> Tensor:
    """Return int32 [U, PAGE_TOKENS]: pages by their numbers int64 [U], and -1 for those that are
    gone."""
    pages = kept.tokens[numbers.clamp(min=0) % kept.tokens.shape[0]]
    return torch.where((numbers >= oldest)[:, None], pages, -1)


def matched_before(texts: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """Return int64 [Q, L]: for each place of texts [Q, L], of lengths int64 [Q], how many tokens
    before it equal the text's last ones, at most `longest`; 0 from the text's end on."""
    width = texts.shape[1]
    places = torch.arange(width, device=texts.device)
    equal = places < lengths[:, None]
    matched = torch.zeros(texts.shape, dtype=torch.int64, device=texts.device)
    for back in range(1, min(longest, width) + 1):
        wanted = texts.gather(1, (lengths - back).clamp(min=0)[:, None])
        equal[:, :back] = False
        equal[:, back:] &= texts[:, : width - back] == wanted
        matched += equal
    return matched

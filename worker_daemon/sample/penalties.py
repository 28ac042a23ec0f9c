"""Penalties on tokens that a request already has, in plain torch: for the CPU, and as the reference
of the Triton kernels.

Shapes: S request rows, R rows that sample, V vocabulary.
"""

from typing import Final

import torch
from torch import Tensor

from worker_daemon.contracts.sampling import DraftsBefore, PenaltyTables

MOST: Final = 2**15 - 1
"""The largest count, and the bit mask of the count in a table entry."""


def penalized(
    logits: Tensor, slots: Tensor, tables: PenaltyTables, drafts: DraftsBefore | None = None
) -> Tensor:
    """See Sampling.penalized."""
    rows = slots.long()
    weights = tables.weights[rows]
    scores = _penalized(logits.float(), tables.seen[rows], weights)
    if drafts is None:
        return scores
    token_ids, counts = _counted(drafts)
    entries = _with_more(tables.seen[rows.unsqueeze(1), token_ids], counts)
    again = _penalized(logits.gather(1, token_ids).float(), entries, weights)
    return scores.scatter_(1, token_ids, again)  # equal tokens of a sample have equal scores


def count_tokens(slots: Tensor, token_ids: Tensor, tables: PenaltyTables, most: int = 1) -> None:
    """See Sampling.count_tokens."""
    rows, columns = slots.long(), token_ids.clamp(min=0)
    more = token_ids >= 0
    if most > 1:  # equal tokens of a row each write the whole sum, those that are none too
        places = rows * tables.seen.shape[1] + columns
        ordered = torch.where(more, places, -1).sort().values
        ends = torch.searchsorted(ordered, places, right=True)
        more = ends - torch.searchsorted(ordered, places)
    tables.seen[rows, columns] = _with_more(tables.seen[rows, columns], more)


def _penalized(logits: Tensor, seen: Tensor, weights: Tensor) -> Tensor:
    """Return logits float32 [R, n] with the penalties, float32 [R, 3], of their table entries,
    int16 [R, n]."""
    presence, frequency, repetition = weights.unsqueeze(2).unbind(1)
    counts = (seen & MOST).float()
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    scores = torch.where(seen != 0, repeated, logits)
    return scores - frequency * counts - presence * (counts > 0)


def _with_more(entries: Tensor, more: Tensor) -> Tensor:
    """Return table entries, int16, with increased counts. more: bool or integers, not negative."""
    return entries + torch.minimum(more, MOST - (entries & MOST)).to(torch.int16)


def _counted(drafts: DraftsBefore) -> tuple[Tensor, Tensor]:
    """Return the drafts before each sample, int64 [R, K], and how often each is among them, int64
    [R, K]. In place of drafts that a sample does not have there is token 0, mostly 0 times."""
    places = torch.arange(drafts.most, device=drafts.inputs.device)
    is_draft = places < drafts.num_before.unsqueeze(1)
    samples = torch.arange(drafts.inputs.shape[0], device=drafts.inputs.device)
    own = drafts.inputs[(samples.unsqueeze(1) - places).clamp_(min=0)]
    token_ids = torch.where(is_draft, own, 0)
    counts = torch.zeros_like(token_ids)
    for place in range(drafts.most):
        one = slice(place, place + 1)
        counts += is_draft[:, one] & (token_ids == token_ids[:, one])
    return token_ids, counts

"""Penalties on tokens that a request already has, in plain torch: for the CPU, and as the reference
of the Triton kernels.

Shapes: S request rows, R rows that sample, V vocabulary.
"""

from typing import Final

import torch
from torch import Tensor

from worker_daemon.contracts.sampling import PenaltyTables

MOST: Final = 2**15 - 1
"""The largest count, and the bit mask of the count in a table entry."""


def penalized(logits: Tensor, slots: Tensor, tables: PenaltyTables) -> Tensor:
    """See Sampling.penalized."""
    rows, scores = slots.long(), logits.float()
    presence, frequency, repetition = tables.weights[rows].unsqueeze(2).unbind(1)
    seen = tables.seen[rows]
    counts = (seen & MOST).float()
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(seen != 0, repeated, scores)
    return scores - frequency * counts - presence * (counts > 0)


def count_tokens(slots: Tensor, token_ids: Tensor, tables: PenaltyTables) -> None:
    """See Sampling.count_tokens."""
    places = slots.long(), token_ids.clamp(min=0)
    before = tables.seen[places]
    is_counted = (token_ids >= 0) & ((before & MOST) < MOST)
    tables.seen[places] = before + is_counted

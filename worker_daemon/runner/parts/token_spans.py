"""Finds the tokens of requests whose log probabilities a step can report: each from the hidden
state of the token before it."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from worker_daemon.contracts.arrays import Int32s, Int64s
from worker_daemon.runner.scheduled_step import ScheduledStep


class TokenSpan(NamedTuple):
    """Neighboring tokens of a request that a step reports."""

    slot: int
    first: int
    """Position in the request of the first of them."""
    tokens: Int64s
    """Indices into the step's tokens. The logits of each predict the token after it."""
    targets: Int32s
    """The tokens that are reported."""


def spans_of(
    step: ScheduledStep, wanted: Sequence[Int32s], firsts: Sequence[int]
) -> Iterator[TokenSpan]:
    """Yield the spans of a step, in the order of its slots. By slot: wanted, the tokens of its
    request up to the last one to report, or none; firsts, the position of the first one to
    report."""
    ends = np.cumsum(step.num_tokens)
    for slot, start, count, end in zip(
        step.slots.tolist(),
        step.starts.tolist(),
        step.num_tokens.tolist(),
        ends.tolist(),
        strict=True,
    ):
        own = wanted[slot]
        first, last = max(start + 1, firsts[slot]), min(start + count, own.size - 1)
        if first <= last:
            places = end - count + np.arange(first - 1 - start, last - start)
            yield TokenSpan(slot, first, places, own[first : last + 1])

"""The experts of a request's tokens, as far as its steps have reported them.

Shapes: P positions, L layers with experts, K experts of a token.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from worker_client.scheduler_output import Experts, ExpertsChunk

_LEAST_ROOM: Final = 64


class ExpertsRecord:
    """Owned by a request. Chunks come in the order of the steps. They may repeat positions, as
    after a preemption or behind refused drafts."""

    def __init__(self) -> None:
        self._experts: Experts | None = None
        """[room, L, K]"""
        self.max_cached = 0
        """Most cached tokens that its admission may report."""
        self.num_known = 0
        """Leading positions that are known, those of drafts included."""
        self.num_recomputed = 0
        """Leading positions whose experts are of a later pass than the one behind which the next
        token was sampled: another driver has begun the request."""

    def begin_with(self, experts: Experts, num_recomputed: int) -> None:
        """Take what another driver's record knew: experts, [P, L, K], are copied."""
        self._room(len(experts), experts)[:] = experts
        self.num_known, self.num_recomputed = len(experts), num_recomputed

    def num_known_of(self, count: int) -> int:
        """Return how many of the first `count` positions are known."""
        return min(self.num_known, count)

    def take(self, chunks: Sequence[ExpertsChunk], num_settled: int) -> None:
        """Note the chunks of a step, but for what is known of the first num_settled positions,
        which stay as they are. A chunk behind a gap is dropped: it is of a row that was given
        up."""
        num_settled = self.num_known_of(num_settled)
        for first, experts in chunks:
            if first > self.num_known:
                continue
            end, begin = first + len(experts), max(first, num_settled)
            if begin < end:
                self._room(end, experts)[begin:end] = experts[begin - first :]
                self.num_known = max(self.num_known, end)

    def first(self, count: int) -> Experts | None:
        """Return those of the first `count` positions, as far as they are known: a view, [P, L, K];
        None before anything was reported."""
        return None if self._experts is None else self._experts[: self.num_known_of(count)]

    def _room(self, end: int, like: Experts) -> Experts:
        experts = self._experts
        if experts is None or end > len(experts):
            room = max(_LEAST_ROOM, end, 0 if experts is None else 2 * len(experts))
            grown = np.zeros((room, *like.shape[1:]), like.dtype)
            if experts is not None:
                grown[: self.num_known] = experts[: self.num_known]
            self._experts = experts = grown
        return experts

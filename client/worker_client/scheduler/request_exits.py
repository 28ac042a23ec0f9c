"""The ways of a request out of the steps: it ends, or waits again."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from worker_client.requests import FinishReason, RequestOutput
from worker_client.scheduler.draft_lengths import DraftLengths
from worker_client.scheduler.prefix_cache import PrefixCache
from worker_client.scheduler.request import Request
from worker_client.scheduler.request_queues import RequestQueues
from worker_client.scheduler.sampling_weights import SamplingWeights


class RequestExits:
    """Ends requests, and preempts those whose rows must go. Owns the ids of rows that the workers
    have still to drop. Owned by a scheduler."""

    def __init__(
        self,
        queues: RequestQueues,
        prefixes: PrefixCache,
        weights: SamplingWeights,
        draft_lengths: DraftLengths | None = None,
    ) -> None:
        self._queues = queues
        self._prefixes = prefixes
        self._weights = weights
        self._draft_lengths = draft_lengths
        self.dropped: list[str] = []
        """Requests without blocks whose rows the workers have still to drop."""
        self.have_steps_failed = False
        """Steps have failed: until the next one, workers may have rows of any request."""

    @property
    def must_tell(self) -> bool:
        """True if workers may have rows of requests that have ended or wait."""
        return bool(self.dropped) or self.have_steps_failed

    def take_dropped(self) -> list[str]:
        """Return the requests whose rows the next step drops."""
        dropped, self.dropped = self.dropped, []
        self.have_steps_failed = False
        return dropped

    def finish(
        self,
        request: Request,
        reason: FinishReason,
        error: str = "",
        pooled: NDArray[np.float32] | None = None,
    ) -> RequestOutput:
        """End a request, and return its output. error: if there is one, nobody shares its blocks.
        pooled: its pooled output, float32 [rows, width] or [width]."""
        if request.is_running and not error:
            self._prefixes.remember(request)
        self.remove(request)
        return request.output(reason, self._weights.version, error, pooled)

    def remove(self, request: Request) -> None:
        """End a request without output."""
        if request.is_running:
            self.dropped.append(request.id)
        if self._draft_lengths is not None:
            self._draft_lengths.forget(request)
        self._queues.remove(request)

    def begin_again(self, request: Request) -> None:
        """Let a request wait, without blocks, if it does not yet."""
        if request.is_running:  # otherwise it was preempted and already waits
            self.dropped.append(request.id)
            self._queues.requeue(request)

    def preempt(self, request: Request) -> None:
        """Let a request wait, and ignore what steps in flight sample for it."""
        request.go_on_from_known(num_void=request.num_void + request.num_in_flight)
        self.begin_again(request)

    def give_up_blocks(self, block_ids: Sequence[int]) -> None:
        """Compute the requests again that have one of these blocks, whose contents did not match
        when they were loaded, and what steps in flight sample for them."""
        self._prefixes.forget_blocks(block_ids)
        invalid = frozenset(block_ids)
        for request in [*self._queues.running.values()]:
            if self._prefixes.give_up(request, invalid):
                self.preempt(request)

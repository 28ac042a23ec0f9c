"""Times of a driver's steps and requests."""

import time
from collections import deque
from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

from worker_client.scheduler_output import SchedulerOutput, StepResult

StepKind: TypeAlias = Literal["prefill", "decode", "mixed", "empty"]


class StepTiming(NamedTuple):
    """Duration of a step, in seconds."""

    kind: StepKind
    num_tokens: int
    num_requests: int
    seconds: float
    """Time from sending to the result."""
    interval_s: float
    """Time from the previous result (or its own sending, if that was later) to its own."""


class RequestTiming(NamedTuple):
    """Moments of a request, by time.monotonic()."""

    added: float
    first_token: float
    finished: float


class RunTimes:
    """Keeps the times of the last `most` steps and requests; None keeps all. Belongs to the
    driver's thread."""

    def __init__(self, most: int | None) -> None:
        self.steps: deque[StepTiming] = deque(maxlen=most)
        self.requests: dict[str, RequestTiming] = {}
        """Times of requests that have ended, by id; the oldest first."""
        self._most = most
        self._added: dict[str, float] = {}
        self._first_token: dict[str, float] = {}
        self._without_token: set[str] = set()
        self._last_result = 0.0

    def has(self, req_id: str) -> bool:
        """Return True for a request that was added and has not ended."""
        return req_id in self._added

    @property
    def unfinished(self) -> dict[str, tuple[float, float | None]]:
        """The requests that were added and have not ended, the oldest first, each with the moments
        at which it was added, and had its first token, if it has one."""
        return {name: (at, self._first_token.get(name)) for name, at in self._added.items()}

    def added(self, req_id: str) -> None:
        """Note that a request was queued."""
        self._added[req_id] = time.monotonic()
        self._without_token.add(req_id)

    def forget(self, req_id: str) -> None:
        """Drop a request that was aborted."""
        self._added.pop(req_id, None)
        self._first_token.pop(req_id, None)
        self._without_token.discard(req_id)

    def step_done(self, output: SchedulerOutput, sent: float, result: StepResult) -> None:
        """Note a step's result. sent: when the step was sent."""
        now = time.monotonic()
        self.steps.append(
            StepTiming(
                kind=_kind(output),
                num_tokens=output.total_num_scheduled_tokens,
                num_requests=output.num_requests,
                seconds=now - sent,
                interval_s=now - max(sent, self._last_result),
            )
        )
        self._last_result = now
        self.tokens_came(result.req_ids)

    def tokens_came(self, req_ids: Iterable[str]) -> None:
        """Note that requests have got tokens."""
        if self._without_token:
            first = self._without_token.intersection(req_ids)
            self._first_token.update(dict.fromkeys(first, time.monotonic()))
            self._without_token -= first

    def finished(self, req_id: str) -> None:
        """Note the end of a request."""
        now = time.monotonic()
        added = self._added.pop(req_id, now)
        first = self._first_token.pop(req_id, now)
        self._without_token.discard(req_id)  # one that pools never had any
        self.requests[req_id] = RequestTiming(added, first, now)
        if self._most is not None and len(self.requests) > self._most:
            del self.requests[next(iter(self.requests))]


def _kind(output: SchedulerOutput) -> StepKind:
    decodes = bool(output.decode_req_ids or output.num_drafts)
    others = len(output.num_scheduled_tokens) > len(output.num_drafts)
    if decodes and others:
        return "mixed"
    if not decodes and not others:
        return "empty"
    return "decode" if decodes else "prefill"

"""The progress of a request on its way to its reader, whichever driver serves it. Belongs to the
event loop."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias, TypeVar

import numpy as np

from worker_client.inputs.request_checks import checked_id, validated
from worker_client.requests import (
    GenerationRequest,
    Reports,
    RequestOutput,
    forked,
    hashed,
    must_hash,
    seeded,
)
from worker_client.scheduler_output import Experts

MAX_UNIQUE_ID: Final = 240
"""Characters of the id by which the daemons know a request, without that of a sample."""

T = TypeVar("T")


class RequestProgress(NamedTuple):
    """New tokens of a request, or of one of its samples."""

    req_id: str
    """Id of the request; of the sample if n > 1."""
    token_ids: list[int]
    """Tokens since the last RequestProgress of this id."""
    output: RequestOutput | None
    """The whole output, once it has ended."""
    reports: Reports | None = None
    """Log probabilities of these tokens, and with the first of them those of the prompt, and the
    experts that became known, if the request asked for any."""


class RequestStream:
    """Progress of one request that its reader has not taken yet."""

    def __init__(self, samples: Iterable[str]) -> None:
        """samples: by the ids that the reader knows them by."""
        self.left: dict[str, RequestOutput | None] = dict.fromkeys(samples)
        """Samples that have not ended, each with its output so far, which was reported whole, under
        drivers that have given it up; None: it has none."""
        self.num_tokens = 0
        """Tokens that have come."""
        self.on_tokens: Callable[[], object] | None = None
        """Called when tokens come."""
        self._untaken = set(self.left)
        """Samples whose ends the reader has not taken."""
        self._waiting: dict[str, RequestProgress] = {}
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    @property
    def is_read(self) -> bool:
        """True once the reader has taken the ends of all samples."""
        return not self._untaken

    def put(self, progress: RequestProgress) -> None:
        """Add the progress of a step."""
        if progress.token_ids:
            self.num_tokens += len(progress.token_ids)
            if self.on_tokens is not None:
                self.on_tokens()
        if progress.output is not None:
            del self.left[progress.req_id]
        before = self._waiting.get(progress.req_id)
        if before is not None:
            progress = _joined(before, progress)
        self._waiting[progress.req_id] = progress
        self._changed.set()

    def end(self, serving: "asyncio.Task[None]") -> None:
        """End with the error of the task that has served the request, if it has one, after what was
        put before."""
        if not serving.cancelled() and serving.exception() is not None:
            self._error = serving.exception()
            self._changed.set()

    async def take(self) -> list[RequestProgress]:
        """Wait for progress, and return it. Raises the error if there is none before it."""
        await self._changed.wait()
        waiting, self._waiting = self._waiting, {}
        if not waiting and self._error is not None:
            raise self._error
        if self._error is None:
            self._changed.clear()
        self._untaken.difference_update(name for name, each in waiting.items() if each.output)
        return list(waiting.values())


ServeRequest: TypeAlias = Callable[[GenerationRequest, RequestStream], Awaitable[None]]
"""Serves a request that is checked and has a seed, until it has ended; raises its error. Canceling
it aborts the request."""


async def streamed(
    request: GenerationRequest, serve: ServeRequest
) -> AsyncGenerator[RequestProgress, None]:
    """Serve a request in a task of its own, so that nothing of it waits for the reader; yield its
    progress. Closing the generator aborts it. Raises RequestError, and what `serve` raises."""
    request = await _prepared(request)
    stream = RequestStream(sample.id for sample in forked(request))
    serving = asyncio.ensure_future(serve(request, stream))
    serving.add_done_callback(stream.end)
    try:
        while not stream.is_read:
            for progress in await stream.take():
                yield progress
    finally:
        if not serving.done():
            serving.cancel()
            await asyncio.wait((serving,))


async def _prepared(request: GenerationRequest) -> GenerationRequest:
    """Return the request, checked, with a seed and with the hashes of its tensors. Its id may have
    any length: daemons get another one. Raises RequestError."""
    req_id = checked_id(request)
    request = seeded(validated(replace(request, id=req_id[:MAX_UNIQUE_ID])))
    request = await asyncio.to_thread(hashed, request) if must_hash(request) else request
    return replace(request, id=req_id)


def _joined(first: RequestProgress, second: RequestProgress) -> RequestProgress:
    """Return the progress of two steps as that of one."""
    reports = second.reports
    if first.reports is not None and reports is not None:
        reports = Reports(
            _both(first.reports.logprobs, reports.logprobs),
            first.reports.prompt_logprobs or reports.prompt_logprobs,
            _both(first.reports.full_logprobs, reports.full_logprobs),
            _both_experts(first.reports.routed_experts, reports.routed_experts),
        )
    token_ids = first.token_ids + second.token_ids
    return second._replace(token_ids=token_ids, reports=reports)


def _both(first: list[T] | None, second: list[T] | None) -> list[T] | None:
    return None if first is None or second is None else first + second


def _both_experts(first: Experts | None, second: Experts | None) -> Experts | None:
    if first is None or second is None:
        return second if first is None else first
    return np.concatenate((first, second))

"""Requests whose grammars are being compiled. The scheduler does not have them yet."""

from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple

from rpc_schema.structured import StructuredOutput
from worker_client.errors import RequestError, request_error
from worker_client.inputs.grammar_options import FIELD
from worker_client.requests import GenerationRequest
from worker_client.structured.attended_clock import AttendedClock
from worker_client.structured.masked_steps import CompiledGrammars, is_ready

POLL_S = 0.05


class _Pending(NamedTuple):
    request: GenerationRequest
    compiled: "Future[Any]"
    until: float
    """By the clock of the pending requests."""


class PendingRequests:
    """Requests in order of arrival. Belongs to the driver's thread."""

    def __init__(self, grammars: CompiledGrammars) -> None:
        self._grammars = grammars
        self._clock = AttendedClock()
        self._pending: dict[str, _Pending] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def add(self, request: GenerationRequest, grammar: StructuredOutput) -> bool:
        """Start to compile the grammar of a request whose id is not in use. Return True if it is
        compiled already, so that the request need not wait. One whose grammar is known not to
        compile is yielded by take_done() too: a failure has one way out, however fast it came."""
        compiled = self._grammars.compile(grammar)
        if is_ready(compiled):
            return True
        until = self._clock.read() + self._grammars.compile_s
        self._pending[request.id] = _Pending(request, compiled, until)
        return False

    def forget(self, req_id: str) -> None:
        """Drop a request, if it is here."""
        pending = self._pending.pop(req_id, None)
        if pending is not None:
            pending.compiled.cancel()  # its grammar is not compiled if nobody else waits for it

    def take_done(self) -> Iterator[tuple[GenerationRequest, RequestError | None]]:
        """Yield the requests that need not wait any longer, each with its error if it failed."""
        now = self._clock.read()
        for req_id, pending in list(self._pending.items()):
            is_overdue = now > pending.until
            if not pending.compiled.done() and not is_overdue:
                continue
            del self._pending[req_id]
            yield pending.request, _refusal(pending)


def _refusal(pending: _Pending) -> RequestError | None:
    compiled = pending.compiled
    if not compiled.done():
        compiled.cancel()
    try:
        compiled.result()
    except RequestError as error:
        return error
    except CancelledError:
        grammar = pending.request.sampling.structured_outputs
        value = None if grammar is None else grammar.text
        problem, fix = "it was not compiled in time", "simplify it, or send fewer at a time"
        return request_error(FIELD, value, problem, fix)
    return None

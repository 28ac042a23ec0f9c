"""Jump forward: tokens about which a grammar leaves no choice, and which a request gains without
sampling them.

When a token of a request is known, the step that samples the next one is in flight already. If the
grammar forces enough tokens (masked_steps.py), the scheduler appends them and admits the request
again, with all of them, over its own blocks. That step computes them in one chunk and samples the
token behind them, whose mask it carries. The token in flight is among those that were appended.

A request may also gain the first tokens of its output before it is admitted, which costs nothing.
"""

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from rpc_schema.structured import StructuredOutput
from worker_client.parts.registry import may_jump
from worker_client.requests import GenerationRequest
from worker_client.scheduler import JumpingScheduler, RequestOutput
from worker_client.scheduler_output import StepResult
from worker_client.structured.masked_steps import MaskedSteps


class Jumped(NamedTuple):
    """Requests that have jumped."""

    gained: StepResult
    """Their tokens, as a result that no step has."""
    finished: list[RequestOutput]
    """Those that stop strings have ended."""


class JumpForward:
    """Offers forced tokens to a driver's scheduler. Used on the driver's thread only."""

    def __init__(self, masks: MaskedSteps, scheduler: JumpingScheduler) -> None:
        self._masks = masks
        self._grammars = masks.grammars
        self._scheduler = scheduler
        self._new: dict[str, StructuredOutput] = {}
        """Grammars of requests that were queued since the last jumps."""

    @property
    def has_new(self) -> bool:
        """True if a request was queued since the last jumps."""
        return bool(self._new)

    def add(self, request: GenerationRequest) -> None:
        """Note a request that was queued, unless it has tokens already."""
        grammar = request.sampling.structured_outputs
        if grammar is None or request.continues is not None:
            return
        if may_jump(request.extensions(())):
            self._new[request.id] = grammar

    def forget(self, req_id: str) -> None:
        """Drop a request that has ended."""
        self._new.pop(req_id, None)

    def proceed(self, num_running: int) -> Jumped:
        """Let requests jump: new ones, and those that have taken a token of the newest result, if
        that pays with so many running requests."""
        req_ids: list[str] = []
        token_ids: list[int] = []
        finished: list[RequestOutput] = []
        for req_id, forced in chain(self._first_jumps(), self._masks.find_jumps(num_running)):
            count, output = self._scheduler.jump_forward(req_id, forced)
            if count:
                self._masks.jump(req_id, forced[:count])
                req_ids += [req_id] * count
                token_ids += forced[:count]
            if output is not None:
                finished.append(output)
        return Jumped(StepResult(req_ids, token_ids), finished)

    def _first_jumps(self) -> Iterator[tuple[str, list[int]]]:
        """Yield new requests with the tokens that their outputs must begin with."""
        new, self._new = self._new, {}
        for req_id, grammar in new.items():
            forced = self._grammars.forced_first(grammar)
            if forced:
                yield req_id, forced

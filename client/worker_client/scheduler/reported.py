"""Reports of a request on its tokens, those that it has brought included."""

from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from rpc_schema.extensions import extension_of
from rpc_schema.sampling import (
    FullLogprobs,
    FullLogprobsWanted,
    GivenLogprobs,
    LogprobsWanted,
    LogprobTokens,
    PromptLogprobsWanted,
    TokenLogprobs,
    TraceWanted,
)
from worker_client.parts.registry import Extensions
from worker_client.requests import RequestOutput
from worker_client.scheduler_output import (
    FullLogprob,
    Logprobs,
    PromptChunk,
    SampledToken,
    StepResult,
    TraceChunk,
)

ValueT = TypeVar("ValueT")

_REPORTED: Final = frozenset(
    (LogprobsWanted, FullLogprobsWanted, LogprobTokens, PromptLogprobsWanted, TraceWanted)
)


@dataclass(slots=True)
class Reported:
    """Reports of a request so far; None of each kind that it did not ask for."""

    logprobs: list[Logprobs] | None = None
    token_id_logprobs: list[NDArray[np.float32]] | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    full_logprobs: list[FullLogprob] | None = None
    num_brought: int = 0
    """Output tokens that the request has brought, all of which are reported: its trace."""
    closing: int | None = None
    """Another one, the last of all, which takes the place of the token that its first step
    samples."""

    @classmethod
    def of(cls, extensions: Extensions, num_prompt_tokens: int) -> "Reported | None":
        """Return what a request with these extensions has at first; None if it reports nothing."""
        if _REPORTED.isdisjoint(map(type, extensions)):
            return None
        kinds, trace = {type(each) for each in extensions}, extension_of(extensions, TraceWanted)
        return cls(
            [] if LogprobsWanted in kinds else None,
            [] if LogprobTokens in kinds else None,
            [None] * num_prompt_tokens if PromptLogprobsWanted in kinds else None,
            [] if FullLogprobsWanted in kinds else None,
            0 if trace is None else trace.num_tokens,
            None if trace is None or trace.last_token_id < 0 else trace.last_token_id,
        )

    @property
    def num_traced(self) -> int:
        """Number of output tokens that have both log probabilities so far."""
        return 0 if self.full_logprobs is None else len(self.full_logprobs)

    @property
    def is_tracing(self) -> bool:
        """True if tokens that the request has brought are still to be reported."""
        return self.num_traced < self.num_brought

    def go_on_behind(self, former: RequestOutput) -> None:
        """Begin with the reports that the request has had under another driver."""
        self.logprobs = _copied(former.logprobs)
        self.token_id_logprobs = _copied(former.token_id_logprobs)
        self.prompt_logprobs = _copied(former.prompt_logprobs)
        self.full_logprobs = _copied(former.full_logprobs)

    def take(self, req_id: str, result: StepResult, one: SampledToken | None = None) -> None:
        """Append the reports on a sampled token. one: the token, if it is one of several that the
        request has gained in the step."""
        for kind, taken in (
            (TokenLogprobs, self.logprobs),
            (FullLogprobs, self.full_logprobs),
            (GivenLogprobs, self.token_id_logprobs),
        ):
            if taken is not None:
                own = result.reports[kind][req_id] if one is None else one.reports[kind]
                taken.append(own)

    def take_trace(self, chunk: TraceChunk, num_prompt_tokens: int) -> None:
        """Note a chunk of the tokens that the request has brought, perhaps again. Chunks come in
        order."""
        if self.full_logprobs is not None:
            place = chunk.first - num_prompt_tokens
            self.full_logprobs[place : place + len(chunk.logprobs)] = chunk.logprobs

    def take_prompt(self, chunk: PromptChunk) -> None:
        """Note a chunk of the prompt, perhaps again: after a preemption it is computed again."""
        if self.prompt_logprobs is not None:
            places = range(chunk.first, len(self.prompt_logprobs))
            for place, entry in zip(places, chunk.logprobs, strict=False):
                self.prompt_logprobs[place] = entry


def _copied(values: list[ValueT] | None) -> list[ValueT] | None:
    return None if values is None else [*values]

"""The results of steps: what a request gains, loses and reports, and how it ends with them."""

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rpc_schema.extensions import extension_of
from rpc_schema.lora_request import LoraRequest
from rpc_schema.pooling import PoolingParams
from rpc_schema.routed_experts import RoutedExperts
from rpc_schema.sampling import PromptLogprobs, TraceLogprobs
from rpc_schema.step import NO_TOKEN
from worker_client.requests import RequestOutput
from worker_client.scheduler.draft_lengths import DraftLengths
from worker_client.scheduler.drafting.expected_drafts import NO_DRAFTS_EXPECTED
from worker_client.scheduler.drafting.request_drafts import NO_DRAFTS
from worker_client.scheduler.prefix_cache import PrefixCache
from worker_client.scheduler.request import Request
from worker_client.scheduler.request_exits import RequestExits
from worker_client.scheduler.request_queues import RequestQueues
from worker_client.scheduler_output import (
    DraftOutcome,
    ExpertsChunk,
    PromptChunk,
    StepResult,
    TraceChunk,
)

POOLED_NOT_FINITE: Final = (
    "the model's output is NaN or infinite for this input: activations overflow, or the weights "
    "are damaged; the other requests are not affected"
)
LOGITS_NOT_FINITE: Final = (
    "the model's output for token {place} is NaN or infinite: activations overflow for this input, "
    "the weights are damaged, or no token is left that it may sample; the other requests are not "
    "affected"
)


class StepResults:
    """Gives requests what steps have sampled for them. Owned by a scheduler."""

    def __init__(
        self,
        queues: RequestQueues,
        prefixes: PrefixCache,
        exits: RequestExits,
        draft_lengths: DraftLengths | None = None,
    ) -> None:
        self._queues = queues
        self._prefixes = prefixes
        self._exits = exits
        self._draft_lengths = draft_lengths

    def take(self, result: StepResult) -> list[RequestOutput]:
        """Process a step's result; return the requests that end with it."""
        if result.reports:
            self._take_prompts(result.reports.get(PromptLogprobs, {}))
            self._take_traces(result.reports.get(TraceLogprobs, {}))
            self._take_experts(result.reports.get(RoutedExperts, {}))
        if result.refused and self._queues.num_refusing:
            self._take_refusals(result)
        done = self._take_runs(result) if result.drafts else self._take_tokens(result)
        if result.reports:
            done += self._take_outputs(result.pooled)
        return done

    def _take_prompts(self, chunks: Mapping[str, PromptChunk]) -> None:
        for req_id, chunk in chunks.items():
            request = self._queues.unfinished.get(req_id)
            if request is not None and request.reported is not None:
                request.reported.take_prompt(chunk)

    def _take_traces(self, chunks: Mapping[str, TraceChunk]) -> None:
        for req_id, chunk in chunks.items():
            request = self._queues.unfinished.get(req_id)
            if request is not None and request.reported is not None:
                request.reported.take_trace(chunk, request.num_prompt_tokens)

    def _take_experts(self, chunks: Mapping[str, Sequence[ExpertsChunk]]) -> None:
        for req_id, own in chunks.items():
            request = self._queues.unfinished.get(req_id)
            if request is not None and request.experts is not None:
                request.experts.take(own, request.num_settled)

    def _take_refusals(self, result: StepResult) -> None:
        """Lower the counts of requests by tokens that a feature has refused. Before the tokens: a
        request that ends with one of these shares blocks by its true counts."""
        for req_id, count in result.refused.items():
            request = self._queues.unfinished.get(req_id)
            if request is not None and req_id not in result.drafts:
                self._take_back(request, count)

    def _take_back(self, request: Request, count: int) -> None:
        """Take back tokens that a step had counted for a request, which did not gain them."""
        if request.num_void:
            request.num_void -= count
            request.repeated = request.repeated[: max(0, len(request.repeated) - count)]
            return
        was_complete = request.num_tokens == request.limit
        request.num_tokens -= count
        # They were to follow tokens that it has not gained.
        request.drafts.expected = NO_DRAFTS_EXPECTED
        if request.is_running:
            request.num_computed -= count
            if was_complete:
                self._queues.decode(request)

    def _take_tokens(self, result: StepResult) -> list[RequestOutput]:
        """Process the tokens of a step without drafts."""
        done: list[RequestOutput] = []
        find, block_size = self._queues.unfinished.get, self._prefixes.unit
        for req_id, token in zip(result.req_ids, result.token_ids, strict=True):
            request = find(req_id)
            if request is None:  # stopped meanwhile: sampled past its end
                continue
            if request.num_void or token == NO_TOKEN:
                done += self._take_odd(request, token)
                continue
            reason = request.gain(token, result, None)
            if reason is not None:
                done.append(self._exits.finish(request, reason))
            elif len(request.tokens) % block_size == 0 and request.is_running:
                self._prefixes.remember_later(request)
        return done

    def _take_runs(self, result: StepResult) -> list[RequestOutput]:
        """Process the tokens of a step with drafts: of each request with some, a run of those that
        were accepted and one more."""
        done: list[RequestOutput] = []
        guesses: list[tuple[Request, DraftOutcome]] = []
        req_ids, token_ids, find = result.req_ids, result.token_ids, self._queues.unfinished.get
        has_odd, unit, end = NO_TOKEN in token_ids, self._prefixes.unit, 0
        while end < len(req_ids):
            begin, req_id = end, req_ids[end]
            outcome = result.drafts.get(req_id, NO_DRAFTS)
            end += 1 + outcome.num_accepted
            request = find(req_id)
            if request is None:  # stopped meanwhile: sampled past its end
                continue
            tokens = token_ids[begin:end]
            if has_odd or not request.gain_run(tokens, outcome):
                guessed = self._take_outcome(request, outcome)
                done += self._take_each(request, tokens, result)
            else:
                guessed, num_known = outcome, len(request.tokens)
                if num_known % unit < end - begin and request.is_running:
                    self._prefixes.remember_later(request)
            if guessed.num_drafted:
                guesses.append((request, guessed))
        if self._draft_lengths is not None:
            self._draft_lengths.learn(guesses)
        return done

    def _take_outcome(self, request: Request, outcome: DraftOutcome) -> DraftOutcome:
        """Note what has become of a request's drafts. Before the tokens: a request that ends with
        one of these shares blocks by its true counts. Return the outcome of those that were
        guesses."""
        if outcome is NO_DRAFTS:
            return NO_DRAFTS
        is_void, num_known = request.num_void > 0, len(request.tokens)
        guessed = request.drafts.take_outcome(outcome, num_known, is_void=is_void)
        if outcome.num_drafted > outcome.num_accepted:
            self._take_back(request, outcome.num_drafted - outcome.num_accepted)
        return guessed

    def _take_each(
        self, request: Request, tokens: Sequence[int], result: StepResult
    ) -> list[RequestOutput]:
        """Process the tokens of a request one by one, up to its end."""
        done: list[RequestOutput] = []
        ones = result.gained.get(request.id, repeat(None, len(tokens)))
        for token, one in zip(tokens, ones, strict=True):
            if request.id not in self._queues.unfinished:
                break
            if request.num_void or token == NO_TOKEN:
                done += self._take_odd(request, token)
                continue
            reason = request.gain(token, result, one)
            if reason is not None:
                done.append(self._exits.finish(request, reason))
            elif len(request.tokens) % self._prefixes.unit == 0 and request.is_running:
                self._prefixes.remember_later(request)
        return done

    def _take_odd(self, request: Request, token: int) -> list[RequestOutput]:
        """Process a token that is void, or NO_TOKEN."""
        if request.num_void:
            return self._take_void(request, token)
        return self._not_finite(request, len(request.tokens), request.num_in_flight - 1)

    def _take_void(self, request: Request, token: int) -> list[RequestOutput]:
        """Ignore a token. NO_TOKEN at a place that a jump has filled is a fault all the same."""
        request.num_void -= 1
        if not request.repeated:
            return []
        place, request.repeated = request.repeated[0], request.repeated[1:]
        if token != NO_TOKEN:
            return []
        return self._not_finite(request, place, request.num_void + request.num_in_flight)

    def _not_finite(self, request: Request, place: int, num_left: int) -> list[RequestOutput]:
        """Handle a request whose logits for the token at a place are NaN or infinite: no request
        may share the blocks that it wrote. If it began with blocks of another request, the fault
        may be in those: then it is computed again, from its known tokens and by itself. num_left:
        tokens of it that still arrive."""
        if not self._prefixes.distrust(request):
            adapter = extension_of(request.extensions, LoraRequest)
            reason = LOGITS_NOT_FINITE.format(place=place + 1)
            del request.tokens[place:]
            if adapter is not None:
                reason += f"; or a daemon lacks its adapter {adapter.name!r}: add it again"
            return [self._exits.finish(request, "error", reason)]
        request.go_on_from_known(num_void=num_left)
        self._exits.begin_again(request)
        return []

    def _take_outputs(self, pooled: Mapping[str, NDArray[np.float32]]) -> list[RequestOutput]:
        ended = (
            self._take_output(self._queues.unfinished.get(req_id), values)
            for req_id, values in pooled.items()
        )
        return [output for outputs in ended for output in outputs]

    def _take_output(
        self, request: Request | None, values: NDArray[np.float32]
    ) -> list[RequestOutput]:
        """End a request that pools with its output, float32 [rows, width]."""
        if request is None:  # it has been aborted, or its output was there before
            return []
        if not np.isfinite(values).all():
            if self._prefixes.distrust(request):
                self._exits.begin_again(request)
                return []
            return [self._exits.finish(request, "error", POOLED_NOT_FINITE)]
        params = extension_of(request.extensions, PoolingParams)
        per_token = params is not None and params.task in ("token_embed", "token_classify")
        return [self._exits.finish(request, "stop", pooled=values if per_token else values[0])]

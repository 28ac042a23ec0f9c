"""A second scheduler, as simple as one can be: `python -m examples.static_batches MODEL_DIRECTORY`.

Static batches: as many waiting requests as fit start together, and the next ones start when all of
these have ended. Each request has the blocks for all of its tokens from the start, so that nothing
is ever preempted, and requests share no blocks. docs/scheduler.md has the interface.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rpc_schema.config import ModelConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from rpc_schema.extensions import RequestExtension, extension_of
from rpc_schema.kv_cache import NULL_BLOCK, blocks_for
from rpc_schema.sampling import MAX_STOP_TOKEN_IDS, LogprobsWanted, StopTokens
from rpc_schema.step import NO_TOKEN
from worker_client.driver import Driver
from worker_client.errors import ClientConfigError, RequestError
from worker_client.group.adoption import AdoptedRequest
from worker_client.inputs.request_checks import check_fits
from worker_client.launcher import LocalDaemons
from worker_client.requests import GenerationRequest
from worker_client.scheduler import FinishReason, RequestOutput, SchedulerLimits, scheduler_limits
from worker_client.scheduler_output import Logprobs, NewRequest, SchedulerOutput, StepResult
from worker_client.steps.step_checks import (
    MAX_ADMITTED_BYTES,
    MAX_ADMITTED_TOKENS,
    admission_bytes,
    extension_bytes,
)
from worker_client.worker_group import WorkerGroup


@dataclass
class Entry:
    """A request and its progress."""

    tokens: list[int]
    """The prompt, then each token whose result has arrived."""
    num_prompt_tokens: int
    limit: int
    """Its maximum number of tokens, prompt included."""
    extensions: tuple[RequestExtension, ...]
    num_tokens: int = 0
    """Number of known tokens, with those that steps in flight are sampling."""
    num_computed: int = 0
    """Number of tokens whose step has been sent."""
    has_row: bool = False
    """True while the workers have a row for it."""
    block_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)

    def as_new(self, req_id: str) -> NewRequest:
        """Return its admission: all known tokens, all blocks."""
        return NewRequest(
            req_id=req_id,
            token_ids=np.array(self.tokens, np.int32),
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=self.num_computed,
            block_ids=list(self.block_ids),
            extensions=self.extensions,
            note=str(self.limit).encode(),
        )

    def admission_bytes(self, req_id: str, block_size: int) -> int:
        """Return the largest size of its admission in a step's message: with all its tokens."""
        num_tokens = self.limit - 1  # a last token has no KV
        num_blocks = blocks_for(num_tokens, block_size)
        own, note_bytes = extension_bytes(self.extensions), len(str(self.limit))
        return admission_bytes(num_tokens, num_blocks, len(req_id), own, note_bytes)

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """The tokens that end it."""
        stops = extension_of(self.extensions, StopTokens)
        return () if stops is None else stops.token_ids

    @property
    def reports_logprobs(self) -> bool:
        """True if it asked for logprobs."""
        return extension_of(self.extensions, LogprobsWanted) is not None


class StaticBatches:
    """A SchedulerInterface."""

    def __init__(self, limits: SchedulerLimits) -> None:
        if len(limits.block_groups) > 1:
            raise ClientConfigError(
                "it gives requests blocks of one KV group",
                field="limits.groups",
                value=limits.groups,
                fix="use worker_client.scheduler.Scheduler",
            )
        self._limits = limits
        self._free_blocks = list(range(1, limits.num_blocks))  # block 0 is the workers' own
        self._waiting: dict[str, Entry] = {}
        self._batch: dict[str, Entry] = {}
        self._ended: list[str] = []
        """Requests that the workers forget with the next step."""
        self._decode_req_ids: tuple[str, ...] = ()
        self._num_in_flight = 0

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a request, or raise RequestError and change nothing."""
        limits = self._limits
        request = check_fits(
            request, max_model_len=limits.max_model_len, vocab_size=limits.vocab_size
        )
        num_prompt = len(request.prompt)
        limit = min(num_prompt + request.max_tokens, limits.max_model_len)
        size = limits.vocab_size  # workers refuse stop tokens that the model cannot produce
        eos_token_ids = [t for t in limits.eos_token_ids if size is None or t < size]
        extensions = request.extensions(eos_token_ids)
        tokens = np.asarray(request.prompt).tolist()
        entry = Entry(tokens, num_prompt, limit, extensions, num_prompt)
        self._check(request.id, entry)
        self._waiting[request.id] = entry

    def adopt_requests(self, requests: Sequence[AdoptedRequest]) -> list[RequestOutput]:
        """Continue the requests that another driver's StaticBatches left in this group; call it
        first. Return those that have all their tokens already."""
        # A request whose window has left blocks behind is computed again: it needs all blocks.
        whole = {r.req_id: r.block_ids for r in requests if NULL_BLOCK not in r.block_ids}
        held = {block_id for block_ids in whole.values() for block_id in block_ids}
        self._free_blocks = [block_id for block_id in self._free_blocks if block_id not in held]
        done = []
        for request in requests:
            num_prompt, tokens = request.num_prompt_tokens, request.token_ids.tolist()
            entry = Entry(tokens[:num_prompt], num_prompt, int(request.note), request.extensions)
            entry.block_ids = list(whole.get(request.req_id, ()))
            self._batch[request.req_id] = entry
            # Earlier logprobs are not kept: requests that want them get the same tokens again.
            for token in tokens[num_prompt:] if not entry.reports_logprobs else ():
                reason = self._take(entry, token)
                if reason is not None:  # the rest is past its end
                    done.append(self._finish(request.req_id, reason))
                    break
            entry.num_tokens = len(entry.tokens)
            if entry.block_ids:
                entry.num_computed = min(request.num_computed_tokens, entry.num_tokens - 1)
        for entry in self._batch.values():
            self._reserve(entry)  # there are enough: each had its own before
        return done

    def abort_request(self, req_id: str) -> None:
        """End a request early; unknown ids are ignored."""
        if self._waiting.pop(req_id, None) is None and req_id in self._batch:
            self._remove(req_id)

    def has_unfinished_requests(self) -> bool:
        """Return True while a request has not finished."""
        return bool(self._waiting or self._batch)

    def schedule(self) -> SchedulerOutput | None:
        """Decide the next step, or return None if nothing can be sent before a result arrives."""
        if not self._batch and not self._num_in_flight:
            self._begin_batch()
        budget, num_admitted, num_bytes = self._limits.max_num_batched_tokens, 0, 0
        counts: dict[str, int] = {}
        decodes: list[str] = []
        new: list[NewRequest] = []
        for req_id, entry in self._batch.items():
            count = min(entry.num_tokens - entry.num_computed, budget)
            count = self._limits.cut_at_border(entry.num_computed, count)
            if count == 0 or entry.num_tokens == entry.limit:
                continue  # the step is full, or its last token is being sampled
            if not entry.has_row:
                num_bytes += entry.admission_bytes(req_id, self._limits.block_size)
                num_admitted += len(entry.tokens)
                if num_admitted > MAX_ADMITTED_TOKENS or num_bytes > MAX_ADMITTED_BYTES:
                    break  # the others are admitted by the next steps
                new.append(entry.as_new(req_id))
                entry.has_row = True
                counts[req_id] = count
            elif count == 1:
                decodes.append(req_id)
            else:
                counts[req_id] = count
            budget -= count
            entry.num_computed += count
            if entry.num_computed == entry.num_tokens:
                entry.num_tokens += 1  # the token that this step samples; the next step may use it
        if not (counts or decodes or (self._ended and not self._num_in_flight)):
            return None
        if tuple(decodes) != self._decode_req_ids:  # the same object costs the encoder nothing
            self._decode_req_ids = tuple(decodes)
        ended, self._ended = self._ended, []
        self._num_in_flight += 1
        return SchedulerOutput(
            num_scheduled_tokens=counts,
            decode_req_ids=self._decode_req_ids,
            scheduled_new_reqs=new,
            finished_req_ids=ended,
        )

    def update_from_output(
        self, output: SchedulerOutput, result: StepResult
    ) -> list[RequestOutput]:
        """Apply what a step sampled; return the requests that it finished."""
        self._num_in_flight -= 1
        done = []
        for req_id, token in zip(result.req_ids, result.token_ids, strict=True):
            entry = self._batch.get(req_id)
            if entry is None:  # it has ended meanwhile: the token is past its end
                continue
            reason = self._take(entry, token)
            if reason != "error" and req_id in result.logprobs:
                entry.logprobs.append(result.logprobs[req_id])
            if reason is not None:
                done.append(self._finish(req_id, reason))
        for req_id, count in result.refused.items():  # a feature wants them computed again
            entry = self._batch.get(req_id)
            if entry is not None:
                entry.num_tokens -= count
                entry.num_computed -= count
        return done

    def step_failed(self, outputs: Sequence[SchedulerOutput], lost_req_ids: frozenset[str]) -> None:
        """Take back steps that failed: lost requests start again from their known tokens, in the
        blocks that they have."""
        self._num_in_flight -= len(outputs)
        for req_id, entry in self._batch.items():
            entry.num_tokens = len(entry.tokens)
            if req_id in lost_req_ids:
                entry.has_row, entry.num_computed = False, 0

    def _check(self, req_id: str, entry: Entry) -> None:
        """Refuse what can never be served, and an id that is in use."""
        if req_id in self._waiting or req_id in self._batch:
            raise RequestError("the id is in use", field="id", value=req_id, fix="choose another")
        num_stop_ids = len(entry.stop_token_ids)
        if num_stop_ids > MAX_STOP_TOKEN_IDS:
            fix = f"use at most {MAX_STOP_TOKEN_IDS}, those of the model included"
            raise RequestError(
                "too many stop tokens", field="stop_token_ids", value=num_stop_ids, fix=fix
            )
        most = (self._limits.num_blocks - 1) * self._limits.block_size
        most = min(most, MAX_ADMITTED_TOKENS) + 1  # a last token has no KV
        num_bytes = entry.admission_bytes(req_id, self._limits.block_size)
        if num_bytes > MAX_ADMITTED_BYTES:
            most = min(most, entry.limit * MAX_ADMITTED_BYTES // num_bytes)
        if entry.limit > most:
            raise RequestError(
                "the request can become too long for the KV cache, or for one message",
                field="max_tokens",
                value=entry.limit,
                fix=f"use at most {most} tokens, prompt and output together",
            )

    def _begin_batch(self) -> None:
        """Move waiting requests into the batch, in order, while rows and blocks last."""
        most = min(self._limits.max_num_seqs, self._limits.max_num_batched_tokens)
        while self._waiting and len(self._batch) < most:
            req_id, entry = next(iter(self._waiting.items()))
            if not self._reserve(entry):
                return
            self._batch[req_id] = self._waiting.pop(req_id)

    def _reserve(self, entry: Entry) -> bool:
        """Reserve the blocks for all of its tokens; return False if there are too few."""
        needed = blocks_for(entry.limit - 1, self._limits.block_size) - len(entry.block_ids)
        if needed > len(self._free_blocks):
            return False
        entry.block_ids += self._free_blocks[:needed]
        del self._free_blocks[:needed]
        return True

    def _take(self, entry: Entry, token: int) -> FinishReason | None:
        """Add a sampled token; return why the request ends with it, if it does."""
        if token == NO_TOKEN:
            return "error"
        entry.tokens.append(token)
        if token in entry.stop_token_ids:
            return "stop"
        return "length" if len(entry.tokens) == entry.limit else None

    def _finish(self, req_id: str, reason: FinishReason) -> RequestOutput:
        entry = self._remove(req_id)
        return RequestOutput(
            req_id=req_id,
            token_ids=entry.tokens[entry.num_prompt_tokens :],
            finish_reason=reason,
            num_prompt_tokens=entry.num_prompt_tokens,
            num_cached_tokens=0,
            num_preemptions=0,
            logprobs=entry.logprobs if entry.reports_logprobs else None,
            error="its logits are not numbers" if reason == "error" else "",
        )

    def _remove(self, req_id: str) -> Entry:
        """Free its blocks. The step that gives them to another request also reports its end."""
        entry = self._batch.pop(req_id)
        self._free_blocks += entry.block_ids
        self._ended.append(req_id)
        return entry


def main() -> None:
    """Serve eight requests with a daemon on the CPU, and write each token as it arrives."""
    model = Path(sys.argv[1]).resolve()
    config = WorkerConfig(
        parallel=ParallelConfig(),
        model=ModelConfig(model=str(model)),
        scheduler=SchedulerConfig(max_num_seqs=4),
    )
    with (
        LocalDaemons(["cpu"], model.parent) as daemons,
        WorkerGroup(daemons.endpoints, config.parallel) as group,
    ):
        group.attach()
        scheduler = StaticBatches(scheduler_limits(group.prepare(config), config))
        driver = Driver(group, scheduler, on_result=print_tokens)
        for number in range(8):
            prompt = np.arange(1, 4 + number, dtype=np.int32)
            driver.add_request(GenerationRequest(str(number), prompt, max_tokens=5 + number))
        for output in driver.run():
            sys.stdout.write(f"{output.req_id} ended by {output.finish_reason}\n")


def print_tokens(result: StepResult) -> None:
    """Write a step's tokens, before the scheduler gets them."""
    for req_id, token in result.sampled.items():
        sys.stdout.write(f"{req_id}: {token}\n")


if __name__ == "__main__":
    main()

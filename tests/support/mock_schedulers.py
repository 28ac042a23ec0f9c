"""Two schedulers written against worker_client.scheduler.SchedulerInterface alone: one replays a
recorded trace, one is random within the rules. Neither uses slots or the wire."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from rpc_schema.kv_cache import NULL_BLOCK
from worker_client.group.adoption import AdoptedRequest
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import RequestOutput, SchedulerLimits
from worker_client.scheduler_output import NewRequest, SchedulerOutput, StepResult

TRACES = Path(__file__).parent / "traces"


@dataclass
class MockRequest:
    """A request and its progress."""

    request: GenerationRequest
    tokens: list[int]
    num_tokens: int = 0
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    running: bool = False

    def new_request(self, eos_token_ids: Sequence[int]) -> NewRequest:
        return NewRequest(
            req_id=self.request.id,
            token_ids=np.array(self.tokens, np.int32),
            num_prompt_tokens=len(self.request.prompt),
            num_computed_tokens=self.num_computed,
            block_ids=list(self.blocks),
            extensions=self.request.extensions(eos_token_ids),
            note=str(self.request.max_tokens).encode(),
        )


class MockScheduler:
    """Common bookkeeping: tokens, blocks, ends. Subclasses decide which requests run."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.requests: dict[str, MockRequest] = {}
        self.free_blocks = list(range(1, limits.num_blocks))
        self.finished: list[str] = []
        self.in_flight = 0

    def add_request(self, request: GenerationRequest) -> None:
        tokens = request.prompt.tolist()
        self.requests[request.id] = MockRequest(request, tokens, len(tokens))

    def adopt_requests(self, requests: Sequence[AdoptedRequest]) -> list[RequestOutput]:
        """Continue the requests of another MockScheduler."""
        return [output for request in requests for output in self.adopt(request)]

    def adopt(self, adopted: AdoptedRequest) -> list[RequestOutput]:
        sampling = SamplingParams.of(adopted.extensions)
        prompt = adopted.token_ids[: adopted.num_prompt_tokens]
        request = GenerationRequest(
            id=adopted.req_id,
            prompt=prompt,
            max_tokens=int(adopted.note),
            sampling=msgspec.structs.replace(sampling, ignore_eos=True),
        )
        mock = self.requests[request.id] = MockRequest(request, prompt.tolist())
        for token in adopted.token_ids[adopted.num_prompt_tokens :].tolist():
            mock.tokens.append(token)
            reason = self.reason_to_end(mock)
            if reason is not None:
                return [self.end(mock, reason)]
        mock.num_tokens, mock.num_computed = len(mock.tokens), adopted.num_computed_tokens
        mock.blocks = list(adopted.block_ids)
        self.free_blocks = [block for block in self.free_blocks if block not in mock.blocks]
        return []

    def reason_to_end(self, mock: MockRequest):
        if mock.tokens[-1] in mock.request.sampling.stop_ids(self.limits.eos_token_ids):
            return "stop"
        return "length" if len(mock.tokens) == self.limit(mock) else None

    def abort_request(self, req_id: str) -> None:
        mock = self.requests.pop(req_id, None)
        if mock is not None and mock.running:
            self.stop_running(mock)
            self.finished.append(req_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def limit(self, mock: MockRequest) -> int:
        prompt = len(mock.request.prompt)
        return min(prompt + mock.request.max_tokens, self.limits.max_model_len)

    def stop_running(self, mock: MockRequest) -> None:
        self.free_blocks += [block for block in mock.blocks if block != NULL_BLOCK]
        mock.blocks, mock.running, mock.num_computed = [], False, 0

    def compose(self, counts: dict[str, int], preempted: Sequence[str]) -> SchedulerOutput:
        """Preempt, admit requests that are not running, allocate blocks, and account for a step."""
        for req_id in preempted:
            self.stop_running(self.requests[req_id])
        new, blocks = [], {}
        for req_id, count in counts.items():
            mock = self.requests[req_id]
            needed = self.blocks_needed(mock, count)
            own, self.free_blocks = self.free_blocks[:needed], self.free_blocks[needed:]
            assert len(own) == needed, "the trace needs more blocks than there are"
            mock.blocks += own
            if not mock.running:
                new.append(mock.new_request(self.limits.eos_token_ids))
            elif own:
                blocks[req_id] = own
            mock.running = True
            mock.num_computed += count
            mock.num_tokens += mock.num_computed == mock.num_tokens
        finished, self.finished = self.finished, []
        self.in_flight += 1
        return SchedulerOutput(
            num_scheduled_tokens=counts,
            scheduled_new_reqs=new,
            new_block_ids=blocks,
            finished_req_ids=finished,
            preempted_req_ids=preempted,
        )

    def blocks_needed(self, mock: MockRequest, count: int) -> int:
        total = -(-(mock.num_computed + count) // self.limits.block_size)
        return max(0, total - len(mock.blocks))

    def update_from_output(
        self, output: SchedulerOutput, result: StepResult
    ) -> list[RequestOutput]:
        self.in_flight -= 1
        done = []
        for req_id, token in result.sampled.items():
            mock = self.requests.get(req_id)
            if mock is None:
                continue
            mock.tokens.append(token)
            reason = self.reason_to_end(mock)
            if reason is not None:
                done.append(self.end(mock, reason))
        return done

    def end(self, mock: MockRequest, reason) -> RequestOutput:
        del self.requests[mock.request.id]
        if mock.running:
            self.stop_running(mock)
            self.finished.append(mock.request.id)
        num_prompt = len(mock.request.prompt)
        return RequestOutput(
            mock.request.id, mock.tokens[num_prompt:], reason, num_prompt, 0, 0, None
        )

    def step_failed(self, outputs: Sequence[SchedulerOutput], lost_req_ids: frozenset[str]) -> None:
        self.in_flight -= len(outputs)
        for req_id, mock in self.requests.items():
            if req_id in lost_req_ids and mock.running:
                self.stop_running(mock)
            mock.num_tokens = len(mock.tokens)


class RandomScheduler(MockScheduler):
    """Random subsets, random chunks, random preemptions."""

    def __init__(self, limits: SchedulerLimits, seed: int, preemption: float = 0.03) -> None:
        super().__init__(limits)
        self.rng = random.Random(seed)
        self.preemption = preemption
        self.num_preemptions = 0

    def schedule(self) -> SchedulerOutput | None:
        mocks = list(self.requests.values())
        self.rng.shuffle(mocks)
        running = [mock for mock in mocks if mock.running]
        preempted = [mock for mock in running if self.rng.random() < self.preemption]
        num_free = len(self.free_blocks) + sum(len(mock.blocks) for mock in preempted)
        num_slots = self.limits.max_num_seqs - len(running) + len(preempted)
        budget, counts = self.limits.max_num_batched_tokens, {}
        for mock in mocks:
            left = mock.num_tokens - mock.num_computed
            most = min(left, budget)
            known = mock.running or mock.num_tokens == len(mock.tokens)
            ended = mock.num_tokens == self.limit(mock)
            if mock in preempted or ended or not known or self.rng.random() < 0.2 or not most:
                continue
            count = self.rng.randint(1, most)
            needed = self.blocks_needed(mock, count)
            if needed > num_free or (not mock.running and not num_slots):
                continue
            counts[mock.request.id] = count
            num_slots -= not mock.running
            num_free -= needed
            budget -= count
        if not counts and not preempted:
            return self.unblock(running)
        self.num_preemptions += len(preempted)
        return self.compose(counts, [mock.request.id for mock in preempted])

    def unblock(self, running: list[MockRequest]) -> SchedulerOutput | None:
        """Handle an empty draw: wait for a result or, if none is pending, preempt or finish."""
        if self.in_flight or not (self.requests or self.finished):
            return None
        return self.compose({}, [mock.request.id for mock in running[:1]])


class TraceScheduler(MockScheduler):
    """Replays {"steps": [{"counts": {id: n}, "preempted": [id]}]}: the requests and token counts of
    each step.

    Waits for results only if a resumption needs tokens in flight; ends with the trace.
    """

    def __init__(self, limits: SchedulerLimits, trace: Path) -> None:
        super().__init__(limits)
        self.steps = json.loads(trace.read_text())["steps"]

    def schedule(self) -> SchedulerOutput | None:
        if not self.steps:
            return self.compose({}, []) if self.finished and not self.in_flight else None
        counts = {r: n for r, n in self.steps[0]["counts"].items() if r in self.requests}
        mocks = [self.requests[req_id] for req_id in counts]
        if any(not mock.running and mock.num_tokens != len(mock.tokens) for mock in mocks):
            return None
        preempted = [r for r in self.steps.pop(0).get("preempted", []) if r in self.requests]
        return self.compose(counts, preempted)


def trace_requests(trace: Path, vocab_size: int) -> list[GenerationRequest]:
    """Return the requests of a trace: {"requests": [{id, num_prompt_tokens, max_tokens}]}."""
    return [
        GenerationRequest(
            id=entry["id"],
            prompt=np.random.default_rng(index)
            .integers(8, vocab_size, entry["num_prompt_tokens"])
            .astype(np.int32),
            max_tokens=entry["max_tokens"],
            sampling=SamplingParams(ignore_eos=True),
        )
        for index, entry in enumerate(json.loads(trace.read_text())["requests"])
    ]


def record_trace(outputs: Sequence[SchedulerOutput]) -> list[dict]:
    """Turn a scheduler's outputs into the steps of a trace."""
    return [
        {
            "counts": {**dict.fromkeys(output.decode_req_ids, 1), **output.num_scheduled_tokens},
            "preempted": list(output.preempted_req_ids),
        }
        for output in outputs
    ]

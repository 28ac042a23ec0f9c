"""A scheduler whose requests stop at borders. docs/scheduler.md has the interface.

Between two borders, each request gains the same number of tokens, or ends itself. Where a step
fails, all requests go back to the last border: the steps behind it are the same ones again, of the
same sizes, so that their results are too, to the last bit of a log probability.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from rpc_schema.extensions import RequestExtension
from rpc_schema.kv_cache import blocks_for
from rpc_schema.sampling import FullLogprobs
from worker_client.errors import ClientError, RequestError
from worker_client.inputs.request_checks import check_fits
from worker_client.requests import GenerationRequest, RequestOutput
from worker_client.scheduler import SchedulerLimits
from worker_client.scheduler_output import NewRequest, SchedulerOutput, StepResult


@dataclass
class Gain:
    """The tokens of a request since the last border."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """The weights' versions that have sampled them."""


@dataclass
class Row:
    """A request and its progress."""

    wave: int
    """It depends on its id alone, so that the steps of the next driver have the same requests."""
    tokens: list[int]
    """The prompt, then all tokens up to the last border."""
    limit: int
    """Its most tokens, prompt included."""
    stop_ids: frozenset[int]
    extensions: tuple[RequestExtension, ...]
    block_ids: list[int]
    """Blocks for all of its tokens."""
    border: int = 0
    """Number of tokens at which it stops for now."""
    gain: Gain = field(default_factory=Gain)
    num_sent: int = 0
    """Number of tokens that it will have once the steps in flight are done."""
    has_row: bool = False
    """True if the workers have it, with all its tokens computed but the last."""

    def __post_init__(self) -> None:
        self.border = self.num_sent = len(self.tokens)

    @property
    def has_ended(self) -> bool:
        """True if it has its last token."""
        gained = self.gain.token_ids
        is_stopped = bool(gained) and gained[-1] in self.stop_ids
        return is_stopped or len(self.tokens) + len(gained) == self.limit

    @property
    def is_at_border(self) -> bool:
        """True if it may gain nothing more for now."""
        return self.has_ended or len(self.tokens) + len(self.gain.token_ids) == self.border

    def go_back(self) -> None:
        """Return to the last border, without a row."""
        self.gain, self.num_sent, self.has_row = Gain(), len(self.tokens), False


class SegmentScheduler:
    """A SchedulerInterface for requests that all fit at once. In a pipeline they take turns in as
    many waves as there are stages."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._free_blocks = list(range(1, limits.num_blocks))  # block 0 is the workers' own
        self._rows: dict[str, Row] = {}
        self._forget: list[str] = []
        """Requests whose rows the workers drop with the next step."""
        self._num_in_flight = self._turn = 0

    def open_segment(self, num_tokens: int) -> None:
        """Let each request gain so many tokens from now on, as far as its limit permits."""
        self._turn = 0
        for row in self._rows.values():
            row.border = min(len(row.tokens) + num_tokens, row.limit)

    @property
    def is_at_border(self) -> bool:
        """True if no request may gain more, and no step is in flight."""
        return not self._num_in_flight and all(row.is_at_border for row in self._rows.values())

    def close_segment(self) -> Iterator[tuple[str, Gain]]:
        """Yield what each request has gained since the last border; this is the last one from now
        on. Abort those that have ended."""
        for req_id, row in self._rows.items():
            gain = row.gain
            row.tokens += gain.token_ids
            row.gain, row.num_sent = Gain(), len(row.tokens)
            yield req_id, gain

    def add_request(self, request: GenerationRequest) -> None:
        """Queue a request, between two segments."""
        limits = self._limits
        request = check_fits(
            request, max_model_len=limits.max_model_len, vocab_size=limits.vocab_size
        )
        tokens = np.asarray(request.prompt).tolist()
        limit = len(tokens) + request.max_tokens
        num_blocks = blocks_for(limit - 1, limits.block_size)  # a last token has no KV
        if num_blocks > len(self._free_blocks) or len(self._rows) == limits.max_num_seqs:
            raise RequestError(
                "there is no room for one more request",
                field="id",
                value=request.id,
                fix="raise max_num_seqs and the cache's size, or add it at a later border",
            )
        self._rows[request.id] = Row(
            crc32(request.id.encode()) % limits.pipeline_parallel_size,
            tokens,
            limit,
            frozenset(request.sampling.stop_ids(limits.end_ids)),
            request.extensions(limits.end_ids),
            [self._free_blocks.pop() for _ in range(num_blocks)],
        )

    def abort_request(self, req_id: str) -> None:
        """End a request; unknown ids are ignored."""
        row = self._rows.pop(req_id, None)
        if row is not None:
            self._free_blocks += row.block_ids
            self._forget.append(req_id)

    def has_unfinished_requests(self) -> bool:
        """Return True while a request has not been aborted."""
        return bool(self._rows)

    def schedule(self) -> SchedulerOutput | None:
        """Return the next step: the wave whose turn it is, or the next one that is not at its
        border."""
        num_waves = self._limits.pipeline_parallel_size
        for turn in range(self._turn, self._turn + num_waves):
            output = self._plan(turn % num_waves)
            if output is not None:
                self._turn = (turn + 1) % num_waves
                self._num_in_flight += 1
                return output
        return None

    def update_from_output(
        self, output: SchedulerOutput, result: StepResult
    ) -> list[RequestOutput]:
        """Take what a step has sampled. No request ends before the border."""
        self._num_in_flight -= 1
        reports = result.reports[FullLogprobs]
        for req_id, token in zip(result.req_ids, result.token_ids, strict=True):
            row = self._rows[req_id]
            if row.has_ended:  # it is past its end
                continue
            if token < 0:
                raise ClientError(f"the policy's logits for {req_id!r} are not numbers")
            row.gain.token_ids.append(token)
            row.gain.logprobs.append(reports[req_id].sampled)
            row.gain.versions.append(result.weights_version)
        return []

    def step_failed(self, outputs: Sequence[SchedulerOutput], lost_req_ids: frozenset[str]) -> None:
        """Go back to the last border with all requests, those that the workers still have too."""
        self._num_in_flight -= len(outputs)
        self._turn = 0
        for req_id, row in self._rows.items():
            if row.has_row and req_id not in lost_req_ids:
                self._forget.append(req_id)
            row.go_back()

    def _plan(self, wave: int) -> SchedulerOutput | None:
        """Return a wave's next step: prompts of requests without a row, as many as fit, and one
        token of each of the others."""
        budget = self._limits.max_num_batched_tokens
        counts, decodes, new = {}, [], []
        for req_id, row in self._rows.items():
            count = 1 if row.has_row else row.num_sent
            if row.wave != wave or row.has_ended or row.num_sent >= row.border or count > budget:
                continue
            budget -= count
            if row.has_row:
                decodes.append(req_id)
            else:
                counts[req_id] = count
                new.append(self._admission(req_id, row))
                row.has_row = True
            row.num_sent += 1
        if not (counts or decodes):
            return None
        forget, self._forget = self._forget, []
        return SchedulerOutput(counts, tuple(decodes), new, finished_req_ids=forget)

    def _admission(self, req_id: str, row: Row) -> NewRequest:
        tokens = np.array(row.tokens, np.int32)
        return NewRequest(req_id, tokens, len(tokens), 0, row.block_ids, row.extensions)

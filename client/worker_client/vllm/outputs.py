"""Results of steps as the columns of vLLM's ModelRunnerOutput, which are numpy arrays here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rpc_schema.sampling import GivenLogprobs, PromptLogprobs, TokenLogprobs
from rpc_schema.step import NO_TOKEN
from worker_client.scheduler_output import Logprobs, PromptChunk, StepResult
from worker_client.vllm.batches import RequestBatch
from worker_client.vllm.requests import Requests


class LogprobRows(NamedTuple):
    """Log probabilities of several positions, of equal width: shorter rows end with token 0 of
    probability 0."""

    token_ids: NDArray[np.int32]
    """int32 [rows, width]: the sampled or given token first."""
    logprobs: NDArray[np.float32]
    """float32 [rows, width]."""
    ranks: NDArray[np.int32]
    """int32 [rows]: rank of the first token; 1 is the most likely."""

    @classmethod
    def of(cls, num_rows: int, entries: Mapping[int, Logprobs]) -> "LogprobRows":
        """Return the rows, given the entries of some of them."""
        width = max((len(each.token_ids) for each in entries.values()), default=1)
        rows = cls(
            np.zeros((num_rows, width), np.int32),
            np.full((num_rows, width), -np.inf, np.float32),
            np.ones(num_rows, np.int32),
        )
        for row, each in entries.items():
            rows.token_ids[row, : len(each.token_ids)] = each.token_ids
            rows.logprobs[row, : len(each.logprobs)] = each.logprobs
            rows.ranks[row] = each.rank
        return rows


@dataclass(slots=True)
class ResultColumns:
    """The result of a step, by vLLM's ids."""

    req_ids: list[str]
    """The requests, by ascending row."""
    row_of: Mapping[str, int]
    """Row of each request; this and req_ids are the same objects for as long as the requests do not
    change."""
    sampled: list[list[int]]
    """Tokens of each, several only after drafts; empty: it has none."""
    logprobs: LogprobRows | None = None
    """A row for each token, or for each request if first_rows is None; None: none asked."""
    first_rows: list[int] | None = None
    """In logprobs, the first row of each request, and the number of rows."""
    prompt_logprobs: dict[str, LogprobRows] = field(default_factory=dict)
    """Requests whose prompt this step has completed, with a row for each of its tokens but the
    first."""
    pooled: list[NDArray[np.float32] | None] | None = None
    """Output of each request, float32 [width] or [tokens, width]; None: none has one."""
    failed: tuple[str, ...] = ()
    """Failed requests: they got NO_TOKEN, or their pooled output is not finite."""

    @property
    def has_more(self) -> bool:
        """Return True if there is more than tokens."""
        has_arrays = self.logprobs is not None or self.pooled is not None
        return has_arrays or bool(self.prompt_logprobs or self.failed)


class OutputReader:
    """Translates the results of one scheduler's steps, in order."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._prompts: dict[str, dict[int, Logprobs]] = {}
        """Log probabilities of prompts that are not complete, by position."""

    def read(self, batch: RequestBatch, result: StepResult) -> ResultColumns:
        """Translate a result. batch: all requests of the step."""
        columns = ResultColumns(batch.listed, batch.row_of, [])
        tokens = batch.tokens_in_rows(result.req_ids, result.token_ids)
        if tokens is not None and NO_TOKEN not in tokens:
            columns.sampled = [[t] for t in tokens]  # a batch that goes on
        else:
            gained = _by_request(result)
            some = [gained.get(each, ()) for each in batch.wire_ids]
            columns.sampled = [[] if NO_TOKEN in own else [*own] for own in some]
            pairs = zip(batch.req_ids, some, strict=True)
            columns.failed = tuple(name for name, own in pairs if NO_TOKEN in own)
        if result.reports or self._prompts:  # a last chunk of one token reports none
            self._add_reports(columns, batch.wire_ids, result)
        return columns

    def forget(self, wire_ids: Sequence[str]) -> None:
        """Forget the prompts of requests that have ended or have lost their rows."""
        for each in wire_ids:
            self._prompts.pop(each, None)

    def _add_reports(self, columns: ResultColumns, wire: Sequence[str], result: StepResult) -> None:
        self._add_logprobs(columns, wire, result)
        self._collect(result.reports.get(PromptLogprobs, {}))
        for name, each, own in zip(columns.req_ids, wire, columns.sampled, strict=True):
            if own and each in self._prompts:
                columns.prompt_logprobs[name] = _joined(self._prompts.pop(each))
        if result.pooled:
            self._add_pooled(columns, wire, result.pooled)

    def _add_logprobs(
        self, columns: ResultColumns, wire: Sequence[str], result: StepResult
    ) -> None:
        entries = self._sampled_entries(result)
        if not entries:
            return
        if result.gained:
            columns.first_rows = [0, *accumulate(map(len, columns.sampled))]
        firsts = columns.first_rows or range(len(wire) + 1)
        by_row: dict[int, Logprobs] = {}
        for first, each, tokens in zip(firsts, wire, columns.sampled, strict=False):
            by_row.update(enumerate(entries.get(each, ())[: len(tokens)], first))
        columns.logprobs = LogprobRows.of(firsts[-1], by_row)

    def _add_pooled(
        self,
        columns: ResultColumns,
        wire: Sequence[str],
        pooled: Mapping[str, NDArray[np.float32]],
    ) -> None:
        broken = {each for each, rows in pooled.items() if not np.isfinite(rows).all()}
        columns.pooled = [
            None if each in broken else self._shaped(each, pooled.get(each)) for each in wire
        ]
        if broken:
            pairs = zip(columns.req_ids, wire, strict=True)
            columns.failed = tuple(name for name, each in pairs if each in broken)

    def _sampled_entries(self, result: StepResult) -> dict[str, list[Logprobs]]:
        """Return the entries of each request that asked, one for each token that it gained."""
        given = result.reports.get(GivenLogprobs, {})
        entries: dict[str, list[Logprobs]] = {}
        for each, last in result.reports.get(TokenLogprobs, {}).items():
            reports = [token.reports for token in result.gained.get(each, ())]
            pairs = [(own[TokenLogprobs], own.get(GivenLogprobs)) for own in reports]
            pairs = pairs or [(last, given.get(each))]
            entries[each] = [self._entry(each, own, values) for own, values in pairs]
        return entries

    def _entry(self, each: str, own: Logprobs, given: NDArray[np.float32] | None) -> Logprobs:
        """Return the entry of a token, with those that the request named behind it."""
        known = self._requests.find(each)
        if given is None or known is None:  # it has ended, and its output is dropped
            return own
        return Logprobs(
            np.concatenate((own.token_ids[:1], np.array(known.logprob_token_ids, np.int32))),
            np.concatenate((own.logprobs[:1], given)),
            own.rank,
        )

    def _collect(self, chunks: Mapping[str, PromptChunk]) -> None:
        for each, chunk in chunks.items():
            if self._requests.find(each) is None:
                continue
            if chunk.first == 1:
                self._prompts[each] = {}
            known = self._prompts.setdefault(each, {})
            known.update(enumerate(chunk.logprobs, chunk.first))

    def _shaped(self, each: str, rows: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
        """Return an output in vLLM's shape: one vector, or one for each token."""
        known = self._requests.find(each)
        if rows is None or known is None:
            return None
        return rows if known.params.task.startswith("token_") else rows[0]


def _joined(positions: Mapping[int, Logprobs]) -> LogprobRows:
    """Return the rows of a prompt, position 1 first."""
    last = max(positions)
    return LogprobRows.of(last, {position - 1: each for position, each in positions.items()})


def _by_request(result: StepResult) -> dict[str, list[int]]:
    """Return the tokens of each request."""
    gained: dict[str, list[int]] = {}
    for req_id, token_id in zip(result.req_ids, result.token_ids, strict=True):
        gained.setdefault(req_id, []).append(token_id)
    return gained

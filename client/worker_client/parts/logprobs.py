"""The driver's side of log probabilities: of sampled tokens, of tokens that a request names, and of
its prompt."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rpc_schema.codec import Frame
from rpc_schema.errors import BadFrameError
from rpc_schema.sampling import (
    FullLogprobs,
    FullLogprobsWanted,
    GivenLogprobs,
    LogprobsWanted,
    LogprobTokens,
    PromptLogprobs,
    PromptLogprobsWanted,
    TokenLogprobs,
    TraceLogprobs,
    TraceWanted,
)
from worker_client.parts.interface import ExtensionFault, ModelBounds, RequestPart
from worker_client.scheduler_output import FullLogprob, Logprobs, PromptChunk, TraceChunk


class LogprobsPart(RequestPart):
    """Log probabilities of sampled tokens, as many for each request as it asked for."""

    extension = LogprobsWanted
    reply_extension = TokenLogprobs

    def find_fault(self, extension: LogprobsWanted, bounds: ModelBounds) -> ExtensionFault | None:
        return _count_fault(extension.count, bounds)

    def read_reply(
        self,
        extension: TokenLogprobs,
        frames: Sequence[Frame],
        req_ids: Sequence[str],
        asked: Mapping[str, LogprobsWanted],
    ) -> Mapping[str, Logprobs]:
        entries = _Entries(frames, len(req_ids), extension.width)
        return {
            req_id: entries.at(row, asked[req_id].count)
            for row, req_id in enumerate(req_ids)
            if req_id in asked
        }


class FullLogprobsRequestPart(RequestPart):
    """Two log probabilities of each sampled token."""

    extension = FullLogprobsWanted
    reply_extension = FullLogprobs

    def read_reply(
        self,
        extension: FullLogprobs,
        frames: Sequence[Frame],
        req_ids: Sequence[str],
        asked: Mapping[str, FullLogprobsWanted],
    ) -> Mapping[str, FullLogprob]:
        both = _both(frames, len(req_ids))
        return {req_id: own for req_id, own in zip(req_ids, both, strict=True) if req_id in asked}


class LogprobTokensRequestPart(RequestPart):
    """Log probabilities of the tokens that a request names, in their order."""

    extension = LogprobTokens
    reply_extension = GivenLogprobs

    def find_fault(self, extension: LogprobTokens, bounds: ModelBounds) -> ExtensionFault | None:
        fault = extension.find_fault(bounds.vocab_size)
        return None if fault is None else ExtensionFault(*fault)

    def read_reply(
        self,
        extension: GivenLogprobs,
        frames: Sequence[Frame],
        req_ids: Sequence[str],
        asked: Mapping[str, LogprobTokens],
    ) -> Mapping[str, NDArray[np.float32]]:
        rows, width = len(req_ids), extension.width
        counts = {req_id: len(own.token_ids) // 4 for req_id, own in asked.items()}
        most = max((counts[req_id] for req_id in req_ids if req_id in counts), default=0)
        if len(frames[0]) != 4 * rows * width or most > width:
            raise BadFrameError(f"the frame does not fit named tokens of {rows} rows, {width} wide")
        table = np.frombuffer(frames[0], "<f4").reshape(rows, width)
        return {
            req_id: table[row, : counts[req_id]]
            for row, req_id in enumerate(req_ids)
            if req_id in counts
        }


class PromptLogprobsRequestPart(RequestPart):
    """Log probabilities of a prompt's tokens, a chunk with each step of the prompt."""

    extension = PromptLogprobsWanted
    reply_extension = PromptLogprobs
    reports_tokens = False

    def find_fault(
        self, extension: PromptLogprobsWanted, bounds: ModelBounds
    ) -> ExtensionFault | None:
        return _count_fault(extension.count, bounds)

    def read_reply(
        self,
        extension: PromptLogprobs,
        frames: Sequence[Frame],
        req_ids: Sequence[str],
        asked: Mapping[str, PromptLogprobsWanted],
    ) -> Mapping[str, PromptChunk]:
        spans = _spans(extension.req_ids, extension.spans, asked)
        entries = _Entries(frames, sum(len(rows) for _, rows in spans.values()), extension.width)
        return {
            req_id: PromptChunk(first, [entries.at(row, asked[req_id].count) for row in rows])
            for req_id, (first, rows) in spans.items()
        }


class TraceRequestPart(RequestPart):
    """Both log probabilities of output tokens that a request brings, a chunk with each step that
    computes them."""

    extension = TraceWanted
    reply_extension = TraceLogprobs
    reports_tokens = False

    def find_fault(self, extension: TraceWanted, bounds: ModelBounds) -> ExtensionFault | None:
        if extension.last_token_id >= bounds.vocab_size:
            fix = f"use a token id below {bounds.vocab_size}"
            return ExtensionFault("last_token_id", extension.last_token_id, fix)
        return None

    def read_reply(
        self,
        extension: TraceLogprobs,
        frames: Sequence[Frame],
        req_ids: Sequence[str],
        asked: Mapping[str, TraceWanted],
    ) -> Mapping[str, TraceChunk]:
        spans = _spans(extension.req_ids, extension.spans, asked)
        both = _both(frames, sum(len(rows) for _, rows in spans.values()))
        return {
            req_id: TraceChunk(first, both[rows.start : rows.stop])
            for req_id, (first, rows) in spans.items()
        }


class _Entries:
    """The entries of three frames: token ids, their log probabilities, and the first one's rank."""

    def __init__(self, frames: Sequence[Frame], rows: int, width: int) -> None:
        if [len(frame) for frame in frames] != [4 * rows * (width + 1)] * 2 + [4 * rows]:
            raise BadFrameError(f"the frames do not fit logprobs of {rows} rows, {width} wide")
        self._token_ids = np.frombuffer(frames[0], "<i4").reshape(rows, width + 1)
        self._logprobs = np.frombuffer(frames[1], "<f4").reshape(rows, width + 1)
        self._ranks: list[int] = np.frombuffer(frames[2], "<i4").tolist()

    def at(self, row: int, count: int) -> Logprobs:
        """Return a row with the `count` most likely tokens."""
        end = count + 1
        return Logprobs(self._token_ids[row, :end], self._logprobs[row, :end], self._ranks[row])


def _both(frames: Sequence[Frame], count: int) -> list[FullLogprob]:
    """Return both log probabilities of `count` tokens."""
    if [len(frame) for frame in frames] != [4 * count] * 2:
        raise BadFrameError(f"the frames do not fit two log probabilities of {count} tokens")
    full, sampled = (np.frombuffer(frame, "<f4").tolist() for frame in frames)
    return list(map(FullLogprob, full, sampled))


def _spans(
    names: Sequence[str], spans: bytes, asked: Mapping[str, object]
) -> Mapping[str, tuple[int, range]]:
    """Return the position of each request's first token in a report of chunks, and the rows of its
    tokens."""
    if len(spans) != 8 * len(names) or not asked.keys() >= set(names):
        raise BadFrameError("log probabilities of requests that did not ask for them")
    pairs: list[list[int]] = np.frombuffer(spans, "<i4").reshape(-1, 2).tolist()
    if any(first < 1 or count < 1 for first, count in pairs):
        raise BadFrameError("log probabilities for positions that do not exist")
    ends = np.cumsum([count for _, count in pairs]).tolist()
    return {
        name: (first, range(end - count, end))
        for name, (first, count), end in zip(names, pairs, ends, strict=True)
    }


def _count_fault(count: int, bounds: ModelBounds) -> ExtensionFault | None:
    if count > bounds.vocab_size:
        return ExtensionFault("count", count, f"use at most {bounds.vocab_size}")
    return None

"""Reads the tokens of a reply in which not every request has one: some were refused, or requests
have several samples (SchedulerOutput.num_samples)."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Final, NamedTuple

from rpc_schema.codec import Frame
from rpc_schema.extensions import ReplyExtension
from worker_client.parts.registry import Extensions, read_token_reports
from worker_client.scheduler_output import SampledToken

ONE_EACH: Final[Mapping[str, int]] = MappingProxyType({})
"""SchedulerOutput.num_samples of a step whose requests have one sample each."""
_NO_REQUEST: Final = ""


class TokenRows(NamedTuple):
    """The requests of a reply's tokens."""

    gained: Sequence[str]
    """The request that gains each token; no request for the others."""
    refused: Mapping[str, int]
    """Tokens that requests did not gain, although the step counted them."""
    several: Mapping[str, range]
    """The places of the tokens of each request that had several samples."""


def token_rows(
    req_ids: Sequence[str], num_sampled: bytes, wanted: Mapping[str, int]
) -> TokenRows | None:
    """Return the requests of a reply's tokens; None if their counts do not fit the step. req_ids:
    those that sample; num_sampled: as in ModelRunnerOutput; wanted: the step's num_samples."""
    asked = [wanted.get(req_id, 1) for req_id in req_ids]
    counts = num_sampled or bytes([1]) * len(req_ids)
    has_several = max(asked, default=1) > 1
    if len(counts) != len(asked) or (has_several and not num_sampled):
        return None
    if any(not most - 1 <= count <= most for count, most in zip(counts, asked, strict=True)):
        return None  # a request gains one token, or none
    gained: list[str] = []
    for req_id, count, most in zip(req_ids, counts, asked, strict=True):
        gained += [_NO_REQUEST] * (most - 1) + [req_id] * (count - most + 1)
    firsts = accumulate(counts, initial=0)
    places = zip(req_ids, firsts, counts, asked, strict=False)
    return TokenRows(
        gained,
        {name: 1 for name, count, most in zip(req_ids, counts, asked, strict=True) if count < most},
        {name: range(first, first + n) for name, first, n, most in places if most > 1},
    )


def read_samples(
    several: Mapping[str, range],
    token_ids: Sequence[int],
    extensions: Sequence[ReplyExtension],
    frames: Sequence[Frame],
    asked: Mapping[str, Extensions],
) -> dict[str, list[SampledToken]]:
    """Return StepResult.samples. several: as in TokenRows; asked: extensions of the requests on
    which the reply may report. Raises BadFrameError as read_reports does."""
    samples: dict[str, list[SampledToken]] = {req_id: [] for req_id in several}
    for index in range(max(map(len, several.values()), default=0)):
        rows = [_NO_REQUEST] * len(token_ids)
        named = {name: own[index] for name, own in several.items() if index < len(own)}
        for req_id, place in named.items():
            rows[place] = req_id
        reports = read_token_reports(extensions, frames, rows, asked)
        for req_id, place in named.items():
            own = {kind: by_id[req_id] for kind, by_id in reports.items() if req_id in by_id}
            samples[req_id].append(SampledToken(token_ids[place], own))
    return samples

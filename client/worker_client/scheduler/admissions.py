"""The admission of a request on the workers, with a note in it from which the scheduler of another
driver continues the request."""

import math
import time
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from rpc_schema.kv_cache import BlockGroup, blocks_for
from rpc_schema.routed_experts import RoutedExpertsWanted
from worker_client.errors import RequestError
from worker_client.group.adoption import AdoptedRequest
from worker_client.parts.registry import Extensions
from worker_client.requests import VersionRun
from worker_client.scheduler.request import Request
from worker_client.scheduler_output import NewRequest
from worker_client.steps.step_checks import admission_bytes

_NOTE_BYTES: Final = 112
"""Bound on an encoded AdmissionNote without its runs of versions, and without its stop strings,
whose bytes Traits.fixed_bytes counts."""
_RUN_BYTES: Final = 24
"""Bound on an encoded run."""
MAX_NOTED_RUNS: Final = 2048
"""Runs of versions in a note; earlier ones become one run of an unknown version."""


class AdmissionNote(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Facts of a request for another driver's scheduler, besides those that the workers have."""

    limit: int
    arrival: int
    num_cached_tokens: int
    num_preemptions: int
    index: int | None = None
    stop: tuple[str, ...] = ()
    includes_stop: bool = False
    priority: int = 0
    deadline_unix_s: float | None = None
    """Time of day: the monotonic clock of another host differs."""
    weights_versions: tuple[VersionRun, ...] = ()
    is_mixed: bool = False
    """Its blocks have KV of weights that were replaced."""
    adapter_version: int | None = None
    """Number of the weights of its adapter that its row began with."""
    num_recomputed: int = 0
    """Leading positions whose KV was computed again, as WeightsHistory has them."""

    @property
    def deadline(self) -> float:
        """Request.deadline on this host."""
        unix_s = self.deadline_unix_s
        return math.inf if unix_s is None else unix_s - _unix_offset_s()


def note_of(request: AdoptedRequest) -> AdmissionNote:
    """Return the note of a request that another driver has left.

    Raises:
        RequestError: it was admitted by another kind of scheduler.
    """
    try:
        return msgspec.msgpack.decode(request.note, type=AdmissionNote)
    except msgspec.DecodeError:
        raise RequestError(
            f"request {request.req_id!r} was admitted by another kind of scheduler",
            field="note",
            value=request.note,
            fix="adopt it with that scheduler, or drop it",
        ) from None


def most_admission_bytes(
    request: Request, num_tokens: int, groups: Sequence[BlockGroup], num_runs: int | None = None
) -> int:
    """Return the most bytes of a step's message that a request's admission with so many tokens
    takes. num_runs: of versions; None: of the tokens that it has, and perhaps one more."""
    num_blocks, num_runs = 0, len(request.weights.runs) + 1 if num_runs is None else num_runs
    note_bytes = _NOTE_BYTES + _RUN_BYTES * min(num_runs, MAX_NOTED_RUNS)
    for group in groups:
        num_blocks += blocks_for(num_tokens, group.block_size)
    own = request.traits.fixed_bytes
    return admission_bytes(num_tokens, num_blocks, len(request.id), own, note_bytes)


def admit(request: Request, sampled_by: int, adapter_version: int | None = None) -> NewRequest:
    """Return a request's admission for the workers, and note in the request what is computed again
    by it. sampled_by: version of the weights that have sampled its newest tokens; adapter_version:
    that of its adapter's present ones."""
    if len(request.tokens) > request.num_prompt_tokens:
        request.stamp(sampled_by)
    _note_recomputed(request)
    by_group = request.blocks.by_group  # their lists grow later
    note = AdmissionNote(
        request.limit,
        request.arrival,
        request.blocks.num_cached_tokens,
        request.blocks.num_preemptions,
        *request.sample,
        request.priority,
        None if request.deadline == math.inf else request.deadline + _unix_offset_s(),
        _noted(request.weights.runs),
        request.prefix.is_mixed,
        adapter_version,
        request.weights.num_recomputed,
    )
    return NewRequest(
        req_id=request.id,
        token_ids=np.array(request.tokens),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed,
        block_ids=by_group[0].copy(),
        more_block_ids=[own.copy() for own in by_group[1:]] if len(by_group) > 1 else (),
        extensions=_wanted_of(request),
        note=msgspec.msgpack.encode(note),
    )


def _note_recomputed(request: Request) -> None:
    """Note, at an admission, what is computed again, if it is not with its present KV."""
    if not request.needs_admission:
        num_tokens = len(request.tokens)
        has_sampled = num_tokens > request.num_given
        request.weights.num_recomputed = num_tokens - 1 if has_sampled else 0
    if request.experts is not None and not request.experts.num_known:
        request.experts.num_recomputed = request.weights.num_recomputed


def _wanted_of(request: Request) -> Extensions:
    """Return a request's extensions for an admission: the experts that are settled need not be
    reported again."""
    if request.experts is None:
        return request.extensions
    wanted = RoutedExpertsWanted(first=request.experts.num_known_of(request.num_settled))
    return tuple(wanted if type(e) is RoutedExpertsWanted else e for e in request.extensions)


def _noted(runs: tuple[VersionRun, ...]) -> tuple[VersionRun, ...]:
    """Return runs as a note has them."""
    if len(runs) <= MAX_NOTED_RUNS:
        return runs
    first, last = runs[: 1 - MAX_NOTED_RUNS], runs[1 - MAX_NOTED_RUNS :]
    return (VersionRun(None, sum(run.num_tokens for run in first)), *last)


def _unix_offset_s() -> float:
    """Return what to add to a monotonic time for the time of day."""
    return time.time() - time.monotonic()

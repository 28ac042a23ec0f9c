"""The room in a step's message and in its reply, beside its tokens and blocks."""

from typing import NamedTuple

from rpc_schema.pooling import MAX_POOLED_BYTES
from worker_client.scheduler.admissions import most_admission_bytes
from worker_client.scheduler.interface import SchedulerLimits
from worker_client.scheduler.request import Request
from worker_client.steps.step_checks import MAX_ADMITTED_BYTES, MAX_ADMITTED_TOKENS


class AdmissionSize(NamedTuple):
    """Space of an admission in a step's message."""

    num_tokens: int
    num_bytes: int
    """At most."""


class StepRoom:
    """Counts what the requests of one step put into its message, by admissions, and into its reply,
    by pooled outputs and by the experts of cached tokens."""

    __slots__ = (
        "_limits",
        "_num_admitted_bytes",
        "_num_admitted_tokens",
        "_num_cached_experts",
        "_num_output_bytes",
    )

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._num_admitted_tokens = 0
        self._num_admitted_bytes = 0
        self._num_output_bytes = 0
        """Bytes of the outputs that the step completes."""
        self._num_cached_experts = 0
        """Cached tokens whose experts the step's reply reports."""

    def size_of(self, request: Request) -> AdmissionSize:
        """Return the size of a request's admission, with all its tokens."""
        num_known = len(request.tokens)
        num_tokens = min(num_known + self._limits.num_lookahead_tokens, request.most_computed)
        groups = self._limits.block_groups
        num_bytes = most_admission_bytes(request, max(num_known, num_tokens), groups)
        return AdmissionSize(num_known, num_bytes)

    def fits_message(self, size: AdmissionSize) -> bool:
        """Return True if an admission of this size fits into the step's message."""
        return (
            self._num_admitted_tokens + size.num_tokens <= MAX_ADMITTED_TOKENS
            and self._num_admitted_bytes + size.num_bytes <= MAX_ADMITTED_BYTES
        )

    def fits_experts(self, request: Request, num_cached: int) -> bool:
        """Return True if the step's reply has room for the experts of a request's cached tokens, as
        far as they are not known. One request's always fit (Request.most_cached)."""
        count = _num_unknown_experts(request, num_cached)
        return not count or self._num_cached_experts + count <= self._limits.max_cached_experts

    def fits_output(self, request: Request, end: int) -> bool:
        """Return True if the step's reply has room for the output of a request that is computed up
        to its token `end`."""
        if end < request.num_tokens or not request.traits.output_bytes:
            return True
        return self._num_output_bytes + request.traits.output_bytes <= MAX_POOLED_BYTES

    def admit(self, request: Request, size: AdmissionSize) -> None:
        """Count the admission of a request, which has its computed tokens from the cache."""
        self._num_cached_experts += _num_unknown_experts(request, request.num_computed)
        self._num_admitted_tokens += size.num_tokens
        self._num_admitted_bytes += size.num_bytes

    def compute(self, request: Request, end: int) -> None:
        """Count the output of a request, if the step computes its last token, up to `end`."""
        if end == request.num_tokens:
            self._num_output_bytes += request.traits.output_bytes


def _num_unknown_experts(request: Request, num_cached: int) -> int:
    """Return how many cached tokens have experts that the step's reply is to report."""
    if request.experts is None:
        return 0
    return max(0, num_cached - request.experts.num_known_of(len(request.tokens) - 1))

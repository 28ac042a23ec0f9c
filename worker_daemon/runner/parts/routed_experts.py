"""Reports the experts of requests' tokens, as the step computes them. Those of cached tokens come
from the pages beside their KV, with the first step of a request: so a request that resumes, or
continues under another driver, reports all of its tokens again.

Shapes: B sequences of a step, S rows.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rpc_schema.extensions import extension_of
from rpc_schema.routed_experts import RoutedExperts, RoutedExpertsWanted
from rpc_schema.step import NewRequestData
from worker_daemon.contracts.arrays import Bools, Int32s, Int64s
from worker_daemon.device.pinned import upload
from worker_daemon.runner.parts.interface import PartContext, PositionLogits, Report, StepPart
from worker_daemon.runner.routed_experts import KeptExperts
from worker_daemon.runner.scheduled_step import ScheduledStep, invalid


class RoutedExpertsPart(StepPart):
    """Reports on the last stage; the others only check. The step's program keeps the experts of all
    tokens, whether a request asks for them or not, as later requests may share their blocks."""

    request_extension = RoutedExpertsWanted
    in_sampling = False
    checks_batches = True
    reports_forward = True

    @classmethod
    def serves(cls, context: PartContext) -> bool:
        return context.limits.routed_experts is not None

    def __init__(self, context: PartContext) -> None:
        assert context.limits.routed_experts is not None, "the part serves"
        self._kept: KeptExperts | None = context.kept_experts
        self._most = context.limits.routed_experts.max_positions
        self._req_ids = [""] * context.num_rows
        self._asks: Bools = np.zeros(context.num_rows, np.bool_)
        self._cached = np.zeros((context.num_rows, 2), np.int32)
        """[S, 2] first and end of the cached positions that each row is still to report."""

    def check_batch(self, slots: Int64s, new: Sequence[NewRequestData]) -> None:
        total = 0
        for request in new:
            wanted = extension_of(request.extensions, RoutedExpertsWanted)
            if wanted is not None:
                total += max(0, request.num_computed_tokens - wanted.first)
            if total > self._most:
                field = f"scheduled_new_reqs[{request.req_id}].num_computed_tokens"
                fix = (
                    f"admit requests that report the experts of {self._most} cached tokens at "
                    "most in a step"
                )
                raise invalid(field, request.num_computed_tokens, fix)

    def uses(self, extension: RoutedExpertsWanted) -> bool:
        """Return False: the part does nothing when rows are sampled."""
        return False

    def admit(
        self, requests: Sequence[NewRequestData], extensions: Sequence[RoutedExpertsWanted | None]
    ) -> None:
        for request, wanted in zip(requests, extensions, strict=True):
            slot, end = request.slot, request.num_computed_tokens
            self._req_ids[slot] = request.req_id
            self._asks[slot] = wanted is not None
            self._cached[slot] = (0, 0) if wanted is None else (min(wanted.first, end), end)

    def report_forward(
        self, hidden: Tensor, step: ScheduledStep, positions: PositionLogits
    ) -> Report | None:
        kept, asks = self._kept, self._asks[step.slots]
        if kept is None or not asks.any():
            return None
        slots, counts = step.slots[asks], step.num_tokens[asks]
        own = kept.of_step(*_tokens(step, asks, kept.device))
        firsts = torch.from_numpy(step.starts[asks])
        if step.corrections is not None:
            places = (np.cumsum(step.num_tokens) - step.num_tokens)[asks]
            firsts = kept.positions(upload(places.astype(np.int64), kept.device))
        if step.new_requests:
            begun = self._cached[slots]
            has_some = begun[:, 0] < begun[:, 1]
            if has_some.any():
                before = _positions(begun[has_some])
                self._cached[slots] = 0
                lengths = np.diff(begun[has_some]).ravel()
                rows = np.repeat(slots[has_some], lengths)
                cached = kept.of_cached(upload(rows, kept.device), upload(before, kept.device))
                own = torch.cat((cached, own))
                start = torch.from_numpy(begun[has_some, 0].astype(np.int32))
                firsts = torch.cat((start.to(firsts.device), firsts))
                slots = np.concatenate((slots[has_some], slots))
                counts = np.concatenate((lengths, counts))
        extension = RoutedExperts(
            shape=kept.shape,
            req_ids=tuple(self._req_ids[slot] for slot in slots.tolist()),
            counts=counts.astype("<i4").tobytes(),
        )
        return Report(extension, (firsts, own), per_row=False)


def _tokens(step: ScheduledStep, asks: Bools, device: torch.device) -> tuple[Tensor | None, int]:
    """Return the step's tokens of the sequences that ask, as KeptExperts.of_step takes them. asks:
    bool [B]."""
    if asks.all():
        return None, step.total_num_tokens
    tokens = np.flatnonzero(np.repeat(asks, step.num_tokens))
    return upload(tokens, device), tokens.size


def _positions(spans: Int32s) -> Int64s:
    """Return all positions of spans (first, end)."""
    return np.concatenate([np.arange(first, end, dtype=np.int64) for first, end in spans.tolist()])

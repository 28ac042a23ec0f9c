"""Experts that requests bring for their first tokens, in place of their routers' choice. A step
that computes such tokens brings their experts: no row holds any, and others skip the part.

Shapes: N tokens of a step with padding, S rows, T replayed tokens, L layers with experts, K experts
of a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rpc_schema.codec import Frame
from rpc_schema.errors import StateError
from rpc_schema.routed_experts import ReplayedExperts, ReplayExperts, replay_fault
from rpc_schema.step import NewRequestData
from worker_daemon.contracts.arrays import Int32s, Int64s
from worker_daemon.device.pinned import upload
from worker_daemon.runner.parts.interface import PartContext, StepPart, refuse_fault
from worker_daemon.runner.scheduled_step import ScheduledStep, StepLimits, invalid


@dataclass(frozen=True, slots=True)
class Replayed:
    """The experts that a step brings, in host memory."""

    req_ids: tuple[str, ...]
    counts: Int32s
    """[R] tokens of each request."""
    experts: NDArray[np.int16]
    """[T, L, K], one request after the other."""


class ReplayedExpertsPart(StepPart):
    """Gives the layers of this stage the experts of a step's tokens. Such steps run without graphs:
    most are prompts, and a second set of graphs would be captured for them."""

    request_extension = ReplayExperts
    step_extension = ReplayedExperts
    in_forward = True
    has_graphs = False
    in_sampling = False

    @classmethod
    def serves(cls, context: PartContext) -> bool:
        return context.limits.routed_experts is not None

    def __init__(self, context: PartContext) -> None:
        self._target = context.replay
        self._device = context.device
        self._req_ids = [""] * context.num_rows
        self._ends = np.zeros(context.num_rows, np.int32)
        """[S] number of positions that each row replays."""
        self._taken: tuple[Tensor, Tensor] | None = None
        """The current step's: indices of tokens, int64 [T], and their experts in the layers of this
        stage, int16 [T, L, K]."""

    def check(self, extension: ReplayExperts, request: NewRequestData, limits: StepLimits) -> None:
        assert limits.routed_experts is not None, "the part serves"
        refuse_fault(replay_fault(extension, limits.routed_experts, request.num_tokens), request)

    def check_step(
        self, extension: ReplayedExperts, frames: Sequence[Frame], limits: StepLimits
    ) -> Replayed:
        shape, (frame,), names = limits.routed_experts, frames, extension.req_ids
        assert shape is not None, "the part serves"
        if len(extension.counts) != 4 * len(names):
            value, fix = f"{len(extension.counts)} bytes", f"int32, {len(names)} of them"
            raise invalid("replayed_experts.counts", value, fix)
        counts = np.frombuffer(extension.counts, "<i4")
        if len(set(names)) != len(names) or counts.min() < 1:
            fix = "name each request once, with at least one token"
            raise invalid("replayed_experts.counts", counts[:8].tolist(), fix)
        num_values = int(counts.sum(dtype=np.int64)) * shape.num_layers * shape.top_k
        if len(frame) not in (num_values, 2 * num_values):
            fix = f"{num_values} experts as uint8 or uint16"
            raise invalid("replayed_experts", f"a frame of {len(frame)} bytes", fix)
        found = np.frombuffer(frame, "<u1" if len(frame) == num_values else "<u2")
        if int(found.max()) >= shape.num_experts:
            fix = f"experts from 0 to {shape.num_experts - 1}"
            raise invalid("replayed_experts", int(found.max()), fix)
        experts = found.astype(np.int16).reshape(-1, shape.num_layers, shape.top_k)
        return Replayed(names, counts, experts)

    def uses(self, extension: ReplayExperts) -> bool:
        return False  # uses_step tells in which steps

    def admit(
        self, requests: Sequence[NewRequestData], extensions: Sequence[ReplayExperts | None]
    ) -> None:
        for request, replay in zip(requests, extensions, strict=True):
            self._req_ids[request.slot] = request.req_id
            self._ends[request.slot] = 0 if replay is None else replay.num_positions

    def uses_step(self, step: ScheduledStep) -> bool:
        return bool((step.starts < self._ends[step.slots]).any())

    def fill(
        self, columns: Sequence[Int32s], step: ScheduledStep, step_values: Replayed | None
    ) -> None:
        """Raises StateError if the step lacks experts that it should bring."""
        self._taken = None
        left = np.minimum(self._ends[step.slots] - step.starts, step.num_tokens)
        replaying = left > 0
        names = [self._req_ids[slot] for slot in step.slots[replaying].tolist()]
        counts = left[replaying]
        order = _order(names, counts, step_values)
        assert step_values is not None, "_order has found them"
        if self._target is None:
            return
        ends = np.cumsum(step_values.counts)
        own = [np.arange(ends[at] - step_values.counts[at], ends[at]) for at in order]
        firsts = (np.cumsum(step.num_tokens) - step.num_tokens)[replaying]
        places = [
            np.arange(first, first + count, dtype=np.int64)
            for first, count in zip(firsts.tolist(), counts.tolist(), strict=True)
        ]
        experts = step_values.experts[np.concatenate(own), self._target.layers]
        self._taken = (
            upload(np.concatenate(places), self._device),
            upload(np.ascontiguousarray(experts), self._device),
        )

    def before_forward(self, hidden: Tensor, columns: Sequence[Tensor]) -> Tensor:
        if self._taken is not None and self._target is not None:
            (places, experts), self._taken = self._taken, None
            shape = (hidden.shape[0], *experts.shape[1:])
            replayed = torch.full(shape, -1, dtype=torch.int16, device=hidden.device)
            self._target.chosen.replayed = replayed.index_copy_(0, places, experts)
        return hidden

    def forward_ended(self) -> None:
        if self._target is not None:
            self._target.chosen.replayed = None


def _order(names: Sequence[str], counts: Int32s, given: Replayed | None) -> Int64s:
    """Return the places, among those of the step's values, of requests that compute so many
    replayed tokens. Raises StateError if one is missing."""
    known = () if given is None else given.req_ids
    at = {name: place for place, name in enumerate(known)}
    if given is not None and at.keys() >= set(names):
        order = np.array([at[name] for name in names], np.int64)
        if (given.counts[order] == counts).all():
            return order
    raise StateError(
        "the step computes tokens whose experts requests replay, and does not bring them",
        field="replayed_experts",
        value=list(known)[:8],
        fix=f"bring those of {dict(zip(names, counts.tolist(), strict=True))} tokens",
    )

"""Experts that requests bring for their first tokens, in place of their routers' choice: uploads,
which every rank has in host memory. A step copies those of its tokens; others skip the part.

Shapes: N tokens of a step with padding, S rows, T replayed tokens, P positions of a request, L
layers with experts, K experts of a token.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rpc_schema.errors import StateError
from rpc_schema.routed_experts import ReplayExperts, replay_fault
from rpc_schema.step import NewRequestData
from worker_daemon.contracts.arrays import Int32s
from worker_daemon.device.pinned import upload
from worker_daemon.runner.parts.interface import PartContext, StepPart, refuse_fault
from worker_daemon.runner.scheduled_step import ScheduledStep, StepLimits


class ReplayedExpertsPart(StepPart):
    """Gives the layers of this stage the experts of a step's tokens. Such steps run without graphs:
    most are prompts, and a second set of graphs would be captured for them."""

    request_extension = ReplayExperts
    in_forward = True
    has_graphs = False
    in_sampling = False

    @classmethod
    def serves(cls, context: PartContext) -> bool:
        return context.limits.routed_experts is not None

    def __init__(self, context: PartContext) -> None:
        self._target = context.replay
        self._device = context.device
        self._find_upload = context.find_upload
        self._rows: list[tuple[str, ReplayExperts] | None] = [None] * context.num_rows
        """Id and extension of each request that replays."""
        self._ends = np.zeros(context.num_rows, np.int32)
        """[S] number of positions that each row replays."""
        self._taken: tuple[Tensor, Tensor] | None = None
        """The current step's: indices of tokens, int64 [T], and their experts in the layers of this
        stage, int16 [T, L, K]."""

    def check(self, extension: ReplayExperts, request: NewRequestData, limits: StepLimits) -> None:
        assert limits.routed_experts is not None, "the part serves"
        refuse_fault(replay_fault(extension, limits.routed_experts, request.num_tokens), request)

    def uses(self, extension: ReplayExperts) -> bool:
        return False  # uses_step tells in which steps

    def admit(
        self, requests: Sequence[NewRequestData], extensions: Sequence[ReplayExperts | None]
    ) -> None:
        for request, replay in zip(requests, extensions, strict=True):
            self._rows[request.slot] = None if replay is None else (request.req_id, replay)
            self._ends[request.slot] = 0 if replay is None else replay.num_positions

    def uses_step(self, step: ScheduledStep) -> bool:
        return bool((step.starts < self._ends[step.slots]).any())

    def fill(self, columns: Sequence[Int32s], step: ScheduledStep, step_values: None) -> None:
        """Raises StateError if an upload is missing, or is not what the request says."""
        self._taken = None
        left = np.minimum(self._ends[step.slots] - step.starts, step.num_tokens)
        firsts = np.cumsum(step.num_tokens) - step.num_tokens
        found, places = [], []
        for index in np.flatnonzero(left > 0).tolist():
            start, count, first = (int(each[index]) for each in (step.starts, left, firsts))
            found.append(self._find(int(step.slots[index]), start, count))
            places.append(np.arange(first, first + count, dtype=np.int64))
        if self._target is not None:
            experts = np.concatenate([own[:, self._target.layers] for own in found])
            self._taken = (
                upload(np.concatenate(places), self._device),
                upload(experts.astype(np.int16), self._device),
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

    def _find(self, slot: int, start: int, count: int) -> NDArray[Any]:
        """Return a request's experts of some positions, [count, all layers, K], no number of which
        is larger than it says. Every rank reads those of all layers, so that all ranks decide
        alike."""
        row = self._rows[slot]
        assert row is not None, "the row has positions"
        req_id, replay = row
        shape = (replay.num_positions, replay.num_layers, replay.top_k)
        tensor = self._find_upload(replay.content_hash)
        if tensor is None:
            there = "there is none"
        elif (tensor.dtype, tensor.array.shape) != (replay.dtype, shape):
            there = f"it is {tensor.dtype} {list(tensor.array.shape)}"
        else:
            experts = tensor.array[start : start + count]
            if int(experts.max()) <= replay.max_expert:
                return experts
            there = f"it names expert {int(experts.max())}, and the request {replay.max_expert}"
        raise StateError(
            f"request {req_id} replays an upload of {replay.dtype} {list(shape)}: {there}",
            field="replay_experts.content_hash",
            value=replay.content_hash.hex(),
            fix="upload it to every rank before the request is admitted, and keep it there until "
            "the request ends",
        )

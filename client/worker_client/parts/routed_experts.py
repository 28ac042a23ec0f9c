"""The driver's side of routed experts: the reports of a request's tokens."""

from collections.abc import Mapping, Sequence

import numpy as np

from rpc_schema.codec import Frame
from rpc_schema.errors import BadFrameError
from rpc_schema.routed_experts import (
    ReplayExperts,
    RoutedExperts,
    RoutedExpertsWanted,
    replay_fault,
)
from worker_client.parts.interface import ExtensionFault, ModelBounds, RequestPart
from worker_client.scheduler_output import ExpertsChunk


class RoutedExpertsRequestPart(RequestPart):
    """The experts of a request's tokens: one or two chunks with each of its steps."""

    extension = RoutedExpertsWanted
    reply_extension = RoutedExperts
    reports_tokens = False
    may_jump = True

    def find_fault(
        self, extension: RoutedExpertsWanted, bounds: ModelBounds
    ) -> ExtensionFault | None:
        if bounds.keeps_experts:
            return None
        fix = "leave it out, or load the model with enable_return_routed_experts"
        return ExtensionFault("routed_experts", True, fix)

    def read_reply(
        self,
        extension: RoutedExperts,
        frames: Sequence[Frame],
        req_ids: Sequence[str],
        asked: Mapping[str, RoutedExpertsWanted],
    ) -> Mapping[str, tuple[ExpertsChunk, ...]]:
        names, shape = extension.req_ids, extension.shape
        counts = _int32s(extension.counts, len(names))
        firsts = _int32s(frames[0], len(names))
        if not asked.keys() >= set(names):
            raise BadFrameError("experts of requests that did not ask for them")
        if any(first < 0 or count < 1 for first, count in zip(firsts, counts, strict=True)):
            raise BadFrameError("experts of positions that do not exist")
        if len(frames[1]) != sum(counts) * shape.bytes_per_token:
            raise BadFrameError(f"the frame does not fit the experts of {sum(counts)} tokens")
        table = np.frombuffer(frames[1], shape.dtype).reshape(-1, shape.num_layers, shape.top_k)
        found: dict[str, tuple[ExpertsChunk, ...]] = {}
        end = 0
        for name, first, count in zip(names, firsts, counts, strict=True):
            end += count
            chunk = ExpertsChunk(first, table[end - count : end])
            found[name] = (*found.get(name, ()), chunk)
        return found


class ReplayExpertsRequestPart(RequestPart):
    """Experts that a request brings. They change the KV of its tokens."""

    extension = ReplayExperts

    def find_fault(self, extension: ReplayExperts, bounds: ModelBounds) -> ExtensionFault | None:
        if not bounds.keeps_experts:
            fix = "leave it out, or load the model with enable_return_routed_experts"
            return ExtensionFault("replay_experts", extension.num_positions, fix)
        if bounds.routed_experts is None:
            return None
        fault = replay_fault(extension, bounds.routed_experts, extension.num_positions)
        return None if fault is None else ExtensionFault(*fault)

    def prefix_salt(self, extension: ReplayExperts) -> bytes:
        return extension.content_hash


def _int32s(column: Frame, count: int) -> list[int]:
    if len(column) != 4 * count:
        raise BadFrameError(f"a column of {count} chunks has {len(column)} bytes")
    values: list[int] = np.frombuffer(column, "<i4").tolist()
    return values

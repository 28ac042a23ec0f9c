"""Brings the experts that requests replay into the steps that compute their tokens.

Shapes: P positions, L layers with experts, K experts of a token.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from numpy.typing import NDArray

from rpc_schema.extensions import extension_of
from rpc_schema.routed_experts import ReplayedExperts, ReplayExperts
from worker_client.driver_parts.interface import DriverPart, StepInFlight
from worker_client.group.adoption import AdoptedRequest
from worker_client.inputs.host_tensor import HostTensor
from worker_client.requests import GenerationRequest
from worker_client.scheduler_output import EncodedValues, SchedulerOutput, StepValues

EXPERTS_LOST = "the driver has not the experts that it replays; fix: send the request again"


@dataclass(frozen=True, slots=True)
class StepExperts(StepValues):
    """The experts of a step's tokens that requests replay."""

    experts: Mapping[str, NDArray[Any]]
    """[tokens, L, K] of each request's first tokens in the step."""

    def encode(self, slot_of: Mapping[str, int]) -> EncodedValues:
        """Return them all: most are of requests that do not sample in the step."""
        extension = ReplayedExperts(
            req_ids=tuple(self.experts),
            counts=array("i", map(len, self.experts.values())).tobytes(),
        )
        dtype = max((own.dtype for own in self.experts.values()), key=lambda each: each.itemsize)
        return extension, [b"".join(own.astype(dtype).tobytes() for own in self.experts.values())]


class ReplayingRequests(DriverPart):
    """Follows requests that replay experts up to the last token that does."""

    def __init__(self) -> None:
        self._experts: dict[str, NDArray[Any]] = {}
        """[P, L, K] of each unfinished request, uint8 or uint16, little-endian."""
        self._places: dict[str, int] = {}
        """Position of the next token of each request that is still to replay some."""
        self._planned: dict[str, int] = {}
        """Changes of these by the step that was planned last."""

    def queued(self, request: GenerationRequest) -> None:
        experts = request.replay_experts
        if experts is not None:
            self._experts[request.id] = experts.astype("<u1" if experts.max() < 256 else "<u2")

    def ended(self, req_id: str) -> None:
        self._experts.pop(req_id, None)
        self._places.pop(req_id, None)

    def adopt(
        self, requests: Sequence[AdoptedRequest], tensors: Iterable[HostTensor]
    ) -> Mapping[str, str]:
        """Refuse all that replay: even if their tokens are computed, they may be again."""
        replaying = (r for r in requests if extension_of(r.extensions, ReplayExperts) is not None)
        return {request.req_id: EXPERTS_LOST for request in replaying}

    def plan(self, output: SchedulerOutput) -> SchedulerOutput:
        self._planned = {}
        if not self._experts:
            return output
        places = dict(self._places)
        for new in output.scheduled_new_reqs:
            if new.req_id in self._experts:
                places[new.req_id] = new.num_computed_tokens
        found: dict[str, NDArray[Any]] = {}
        decodes = ((req_id, 1) for req_id in output.decode_req_ids)
        for req_id, count in chain(output.num_scheduled_tokens.items(), decodes):
            place = places.get(req_id)
            if place is not None:
                self._planned[req_id] = place + count
                own = self._experts[req_id][place : place + count]
                if len(own):
                    found[req_id] = own
        if not found:
            return output
        return replace(output, extensions=(*output.extensions, StepExperts(found)))

    def sent(self, flight: StepInFlight) -> None:
        for req_id, place in self._planned.items():
            if place < len(self._experts.get(req_id, ())):
                self._places[req_id] = place
            else:  # it has replayed all, or has ended
                self._places.pop(req_id, None)
        self._planned = {}

"""Values of optional features for a step (StepValues), translated from request ids to slots."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rpc_schema.codec import Frame
from rpc_schema.extensions import StepExtension
from worker_client.scheduler_output import StepFault, StepValues
from worker_client.steps.encoded_step import NONE_DEFERRED, bitmap_of


class StepSampling(NamedTuple):
    """The fields of a step that concern the sampling of its requests."""

    deferred: Mapping[int, str] = NONE_DEFERRED
    """Requests that are sampled later, by slot."""
    extensions: tuple[StepExtension, ...] = ()
    frames: Sequence[Frame] = ()

    @property
    def bitmap(self) -> bytes | None:
        """The deferred slots as a bitmap; None if there are none."""
        return named(self.deferred) if self.deferred else None


ALL_AT_ONCE = StepSampling()


def named(slots: Iterable[int]) -> bytes:
    """Return slots as a bitmap."""
    return bitmap_of(array("H", slots).tobytes())


def sampling_of(
    values: Sequence[StepValues], slot_of: Mapping[str, int]
) -> StepSampling | StepFault:
    """Return a step's fields about sampling, or the first fault of the values. slot_of: slots of
    the requests that it samples."""
    later = {slot_of[r]: r for each in values for r in each.deferred_req_ids if r in slot_of}
    now = {req_id: slot for req_id, slot in slot_of.items() if slot not in later}
    extensions: list[StepExtension] = []
    frames: list[Frame] = []
    for each in values:
        encoded = each.encode(now)
        if isinstance(encoded, StepFault):
            return encoded
        if encoded is not None:
            extensions.append(encoded[0])
            frames += encoded[1]
    return StepSampling(dict(sorted(later.items())), tuple(extensions), frames)

"""Values of optional features for a step (StepValues), translated from request ids to slots."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rpc_schema.codec import Frame
from rpc_schema.extensions import StepExtension
from worker_client.scheduler_output import StepValues
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


def sampling_of(values: Sequence[StepValues], slot_of: Mapping[str, int]) -> StepSampling:
    """Return a step's fields about sampling. slot_of: slots of the requests that it samples.

    Raises:
        InvalidSchedulerOutput: values are malformed.
    """
    later = {slot_of[r]: r for each in values for r in each.deferred_req_ids if r in slot_of}
    now = {req_id: slot for req_id, slot in slot_of.items() if slot not in later}
    parts = [part for each in values if (part := each.encode(now)) is not None]
    frames = [frame for _, own in parts for frame in own]
    return StepSampling(dict(sorted(later.items())), tuple(part[0] for part in parts), frames)

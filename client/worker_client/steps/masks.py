"""Grammar masks and deferred sampling of a step, translated from request ids to slots."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rpc_schema.codec import Frame
from rpc_schema.extensions import StepExtension
from rpc_schema.sampling import GrammarMasks
from worker_client.scheduler_output import SchedulerOutput
from worker_client.steps.encoded_step import NONE_DEFERRED, bitmap_of
from worker_client.steps.step_checks import check_mask, wrong_ids

Masks = Mapping[str, NDArray[np.int32]]

SAMPLED_WORD: Final = 97
"""One of so many words of a mask is looked at before masks are compared."""
MAX_COMPARED: Final = 8
"""Most masks with which a mask is compared."""


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


def sampling_of(output: SchedulerOutput, slot_of: Mapping[str, int]) -> StepSampling:
    """Return a step's fields about sampling. slot_of: slots of the requests that it samples.

    Raises:
        InvalidSchedulerOutput: masks are malformed, or differ in length.
    """
    later = {slot_of[r]: r for r in output.deferred_req_ids if r in slot_of}
    now = {req_id: slot for req_id, slot in slot_of.items() if slot not in later}
    return StepSampling(dict(sorted(later.items())), *encoded(output.masks, now))


def encoded(
    masks: Masks, slot_of: Mapping[str, int]
) -> tuple[tuple[StepExtension, ...], list[Frame]]:
    """Return the extension for masks and its frame, for the requests that have a slot here. Equal
    masks are sent once.

    Raises:
        InvalidSchedulerOutput: masks are malformed, or differ in length.
    """
    for req_id, mask in masks.items():
        check_mask(req_id, mask)
    if len({mask.shape for mask in masks.values()}) > 1:
        lengths = sorted({mask.size for mask in masks.values()})
        raise wrong_ids(f"masks differ in length: {lengths}", "masks", masks)
    rows = [(slot_of[req_id], mask) for req_id, mask in masks.items() if req_id in slot_of]
    if not rows:
        return (), []
    distinct, indices = _shared([mask for _, mask in rows])
    slots = array("H", [slot for slot, _ in rows])
    extension = GrammarMasks(slots=slots.tobytes(), indices=array("H", indices).tobytes())
    return (extension,), [b"".join(distinct)]


def _shared(masks: Sequence[NDArray[np.int32]]) -> tuple[list[bytes], list[int]]:
    """Return the distinct masks as bytes, and each mask's index among these.

    One object is one mask. Others are compared, which costs no more than to send them: requests
    with different outputs often allow the same tokens. Only masks that agree in a sample of their
    words are compared, and only a few of these, so some that are equal may not be found.
    """
    distinct: list[bytes] = []
    index_of: dict[int, int] = {}
    alike: dict[bytes, list[int]] = {}
    for mask in masks:
        if id(mask) in index_of:
            continue
        content = mask.astype("<i4", copy=False).tobytes()
        candidates = alike.setdefault(mask[::SAMPLED_WORD].tobytes(), [])
        for index in candidates[-MAX_COMPARED:]:
            if distinct[index] == content:
                break
        else:
            index = len(distinct)
            distinct.append(content)
            candidates.append(index)
        index_of[id(mask)] = index
    return distinct, [index_of[id(mask)] for mask in masks]

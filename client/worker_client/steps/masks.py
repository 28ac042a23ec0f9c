"""StepMasks: carries grammar masks (made in structured/mask_process.py) into a step, and says which
requests are sampled later."""

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rpc_schema.sampling import GrammarMasks
from worker_client.scheduler_output import EncodedValues, StepFault, StepValues
from worker_client.steps.step_checks import size_fault
from worker_client.steps.step_fault import wrong_ids

Mask = NDArray[np.int32]
Masks = Mapping[str, Mask | Sequence[Mask]]

SAMPLED_WORD: Final = 97
"""One of so many words of a mask is looked at before masks are compared."""
MAX_COMPARED: Final = 8
"""Most masks with which a mask is compared."""
_DTYPES: Final = (np.int32, np.uint32)


@dataclass(frozen=True, slots=True)
class StepMasks(StepValues):
    """Masks of a step that are known when it is sent, and the requests whose masks come later."""

    masks: Masks = field(default_factory=dict)
    """Tokens that requests may sample: int32 [ceil(vocab_size / 32)], bit 1 = allowed; for several
    samples of a request a sequence of such masks, or int32 [n, ceil(vocab_size / 32)], for its
    newest n in order. A mask that is the same object for several samples is sent once."""
    deferred: Collection[str] = ()

    @property
    def req_ids(self) -> Collection[str]:
        return self.masks.keys()

    @property
    def deferred_req_ids(self) -> Collection[str]:
        return self.deferred

    def find_fault(self) -> StepFault | None:
        fault = size_fault("deferred", self.deferred, Collection, "give a collection of ids")
        return fault or size_fault("masks", self.masks, Mapping, "give a mapping by request id")

    def encode(self, slot_of: Mapping[str, int]) -> EncodedValues | StepFault | None:
        """Equal masks are sent once. The fault: they are malformed, or differ in length."""
        fault = _masks_fault(self.masks)
        if fault is not None:
            return fault
        rows = [
            (slot_of[req_id], own)
            for req_id, mask in self.masks.items()
            if req_id in slot_of
            for own in _each(mask)
        ]
        if not rows:
            return None
        distinct, indices = _shared([mask for _, mask in rows])
        slots = array("H", [slot for slot, _ in rows])
        extension = GrammarMasks(slots=slots.tobytes(), indices=array("H", indices).tobytes())
        return extension, [b"".join(distinct)]


def _each(given: Mask | Sequence[Mask]) -> Sequence[Mask] | Mask:
    """Return the masks of a request's samples."""
    return (given,) if isinstance(given, np.ndarray) and given.ndim == 1 else given


def _masks_fault(masks: Masks) -> StepFault | None:
    """Check that each mask is a row of 32-bit words, or several, and that all have one length."""
    for req_id, given in masks.items():
        for mask in given if isinstance(given, list | tuple) else (given,):
            is_array = isinstance(mask, np.ndarray)
            dims = (1, 2) if mask is given else (1,)
            if not (is_array and mask.ndim in dims and mask.dtype in _DTYPES):
                value = f"{mask.dtype} {list(mask.shape)}" if is_array else mask
                fix = "give int32 [ceil(vocab_size / 32)], or one for each sample"
                return StepFault("its mask is malformed", "masks", value, fix, req_id)
    lengths = sorted({mask.shape[-1] for given in masks.values() for mask in _each(given)})
    if len(lengths) > 1:
        return wrong_ids(f"masks differ in length: {lengths}", "masks", masks)
    return None


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

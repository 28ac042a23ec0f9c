"""Grammar masks: the tokens that a structured output allows next. The driver computes them.

Shapes: R samples, S samples with a mask, M distinct masks, V vocabulary, W = ceil(V / 32) words per
mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from rpc_schema.codec import Frame
from rpc_schema.config import MAX_SAMPLES_PER_SEQ
from rpc_schema.errors import InvalidStepError
from rpc_schema.extensions import StepExtension
from rpc_schema.sampling import GrammarMasks
from rpc_schema.structured import StructuredOutput
from worker_daemon.contracts.arrays import Int32s, Int64s
from worker_daemon.device.pinned import upload, upload_rows
from worker_daemon.runner.parts.interface import PartContext, StepPart
from worker_daemon.runner.sample_rows import SampleRows
from worker_daemon.runner.scheduled_step import StepLimits

_INT32 = 4


@dataclass(frozen=True, slots=True)
class Masks:
    """Masks of a step, in host memory."""

    slots: Int64s
    """[S] the slot of each mask's sample"""
    samples: Int64s
    """[S] the sample that each mask is for (_named), ascending or not"""
    indices: Int64s
    """[S] each sample's mask"""
    words: Int32s
    """[M, W]"""


class GrammarMasksPart(StepPart):
    """Sets the logits of tokens that a row's mask does not allow to -inf. A row whose mask allows
    no token samples NO_TOKEN, and only its request fails.

    The masks of a row are those of its newest samples, with drafts too. A row with k drafts needs
    k + 1 masks, or none, each for the state after the drafts before it. Behind a draft that the
    grammar refuses there is no state: any mask will do, as none of these samples is gained.
    """

    request_extension = StructuredOutput
    step_extension = GrammarMasks

    def __init__(self, context: PartContext) -> None:
        self._sampling = context.sampling

    def uses(self, extension: StructuredOutput) -> bool:
        """Return False: the driver uses the grammar, and steps carry masks."""
        return False

    def check_step(
        self, extension: GrammarMasks, frames: Sequence[Frame], limits: StepLimits
    ) -> Masks:
        """Read int32 words [M, W]: bit t % 32 (lowest first) of word t // 32 allows token t.

        Raises:
            InvalidStepError: slots, indices and words do not fit each other.
        """
        slots, indices = _uint16s("slots", extension.slots), _uint16s("indices", extension.indices)
        num_newer = _num_newer(slots)
        most = limits.most_samples_per_seq
        if num_newer.max(initial=0) >= most:
            fix = "name each slot once" if most == 1 else f"name each slot at most {most} times"
            raise _invalid("masks.slots", slots.tolist()[:8], fix)
        if indices.size != slots.size:
            fix = f"{slots.size}: one for each of slots"
            raise _invalid("masks.indices", f"{indices.size} values", fix)
        (frame,) = frames
        num_words = num_mask_words(limits.vocab_size)
        num_masks, rest = divmod(len(frame), num_words * _INT32)
        if rest or num_masks > slots.size:
            fix = f"int32 [masks, {num_words}], with at most {slots.size} masks: one for each slot"
            raise _invalid("masks", f"a frame of {len(frame)} bytes", fix)
        highest = int(indices.max(initial=-1))
        if highest >= num_masks:
            fix = f"indices below {num_masks}, the number of masks in the frame"
            raise _invalid("masks.indices", highest, fix)
        words = np.frombuffer(frame, np.dtype("<i4")).reshape(num_masks, num_words)
        return Masks(slots, _named(slots, num_newer), indices, words)

    def check_drafts(self, step_values: Masks, slots: Int64s, drafts: Int32s) -> None:
        named, counts = np.unique(step_values.slots, return_counts=True)
        order = np.flatnonzero(drafts)
        places = order[np.isin(slots[order], named)]
        own = counts[np.searchsorted(named, slots[places])]
        wrong = np.flatnonzero(own != drafts[places] + 1)
        if wrong.size:
            at = places[wrong[0]]
            value = f"slot {int(slots[at])}: {int(own[wrong[0]])} masks"
            fix = f"{int(drafts[at]) + 1} for its {int(drafts[at])} drafts, or none"
            raise _invalid("masks.slots", value, fix)

    def adjust_logits(self, logits: Tensor, rows: SampleRows, step_values: Masks | None) -> Tensor:
        if step_values is None:
            return logits
        samples = _named(rows.slots_np, rows.num_newer)
        named = np.flatnonzero(np.isin(samples, step_values.samples))
        if not named.size:
            return logits
        order = np.argsort(step_values.samples)
        at = order[np.searchsorted(step_values.samples, samples[named], sorter=order)]
        masks, places = np.unique(step_values.indices[at], return_inverse=True)
        mask_of_row = np.full(samples.size, -1, np.int32)
        mask_of_row[named] = places
        words = upload_rows(step_values.words, masks, logits.device)
        return self._sampling.masked(logits, words, upload(mask_of_row, logits.device))

    def launch_sampling(self, logits: Tensor, rows: SampleRows) -> None:
        num_rows, vocab_size = logits.shape
        words = rows.slots.new_zeros(num_rows, num_mask_words(vocab_size))
        self._sampling.masked(logits, words, rows.slots)

    @staticmethod
    def heaviest_of_step(
        slots: Int64s, limits: StepLimits
    ) -> tuple[StepExtension, tuple[Frame, ...]]:
        """Return a separate mask for each sample."""
        words = np.full((slots.size, num_mask_words(limits.vocab_size)), -1, "<i4")
        indices = np.arange(slots.size, dtype="<u2").tobytes()
        extension = GrammarMasks(slots=slots.astype("<u2").tobytes(), indices=indices)
        return extension, (words.tobytes(),)

    @staticmethod
    def sampling_bytes(num_rows: int, vocab_size: int, itemsize: int) -> int:
        """Count a copy of the logits, and the words."""
        return num_rows * (vocab_size * itemsize + num_mask_words(vocab_size) * _INT32)


def _named(slots: Int64s, num_newer: Int64s) -> Int64s:
    """Return a number for each sample: of its slot, and of how many newer ones that has."""
    return slots * (MAX_SAMPLES_PER_SEQ + 1) + num_newer


def _num_newer(slots: Int64s) -> Int64s:
    """Return for each entry the number of later ones with the same slot."""
    order = np.argsort(slots, kind="stable")
    ordered = slots[order]
    result = np.empty_like(slots)
    ends = np.searchsorted(ordered, ordered, side="right")
    result[order] = ends - 1 - np.arange(slots.size)
    return result


def num_mask_words(vocab_size: int) -> int:
    """Return W, the words per mask."""
    return -(-vocab_size // 32)


def _uint16s(field: str, raw: bytes) -> Int64s:
    if len(raw) % 2:
        fix = "send little-endian uint16 values"
        raise _invalid(f"masks.{field}", f"{len(raw)} bytes", fix)
    return np.frombuffer(raw, np.dtype("<u2")).astype(np.int64)


def _invalid(field: str, value: Any, fix: str) -> InvalidStepError:
    return InvalidStepError("the masks are refused", field=field, value=value, fix=fix)

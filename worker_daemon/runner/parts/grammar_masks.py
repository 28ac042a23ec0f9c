"""Grammar masks: the tokens that a structured output allows next. The driver computes them.

Shapes: R rows that sample, M masks, V vocabulary, W = ceil(V / 32) words per mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from rpc_schema.codec import Frame
from rpc_schema.extensions import StepExtension
from rpc_schema.sampling import GrammarMasks
from rpc_schema.structured import StructuredOutput
from worker_daemon.contracts.arrays import Int32s, Int64s
from worker_daemon.device.pinned import upload, upload_rows
from worker_daemon.errors import InvalidStepError
from worker_daemon.runner.parts.interface import PartContext, StepPart
from worker_daemon.runner.sample_rows import SampleRows
from worker_daemon.runner.scheduled_step import StepLimits

_INT32 = 4


@dataclass(frozen=True, slots=True)
class Masks:
    """Masks in host memory, aligned."""

    slots: Int64s
    """[M], ascending or not"""
    words: Int32s
    """[M, W]"""


class GrammarMasksPart(StepPart):
    """Sets the logits of tokens that a row's mask does not allow to -inf. A row whose mask allows
    no token samples NO_TOKEN, and only its request fails."""

    request_extension = StructuredOutput
    step_extension = GrammarMasks

    def __init__(self, context: PartContext) -> None:
        self._sampling = context.sampling

    def uses(self, extension: StructuredOutput) -> bool:
        """Return False: the driver uses the grammar, and steps carry masks."""
        return False

    def judge_step(
        self, extension: GrammarMasks, frames: Sequence[Frame], limits: StepLimits
    ) -> Masks:
        """Read int32 words [M, W]: bit t % 32 (lowest first) of word t // 32 allows token t.

        Raises:
            InvalidStepError: slots and words do not fit each other.
        """
        raw_slots = extension.slots
        if len(raw_slots) % 2:
            fix = "send little-endian uint16 values"
            raise _invalid("masks.slots", f"{len(raw_slots)} bytes", fix)
        slots = np.frombuffer(raw_slots, np.dtype("<u2")).astype(np.int64)
        num_words = num_mask_words(limits.vocab_size)
        if np.unique(slots).size < slots.size:
            raise _invalid("masks.slots", slots.tolist()[:8], "name each slot once")
        (words,) = frames
        if len(words) != slots.size * num_words * _INT32:
            fix = f"{slots.size * num_words * _INT32}: int32 [{slots.size}, {num_words}]"
            raise _invalid("masks", f"a frame of {len(words)} bytes", fix)
        return Masks(slots, np.frombuffer(words, np.dtype("<i4")).reshape(slots.size, num_words))

    def adjust_logits(self, logits: Tensor, rows: SampleRows, brought: Masks | None) -> Tensor:
        if brought is None:
            return logits
        named = np.flatnonzero(np.isin(rows.slots_np, brought.slots))
        if not named.size:
            return logits
        order = np.argsort(brought.slots)
        masks = order[np.searchsorted(brought.slots, rows.slots_np[named], sorter=order)]
        mask_of_row = np.full(rows.slots_np.size, -1, np.int32)
        mask_of_row[named] = np.arange(named.size)
        words = upload_rows(brought.words, masks, logits.device)
        return self._sampling.masked(logits, words, upload(mask_of_row, logits.device))

    @staticmethod
    def heaviest_of_step(
        slots: Int64s, limits: StepLimits
    ) -> tuple[StepExtension, tuple[Frame, ...]]:
        words = np.full((slots.size, num_mask_words(limits.vocab_size)), -1, "<i4")
        return GrammarMasks(slots=slots.astype("<u2").tobytes()), (words.tobytes(),)

    @staticmethod
    def sampling_bytes(num_rows: int, vocab_size: int, itemsize: int) -> int:
        """Count a copy of the logits, and the words."""
        return num_rows * (vocab_size * itemsize + num_mask_words(vocab_size) * _INT32)


def num_mask_words(vocab_size: int) -> int:
    """Return W, the words per mask."""
    return -(-vocab_size // 32)


def _invalid(field: str, value: Any, fix: str) -> InvalidStepError:
    return InvalidStepError("the masks are refused", field=field, value=value, fix=fix)

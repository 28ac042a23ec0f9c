"""Grammar masks: the tokens that a structured output allows next. The driver's matcher computes
them.

Shapes: R rows that sample, M masks, V vocabulary, W = ceil(V / 32) words per mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rpc_schema.codec import Frame
from rpc_schema.sampling import GrammarMasks
from worker_daemon.contracts.arrays import Int64s
from worker_daemon.device.pinned import upload
from worker_daemon.errors import InvalidStepError
from worker_daemon.runner.parts.interface import StepPart
from worker_daemon.runner.sample_rows import SampleRows
from worker_daemon.runner.scheduled_step import StepLimits


@dataclass(frozen=True, slots=True)
class Masks:
    """Host memory; aligned."""

    slots: Int64s
    """[M], ascending or not"""
    allowed: npt.NDArray[np.bool_]
    """[M, V]"""

    def for_slots(self, slots: Int64s, device: torch.device) -> Tensor | None:
        """Return bool [R, V] on device for rows with these slots (all True without a mask); None
        where nothing is masked."""
        named = np.isin(self.slots, slots)
        if not named.any():
            return None
        allowed = np.ones((slots.size, self.allowed.shape[1]), np.bool_)
        order = np.argsort(slots)
        rows = order[np.searchsorted(slots, self.slots[named], sorter=order)]
        allowed[rows] = self.allowed[named]
        return upload(allowed, device)


class GrammarMasksPart(StepPart):
    """Sets the logits of tokens that a row's mask does not allow to -inf."""

    step_extension = GrammarMasks

    def judge_step(
        self, extension: GrammarMasks, frames: Sequence[Frame], limits: StepLimits
    ) -> Masks:
        """Unpack int32 words [M, W]: bit t % 32 (lowest first) of word t // 32 allows token t.

        Raises:
            InvalidStepError: slots and words do not match, or a mask allows no token.
        """
        raw_slots, vocab_size = extension.slots, limits.vocab_size
        if len(raw_slots) % 2:
            fix = "send little-endian uint16 values"
            raise _invalid("masks.slots", f"{len(raw_slots)} bytes", fix)
        slots = np.frombuffer(raw_slots, np.dtype("<u2")).astype(np.int64)
        num_words = -(-vocab_size // 32)
        if np.unique(slots).size < slots.size:
            raise _invalid("masks.slots", slots.tolist()[:8], "name each slot once")
        (words,) = frames
        if len(words) != slots.size * num_words * 4:
            fix = f"{slots.size * num_words * 4}: int32 [{slots.size}, {num_words}]"
            raise _invalid("masks", f"a frame of {len(words)} bytes", fix)
        raw = np.frombuffer(words, np.uint8).reshape(slots.size, num_words * 4)
        allowed = np.unpackbits(raw, axis=1, count=vocab_size, bitorder="little").view(np.bool_)
        empty = np.flatnonzero(~allowed.any(axis=1))
        if empty.size:
            fix = "allow at least one token"
            raise _invalid("masks", f"slot {slots[empty[0]]}: no bit set", fix)
        return Masks(slots, allowed)

    def adjust_logits(self, logits: Tensor, rows: SampleRows, brought: Masks | None) -> Tensor:
        allowed = None if brought is None else brought.for_slots(rows.slots_np, logits.device)
        return logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)


def _invalid(field: str, value: object, fix: str) -> InvalidStepError:
    return InvalidStepError("the masks are refused", field=field, value=value, fix=fix)

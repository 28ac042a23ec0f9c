"""Grammar masks as they come from the driver: which tokens a structured output allows next. Knows
no grammar.

Shapes: R rows that sample, M masks, V vocabulary, W = ceil(V / 32) words a mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rpc_schema.codec import Frame
from worker_daemon.device.pinned import upload
from worker_daemon.errors import InvalidStepError
from worker_daemon.runner.scheduled_step import Int64s


@dataclass(frozen=True, slots=True)
class GrammarMasks:
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


def apply_masks(logits: Tensor, allowed: Tensor | None) -> Tensor:
    """Return logits [R, V] with -inf where allowed bool [R, V] is False."""
    return logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)


def read_masks(mask_slots: bytes, arrays: Sequence[Frame], vocab_size: int) -> GrammarMasks:
    """Unpack int32 words [M, W]: bit t % 32 (lowest first) of word t // 32 allows token t.

    Raises:
        InvalidStepError: slots and words do not fit each other, or a mask allows no token at all.
    """
    if len(mask_slots) % 2:
        raise _invalid("mask_slots", f"{len(mask_slots)} bytes", "send little-endian uint16 values")
    slots = np.frombuffer(mask_slots, np.dtype("<u2")).astype(np.int64)
    num_words = -(-vocab_size // 32)
    if len(arrays) != (1 if slots.size else 0) or (
        arrays and len(arrays[0]) != slots.size * num_words * 4
    ):
        sizes = [len(array) for array in arrays]
        raise _invalid(
            "masks",
            f"frames of {sizes} bytes",
            f"one of {slots.size * num_words * 4}: int32 [{slots.size}, {num_words}]",
        )
    raw = np.frombuffer(arrays[0] if arrays else b"", np.uint8).reshape(slots.size, num_words * 4)
    allowed = np.unpackbits(raw, axis=1, count=vocab_size, bitorder="little").view(np.bool_)
    empty = np.flatnonzero(~allowed.any(axis=1))
    if empty.size:
        raise _invalid("masks", f"slot {slots[empty[0]]}: no bit set", "allow at least one token")
    return GrammarMasks(slots, allowed)


def _invalid(field: str, value: object, fix: str) -> InvalidStepError:
    return InvalidStepError("the masks are refused", field=field, value=value, fix=fix)

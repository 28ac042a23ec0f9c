"""Slots as a reply names them: a bit each, an eighth of a byte where a number takes two. Knows no
torch."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int64s: TypeAlias = NDArray[np.int64]


class SlotBitmaps:
    """Slots as a reply names them. Owned by the stage's exit; the last answer is kept, since steady
    decodes have the same array of slots again and again."""

    def __init__(self) -> None:
        self._last: tuple[Int64s, bytes] = (np.zeros(0, np.int64), b"")

    def of(self, slots: Int64s) -> bytes:
        """Return the bitmap of slots [R], ascending."""
        if slots is not self._last[0]:
            self._last = (slots, slot_bitmap(slots))
        return self._last[1]


def slot_bitmap(slots: Int64s) -> bytes:
    """Return ModelRunnerOutput.slots of slots [R], ascending."""
    if not slots.size:
        return b""
    bits = np.zeros(int(slots[-1]) + 1, np.bool_)
    bits[slots] = True
    return np.packbits(bits, bitorder="little").tobytes()

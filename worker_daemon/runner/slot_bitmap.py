"""Bitmaps of slots, as in messages: one bit per slot, where a number would take two bytes."""

import numpy as np

from worker_daemon.contracts.arrays import Int64s


def slot_bitmap(slots: Int64s) -> bytes:
    """Return the bitmap ModelRunnerOutput.slots for slots [R], ascending."""
    if not slots.size:
        return b""
    bits = np.zeros(int(slots[-1]) + 1, np.bool_)
    bits[slots] = True
    return np.packbits(bits, bitorder="little").tobytes()


def read_bitmap(bitmap: bytes) -> Int64s:
    """Return the slots of a bitmap, ascending."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little"))

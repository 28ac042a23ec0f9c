"""Packs the slots of a reply into a bitmap: one bit per slot instead of two bytes."""

import numpy as np

from worker_daemon.contracts.arrays import Int64s


def slot_bitmap(slots: Int64s) -> bytes:
    """Return the bitmap ModelRunnerOutput.slots for slots [R], ascending."""
    if not slots.size:
        return b""
    bits = np.zeros(int(slots[-1]) + 1, np.bool_)
    bits[slots] = True
    return np.packbits(bits, bitorder="little").tobytes()

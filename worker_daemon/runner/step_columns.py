"""Reads the columns of a step message: raw little-endian bytes."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rpc_schema.codec import Frame
from worker_daemon.contracts.arrays import Int32s, Int64s
from worker_daemon.runner.scheduled_step import invalid

INT32: Final = np.dtype("<i4")


def read_column(field: str, raw: Frame, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return a message's column. Raises InvalidStepError: it ends in part of a value."""
    if len(raw) % dtype.itemsize:
        raise invalid(field, f"{len(raw)} bytes", f"send little-endian {dtype.name} values")
    return np.frombuffer(raw, dtype)


def read_pairs(field: str, raw: bytes, slots: Int64s) -> tuple[Int32s, Int32s, Int64s]:
    """Read pairs (slot, number) for some of the scheduled slots [B]. Return the columns, and each
    slot's index among the scheduled ones. Raises InvalidStepError."""
    pairs = read_column(field, raw, INT32)
    if pairs.size % 2:
        raise invalid(field, f"{pairs.size} values", "send pairs (slot, number)")
    named, numbers = pairs.reshape(-1, 2).T
    positions = np.searchsorted(slots, named)
    if not ((positions < slots.size).all() and (slots[positions] == named).all()):
        raise invalid(field, named.tolist()[:8], "name scheduled slots only")
    check_unique(field, named)
    return named, numbers, positions


def check_unique(field: str, slots: Int64s | Int32s) -> None:
    """Check that a column names no slot twice. Raises InvalidStepError."""
    values, counts = np.unique(slots, return_counts=True)
    if values.size < slots.size:
        raise invalid(field, int(values[int(counts.argmax())]), "name each slot once")

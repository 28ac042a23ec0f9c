"""Reads the columns of blocks that a step moves between the KV cache and a connector's other
place."""

import numpy as np

from rpc_schema.kv_cache import NULL_BLOCK
from worker_daemon.contracts.arrays import Int32s
from worker_daemon.runner.block_contents import Hashes
from worker_daemon.runner.scheduled_step import StepLimits, invalid
from worker_daemon.runner.step_columns import INT32, read_column


def read_blocks(field: str, raw: bytes, limits: StepLimits) -> Int32s:
    """Return a column of block ids [n]. Raises InvalidStepError: one does not exist."""
    block_ids = read_column(f"extensions.{field}", raw, INT32)
    check_range(field, block_ids, NULL_BLOCK + 1, limits.num_blocks - 1)
    return block_ids.astype(np.int32)  # the message's bytes cannot be written to


def check_range(field: str, values: Int32s, least: int, most: int) -> None:
    """Raise InvalidStepError if a value is outside these bounds."""
    outside = (values < least) | (values > most)
    if outside.any():
        value = int(values[int(outside.argmax())])
        raise invalid(f"extensions.{field}", value, f"{least} to {most}")


def check_unique(field: str, values: Int32s) -> None:
    """Raise InvalidStepError if a value is there twice."""
    found, counts = np.unique(values, return_counts=True)
    if found.size < values.size:
        value = int(found[int(counts.argmax())])
        raise invalid(f"extensions.{field}", value, "name it once in a step")


def read_hashes(field: str, raw: bytes, count: int, width: int) -> Hashes:
    """Return a column of hashes [count, width]. Raises InvalidStepError: it has another length."""
    if len(raw) != count * width:
        fix = f"{width} for each of {count} blocks"
        raise invalid(f"extensions.{field}", f"{len(raw)} bytes", fix)
    return np.frombuffer(raw, np.uint8).reshape(count, width)

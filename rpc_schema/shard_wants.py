"""Long values in a rendezvous, and the boxes of tensors that a worker needs, as it writes them
there for a trainer's ranks."""

import zlib
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from rpc_schema.shard_plan import Bounds, SentTensor

MAX_PART_BYTES: Final = 60_000
"""Less than the rendezvous takes in a value."""
MAX_PARTS: Final = 256
MAX_DECODED_BYTES: Final = 256 << 20


class LongValueError(Exception):
    """A long value does not fit into a rendezvous, or is not what it should be."""


def put_long(write: Callable[[str, bytes], None], key: str, value: bytes) -> None:
    """Write a value of any length, compressed, in parts: KEY.1 and so on, then KEY, their number.
    Raises LongValueError: it is too long."""
    raw = zlib.compress(value, 1)
    parts = [raw[at : at + MAX_PART_BYTES] for at in range(0, len(raw), MAX_PART_BYTES)]
    if len(parts) > MAX_PARTS:
        raise LongValueError(f"{len(value)} bytes for {key}: send fewer tensors in a request")
    for number, part in enumerate(parts, 1):
        write(f"{key}.{number}", part)
    write(key, str(len(parts)).encode())


def get_long(read: Callable[[str], bytes], key: str) -> bytes:
    """Return a value of put_long. read: waits for a key. Raises LongValueError, and what `read`
    raises."""
    count = read(key)
    if not count.isdigit() or not 1 <= int(count) <= MAX_PARTS:
        raise LongValueError(f"{key} is {count[:16]!r}")
    raw = b"".join(read(name) for name in long_keys(key, int(count))[1:])
    inflate = zlib.decompressobj()
    try:
        value = inflate.decompress(raw, MAX_DECODED_BYTES)
    except zlib.error as error:
        raise LongValueError(f"{key} is damaged: {error}") from error
    if not inflate.eof:
        raise LongValueError(f"{key} is too long")
    return value


def long_keys(key: str, count: int) -> list[str]:
    """Return the keys under which put_long writes a value of so many parts."""
    return [key, *(f"{key}.{number}" for number in range(1, count + 1))]


def encode_wants(wants: Sequence[Sequence[Bounds]]) -> bytes:
    """Return a worker's boxes of each name of a request, in the order in which the names first
    occur."""
    return msgspec.msgpack.encode(wants)


def decode_wants(raw: bytes, tensors: Sequence[SentTensor]) -> dict[str, tuple[Bounds, ...]]:
    """Return what encode_wants was given, by name. Raises LongValueError: it is not for these
    tensors."""
    ranks = {tensor.name: len(tensor.shape) for tensor in tensors}
    try:
        wants = msgspec.msgpack.decode(raw, type=tuple[tuple[Bounds, ...], ...])
    except msgspec.DecodeError as error:
        raise LongValueError(f"a worker's wants are damaged: {error}") from error
    found = dict(zip(ranks, wants, strict=False))
    if len(wants) != len(ranks) or any(
        len(box) != ranks[name] for name, boxes in found.items() for box in boxes
    ):
        raise LongValueError("a worker's wants are for other tensors")
    return found


def encode_tensors(tensors: Sequence[SentTensor]) -> bytes:
    """Return the tensors that a trainer's rank has, for the one that asks for the update."""
    return msgspec.msgpack.encode(tensors)


def decode_tensors(raw: bytes) -> list[SentTensor]:
    """Return what encode_tensors was given. Raises LongValueError."""
    try:
        return msgspec.msgpack.decode(raw, type=list[SentTensor])
    except msgspec.DecodeError as error:
        raise LongValueError(f"the tensors of a trainer's rank are damaged: {error}") from error

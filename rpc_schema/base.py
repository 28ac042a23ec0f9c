"""The Struct bases and bounded field types of all messages. Size and GC flags are set only here."""

from typing import Annotated, Final, Generic, TypeVar

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""A non-negative 31-bit number: tokens, blocks, rows, ranks."""

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]

Unsigned = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A non-negative 63-bit number: epochs, links, seqs, bytes."""

Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]

Name = Annotated[str, Meta(min_length=1, max_length=256)]
"""A request id, layer name or architecture."""

Text = Annotated[str, Meta(max_length=65536)]
"""A message or traceback for people to read; never parsed."""

HASH_BYTES: Final = 32

ContentHash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
"""Name of an uploaded tensor: see UploadChunk."""

Uid = Annotated[bytes, Meta(min_length=16, max_length=16)]
"""128 random bits: a worker's or a driver's identity for the life of its process."""

RawInt32 = Annotated[bytes, Meta(max_length=4 << 20)]
"""Little-endian int32 values."""

RawUInt16 = Annotated[bytes, Meta(max_length=2 << 20)]
"""Little-endian uint16 values."""

RawUInt8 = Annotated[bytes, Meta(max_length=1 << 20)]
"""uint8 values."""


class Value(
    msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False, kw_only=True
):
    """A part of a message: immutable, positional on the wire, unknown fields refused."""


class Extension(Value, frozen=True, kw_only=True):
    """Part of a message for an optional feature: see rpc_schema/extensions.py."""

    @property
    def uploads(self) -> tuple[bytes, ...]:
        """Content hashes of the uploads that the extension names."""
        return ()


class FramedExtension(Extension, frozen=True, kw_only=True):
    """Extension of a step or a reply, which may have array frames."""

    @property
    def num_frames(self) -> int:
        """Number of the message's frames that belong to it."""
        return 0


ReplyT = TypeVar("ReplyT")


class Answered(Generic[ReplyT]):
    """A request that is answered with a ReplyT, or refused. It has no fields: type checkers use it,
    and rpc_schema/operations.py must agree with it."""

    __slots__ = ()


class ControlRequest(Value, Answered[ReplyT], frozen=True, kw_only=True):
    """A request on the control socket. `call` is the caller's correlation id and is returned in the
    reply."""

    call: Unsigned


class ControlReply(Value, frozen=True, kw_only=True):
    """The answer to one ControlRequest."""

    call: Unsigned


class StepRequest(Value, Answered[ReplyT], frozen=True, kw_only=True):
    """A request that touches device state, run in seq order.

    epoch is the fencing token that attach granted, link the generation of the communicators (0:
    none), and seq increases by one with each request of the epoch, starting at 1.
    """

    epoch: Unsigned
    link: Unsigned
    seq: Unsigned


class StepReply(Value, frozen=True, kw_only=True):
    """The outcome of the StepRequest with this (epoch, seq), from this rank."""

    epoch: Unsigned
    seq: Unsigned
    rank: Count


class Event(Value, frozen=True, kw_only=True):
    """A message that a daemon publishes on its events socket."""

    worker_uid: Uid
    rank: Count

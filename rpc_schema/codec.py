"""Encoding and decoding of messages, with every bound checked before a byte is decoded.

A message is one msgpack frame, then raw little-endian array frames. Each direction has one closed
union and one decoder.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar, Union, get_args

import msgspec

from rpc_schema import lifecycle as lc
from rpc_schema import trace
from rpc_schema.base import Answered, ControlReply, StepReply, Unsigned
from rpc_schema.error_replies import ControlErrorReply, ErrorReply
from rpc_schema.errors import BadFrameError, TooLargeError
from rpc_schema.operations import (
    CONTROL_OPERATIONS,
    STEP_OPERATIONS,
    ControlOperation,
    StepOperation,
)
from rpc_schema.operations import ControlMessage as ControlMessage
from rpc_schema.operations import StepMessage as StepMessage

MAX_FRAMES = 16
MAX_STEP_BYTES = 16 << 20
MAX_CONTROL_BYTES = 1 << 20
CURVE_BYTES = 33
"""Growth of an encrypted frame (ZeroMQ RFC 26: name 8, nonce 8, flags 1, code 16). A receiver's
bound applies to the encrypted frame."""

MessageT = TypeVar("MessageT")
Frame: TypeAlias = bytes | memoryview | bytearray
FrameT = TypeVar("FrameT", bound=bytes | memoryview | bytearray)

StepReplyMessage: TypeAlias = StepReply
ControlReplyMessage: TypeAlias = ControlReply | lc.HelloReply
EventMessage: TypeAlias = (
    lc.Heartbeat | lc.StateChanged | lc.Hung | lc.Slow | trace.DriverStepsWanted
)


class StepHead(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Common beginning of step requests. tag: its type."""

    tag: int
    epoch: Unsigned
    link: Unsigned
    seq: Unsigned


def _unique(
    rows: Mapping[type[Any], StepOperation[Any] | ControlOperation[Any]],
) -> tuple[type[Any], ...]:
    return tuple(dict.fromkeys(row.reply for row in rows.values()))


def _decoder(messages: tuple[type[Any], ...]) -> "msgspec.msgpack.Decoder[Any]":
    """Return the decoder of one closed union. The union comes from the table, so a request without
    a row is unknown."""
    return msgspec.msgpack.Decoder(Union[messages])  # noqa: UP007  # made while running


STEP_REQUESTS: Final = tuple(STEP_OPERATIONS)
STEP_REPLIES: Final[tuple[type[Any], ...]] = (ErrorReply, lc.Attached, *_unique(STEP_OPERATIONS))
CONTROL_REQUESTS: Final = tuple(CONTROL_OPERATIONS)
CONTROL_REPLIES: Final[tuple[type[Any], ...]] = (ControlErrorReply, *_unique(CONTROL_OPERATIONS))
EVENTS: Final = get_args(EventMessage)
"""Messages of each direction."""

_ENCODER = msgspec.msgpack.Encoder()
_STEP: msgspec.msgpack.Decoder[StepMessage] = _decoder(STEP_REQUESTS)
_STEP_HEAD: msgspec.msgpack.Decoder[StepHead] = msgspec.msgpack.Decoder(StepHead)
_STEP_REPLY: msgspec.msgpack.Decoder[StepReplyMessage] = _decoder(STEP_REPLIES)
_CONTROL: msgspec.msgpack.Decoder[ControlMessage] = _decoder(CONTROL_REQUESTS)
_CONTROL_REPLY: msgspec.msgpack.Decoder[ControlReplyMessage] = _decoder(CONTROL_REPLIES)
_EVENT: msgspec.msgpack.Decoder[EventMessage] = msgspec.msgpack.Decoder(EventMessage)


def encode_step(
    message: StepMessage | StepReplyMessage, arrays: Sequence[Frame] = ()
) -> list[Frame]:
    """Encode a step request or reply and its array frames.

    Raises:
        TooLargeError: over MAX_FRAMES frames or MAX_STEP_BYTES bytes.
    """
    frames: list[Frame] = [_ENCODER.encode(message), *arrays]
    _check_bounds(frames, MAX_STEP_BYTES)
    return frames


def encode_control(message: Answered[Any] | ControlReplyMessage | EventMessage) -> bytes:
    """Encode a control request, its reply, or an event: always one frame.

    Raises:
        TooLargeError: over MAX_CONTROL_BYTES bytes.
    """
    frame = _ENCODER.encode(message)
    _check_bounds([frame], MAX_CONTROL_BYTES)
    return frame


def decode_step(frames: Sequence[Frame]) -> StepMessage:
    """Decode frame 0 of a step request; the rest are its arrays.

    Raises:
        BadFrameError: it does not decode into a known request with fields in their bounds.
        TooLargeError: over MAX_FRAMES frames or MAX_STEP_BYTES bytes.
    """
    return _decode(_STEP, frames, MAX_STEP_BYTES)


def decode_step_head(frames: Sequence[Frame]) -> StepHead:
    """Decode the beginning of a step request that does not decode as a whole, or has too many
    frames.

    Raises:
        BadFrameError: frame 0 is not an array with this beginning.
    """
    return _decode(_STEP_HEAD, frames, None)


def mark_replayed(frames: Sequence[Frame]) -> list[Frame]:
    """Return a step reply's frames, unchanged, after an empty frame that marks a replay. No message
    begins with an empty frame."""
    return [b"", *frames]


def split_replayed(frames: Sequence[FrameT]) -> tuple[bool, Sequence[FrameT]]:
    """Return True if a step reply was marked as a replay, and its own frames."""
    if len(frames) > 1 and not frames[0]:
        return True, frames[1:]
    return False, frames


def decode_step_reply(frames: Sequence[Frame]) -> StepReplyMessage:
    """Decode frame 0 of a step reply. Raises as decode_step does."""
    return _decode(_STEP_REPLY, frames, MAX_STEP_BYTES)


def decode_control(frames: Sequence[Frame]) -> ControlMessage:
    """Decode a control request. Raises as decode_step does, with MAX_CONTROL_BYTES."""
    return _decode(_CONTROL, frames, MAX_CONTROL_BYTES)


def decode_control_reply(frames: Sequence[Frame]) -> ControlReplyMessage:
    """Decode a control reply. Raises as decode_control does."""
    return _decode(_CONTROL_REPLY, frames, MAX_CONTROL_BYTES)


def decode_event(frames: Sequence[Frame]) -> EventMessage:
    """Decode an event. Raises as decode_control does."""
    return _decode(_EVENT, frames, MAX_CONTROL_BYTES)


def _decode(
    decoder: msgspec.msgpack.Decoder[MessageT], frames: Sequence[Frame], max_bytes: int | None
) -> MessageT:
    """Decode frame 0. max_bytes: of all frames; None checks no bounds."""
    if max_bytes is not None:
        _check_bounds(frames, max_bytes)
    try:
        return decoder.decode(frames[0])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        problem = f"frame 0 ({len(frames[0])} bytes) is not a known message: {error}"
        raise BadFrameError(problem) from None


def _check_bounds(frames: Sequence[Frame], max_bytes: int) -> None:
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise TooLargeError(f"{len(frames)} frames; a message has 1 to {MAX_FRAMES}")
    size = len(frames[0]) if len(frames) == 1 else sum(map(len, frames))
    if size > max_bytes:
        raise TooLargeError(f"{size} bytes; a message has at most {max_bytes}: split it")

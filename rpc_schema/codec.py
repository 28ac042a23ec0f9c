"""Encoding and decoding of messages, with every bound checked before a byte is decoded.

A message is one msgpack frame, then raw little-endian array frames. Each direction has one closed
union and one decoder.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, Union, get_args

import msgspec

from rpc_schema import lifecycle as lc
from rpc_schema import trace
from rpc_schema.base import StepReply, Unsigned
from rpc_schema.control import ControlOperations
from rpc_schema.control import ControlReplyMessage as ControlReplyMessage
from rpc_schema.error_replies import ErrorReply
from rpc_schema.expert_placement import ExpertMoveEnded
from rpc_schema.frames import CURVE_BYTES as CURVE_BYTES
from rpc_schema.frames import MAX_CONTROL_BYTES as MAX_CONTROL_BYTES
from rpc_schema.frames import MAX_FRAMES as MAX_FRAMES
from rpc_schema.frames import MAX_STEP_BYTES as MAX_STEP_BYTES
from rpc_schema.frames import Frame as Frame
from rpc_schema.frames import decode_frame
from rpc_schema.frames import encode_control as encode_control
from rpc_schema.frames import encode_step as encode_step
from rpc_schema.operations import CONTROL_OPERATIONS, STEP_OPERATIONS
from rpc_schema.operations import ControlMessage as ControlMessage
from rpc_schema.operations import StepMessage as StepMessage

FrameT = TypeVar("FrameT", bound=bytes | memoryview | bytearray)

StepReplyMessage: TypeAlias = StepReply
EventMessage: TypeAlias = (
    lc.Heartbeat | lc.StateChanged | lc.Hung | lc.Slow | trace.DriverStepsWanted | ExpertMoveEnded
)


class StepHead(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Common beginning of step requests. tag: its type."""

    tag: int
    epoch: Unsigned
    link: Unsigned
    seq: Unsigned


def _decoder(messages: tuple[type[Any], ...]) -> "msgspec.msgpack.Decoder[Any]":
    """Return the decoder of one closed union. The union comes from the table, so a request without
    a row is unknown."""
    return msgspec.msgpack.Decoder(Union[messages])  # noqa: UP007  # made while running


STEP_REQUESTS: Final = tuple(STEP_OPERATIONS)
STEP_REPLIES: Final[tuple[type[Any], ...]] = (
    ErrorReply,
    lc.Attached,
    *dict.fromkeys(row.reply for row in STEP_OPERATIONS.values()),
)
CONTROL_REQUESTS: Final = tuple(CONTROL_OPERATIONS)
DRIVER_OPERATIONS: Final = ControlOperations(CONTROL_OPERATIONS.values())
CONTROL_REPLIES: Final = DRIVER_OPERATIONS.replies
EVENTS: Final = get_args(EventMessage)
"""Messages of each direction."""

_STEP: msgspec.msgpack.Decoder[StepMessage] = _decoder(STEP_REQUESTS)
_STEP_HEAD: msgspec.msgpack.Decoder[StepHead] = msgspec.msgpack.Decoder(StepHead)
_STEP_REPLY: msgspec.msgpack.Decoder[StepReplyMessage] = _decoder(STEP_REPLIES)
_CONTROL: msgspec.msgpack.Decoder[ControlMessage] = _decoder(CONTROL_REQUESTS)
_EVENT: msgspec.msgpack.Decoder[EventMessage] = msgspec.msgpack.Decoder(EventMessage)


decode_step: Callable[[Sequence[Frame]], StepMessage] = partial(
    decode_frame, _STEP, max_bytes=MAX_STEP_BYTES
)
"""Decodes frame 0 of a step request; the rest are its arrays.

Raises:
    BadFrameError: it does not decode into a known request with fields in their bounds.
    TooLargeError: over MAX_FRAMES frames or MAX_STEP_BYTES bytes.
"""


def decode_step_head(frames: Sequence[Frame]) -> StepHead:
    """Decode the beginning of a step request that does not decode as a whole, or has too many
    frames.

    Raises:
        BadFrameError: frame 0 is not an array with this beginning.
    """
    return decode_frame(_STEP_HEAD, frames, None)


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
    return decode_frame(_STEP_REPLY, frames, MAX_STEP_BYTES)


def decode_control(frames: Sequence[Frame]) -> ControlMessage:
    """Decode a control request. Raises as decode_step does, with MAX_CONTROL_BYTES."""
    return decode_frame(_CONTROL, frames, MAX_CONTROL_BYTES)


def decode_control_reply(frames: Sequence[Frame]) -> ControlReplyMessage:
    """Decode a control reply. Raises as decode_control does."""
    return DRIVER_OPERATIONS.decode_reply(frames)


def decode_event(frames: Sequence[Frame]) -> EventMessage:
    """Decode an event. Raises as decode_control does."""
    return decode_frame(_EVENT, frames, MAX_CONTROL_BYTES)

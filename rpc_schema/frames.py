"""Frames of messages: their bounds, checked before a byte is decoded, and their encoding."""

from collections.abc import Sequence
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

from rpc_schema.errors import BadFrameError, TooLargeError

MAX_FRAMES: Final = 16
MAX_STEP_BYTES: Final = 16 << 20
MAX_CONTROL_BYTES: Final = 1 << 20
CURVE_BYTES: Final = 33
"""Growth of an encrypted frame (ZeroMQ RFC 26: name 8, nonce 8, flags 1, code 16). A receiver's
bound applies to the encrypted frame."""

MessageT = TypeVar("MessageT")
Frame: TypeAlias = bytes | memoryview | bytearray

_ENCODER = msgspec.msgpack.Encoder()


def encode_step(message: Any, arrays: Sequence[Frame] = ()) -> list[Frame]:
    """Encode a step request or its reply, and its array frames.

    Raises:
        TooLargeError: over MAX_FRAMES frames or MAX_STEP_BYTES bytes.
    """
    frame = _ENCODER.encode(message)
    frames: list[Frame] = [frame, *arrays] if arrays else [frame]
    if arrays or len(frame) > MAX_STEP_BYTES:
        _check_bounds(frames, MAX_STEP_BYTES)
    return frames


def encode_control(message: Any) -> bytes:
    """Encode a control request, its reply, or an event: always one frame.

    Raises:
        TooLargeError: over MAX_CONTROL_BYTES bytes.
    """
    frame = _ENCODER.encode(message)
    _check_bounds([frame], MAX_CONTROL_BYTES)
    return frame


def decode_frame(
    decoder: "msgspec.msgpack.Decoder[MessageT]", frames: Sequence[Frame], max_bytes: int | None
) -> MessageT:
    """Decode frame 0. max_bytes: of all frames; None checks no bounds.

    Raises:
        BadFrameError: it is not a message of the decoder's, with fields in their bounds.
        TooLargeError: over MAX_FRAMES frames or max_bytes bytes.
    """
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

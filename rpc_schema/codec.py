"""Messages to frames and back, with every bound checked before a byte is decoded. Knows no socket.

A message is one msgpack frame, then raw little-endian array frames. There is one closed union, and
one decoder, a direction.
"""

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import msgspec

from rpc_schema import adoption, lease, step, trace
from rpc_schema import lifecycle as lc
from rpc_schema import weight_transfer as wt
from rpc_schema.base import Unsigned
from rpc_schema.errors import BadFrameError, ControlErrorReply, ErrorReply, TooLargeError

MAX_FRAMES = 6
MAX_STEP_BYTES = 16 << 20
MAX_CONTROL_BYTES = 1 << 20
CURVE_BYTES = 33
"""By which an encrypted frame is longer on its way (ZeroMQ RFC 26: name 8, nonce 8, flags 1, code
16): a receiver's bound is checked there."""

MessageT = TypeVar("MessageT")
Frame: TypeAlias = bytes | memoryview | bytearray
FrameT = TypeVar("FrameT", bound=bytes | memoryview | bytearray)

StepMessage: TypeAlias = (
    step.ExecuteModel
    | step.SampleTokens
    | step.ExecuteDummyBatch
    | lc.InitDevice
    | lc.Relink
    | lc.Reset
    | lc.LoadModel
    | lc.GetKVCacheSpec
    | lc.DetermineAvailableMemory
    | lc.InitializeFromConfig
    | lc.InitializeCache
    | lc.UpdateMaxModelLen
    | lc.CompileOrWarmUpModel
    | lc.GetSupportedTasks
    | lc.GetModelMetadata
    | lc.SaveShardedState
    | lc.FinishShardedState
    | lc.ComputeWeightChecksums
    | lc.Profile
    | lc.SaveTensorizedModel
    | lc.Sleep
    | lc.WakeUp
    | lc.Discard
    | wt.InitWeightTransferEngine
    | wt.StartWeightUpdate
    | wt.UpdateWeights
    | wt.FinishWeightUpdate
    | wt.ReloadWeights
    | wt.UpdateConfig
    | adoption.AdoptRequests
)
StepReplyMessage: TypeAlias = (
    ErrorReply
    | step.ModelRunnerOutput
    | step.Done
    | lc.Attached
    | lc.InitDeviceReply
    | lc.LoadModelReply
    | lc.GetKVCacheSpecReply
    | lc.DetermineAvailableMemoryReply
    | lc.CompileOrWarmUpModelReply
    | lc.GetSupportedTasksReply
    | lc.GetModelMetadataReply
    | lc.SaveShardedStateReply
    | lc.ComputeWeightChecksumsReply
    | lc.ProfileReply
    | lc.SaveTensorizedModelReply
    | lc.MemoryTagsReply
    | wt.InitWeightTransferEngineReply
    | wt.UpdateWeightsReply
    | wt.FinishWeightUpdateReply
    | wt.ReloadWeightsReply
    | adoption.AdoptRequestsReply
)
ControlMessage: TypeAlias = (
    lc.Hello
    | lc.PrepareAttach
    | lc.CommitAttach
    | lc.Detach
    | lc.OpenRendezvous
    | lc.AbortLink
    | lc.CheckHealth
    | lc.GetStatus
    | lc.Shutdown
    | lc.Drain
    | lease.RenewLease
    | trace.ReadClock
    | trace.StartTrace
    | trace.StopTrace
    | trace.ReadTrace
    | trace.AskDriver
    | trace.PutDriverSteps
    | trace.ReadDriverSteps
)
ControlReplyMessage: TypeAlias = (
    ControlErrorReply
    | lc.HelloReply
    | lc.PrepareAttachReply
    | lc.CommitAttachReply
    | lc.OpenRendezvousReply
    | lc.CheckHealthReply
    | lc.GetStatusReply
    | lc.Acknowledged
    | lease.RenewLeaseReply
    | trace.ReadClockReply
    | trace.StopTraceReply
    | trace.ReadTraceReply
    | trace.ReadDriverStepsReply
)
EventMessage: TypeAlias = (
    lc.Heartbeat | lc.StateChanged | lc.Hung | lc.Slow | trace.DriverStepsWanted
)


class StepHead(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What every step request begins with, whatever follows. tag: its type."""

    tag: int
    epoch: Unsigned
    link: Unsigned
    seq: Unsigned


_ENCODER = msgspec.msgpack.Encoder()
_STEP: msgspec.msgpack.Decoder[StepMessage] = msgspec.msgpack.Decoder(StepMessage)
_STEP_HEAD: msgspec.msgpack.Decoder[StepHead] = msgspec.msgpack.Decoder(StepHead)
_STEP_REPLY: msgspec.msgpack.Decoder[StepReplyMessage] = msgspec.msgpack.Decoder(StepReplyMessage)
_CONTROL: msgspec.msgpack.Decoder[ControlMessage] = msgspec.msgpack.Decoder(ControlMessage)
_CONTROL_REPLY: msgspec.msgpack.Decoder[ControlReplyMessage] = msgspec.msgpack.Decoder(
    ControlReplyMessage
)
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


def encode_control(message: ControlMessage | ControlReplyMessage | EventMessage) -> bytes:
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
    _check_bounds(frames, MAX_STEP_BYTES)
    return _decode(_STEP, frames)


def decode_step_head(frames: Sequence[Frame]) -> StepHead:
    """Decode the beginning of a step request that does not decode as a whole, or has too many
    frames.

    Raises:
        BadFrameError: frame 0 is no array that begins so.
    """
    return _decode(_STEP_HEAD, frames)


def mark_replayed(frames: Sequence[Frame]) -> list[Frame]:
    """Return a step reply's frames, unchanged, behind an empty frame: it was sent before. No
    message begins with an empty frame."""
    return [b"", *frames]


def split_replayed(frames: Sequence[FrameT]) -> tuple[bool, Sequence[FrameT]]:
    """Return whether a step reply was marked as a replay, and its own frames."""
    if len(frames) > 1 and not frames[0]:
        return True, frames[1:]
    return False, frames


def decode_step_reply(frames: Sequence[Frame]) -> StepReplyMessage:
    """Decode frame 0 of a step reply. Raises as decode_step does."""
    _check_bounds(frames, MAX_STEP_BYTES)
    return _decode(_STEP_REPLY, frames)


def decode_control(frames: Sequence[Frame]) -> ControlMessage:
    """Decode a control request. Raises as decode_step does, with MAX_CONTROL_BYTES."""
    _check_bounds(frames, MAX_CONTROL_BYTES)
    return _decode(_CONTROL, frames)


def decode_control_reply(frames: Sequence[Frame]) -> ControlReplyMessage:
    """Decode a control reply. Raises as decode_control does."""
    _check_bounds(frames, MAX_CONTROL_BYTES)
    return _decode(_CONTROL_REPLY, frames)


def decode_event(frames: Sequence[Frame]) -> EventMessage:
    """Decode an event. Raises as decode_control does."""
    _check_bounds(frames, MAX_CONTROL_BYTES)
    return _decode(_EVENT, frames)


def _decode(decoder: msgspec.msgpack.Decoder[MessageT], frames: Sequence[Frame]) -> MessageT:
    try:
        return decoder.decode(frames[0])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadFrameError(
            f"frame 0 ({len(frames[0])} bytes) is no known message: {error}"
        ) from None


def _check_bounds(frames: Sequence[Frame], max_bytes: int) -> None:
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise TooLargeError(f"{len(frames)} frames; a message has 1 to {MAX_FRAMES}")
    size = len(frames[0]) if len(frames) == 1 else sum(map(len, frames))
    if size > max_bytes:
        raise TooLargeError(f"{size} bytes; a message has at most {max_bytes}: split it")

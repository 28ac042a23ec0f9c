"""Traces of a running group for an observer: recorded while steps run, read over the control
socket, with clock readings that align them."""

from typing import Annotated

from msgspec import Meta

from rpc_schema.base import ControlReply, ControlRequest, Count, Event, Uid, Unsigned, Value
from rpc_schema.lifecycle import Acknowledged

TRACE_CHUNK_BYTES = 512 << 10
"""Bound on the part of a trace in one ReadTraceReply."""

MAX_DRIVER_STEPS = 16_384
"""Steps that a driver keeps, and the most in one DriverSteps: together with their columns they stay
below a control message's bound."""

MAX_TRACE_MS = 600_000

RawInt64 = Annotated[bytes, Meta(max_length=8 * MAX_DRIVER_STEPS)]
"""Little-endian int64 values."""

RawCounts = Annotated[bytes, Meta(max_length=4 * MAX_DRIVER_STEPS)]
"""Little-endian int32 values."""


class DriverSteps(Value, frozen=True, kw_only=True):
    """Steps of a driver in a period, one entry for each, in order of seq. Times are of the driver's
    monotonic clock, in nanoseconds."""

    pid: Count
    clock_offset_ns: int
    """Clock of the daemon that receives this, minus the driver's."""
    clock_bound_ns: Unsigned
    """Bound on the error of that offset."""
    clock_at_ns: Unsigned
    """Time of its measurement."""
    seqs: RawInt64
    began_ns: RawInt64
    """Start of the step's encoding."""
    sent_ns: RawInt64
    """Time at which it was in all ranks' sockets."""
    settled_ns: RawInt64
    """Arrival of its outcome; 0: none yet, or a failure."""
    context_tokens: RawCounts
    """Tokens of requests with more than one token: prompts and chunks."""
    generation_tokens: RawCounts
    """Tokens of the other requests."""


class ReadClock(ControlRequest["ReadClockReply"], frozen=True, tag=20, kw_only=True):
    """Return the daemon's time."""


class ReadClockReply(ControlReply, frozen=True, tag=20, kw_only=True):
    """The daemon's monotonic clock at its reply: the clock of its traces' marks."""

    monotonic_ns: Unsigned


class StartTrace(ControlRequest[Acknowledged], frozen=True, tag=21, kw_only=True):
    """Record the steps of the attached driver. It begins between two steps, and is independent of
    the driver's epoch, seqs and lease. Answered once it records."""

    trace: Uid
    """Random, the same on all ranks."""
    max_ms: Annotated[int, Meta(ge=1, le=MAX_TRACE_MS)]
    """Limit after which a trace that was not stopped is dropped."""


class StopTrace(ControlRequest["StopTraceReply"], frozen=True, tag=22, kw_only=True):
    """End a trace. Answered once its file can be read; a trace that is not kept leaves none."""

    trace: Uid
    keep: bool


class StopTraceReply(ControlReply, frozen=True, tag=22, kw_only=True):
    size_bytes: Unsigned
    """Size of the file: Chrome's trace-event JSON, compressed by gzip."""


class ReadTrace(ControlRequest["ReadTraceReply"], frozen=True, tag=23, kw_only=True):
    """Read from the file of the last trace that was stopped."""

    trace: Uid
    offset: Unsigned


class ReadTraceReply(ControlReply, frozen=True, tag=23, kw_only=True):
    """Empty past the file's end."""

    data: Annotated[bytes, Meta(max_length=TRACE_CHUNK_BYTES)]


class AskDriver(ControlRequest[Acknowledged], frozen=True, tag=24, kw_only=True):
    """Ask the attached driver for its steps: the daemon publishes DriverStepsWanted."""

    trace: Uid
    begin_ns: Unsigned
    """On the daemon's clock, like end_ns."""
    end_ns: Unsigned


class PutDriverSteps(ControlRequest[Acknowledged], frozen=True, tag=25, kw_only=True):
    """The attached driver's answer to DriverStepsWanted."""

    epoch: Unsigned
    trace: Uid
    steps: DriverSteps


class ReadDriverSteps(ControlRequest["ReadDriverStepsReply"], frozen=True, tag=26, kw_only=True):
    """Return the driver's answer."""

    trace: Uid


class ReadDriverStepsReply(ControlReply, frozen=True, tag=26, kw_only=True):
    steps: DriverSteps | None
    """None: no answer yet."""


class DriverStepsWanted(Event, frozen=True, tag=20, kw_only=True):
    """Published for an observer that traces the group: the driver may answer with its steps, by
    PutDriverSteps."""

    trace: Uid
    begin_ns: Unsigned
    """On this daemon's clock, like end_ns."""
    end_ns: Unsigned

"""Traces for whoever watches a running group without driving it: recorded beside the steps, read
back over the control socket, with the clocks that put all of them on one axis."""

from typing import Annotated

from msgspec import Meta

from rpc_schema.base import ControlReply, ControlRequest, Count, Event, Uid, Unsigned, Value
from rpc_schema.lifecycle import Acknowledged

TRACE_CHUNK_BYTES = 512 << 10
"""Of a trace, in one ReadTraceReply."""

MAX_DRIVER_STEPS = 16_384
"""Steps that a driver remembers, and the most that one DriverSteps holds: together with their
columns they stay below a control message's bound."""

MAX_TRACE_MS = 600_000

RawInt64 = Annotated[bytes, Meta(max_length=8 * MAX_DRIVER_STEPS)]
"""Little-endian int64 values."""

RawCounts = Annotated[bytes, Meta(max_length=4 * MAX_DRIVER_STEPS)]
"""Little-endian int32 values."""


class DriverSteps(Value, frozen=True, kw_only=True):
    """What a driver did in a stretch of time, one entry a step, in order of seq. Times are of the
    driver's monotonic clock, in nanoseconds."""

    pid: Count
    clock_offset_ns: int
    """The clock of the daemon that this is left with, minus the driver's."""
    clock_bound_ns: Unsigned
    """That offset is wrong by at most this."""
    clock_at_ns: Unsigned
    """When it was measured."""
    seqs: RawInt64
    began_ns: RawInt64
    """The driver began to encode the step."""
    sent_ns: RawInt64
    """It was handed to all ranks' sockets."""
    settled_ns: RawInt64
    """Its outcome was there; 0: it was not, or it was a failure."""
    context_tokens: RawCounts
    """Of requests with other than one token: prompts, and parts of them."""
    generation_tokens: RawCounts
    """Of the others."""


class ReadClock(ControlRequest["ReadClockReply"], frozen=True, tag=20, kw_only=True):
    """What time is it there?"""


class ReadClockReply(ControlReply, frozen=True, tag=20, kw_only=True):
    """The daemon's monotonic clock as it answered: the one that its traces' marks are of."""

    monotonic_ns: Unsigned


class StartTrace(ControlRequest[Acknowledged], frozen=True, tag=21, kw_only=True):
    """Record the steps of whichever driver is attached. Between two steps, and without a part in
    the driver's epoch, seqs or lease. Answered once it records."""

    trace: Uid
    """Random, the same on all ranks."""
    max_ms: Annotated[int, Meta(ge=1, le=MAX_TRACE_MS)]
    """It is thrown away unless it is stopped by then."""


class StopTrace(ControlRequest["StopTraceReply"], frozen=True, tag=22, kw_only=True):
    """End a trace. Answered once its file can be read; a trace that is not kept leaves none."""

    trace: Uid
    keep: bool


class StopTraceReply(ControlReply, frozen=True, tag=22, kw_only=True):
    size_bytes: Unsigned
    """Of the file: Chrome's trace-event JSON, compressed by gzip."""


class ReadTrace(ControlRequest["ReadTraceReply"], frozen=True, tag=23, kw_only=True):
    """Read from the file of the last trace that was stopped."""

    trace: Uid
    offset: Unsigned


class ReadTraceReply(ControlReply, frozen=True, tag=23, kw_only=True):
    """Empty past the file's end."""

    data: Annotated[bytes, Meta(max_length=TRACE_CHUNK_BYTES)]


class AskDriver(ControlRequest[Acknowledged], frozen=True, tag=24, kw_only=True):
    """Have the attached driver say what it did: the daemon publishes DriverStepsWanted."""

    trace: Uid
    begin_ns: Unsigned
    """Of the daemon's clock, as end_ns."""
    end_ns: Unsigned


class PutDriverSteps(ControlRequest[Acknowledged], frozen=True, tag=25, kw_only=True):
    """The attached driver's answer to DriverStepsWanted."""

    epoch: Unsigned
    trace: Uid
    steps: DriverSteps


class ReadDriverSteps(ControlRequest["ReadDriverStepsReply"], frozen=True, tag=26, kw_only=True):
    """What has the driver answered?"""

    trace: Uid


class ReadDriverStepsReply(ControlReply, frozen=True, tag=26, kw_only=True):
    steps: DriverSteps | None
    """None: nothing yet."""


class DriverStepsWanted(Event, frozen=True, tag=20, kw_only=True):
    """Somebody traces the group: the driver may say what it did, by PutDriverSteps."""

    trace: Uid
    begin_ns: Unsigned
    """Of this daemon's clock, as end_ns."""
    end_ns: Unsigned

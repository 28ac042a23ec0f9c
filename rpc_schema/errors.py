"""Errors on the wire: a stable code, a scope, and text for people. Also the codec's exceptions."""

import enum

from rpc_schema.base import ControlReply, StepReply, Text, Unsigned
from rpc_schema.lease import LeaseStatus


class ErrorCode(enum.StrEnum):
    """Every error code of a daemon. Both sides map all of them; a test checks it."""

    PROTOCOL = "PROTOCOL"
    BAD_FRAME = "BAD_FRAME"
    TOO_LARGE = "TOO_LARGE"
    INCOMPATIBLE = "INCOMPATIBLE"
    FENCED = "FENCED"
    NOT_ATTACHED = "NOT_ATTACHED"
    FORBIDDEN = "FORBIDDEN"
    STALE = "STALE"
    GAP = "GAP"
    LEASE_HELD = "LEASE_HELD"
    LEASE_EXPIRED = "LEASE_EXPIRED"
    DRAINING = "DRAINING"
    ILLEGAL_STATE = "ILLEGAL_STATE"
    CONFIG = "CONFIG"
    CHECKPOINT = "CHECKPOINT"
    INVALID_STEP = "INVALID_STEP"
    CAPACITY = "CAPACITY"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    COMM = "COMM"
    UPSTREAM_FAILED = "UPSTREAM_FAILED"
    PRECEDED_BY = "PRECEDED_BY"
    TRANSFER = "TRANSFER"
    DEVICE = "DEVICE"
    INTERNAL = "INTERNAL"


class ErrorScope(enum.StrEnum):
    """Extent of an error: one request, one step, the worker, or the whole group."""

    REQUEST = "request"
    STEP = "step"
    WORKER = "worker"
    GROUP = "group"


class ErrorReply(StepReply, frozen=True, tag=0, kw_only=True):
    """A StepRequest failed on this rank. It belongs to its seq: a failure is an outcome, never a
    gap."""

    code: ErrorCode
    scope: ErrorScope
    message: Text
    traceback: Text = ""
    expected_seq: Unsigned = 0
    """The seq that the daemon expects next; with GAP, the missing one."""


class ControlErrorReply(ControlReply, frozen=True, tag=0, kw_only=True):
    """A ControlRequest failed."""

    code: ErrorCode
    scope: ErrorScope
    message: Text
    traceback: Text = ""
    lease: LeaseStatus | None = None
    """With LEASE_HELD: the holder, and the time to wait."""


class WireError(Exception):
    """A message cannot be encoded or decoded. `code` is its ErrorCode for the peer."""

    code = ErrorCode.BAD_FRAME


class BadFrameError(WireError):
    """The frames do not decode into a known message."""


class TooLargeError(WireError):
    """More frames or bytes than the bounds allow. Raised by the sender, before anything is sent."""

    code = ErrorCode.TOO_LARGE

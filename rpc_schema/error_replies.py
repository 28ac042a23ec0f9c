"""Error replies on the wire: a stable code, a scope, and text for people."""

from rpc_schema.base import ControlReply, StepReply, Text, Unsigned
from rpc_schema.errors import ErrorCode, ErrorScope
from rpc_schema.lease import LeaseStatus


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

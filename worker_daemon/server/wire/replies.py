"""Turns exceptions into error replies: with the code of their class."""

import traceback
from typing import Final

from rpc_schema.error_replies import ControlErrorReply, ErrorReply
from rpc_schema.errors import (
    ConfigError,
    ErrorCode,
    ErrorScope,
    GapError,
    InvalidStepError,
    LeaseHeldError,
    ProtocolError,
    StateError,
    WorkerError,
)
from rpc_schema.lease import LeaseStatus

MAX_MESSAGE: Final = 8192
MAX_TRACEBACK: Final = 32768
_REFUSALS: Final = (ProtocolError, StateError, ConfigError, InvalidStepError)
"""Errors of the peer, which the message explains; no traceback is sent."""


def error_reply(error: Exception, *, epoch: int, seq: int, rank: int) -> ErrorReply:
    """Return the error reply of a failed step request (epoch, seq)."""
    code, scope = classify(error)
    return ErrorReply(
        epoch=epoch,
        seq=seq,
        rank=rank,
        code=code,
        scope=scope,
        message=_message(error),
        traceback=_traceback(error),
        expected_seq=error.expected if isinstance(error, GapError) else 0,
    )


def control_error_reply(error: Exception, *, call: int) -> ControlErrorReply:
    """Return the error reply of a failed control request."""
    code, scope = classify(error)
    lease = error.lease if isinstance(error, LeaseHeldError) else None
    return ControlErrorReply(
        call=call,
        code=code,
        scope=scope,
        message=_message(error),
        traceback=_traceback(error),
        lease=lease if isinstance(lease, LeaseStatus) else None,
    )


def classify(error: Exception) -> tuple[ErrorCode, ErrorScope]:
    """Return the code and scope of an exception; an unexpected one is INTERNAL and costs one
    step."""
    if isinstance(error, WorkerError):
        return error.code, error.scope
    return ErrorCode.INTERNAL, ErrorScope.STEP


def _message(error: Exception) -> str:
    text = str(error) if isinstance(error, WorkerError) else repr(error)
    return text[:MAX_MESSAGE]


def _traceback(error: Exception) -> str:
    """Return the traceback of an error; empty for a refusal."""
    if error.__traceback__ is None or isinstance(error, _REFUSALS):
        return ""
    return "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]

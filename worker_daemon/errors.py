"""Defines every error that the daemon raises on purpose, as one tree. `code` and `scope` are those
of the wire.

WorkerError
 +- ProtocolError        the peer broke a rule of the wire: frames, versions, ids, order
 |   +- BadFrameError        a frame does not decode, or exceeds a bound
 |   +- IncompatibleError    protocol versions differ
 |   +- FencedError          the epoch or link is an old one
 |   +- NotAttachedError     the epoch was never granted
 |   +- LeaseHeldError       another driver holds this daemon's lease
 |   +- LeaseExpiredError    the driver did not renew its lease in time
 |   +- DrainingError        an operator drains the daemon: it takes no steps
 |   +- ForbiddenError       the peer lacks the role that the request needs
 |   +- StaleError           a step older than the replies still kept
 |   `- GapError             a step before this one is missing
 +- StateError           the request is not legal in this state
 +- ConfigError          a setting is wrong: names field, value and fix
 |   `- CheckpointError      a model's files are missing, truncated, or do not match config.json
 +- InvalidStepError     a step holds a value that no kernel may see; nothing was applied
 +- CapacityError        not enough device memory, KV blocks, rows or disk space
 |   +- OutOfMemoryError     an allocation failed: with the bytes needed and free
 |   `- StartLaterError      the host has no room for another daemon now: exit code 75
 +- CommError            a peer or a link is lost
 |   `- UpstreamFailedError  an earlier pipeline stage failed in this step
 +- TransferError        a trainer is lost, or its data is invalid; the link still works
 +- PrecededByError      a step before this one failed, and the driver has not resynchronized since
 `- DeviceError          the device is unusable: the process ends
"""

from typing import ClassVar


class WorkerError(Exception):
    """Base of the tree. `code` is stable on the wire; `scope` is request, step, worker or group."""

    code: ClassVar[str] = "INTERNAL"
    scope: ClassVar[str] = "worker"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        value: object = None,
        fix: str | None = None,
    ) -> None:
        """field, value and fix (if given) are appended to the message."""
        parts = [message]
        if field is not None:
            parts.append(f"field {field} = {value!r}")
        if fix is not None:
            parts.append(f"fix: {fix}")
        super().__init__("; ".join(parts))
        self.field = field
        self.value = value
        self.fix = fix


class ProtocolError(WorkerError):
    code = "PROTOCOL"
    scope = "step"


class BadFrameError(ProtocolError):
    code = "BAD_FRAME"


class IncompatibleError(ProtocolError):
    code = "INCOMPATIBLE"
    scope = "worker"


class FencedError(ProtocolError):
    code = "FENCED"


class NotAttachedError(ProtocolError):
    code = "NOT_ATTACHED"


class LeaseHeldError(ProtocolError):
    """`lease`: the status of the other driver's lease; None if unknown."""

    code = "LEASE_HELD"
    scope = "worker"

    def __init__(self, message: str, *, fix: str | None = None, lease: object = None) -> None:
        super().__init__(message, fix=fix)
        self.lease = lease


class LeaseExpiredError(ProtocolError):
    code = "LEASE_EXPIRED"


class DrainingError(ProtocolError):
    code = "DRAINING"
    scope = "group"


class ForbiddenError(ProtocolError):
    code = "FORBIDDEN"


class StaleError(ProtocolError):
    code = "STALE"


class GapError(ProtocolError):
    code = "GAP"

    def __init__(self, expected: int, got: int) -> None:
        super().__init__(
            f"step {expected} is missing", field="seq", value=got, fix=f"send seq {expected} next"
        )
        self.expected = expected


class StateError(WorkerError):
    code = "ILLEGAL_STATE"


class ConfigError(WorkerError):
    code = "CONFIG"


def config_error(field: str, value: object, problem: str, fix: str | None = None) -> ConfigError:
    """Return the error for one value: the problem, then field, value and fix."""
    return ConfigError(problem, field=field, value=value, fix=fix)


class CheckpointError(ConfigError):
    code = "CHECKPOINT"


class InvalidStepError(WorkerError):
    code = "INVALID_STEP"
    scope = "step"


class CapacityError(WorkerError):
    code = "CAPACITY"


class StartLaterError(CapacityError):
    """A daemon cannot start now, but the same start may succeed later. The process ends with exit
    code 75."""


class OutOfMemoryError(CapacityError):
    """`needed_bytes` and `free_bytes` are None if unknown."""

    code = "OUT_OF_MEMORY"
    scope = "step"

    def __init__(
        self,
        message: str,
        *,
        needed_bytes: int | None = None,
        free_bytes: int | None = None,
        fix: str | None = None,
    ) -> None:
        needed = "an unknown number of" if needed_bytes is None else str(needed_bytes)
        free = "" if free_bytes is None else f", {free_bytes} bytes are free"
        super().__init__(f"{message}; {needed} bytes are needed{free}", fix=fix)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class CommError(WorkerError):
    code = "COMM"
    scope = "group"


class UpstreamFailedError(CommError):
    code = "UPSTREAM_FAILED"
    scope = "step"


class TransferError(WorkerError):
    code = "TRANSFER"


class PrecededByError(WorkerError):
    code = "PRECEDED_BY"
    scope = "step"


class DeviceError(WorkerError):
    code = "DEVICE"

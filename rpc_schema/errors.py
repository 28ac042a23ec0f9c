"""Defines the errors that both sides raise on purpose, as one tree. A daemon raises a WorkerError
and sends its code; the driver raises the same class, with the rank. Needs only the standard
library: every layer may import it, also those that do not know the wire.

WorkerDaemonError
 +- worker_client.errors.ClientError: only a driver raises these
 `- WorkerError              a daemon refuses or fails a request: one class for each ErrorCode
     +- ProtocolError        PROTOCOL: the peer broke a rule of the wire: versions, ids, order
     |   +- WireError            a message cannot be encoded or decoded, on either side
     |   |   +- BadFrameError        BAD_FRAME: a frame does not decode
     |   |   `- TooLargeError        TOO_LARGE: more frames or bytes than the bounds allow
     |   +- IncompatibleError    INCOMPATIBLE: protocol versions differ
     |   +- FencedError          FENCED: the epoch or link is an old one
     |   +- NotAttachedError     NOT_ATTACHED: the epoch was never granted
     |   +- LeaseHeldError       LEASE_HELD: another driver holds this daemon's lease
     |   +- LeaseExpiredError    LEASE_EXPIRED: the driver did not renew its lease in time
     |   +- DrainingError        DRAINING: an operator drains the daemon: it takes no steps
     |   +- ShuttingDownError    SHUTTING_DOWN: the daemon ends: a successor may take its place
     |   +- ForbiddenError       FORBIDDEN: the peer lacks the role that the request needs
     |   +- StaleError           STALE: a step older than the replies still kept
     |   `- GapError             GAP: a step before this one is missing
     +- StateError           ILLEGAL_STATE: the request is not legal in this state
     +- ConfigError          CONFIG: a setting is wrong: names field, value and fix
     |   `- CheckpointError      CHECKPOINT: a model's files are missing, truncated or inconsistent
     +- InvalidStepError     INVALID_STEP: a value that no kernel may see; nothing was applied
     +- CapacityError        CAPACITY: not enough device memory, KV blocks, rows or disk space
     |   `- OutOfMemoryError     OUT_OF_MEMORY: an allocation failed
     +- CommError            COMM: a peer or a link is lost
     |   `- UpstreamFailedError  UPSTREAM_FAILED: an earlier pipeline stage failed in this step
     +- PrecededByError      PRECEDED_BY: a step before this one failed; no resynchronization yet
     +- TransferError        TRANSFER: a trainer is lost, or its data is invalid
     +- DeviceError          DEVICE: the device is unusable: the process ends
     `- InternalError        INTERNAL: an invariant of the daemon is broken
"""

import enum
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple


class ErrorCode(enum.StrEnum):
    """Every error code of a daemon. Each has one class; a test checks it."""

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
    SHUTTING_DOWN = "SHUTTING_DOWN"
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


class DriverEvent(NamedTuple):
    """An event that a driver's failure state has taken."""

    at: float
    """Time (time.time())."""
    name: str
    rank: int | None
    """The rank that the event is about, if it is about one."""
    change: str
    """The values that it has changed, as "axis BEFORE -> AFTER"; empty if none."""

    def __str__(self) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(self.at)) + f"{self.at % 1:.3f}"[1:]
        where = "" if self.rank is None else f" rank {self.rank}"
        return f"{clock} {self.name}{where}: {self.change or 'no change'}"


class WorkerDaemonError(Exception):
    """Base of every error that a driver or a daemon raises on purpose."""

    events: tuple[DriverEvent, ...] = ()
    """In a driver that refuses a request because of an earlier failure: its last events, oldest
    first. Tracebacks end with them."""


class WorkerError(WorkerDaemonError):
    """Base of a daemon's errors. `code` is stable on the wire. `field`, `value` and `fix` are those
    that the constructor got: they do not travel, but their text in `message` does."""

    code: ErrorCode = ErrorCode.INTERNAL
    scope: ErrorScope = ErrorScope.WORKER
    message: str
    field: str | None = None
    value: object = None
    fix: str | None = None
    rank: int | None = None
    """In a driver, the rank that failed; None for an error that this process found itself."""
    endpoint: str = ""
    """Endpoint of that rank."""
    remote_traceback: str = ""
    """Text for people; empty for a refusal."""

    @property
    def is_reported(self) -> bool:
        """True for an error that a rank has reported to this driver, False for one that this
        process found itself, as in a message that it cannot read."""
        return self.rank is not None

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
        self.message = "; ".join(parts)
        super().__init__(self.message)
        self.field = field
        self.value = value
        self.fix = fix


class ProtocolError(WorkerError):
    """The peer broke a rule of the wire."""

    code = ErrorCode.PROTOCOL
    scope = ErrorScope.STEP


class WireError(ProtocolError):
    """A message cannot be encoded or decoded."""


class BadFrameError(WireError):
    """The frames do not decode into a known message."""

    code = ErrorCode.BAD_FRAME


class TooLargeError(WireError):
    """More frames or bytes than the bounds allow. The sender raises it before anything is sent."""

    code = ErrorCode.TOO_LARGE


class IncompatibleError(ProtocolError):
    """Protocol versions differ; the message names both."""

    code = ErrorCode.INCOMPATIBLE
    scope = ErrorScope.WORKER


class FencedError(ProtocolError):
    """Another driver has attached since, or the link is outdated."""

    code = ErrorCode.FENCED


class NotAttachedError(ProtocolError):
    """The daemon never granted this epoch."""

    code = ErrorCode.NOT_ATTACHED


class LeaseHeldError(ProtocolError):
    """Another driver holds the lease of a daemon. In a driver, `holder` is the driver_digest of its
    id, `holder_name` its HOST:PID, `remaining_s` the time until the lease expires unless it is
    renewed, and `is_claim`: that driver does not have it yet, but is attaching."""

    code = ErrorCode.LEASE_HELD
    scope = ErrorScope.WORKER
    lease: object = None
    """In a daemon, the LeaseStatus of the other driver's lease; None if unknown."""
    holder: bytes = b""
    holder_name: str = ""
    remaining_s: float = 0.0
    is_claim: bool = False

    def __init__(self, message: str, *, fix: str | None = None, lease: object = None) -> None:
        super().__init__(message, fix=fix)
        self.lease = lease


class LeaseExpiredError(ProtocolError):
    """The driver did not renew its lease in time: it must attach again."""

    code = ErrorCode.LEASE_EXPIRED


class DrainingError(ProtocolError):
    """An operator drains the daemon: it takes no more steps and no more drivers. Everything that is
    loaded stays; once the drain is undone, a driver can continue."""

    code = ErrorCode.DRAINING
    scope = ErrorScope.GROUP


class ShuttingDownError(ProtocolError):
    """The daemon has begun to end, after SIGTERM, a Shutdown request or the loss of its device: it
    takes no more requests and drivers, and its process exits soon. A driver counts it as dead."""

    code = ErrorCode.SHUTTING_DOWN
    scope = ErrorScope.WORKER


class ForbiddenError(ProtocolError):
    """The peer's key lacks the role that the request needs; the message names both."""

    code = ErrorCode.FORBIDDEN


class StaleError(ProtocolError):
    """A request is older than the replies that the daemon keeps."""

    code = ErrorCode.STALE


class GapError(ProtocolError):
    """A request before this one never reached the daemon. `expected`: the missing seq; 0 in a
    driver, whose library sends it again."""

    code = ErrorCode.GAP
    expected: int = 0

    def __init__(self, expected: int, got: int) -> None:
        super().__init__(
            f"step {expected} is missing", field="seq", value=got, fix=f"send seq {expected} next"
        )
        self.expected = expected


class StateError(WorkerError):
    """The operation is not legal in the daemon's state."""

    code = ErrorCode.ILLEGAL_STATE


class ConfigError(WorkerError):
    """The daemon refuses a setting."""

    code = ErrorCode.CONFIG


class CheckpointError(ConfigError):
    """The model's files are missing, truncated or inconsistent with config.json."""

    code = ErrorCode.CHECKPOINT


class InvalidStepError(WorkerError):
    """The step has a value that must not reach the kernels; nothing was applied."""

    code = ErrorCode.INVALID_STEP
    scope = ErrorScope.STEP


class CapacityError(WorkerError):
    """Not enough device memory, KV blocks, rows or disk space."""

    code = ErrorCode.CAPACITY


class OutOfMemoryError(CapacityError):
    """An allocation failed; the message has the requested and the free amount, as `needed_bytes`
    and `free_bytes` have in the daemon, if known. The next step may succeed."""

    code = ErrorCode.OUT_OF_MEMORY
    scope = ErrorScope.STEP
    needed_bytes: int | None = None
    free_bytes: int | None = None

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
    """A peer or a link is lost."""

    code = ErrorCode.COMM
    scope = ErrorScope.GROUP


class UpstreamFailedError(CommError):
    """An earlier pipeline stage failed in this step."""

    code = ErrorCode.UPSTREAM_FAILED
    scope = ErrorScope.STEP


class PrecededByError(WorkerError):
    """A step before this one failed, and the driver has not resynchronized since."""

    code = ErrorCode.PRECEDED_BY
    scope = ErrorScope.STEP


class TransferError(WorkerError):
    """A trainer did not connect, died, or its memory cannot be reached, or its data is invalid. The
    link works, and the daemon continues to serve as its state allows."""

    code = ErrorCode.TRANSFER


class DeviceError(WorkerError):
    """The device is unusable: the daemon exits."""

    code = ErrorCode.DEVICE


class InternalError(WorkerError):
    """An invariant of the daemon is broken. Daemons send the code for exceptions that they do not
    raise on purpose."""

    code = ErrorCode.INTERNAL


def _with_code(kind: type[WorkerError]) -> Iterator[type[WorkerError]]:
    for direct in kind.__subclasses__():
        if "code" in vars(direct):
            yield direct
        yield from _with_code(direct)


WORKER_ERRORS: Mapping[ErrorCode, type[WorkerError]] = MappingProxyType(
    {kind.code: kind for kind in _with_code(WorkerError)}
)
"""The class of every ErrorCode; a test checks that none is missing."""


def error_of_rank(
    code: ErrorCode,
    message: str,
    *,
    rank: int,
    endpoint: str,
    scope: ErrorScope = ErrorScope.WORKER,
    traceback: str = "",
) -> WorkerError:
    """Return a rank's error to raise it again in a driver, as the class of its code. The
    constructors are the daemon's, and do not run."""
    kind = WORKER_ERRORS[code]
    error = kind.__new__(kind)
    text = f"rank {rank} at {endpoint}: {code}: {message}"
    error.args = (f"{text}\n{traceback}".rstrip(),)
    error.code, error.scope, error.message = code, scope, message
    error.rank, error.endpoint, error.remote_traceback = rank, endpoint, traceback
    return error

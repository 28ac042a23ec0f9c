"""Every error that the driver library raises on purpose, as one tree, and the total mapping from
the wire's codes to it.

ClientError
 +- ClientConfigError         a setting of the driver's is wrong: names field, value and fix
 |   +- EndpointError             an endpoint that this version cannot use
 |   +- ConfigMismatchError       the daemons hold another configuration: names the differing fields
 |   +- KVPlanError               the KV cache cannot hold what was asked for
 |   `- RequestError              one request or input line: names line, field, value and fix
 +- InvalidSchedulerOutput    a scheduler broke a rule; nothing was sent
 +- TooManyStepsInFlight      more steps were sent than the group has credits for
 +- DeadlineExceeded          an answer did not come in time
 +- AuthenticationError       a daemon refused our key, or has another key than it should
 +- WorkerDied                a daemon is dead, or has been given up
 +- ReplacementFailed         no daemon took a lost rank's place
 +- LinkGivenUp               the ranks cannot reach each other, again and again
 +- LaunchError               a local daemon did not become ready
 +- Unkillable                a local daemon's process does not end by SIGKILL
 +- TraceError                a trace cannot be read, or is no trace
 +- SchedulerStalled          a scheduler has requests, but nothing to send, and nothing is to come
 +- WeightsNotWhole           a weight update is open or has failed: no step can be sent
 +- AdoptionMismatch          ranks disagree about a request that was to be adopted
 +- StepFailed                a step failed on a rank; carries the traceback and what was lost
 `- RemoteError               a daemon refused or failed a request: one class for each ErrorCode
     +- RemoteProtocolError       PROTOCOL
     |   +- RemoteBadFrameError       BAD_FRAME
     |   +- RemoteTooLargeError       TOO_LARGE
     |   +- IncompatibleError         INCOMPATIBLE
     |   +- FencedError               FENCED
     |   +- NotAttachedError          NOT_ATTACHED
     |   +- LeaseHeldError            LEASE_HELD
     |   +- LeaseExpiredError         LEASE_EXPIRED
     |   +- DrainingError             DRAINING
     |   +- ForbiddenError            FORBIDDEN
     |   +- StaleError                STALE
     |   `- GapError                  GAP
     +- IllegalStateError         ILLEGAL_STATE
     +- RemoteConfigError         CONFIG
     |   `- RemoteCheckpointError     CHECKPOINT
     +- InvalidStepError          INVALID_STEP
     +- RemoteCapacityError       CAPACITY
     |   `- RemoteOutOfMemoryError    OUT_OF_MEMORY
     +- CommError                 COMM
     |   `- UpstreamFailedError       UPSTREAM_FAILED
     +- WeightTransferError       TRANSFER
     +- PrecededByError           PRECEDED_BY
     +- RemoteDeviceError         DEVICE
     `- RemoteInternalError       INTERNAL
"""

from collections.abc import Mapping
from types import MappingProxyType

from rpc_schema.errors import ControlErrorReply, ErrorCode, ErrorReply, ErrorScope


class ClientError(Exception):
    """Base of the tree."""


class ClientConfigError(ClientError):
    """A setting is wrong. `field`, `value` and `fix` are attributes and end the message."""

    def __init__(self, message: str, *, field: str, value: object, fix: str) -> None:
        super().__init__(f"{message}; field {field} = {value!r}; fix: {fix}")
        self.field = field
        self.value = value
        self.fix = fix


class EndpointError(ClientConfigError):
    """An endpoint that this version cannot use."""


class ConfigMismatchError(ClientConfigError):
    """The daemons are loaded with another configuration. `differences` names each field that
    differs."""

    def __init__(self, differences: list[str]) -> None:
        super().__init__(
            "the daemons hold another configuration (asked for != loaded)",
            field="config",
            value=differences,
            fix="ask for what is loaded, or load anew with reload=True (--reload)",
        )
        self.differences = tuple(differences)


class KVPlanError(ClientConfigError):
    """The KV cache cannot hold what was asked for."""


class RequestError(ClientConfigError):
    """One request is wrong. `line` is the input line it came from, counted from 1, if any."""

    def __init__(
        self, message: str, *, field: str, value: object, fix: str, line: int | None = None
    ) -> None:
        where = "" if line is None else f"line {line}: "
        super().__init__(where + message, field=field, value=value, fix=fix)
        self.line = line


class TraceError(ClientError):
    """A trace cannot be read, or is no trace."""


class InvalidSchedulerOutput(ClientError):
    """A scheduler's output breaks a rule of `client/scheduler_output.py`; nothing was sent."""


class SchedulerStalled(ClientError):
    """A scheduler with unfinished requests gave no step while none was in flight: no result will
    ever come to change its mind."""


class TooManyStepsInFlight(ClientError):
    """execute_model was called with every credit (pipeline size + 1) in use: take a result
    first."""


class DeadlineExceeded(ClientError):
    """`what` did not happen within `timeout_s` seconds."""

    def __init__(self, what: str, timeout_s: float) -> None:
        super().__init__(f"{what}: no answer within {timeout_s:.3g} s")
        self.what = what
        self.timeout_s = timeout_s


class WorkerDied(ClientError):
    """A daemon is lost: it exited, was killed, or has not answered for too long; `detail` says by
    which signal that is known. The group is unusable until replace() has put another in its
    place."""

    def __init__(self, rank: int, endpoint: str, detail: str = "the connection ended") -> None:
        super().__init__(f"rank {rank} at {endpoint}: {detail}")
        self.rank = rank
        self.endpoint = endpoint
        self.detail = detail


class LinkGivenUp(ClientError):
    """Link after link failed without a step between them that ended well, though all daemons live:
    `ranks` are those that said so, each of an edge to a neighbour. Nothing more is sent; attach()
    begins anew."""

    def __init__(self, ranks: tuple[int, ...], num_failures: int, last: str) -> None:
        who = ", ".join(map(str, ranks)) or "none"
        super().__init__(
            f"the link has failed {num_failures} times in a row (told by ranks: {who}); the last "
            f"time: {last}; fix: see to the network between the ranks, then attach again"
        )
        self.ranks = ranks
        self.num_failures = num_failures


class ReplacementFailed(ClientError):
    """No daemon took the place of a lost rank. `rank` is the one that was waited for last."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class AuthenticationError(ClientError):
    """A connection was refused while its ends made each other's acquaintance. Nothing is tried
    again: the next attempt would end alike."""

    def __init__(self, rank: int, address: str, why: str) -> None:
        super().__init__(f"rank {rank} at {address}: {why}")
        self.rank = rank
        self.address = address
        self.why = why


class WeightsNotWhole(ClientError):
    """A weight update is open or has failed on some rank: finish a complete update, or call
    reload_weights()."""


class AdoptionMismatch(ClientError):
    """Two ranks say different things of a request that an earlier driver has left: none can be
    adopted."""

    def __init__(self, req_id: str, slot: int, field: str, ranks: tuple[int, int]) -> None:
        super().__init__(
            f"ranks {ranks[0]} and {ranks[1]} disagree about {field} of request {req_id!r} in slot "
            f"{slot}; fix: attach without keep_requests, and submit the requests again"
        )
        self.req_id = req_id
        self.slot = slot
        self.field = field
        self.ranks = ranks


class Unkillable(ClientError):
    """UNKILLABLE: processes of daemons have not ended long after SIGKILL. `devices` says by process
    id what they hold."""

    def __init__(self, devices: Mapping[int, str], seconds: float) -> None:
        who = ", ".join(f"process {pid} on {device}" for pid, device in sorted(devices.items()))
        super().__init__(
            f"UNKILLABLE: {who}: it has not ended {seconds:g} s after SIGKILL, so it waits in the "
            "kernel; fix: do not use the device before it, or the node, has been reset"
        )
        self.devices = MappingProxyType(dict(devices))


class LaunchError(ClientError):
    """A local daemon did not become ready. `exit_code` is None while it still runs; `log_tail` ends
    its log."""

    def __init__(self, message: str, *, exit_code: int | None, log_tail: str) -> None:
        super().__init__(f"{message}\n{log_tail}".rstrip())
        self.exit_code = exit_code
        self.log_tail = log_tail


class StepFailed(ClientError):
    """A step failed, and with it every step sent after it.

    `lost_req_ids` are the requests that took part in any of them: their rows are gone, so they must
    be admitted again from their known tokens. `__cause__` is the typed error of the rank (or of the
    transport).
    """

    def __init__(
        self,
        *,
        rank: int,
        code: ErrorCode,
        message: str,
        remote_traceback: str = "",
        lost_req_ids: frozenset[str] = frozenset(),
    ) -> None:
        text = f"rank {rank} failed the step: {code}: {message}"
        super().__init__(f"{text}\n{remote_traceback}".rstrip())
        self.rank = rank
        self.code = code
        self.message = message
        self.remote_traceback = remote_traceback
        self.lost_req_ids = lost_req_ids


class RemoteError(ClientError):
    """A daemon answered with an error. `remote_traceback` is text for people."""

    def __init__(self, reply: ErrorReply | ControlErrorReply, *, rank: int, endpoint: str) -> None:
        text = f"rank {rank} at {endpoint}: {reply.code}: {reply.message}"
        super().__init__(f"{text}\n{reply.traceback}".rstrip())
        self.rank = rank
        self.endpoint = endpoint
        self.code: ErrorCode = reply.code
        self.scope: ErrorScope = reply.scope
        self.message = reply.message
        self.remote_traceback = reply.traceback


class RemoteProtocolError(RemoteError):
    """The daemon says that this driver broke a rule of the wire."""


class RemoteBadFrameError(RemoteProtocolError):
    """The daemon could not decode a message."""


class RemoteTooLargeError(RemoteProtocolError):
    """The daemon refused a message for its size."""


class IncompatibleError(RemoteProtocolError):
    """Protocol versions differ; the message names both."""


class FencedError(RemoteProtocolError):
    """Another driver has attached since, or the link is an old one."""


class NotAttachedError(RemoteProtocolError):
    """The daemon never granted this epoch."""


class LeaseHeldError(RemoteProtocolError):
    """Another driver holds the lease of a daemon. `holder` is its driver id, `holder_name` its
    HOST:PID, `remaining_s` how long the lease lasts unless it is renewed."""

    def __init__(self, reply: ErrorReply | ControlErrorReply, *, rank: int, endpoint: str) -> None:
        super().__init__(reply, rank=rank, endpoint=endpoint)
        lease = reply.lease if isinstance(reply, ControlErrorReply) else None
        self.holder = b"" if lease is None else lease.holder
        self.holder_name = "" if lease is None else lease.holder_name
        self.remaining_s = 0.0 if lease is None else lease.remaining_ms / 1000


class LeaseExpiredError(RemoteProtocolError):
    """This driver did not renew its lease in time: attach again."""


class DrainingError(RemoteProtocolError):
    """An operator has told the daemon to take no more steps and no more drivers. What is loaded
    stays; once the drain is undone a driver can go on."""


class ForbiddenError(RemoteProtocolError):
    """Our key has not the role that the request needs; the message names both."""


class StaleError(RemoteProtocolError):
    """A request older than the replies still kept."""


class GapError(RemoteProtocolError):
    """A request before this one never reached the daemon."""


class IllegalStateError(RemoteError):
    """The operation is not legal in the daemon's state."""


class RemoteConfigError(RemoteError):
    """The daemon refused a setting."""


class RemoteCheckpointError(RemoteConfigError):
    """The model's files are missing, truncated or not what config.json says."""


class InvalidStepError(RemoteError):
    """The step held a value that no kernel may see."""


class RemoteCapacityError(RemoteError):
    """Not enough device memory, KV blocks or rows."""


class RemoteOutOfMemoryError(RemoteCapacityError):
    """An allocation failed; the message says what was asked for and what was free. The next step
    may succeed."""


class CommError(RemoteError):
    """A peer or a link is lost."""


class UpstreamFailedError(CommError):
    """An earlier pipeline stage failed in this step."""


class WeightTransferError(RemoteError):
    """A trainer did not come, died, or its memory cannot be reached; the daemon serves on as its
    state says."""


class PrecededByError(RemoteError):
    """A step before this one failed."""


class RemoteDeviceError(RemoteError):
    """The device is unusable: the daemon ends."""


class RemoteInternalError(RemoteError):
    """An invariant of the daemon is broken: it ends."""


REMOTE_ERRORS: Mapping[ErrorCode, type[RemoteError]] = MappingProxyType(
    {
        ErrorCode.PROTOCOL: RemoteProtocolError,
        ErrorCode.BAD_FRAME: RemoteBadFrameError,
        ErrorCode.TOO_LARGE: RemoteTooLargeError,
        ErrorCode.INCOMPATIBLE: IncompatibleError,
        ErrorCode.FENCED: FencedError,
        ErrorCode.NOT_ATTACHED: NotAttachedError,
        ErrorCode.LEASE_HELD: LeaseHeldError,
        ErrorCode.LEASE_EXPIRED: LeaseExpiredError,
        ErrorCode.DRAINING: DrainingError,
        ErrorCode.FORBIDDEN: ForbiddenError,
        ErrorCode.STALE: StaleError,
        ErrorCode.GAP: GapError,
        ErrorCode.ILLEGAL_STATE: IllegalStateError,
        ErrorCode.CONFIG: RemoteConfigError,
        ErrorCode.CHECKPOINT: RemoteCheckpointError,
        ErrorCode.INVALID_STEP: InvalidStepError,
        ErrorCode.CAPACITY: RemoteCapacityError,
        ErrorCode.OUT_OF_MEMORY: RemoteOutOfMemoryError,
        ErrorCode.COMM: CommError,
        ErrorCode.UPSTREAM_FAILED: UpstreamFailedError,
        ErrorCode.PRECEDED_BY: PrecededByError,
        ErrorCode.TRANSFER: WeightTransferError,
        ErrorCode.DEVICE: RemoteDeviceError,
        ErrorCode.INTERNAL: RemoteInternalError,
    }
)
"""Total over ErrorCode; a test holds it to that."""


def remote_error(reply: ErrorReply | ControlErrorReply, *, rank: int, endpoint: str) -> RemoteError:
    """Return the exception for an error reply."""
    return REMOTE_ERRORS[reply.code](reply, rank=rank, endpoint=endpoint)

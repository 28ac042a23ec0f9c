"""Defines every error that the driver library raises on purpose, as one tree, and maps each wire
code to a class.

ClientError
 +- ClientConfigError         a setting of the driver is wrong: names field, value and fix
 |   +- EndpointError             an endpoint that this version cannot use
 |   |   `- UntrustedEndpointError    another user's process may listen there
 |   +- ConfigMismatchError       the daemons hold another configuration: names the differing fields
 |   +- ContentMismatchError      ranks, or disk and ranks, hold other weights or another adapter
 |   +- KVPlanError               the KV cache cannot hold what was asked for
 |   |- RequestError              one request or input line: names line, field, value and fix
 |   `- OutputError               output of a command could not be written completely
 +- InvalidSchedulerOutput    a scheduler broke a rule: names request, field, value and fix
 +- TooManyStepsInFlight      more steps were sent than the group has credits for
 +- DeadlineExceeded          a reply did not come in time
 +- AuthenticationError       a daemon refused our key, or has not the expected key
 +- OutOfDescriptors          this process has no file descriptor left for a socket
 +- OutOfThreads              this process can start no thread
 +- LeaseNotRenewed           the thread that renews the lease has failed
 +- WorkerDied                a daemon is dead, or has been given up
 |   `- NothingListens            no daemon is at an endpoint: it was not started, or has ended
 +- ReplacementFailed         no daemon took a lost rank's place
 +- LinkGivenUp               links between the ranks failed too often in a row
 +- LaunchError               a local daemon did not become ready
 +- Unkillable                a local daemon's process does not end by SIGKILL
 +- TraceError                a trace cannot be read, or is not a trace
 +- DriverClosed              an AsyncDriver was closed, with its requests
 +- SchedulerStalled          a scheduler has requests, but no step, and no result is pending
 +- WeightsNotWhole           a weight update is open or has failed: no step can be sent
 +- AdoptionMismatch          ranks disagree about a request that was to be adopted
 +- StepFailed                a step failed on a rank; carries the traceback and what was lost
 +- StepLost                  a step has no outcome: it was not sent, or its attach has ended
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

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar

from rpc_schema.errors import ControlErrorReply, ErrorCode, ErrorReply, ErrorScope
from worker_client.shown_values import shown


class ClientError(Exception):
    """Base of the tree."""


class ClientConfigError(ClientError):
    """A setting is wrong. `field`, `value` and `fix` are attributes and end the message."""

    def __init__(self, message: str, *, field: str, value: object, fix: str) -> None:
        super().__init__(f"{message}; field {field} = {self._show(value)}; fix: {fix}")
        self.message = message
        self.field = field
        self.value = value
        self.fix = fix

    @staticmethod
    def _show(value: object) -> str:
        return repr(value)


def config_error(field: str, value: object, problem: str, fix: str) -> ClientConfigError:
    """Return the error of one setting."""
    return ClientConfigError(problem, field=field, value=value, fix=fix)


class EndpointError(ClientConfigError):
    """An endpoint that this version cannot use."""

    def __init__(self, message: str, endpoint: str, fix: str) -> None:
        super().__init__(message, field="endpoint", value=endpoint, fix=fix)


class UntrustedEndpointError(EndpointError):
    """Another user's process may listen at an ipc endpoint, and the daemon there has no key.
    Nothing was sent."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(
            f"another user's process may listen there: {why}",
            address,
            "use a directory of your own, as $XDG_RUNTIME_DIR/wd, run as the daemon's user, or "
            "give --key-file and --known-daemons",
        )


class ConfigMismatchError(ClientConfigError):
    """The daemons are loaded with another configuration. `differences` names each field that
    differs."""

    def __init__(self, differences: list[str]) -> None:
        super().__init__(
            "the daemons hold another configuration (asked for != loaded)",
            field="config",
            value=differences,
            fix="ask for the loaded configuration, or load again with reload=True (--reload)",
        )
        self.differences = tuple(differences)


class ContentMismatchError(ClientConfigError):
    """Ranks of a group would hold different contents of one model or adapter, or contents that are
    no longer those on disk. Nothing is served from them."""


class KVPlanError(ClientConfigError):
    """The KV cache cannot hold the requested blocks or context."""


class RequestError(ClientConfigError):
    """One request is wrong. `line` is the input line it came from, counted from 1, if any."""

    def __init__(
        self, message: str, *, field: str, value: object, fix: str, line: int | None = None
    ) -> None:
        super().__init__(message, field=field, value=value, fix=fix)
        self.reason: str = self.args[0]
        """The message without the line."""
        if line is not None:
            self.args = (f"line {line}: {self.reason}",)
        self.line = line

    @staticmethod
    def _show(value: object) -> str:
        return shown(value)  # it may be of any type and size

    def at_line(self, line: int) -> "RequestError":
        """Return the same error with its line number."""
        return RequestError(
            self.message, field=self.field, value=self.value, fix=self.fix, line=line
        )


def request_error(field: str, value: object, problem: str, fix: str) -> RequestError:
    """Return the error of one field of a request."""
    return RequestError(problem, field=field, value=value, fix=fix)


class OutputError(ClientConfigError):
    """Output could not be written, or only partly: the disk is full, or the path cannot be
    created."""


class TraceError(ClientError):
    """A trace is malformed or cannot be read."""


class InvalidSchedulerOutput(ClientError):
    """A scheduler's output breaks a rule of `scheduler_output.py`; nothing was sent, and no row has
    changed. `req_id`, `field`, `value` and `fix` are attributes and in the message; req_id is None
    if the step as a whole is at fault."""

    def __init__(
        self, message: str, *, field: str, value: object, fix: str, req_id: object = None
    ) -> None:
        who = "" if req_id is None else f"request {shown(req_id)}: "
        super().__init__(f"{who}{message}; field {field} = {shown(value)}; fix: {fix}")
        self.req_id = req_id
        self.field = field
        self.value = value
        self.fix = fix


class DriverClosed(ClientError):
    """An AsyncDriver was closed, and its unfinished requests were aborted."""


class SchedulerStalled(ClientError):
    """A scheduler with unfinished requests gave no step while none was in flight: no result will
    come that could change that."""


class TooManyStepsInFlight(ClientError):
    """execute_model was called with every credit (pipeline size + 1) in use: wait for a result
    first."""


class DeadlineExceeded(ClientError):
    """`what` did not happen within `timeout_s` seconds."""

    def __init__(self, what: str, timeout_s: float) -> None:
        super().__init__(f"{what}: no answer within {timeout_s:.3g} s")
        self.what = what
        self.timeout_s = timeout_s


class OutOfDescriptors(ClientError):
    """This process has no file descriptor left for a socket; nothing was sent."""

    def __init__(self) -> None:
        super().__init__(
            "no file descriptor is left for a socket; fix: close some, or raise the limit of open "
            "files (ulimit -n)"
        )


class OutOfThreads(ClientError):
    """This process can start no thread; nothing was sent."""

    def __init__(self) -> None:
        super().__init__(
            "no thread can be started; fix: end some, free memory, or raise the limit of tasks "
            "(TasksMax= of the unit, pids.max of the cgroup, ulimit -u)"
        )


class LeaseNotRenewed(ClientError):
    """The thread that renews the lease has failed: the lease expires. `__cause__` has the
    reason."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"the lease is not renewed any more: {cause!r}; fix: attach again")


class WorkerDied(ClientError):
    """A daemon is dead: it exited, was killed, or has not answered for too long; `detail` names the
    signal that shows it. The group is unusable until replace() has put another in its place."""

    def __init__(self, rank: int, endpoint: str, detail: str = "the connection ended") -> None:
        super().__init__(f"rank {rank} at {endpoint}: {detail}")
        self.rank = rank
        self.endpoint = endpoint
        self.detail = detail


class NothingListens(WorkerDied):
    """No daemon is at an endpoint: its socket is missing, refuses or may not be connected to, or
    its host does not resolve. `why` has the reason."""

    def __init__(self, rank: int, endpoint: str, why: str, fix: str = "") -> None:
        """fix: other than to start the daemon."""
        fix = fix or f"start it (worker-daemon serve --endpoint {endpoint})"
        super().__init__(
            rank,
            endpoint,
            f"nothing listens there: {why} (signal: transport); fix: {fix}, or wait for it "
            "(--wait SECONDS, attach(wait_s=SECONDS))",
        )
        self.why = why


class LinkGivenUp(ClientError):
    """Links failed several times in a row without a successful step in between, though all daemons
    live. `ranks` are those that reported it; each is next to a broken connection. Nothing more is
    sent; attach() begins again."""

    def __init__(self, ranks: tuple[int, ...], num_failures: int, last: str) -> None:
        who = ", ".join(map(str, ranks)) or "none"
        super().__init__(
            f"the link has failed {num_failures} times in a row (reported by ranks: {who}); the "
            f"last time: {last}; fix: check the network between the ranks, then attach again"
        )
        self.ranks = ranks
        self.num_failures = num_failures


class ReplacementFailed(ClientError):
    """No daemon took the place of a lost rank. `rank` is the last one that was waited for."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class AuthenticationError(ClientError):
    """A connection was refused during its handshake. There is no retry: the next attempt would fail
    the same way."""

    def __init__(self, rank: int, address: str, why: str) -> None:
        super().__init__(f"rank {rank} at {address}: {why}")
        self.rank = rank
        self.address = address
        self.why = why


class WeightsNotWhole(ClientError):
    """A weight update is open or has failed on some rank: finish a complete update, or call
    GroupWeights.reload()."""


class AdoptionMismatch(ClientError):
    """Two ranks disagree about a request that an earlier driver has left: none can be adopted."""

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
    """UNKILLABLE: processes of daemons have not ended long after SIGKILL. `devices` names the
    device of each, by process id."""

    def __init__(self, devices: Mapping[int, str], seconds: float) -> None:
        who = ", ".join(f"process {pid} on {device}" for pid, device in sorted(devices.items()))
        super().__init__(
            f"UNKILLABLE: {who}: it has not ended {seconds:g} s after SIGKILL, so it waits in the "
            "kernel; fix: do not use the device before it, or the node, has been reset"
        )
        self.devices = MappingProxyType(dict(devices))


class LaunchError(ClientError):
    """A local daemon did not become ready. `exit_code` is None while it still runs; `log_tail` is
    the end of its log."""

    def __init__(self, message: str, *, exit_code: int | None, log_tail: str) -> None:
        super().__init__(f"{message}\n{log_tail}".rstrip())
        self.exit_code = exit_code
        self.log_tail = log_tail


class StepFailed(ClientError):
    """A step failed, and with it every step sent after it.

    `lost_req_ids` are the requests that took part in any of them: their rows are dropped, so they
    must be admitted again from their known tokens. `__cause__` is the typed error of the rank (or
    of the transport).
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


class StepLost(ClientError):
    """A step was not sent, or this driver had to attach again after it: it has no outcome."""


class RemoteError(ClientError):
    """A daemon answered with an error. `remote_traceback` is text for people."""

    of_code: ClassVar[ErrorCode]
    """Code of the class; each subclass has another one."""

    def __init_subclass__(cls, *, code: ErrorCode) -> None:
        cls.of_code = code

    def __init__(self, reply: ErrorReply | ControlErrorReply, *, rank: int, endpoint: str) -> None:
        text = f"rank {rank} at {endpoint}: {reply.code}: {reply.message}"
        super().__init__(f"{text}\n{reply.traceback}".rstrip())
        self.rank = rank
        self.endpoint = endpoint
        self.code: ErrorCode = reply.code
        self.scope: ErrorScope = reply.scope
        self.message = reply.message
        self.remote_traceback = reply.traceback


class RemoteProtocolError(RemoteError, code=ErrorCode.PROTOCOL):
    """The daemon reports that this driver broke a rule of the wire."""


class RemoteBadFrameError(RemoteProtocolError, code=ErrorCode.BAD_FRAME):
    """The daemon could not decode a message."""


class RemoteTooLargeError(RemoteProtocolError, code=ErrorCode.TOO_LARGE):
    """The daemon refused a message for its size."""


class IncompatibleError(RemoteProtocolError, code=ErrorCode.INCOMPATIBLE):
    """Protocol versions differ; the message names both."""


class FencedError(RemoteProtocolError, code=ErrorCode.FENCED):
    """Another driver has attached since, or the link is outdated."""


class NotAttachedError(RemoteProtocolError, code=ErrorCode.NOT_ATTACHED):
    """The daemon never granted this epoch."""


class LeaseHeldError(RemoteProtocolError, code=ErrorCode.LEASE_HELD):
    """Another driver holds the lease of a daemon. `holder` is the driver_digest of its id,
    `holder_name` its HOST:PID, `remaining_s` the time until the lease expires unless it is
    renewed. `is_claim`: that driver does not have it yet, but is attaching."""

    def __init__(self, reply: ErrorReply | ControlErrorReply, *, rank: int, endpoint: str) -> None:
        super().__init__(reply, rank=rank, endpoint=endpoint)
        lease = reply.lease if isinstance(reply, ControlErrorReply) else None
        self.holder = b"" if lease is None else lease.holder
        self.holder_name = "" if lease is None else lease.holder_name
        self.remaining_s = 0.0 if lease is None else lease.remaining_ms / 1000
        self.is_claim = lease is not None and lease.state == "claimable"


class LeaseExpiredError(RemoteProtocolError, code=ErrorCode.LEASE_EXPIRED):
    """This driver did not renew its lease in time: attach again."""


class DrainingError(RemoteProtocolError, code=ErrorCode.DRAINING):
    """An operator drains the daemon: it takes no more steps and no more drivers. Everything that is
    loaded stays; once the drain is undone, a driver can continue."""


class ForbiddenError(RemoteProtocolError, code=ErrorCode.FORBIDDEN):
    """Our key lacks the role that the request needs; the message names both."""


class StaleError(RemoteProtocolError, code=ErrorCode.STALE):
    """A request is older than the replies that the daemon keeps."""


class GapError(RemoteProtocolError, code=ErrorCode.GAP):
    """A request before this one never reached the daemon."""


class IllegalStateError(RemoteError, code=ErrorCode.ILLEGAL_STATE):
    """The operation is not legal in the daemon's state."""


class RemoteConfigError(RemoteError, code=ErrorCode.CONFIG):
    """The daemon refused a setting."""


class RemoteCheckpointError(RemoteConfigError, code=ErrorCode.CHECKPOINT):
    """The model's files are missing, truncated or inconsistent with config.json."""


class InvalidStepError(RemoteError, code=ErrorCode.INVALID_STEP):
    """The step had a value that must not reach the kernels."""


class RemoteCapacityError(RemoteError, code=ErrorCode.CAPACITY):
    """Not enough device memory, KV blocks or rows."""


class RemoteOutOfMemoryError(RemoteCapacityError, code=ErrorCode.OUT_OF_MEMORY):
    """An allocation failed; the message has the requested and the free amount. The next step may
    succeed."""


class CommError(RemoteError, code=ErrorCode.COMM):
    """A peer or a link is lost."""


class UpstreamFailedError(CommError, code=ErrorCode.UPSTREAM_FAILED):
    """An earlier pipeline stage failed in this step."""


class WeightTransferError(RemoteError, code=ErrorCode.TRANSFER):
    """A trainer did not connect, died, or its memory cannot be reached. The daemon continues to
    serve as its state allows."""


class PrecededByError(RemoteError, code=ErrorCode.PRECEDED_BY):
    """A step before this one failed."""


class RemoteDeviceError(RemoteError, code=ErrorCode.DEVICE):
    """The device is unusable: the daemon exits."""


class RemoteInternalError(RemoteError, code=ErrorCode.INTERNAL):
    """An invariant of the daemon is broken: it exits."""


def _with_code(kind: type[RemoteError]) -> Iterator[type[RemoteError]]:
    for direct in kind.__subclasses__():
        yield direct
        yield from _with_code(direct)


REMOTE_ERRORS: Mapping[ErrorCode, type[RemoteError]] = MappingProxyType(
    {kind.of_code: kind for kind in _with_code(RemoteError)}
)
"""Maps every ErrorCode; a test checks that."""


def remote_error(reply: ErrorReply | ControlErrorReply, *, rank: int, endpoint: str) -> RemoteError:
    """Return the exception for an error reply."""
    return REMOTE_ERRORS[reply.code](reply, rank=rank, endpoint=endpoint)


def local_error(
    code: ErrorCode,
    message: str,
    *,
    rank: int,
    endpoint: str,
    scope: ErrorScope = ErrorScope.WORKER,
) -> RemoteError:
    """Return the exception for a code that this driver finds itself, before the daemon does."""
    reply = ControlErrorReply(call=0, code=code, scope=scope, message=message)
    return remote_error(reply, rank=rank, endpoint=endpoint)

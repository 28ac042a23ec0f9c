"""Defines the errors that only a driver raises, below WorkerDaemonError (rpc_schema/errors.py), and
makes a daemon's errors from its replies.

ClientError
 +- ClientConfigError         a setting of the driver is wrong: names field, value and fix
 |   +- EndpointError             an endpoint that this version cannot use
 |   |   `- UntrustedEndpointError    another user's process may listen there
 |   +- ConfigMismatchError       the daemons hold another configuration: names the differing fields
 |   +- ContentMismatchError      ranks, or disk and ranks, hold other weights or another adapter
 |   +- KVPlanError               the KV cache cannot hold what was asked for
 |   +- HubModelError             a repository's name does not lead to files: `fault` says why
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
 |   +- NothingListens            no daemon is at an endpoint: it was not started, or has ended
 |   +- WorkerShutsDown           a daemon ends in order, and refuses everything until then
 |   `- ReplicasMissing           replicas lack daemons: names each replica
 +- ReplacementFailed         no daemon took a lost rank's place
 +- ReplicasDiffer            an operation has taken effect in some replicas only: names each
 +- MissedOperationFailed     a replica is back, but cannot do what it has missed
 +- LinkGivenUp               links between the ranks failed too often in a row
 +- LaunchError               a local daemon did not become ready
 +- Unkillable                a local daemon's process does not end by SIGKILL
 +- TraceError                a trace cannot be read, or is not a trace
 +- DriverClosed              an AsyncDriver was closed, with its requests
 +- SchedulerStalled          a scheduler has requests, but no step, and no result is pending
 +- WeightsNotWhole           a weight update is open or has failed: no step can be sent
 +- AdoptionMismatch          ranks disagree about a request that was to be adopted
 +- StepFailed                a step failed on a rank; carries the traceback and what was lost
 `- StepLost                  a step has no outcome: it was not sent, or its attach has ended
"""

from collections.abc import Mapping
from types import MappingProxyType

from model_hub.faults import HubError
from rpc_schema.error_replies import ControlErrorReply, ErrorReply
from rpc_schema.errors import (
    ErrorCode,
    LeaseHeldError,
    WorkerDaemonError,
    WorkerError,
    error_of_rank,
)
from worker_client.shown_values import shown


class ClientError(WorkerDaemonError):
    """Base of the errors that a driver finds."""


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
            "use a private directory, as $XDG_RUNTIME_DIR/wd, run as the daemon's user, or "
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


class HubModelError(ClientConfigError):
    """A model or adapter cannot be had by its repository's name; `fault` is the cause."""

    def __init__(self, error: HubError, field: str) -> None:
        super().__init__(error.problem, field=field, value=error.name, fix=error.fix)
        self.fault = error.fault


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

    def named(self, field: str) -> "RequestError":
        """Return the same error with another name of its field, which may begin its message."""
        is_first = self.message.startswith(self.field)
        message = field + self.message.removeprefix(self.field) if is_first else self.message
        return RequestError(message, field=field, value=self.value, fix=self.fix, line=self.line)


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


class WorkerShutsDown(WorkerDied):
    """A daemon has refused a request because it is shutting down (SIGTERM, `Shutdown`, the loss of
    its device): it counts as dead from then on, though its process may run for a while yet."""

    def __init__(self, rank: int, endpoint: str) -> None:
        super().__init__(
            rank,
            endpoint,
            "it is shutting down, and takes no more requests (signal: announced); fix: start its "
            "successor there, and let that take the rank's place (WorkerGroup.replace, as "
            "Driver(recover=...) may do), or attach to it (attach(wait_s=SECONDS))",
        )


class ReplicasMissing(WorkerDied):
    """Daemons are missing, and a group of several replicas attaches to all of them or to none.
    `by_replica` has, by dp_rank, the error of the first one that each replica lacks."""

    def __init__(self, by_replica: Mapping[int, WorkerDied]) -> None:
        first = next(iter(by_replica.values()))
        super().__init__(first.rank, first.endpoint, first.detail)
        self.by_replica = dict(by_replica)
        lacking = (f"replica {dp_rank} lacks {died}" for dp_rank, died in by_replica.items())
        self.args = ("\n".join(lacking),)


class ReplicasDiffer(ClientError):
    """An operation has taken effect in some replicas only, and could not be taken back. `states`
    says of each replica whether it has done it."""

    def __init__(self, operation: str, states: Mapping[int, str]) -> None:
        self.states = dict(sorted(states.items()))
        each = "; ".join(f"replica {place} {state}" for place, state in self.states.items())
        super().__init__(
            f"{operation}: replicas differ: {each}; fix: remove the cause of the refusal, and send "
            "it again, or undo it in all"
        )
        self.operation = operation


class MissedOperationFailed(ClientError):
    """A replica has all its ranks again, but an operation fails that it has missed. It gets no
    requests, and tries again."""

    def __init__(self, replica: int, operation: str, error: Exception) -> None:
        super().__init__(
            f"replica {replica} is back, but cannot do what it has missed, {operation}: {error}; "
            "it is tried again; fix: remove the cause, or undo the operation in all replicas"
        )
        self.replica = replica
        self.operation = operation


class LinkGivenUp(ClientError):
    """Links failed several times in a row without a successful step in between, though all daemons
    live. `ranks` are those that reported it; each is next to a broken connection. Nothing more is
    sent; attach() starts over."""

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
    must be admitted again from their known tokens. Those of them in `aborted_req_ids` are to end
    instead, because of the weight update that the driver has asked for. `__cause__` is the typed
    error of the rank (or of the transport).
    """

    def __init__(
        self,
        *,
        rank: int,
        code: ErrorCode,
        message: str,
        remote_traceback: str = "",
        lost_req_ids: frozenset[str] = frozenset(),
        aborted_req_ids: frozenset[str] = frozenset(),
    ) -> None:
        text = f"rank {rank} failed the step: {code}: {message}"
        super().__init__(f"{text}\n{remote_traceback}".rstrip())
        self.rank = rank
        self.code = code
        self.message = message
        self.remote_traceback = remote_traceback
        self.lost_req_ids = lost_req_ids
        self.aborted_req_ids = aborted_req_ids


class StepLost(ClientError):
    """A step was not sent, or this driver had to attach again after it: it has no outcome."""


def remote_error(reply: ErrorReply | ControlErrorReply, *, rank: int, endpoint: str) -> WorkerError:
    """Return the error of an error reply, to be raised again."""
    error = error_of_rank(
        reply.code,
        reply.message,
        rank=rank,
        endpoint=endpoint,
        scope=reply.scope,
        traceback=reply.traceback,
    )
    if isinstance(error, LeaseHeldError) and isinstance(reply, ControlErrorReply) and reply.lease:
        error.holder, error.holder_name = reply.lease.holder, reply.lease.holder_name
        error.remaining_s = reply.lease.remaining_ms / 1000
        error.is_claim = reply.lease.state == "claimable"
    return error

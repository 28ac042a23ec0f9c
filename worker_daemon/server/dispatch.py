"""Maps operations to the worker's methods, and declares the interfaces of the worker and the
rendezvous server, which keep torch out of the server."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from rpc_schema import step
from rpc_schema.codec import Frame, StepReplyMessage
from rpc_schema.operations import STEP_OPERATIONS, StepMessage, operation_name
from rpc_schema.weight_transfer import RecomputeRequests
from worker_daemon.contracts.uploads import FindUpload
from worker_daemon.phases import SetPhase
from worker_daemon.worker.description import OnMoveEnd, WorkerDescription


class PendingReply(Protocol):
    """A step whose result may still be on its way to the host."""

    @property
    def is_ready(self) -> bool:
        """True if result() would return at once; known without asking the device."""

    def result(self) -> tuple[StepReplyMessage, Sequence[Frame]]:
        """Wait for the copy and return the reply with its array frames. Called once: on the
        completion thread, or on the step thread if it is ready.

        Raises:
            WorkerError: the step failed after all.
        """


class PlainTraceLike(Protocol):
    """A trace that was written, to be compressed on another thread."""

    def pack(self) -> Path:
        """Compress it and move it to its final path."""


class WorkerLike(Protocol):
    """Runs the operations. Made and used on the step thread; the guard thread calls abort_link,
    dump_link and check_device.

    For each other step operation the worker has a method of the operation's name, which takes the
    message and returns the complete reply, or raises a WorkerError with nothing applied. The three
    step methods return None if this rank owes no reply.
    """

    @property
    def rank(self) -> int:
        """The global rank; 0 before init_device."""

    def execute_model(
        self, message: step.ExecuteModel, arrays: Sequence[Frame]
    ) -> PendingReply | None: ...
    def sample_tokens(
        self, message: step.SampleTokens, arrays: Sequence[Frame]
    ) -> PendingReply | None: ...
    def execute_dummy_batch(self, message: step.ExecuteDummyBatch) -> PendingReply | None: ...

    def refuse_step(self, seq: int) -> None:
        """Make the steps after `seq`, which could not be read, fail until a resynchronization."""

    def start_trace(self) -> None:
        """Start to record steps for an observer, whichever driver sends them."""

    def stop_trace(self, *, keep: bool) -> "PlainTraceLike | None":
        """End the trace; return it if it is to be kept."""

    def read_expert_loads(self) -> Callable[[], bool]:
        """Start to copy the expert loads to the host. The returned function, which any thread may
        call, returns True once the description's expert_loads has them."""

    def listen_to_moves(self, on_end: OnMoveEnd) -> None:
        """Tell the ends of moves of experts to this function, on any thread."""

    def on_attach(self, *, keep_requests: bool) -> bool:
        """Drop all requests unless they are to be kept; return True if no step was cut off and all
        sends were received."""

    def describe(self) -> WorkerDescription:
        """Describe the worker's current state."""

    def abort_link(self, *, frees_peers: bool) -> bool:
        """End every wait for other ranks; return True if that could be done. frees_peers: also end
        their waits for this rank, where the link's backend can end none alone. Called from the
        guard thread."""

    def dump_link(self) -> bytes:
        """Return the communicators' last operations, as text; empty if they are not recorded.
        Called from the guard thread."""

    def check_device(self) -> str:
        """Return the device's current problem; empty if none. Called from the guard thread."""

    def typed_error(self, error: Exception) -> Exception:
        """Return the typed error for an exception of an operation or a step, with its traceback."""

    def step_error(self, error: Exception) -> Exception:
        """Return the typed error for an unexpected failure of a step."""

    def close(self) -> None:
        """Free the resources that process exit would not free."""


class RendezvousServerLike(Protocol):
    """The rendezvous server of one link."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def secret(self) -> bytes: ...
    def close(self) -> None: ...


MakeWorker: TypeAlias = Callable[[SetPhase, FindUpload], WorkerLike]
OpenRendezvousServer: TypeAlias = Callable[[str, int], RendezvousServerLike]
"""Opens a server: (host, number of ranks)."""

STEPS_WITH_ARRAYS: Final = (step.ExecuteModel, step.SampleTokens)
"""Requests whose handler takes (message, arrays)."""
STEPS: Final = (*STEPS_WITH_ARRAYS, step.ExecuteDummyBatch)
"""Requests that only the output rank answers, with a PendingReply; every rank answers the others
with a complete reply."""

RUN_STEPS: Final = (*STEPS, RecomputeRequests)
"""Requests whose unexpected failure leaves other ranks in a step."""


def request_handlers(worker: WorkerLike) -> Mapping[type[StepMessage], Callable[..., Any]]:
    """Map each request to the worker's method of its name (see
    rpc_schema.operations.operation_name), which takes the message. Raises AttributeError if the
    worker lacks a method."""
    return {request: getattr(worker, operation_name(request)) for request in STEP_OPERATIONS}


def legal_silence_s(kind: type[StepMessage], step_deadline_s: float) -> float:
    """Return the seconds without progress after which a request of this kind counts as hung; a
    worker may set shorter phases. Steps have the driver's step deadline.

    A rendezvous of the ranks takes at most 2 * (step deadline + 1) + 5 seconds: enough for a peer
    to notice that its old link is broken. Requests with a rendezvous have a longer limit.
    """
    row = STEP_OPERATIONS[kind]
    own_s = step_deadline_s if row.deadline_s is None else row.deadline_s
    return own_s + (2 * (step_deadline_s + 1) + 5 if row.meets else 0.0)


WAITS_FOR_PEERS: Final[frozenset[type[StepMessage]]] = frozenset(
    request for request, row in STEP_OPERATIONS.items() if row.waits_for_peers
)
"""Requests that aborting the link can end."""

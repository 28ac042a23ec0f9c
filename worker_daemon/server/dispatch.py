"""The static table from message type to worker method, and the interfaces of what the server is
built around. Knows no socket and no thread."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from rpc_schema import lifecycle as lc
from rpc_schema import step
from rpc_schema import weight_transfer as wt
from rpc_schema.adoption import AdoptRequests
from rpc_schema.base import StepReply
from rpc_schema.codec import Frame, StepMessage, StepReplyMessage
from worker_daemon.description import WorkerDescription
from worker_daemon.phases import SetPhase


class PendingReply(Protocol):
    """A step whose result may still be on its way to the host."""

    @property
    def is_ready(self) -> bool:
        """Whether result() would return at once; known without asking the device."""

    def result(self) -> tuple[StepReplyMessage, Sequence[Frame]]:
        """Wait for the copy and return the reply with its array frames. Called once: on the
        completion thread, or on the step thread where it is ready.

        Raises:
            WorkerError: the step failed after all.
        """


class PlainTraceLike(Protocol):
    """A trace that was written, to be compressed on another thread than the step thread."""

    def pack(self) -> Path:
        """Compress it and put it in its place."""

    def discard(self) -> None:
        """Throw it away."""


class WorkerLike(Protocol):
    """What runs the operations. Made and used on the step thread only, `abort_link` apart.

    Each operation takes its message and returns its complete reply, or raises a WorkerError with
    nothing applied. The three step methods return None where no reply is due from this rank.
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
        """A step could not be read, on any rank: those behind it fail as after any failed step."""

    def init_device(self, message: lc.InitDevice) -> StepReply: ...
    def relink(self, message: lc.Relink) -> StepReply: ...
    def reset(self, message: lc.Reset) -> StepReply: ...
    def load_model(self, message: lc.LoadModel) -> StepReply: ...
    def get_kv_cache_spec(self, message: lc.GetKVCacheSpec) -> StepReply: ...
    def determine_available_memory(self, message: lc.DetermineAvailableMemory) -> StepReply: ...
    def initialize_from_config(self, message: lc.InitializeFromConfig) -> StepReply: ...
    def initialize_cache(self, message: lc.InitializeCache) -> StepReply: ...
    def update_max_model_len(self, message: lc.UpdateMaxModelLen) -> StepReply: ...
    def compile_or_warm_up_model(self, message: lc.CompileOrWarmUpModel) -> StepReply: ...
    def get_supported_tasks(self, message: lc.GetSupportedTasks) -> StepReply: ...
    def get_model_metadata(self, message: lc.GetModelMetadata) -> StepReply: ...
    def save_sharded_state(self, message: lc.SaveShardedState) -> StepReply: ...
    def finish_sharded_state(self, message: lc.FinishShardedState) -> StepReply: ...
    def save_tensorized_model(self, message: lc.SaveTensorizedModel) -> StepReply: ...
    def compute_weight_checksums(self, message: lc.ComputeWeightChecksums) -> StepReply: ...
    def profile(self, message: lc.Profile) -> StepReply: ...
    def sleep(self, message: lc.Sleep) -> StepReply: ...
    def wake_up(self, message: lc.WakeUp) -> StepReply: ...
    def discard(self, message: lc.Discard) -> StepReply: ...

    def start_trace(self) -> None:
        """Record the steps to come for an observer, whoever drives."""

    def stop_trace(self, *, keep: bool) -> "PlainTraceLike | None":
        """End that; the trace, if it is to be kept."""

    def init_weight_transfer_engine(self, message: wt.InitWeightTransferEngine) -> StepReply: ...
    def start_weight_update(self, message: wt.StartWeightUpdate) -> StepReply: ...
    def update_weights(self, message: wt.UpdateWeights) -> StepReply: ...
    def finish_weight_update(self, message: wt.FinishWeightUpdate) -> StepReply: ...
    def reload_weights(self, message: wt.ReloadWeights) -> StepReply: ...
    def update_config(self, message: wt.UpdateConfig) -> StepReply: ...

    def adopt_requests(self, message: AdoptRequests) -> StepReply: ...

    def on_attach(self, *, keep_requests: bool) -> bool:
        """Drop all requests, unless they are to be kept; True if nothing was cut off and all sends
        were received."""

    def describe(self) -> WorkerDescription:
        """Say what is on the device now."""

    def abort_link(self) -> bool:
        """End every wait for other ranks; tell whether there was a link to abort. Called from the
        guard thread."""

    def dump_link(self) -> bytes:
        """What the link's communicators last did, for people; empty where nobody knows. Called from
        the guard thread."""

    def check_device(self) -> str:
        """What is amiss with the device, though it may compute; empty: nothing. Called from the
        guard thread."""

    def typed_error(self, error: Exception) -> Exception:
        """Return the typed error for what an operation or a step has raised, with its
        traceback."""

    def step_error(self, error: Exception) -> Exception:
        """Return what a step's failure is called that no one foresaw."""

    def close(self) -> None:
        """Give back what the process end would not."""


class RendezvousServerLike(Protocol):
    """What serves the meeting of one link."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def secret(self) -> bytes: ...
    def close(self) -> None: ...


MakeWorker: TypeAlias = Callable[[str, Sequence[Path], SetPhase, Path | None], WorkerLike]
"""(device, model roots, set_phase, save root)."""
OpenRendezvousServer: TypeAlias = Callable[[str, int], RendezvousServerLike]
"""(host, number of ranks)."""

StepHandler: TypeAlias = Callable[..., PendingReply | None]
OperationHandler: TypeAlias = Callable[..., StepReply]


def array_step_handlers(worker: WorkerLike) -> Mapping[type[StepMessage], StepHandler]:
    """Bind the requests whose handler takes (message, arrays)."""
    return {
        step.ExecuteModel: worker.execute_model,
        step.SampleTokens: worker.sample_tokens,
    }


def step_handlers(worker: WorkerLike) -> Mapping[type[StepMessage], StepHandler]:
    """Bind the requests that only the output rank answers, and whose handler takes the message
    alone."""
    return {step.ExecuteDummyBatch: worker.execute_dummy_batch}


def operation_handlers(worker: WorkerLike) -> Mapping[type[StepMessage], OperationHandler]:
    """Bind the lifecycle operations: every rank answers them."""
    return {
        lc.InitDevice: worker.init_device,
        lc.Relink: worker.relink,
        lc.Reset: worker.reset,
        lc.LoadModel: worker.load_model,
        lc.GetKVCacheSpec: worker.get_kv_cache_spec,
        lc.DetermineAvailableMemory: worker.determine_available_memory,
        lc.InitializeFromConfig: worker.initialize_from_config,
        lc.InitializeCache: worker.initialize_cache,
        lc.UpdateMaxModelLen: worker.update_max_model_len,
        lc.CompileOrWarmUpModel: worker.compile_or_warm_up_model,
        lc.GetSupportedTasks: worker.get_supported_tasks,
        lc.GetModelMetadata: worker.get_model_metadata,
        lc.SaveShardedState: worker.save_sharded_state,
        lc.FinishShardedState: worker.finish_sharded_state,
        lc.SaveTensorizedModel: worker.save_tensorized_model,
        lc.ComputeWeightChecksums: worker.compute_weight_checksums,
        lc.Profile: worker.profile,
        lc.Sleep: worker.sleep,
        lc.WakeUp: worker.wake_up,
        lc.Discard: worker.discard,
        wt.InitWeightTransferEngine: worker.init_weight_transfer_engine,
        wt.StartWeightUpdate: worker.start_weight_update,
        wt.UpdateWeights: worker.update_weights,
        wt.FinishWeightUpdate: worker.finish_weight_update,
        wt.ReloadWeights: worker.reload_weights,
        wt.UpdateConfig: worker.update_config,
        AdoptRequests: worker.adopt_requests,
    }


_OWN_WORK_S: Final[Mapping[type[StepMessage], float]] = {
    lc.LoadModel: 3600.0,
    lc.DetermineAvailableMemory: 900.0,
    lc.InitializeFromConfig: 300.0,
    lc.CompileOrWarmUpModel: 1800.0,
    lc.SaveShardedState: 3600.0,
    lc.SaveTensorizedModel: 3600.0,
    lc.FinishShardedState: 600.0,
    lc.ComputeWeightChecksums: 1800.0,
    lc.Sleep: 600.0,  # its first at level 1 may have to page-lock host memory
    lc.WakeUp: 120.0,
    lc.Discard: 120.0,
    wt.InitWeightTransferEngine: 600.0,  # their handlers set what the driver allows
    wt.StartWeightUpdate: 120.0,
    wt.UpdateWeights: 600.0,
    wt.FinishWeightUpdate: 600.0,
    wt.ReloadWeights: 3600.0,
}
_BESIDE_MEETING_S: Final[Mapping[type[StepMessage], float]] = {
    lc.InitDevice: 120.0,
    lc.Relink: 30.0,
    lc.Reset: 30.0,
}
"""What these take apart from the wait for ranks that are still stuck in their last step."""


def legal_silence_s(kind: type[StepMessage], step_deadline_s: float) -> float:
    """Return the seconds without a sign of life before a request of this kind counts as hung; a
    worker may set finer phases. Steps have the driver's step deadline.

    Ranks meet for at most 2 * (step deadline + 1) + 5 seconds: time enough for a peer to notice
    that its old link is broken. What meets them must be allowed more.
    """
    if kind in _BESIDE_MEETING_S:
        return 2 * (step_deadline_s + 1) + 5 + _BESIDE_MEETING_S[kind]
    return _OWN_WORK_S.get(kind, step_deadline_s)


WAITS_FOR_PEERS: Final[frozenset[type[StepMessage]]] = frozenset(
    (
        lc.InitDevice,
        lc.Relink,
        lc.Reset,
        lc.DetermineAvailableMemory,
        lc.CompileOrWarmUpModel,
        lc.Profile,  # for the steps before it, on the device
        lc.Sleep,
        lc.WakeUp,
        lc.Discard,
        wt.InitWeightTransferEngine,  # for a trainer, and so does the next; the link stays
        wt.UpdateWeights,
        step.ExecuteModel,
        step.SampleTokens,
        step.ExecuteDummyBatch,
    )
)
"""Requests that aborting the link can end."""

"""A worker without a model for the control-plane benchmark: it really validates and applies every
step, and replies with the real size."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from rpc_schema import lifecycle as lc
from rpc_schema import step
from rpc_schema.base import StepReply
from rpc_schema.codec import Frame
from rpc_schema.errors import ConfigError
from rpc_schema.operations import STEP_OPERATIONS, StepMessage, operation_name
from worker_daemon.contracts.arrays import Int32s
from worker_daemon.runner.parts.registry import make_parts
from worker_daemon.runner.replica_counts import ReplicaCounts
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.runner.slot_bitmap import slot_bitmap
from worker_daemon.sample.sampler import TorchSampling
from worker_daemon.worker.description import OnMoveEnd, WorkerDescription

ALL_RANKS = "all-ranks"
"""Model name with which every rank answers every step, not only the output rank."""
MAX_MODEL_LEN = 1 << 20
BLOCK_SIZE = 16
NUM_BLOCKS = 1 << 17
"""More blocks than all rounds of a table use (100,800 in compare_steps), and about as many as a GPU
has."""


_OPERATIONS: Final = frozenset(map(operation_name, STEP_OPERATIONS))


class _Ready:
    """A result that is already on the host."""

    __slots__ = ("_reply", "is_ready")

    def __init__(self, reply: step.ModelRunnerOutput) -> None:
        self._reply = reply
        self.is_ready = True

    def result(self) -> tuple[step.ModelRunnerOutput, list[Frame]]:
        return self._reply, []


class StateWorker:
    """WorkerLike around RequestState alone."""

    def __init__(self, device: str) -> None:
        self.rank = 0
        self._device = device
        self._is_output_rank = True
        self._answers = True
        self._state: RequestState | None = None
        self._counts: ReplicaCounts | None = None
        """None unless its rank is one of replicas in lockstep."""
        self._samples: Int32s = np.zeros(0, np.int32)
        self._slots = b""
        self._tokens = b""
        """Encoded slots of _samples, and a token for each."""

    def execute_model(self, message: step.ExecuteModel, arrays: Sequence[Frame]) -> _Ready | None:
        assert self._state is not None
        scheduled = self._state.apply(message, arrays)
        if not self._answers:
            return None
        if scheduled.num_samples is not self._samples:  # equal rows: same object
            self._samples = scheduled.num_samples
            slots = scheduled.slots[scheduled.num_samples > 0]
            self._slots, self._tokens = slot_bitmap(slots), bytes(4 * slots.size)
        return _Ready(
            step.ModelRunnerOutput(
                epoch=message.epoch,
                seq=message.seq,
                rank=self.rank,
                slots=self._slots,
                sampled_token_ids=self._tokens,
            )
        )

    def sample_tokens(self, message: step.SampleTokens, arrays: Sequence[Frame]) -> None:
        return None

    def execute_dummy_batch(self, message: step.ExecuteDummyBatch) -> None:
        return None

    def refuse_step(self, seq: int) -> None:
        if self._state is not None:
            self._state.mark_failed(seq)

    def init_device(self, message: lc.InitDevice) -> StepReply:
        self.rank = message.rendezvous.rank
        dp_size = message.parallel.data_parallel_size
        self._counts = ReplicaCounts(self.rank, dp_size) if dp_size > 1 else None
        self._is_output_rank = self.rank == message.parallel.world_size - 1
        return self._done(message)

    def load_model(self, message: lc.LoadModel) -> StepReply:
        self._answers = self._is_output_rank or message.model.model == ALL_RANKS
        limits = StepLimits(
            max_num_seqs=message.scheduler.max_num_seqs,
            max_num_batched_tokens=message.scheduler.max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=128_256,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
        )
        parts = make_parts(limits, torch.device("cpu"), TorchSampling())
        self._state = RequestState(limits, parts, self._counts)
        return self._done(message)

    def __getattr__(self, name: str) -> Callable[[StepMessage], StepReply]:
        """Return the method of any other operation, which changes nothing."""
        if name not in _OPERATIONS:
            raise AttributeError(name)
        return self._done

    def start_trace(self) -> None:
        raise ConfigError("this worker has no profiler")

    def stop_trace(self, *, keep: bool) -> None:
        raise ConfigError("this worker has no profiler")

    def read_expert_loads(self) -> Callable[[], bool]:
        return lambda: True

    def listen_to_moves(self, on_end: OnMoveEnd) -> None:
        return None

    def on_attach(self, *, keep_requests: bool) -> bool:
        return True

    def describe(self) -> WorkerDescription:
        return WorkerDescription(self._device)

    def abort_link(self, *, frees_peers: bool) -> bool:
        return False

    def dump_link(self) -> bytes:
        return b""

    def check_device(self) -> str:
        return ""

    def typed_error(self, error: Exception) -> Exception:
        return error

    def step_error(self, error: Exception) -> Exception:
        return error

    def close(self) -> None:
        pass

    def _done(self, message: StepMessage) -> step.Done:
        return step.Done(epoch=message.epoch, seq=message.seq, rank=self.rank)

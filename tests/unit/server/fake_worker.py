"""A worker without a device. A step's first new request names a fault, so that a test injects it
over the wire: `sleep:SECONDS`, `held:FILE` (until there is such a file), `hang` (until the link is
aborted, then fail), `freed` (the same, then succeed), `raise:CODE`, `now:CODE` (from a result that
is ready), `late:CODE` (from one that is waited for), `later:CODE` (from the result, once a relink
runs), `slow:SECONDS` (a result that takes so long), `silent`. A model named `/huge` or `/mute` is
described at too great length, or not at all; one named `held:FILE` loads until there is such a
file."""

import os
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from rpc_schema import errors, lora, step
from rpc_schema import lifecycle as lc
from rpc_schema.base import StepReply
from rpc_schema.codec import Frame
from rpc_schema.config import WorkerConfig
from rpc_schema.identity import ContentIdentity
from rpc_schema.operations import STEP_OPERATIONS, StepMessage, operation_name
from tests.support.default_replies import step_reply
from worker_daemon.contracts.hub import NO_HUB, HubSettings
from worker_daemon.contracts.uploads import FindUpload
from worker_daemon.phases import SetPhase
from worker_daemon.worker.description import WorkerDescription

ERRORS: dict[str, Exception] = {
    "COMM": errors.CommError("peer 1 is gone"),
    "DEVICE": errors.DeviceError("the device is lost"),
    "INVALID_STEP": errors.InvalidStepError("unknown slot", field="scheduled", value=3),
    "UPSTREAM_FAILED": errors.UpstreamFailedError("stage 0 failed"),
    "OTHER": ValueError("nobody foresaw this"),
}

IDENTITY = ContentIdentity(content=bytes(32))


OPERATION_NAMES = frozenset(map(operation_name, STEP_OPERATIONS))


def wait_for_file(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.005)


class FakePending:
    def __init__(
        self,
        reply: step.ModelRunnerOutput,
        late: Exception | None,
        wait_for: threading.Event | None,
        *,
        is_ready: bool,
        seconds: float = 0.0,
    ) -> None:
        self.is_ready = is_ready
        self._reply = reply
        self._late = late
        self._wait_for = wait_for
        self._seconds = seconds

    def result(self) -> tuple[step.ModelRunnerOutput, list[Frame]]:
        if self._wait_for is not None:
            self._wait_for.wait(60)
        time.sleep(self._seconds)
        if self._late is not None:
            raise self._late
        return self._reply, []


class FakeTrace:
    """A file of more than one piece."""

    CONTENT = bytes(range(256)) * 3000

    def pack(self) -> Path:
        file = os.memfd_create("trace")  # open until the process ends
        os.write(file, self.CONTENT)
        return Path(f"/proc/self/fd/{file}")

    def discard(self) -> None:
        pass


class FakeWorker:
    def __init__(self, device: str, set_phase: SetPhase) -> None:
        self.device = device
        self.rank = 0
        self.steps = 0
        self.refused: list[int] = []
        self.descriptions = 0
        self.config: WorkerConfig | None = None
        self.tracing = False
        self._set_phase = set_phase
        self._clean = True
        self._parallel = lc.ParallelConfig()
        self._cache = lc.CacheConfig()
        self._aborted = threading.Event()
        self._relinked = threading.Event()

    def execute_model(
        self, message: step.ExecuteModel, arrays: Sequence[Frame]
    ) -> FakePending | None:
        self.steps += 1
        fault = message.scheduled_new_reqs[0].req_id if message.scheduled_new_reqs else ""
        name, _, value = fault.partition(":")
        if name == "sleep":
            time.sleep(float(value))
        elif name == "held":
            wait_for_file(value)
        elif name in ("hang", "freed"):
            self._hang()
            if name == "hang":
                raise errors.CommError("the link was aborted")
        elif name == "raise":
            raise ERRORS[value]
        elif name == "silent":
            return None
        late = ERRORS[value] if name in ("now", "late", "later") else None
        self._relinked.clear()
        tokens = array("i", [self.steps]).tobytes()
        reply = step_reply(message, self.rank, slots=b"\1", sampled_token_ids=tokens)
        return FakePending(
            reply,
            late,
            self._relinked if name == "later" else None,
            is_ready=name not in ("late", "later", "slow"),
            seconds=float(value) if name == "slow" else 0.0,
        )

    def _hang(self) -> None:
        self._aborted.wait(60)
        self._aborted.clear()
        self._clean = False

    def sample_tokens(
        self, message: step.SampleTokens, arrays: Sequence[Frame]
    ) -> FakePending | None:
        return None

    def execute_dummy_batch(self, message: step.ExecuteDummyBatch) -> FakePending | None:
        return None

    def refuse_step(self, seq: int) -> None:
        self.refused.append(seq)

    def init_device(self, message: lc.InitDevice) -> StepReply:
        self._set_phase("CONNECTING", 5.0)
        self.rank = message.rendezvous.rank
        self._parallel, self._cache = message.parallel, message.cache
        return step_reply(message, self.rank)

    def relink(self, message: lc.Relink) -> StepReply:
        self._relinked.set()
        if message.rendezvous.place.host == "nowhere":
            raise errors.CommError("nobody there")
        return step_reply(message, self.rank)

    def reset(self, message: lc.Reset) -> StepReply:
        if message.to != "MODEL_LOADED":
            self.config = None
        return step_reply(message, self.rank)

    def load_model(self, message: lc.LoadModel) -> StepReply:
        if message.model.model == "/missing":
            raise errors.CheckpointError("no such file", field="model", value="/missing")
        name, _, file = message.model.model.partition(":")
        if name == "held":
            wait_for_file(file)
        self.config = WorkerConfig(
            parallel=self._parallel,
            model=message.model,
            scheduler=message.scheduler,
            cache=self._cache,
            graph=message.graph,
        )
        return step_reply(message, self.rank, max_model_len=64)

    def prepare_lora(self, message: lora.PrepareLora) -> StepReply:
        return step_reply(message, self.rank, identity=IDENTITY)

    def add_lora(self, message: lora.AddLora) -> StepReply:
        return step_reply(message, self.rank, version=message.version, identity=IDENTITY)

    def __getattr__(self, name: str) -> Callable[[StepMessage], StepReply]:
        """Return the method of any other operation, which has nothing to say."""
        if name not in OPERATION_NAMES:
            raise AttributeError(name)
        return lambda message: step_reply(message, self.rank)

    def start_trace(self) -> None:
        if self.config is None:
            raise errors.StateError("no trace can run")
        if self.tracing:
            raise errors.StateError("the worker records already")
        self.tracing = True

    def stop_trace(self, *, keep: bool) -> FakeTrace | None:
        self.tracing = False
        return FakeTrace() if keep else None

    def listen_to_moves(self, on_end: object) -> None:
        return None

    def read_expert_loads(self) -> Callable[[], bool]:
        return lambda: True

    def on_attach(self, *, keep_requests: bool) -> bool:
        clean, self._clean = self._clean, True
        return clean

    def describe(self) -> WorkerDescription:
        self.descriptions += 1
        model = self.config.model.model if self.config else ""
        if model == "/mute":
            raise errors.DeviceError("the device does not answer")
        memory = {"total": 2, "descriptions": self.descriptions}
        if model == "/huge":
            memory |= {"x" * 1000 + str(number): number for number in range(1100)}
        return WorkerDescription(self.device, self.config, None, memory)

    def abort_link(self, *, frees_peers: bool) -> bool:
        self._aborted.set()
        return True

    def check_device(self) -> str:
        return ""

    def dump_link(self) -> bytes:
        return b""

    def typed_error(self, error: Exception) -> Exception:
        return error

    def step_error(self, error: Exception) -> Exception:
        return error

    def close(self) -> None:
        pass


def make_fake_worker(
    device: str,
    model_roots: Sequence[Path],
    set_phase: SetPhase,
    find_upload: FindUpload,
    save_root: Path | None,
    profile_dir: Path | None = None,
    lora_roots: Sequence[Path] = (),
    compiler: None = None,
    hub: HubSettings = NO_HUB,
    max_kv_host_bytes: int | None = None,
    kv_host_dir: Path | None = None,
    kv_file_dir: Path | None = None,
    kv_file_bytes: int = 0,
) -> FakeWorker:
    if device == "cuda:9":
        raise errors.ConfigError("no such device", field="device", value=device)
    return FakeWorker(device, set_phase)

"""`python -m tests.support.stamps.driver LIFE`: one driver of a run. It adopts the requests of its
predecessor, serves under load, updates the weights, and kills what the plan says, itself too."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
from safetensors.torch import load_file

from rpc_schema.config import RendezvousAddress, WorkerConfig
from rpc_schema.errors import TransferError
from rpc_schema.weight_transfer import BroadcastEngine, BroadcastSource, DiskEngine, DiskSource
from tests.support.every_draft import every_draft
from tests.support.stamps.plan import (
    ADAPTER,
    CASES,
    Death,
    Update,
    content_of,
    model_of,
    name_of,
    next_version,
    plan_request,
    plan_updates,
)
from tests.support.stamps.record import Entry, Record
from tests.support.waiting import wait_until
from worker_client.driver import Driver
from worker_client.driver_parts.registry import DriverOptions
from worker_client.errors import ContentMismatchError, WeightsNotWhole, WorkerDied
from worker_client.group.loras import GroupAdapter
from worker_client.group.outcomes import StepFuture
from worker_client.requests import GenerationRequest, with_adapter
from worker_client.scheduler import scheduler_limits
from worker_client.scheduler_output import SchedulerOutput, StepResult
from worker_client.structured.grammars import Grammars
from worker_client.structured.opening import open_grammars
from worker_client.trainer.broadcast import DTYPE_NAMES
from worker_client.trainer.sender import WeightSender
from worker_client.wire.lease import LeaseTerms
from worker_client.wire.worker_client import TensorList
from worker_client.worker_group import WorkerGroup

LOAD = 8
"""Unfinished requests at a time."""
LEASE = LeaseTerms(ttl_s=20.0)
"""It survives a busy host."""
TIMEOUT_S = 20.0
STARTS_WITHIN_S = 120.0
MENDING = Update("disk", "model", "keep", 0, "", 0.0, 0)
"""Behind the death of a rank, whose successor has the weights of its files."""


class Life(msgspec.Struct, frozen=True):
    """A driver's parameters."""

    endpoints: list[str]
    config: WorkerConfig
    num_gpu_blocks: int
    models: list[str]
    case: str
    seed: int
    num_updates: int
    deaths: dict[Death, int]
    record: str


class StampedFuture:
    """A step's future, whose result must have the version that the weights had when the step was
    sent: updates wait for the steps in flight."""

    def __init__(self, future: StepFuture, version: int) -> None:
        self._future = future
        self._version = version

    def __getattr__(self, name: str) -> object:
        return getattr(self._future, name)

    def result(self, *args: float | None) -> StepResult:
        result = self._future.result(*args)
        assert result.weights_version == self._version, (result.weights_version, self._version)
        return result


class Serving:
    """A driver, its group and its place in the plan."""

    def __init__(self, life: Life, group: WorkerGroup, record: Record) -> None:
        self.life, self.group, self.record = life, group, record
        self.case = CASES[life.case]
        self.updates = plan_updates(life.seed, life.num_updates, self.case, life.deaths)
        self.rng = random.Random(len(record.before) ^ life.seed)
        accepted = {entry.req_id for entry in record.before if entry.what == "accepted"}
        ended = {entry.req_id for entry in record.before if entry.what == "ended"}
        self.tried = {entry.number for entry in record.before if entry.what == "tried"}
        self.num_updated = sum(entry.what == "updated" for entry in record.before)
        self.num_accepted, self.open = len(accepted), accepted - ended
        if record.before:
            record.note([Entry("lost")])
        config = self._prepare()
        self._execute = group.execute_model
        group.execute_model = self._send_step  # type: ignore[method-assign]
        self._adapter_version = -1
        """As it was noted last."""
        if self.case.lora:
            self._adapter()
        scheduler = every_draft(scheduler_limits(self.loaded, config))
        adopted = [each for each in group.adopt_requests() if each.req_id in self.open]
        self.driver = Driver(
            group, scheduler, recover=self._replace, options=DriverOptions(self._open_grammars())
        )
        kept, lost = self.driver.claim(adopted)
        assert not lost, lost
        self._deliver(scheduler.adopt_requests(kept))
        known = {each.req_id for each in adopted}
        print(f"adopted {len(known)} of {len(self.open)}", file=sys.stderr, flush=True)
        for req_id in sorted(self.open - known):
            self._add(int(req_id[1:]))

    def run(self) -> None:
        """Do what is left of the plan."""
        for number, update in list(enumerate(self.updates))[self.num_updated :]:
            is_first = number not in self.tried
            self.record.note([Entry("tried", number=number)])
            dying = update.death if is_first else ""
            with self._dying(dying in ("driver", "rank"), dying, update):
                for _ in range(update.num_steps):
                    self._step()
            with self._dying(dying.endswith("in update"), dying, update):
                self._update(update, trainer_dies=dying == "trainer")
                self.num_updated = number + 1
                self.record.note([Entry("updated", number=number)])
        while self.open:
            self._step()

    def _prepare(self) -> WorkerConfig:
        """Load the model, if need be; note which model the weights are of. An update names the
        version that it makes; a load does not."""
        wait_until(self._is_idle, "what a driver has begun before its death is done")
        statuses = self.group.get_status()
        config = self.life.config
        held = [status.config for status in statuses if status.config is not None]
        if held:  # a reload from other files changes it
            config = msgspec.structs.replace(config, model=held[0].model)
        weights = [status.weights for status in statuses]
        is_whole = all(each is not None and each.state == "whole" for each in weights)
        if len({each.model.model for each in held}) > 1:  # and has not reached all ranks
            is_whole = False
        self.loaded = self.group.prepare(config, num_gpu_blocks=self.life.num_gpu_blocks)
        version = self._version
        noted = {e.number: e.model for e in self.record.before if e.what == "version"}
        made = model_of(version) if is_whole else self.life.models.index(config.model.model)
        model = noted.get(version, made)
        self.record.note([Entry("version", number=version, model=model)])
        return config

    def _open_grammars(self) -> Grammars | None:
        metadata, tokenizer = self.loaded.metadata, Path(self.life.models[0])
        if not self.case.grammars:
            return None
        return open_grammars(tokenizer, metadata.vocab_size, metadata.eos_token_ids)

    def _is_idle(self) -> bool:
        return all(status.phase == "IDLE" for status in self.group.get_status())

    @property
    def _version(self) -> int:
        version = self.group.weights.version
        assert version is not None, "a model is loaded"
        return version.number

    def _send_step(self, output: SchedulerOutput) -> StampedFuture:
        return StampedFuture(self._execute(output), self._version)

    def _step(self) -> None:
        if self.num_updated < self.life.num_updates:
            while len(self.open) < LOAD:
                number, self.num_accepted = self.num_accepted, self.num_accepted + 1
                self.record.note([Entry("accepted", f"r{number}")])
                self.open.add(f"r{number}")
                self._add(number)
        try:
            self._deliver(self.driver.step())
        except WeightsNotWhole:  # a rank has died, and its successor has the files' weights
            self._update(MENDING)

    def _add(self, number: int) -> None:
        request: GenerationRequest = plan_request(self.life.seed, number, self.case)
        if request.lora is not None:
            request = with_adapter(request, self._adapter().extension)
        self.driver.add_request(request)

    def _deliver(self, outputs: list) -> None:
        self.record.end(outputs)
        self.open -= {output.req_id for output in outputs}

    def _replace(self, died: WorkerDied) -> None:
        self.record.note([Entry("lost")])
        self.group.replace(died.rank, within_s=STARTS_WITHIN_S)

    def _adapter(self) -> GroupAdapter:
        """Return the adapter as all ranks have it. If they do not, add it again, from its files."""
        known = self.group.loras.known.values()
        found = next((each for each in known if each.name == ADAPTER), None)
        if found is None:
            found = self.group.loras.add(ADAPTER)
        if found.weights_version != self._adapter_version:
            self._note_adapter(found.weights_version)
        return found

    def _note_adapter(self, version: int, running: str = "") -> None:
        self._adapter_version = version
        self.record.note([Entry("adapter", number=version, running=running)])

    def _update(self, update: Update, *, trainer_dies: bool = False) -> None:
        """Bring a new version, whatever dies."""
        if trainer_dies:
            self._lose_trainer(update)
        send = self._send_model if update.target == "model" else self._send_adapter
        while True:
            try:
                send(update)
                return
            except WorkerDied as died:
                self._replace(died)
            except (TransferError, ContentMismatchError) as error:
                # A rank that dies in a transfer may be noticed by its peers first. If it has not
                # finished an update of an adapter, that is removed.
                print(f"again after {error}", file=sys.stderr, flush=True)
                with contextlib.suppress(WorkerDied):
                    self.group.look()

    def _send_model(self, update: Update) -> None:
        known = [each.weights.version for each in self.group.get_status() if each.weights]
        version = next_version(max([self._version, *known]), self.rng)
        model, weights = Path(self.life.models[model_of(version)]), self.group.weights
        budget = self.case.budget if update.running == "recompute" else None
        how: dict[str, Any] = {"running": update.running, "recompute_budget": budget}
        if update.way == "gloo":
            with WeightSender(self.group, "gloo", timeout_s=TIMEOUT_S) as sender:
                tensors = load_file(model / "model.safetensors")
                sender.send(tensors, version=version, **how)
        elif update.way == "files":
            weights.reload(str(model), version=version, **how)
        else:
            weights.init_transfer_engine(DiskEngine())
            weights.start_update(version=version, **how)
            weights.update(TensorList(), DiskSource(model=str(model)))
            weights.finish_update()
        entry = Entry("version", number=version, model=model_of(version), running=update.running)
        self.record.note([entry])

    def _send_adapter(self, update: Update) -> None:
        adapter, weights = self._adapter(), self.group.weights
        version = next_version(adapter.weights_version, self.rng)
        name, running = name_of(content_of(version)), update.running
        if update.way == "gloo":
            tensors = load_file(self._directory / name / "adapter_model.safetensors")
            with WeightSender(self.group, "gloo", timeout_s=TIMEOUT_S) as sender:
                sender.send(tensors, version=version, running=running, target=adapter)
        else:
            weights.init_transfer_engine(DiskEngine())
            weights.start_update(version=version, running=running, target=adapter)
            weights.update(TensorList(), DiskSource(model=name))
            weights.finish_update()
        self._note_adapter(version, running)

    @property
    def _directory(self) -> Path:
        """The directory of the models and the adapter's contents."""
        return Path(self.life.models[0]).parent

    def _lose_trainer(self, update: Update) -> None:
        """Begin an update whose trainer dies in the middle."""
        source = Path(self.life.models[0]) / "model.safetensors"
        target: GroupAdapter | Literal["model"] = "model"
        if update.target == "adapter":
            target = self._adapter()
            source = self._directory / name_of(1) / "adapter_model.safetensors"
        tensors, size = load_file(source), len(self.life.endpoints)
        lifetime = self.rng.randrange(1, len(tensors))
        words = ["gloo", size, source, lifetime, 1]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.dying_trainer", *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        port, secret = process.stdout.readline().split()
        place = RendezvousAddress(host="127.0.0.1", port=int(port), secret=bytes.fromhex(secret))
        engine = BroadcastEngine(backend="gloo", place=place, world_size=size + 1)
        self.group.weights.init_transfer_engine(engine, timeout_s=TIMEOUT_S)
        self.group.weights.start_update(running=update.running, target=target)
        process.stdin.write("send\n")
        process.stdin.flush()
        listed = TensorList(
            tuple(tensors),
            tuple(DTYPE_NAMES[tensor.dtype] for tensor in tensors.values()),
            tuple(tuple(tensor.shape) for tensor in tensors.values()),
        )
        try:
            self.group.weights.update(listed, BroadcastSource(round=1))
        except TransferError:
            assert process.wait() == -signal.SIGKILL
            return
        raise AssertionError("the transfer went on without its trainer")

    @contextlib.contextmanager
    def _dying(self, is_on: bool, death: Death, update: Update) -> Iterator[None]:
        """Kill this process, or a rank's, while the block runs or just behind it."""
        if not is_on:
            yield
            return
        pid = os.getpid()
        if death.startswith("rank"):
            pid = self.group.watch.pid(update.rank)
        killer = threading.Timer(update.delay_s, _kill, (pid,))
        killer.start()
        yield
        killer.join()


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has died already
        os.kill(pid, signal.SIGKILL)


def main(path: Path) -> None:
    """Run the driver that a file describes."""
    life = msgspec.json.decode(path.read_bytes(), type=Life)
    record = Record(Path(life.record))
    with WorkerGroup(life.endpoints, life.config.parallel, lease=LEASE) as group:
        group.attach(force=True, keep_requests=True, wait_s=STARTS_WITHIN_S)
        Serving(life, group, record).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

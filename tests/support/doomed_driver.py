"""`python -m tests.support.doomed_driver PLAN`: a driver that attaches, uses the loaded model,
generates to prove it, reports in one JSON line, and then dies in the middle of a step, or serves
until it is killed. Without a PLAN: forks a driver for each plan that it reads, one per line, and
reports its exit; DriverNursery is the other end. Forking saves starting an interpreter per
driver."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from rpc_schema.codec import decode_step
from rpc_schema.config import WorkerConfig
from rpc_schema.step import ExecuteModel, SampleTokens
from tests.support.forked_processes import ForkedPopen
from tests.support.waiting import PATIENCE_S
from worker_client.driver import Driver
from worker_client.group.loading import LoadedGroup
from worker_client.requests import GenerationRequest
from worker_client.scheduler import Scheduler, SchedulerLimits
from worker_client.wire.lease import LeaseTerms
from worker_client.wire.worker_client import WorkerClient
from worker_client.worker_group import WorkerGroup

NUM_GPU_BLOCKS = 256
_STEPS = (ExecuteModel.__name__, SampleTokens.__name__)


class Death(msgspec.Struct, frozen=True):
    """The point of the driver's death: after it sent a step to some of the ranks."""

    step: int
    """Counted from 1."""
    ranks: list[int]
    after_receipt: bool
    """Wait until the daemons have received it."""


class Plan(msgspec.Struct, frozen=True):
    endpoints: list[str]
    config: WorkerConfig
    prompts: list[list[int]]
    max_tokens: int
    death: Death | None = None
    forever: bool = False
    """Serve until killed."""
    lease_ttl_s: float = 2.0
    force: bool = False
    """Do not wait for a dead driver's lease."""


class Report(msgspec.Struct, frozen=True):
    was_loaded: bool
    phases: list[str]
    """Phases of prepare()."""
    tokens: list[list[int]]


def start(plan: Plan) -> "subprocess.Popen[str]":
    """Start a driver in a separate process."""
    return ForkedPopen(
        [sys.executable, "-m", "tests.support.doomed_driver", msgspec.json.encode(plan).decode()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_report(process: "subprocess.Popen[str]") -> Report:
    """Wait for the driver's report."""
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return msgspec.json.decode(line, type=Report)


class DriverNursery:
    """Runs drivers one at a time until each dies."""

    def __init__(self) -> None:
        self._process = ForkedPopen(
            [sys.executable, "-m", "tests.support.doomed_driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def live(self, plan: Plan) -> tuple[Report, int]:
        """Run a driver until it ends; return its report and exit code."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(plan).decode() + "\n")
        self._process.stdin.flush()
        report = self._process.stdout.readline()
        assert report.startswith("{"), f"no report, but {report!r}"
        return msgspec.json.decode(report, type=Report), int(self._process.stdout.readline())

    def close(self) -> None:
        """End the process that forks them."""
        self._process.communicate(timeout=PATIENCE_S)
        assert self._process.returncode == 0


def fork_drivers() -> None:
    """Fork a driver for each plan on stdin; write its exit code after its report."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(msgspec.json.decode(line, type=Plan))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


@dataclass
class Executioner:
    """Counts the steps sent to the daemons, and ends the process at the last one. A step is known
    by its seq: of replicas in lockstep, one may get the step and another a later sampling."""

    clients: Sequence[WorkerClient]
    death: Death
    step: int = 0
    last_seq: int = 0
    """seq of the last step sent to any of them."""

    def attend(self, client: WorkerClient) -> None:
        """Wrap a client's sending."""
        send = client.send

        def send_and_count(frames: Sequence[bytes]) -> None:
            message = decode_step(frames)
            if client is self.clients[0]:
                self.step += isinstance(message, ExecuteModel)
            if self.step < self.death.step or client.rank in self.death.ranks:
                send(frames)
                self.last_seq = message.seq
            if self.step == self.death.step and client is self.clients[-1]:
                self._die()

        client.send = send_and_count

    def _die(self) -> None:
        while self.death.after_receipt and not all(map(self._has_it, self.death.ranks)):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    def _has_it(self, rank: int) -> bool:
        """Return True if the rank has finished the last step, or is stuck in it."""
        status = self.clients[rank].get_status()
        if status.last_seq >= self.last_seq:
            return True
        stuck = status.phase in _STEPS and status.phase_ms > 20
        return stuck and status.last_seq == self.last_seq - 1


def run(plan: Plan) -> None:
    """Run a plan."""
    terms = LeaseTerms(ttl_s=plan.lease_ttl_s)
    with WorkerGroup(plan.endpoints, plan.config.parallel, lease=terms) as group:
        group.attach(force=plan.force, wait_s=30.0)
        loaded = group.prepare(plan.config, num_gpu_blocks=NUM_GPU_BLOCKS)
        tokens = generate_all(group, loaded, plan)
        report = Report(loaded.was_loaded, list(loaded.seconds), tokens)
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
        sys.stdout.flush()
        if plan.death is not None:
            executioner = Executioner(group.clients, plan.death)
            for client in group.clients:
                executioner.attend(client)
            generate_all(group, loaded, plan)
        while plan.forever:
            generate_all(group, loaded, plan)


def generate_all(group: WorkerGroup, loaded: LoadedGroup, plan: Plan) -> list[list[int]]:
    """Generate greedily for all prompts; return their tokens in order."""
    scheduler = plan.config.scheduler
    limits = SchedulerLimits(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=loaded.max_model_len,
        num_blocks=loaded.num_blocks,
        block_size=loaded.block_size,
        groups=loaded.groups,
        pipeline_parallel_size=plan.config.parallel.pipeline_parallel_size,
    )
    driver = Driver(group, Scheduler(limits))
    for index, prompt in enumerate(plan.prompts):
        tokens = np.array(prompt, np.int32)
        driver.add_request(GenerationRequest(str(index), tokens, max_tokens=plan.max_tokens))
    outputs = {output.req_id: output.token_ids for output in driver.run()}
    return [outputs[str(index)] for index in range(len(plan.prompts))]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(msgspec.json.decode(sys.argv[1], type=Plan))
    else:
        fork_drivers()

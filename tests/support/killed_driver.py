"""Drivers that are killed in the middle of serving, so that others can adopt their requests.

`python -m tests.support.killed_driver` reads one Plan per line, forks a driver for each and reports
its exit. Forking saves starting an interpreter per driver. DriverNursery is the other end.
"""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from rpc_schema.config import WorkerConfig
from tests.support.doomed_driver import NUM_GPU_BLOCKS, Death, Executioner
from tests.support.every_draft import every_draft
from tests.support.forked_processes import ForkedPopen
from tests.support.mock_schedulers import RandomScheduler
from tests.support.waiting import PATIENCE_S
from worker_client.driver import Driver, Recover, give_up
from worker_client.driver_parts.registry import DriverOptions
from worker_client.group.adoption import AdoptedRequest
from worker_client.group.loading import LoadedGroup
from worker_client.inputs.request_parser import RequestParser
from worker_client.replicas.lockstep import LockstepScheduler
from worker_client.requests import GenerationRequest, forked, with_adapter
from worker_client.scheduler import RequestOutput, Scheduler, scheduler_limits
from worker_client.structured.masked_steps import CompiledGrammars
from worker_client.structured.opening import open_grammars
from worker_client.worker_group import WorkerGroup


class Plan(msgspec.Struct, frozen=True):
    """A driver's plan."""

    endpoints: list[str]
    config: WorkerConfig
    lines: list[str]
    """Requests, as `worker-client generate --input` has them."""
    arrivals: list[int] = []
    """Number of results before each line arrives; empty: all arrive at once."""
    adopt: bool = False
    scheduler: Literal["reference", "random"] = "reference"
    death: Death | None = None
    """Counted from the first step of the new epoch on."""
    num_results: int | None = None
    """Be killed, or leave, after this many steps' results."""
    kill_after_s: float = 0.0
    """Time for which it goes on then."""
    num_gpu_blocks: int | None = NUM_GPU_BLOCKS
    directory: str | None = None
    """Directory of the files that lines name."""
    detach: bool = False
    """Detach after num_results, once no step is in flight."""


def make_scheduler(
    plan: Plan, loaded: LoadedGroup
) -> "Scheduler | RandomScheduler | LockstepScheduler":
    limits, parallel = scheduler_limits(loaded, plan.config), plan.config.parallel
    if parallel.data_parallel_lockstep:
        return LockstepScheduler([every_draft(limits) for _ in range(parallel.data_parallel_size)])
    if plan.scheduler == "reference":
        return every_draft(limits)
    return RandomScheduler(limits, seed=len(plan.lines))


class Serving(NamedTuple):
    """A driver that is ready to step."""

    driver: Driver
    adopted: list[AdoptedRequest]
    done: list[RequestOutput]
    """Outputs of requests that had all their tokens already."""
    later: deque[tuple[int, GenerationRequest]]
    """(number of results before a request arrives, request), next one first."""

    def run(self) -> Iterator[list[RequestOutput]]:
        """Step until all requests are done; yield the outputs of each step."""
        num_results = 0
        while self.later or self.driver.busy:
            while self.later and (self.later[0][0] <= num_results or not self.driver.busy):
                self.driver.add_request(self.later.popleft()[1])
            yield self.driver.step()
            num_results += 1


def begin(
    group: WorkerGroup, loaded: LoadedGroup, plan: Plan, recover: Recover = give_up
) -> Serving:
    """Adopt what there is, and add the requests of the lines that are not running, each sample by
    itself."""
    scheduler = make_scheduler(plan, loaded)
    adopted = group.adopt_requests() if plan.adopt else []
    driver = Driver(
        group, scheduler, recover=recover, options=DriverOptions(grammars_of(plan, loaded))
    )
    kept, lost = driver.claim(adopted)
    done = [*lost, *scheduler.adopt_requests(kept)] if adopted else []
    known = {request.req_id for request in adopted}
    directory = None if plan.directory is None else Path(plan.directory)
    parser = RequestParser(None, seed=1, directory=directory)
    later: list[tuple[int, GenerationRequest]] = []
    for index, line in enumerate(plan.lines):
        for request in forked(parser.parse(line, index)):
            if request.id in known:
                continue
            if plan.arrivals:
                later.append((plan.arrivals[index], adapted(group, request)))
            else:
                driver.add_request(adapted(group, request))
    later.sort(key=itemgetter(0))
    return Serving(driver, adopted, done, deque(later))


def adapted(group: WorkerGroup, request: GenerationRequest) -> GenerationRequest:
    """The request with its adapter, if it has one, which the group has from now on."""
    if request.lora is None:
        return request
    return with_adapter(request, group.loras.add(request.lora).extension)


def grammars_of(plan: Plan, loaded: LoadedGroup) -> CompiledGrammars | None:
    """Return the model's grammars, if a line has one."""
    if not any("structured_outputs" in line for line in plan.lines):
        return None
    metadata = loaded.metadata
    model = Path(plan.config.model.model)
    return open_grammars(model, metadata.vocab_size, metadata.eos_token_ids)


def live(plan: Plan) -> None:
    """Run a plan; exit with 0 if it ends without being killed."""
    with WorkerGroup(plan.endpoints, plan.config.parallel) as group:
        group.attach(keep_requests=plan.adopt)
        loaded = group.prepare(plan.config, num_gpu_blocks=plan.num_gpu_blocks)
        serving = begin(group, loaded, plan)
        if plan.death is not None:
            executioner = Executioner(group.clients, plan.death)
            for client in group.clients:
                executioner.attend(client)
        for num_results, _ in enumerate(serving.run(), 1):
            if num_results == plan.num_results:
                if plan.detach:
                    for future in group._steps.pending:
                        future.result()
                    group.detach()
                    return
                # By the kernel's clock: a killer that comes late would find it at its end.
                signal.setitimer(signal.ITIMER_REAL, max(plan.kill_after_s, 1e-6))


def main() -> None:
    """Fork a driver for each line."""
    for line in sys.stdin:
        plan = msgspec.json.decode(line, type=Plan)
        child = os.fork()
        if child == 0:
            live(plan)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"ended {os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


class DriverNursery:
    """Runs drivers one at a time."""

    def __init__(self) -> None:
        self._process = ForkedPopen(
            [sys.executable, "-m", "tests.support.killed_driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(PATIENCE_S) == 0
        self._process.stdout.close()

    def live(self, plan: Plan) -> None:
        """Run a driver until it ends."""
        process = self._process
        process.stdin.write(msgspec.json.encode(plan).decode() + "\n")
        process.stdin.flush()
        killed_by = signal.SIGALRM if plan.num_results is not None else signal.SIGKILL
        expected = 0 if plan.detach else -killed_by
        said = process.stdout.readline().strip()
        assert said == f"ended {expected}", said


if __name__ == "__main__":
    main()

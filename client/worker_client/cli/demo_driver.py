"""`python -m worker_client.cli.demo_driver`: the driver process that `worker-client demo` kills. It
reads a Plan from standard input, serves its requests on running daemons, and writes what happens
to standard output, a message a line. An example of a driver that adopts requests and replaces lost
daemons."""

import sys
import time
from typing import TypeAlias

import msgspec

from rpc_schema.config import WorkerConfig
from rpc_schema.errors import WorkerDaemonError
from worker_client.cli.command_errors import exit_with
from worker_client.driver import Driver
from worker_client.errors import WorkerDied
from worker_client.inputs.request_parser import RequestParser
from worker_client.requests import RequestOutput
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.scheduler_output import StepResult
from worker_client.worker_group import WorkerGroup


class Plan(msgspec.Struct, frozen=True):
    """A driver's task."""

    endpoints: list[str]
    config: WorkerConfig
    lines: list[str]
    """Requests, as the lines of `worker-client generate --input`."""
    replace_within_s: float
    """Wait for the successor of a lost daemon."""
    adopt: bool = False
    """Continue the requests among them that an earlier driver has left running."""


class DriverReady(msgspec.Struct, frozen=True, tag="ready"):
    """The driver serves from now on. Times are of time.monotonic(), which all processes share."""

    at: float
    began: float
    """Time at which the interpreter had imported everything."""
    attached: float
    num_adopted: int
    """Requests that go on where the earlier driver was killed."""
    num_queued: int
    """Requests that begin."""


class StepTokens(msgspec.Struct, frozen=True, tag="sampled"):
    """Tokens of a step."""

    at: float
    num_tokens: int


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """A request's end."""

    req_id: str
    token_ids: list[int]
    error: str = ""


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """A daemon's death, as the driver has noticed it."""

    at: float
    rank: int


class Replaced(msgspec.Struct, frozen=True, tag="replaced"):
    """A successor took the lost daemon's place."""

    at: float
    seconds: dict[str, float]
    """Durations by phase (ReplacementReport.seconds)."""


Message: TypeAlias = DriverReady | StepTokens | Finished | Lost | Replaced


def tell(message: Message) -> None:
    """Write a message. Of a driver that is killed meanwhile, the last line may lack its end."""
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def serve(plan: Plan, began: float) -> None:
    """Serve a plan's requests to their ends."""
    with WorkerGroup(plan.endpoints, plan.config.parallel) as group:
        group.attach(keep_requests=plan.adopt)
        model = group.prepare(plan.config)
        attached = time.monotonic()
        parser = RequestParser(None)
        requests = [parser.parse(line, index) for index, line in enumerate(plan.lines)]
        ids = {request.id for request in requests}
        left = group.adopt_requests() if plan.adopt else []
        adopted = [request for request in left if request.req_id in ids]

        def replace(died: WorkerDied) -> None:
            tell(Lost(time.monotonic(), died.rank))
            report = group.replace(died.rank, None, plan.replace_within_s)
            tell(Replaced(time.monotonic(), report.seconds))

        scheduler = Scheduler(scheduler_limits(model, plan.config))
        driver = Driver(group, scheduler, _tell_tokens, recover=replace)
        kept, ended = driver.claim(adopted)
        for output in [*ended, *scheduler.adopt_requests(kept)]:
            _tell_end(output)
        running = {request.req_id for request in adopted}
        queued = [request for request in requests if request.id not in running]
        for request in queued:
            driver.add_request(request)
        tell(DriverReady(time.monotonic(), began, attached, len(adopted), len(queued)))
        for output in driver.run():
            _tell_end(output)
        group.detach()


def _tell_tokens(result: StepResult) -> None:
    tell(StepTokens(time.monotonic(), len(result.req_ids)))


def _tell_end(output: RequestOutput) -> None:
    tell(Finished(output.req_id, list(output.token_ids), output.error))


def main() -> None:
    """Serve the plan on standard input; an error is one line, as of a command."""
    began = time.monotonic()
    try:
        serve(msgspec.json.decode(sys.stdin.buffer.read(), type=Plan), began)
    except WorkerDaemonError as error:
        exit_with(error)


if __name__ == "__main__":
    main()

"""One run of generate or bench: daemons found or started, model loaded, requests served, all put
back as it was. Prints nothing."""

import contextlib
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from client.cli.options import Device, RunOptions
from client.driver import Driver
from client.errors import RequestError
from client.launcher import LocalDaemons
from client.loading import LoadedModel
from client.requests import GenerationRequest, RequestParser, check_fits
from client.scheduler import RequestOutput, Scheduler, SchedulerLimits
from client.tokenizer import Tokenizer, load_tokenizer
from client.worker_group import Progress, WorkerGroup
from rpc_schema.version import PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class InputRequest:
    """One request of the input, in its place: parsed, or what is wrong with it."""

    id: str
    request: GenerationRequest | None
    error: str = ""


@dataclass(slots=True)
class Served:
    """What came of a run."""

    outputs: dict[str, RequestOutput]
    errors: dict[str, str]
    seconds: float
    driver: Driver
    startup_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Session:
    """A loaded group, ready to serve."""

    group: WorkerGroup
    model: LoadedModel
    tokenizer: Tokenizer | None
    options: RunOptions
    startup_s: dict[str, float]

    def serve(self, inputs: Sequence[InputRequest]) -> Served:
        """Generate for all requests that can be served."""
        scheduler = Scheduler(scheduler_limits(self.model, self.options))
        driver = Driver(self.group, scheduler)
        errors = {entry.id: entry.error for entry in inputs if entry.request is None}
        start = time.monotonic()
        for entry in inputs:
            if entry.request is not None:
                try:
                    self._add(driver, entry.request)
                except RequestError as error:
                    errors[entry.id] = str(error)
        outputs = {output.req_id: output for output in driver.run()}
        return Served(outputs, errors, time.monotonic() - start, driver, self.startup_s)

    def _add(self, driver: Driver, request: GenerationRequest) -> None:
        metadata = self.model.metadata
        check_fits(request, max_model_len=self.model.max_model_len, vocab_size=metadata.vocab_size)
        driver.add_request(request)

    def memory_bytes(self) -> list[dict[str, int]]:
        """Return each daemon's memory by use."""
        return [status.memory_bytes for status in self.group.get_status()]


def scheduler_limits(model: LoadedModel, options: RunOptions) -> SchedulerLimits:
    """Return what the reference scheduler may use of a loaded group."""
    config = options.config
    return SchedulerLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        num_blocks=model.num_blocks,
        block_size=model.block_size,
        pipeline_parallel_size=config.parallel.pipeline_parallel_size,
        eos_token_ids=model.metadata.eos_token_ids,
    )


@contextlib.contextmanager
def open_session(
    options: RunOptions, on_progress: Callable[[Progress], None] | None = None
) -> Iterator[Session]:
    """Attach to the given daemons, or start local ones, and load the model.

    At the end daemons that were given are left running and loaded, and local ones are stopped.
    """
    with contextlib.ExitStack() as stack:
        start = time.monotonic()
        endpoints = options.endpoints or _start_local(stack, options)
        launched = time.monotonic()
        group = stack.enter_context(WorkerGroup(endpoints, options.config.parallel))
        group.attach()
        attached = time.monotonic()
        model = group.prepare(
            options.config,
            num_gpu_blocks=options.num_gpu_blocks,
            fit_max_model_len=options.fit_max_model_len,
            reload=options.reload,
            on_progress=on_progress,
        )
        startup_s = {"launch": launched - start, "attach": attached - launched, **model.seconds}
        startup_s["total"] = time.monotonic() - start
        yield Session(group, model, load_tokenizer(options.model), options, startup_s)
        if options.endpoints:
            group.detach()


def _start_local(stack: contextlib.ExitStack, options: RunOptions) -> list[str]:
    world_size = options.config.parallel.world_size
    cuda = options.device is Device.CUDA
    devices = [f"cuda:{index}" if cuda else "cpu" for index in range(world_size)]
    return stack.enter_context(LocalDaemons(devices, options.model.parent)).endpoints


def read_inputs(
    lines: Sequence[str], tokenizer: Tokenizer | None, seed: int | None
) -> list[InputRequest]:
    """Parse input lines; blank ones are skipped, wrong ones and repeated ids become errors."""
    parser = RequestParser(None if tokenizer is None else tokenizer.encode, seed)
    entries: list[InputRequest] = []
    seen: set[str] = set()
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            request = parser.parse(line, index)
            if request.id in seen:
                raise RequestError(
                    "the id occurs twice",
                    field="id",
                    value=request.id,
                    fix="use each id once",
                    line=index + 1,
                )
        except RequestError as error:
            entries.append(InputRequest(f"line {index + 1}", None, str(error)))
            continue
        seen.add(request.id)
        entries.append(InputRequest(request.id, request))
    return entries


def read_lines(path: Path) -> list[str]:
    """Return the lines of an input file."""
    return path.read_text(encoding="utf-8").split("\n")


def versions() -> dict[str, str]:
    """Return what this driver runs on."""
    return {
        "worker-daemon": version("worker-daemon"),
        "protocol": str(PROTOCOL_VERSION),
        "python": platform.python_version(),
    }

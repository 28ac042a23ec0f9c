"""One run of generate or bench: find or start daemons, load the model, serve the requests, and
restore the previous state."""

import contextlib
import itertools
import os
import platform
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rpc_schema.errors import (
    StateError,
    WorkerDaemonError,
)
from rpc_schema.version import PROTOCOL_VERSION, SOFTWARE_VERSION
from worker_client.cli.downloads import shown_downloads
from worker_client.cli.handover import Handover
from worker_client.cli.input_request import InputRequest as InputRequest
from worker_client.cli.replica_run import OnOutcome, Replica, Served, SharedRun
from worker_client.cli.run_options import RunOptions
from worker_client.driven_group import DrivenGroup
from worker_client.driver import give_up
from worker_client.errors import (
    RequestError,
    config_error,
    request_error,
)
from worker_client.group.adoption import AdoptedRequest
from worker_client.inputs.request_checks import validated
from worker_client.inputs.request_parser import RequestParser
from worker_client.inputs.tokenizer import Tokenizer
from worker_client.replicas.group import DataParallelGroup
from worker_client.replicas.opening import OpenedReplicas, open_replicas
from worker_client.requests import GenerationRequest, forked
from worker_client.scheduler import RequestOutput
from worker_client.tracing.run_times import RequestTiming
from worker_client.tracing.token_times import TokenTimes
from worker_client.worker_group import RankProgress, WorkerGroup
from worker_host.draft_counts import DraftCounts


@dataclass(frozen=True, slots=True)
class Session:
    """A loaded model, ready to serve on all replicas."""

    opened: OpenedReplicas
    options: RunOptions
    startup_s: dict[str, float]
    """Durations of phases, from process start until ready."""
    process_started: float
    """time.monotonic() when this process started."""
    ready: float
    """time.monotonic() when the group was ready to serve."""
    tokenizer: Tokenizer | None = None
    """The model's tokenizer, for stop strings."""

    @property
    def group(self) -> DataParallelGroup:
        """All replicas."""
        return self.opened.group

    @property
    def max_model_len(self) -> int:
        """Longest context that all replicas take."""
        return self.opened.max_model_len

    def adopt_requests(self) -> list[AdoptedRequest]:
        """Return the requests that an earlier driver has left on all replicas."""
        return [each for replica in self.group.replicas for each in replica.adopt_requests()]

    def serve(
        self,
        inputs: Sequence[InputRequest],
        adopted: Sequence[AdoptedRequest] = (),
        on_outcome: OnOutcome = lambda req_id, outcome: None,
        *,
        measured: bool = False,
    ) -> Served:
        """Generate for all requests that can be served, including adopted ones, which stay on their
        replica; the others are shared out evenly, begin when they arrive, and go on in other
        replicas if theirs is lost. on_outcome is called for each as it ends, one at a time.
        measured: begin with an empty prefix cache, and note the time of each token."""
        stopped, one_at_a_time = threading.Event(), threading.Lock()

        def ended(req_id: str, outcome: RequestOutput | str) -> None:
            with one_at_a_time:
                on_outcome(req_id, outcome)

        opened = self.opened.replicas
        replicas = [Replica(each, self.options, self.tokenizer) for each in opened]
        handover = Handover(len(replicas))
        run = SharedRun(
            inputs,
            handover.share_out(inputs, adopted),
            adopted,
            ended,
            handover,
            TokenTimes(),
            measured,
        )
        runs = [
            partial(replica.serve, run, place, stopped.is_set)
            for place, replica in enumerate(replicas)
        ]
        served = self._joined(_run_all(runs, stopped))
        num_tokens = {name: len(output.token_ids) for name, output in served.outputs.items()}
        served.token_gaps_s = run.tokens.gaps_s(num_tokens)
        return served

    def serve_profiled(self, inputs: Sequence[InputRequest], name: str) -> tuple[Served, list[str]]:
        """Generate with a profile of every rank, from before the first step to after the last; also
        return the traces' files, in rank order, each with its path on its daemon's host."""
        with contextlib.ExitStack() as recording:
            for replica in self.group.replicas:
                with contextlib.ExitStack() as starting:
                    starting.callback(_stop_recording, replica)
                    try:
                        replica.profiling.start(name)
                    except StateError:  # another driver's profile runs: not ours to stop
                        starting.pop_all()
                        raise
                    recording.push(starting.pop_all())
            served = self.serve(inputs, measured=True)
            recording.pop_all()
        stopped = self.group.on_whole(lambda replica: replica.profiling.stop())
        return served, [reply.file for replies in stopped for reply in replies]

    def _joined(self, served: Sequence[Served]) -> Served:
        timings = _since_begun(served)
        drafts = DraftCounts()
        for each in served:
            drafts.include(each.drafts)
        first = min((timing.first_token for timing in timings.values()), default=self.ready)
        return Served(
            {req_id: output for each in served for req_id, output in each.outputs.items()},
            {req_id: error for each in served for req_id, error in each.errors.items()},
            max(each.seconds for each in served),
            [record for each in served for record in each.records],
            timings,
            drafts,
            startup_s={
                **self.startup_s,
                "first_token": first - self.ready,
                "total": first - self.process_started,
            },
        )


def _stop_recording(replica: WorkerGroup) -> None:
    """End a profile after a failure: the daemons would keep recording."""
    with contextlib.suppress(WorkerDaemonError):
        replica.profiling.stop()


def _run_all(runs: Sequence[Callable[[], Served]], stopped: threading.Event) -> list[Served]:
    """Make all runs, each on its own thread if there are several. If one fails, or this thread is
    interrupted, the others end with their next step."""
    if len(runs) == 1:
        return [runs[0]()]
    with ThreadPoolExecutor(len(runs), thread_name_prefix="replica") as pool:
        calls = [pool.submit(run) for run in runs]
        try:
            ended, _ = wait(calls, return_when=FIRST_EXCEPTION)
        finally:
            stopped.set()
    for call in (*ended, *calls):  # of several errors the first one: the others follow from it
        call.result()
    return [call.result() for call in calls]


def _since_begun(served: Sequence[Served]) -> dict[str, RequestTiming]:
    """Return the times of all replicas' requests, each since it was begun by the first of them."""
    timings = {req_id: own for each in served for req_id, own in each.timings.items()}
    for each in served:
        for req_id, begun in each.begun.items():
            own = timings.get(req_id)
            if own is not None:
                first = own.first_token if begun.first_token is None else begun.first_token
                added, first = min(own.added, begun.added), min(own.first_token, first)
                timings[req_id] = own._replace(added=added, first_token=first)
    return timings


@contextlib.contextmanager
def open_session(
    options: RunOptions,
    on_progress: Callable[[RankProgress], None] | None = None,
    *,
    keep_requests: bool = False,
    tokenizer: Tokenizer | None = None,
) -> Iterator[Session]:
    """Attach to the given daemons, or start local ones, and load the model. keep_requests: keep the
    previous driver's requests for Session.adopt_requests.

    On exit, given daemons stay running and loaded, and local ones are stopped. The WorkerDied of a
    local daemon includes the end of its log, which is deleted.
    """
    plan = options.plan
    began = time.monotonic()
    process_started = began - _process_age_s()
    if not plan.endpoints:
        download_weights(plan)
    with open_replicas(plan, on_progress, keep_requests=keep_requests) as opened:
        if not (plan.replace_within_s if plan.endpoints else options.restart):
            lasting = (replace(each, recover=give_up) for each in opened.replicas)
            opened = replace(opened, replicas=tuple(lasting))
        startup_s = {"client": began - process_started, **opened.seconds}
        yield Session(opened, options, startup_s, process_started, time.monotonic(), tokenizer)
        if plan.endpoints:
            # The run is complete. Where this fails, the lease ends by itself.
            with contextlib.suppress(WorkerDaemonError):
                opened.group.detach()


def _process_age_s() -> float:
    """Return the seconds since this process began, from Linux's process table (proc_pid_stat(5),
    field 22)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)


def download_weights(plan: DrivenGroup) -> None:
    """Download the weights of local daemons, and show it: see DrivenGroup.download_weights."""
    with shown_downloads() as show:
        plan.download_weights(show)


def read_inputs(
    lines: Sequence[str | bytes],
    tokenizer: Tokenizer | None,
    seed: int | None,
    directory: Path | None = None,
) -> list[InputRequest]:
    """Parse input lines; blank ones are skipped. An invalid line, or one with an id that occurred
    before, becomes an error under the name "line N". A line with several samples becomes one
    request per sample. directory: of the files that lines name."""
    encode = encode_word = None
    if tokenizer is not None:
        encode, encode_word = tokenizer.encode, tokenizer.encode_word
    parser = RequestParser(encode, seed, encode_word=encode_word, directory=directory)
    parsed: list[tuple[int, GenerationRequest | RequestError]] = []
    ids: set[str] = set()
    for index, line in enumerate(lines):
        if line.strip():
            outcome = _parse(parser, line, index, ids)
            if isinstance(outcome, RequestError):
                parsed.append((index, outcome))
            else:
                samples = forked(outcome)
                parsed += [(index, sample) for sample in samples]
                ids.update(sample.id for sample in (outcome, *samples))
    return [
        InputRequest(_line_name(index, ids), None, outcome.reason, index + 1)
        if isinstance(outcome, RequestError)
        else InputRequest(outcome.id, outcome, line=index + 1)
        for index, outcome in parsed
    ]


def _parse(
    parser: RequestParser, line: str | bytes, index: int, ids: Collection[str]
) -> GenerationRequest | RequestError:
    try:
        request = parser.parse(line, index)
        if any(sample.id in ids for sample in (request, *map(validated, forked(request)))):
            raise request_error("id", request.id, "the id occurs twice", "use each id once")
    except RequestError as error:
        return error
    return request


def _line_name(index: int, ids: Collection[str]) -> str:
    """Return "line N", or "line N of the input" if a request has that id."""
    name = f"line {index + 1}"
    more = (f"{name} of the input ({number})" for number in itertools.count(2))
    return next(
        text for text in itertools.chain([name, f"{name} of the input"], more) if text not in ids
    )


def read_lines(path: Path) -> list[bytes]:
    """Return the lines of an input file. Raises ClientConfigError if it cannot be read."""
    try:
        return path.read_bytes().split(b"\n")
    except OSError as error:
        problem = f"it cannot be read: {error.strerror}"
        fix = "name a JSONL file that you may read"
        raise config_error("input", str(path), problem, fix) from error


def versions() -> dict[str, str]:
    """Return the versions of this driver's software."""
    return {
        "worker-daemon": SOFTWARE_VERSION,
        "protocol": str(PROTOCOL_VERSION),
        "python": platform.python_version(),
    }

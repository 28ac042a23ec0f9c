"""Measures vLLM's server with a daemon as its worker, and our own driver on the same daemon:
`python -m benchmarks.vllm_front_end --model DIR --vllm PROGRAM [--rate 8] [--num-open 200]
[--concurrency 64] [--num-closed 256] [--tokens-in 1000] [--tokens-out 200] [--kills 3]
[--device cuda] [--log FILE] [--out FILE.json]`.

Starts one daemon, and PROGRAM `serve` as its driver, with dummy weights. PROGRAM `bench serve`
then sends requests over HTTP: first an open loop (arrivals by a Poisson process), then a closed
loop (a new request when one ends). Then, --kills times, the server gets kill -9 while a request
runs, and a new one is started at once: this is timed from the kill to the first token of a request
to the new server. Finally our driver serves requests with the same arrivals and numbers of tokens.

TTFT and ITL of `bench serve` include HTTP, tokenizing and detokenizing; those of our driver are
measured as in benchmarks/poisson.py. During both loops, the processes of vLLM that have a device
file of the GPU open are counted, and those that nvidia-smi lists.

Run it with the daemons' interpreter. PROGRAM is `vllm` of an environment with the package's `vllm`
extra. A model without a tokenizer gets one in which words of up to four letters are tokens. On a
CPU, with a small model:

    python -m worker_client.cli.demo_model build/demo-model
    python -m benchmarks.vllm_front_end --model build/demo-model --vllm build/vllm/bin/vllm \\
        --device cpu --rate 4 --num-open 20 --concurrency 4 --num-closed 8 --tokens-in 50 \\
        --tokens-out 20
"""

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import shutil
import signal
import socket
import string
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import zmq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.poisson import JsonFigure, Latencies, TokenClock, figures, serve
from benchmarks.workloads import TimedRequest
from rpc_schema.config import ParallelConfig
from rpc_schema.errors import WorkerDaemonError
from worker_client.driver import Driver
from worker_client.driver_parts.registry import DriverOptions
from worker_client.launcher import LocalDaemons
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, SchedulerLimits, scheduler_limits
from worker_client.vllm.settings import ENDPOINTS_VARIABLE
from worker_client.wire.endpoint import new_driver_id, parse_endpoint
from worker_client.wire.worker_client import AskingClient
from worker_client.worker_group import WorkerGroup

NAME: Final = "model"
"""The model's name in requests."""
NUM_DISCARDED: Final = 8
"""Requests served before those that are measured."""
TOKENS_BEFORE_KILL: Final = 20
READY_LIMIT_S: Final = 300.0
END_LIMIT_S: Final = 60.0
POLL_S: Final = 0.01
DEVICE_FILES: Final = "/dev/nvidia"
"""The beginning of the names of the GPU's device files."""
MARKS: Final = {
    "imports": "non-default args",
    "engine process": "Initializing a V1 LLM engine",
    "prepare": "init engine (",
    "HTTP server": "Application startup complete",
}
"""Parts of a server's start, and the text in the server's log that ends each."""
PARTS: Final = ("imports", "engine process", "attach", "prepare", "HTTP server", "first token")
"""All parts of a restart, in order: those of MARKS, the daemon's attach, and the first token."""


def write_word_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write a byte-level BPE tokenizer to tokenizer.json: the bytes, then words of one to four
    letters after a space, until there are vocab_size tokens. Such words are encoded as one token
    each. Raises ValueError if there are fewer words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {byte: index for index, byte in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    stems = ["\u0120"]
    for _ in range(4):
        pairs = itertools.product(stems, string.ascii_lowercase)
        added = list(itertools.islice(pairs, max(0, vocab_size - len(tokens))))
        merges += added
        stems = ["".join(pair) for pair in added]
        tokens |= {word: len(tokens) + index for index, word in enumerate(stems)}
    if len(tokens) != vocab_size:
        raise ValueError(f"vocab_size is {vocab_size}; fix: {len(alphabet)} to {len(tokens)}")
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


@contextlib.contextmanager
def with_tokenizer(model: Path) -> Iterator[Path]:
    """Yield the model's directory; for a model without tokenizer.json a copy that has one."""
    if (model / "tokenizer.json").exists():
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="wd-model-") as name:
        copy = Path(name) / model.name
        shutil.copytree(model, copy)
        config = json.loads((copy / "config.json").read_text())
        write_word_tokenizer(copy, config["vocab_size"])
        yield copy


class Server:
    """A `vllm serve` process group, and the times at which the parts of its start ended."""

    def __init__(self, command: Sequence[str], endpoint: str, port: int, log: Path) -> None:
        """Start it. endpoint: the daemon's; log: file to which its output is appended."""
        self.port = port
        self.marks: dict[str, float] = {}
        """The time at which each part of MARKS ended (time.monotonic())."""
        self._log = log
        self.process = subprocess.Popen(
            command,
            env={**os.environ, ENDPOINTS_VARIABLE: endpoint},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None, "it is a pipe"
        with self._log.open("a") as log:
            for line in self.process.stdout:
                now = time.monotonic()
                for part, text in MARKS.items():
                    if text in line:
                        self.marks.setdefault(part, now)
                log.write(line)
                log.flush()

    def is_ready(self) -> bool:
        """Return True if it answers /health with 200. Raises RuntimeError if it has ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"vllm serve has ended: {self._log.read_text()[-4000:]}")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def tokens(self, prompt: Sequence[int], num_tokens: int) -> Iterator[float]:
        """Send a request; yield the time of each token's arrival (time.monotonic()). Raises
        RuntimeError if it is refused."""
        body = {
            "model": NAME,
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=END_LIMIT_S)
        try:
            head = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), head)
            reply = connection.getresponse()
            if reply.status != 200:
                raise RuntimeError(f"HTTP {reply.status}: {reply.read().decode()[:1000]}")
            for line in reply:
                if line.startswith(b"data: {"):
                    yield time.monotonic()
        finally:
            connection.close()

    def pids(self) -> list[int]:
        """Return the ids of its processes: HTTP server, engine core and their children."""
        own = psutil.Process(self.process.pid)
        return [own.pid, *(child.pid for child in own.children(recursive=True))]

    def kill(self) -> None:
        """Kill -9 all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """Send SIGTERM, as a supervisor does, and wait; then kill what is left."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_LIMIT_S)
        self.kill()


def wait_until_ready(server: Server) -> None:
    """Wait until a server answers. Raises RuntimeError if it ends or takes too long."""
    deadline = time.monotonic() + READY_LIMIT_S
    while not server.is_ready():
        if time.monotonic() > deadline:
            raise RuntimeError(f"vllm serve does not answer after {READY_LIMIT_S:g} s")
        time.sleep(POLL_S)


def free_port() -> int:
    """Return a TCP port at which no process listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def opens_gpu(pid: int) -> bool:
    """Return True if a process has a device file of a GPU open or mapped, False if it has ended."""
    root = Path("/proc") / str(pid)
    with contextlib.suppress(OSError):
        if DEVICE_FILES in (root / "maps").read_text():
            return True
        return any(
            str(file.readlink()).startswith(DEVICE_FILES) for file in (root / "fd").iterdir()
        )
    return False


class GpuUsers(threading.Thread):
    """Checks once a second which processes use the GPU, until stop()."""

    def __init__(self, server: Server, daemons: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self._server, self._daemons = server, daemons
        self._stopped = threading.Event()
        self.most: dict[str, int] = {}
        """The largest count seen, by name."""
        self.lines: set[str] = set()
        """All different lines of nvidia-smi."""

    def run(self) -> None:
        while not self._stopped.wait(1.0):
            ours = self._server.pids()
            listed = _gpu_processes()
            self.lines |= set(listed)
            pids = {int(line.split(",")[0]) for line in listed if line[:1].isdigit()}
            counts = {
                "vLLM's processes": len(ours),
                "vLLM's with a device file open": sum(map(opens_gpu, ours)),
                "daemons with a device file open": sum(map(opens_gpu, self._daemons)),
                "processes listed by nvidia-smi": len(listed),
                "vLLM's listed by nvidia-smi": len(pids.intersection(ours)),
            }
            for name, count in counts.items():
                self.most[name] = max(count, self.most.get(name, 0))

    def stop(self) -> Iterator[JsonFigure]:
        """End the thread; yield the largest counts."""
        self._stopped.set()
        self.join()
        for line in sorted(self.lines):
            print(f"  nvidia-smi: {line}")
        for name, count in self.most.items():
            yield {"name": name, "value": count, "unit": ""}


def _gpu_processes() -> list[str]:
    command = ["nvidia-smi", "--query-compute-apps=pid,name,used_memory", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return []
    return [line for line in done.stdout.splitlines() if line.strip()]


class FrontEnd:
    """Starts vLLM's programs for one daemon and one model."""

    def __init__(self, options: argparse.Namespace, model: Path, daemons: LocalDaemons) -> None:
        self._options, self._model, self._daemons = options, model, daemons
        self._port = free_port()
        self._environment = {**os.environ, ENDPOINTS_VARIABLE: daemons.endpoints[0]}
        """The environment of vLLM's commands. Without the endpoint, they look for a device."""
        self.log = Path(options.log)

    def start(self) -> Server:
        """Start a server; return before it answers."""
        options = self._options
        words = {
            "--dtype": "float32" if options.device == "cpu" else "bfloat16",
            "--load-format": "dummy",
            "--max-model-len": str(2 * (options.tokens_in + options.tokens_out)),
            "--max-num-seqs": str(options.max_num_seqs),
            "--max-num-batched-tokens": str(options.max_num_batched_tokens),
            "--served-model-name": NAME,
            "--host": "127.0.0.1",
            "--port": str(self._port),
            "--shutdown-timeout": "10",
        }
        if options.device == "cpu":
            words["--kv-cache-memory-bytes"] = str(256 << 20)
        pairs = (word for pair in words.items() for word in pair)
        command = [options.vllm, "serve", str(self._model), *pairs]
        return Server(command, self._daemons.endpoints[0], self._port, self.log)

    def bench(self, num_requests: int, *words: str) -> dict[str, Any]:
        """Run `bench serve` with random prompts; return what it reports. Raises RuntimeError if
        a request fails."""
        options = self._options
        with tempfile.TemporaryDirectory(prefix="wd-bench-") as directory:
            given = {
                "--model": str(self._model),
                "--served-model-name": NAME,
                "--port": str(self._port),
                "--dataset-name": "random",
                "--random-input-len": str(options.tokens_in),
                "--random-output-len": str(options.tokens_out),
                "--num-prompts": str(num_requests),
                "--temperature": "0",
                "--percentile-metrics": "ttft,itl",
                "--metric-percentiles": "50,99",
                "--result-dir": directory,
                "--result-filename": "result.json",
            }
            command = [options.vllm, "bench", "serve", *(w for pair in given.items() for w in pair)]
            command += ["--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]
            with self.log.open("a") as log:
                subprocess.run(
                    [*command, *words], env=self._environment, stdout=log, stderr=log, check=True
                )
            report: dict[str, Any] = json.loads((Path(directory) / "result.json").read_text())
        if report["completed"] != num_requests:
            raise RuntimeError(f"{report['completed']} of {num_requests} requests are complete")
        return report


def latencies_of(report: Mapping[str, Any]) -> Latencies:
    """Return the latencies of all requests in a report of `bench serve`."""
    return Latencies(
        seconds=report["duration"],
        num_tokens=report["total_output_tokens"],
        ttft_s=report["ttfts"],
        itl_s=[itl for itls in report["itls"] for itl in itls],
    )


def requests_of(report: Mapping[str, Any], vocab_size: int, seed: int) -> list[TimedRequest]:
    """Return requests with random prompts, and with the arrivals and lengths of those in a report
    of `bench serve`."""
    rng = random.Random(seed)
    starts = report["start_times"]
    rows = sorted(zip(starts, report["input_lens"], report["output_lens"], strict=True))
    return [
        TimedRequest(at - rows[0][0], [rng.randrange(vocab_size) for _ in range(num_in)], num_out)
        for at, num_in, num_out in rows
    ]


def serve_closed(
    group: WorkerGroup, limits: SchedulerLimits, requests: Iterable[TimedRequest], concurrency: int
) -> Latencies:
    """Serve requests in a closed loop: `concurrency` of them run at a time, and their arrivals are
    ignored."""
    latencies = Latencies()
    clock = TokenClock(latencies)
    driver = Driver(
        group, Scheduler(limits), clock.take, options=DriverOptions(keeps_prefixes=False)
    )
    waiting = deque(enumerate(requests))
    num_running = 0
    began = time.monotonic()
    while waiting or num_running:
        while waiting and num_running < concurrency:
            index, (_, prompt, num_out) = waiting.popleft()
            clock.arrived(str(index), time.monotonic())
            tokens = np.array(prompt, np.int32)
            driver.add_request(
                GenerationRequest(
                    str(index), tokens, num_out, sampling=SamplingParams(ignore_eos=True)
                )
            )
            num_running += 1
        num_running -= len(driver.step())
    latencies.seconds = time.monotonic() - began
    for _ in driver.run():  # the daemons forget the last requests
        pass
    return latencies


def parts_of(moments: Mapping[str, float], began: float) -> dict[str, float]:
    """Return the durations of PARTS from the times at which they ended. A part without a time
    belongs to the next one. A time that was seen late (the attach is polled for) is moved back to
    the end of the next part."""
    parts: dict[str, float] = {}
    known = [part for part in PARTS if part in moments]
    for index, part in enumerate(known):
        end = min(moments[later] for later in known[index:])
        parts[part] = end - began
        began = end
    return parts


def kill_and_restart(
    front: FrontEnd, server: Server, client: AskingClient, max_tokens: int
) -> tuple[Server, dict[str, float]]:
    """Kill a server while a request runs, and start another at once. Return it, and the seconds
    from the kill to the first token of a new request, by part and as `total`."""
    prompt = list(range(1, 33))
    before = client.get_status().epoch
    for _ in itertools.islice(server.tokens(prompt, max_tokens), TOKENS_BEFORE_KILL):
        pass
    killed = time.monotonic()
    server.kill()
    server = front.start()
    moments: dict[str, float] = {}
    deadline = killed + READY_LIMIT_S
    while not server.is_ready():
        if "attach" not in moments:
            with contextlib.suppress(WorkerDaemonError):
                if client.get_status().epoch != before:
                    moments["attach"] = time.monotonic()
        if time.monotonic() > deadline:
            raise RuntimeError(f"the new server does not answer after {READY_LIMIT_S:g} s")
        time.sleep(POLL_S)
    moments["first token"] = next(server.tokens(prompt, 1))
    parts = parts_of({**server.marks, **moments}, killed)
    return server, {**parts, "total": moments["first token"] - killed}


def measure_server(
    front: FrontEnd, daemons: LocalDaemons, options: argparse.Namespace
) -> Iterator[tuple[JsonFigure, dict[str, Any]]]:
    """Run the server's measurements; yield each figure with the report of `bench serve` that it is
    from, under "open" or "closed", or with an empty dict."""
    began = time.monotonic()
    server = front.start()
    try:
        wait_until_ready(server)
        yield {"name": "first start", "value": time.monotonic() - began, "unit": "s"}, {}
        front.bench(NUM_DISCARDED, "--seed", "1")
        users = GpuUsers(server, daemons.pids)
        users.start()
        opened = front.bench(options.num_open, "--seed", "2", "--request-rate", str(options.rate))
        for figure in figures(f"server, {options.rate:g} requests/s", latencies_of(opened)):
            yield figure, {"open": opened}
        words = ("--seed", "3", "--max-concurrency", str(options.concurrency))
        closed = front.bench(options.num_closed, *words)
        for figure in figures(f"server, {options.concurrency} at a time", latencies_of(closed)):
            yield figure, {"closed": closed}
        for figure in users.stop():
            yield figure, {}
        endpoint = parse_endpoint(daemons.endpoints[0])
        with zmq.Context() as context:
            client = AskingClient(context, endpoint, 0, new_driver_id())
            try:
                weights = client.get_status().memory_bytes["weights"]
                max_tokens = options.tokens_in + options.tokens_out
                for index in range(options.kills):
                    server, parts = kill_and_restart(front, server, client, max_tokens)
                    for part, seconds in parts.items():
                        name = f"kill {index + 1} to first token: {part}"
                        yield {"name": name, "value": seconds, "unit": "s"}, {}
                if client.get_status().memory_bytes["weights"] != weights:
                    raise RuntimeError("the daemon's weights have changed")
            finally:
                client.close()
        server.end()
    finally:
        server.kill()


def measure_driver(
    daemons: LocalDaemons, reports: Mapping[str, Any], options: argparse.Namespace
) -> Iterator[JsonFigure]:
    """Serve the same requests with our driver, on the model that the server has loaded; yield
    figures."""
    with WorkerGroup(daemons.endpoints, ParallelConfig()) as group:
        config = group.attach(wait_for_lease_s=END_LIMIT_S)[0].config
        if config is None:
            raise RuntimeError("the daemon has no model")
        loaded = group.prepare(config)
        limits = scheduler_limits(loaded, config)
        size = loaded.metadata.vocab_size
        opened = requests_of(reports["open"], size, seed=2)
        serve(group, limits, opened[:NUM_DISCARDED])
        yield from figures(f"our driver, {options.rate:g} requests/s", serve(group, limits, opened))
        closed = serve_closed(
            group, limits, requests_of(reports["closed"], size, seed=3), options.concurrency
        )
        yield from figures(f"our driver, {options.concurrency} at a time", closed)


def measure(options: argparse.Namespace) -> Iterator[JsonFigure]:
    """Yield all figures, in the order in which they are measured."""
    device = "cpu" if options.device == "cpu" else "cuda:0"
    reports: dict[str, Any] = {}
    with (
        with_tokenizer(options.model.resolve()) as model,
        LocalDaemons([device], model.parent) as daemons,
    ):
        front = FrontEnd(options, model, daemons)
        for figure, report in measure_server(front, daemons, options):
            reports |= report
            yield figure
        yield from measure_driver(daemons, reports, options)


def parse_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vllm", required=True, help="vLLM's program")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--num-open", type=int, default=200, help="requests of the open loop")
    parser.add_argument("--concurrency", type=int, default=64, help="of the closed loop")
    parser.add_argument("--num-closed", type=int, default=256, help="requests of the closed loop")
    parser.add_argument("--tokens-in", type=int, default=1000)
    parser.add_argument("--tokens-out", type=int, default=200)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument(
        "--log", type=Path, default=Path("vllm_front_end.log"), help="vLLM's output"
    )
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def main() -> None:
    """Measure, print, and with --out write a list of figures."""
    options = parse_options()
    found = []
    for figure in measure(options):
        print(f"{figure['name']:<56} {figure['value']:>10.3f} {figure['unit']}", flush=True)
        found.append(figure)
        if options.out is not None:
            options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

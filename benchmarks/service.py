"""Measures `worker-client serve` beside our drivers on the same daemons:
`python -m benchmarks.service --model DIR [--rate 8] [--seconds 60] [--concurrency 64]
[--num-closed 512] [--tokens-in 1000] [--tokens-out 200] [--device cuda] [--out FILE.json]`.

An open loop (requests that arrive by a seeded Poisson process) runs on a Driver, then over HTTP
with the same arrivals. A closed loop (a new request when one ends) runs on an AsyncDriver, over
HTTP, and on an AsyncDriver again. Prompts are token ids, new ones in each pass, and answers are
streamed.

TTFT runs from a request's arrival to its first token, over HTTP to the first event. ITL is the time
between two tokens, over HTTP between two events; it is taken in the open loop. The client is this
process, the server another one. On a CPU, with a small model:

    python -m worker_client.cli.demo_model build/demo-model
    python -m benchmarks.service --model build/demo-model --device cpu --rate 4 --seconds 5 \\
        --concurrency 8 --num-closed 32 --tokens-in 50 --tokens-out 20
"""

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from benchmarks import workloads
from benchmarks.local_group import devices_of
from benchmarks.poisson import JsonFigure, Latencies, figures, serve, worker_config
from benchmarks.vllm_front_end import free_port, with_tokenizer
from benchmarks.workloads import TimedRequest
from rpc_schema.config import WorkerConfig
from worker_client.async_driver import AsyncDriver
from worker_client.driver import Driver
from worker_client.launcher import LocalDaemons
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.worker_group import WorkerGroup

NUM_DISCARDED = 4
READY_LIMIT_S = 300.0
POLL_S = 0.05

Ask: TypeAlias = Callable[[TimedRequest], AsyncIterator[int]]
"""Serves a request; yields the number of its new tokens, as they come."""


class HttpClient:
    """Asks for streamed completions, each on a connection of its own."""

    def __init__(self, port: int, name: str) -> None:
        self.port = port
        self._name = name

    async def ask(self, request: TimedRequest) -> AsyncIterator[int]:
        """Yield 1 for each event with text, and the tokens that this leaves out at the end. Raises
        RuntimeError if the request is refused or fails."""
        body = {
            "model": self._name,
            "prompt": list(request.prompt),
            "max_tokens": request.num_out,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        num_seen = 0
        async with self._post(json.dumps(body).encode()) as lines:
            async for line in lines:
                event = json.loads(line)
                if "error" in event:
                    raise RuntimeError(line.decode())
                if event["choices"]:
                    num_seen += 1
                    yield 1
                else:
                    yield event["usage"]["completion_tokens"] - num_seen

    @contextlib.asynccontextmanager
    async def _post(self, body: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            status = await reader.readline()
            if b" 200 " not in status:
                raise RuntimeError((status + await reader.read()).decode())
            yield _events(reader)
        finally:
            writer.close()


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the data of each event; the server sends each in a chunk."""
    async for line in reader:
        if line.startswith(b"data: {"):
            yield line.removeprefix(b"data: ")


async def timed(ask: Ask, request: TimedRequest, arrived: float, latencies: Latencies) -> None:
    """Serve a request, and note its tokens."""
    last = None
    async for num_new in ask(request):
        now = time.monotonic()
        if last is None:
            latencies.ttft_s.append(now - arrived)
        else:
            latencies.itl_s.append(now - last)
        last = now
        latencies.num_tokens += num_new


async def open_loop(ask: Ask, requests: Sequence[TimedRequest]) -> Latencies:
    """Serve requests as they arrive."""
    latencies, began = Latencies(), time.monotonic()

    async def one(request: TimedRequest) -> None:
        arrives = began + request.arrival_s
        await asyncio.sleep(arrives - time.monotonic())
        await timed(ask, request, arrives, latencies)

    await asyncio.gather(*map(one, requests))
    latencies.seconds = time.monotonic() - began - (requests[0].arrival_s if requests else 0.0)
    return latencies


async def closed_loop(ask: Ask, requests: Sequence[TimedRequest], concurrency: int) -> Latencies:
    """Serve requests, `concurrency` of them at a time."""
    latencies, waiting, began = Latencies(), iter(requests), time.monotonic()

    async def one_after_another() -> None:
        for request in waiting:
            await timed(ask, request, time.monotonic(), latencies)

    await asyncio.gather(*(one_after_another() for _ in range(concurrency)))
    latencies.seconds = time.monotonic() - began
    return latencies


def on_async_driver(
    daemons: LocalDaemons,
    config: WorkerConfig,
    work: Callable[[Ask], Coroutine[None, None, Latencies]],
) -> Latencies:
    """Do work with an AsyncDriver on these daemons."""

    @contextlib.contextmanager
    def open_driver() -> Iterator[Driver]:
        with WorkerGroup(daemons.endpoints, config.parallel) as group:
            group.attach()
            loaded = group.prepare(config)
            yield Driver(group, Scheduler(scheduler_limits(loaded, config)))

    async def run() -> Latencies:
        async with AsyncDriver(open_driver) as driver:
            names = iter(range(1 << 30))

            async def ask(request: TimedRequest) -> AsyncIterator[int]:
                made = GenerationRequest(
                    str(next(names)),
                    np.array(request.prompt, np.int32),
                    request.num_out,
                    sampling=SamplingParams(ignore_eos=True),
                )
                async for progress in driver.generate(made):
                    if progress.token_ids:
                        yield len(progress.token_ids)

            return await work(ask)

    return asyncio.run(run())


@contextlib.contextmanager
def serving(
    model: Path, daemons: LocalDaemons, options: argparse.Namespace, words: Sequence[str] = ()
) -> Iterator[HttpClient]:
    """Start a server on these daemons; end it afterwards. words: more options of the command."""
    config, port = worker_config(options), free_port()
    command = {
        "--model": str(model),
        "--endpoints": ",".join(daemons.endpoints),
        "--port": str(port),
        "--served-model-name": "model",
        "--load-format": config.model.load_format,
        "--dtype": config.model.dtype,
        "--max-model-len": str(config.model.max_model_len),
        "--max-num-seqs": str(options.max_num_seqs),
        "--max-num-batched-tokens": str(options.max_num_batched_tokens),
        "--block-size": str(config.cache.block_size),
        "--pipeline-parallel-size": str(options.pp),
        "--tensor-parallel-size": str(options.tp),
    }
    flat = [word for pair in command.items() for word in pair]
    server = subprocess.Popen([sys.executable, "-m", "worker_client", "serve", *flat, *words])
    try:
        asyncio.run(_until_ready(port, server))
        yield HttpClient(port, "model")
    finally:
        server.terminate()
        server.wait()


async def _until_ready(port: int, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + READY_LIMIT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server has ended with code {server.returncode}")
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            status = await reader.readline()
            writer.close()
            if b" 200 " in status:
                return
        await asyncio.sleep(POLL_S)
    raise RuntimeError(f"the server does not answer after {READY_LIMIT_S:g} s")


def renewed(requests: Sequence[TimedRequest], vocab_size: int, seed: int) -> list[TimedRequest]:
    """Return the same requests with new prompts, which no prefix cache holds."""
    source = random.Random(seed)
    return [
        request._replace(prompt=[source.randrange(vocab_size) for _ in request.prompt])
        for request in requests
    ]


def measure(options: argparse.Namespace, model: Path, daemons: LocalDaemons) -> list[JsonFigure]:
    """Run all passes; print and return the figures."""
    config = worker_config(options)
    found: list[JsonFigure] = []

    def report(title: str, latencies: Latencies) -> None:
        for figure in figures(title, latencies):
            print(f"{figure['name']:<64} {figure['value']:>10.1f} {figure['unit']}", flush=True)
            found.append(figure)

    with WorkerGroup(daemons.endpoints, config.parallel) as group:
        group.attach()
        loaded = group.prepare(config)
        vocab_size = loaded.metadata.vocab_size
        sizes = (options.rate, options.seconds, options.tokens_in, options.tokens_out)
        opened = workloads.poisson(vocab_size, *sizes, seed=options.seed)
        length = (options.tokens_in, options.tokens_out)
        closed = [_request(*length) for _ in range(options.num_closed)]
        limits = scheduler_limits(loaded, config)
        serve(group, limits, opened[:NUM_DISCARDED])
        report("open loop, Driver", serve(group, limits, renewed(opened, vocab_size, 11)))

    def closed_pass(seed: int) -> Callable[[Ask], Coroutine[None, None, Latencies]]:
        requests = renewed(closed, vocab_size, seed)
        return lambda ask: closed_loop(ask, requests, options.concurrency)

    report("closed loop, AsyncDriver", on_async_driver(daemons, config, closed_pass(12)))
    with serving(model, daemons, options) as client:
        asyncio.run(open_loop(client.ask, renewed(opened[:NUM_DISCARDED], vocab_size, 13)))
        again = renewed(opened, vocab_size, 14)
        report("open loop, HTTP", asyncio.run(open_loop(client.ask, again)))
        report("closed loop, HTTP", asyncio.run(closed_pass(15)(client.ask)))
    report("closed loop, AsyncDriver again", on_async_driver(daemons, config, closed_pass(16)))
    return found


def _request(tokens_in: int, tokens_out: int) -> TimedRequest:
    return TimedRequest(0.0, [0] * tokens_in, tokens_out)


def parse_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--num-closed", type=int, default=512)
    parser.add_argument("--tokens-in", type=int, default=1000)
    parser.add_argument("--tokens-out", type=int, default=200)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def main() -> None:
    """Start daemons and measure."""
    options = parse_options()
    devices = devices_of(options.device, options.pp * options.tp)
    with (
        with_tokenizer(options.model.resolve()) as model,
        LocalDaemons(devices, model.parent) as daemons,
    ):
        options.model = model
        found: list[dict[str, Any]] = [*measure(options, model, daemons)]
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""Measures what `worker-client serve` adds to a request, without a group: a driver that is made up
gives each request a token in every step.

    python -m benchmarks.service_host_time [--rate 8] [--seconds 15] [--requests 200]

Prints, for the open loop of benchmarks.service, the time from a request's arrival to its submission
and from its first token to the first event at the client; then the processor time of the server's
event loop, and of its other threads, for a request and for a token. On a host that does other
things, run it by `chrt -r 10`: it sleeps most of the time.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import workloads
from benchmarks.poisson import Latencies
from benchmarks.service import HttpClient, timed
from benchmarks.vllm_front_end import free_port, write_word_tokenizer
from benchmarks.workloads import TimedRequest
from rpc_schema.config import ModelConfig, ParallelConfig, WorkerConfig
from worker_client.driven_group import DrivenGroup
from worker_client.inputs.model_source import ModelSource
from worker_client.requests import GenerationRequest, RequestOutput
from worker_client.service import server
from worker_client.service.engine import ChoicePart, Engine
from worker_client.service.settings import ServiceSettings

VOCAB_SIZE = 32_000
FIRST_ID = 300
"""Tokens from here on are words."""
STEP_S, PREFILL_S, HOST_S = 0.0048, 0.020, 0.0003
"""Times of a step, of a prompt in it, and in which the driver holds the GIL before a step: those of
the 8B shape on an H200."""
READY_LIMIT_S = 60.0


class MadeUpDriver:
    """In the place of a Driver and its scheduler. Requests have different first tokens."""

    def __init__(self, moments: Path) -> None:
        """moments: file for the times of each request's first token."""
        self.scheduler = self
        self.group = SimpleNamespace(loras=SimpleNamespace(known={}))
        self.num_in_flight = 0
        self._moments = moments
        self._requests: dict[str, GenerationRequest] = {}
        self._tokens: dict[str, list[int]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def add_request(self, request: GenerationRequest) -> None:
        self._requests[request.id], self._tokens[request.id] = request, []

    def abort_request(self, req_id: str) -> None:
        self._requests.pop(req_id, None)

    def generated_tokens(self, req_id: str, first: int) -> list[int]:
        return self._tokens[req_id][first:] if req_id in self._requests else []

    def look(self) -> None:
        pass

    def run(self) -> Iterator[RequestOutput]:
        return iter(())

    def step(self) -> list[RequestOutput]:
        begun, ended = [each for each in self._requests if not self._tokens[each]], []
        held_until = time.monotonic() + HOST_S
        while time.monotonic() < held_until:
            pass
        time.sleep(STEP_S + PREFILL_S * bool(begun))
        with self._moments.open("a") as file:
            for req_id in begun:
                first_id = int(self._requests[req_id].prompt[0])
                print(json.dumps(["token", first_id, time.monotonic()]), file=file)
        for req_id, request in tuple(self._requests.items()):
            tokens = self._tokens[req_id]
            tokens.append(FIRST_ID + 7919 * len(tokens) % (VOCAB_SIZE - FIRST_ID))
            if len(tokens) == request.max_tokens:
                del self._requests[req_id]
                num_prompt = len(request.prompt)
                ended.append(RequestOutput(req_id, tokens, "length", num_prompt, 0, 0, None))
        return ended


def _serve(model: Path, port: int, moments: Path) -> None:
    class Groupless(Engine):
        @contextlib.contextmanager
        def _open_driver(self) -> Iterator[Any]:
            yield MadeUpDriver(moments)

        def parts(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[ChoicePart, None]:
            first_id = int(requests[0].prompt[0])
            with moments.open("a") as file:
                print(json.dumps(["submitted", first_id, time.monotonic()]), file=file)
            return super().parts(requests)

    config = WorkerConfig(parallel=ParallelConfig(), model=ModelConfig(model=str(model)))
    with mock.patch.object(server, "Engine", Groupless):
        server.serve(
            DrivenGroup(ModelSource.of(model), config), ServiceSettings(port=port, names=("model",))
        )


class _Clock:
    """Processor time of a process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = self._read()

    def _read(self) -> tuple[int, int]:
        """Nanoseconds of the main thread, and of all others."""
        found = {"": 0}
        for thread in Path(f"/proc/{self._pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                found[thread.name] = int((thread / "schedstat").read_text().split()[0])
        own = found.pop(str(self._pid))
        return own, sum(found.values())

    def print_since(self, what: str, number: int) -> None:
        """Print the microseconds per unit since the last call."""
        now = self._read()
        loop, others = ((b - a) / 1000 / number for a, b in zip(self._before, now, strict=True))
        self._before = now
        print(f"per {what}: event loop {loop:.1f} us, other threads {others:.1f} us", flush=True)


async def _open_loop(client: HttpClient, requests: Sequence[TimedRequest], moments: Path) -> None:
    began, arrivals, firsts = time.monotonic(), dict[int, float](), dict[int, float]()

    async def one(request: TimedRequest) -> None:
        await asyncio.sleep(began + request.arrival_s - time.monotonic())
        arrivals[request.prompt[0]] = time.monotonic()
        async for _ in client.ask(request):
            firsts.setdefault(request.prompt[0], time.monotonic())

    await asyncio.gather(*map(one, requests))
    noted: dict[str, dict[int, float]] = {"submitted": {}, "token": {}}
    for what, first_id, at in map(json.loads, moments.read_text().splitlines()):
        noted[what][first_id] = at
    before = np.array([noted["submitted"][each] - arrivals[each] for each in arrivals])
    after = np.array([firsts[each] - noted["token"][each] for each in arrivals])
    titles = "arrival to submission", "first token to first event", "both"
    for what, values in zip(titles, (before, after, before + after), strict=True):
        p50, p99 = np.percentile(values, (50, 99)) * 1e6
        print(f"{what}: p50 {p50:.0f} us, p99 {p99:.0f} us", flush=True)


def main() -> None:
    """Start the server, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=15.0, help="of arrivals")
    parser.add_argument("--requests", type=int, default=200, help="for processor times")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wd-model-") as name:
        model, port = Path(name), free_port()
        write_word_tokenizer(model, VOCAB_SIZE)
        moments = model / "moments.jsonl"
        process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(model, port, moments)
        )
        process.start()
        try:
            asyncio.run(_measure(HttpClient(port, "model"), process.pid or 0, moments, options))
        finally:
            process.terminate()
            process.join()


async def _measure(
    client: HttpClient, pid: int, moments: Path, options: argparse.Namespace
) -> None:
    deadline = time.monotonic() + READY_LIMIT_S
    request = TimedRequest(0.0, [1] * 1000, 1)
    while True:
        with contextlib.suppress(OSError, RuntimeError):
            await timed(client.ask, request, 0.0, Latencies())
            break
        assert time.monotonic() < deadline, "the server does not answer"
        await asyncio.sleep(0.1)
    source = random.Random(2)
    sizes = (options.rate, options.seconds, 1000, 200)
    arrivals = [
        each._replace(prompt=[number, *each.prompt[1:]])
        for number, each in enumerate(workloads.poisson(VOCAB_SIZE, *sizes, seed=2))
    ]
    moments.write_text("")
    await _open_loop(client, arrivals, moments)
    clock = _Clock(pid)
    for _ in range(options.requests):
        ids = [source.randrange(VOCAB_SIZE) for _ in range(1000)]
        await timed(client.ask, TimedRequest(0.0, ids, 1), 0.0, Latencies())
    clock.print_since("request of 1,000 tokens in and 1 out", options.requests)
    streams = [TimedRequest(0.0, [1, 2], 400) for _ in range(16)]
    await asyncio.gather(*(timed(client.ask, each, 0.0, Latencies()) for each in streams))
    clock.print_since("token of 16 streams", 16 * 400)


if __name__ == "__main__":
    main()

"""`python -m tests.support.service_soak --minutes 20 --seed 7`: random clients of `worker-client
serve` on daemons of its own, which are killed now and then. Clients read answers whole or streamed,
slowly, leave, or send wrong bodies. Every text that is finished must be that of a request to the
undisturbed server; no body may be answered by 5xx but 503. Prints counts as JSON; exits with 1 if
something was wrong."""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import httpx2
import psutil

from tests.support.command_line import environment
from worker_client.cli.demo_model import SENTENCES, make_demo_model

PATH = "/v1/completions"
NUM_CLIENTS = 12
KILL_EVERY_S = 20.0
LIMIT_S = 120.0
"""Time for an answer; a daemon may be restarted meanwhile."""
MAX_GROWTH_MIB = 64.0

Body: TypeAlias = dict[str, Any]


class Counts:
    """What has happened."""

    def __init__(self) -> None:
        self.ends: collections.Counter[str] = collections.Counter()
        self.problems: list[str] = []
        self.longest_s = 0.0


def bodies(source: random.Random) -> list[Body]:
    """Return greedy requests, whose texts the demo model has learned."""
    words = SENTENCES.split()
    found = []
    for _ in range(24):
        place = source.randrange(len(words) - 3)
        found.append(
            {
                "prompt": " ".join(words[place : place + 3]),
                "temperature": 0,
                "max_tokens": source.randint(1, 120),
                "ignore_eos": source.random() < 0.5,
            }
        )
    return found


def wrong_body(source: random.Random) -> bytes:
    """Return a body that must be refused."""
    return source.choice(
        (
            b"{",
            b"[]",
            b'{"prompt": 5}',
            b'{"prompt": "x", "max_tokens": -1}',
            b'{"prompt": "x", "temperature": "hot"}',
            b'{"prompt": "x", "temperatures": 1}',
            b'{"prompt": "x", "\\ud800": 1}',
            b'{"prompt": [[1, 99999999]]}',
            b'{"prompt": "x", "response_format": {"type": "json_schema"}}',
            b'{"prompt": ' + b"[" * 3000 + b"]" * 3000 + b"}",
            b'{"prompt": "' + b"a" * (5 << 20) + b'"}',
        )
    )


async def whole(client: httpx2.AsyncClient, body: Body) -> str:
    """Return a text that is answered whole. Raises HTTPStatusError."""
    answer = await client.post(PATH, json=body)
    answer.raise_for_status()
    text: str = answer.json()["choices"][0]["text"]
    return text


async def streamed(
    client: httpx2.AsyncClient, body: Body, *, most: float = float("inf"), pause_s: float = 0.0
) -> str | None:
    """Return a text that is streamed; None if the client leaves after `most` events."""
    texts = []
    async with client.stream("POST", PATH, json={**body, "stream": True}) as answer:
        answer.raise_for_status()
        num_events = 0
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            texts.append(event["choices"][0]["text"])
            num_events += 1
            if num_events >= most:
                return None
            await asyncio.sleep(pause_s)
    return "".join(texts)


async def one(
    client: httpx2.AsyncClient, source: random.Random, known: list[tuple[Body, str]], counts: Counts
) -> None:
    """Do one thing, and count how it ended."""
    body, text = source.choice(known)
    kind = source.choices(
        ("whole", "streamed", "slow", "left", "wrong"), weights=(30, 30, 5, 20, 15)
    )[0]
    began = time.monotonic()
    found: str | None = None
    try:
        if kind == "wrong":
            answer = await client.post(PATH, content=wrong_body(source))
            kind = f"wrong: {answer.status_code}"
            if answer.status_code not in (400, 404, 413, 503):
                counts.problems.append(f"{answer.status_code}: {answer.text[:200]}")
        elif kind == "whole":
            found = await whole(client, body)
        else:
            most = source.randint(1, 8) if kind == "left" else float("inf")
            pause_s = 0.02 if kind == "slow" else 0.0
            found = await streamed(client, body, most=most, pause_s=pause_s)
    except httpx2.HTTPStatusError as error:
        kind = f"refused: {error.response.status_code}"
        if error.response.status_code != 503:
            counts.problems.append(kind)
    except (httpx2.HTTPError, RuntimeError) as error:
        if "wrong" not in kind:  # a server may close before it has read a long body
            counts.problems.append(f"{kind}: {error!r}")
        kind = f"{kind}: failed"
    if found is not None and found != text:
        counts.problems.append(f"{kind}: {body['prompt']!r} gave {found!r}, not {text!r}")
    counts.longest_s = max(counts.longest_s, time.monotonic() - began)
    counts.ends[kind] += 1


def daemons_of(process: psutil.Process) -> list[psutil.Process]:
    """Return the daemons that the server has started."""
    found = []
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "worker_daemon" in child.cmdline():
                found.append(child)
    return found


async def soak(
    url: str, server: psutil.Process, seconds: float, source: random.Random
) -> dict[str, object]:
    """Run clients and kills; return the counts."""
    counts, ends_at = Counts(), time.monotonic() + seconds
    limits = httpx2.Limits(max_connections=2 * NUM_CLIENTS)
    async with httpx2.AsyncClient(base_url=url, timeout=LIMIT_S, limits=limits) as client:
        known = [(body, await whole(client, body)) for body in bodies(source)]
        before_mib = server.memory_info().rss / (1 << 20)

        async def go_on() -> None:
            while time.monotonic() < ends_at:
                await one(client, source, known, counts)
                await asyncio.sleep(source.expovariate(4.0))

        async def kill() -> None:
            while time.monotonic() < ends_at - KILL_EVERY_S:
                await asyncio.sleep(source.uniform(0.5, 1.5) * KILL_EVERY_S)
                daemons = daemons_of(server)
                if daemons:
                    source.choice(daemons).kill()
                    counts.ends["killed a daemon"] += 1

        await asyncio.gather(kill(), *(go_on() for _ in range(NUM_CLIENTS)))
        for body, text in known:
            if await whole(client, body) != text:
                counts.problems.append(f"at the end: {body['prompt']!r}")
    growth_mib = server.memory_info().rss / (1 << 20) - before_mib
    if growth_mib > MAX_GROWTH_MIB:
        counts.problems.append(f"the server has grown by {growth_mib:.0f} MiB")
    return {
        "seconds": seconds,
        "ends": dict(sorted(counts.ends.items())),
        "longest_s": round(counts.longest_s, 1),
        "growth_mib": round(growth_mib, 1),
        "problems": counts.problems,
    }


@contextlib.contextmanager
def serving(model: Path, log: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Start a server on two daemons; yield it and its address. Raises RuntimeError: it fails, or
    leaves processes behind."""
    words = ("serve", "--model", str(model), "--device", "cpu", "--port", "0")
    sizes = ("--pipeline-parallel-size", "2", "--max-num-seqs", "8")
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "worker_client", *words, *sizes],
            stderr=file,
            env=environment(log.parent),
        )
    server = psutil.Process(process.pid)
    try:
        deadline = time.monotonic() + LIMIT_S
        while (found := re.search(r"serving .* at (http://\S+)", log.read_text())) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"it does not serve: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield server, found[1]
        children = server.children(recursive=True)
        process.send_signal(signal.SIGTERM)
        code = process.wait(LIMIT_S)
        _, left = psutil.wait_procs(children, 10.0)
        if code or left:
            raise RuntimeError(f"it ended with {code}, and left {left}")
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Exit with 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    options = parser.parse_args()
    print(f"seed {options.seed}: {options.minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory() as name:
        model, log = Path(name) / "model", Path(name) / "log"
        make_demo_model(model)
        with serving(model, log) as (server, url):
            source = random.Random(options.seed)
            report = asyncio.run(soak(url, server, 60.0 * options.minutes, source))
        print(json.dumps(report, indent=1))
        if report["problems"]:
            print(log.read_text()[-4000:])
    sys.exit(1 if report["problems"] else 0)


if __name__ == "__main__":
    main()

"""`worker-client demo`: the same requests three times: undisturbed, with the driver killed in the
middle, and with a daemon killed in the middle. Shows tokens per second over time, the recoveries,
and that the tokens are the same."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from rpc_schema.config import (
    CacheConfig,
    GraphConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from worker_client.cli.demo_driver import Plan
from worker_client.cli.demo_model import make_demo_model
from worker_client.cli.demo_report import WIDTH, charts, comparison, recoveries, same
from worker_client.cli.demo_run import DriverProcess, Run
from worker_client.cli.devices import Device, cuda_devices, default_device
from worker_client.cli.terminal import print_lines, shown_on
from worker_client.cli.terminal_lines import Line
from worker_client.errors import config_error
from worker_client.group.replacement import REPLACE_WITHIN_S
from worker_client.inputs.tokenizer import Tokenizer, load_tokenizer
from worker_client.launcher import LocalDaemons
from worker_host.plain_text import printable

PROMPTS: Final = ("The driver", "A worker daemon", "When the driver dies", "Each stage")
MAX_NUM_SEQS: Final = 16
NUM_REQUESTS: Final = 2 * MAX_NUM_SEQS
MAX_TOKENS: Final = 120
KV_CACHE_BYTES: Final = 64 << 20
"""KV cache of a rank on the CPU."""
REFRESH_S: Final = 0.2
KILL_AT: Final = 0.4
"""Share of a run's tokens after which the driver or a daemon is killed: of the usual requests, half
have most of their tokens, and half wait."""


class Screen:
    """Shows the charts: while they change on a terminal, at the end elsewhere. A context
    manager."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False)

    def __enter__(self) -> "Screen":
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def refresh(self, runs: Sequence[Run]) -> None:
        """Show the charts of the runs so far, on a terminal."""
        if self._live is not None:
            self._live.update(shown_on(self._console, charts(runs, time.monotonic())), refresh=True)

    def finish(self, runs: Sequence[Run]) -> None:
        """Leave the charts of all runs."""
        if self._live is not None:
            self.refresh(runs)
        else:
            print_lines(charts(runs, time.monotonic()))


@dataclass(slots=True)
class Demo:
    """The runs on a group of local daemons, which outlive every driver."""

    plan: Plan
    daemons: LocalDaemons
    screen: Screen
    runs: list[Run] = field(default_factory=list)

    def play(self) -> None:
        """Make the three runs. Raises LaunchError if a driver fails, and ClientConfigError if the
        requests end too soon to kill anything."""
        self._serve("undisturbed", None)
        self._serve("driver killed", self._kill_driver)
        self._serve(f"rank {len(self.daemons.pids) - 1} killed", self._kill_daemon)

    def _serve(self, title: str, kill: Callable[[DriverProcess], DriverProcess] | None) -> None:
        """Serve the requests; kill() is called in the middle, and returns the driver from then
        on."""
        run = Run(title)
        self.runs.append(run)
        refreshed = time.monotonic()
        driver = DriverProcess(self.plan)
        try:
            while not driver.has_ended:
                for message in driver.read(REFRESH_S):
                    run.take(message, driver.began)
                middle = self.runs[0].num_tokens * KILL_AT
                if kill is not None and run.recovery is None and run.num_tokens >= middle:
                    driver = kill(driver)
                if time.monotonic() - refreshed >= REFRESH_S:
                    self.screen.refresh(self.runs)
                    refreshed = time.monotonic()
        finally:
            driver.close()
        if kill is not None and (run.recovery is None or run.recovery.token_at is None):
            problem = "the requests ended before anything could be killed"
            raise config_error("num_requests", len(self.plan.lines), problem, "give more")

    def _kill_driver(self, driver: DriverProcess) -> DriverProcess:
        """Kill the driver, and start the next one at once."""
        run, at = self.runs[-1], time.monotonic()
        for message in driver.kill():
            run.take(message, driver.began)
        run.killed("driver", driver.pid, at)
        driver.close()
        left = [line for id_, line in enumerate(self.plan.lines) if str(id_) not in run.outputs]
        return DriverProcess(msgspec.structs.replace(self.plan, lines=left, adopt=True))

    def _kill_daemon(self, driver: DriverProcess) -> DriverProcess:
        """Kill the daemon of the last rank, and start its successor, as a supervisor would."""
        pid = self.daemons.pids[-1]
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self.runs[-1].killed(f"rank {len(self.daemons.pids) - 1}", pid, at)
        self.daemons.restart_dead()
        return driver


def demo(
    model: Annotated[
        Path | None,
        typer.Option(help="Checkpoint directory; default: a small one, made for the demo."),
    ] = None,
    device: Annotated[
        Device | None, typer.Option(help="Default: cuda if there is a GPU; two, if there are two.")
    ] = None,
    num_requests: Annotated[
        int, typer.Option(min=1, max=4096, help=f"Requests of a run; {MAX_NUM_SEQS} run at once.")
    ] = NUM_REQUESTS,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each request.")] = MAX_TOKENS,
) -> None:
    """Serve the same requests three times: undisturbed, with the driver killed in the middle, and
    with a daemon killed. Show the speed over time, what each recovery took, and that the tokens are
    the same: if not, the exit code is 1."""
    chosen = device or default_device()
    devices = ["cpu"] * 2 if chosen is Device.CPU else cuda_devices()[:2]
    with contextlib.ExitStack() as stack:
        if model is None:
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix="wd-demo-"))
            checkpoint = Path(own) / "demo-model"
            make_demo_model(checkpoint)
        else:
            checkpoint = model.resolve()
        tokenizer = _tokenizer(checkpoint)
        lines = _lines(tokenizer, num_requests, max_tokens)
        screen = Screen()
        print_lines([Line(f"starting {len(devices)} daemons on {', '.join(devices)}")])
        daemons = stack.enter_context(LocalDaemons(devices, checkpoint.parent))
        config = _configuration(checkpoint, devices)
        demo = Demo(Plan(daemons.endpoints, config, lines, REPLACE_WITHIN_S), daemons, screen)
        print_lines(_opening(demo, num_requests, max_tokens))
        with screen, daemons.naming_causes():
            demo.play()
            screen.finish(demo.runs)
    first, *others = demo.runs
    texts = [tokenizer.decode(first.outputs[str(index)]) for index in range(len(PROMPTS))]
    print_lines([*recoveries(demo.runs), *comparison(demo.runs), *_sentences(texts)])
    print_lines(_next_commands(model))
    if not all(same(first, run) for run in others):
        raise typer.Exit(1)


def _tokenizer(checkpoint: Path) -> Tokenizer:
    if not checkpoint.is_dir():
        fix = "name a checkpoint directory, or leave it out"
        raise config_error("model", str(checkpoint), "no such directory", fix)
    tokenizer = load_tokenizer(checkpoint)
    if tokenizer is None:
        fix = "name one with tokenizer.json, or leave it out"
        raise config_error("model", str(checkpoint), "the demo shows texts", fix)
    return tokenizer


def _lines(tokenizer: Tokenizer, num_requests: int, max_tokens: int) -> list[str]:
    """Return the requests: the first for each prompt takes the most likely tokens, the others
    sample."""
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    tokenizer.close()  # from here on it only decodes
    return [
        json.dumps(
            {
                "id": str(index),
                "prompt_token_ids": prompts[index % len(prompts)],
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "temperature": 0.0 if index < len(prompts) else 0.9,
                "seed": index,
            }
        )
        for index in range(num_requests)
    ]


def _configuration(checkpoint: Path, devices: Sequence[str]) -> WorkerConfig:
    on_cpu = devices[0] == "cpu"
    return WorkerConfig(
        parallel=ParallelConfig(pipeline_parallel_size=len(devices)),
        model=ModelConfig(model=str(checkpoint)),
        scheduler=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=512),
        cache=CacheConfig(kv_cache_memory_bytes=KV_CACHE_BYTES if on_cpu else None),
        graph=GraphConfig(),
    )


def _opening(demo: Demo, num_requests: int, max_tokens: int) -> list[Line]:
    daemons = demo.daemons
    stages = "1 stage" if len(daemons.pids) == 1 else f"{len(daemons.pids)} pipeline stages"
    pids = ", ".join(map(str, daemons.pids))
    return [
        Line(f"they answer after {sum(daemons.seconds.values()):.1f} s: pids {pids}, {stages}"),
        Line(f"each run: {num_requests} requests of {max_tokens} tokens, {MAX_NUM_SEQS} at once"),
        Line(""),
        Line("tokens per second", "bold"),
    ]


def _sentences(texts: Sequence[str]) -> Iterator[Line]:
    for prompt, text in zip(PROMPTS, texts, strict=True):
        shown = printable(f"{prompt}{text}")
        yield Line(f"  {shown[: WIDTH - 6]} ...")


def _next_commands(model: Path | None) -> list[Line]:
    """Return commands to try next. model: None if there is none any more."""
    programs = Path(sys.executable).parent
    if programs.is_relative_to(Path.cwd()):
        programs = programs.relative_to(Path.cwd())
    program = "worker-client" if shutil.which("worker-client") else f"{programs}/worker-client"
    make = [f"{sys.executable} -m worker_client.cli.demo_model demo-model"]
    place = "demo-model" if model is None else shlex.quote(str(model))
    return [
        Line(""),
        Line("what to try next", "bold"),
        *(Line(f"  {command}") for command in (make if model is None else [])),
        Line(f'  {program} generate --model {place} --prompt "The driver"'),
        Line(f'  {program} bench --model {place} --prompt "A request"'),
    ]

"""Everything that `worker-client generate` starts ends with it, however it ends: no process, socket
file or directory is left."""

import json
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.support.command_line import (
    CLIENT,
    ask_status,
    environment,
    processes_of,
    run_client,
    short_directory,
)
from tests.support.exhaustive import exhaustively
from tests.support.waiting import PATIENCE_S, wait_until

NUM_DAEMONS = 2
LIMIT_S = PATIENCE_S
"""Limit of a start, and of an end in the middle of it: each imports torch."""


@pytest.fixture
def directory():
    path = short_directory()
    yield path
    for process in processes_of(path):
        process.kill()
    shutil.rmtree(path)


@pytest.fixture
def endless_input(tmp_path):
    """Requests that keep the daemons busy for a minute."""
    path = tmp_path / "input.jsonl"
    line = {"prompt_token_ids": [1, 2, 3], "max_tokens": 180, "ignore_eos": True}
    path.write_text("".join(json.dumps(line) + "\n" for _ in range(2000)))
    return path


@pytest.fixture
def generating(directory, endless_input, checkpoint):
    """A `generate` that has just started its own daemons."""
    options = ["--model", str(checkpoint().path), "--device", "cpu", "--input", str(endless_input)]
    sizes = ["--pipeline-parallel-size", str(NUM_DAEMONS), "--num-gpu-blocks", "256"]
    with endless_input.with_name("stderr").open("w") as stderr:
        process = subprocess.Popen(
            [*CLIENT, "generate", *options, *sizes, "--max-num-seqs", "8"],
            env=environment(directory),
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    yield process
    process.kill()
    process.wait()


def daemons_of(directory: Path) -> list[psutil.Process]:
    return [p for p in processes_of(directory) if "worker_daemon" in p.cmdline()]


def are_serving(directory: Path) -> bool:
    sockets = list(directory.glob("wd-*/w?"))
    statuses = [ask_status(f"ipc://{path}") for path in sockets]
    return len(sockets) == NUM_DAEMONS and all(
        status is not None and status.load == "READY" and status.last_seq > 10
        for status in statuses
    )


def nothing_is_left(directory: Path) -> bool:
    return not processes_of(directory) and not list(directory.iterdir())


@pytest.mark.each_value
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, exhaustively(signal.SIGINT)])
@pytest.mark.parametrize("moment", ["starting", "serving"])
def test_killed_generate_leaves_nothing(generating, directory, number, moment):
    if moment == "starting":
        wait_until(lambda: bool(daemons_of(directory)), "a daemon has been started", LIMIT_S)
    else:
        wait_until(lambda: are_serving(directory), "the daemons serve", LIMIT_S)
        assert len(daemons_of(directory)) == NUM_DAEMONS
    generating.send_signal(number)
    assert generating.wait(LIMIT_S) != 0
    wait_until(lambda: nothing_is_left(directory), f"nothing left in {directory}", LIMIT_S)


def test_second_interrupt_while_stopping_leaves_nothing_either(generating, directory):
    wait_until(lambda: are_serving(directory), "the daemons serve", LIMIT_S)
    generating.send_signal(signal.SIGINT)
    generating.send_signal(signal.SIGINT)
    assert generating.wait(LIMIT_S) != 0
    wait_until(lambda: nothing_is_left(directory), f"nothing left in {directory}", LIMIT_S)


def test_failed_generate_leaves_nothing(directory, endless_input, checkpoint):
    options = ["--model", str(checkpoint().path), "--device", "cpu", "--input", str(endless_input)]
    done = run_client(directory, "generate", *options, "--num-gpu-blocks", "2", check=False)
    assert done.returncode == 2
    assert "KVPlanError" in done.stderr
    assert nothing_is_left(directory)

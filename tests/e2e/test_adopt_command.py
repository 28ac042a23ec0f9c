"""`worker-client generate --adopt`: a run that is killed, and the one that finishes it."""

import json
import random
import shutil
import signal
import subprocess
import time

import pytest

from tests.support.checkpoints import prompts
from tests.support.command_line import (
    CLIENT,
    environment,
    processes_of,
    run_client,
    short_directory,
    start_daemon,
    wait_for_daemons,
)

LONG = 90


@pytest.fixture(scope="module")
def group(model_root):
    """Two daemons."""
    directory = short_directory()
    endpoints = [f"ipc://{directory}/{name}" for name in "ab"]
    options = ("--device", "cpu", "--model-root", str(model_root))
    processes = [start_daemon(directory, "--endpoint", end, *options) for end in endpoints]
    wait_for_daemons(endpoints, processes)
    yield endpoints
    for process in processes:
        process.kill()
        process.wait()
    shutil.rmtree(directory)


@pytest.fixture
def directory():
    path = short_directory()
    yield path
    for process in processes_of(path):
        process.kill()
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def options(group, checkpoint):
    sizes = {"pipeline-parallel-size": 2, "max-num-seqs": 4, "num-gpu-blocks": 128}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    model = ("--model", str(checkpoint().path), "--dtype", "float32")
    return ("generate", *model, "--endpoints", ",".join(group), *words)


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_input(path, seed):
    """One short request, then long ones, of which two must wait for a slot."""
    rng = random.Random(seed)
    lines = [{"id": "short", "prompt_token_ids": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}]
    for index, prompt in enumerate(prompts(seed, [rng.randint(3, 30) for _ in range(5)])):
        line = {"id": f"long {index}", "prompt_token_ids": prompt.tolist(), "ignore_eos": True}
        line |= {"max_tokens": LONG, "temperature": index % 2, "seed": rng.randrange(1 << 60)}
        lines.append(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def kill_in_the_middle(directory, options, output):
    """Start a run; kill it once its first request has ended."""
    process = subprocess.Popen(
        [*CLIENT, *options, "--output", str(output)],
        env=environment(directory),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and not (output.exists() and output.read_text()):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it has ended too early"


@pytest.fixture(scope="module")
def undisturbed(options, tmp_path_factory):
    """The input of all tests, and its result lines."""
    directory = tmp_path_factory.mktemp("undisturbed")
    source = write_input(directory / "in.jsonl", random.randrange(1 << 20))
    whole = directory / "whole.jsonl"
    run_client(directory, *options, "--input", str(source), "--output", str(whole))
    return source, read_lines(whole)


def test_killed_run_is_finished_by_the_next(directory, tmp_path, options, undisturbed):
    source, expected = undisturbed
    options, output = (*options, "--input", str(source)), tmp_path / "out.jsonl"
    kill_in_the_middle(directory, options, output)
    cut_off = read_lines(output)
    assert [line["id"] for line in cut_off] == ["short"]
    done = run_client(directory, *options, "--adopt", "--output", str(output))
    assert done.stderr.splitlines()[-1] in ("3 requests are running", "4 requests are running")
    assert read_lines(output)[:1] == cut_off
    for ours, theirs in zip(read_lines(output), expected, strict=True):
        for field in ("id", "token_ids", "finish_reason", "num_prompt_tokens"):
            assert ours[field] == theirs[field]


def test_running_requests_are_finished_without_their_input(
    directory, tmp_path, options, undisturbed
):
    source, expected = undisturbed
    output, other = tmp_path / "out.jsonl", tmp_path / "other.jsonl"
    kill_in_the_middle(directory, (*options, "--input", str(source)), output)
    other.write_text(json.dumps({"id": "long 0", "prompt_token_ids": [1]}) + "\n")
    refused = run_client(directory, *options, "--adopt", "--input", str(other), check=False)
    assert refused.returncode == 2
    assert "another prompt" in refused.stderr
    run_client(directory, *options, "--adopt", "--output", str(output))
    lines = {line["id"]: line["token_ids"] for line in read_lines(output)}
    assert {"short", "long 0", "long 1", "long 2"} <= set(lines)
    everything = {line["id"]: line["token_ids"] for line in expected}
    assert lines == {name: everything[name] for name in lines}


def test_adoption_needs_running_daemons(directory, tmp_path, options):
    done = run_client(directory, *options, "--adopt", "--reload", check=False)
    assert done.returncode == 2
    assert "--endpoints" in done.stderr

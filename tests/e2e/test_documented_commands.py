"""Commands and examples of the pages on features run as they are written. The client's commands run
in this process, on a daemon that one of the commands starts."""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer

from examples import lora_adapter
from rpc_schema.config import LoraConfig, ParallelConfig
from tests.support.command_line import environment, short_directory
from tests.support.documented import ROOT, blocks, commands, examples
from tests.support.serving import LONG_LEASE, connect, worker_config
from worker_client import driven_group
from worker_client.__main__ import main as worker_client_main
from worker_client.cli.demo_model import SENTENCES, make_demo_model
from worker_client.driver import Driver
from worker_client.launcher import LocalDaemons
from worker_client.requests import GenerationRequest
from worker_client.scheduler import Scheduler, scheduler_limits
from worker_client.worker_group import WorkerGroup

SERVE = "worker-daemon serve"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where commands are typed after `make run`."""
    path = tmp_path_factory.mktemp("place")
    make_demo_model(path / "build" / "demo-model")
    (path / "build" / "adapters").mkdir()
    return path


@pytest.fixture(scope="module")
def tokenizer(place):
    return Tokenizer.from_file(str(place / "build" / "demo-model" / "tokenizer.json"))


@pytest.fixture(scope="module")
def daemon(place):
    """Started by the command of the page on adapters."""
    (line,) = (line for line in commands("lora.md") if line.startswith(SERVE))
    words = shlex.split(line.removeprefix(SERVE).rstrip("& "))

    def command(endpoint, device, pipe):
        there = ["env", "-C", str(place), f"PYTHONPATH={ROOT}", sys.executable, "-m"]
        own = [endpoint if word.startswith("ipc:") else word for word in words]
        return [*there, "worker_daemon", "serve", *own, "--exit-with-parent-fd", str(pipe)]

    with LocalDaemons(["cpu"], place / "build", command=command) as daemons:
        yield daemons


@pytest.fixture
def typed(place, daemon, monkeypatch, capsys):
    """typed(line) -> what the command prints. Where it would start a daemon it finds ours."""

    @contextlib.contextmanager
    def found(devices, model_root, *, lora_root, draft_root, adapter_cache):
        assert draft_root is None and adapter_cache is None
        assert len(devices) == 1 and model_root.resolve() == place / "build"
        assert lora_root is None or lora_root.resolve() == place / "build" / "adapters"
        yield daemon

    def call(line):
        if line.startswith("echo "):
            subprocess.run(["sh", "-c", line], check=True)
            return ""
        piped = re.search(r"<\((echo .*)\)", line)
        if piped is not None:
            call(f"{piped[1]} > piped.jsonl")
            line = line.replace(piped[0], "piped.jsonl")
        program, *words = shlex.split(line.replace("ipc://$WD/w0", daemon.endpoints[0]))
        run = worker_client_main
        if program == "python":
            assert words.pop(0) == "-m"
            run = {"examples.lora_adapter": lora_adapter.main}[words[0]]
        else:
            assert program == "worker-client"
            words = [program, *words]
        monkeypatch.setattr(sys, "argv", words)
        try:
            run()
        except SystemExit as ended:
            assert not ended.code, (line, capsys.readouterr().err)
        return capsys.readouterr().out

    monkeypatch.chdir(place)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(driven_group, "LocalDaemons", found)
    return call


@pytest.fixture
def driving(place, daemon):
    """driving() -> context manager of the names that examples use; leaves nothing loaded."""

    @contextlib.contextmanager
    def begin(**fields):
        model = place / "build" / "demo-model"
        config = worker_config(model, max_model_len=64, **fields)
        with connect(daemon.endpoints, config) as (group, loaded):
            limits = scheduler_limits(loaded, config)
            yield {
                "np": np,
                "Driver": Driver,
                "GenerationRequest": GenerationRequest,
                "driver": Driver(group, Scheduler(limits)),
                "group": group,
                "loaded": loaded,
                "model_directory": model,
                "prompt": np.array([5, 6], np.int32),
                "scheduler": Scheduler(limits),
            }
            group.reset("CREATED")

    return begin


def test_structured_output(typed):
    *inputs, command = commands("structured-output.md")
    assert not any(typed(line) for line in inputs)
    first, _, second = typed(command).partition("\nb: ")
    assert first.startswith("a: {")
    assert second.strip() in ("has a slot", "has none")


def test_sampling(typed):
    printed = [typed(line) for line in commands("sampling.md")]
    rules, samples, stopped = (text for text in printed if text)
    assert rules.startswith("0: ")
    assert re.findall(r"^a#\d", samples, re.MULTILINE) == ["a#0", "a#1", "a#2"]
    assert "." not in stopped
    for example in examples("sampling.md"):
        exec(example, {})  # noqa: S102


def test_pooling(typed, place):
    lines, _ = (typed(line) for line in commands("pooling.md"))
    assert [len(json.loads(line)["pooled"]) for line in lines.splitlines()] == [4, 4]
    written = np.load(place / "build" / "driver.npy", allow_pickle=False)
    assert written.shape[0] == 1


def test_examples_in_python(driving, tokenizer, capsys):
    with driving() as names:
        exec(examples("structured-output.md")[0], names)  # noqa: S102
        (output,) = names["driver"].run()
        names["grammars"].close()
        assert re.fullmatch("[0-9]{4}", tokenizer.decode(output.token_ids).strip())
        exec(examples("pooling.md")[0], names)  # noqa: S102
    assert "array" in capsys.readouterr().out


def test_lora(typed, driving):
    lines = [line for line in commands("lora.md") if not line.startswith(("WD=", SERVE))]
    printed = {line: typed(line) for line in lines}
    (listed,) = (text for line, text in printed.items() if "lora list" in line)
    assert listed.startswith("first: id 1, rank 4")
    (example,) = examples("lora.md")
    typed("python -m examples.lora_adapter build/demo-model build/adapters/second --seed 1")
    with driving(lora=LoraConfig(max_loras=2)) as names:
        before, removal = example.split("group.loras.remove")
        exec(before, names)  # noqa: S102
        while names["task"].proceed():
            pass
        (output,) = names["driver"].run()
        exec(f"group.loras.remove{removal}", names)  # noqa: S102
        assert [adapter.name for adapter in names["group"].loras.known.values()] == ["second"]
    assert output.finish_reason != "error"


@pytest.mark.parametrize("page", ["quantization.md", "kv-cache.md", "speculative-decoding.md"])
def test_options_of_the_model(typed, page, place, daemon):
    lines = [line for b in blocks(f"docs/{page}") if b.run_by for line in b.commands]
    for line in lines:
        if not line.startswith("worker-daemon plan"):
            with WorkerGroup(daemon.endpoints, ParallelConfig(), lease=LONG_LEASE) as group:
                group.attach(force=True)
                group.reset("CREATED")  # as a daemon that the command starts
            assert typed(line).strip()
            continue
        words = [sys.executable, "-m", *line.replace("worker-daemon", "worker_daemon", 1).split()]
        with_paths = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/client"}
        done = subprocess.run(
            words, env=with_paths, cwd=place, capture_output=True, text=True, check=True
        )
        assert "weights" in done.stdout
    assert lines


def test_readme_from_the_daemons_start_to_their_end(place):
    """Typed into one shell, which finds the installed commands; `top` shows one frame."""
    (block,) = (b for b in blocks("README.md") if any(SERVE in line for line in b.commands))
    lines = [line + " --once" if "worker-client top" in line else line for line in block.commands]
    directory = short_directory()
    for program in ("worker-client", "worker-daemon"):
        path = directory / program
        module = program.replace("-", "_")
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        path.chmod(0o755)
    variables = {
        "PATH": f"{directory}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT}/client",
        "XDG_RUNTIME_DIR": str(directory),
    }
    done = subprocess.run(
        ["bash", "-euc", "\n".join([*lines, "wait"])],
        env=environment(directory, **variables),
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (answer,) = re.findall(r"^0: (.*)$", done.stdout, re.MULTILINE)
    assert "The driver" + answer in SENTENCES.splitlines()
    shutil.rmtree(directory)

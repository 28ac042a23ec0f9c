"""`worker-client trace` beside a driver at work: one file of all ranks and the driver, on one clock,
whatever the clocks of the daemons say."""

import gzip
import json
import re
import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.demo_model import make_demo_model
from client.cli.daemons import connect as observe
from client.errors import IllegalStateError, RemoteConfigError
from client.launcher import LocalDaemons
from client.observer import record
from tests.support.command_line import ask_status, run_client, short_directory
from tests.support.serving import connect, generate, greedy_request, worker_config

SKEWS_S = (0, 4000)
"""How far each daemon's clock is ahead: whole hours, as between hosts."""
STEP = re.compile(r"step_context_(\d+)\((\d+)\)_generation_(\d+)\((\d+)\)_seq_(\d+)")


@pytest.fixture(scope="module")
def demo(model_root):
    make_demo_model(model_root / "demo")
    return model_root / "demo"


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles") / "made-by-the-daemons"


@pytest.fixture(scope="module")
def pair(model_root, traces):
    """Two daemons whose clocks differ."""
    skews = iter(SKEWS_S)

    def command(endpoint, device, pipe):
        options = {
            "endpoint": endpoint,
            "device": device,
            "model-root": str(model_root),
            "profile-dir": str(traces),
            "exit-with-parent-fd": str(pipe),
        }
        module = "tests.support.skewed_daemon"
        return (sys.executable, "-m", module, str(next(skews)), json.dumps(options))

    with LocalDaemons(["cpu"] * 2, model_root, command=command) as daemons:
        yield daemons


@pytest.fixture
def directory():
    path = short_directory()
    yield path
    shutil.rmtree(path)


@contextmanager
def driven(endpoints, demo, **options):
    """A driver at work, on a thread of its own, until the end; yields what it has generated."""
    ended = threading.Event()
    ready = threading.Event()
    runs, errors = [], []

    def drive():
        try:
            config = worker_config(demo, len(endpoints), max_model_len=256)
            with connect(endpoints, config, reload=False) as (group, loaded):
                while not ended.is_set():
                    requests = [
                        greedy_request(f"r{i}", [1, 2, 3, i + 4], 20, ignore_eos=True)
                        for i in range(3)
                    ]
                    runs.append(generate(group, loaded, requests).tokens)
                    ready.set()
        except Exception as error:
            errors.append(error)
            ready.set()

    thread = threading.Thread(target=drive)
    thread.start()
    try:
        assert ready.wait(60)
        yield runs
    finally:
        ended.set()
        thread.join(60)
    assert not errors, errors
    assert len({json.dumps(run, sort_keys=True) for run in runs}) == 1


def read(path: Path) -> dict:
    return json.loads(gzip.decompress(path.read_bytes()))


def named_processes(trace):
    return {
        event["pid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    }


def spans(trace):
    """{process name: {seq: (begin, end) in us}} of the ranks' steps."""
    names, found = named_processes(trace), defaultdict(dict)
    for event in trace["traceEvents"]:
        if event.get("cat") == "user_annotation" and STEP.fullmatch(event["name"]):
            seq = event["args"]["seq"]
            found[names[event["pid"]]][seq] = (event["ts"], event["ts"] + event["dur"])
    return found


def driver_steps(trace):
    """{seq: (began, sent, settled) in us}."""
    moments = defaultdict(dict)
    for event in trace["traceEvents"]:
        if event.get("cat") == "driver_step":
            at = moments[event["args"]["seq"]]
            if event["ph"] == "X":
                at["began"], at["sent"] = event["ts"], event["ts"] + event["dur"]
            elif event["ph"] == "e":
                at["settled"] = event["ts"]
    return moments


def test_one_trace_of_all_ranks_and_the_driver_on_one_clock(pair, demo, directory):
    out = directory / "group.json.gz"
    words = ("trace", "--seconds", "1.5", "--out", str(out))
    with driven(pair.endpoints, demo) as runs:
        before = len(runs)
        done = run_client(directory, *words, "--endpoints", ",".join(reversed(pair.endpoints)))
        assert len(runs) > before
    assert all(ask_status(endpoint).epoch == 1 for endpoint in pair.endpoints)
    trace = read(out)
    steps, sent = spans(trace), driver_steps(trace)
    first, last = (next(n for n in steps if n.startswith(f"rank {r} (pp{r} tp0)")) for r in (0, 1))
    assert len(steps) == 2
    assert any(name.startswith("driver") for name in named_processes(trace).values())
    bounds = {k: ns / 1000 for k, ns in trace["otherData"]["clock_bound_ns"].items()}
    assert bounds.keys() == {"rank 0", "rank 1", "driver"}
    assert all(0 < bound < 20_000 for bound in bounds.values()), bounds
    assert f"rank 0: {len(steps[first])} steps" in done.stdout
    common = sorted(steps[first].keys() & steps[last].keys() & sent.keys())
    assert len(common) > 20
    for seq in common:
        # Sent before it begins anywhere, over on each rank only after the stage before had begun,
        # and begun everywhere before its outcome is known.
        driver = sent[seq]
        for rank, name in enumerate((first, last)):
            slack = bounds[f"rank {rank}"] + bounds["driver"]
            assert driver["began"] - slack <= steps[name][seq][0]
            if "settled" in driver:
                assert steps[name][seq][0] <= driver["settled"] + slack
        slack = bounds["rank 0"] + bounds["rank 1"]
        assert steps[first][seq][0] - slack <= steps[last][seq][1]
    for name in (first, last):
        begins = [steps[name][seq][0] for seq in sorted(steps[name])]
        assert begins == sorted(begins)
        assert all(begin >= -1e6 for begin in begins)

"""`worker-client trace` with a running driver: one file of all ranks and the driver, on one clock,
even if the daemons' clocks differ."""

import gzip
import json
import re
import shutil
import sys
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from operator import ge
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from rpc_schema.config import ParallelConfig
from rpc_schema.errors import ConfigError, StateError
from rpc_schema.trace import ReadTrace, StartTrace, StopTrace
from tests.support.command_line import run_client, short_directory, status_of
from tests.support.forked_daemons import ForkedDaemons
from tests.support.serving import LONG_LEASE, connect, generate, greedy_request, worker_config
from tests.support.waiting import PATIENCE_S, wait_until
from worker_client.cli.daemons import connect as observe
from worker_client.errors import ClientConfigError
from worker_client.replicas.group import DataParallelGroup
from worker_client.tracing.observer import record as record_group
from worker_client.worker_group import WorkerGroup
from worker_host.exit_codes import ExitCode

SKEWS_S = (0, 4000)
"""How far each daemon's clock is ahead: whole hours, as between hosts."""
STEP = re.compile(r"step_context_(\d+)\((\d+)\)_generation_(\d+)\((\d+)\)_seq_(\d+)")


@pytest.fixture
def model(checkpoint):
    return checkpoint("Qwen3ForCausalLM", tie_word_embeddings=True, seed=71).path


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

    with ForkedDaemons(["cpu"] * 2, model_root, command=command) as daemons:
        yield daemons


@pytest.fixture
def directory():
    path = short_directory()
    yield path
    shutil.rmtree(path)


@contextmanager
def driven(endpoints, model):
    """Runs a driver on its own thread until the end; yields what it has generated."""
    ended = threading.Event()
    ready = threading.Event()
    runs, errors = [], []

    def drive():
        try:
            config = worker_config(model, len(endpoints))
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
        assert ready.wait(PATIENCE_S)
        yield runs
    finally:
        ended.set()
        thread.join(PATIENCE_S)
    assert not errors, errors
    assert len({json.dumps(run, sort_keys=True) for run in runs}) == 1


def record(clients, seconds, **options):
    return record_group(clients, seconds, driver_timeout_s=0.1, **options)


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


def check_form(trace):
    """Check properties that readers of the format rely on."""
    open_flights = []
    names = named_processes(trace)
    for event in trace["traceEvents"]:
        assert event["pid"] in names
        assert isinstance(event["ts"], int | float)
        if event["ph"] == "X":
            assert event["dur"] >= 0
        elif event["ph"] == "b":
            open_flights.append(event["id"])
        elif event["ph"] == "e":
            open_flights.remove(event["id"])
    assert open_flights == []


def test_one_trace_of_all_ranks_and_the_driver_on_one_clock(pair, model, directory):
    out = directory / "group.json.gz"
    words = ("trace", "--seconds", "0.5", "--out", str(out))
    with driven(pair.endpoints, model) as runs:
        before = len(runs)
        done = run_client(directory, *words, "--endpoints", ",".join(reversed(pair.endpoints)))
        assert len(runs) > before
    assert all(status_of(endpoint).epoch == 1 for endpoint in pair.endpoints)
    trace = read(out)
    check_form(trace)
    steps, sent = spans(trace), driver_steps(trace)
    first, last = (next(n for n in steps if n.startswith(f"rank {r} (pp{r} tp0)")) for r in (0, 1))
    assert len(steps) == 2
    assert any(name.startswith("driver") for name in named_processes(trace).values())
    bounds = {k: ns / 1000 for k, ns in trace["otherData"]["clock_bound_ns"].items()}
    assert bounds.keys() == {"rank 0", "rank 1", "driver"}
    assert all(0 < bound < 1e6 for bound in bounds.values()), bounds  # milliseconds, if not busy
    assert f"rank 0: {len(steps[first])} steps" in done.stdout
    common = sorted(steps[first].keys() & steps[last].keys() & sent.keys())
    assert len(common) > 3
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


def test_observer_and_driver_keep_out_of_each_other_s_way(pair, traces, model):
    with observe(pair.endpoints) as clients:
        with connect(pair.endpoints, worker_config(model, 2)) as (group, loaded):

            def drive(seconds):
                with pytest.raises(StateError, match="an observer's trace"):
                    group.profiling.start("mine")
                assert [reply.file for reply in group.profiling.stop()] == ["", ""]
                generate(group, loaded, [greedy_request("a", [1, 2, 3], 6)])

            recorded = record(clients, 0.1, wait=drive)
            assert recorded.drivers[0].steps is None  # its thread is this one: it waits for no step
            group.profiling.start("mine")
            with pytest.raises(StateError, match="a profile of kind torch runs"):
                record(clients, 0.1)
            generate(group, loaded, [greedy_request("b", [1, 2, 3], 6)])
            files = [reply.file for reply in group.profiling.stop()]
        assert files == [str(traces / f"mine-pp{r}-tp0-rank{r}.json.gz") for r in (0, 1)]
        assert (traces / "observed-pp1-tp0-rank1.json.gz").read_bytes() == recorded.ranks[1].packed

        # A driver that comes while it is recorded changes nothing either.
        def attach(seconds):
            with connect(pair.endpoints, worker_config(model, 2), reload=False) as (group, loaded):
                generate(group, loaded, [greedy_request("c", [1, 2, 3], 6)])

        recorded = record(clients, 0.1, wait=attach)
    for rank in recorded.ranks:
        events = json.loads(gzip.decompress(rank.packed))["traceEvents"]
        labels = [e["name"] for e in events if STEP.fullmatch(str(e.get("name")))]
        assert sorted(labels)[-1].startswith("step_context_1(3)")
        assert len(labels) >= 6


def test_trace_has_the_steps_of_every_replica_s_driver(pair, model):
    config = worker_config(model)
    config = replace(config, parallel=ParallelConfig(data_parallel_size=2))
    with DataParallelGroup(pair.endpoints, config.parallel, lease=LONG_LEASE) as group:
        group.attach()
        loaded = group.prepare(config, num_gpu_blocks=64, reload=True)
        ended = threading.Event()
        num_runs = [0, 0]

        def drive(dp_rank):
            request = greedy_request("a", [1, 2, 3], 20, ignore_eos=True)
            while not ended.is_set():
                generate(group.replicas[dp_rank], loaded[0], [request])
                num_runs[dp_rank] += 1

        def let_each_run(seconds):
            enough = [count + 2 for count in num_runs]  # one of them from its first step
            wait_until(lambda: all(map(ge, num_runs, enough)), "a run of each", seconds)

        threads = [threading.Thread(target=drive, args=[dp_rank]) for dp_rank in (0, 1)]
        for thread in threads:
            thread.start()
        try:
            with observe(pair.endpoints) as clients:
                recorded = record_group(list(reversed(clients)), 60.0, let_each_run)
        finally:
            ended.set()
            for thread in threads:
                thread.join(PATIENCE_S)
    assert [own.name for own in recorded.drivers] == ["driver of replica 0", "driver of replica 1"]
    for own, rank in zip(recorded.drivers, recorded.ranks, strict=True):
        assert own.steps is not None
        seqs = {*np.frombuffer(own.steps.seqs, "<i8").tolist()}
        events = json.loads(gzip.decompress(rank.packed))["traceEvents"]
        found = [STEP.fullmatch(str(event.get("name"))) for event in events]
        ran = {int(match[5]) for match in found if match}
        assert len(ran & seqs) > 2


def test_trace_is_refused_where_it_cannot_be(pair, directory, tmp_path):
    with WorkerGroup(
        pair.endpoints, ParallelConfig(pipeline_parallel_size=2), lease=LONG_LEASE
    ) as group:
        group.attach()
        group.reset("CREATED")
    refused = run_client(directory, "trace", "--endpoints", pair.endpoints[0], check=False)
    assert refused.returncode == 2
    assert "StateError" in refused.stderr
    assert "no trace can run in CREATED" in refused.stderr
    with observe(pair.endpoints) as clients:
        with pytest.raises(ClientConfigError, match="not the ranks of one group"):
            record(clients, 1)
        for seconds in (0, -1, 1e9, float("nan")):
            with pytest.raises(ClientConfigError, match="field seconds"):
                record(clients, seconds)
    words = ("--endpoints", pair.endpoints[0], "--out", str(tmp_path))
    refused = run_client(directory, "trace", *words, check=False)
    assert refused.returncode == ExitCode.OUTPUT
    assert "field out" in refused.stderr


def test_trace_without_a_directory_is_a_typed_error(pair, traces, model):
    with connect(pair.endpoints, worker_config(model, 2), reload=False):
        traces.rename(traces.with_name("aside"))
        traces.symlink_to(traces.with_name("aside"))
        with observe(pair.endpoints) as clients:
            with pytest.raises(ConfigError, match="field profile-dir"):
                record(clients, 0.1)
            traces.unlink()
            traces.with_name("aside").rename(traces)
            assert len(record(clients, 0.05).ranks) == 2


def test_observer_that_gives_up_or_dies_leaves_nothing_behind(pair, model):
    def interrupted(seconds):
        raise KeyboardInterrupt

    with (
        connect(pair.endpoints, worker_config(model, 2), reload=False) as (group, _),
        observe(pair.endpoints) as clients,
    ):
        with pytest.raises(KeyboardInterrupt):
            record(clients, 60, wait=interrupted)
        for client in clients:
            client.ask(partial(StartTrace, trace=bytes(16), max_ms=100), 10)  # and nobody stops it
        with pytest.raises(StateError, match="no such trace runs"):
            clients[0].ask(partial(StopTrace, trace=bytes(15) + b"x", keep=True), 10)
        deadline = time.monotonic() + 20
        while not started(group):
            assert time.monotonic() < deadline, "the trace that nobody stopped still runs"
        for client in clients:
            with pytest.raises(StateError, match="no such trace was kept"):
                client.ask(partial(ReadTrace, trace=bytes(16), offset=0))
        group.profiling.stop()
        assert len(record(clients, 0.05).ranks) == 2


def started(group):
    """Whether a profile could be started on all ranks."""
    try:
        group.profiling.start("after")
    except StateError:
        group.profiling.stop()
        return False
    return True

"""Profiles of a pipeline over the wire: one trace per rank, refusals, and the picture drawn from
the traces."""

import gzip
import json
import os
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.timeline import LEGEND, timeline
from rpc_schema.config import ParallelConfig
from rpc_schema.errors import (
    ConfigError,
    StateError,
)
from tests.support.command_line import run_client, short_directory, status_of
from tests.support.forked_daemons import ForkedDaemons
from tests.support.serving import LONG_LEASE, connect, generate, greedy_request, worker_config
from worker_client.cli.demo_model import make_demo_model
from worker_client.worker_group import WorkerGroup

NAMES = [f"-pp{stage}-tp0-rank{stage}.json.gz" for stage in range(2)]


@pytest.fixture(scope="module")
def demo(model_root):
    make_demo_model(model_root / "demo")
    return model_root / "demo"


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles") / "made-by-the-daemons"


@pytest.fixture(scope="module")
def pair(model_root, traces):
    """Two daemons that write traces to one directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKER_DAEMON_PROFILE_DIR", str(traces))
        daemons = ForkedDaemons(["cpu"] * 2, model_root)
    with daemons:
        yield daemons


@pytest.fixture
def directory():
    path = short_directory()
    yield path
    shutil.rmtree(path)


def requests(count):
    return [greedy_request(f"r{i}", [1, 2, 3, i + 4], 6, ignore_eos=True) for i in range(count)]


def read(path: Path) -> dict:
    return json.loads(gzip.decompress(path.read_bytes()))


def steps(path: Path) -> list[str]:
    events = read(path)["traceEvents"]
    marked = [e for e in events if str(e.get("name")).startswith("step_context")]
    return [e["name"] for e in sorted(marked, key=lambda e: e["ts"])]


def test_every_rank_writes_its_trace_and_they_fit_together(pair, traces, demo):
    with connect(pair.endpoints, worker_config(demo, 2, max_model_len=256)) as (group, loaded):
        assert [reply.file for reply in group.profiling.start("demo")] == ["", ""]
        run = generate(group, loaded, requests(2))
        files = [Path(reply.file) for reply in group.profiling.stop()]
    assert len(run.tokens) == 2
    assert files == [traces / f"demo{name}" for name in NAMES]
    assert steps(files[0]) == steps(files[1])
    assert steps(files[0])[0].startswith("step_context_2(8)_generation_0(0)_seq_")
    names = [{e.get("name") for e in read(file)["traceEvents"]} for file in files]
    assert "gloo:send" in names[0]
    assert "gloo:recv" in names[1]
    svg = ElementTree.fromstring(timeline([(f.name, read(f)) for f in files], 0, 1e9))
    bars = [
        (float(e.attrib["y"]), e.attrib["fill"])
        for e in svg.iter()
        if "height" in e.attrib and "x" in e.attrib
    ]
    rows = sorted(y for y, colour in bars if y > 30 and colour == LEGEND["gap"])
    assert len(rows) == 2
    for row in rows:
        assert {colour for y, colour in bars if row <= y < row + 16} == set(LEGEND.values())


def test_refusals_reach_the_driver_and_the_group_serves_on(pair, traces, demo):
    with connect(pair.endpoints, worker_config(demo, 2, max_model_len=256), reload=False) as (
        group,
        loaded,
    ):
        assert [reply.file for reply in group.profiling.stop()] == ["", ""]
        for prefix in ("../demo", "a/b"):
            with pytest.raises(ConfigError, match="field prefix"):
                group.profiling.start(prefix)
        with pytest.raises(ConfigError, match="field kind"):
            group.profiling.start("a", "cuda")
        group.profiling.start("kept")
        with pytest.raises(StateError, match="runs already"):
            group.profiling.start("other")
        assert len(generate(group, loaded, requests(1)).tokens) == 1
        group.relink()
        generate(group, loaded, requests(1))
        assert [Path(r.file).name for r in group.profiling.stop()] == [f"kept{n}" for n in NAMES]
    assert not list(traces.glob("other*"))


def test_a_profile_ends_with_its_driver_and_its_trace_with_a_reset(pair, traces, demo):
    config = worker_config(demo, 2, max_model_len=256)
    with connect(pair.endpoints, config, reload=False) as (group, loaded):
        group.profiling.start("gone")
        generate(group, loaded, requests(1))
    with connect(pair.endpoints, config, reload=False) as (group, loaded):
        assert loaded.was_loaded
        assert [reply.file for reply in group.profiling.stop()] == ["", ""]
        assert not list(traces.glob("gone*"))
        group.profiling.start("left")
        generate(group, loaded, requests(1))
        group.reset("DEVICE_READY")
        assert all(len(steps(traces / f"left{name}")) > 3 for name in NAMES)


def test_nothing_to_profile_before_there_is_a_device(model_root, tmp_path):
    with (
        ForkedDaemons(["cpu"], model_root) as daemons,
        WorkerGroup(daemons.endpoints, ParallelConfig(), lease=LONG_LEASE) as group,
    ):
        group.attach()
        with pytest.raises(StateError, match="Profile is not legal in CREATED"):
            group.profiling.start("a")


@pytest.mark.exhaustive
def test_bench_names_the_traces_of_its_daemons(directory, demo):
    words = (
        *("bench", "--model", str(demo), "--device", "cpu", "--pipeline-parallel-size", "2"),
        *("--num-gpu-blocks", "128", "--prompt", "The driver", "--json", "--profile", "run"),
    )
    figures = json.loads(run_client(directory, *words).stdout)
    home = directory / "worker-daemon" / "profiles"
    assert figures["traces"] == [str(home / f"run{name}") for name in NAMES]
    assert steps(home / f"run{NAMES[0]}") == steps(home / f"run{NAMES[1]}") != []


def test_bench_leaves_running_daemons_without_a_profile(directory, pair, traces, demo):
    words = (
        *("bench", "--model", str(demo), "--endpoints", ",".join(pair.endpoints), "--json"),
        *("--pipeline-parallel-size", "2", "--num-gpu-blocks", "128", "--prompt", "The driver"),
    )
    refused = run_client(directory, *words, "--reload", "--profile", "a/b", check=False)
    assert refused.returncode == 2
    assert "field prefix" in refused.stderr
    figures = json.loads(run_client(directory, *words, "--profile", "again").stdout)
    assert figures["traces"] == [str(traces / f"again{name}") for name in NAMES]
    assert "traces" not in json.loads(run_client(directory, *words).stdout)
    assert all(status_of(endpoint).serving == "SERVING" for endpoint in pair.endpoints)


def test_shutdown_during_a_profile_keeps_its_trace(model_root, demo, tmp_path, monkeypatch):
    monkeypatch.setenv("WORKER_DAEMON_PROFILE_DIR", str(tmp_path / "t"))
    with ForkedDaemons(["cpu"], model_root) as daemons:
        with connect(daemons.endpoints, worker_config(demo, max_model_len=256)) as (group, loaded):
            group.profiling.start("end")
            generate(group, loaded, requests(1))
            group.shutdown()
        pid = daemons.pids[0]
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    assert len(steps(tmp_path / "t" / "end-pp0-tp0-rank0.json.gz")) > 3

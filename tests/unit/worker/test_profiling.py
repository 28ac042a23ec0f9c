"""Profiles of one worker in this process: the files written, refusals, and that steps continue when
a profile fails."""

import gzip
import json
import resource
import time
from contextlib import contextmanager

import msgspec
import pytest
import torch
from worker_driver import GREEDY, WorkerDriver

from rpc_schema import lifecycle
from rpc_schema.codec import decode_step, encode_step
from rpc_schema.errors import (
    BadFrameError,
    CapacityError,
    ConfigError,
    InvalidStepError,
    StateError,
)
from rpc_schema.step import ExecuteDummyBatch, ExecuteModel, SampleTokens
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.worker.profiling import Profiler, ProfileRequest, step_label, trace_name
from worker_daemon.worker.worker import Worker

SUFFIX = "-pp0-tp0-rank0.json.gz"


@pytest.fixture
def traces(tmp_path):
    return tmp_path / "made-on-demand" / "traces"


@pytest.fixture
def start(model_root, llama, traces):
    """start(directory) -> a driver of a worker that is READY with llama."""
    workers = []

    def make(directory=traces):
        worker = Worker(
            "cpu", [model_root], lambda phase, seconds, done=0.0: None, profile_dir=directory
        )
        workers.append(worker)
        driver = WorkerDriver(worker)
        driver.init_device()
        return driver.serve("llama")

    yield make
    for worker in workers:
        worker.close()


@pytest.fixture
def driver(start):
    return start()


def profile(driver, action, prefix="", kind="torch"):
    message = lifecycle.Profile(**driver.ids(), action=action, kind=kind, prefix=prefix)
    return driver.worker.profile(message).file


def read(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def labels(path):
    """The names of the steps in a trace, in order."""
    events = [e for e in read(path)["traceEvents"] if e.get("cat") == "user_annotation"]
    return [e["name"] for e in sorted(events, key=lambda e: e["ts"]) if "step_" in e["name"]]


def test_trace_holds_the_steps_between_start_and_stop(driver, traces, prompts):
    prompt, other = prompts([20, 5])
    driver.generate(0, prompt, 2)
    assert profile(driver, "start", "run.1") == ""
    first = driver.ids()["seq"] + 1
    driver.execute({0: 16, 1: 5}, [(0, prompt, GREEDY), (1, other, GREEDY)])
    driver.execute({0: 4, 1: 1})
    driver.execute({0: 1, 1: 1})
    file = profile(driver, "stop")
    driver.execute({}, finished=[0, 1])
    assert file == str(traces / f"run.1{SUFFIX}")
    assert [path.name for path in traces.iterdir()] == [f"run.1{SUFFIX}"]
    assert traces.stat().st_mode & 0o777 == traces.parent.stat().st_mode & 0o777 == 0o700
    assert labels(traces / f"run.1{SUFFIX}") == [
        f"step_context_2(21)_generation_0(0)_seq_{first}",
        f"step_context_1(4)_generation_1(1)_seq_{first + 1}",
        f"step_context_0(0)_generation_2(2)_seq_{first + 2}",
    ]
    operations = {e["name"] for e in read(traces / f"run.1{SUFFIX}")["traceEvents"]}
    assert operations & {"aten::mm", "aten::linear", "aten::addmm"}


def test_profiled_steps_give_the_same_tokens(driver, llama, prompts, reference):
    (prompt,) = prompts([17])
    profile(driver, "start")
    assert driver.generate(0, prompt, 5) == reference(llama, prompt, 5)
    profile(driver, "stop")


def test_name_says_the_place_in_the_group():
    assert trace_name("a", ParallelState(3, 2, 5)) == "a-pp2-tp1-rank5.json.gz"


def test_name_is_kept_until_another_is_given(driver, traces, prompts):
    (prompt,) = prompts([9])
    names = []
    for prefix in ("", "a", "", "b", ""):
        profile(driver, "start", prefix)
        driver.generate(0, prompt, len(names) + 1)
        names.append(profile(driver, "stop"))
    expected = [f"{prefix}{SUFFIX}" for prefix in ("trace", "a", "a", "b", "b")]
    assert names == [str(traces / name) for name in expected]
    counts = {name: len(labels(traces / name)) for name in set(expected)}
    # The later one replaces the earlier; the step that finishes a request counts as one.
    assert counts == {f"trace{SUFFIX}": 2, f"a{SUFFIX}": 4, f"b{SUFFIX}": 6}


def test_second_start_is_refused_and_the_first_goes_on(driver, traces, prompts):
    profile(driver, "start", "first")
    for kind in ("torch", "cuda"):
        with pytest.raises(StateError, match="runs already"):
            profile(driver, "start", "second", kind)
    driver.generate(0, prompts([9])[0], 2)
    assert profile(driver, "stop") == str(traces / f"first{SUFFIX}")
    assert len(labels(traces / f"first{SUFFIX}")) == 3


def test_stop_without_a_start_warns(driver, traces, caplog):
    assert profile(driver, "stop") == ""
    assert "no profile runs" in caplog.text
    assert not traces.exists()


def test_stop_of_the_other_kind_is_refused(driver):
    profile(driver, "start", "a")
    with pytest.raises(StateError, match="another kind"):
        profile(driver, "stop", kind="cuda")
    assert profile(driver, "stop").endswith(f"/a{SUFFIX}")


@pytest.mark.parametrize(
    "prefix", ["a/b", "../a", "..", ".hidden", "-a", "a b", "a\n", "a\0", "ä", "/"]
)
def test_prefix_that_is_no_plain_name_is_refused(driver, traces, prefix):
    with pytest.raises(ConfigError) as caught:
        profile(driver, "start", prefix)
    assert (caught.value.field, caught.value.value) == ("prefix", prefix)
    assert not traces.exists()
    profile(driver, "start")
    assert profile(driver, "stop") == str(traces / f"trace{SUFFIX}")  # nor is its name kept


@pytest.mark.parametrize(
    ("field", "value"), [("kind", "nvtx"), ("action", "x"), ("prefix", "a" * 65)]
)
def test_unknown_words_and_long_names_do_not_decode(field, value):
    message = lifecycle.Profile(epoch=1, link=1, seq=1, action="start", kind="torch")
    assert decode_step(encode_step(message)) == message
    with pytest.raises(BadFrameError):
        decode_step(encode_step(msgspec.structs.replace(message, **{field: value})))


def test_cuda_marks_need_a_cuda_device(driver):
    with pytest.raises(ConfigError) as caught:
        profile(driver, "start", kind="cuda")
    assert caught.value.field == "kind"
    profile(driver, "start")
    assert profile(driver, "stop")


def test_cuda_marks_write_nothing_and_name_the_steps(monkeypatch):
    calls = []

    @contextmanager
    def named(label):
        calls.append(label)
        yield

    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range", named)
    profiler = Profiler(None)
    device, place = torch.device("cuda", 0), ParallelState(1, 1, 0)
    message = ExecuteModel(
        epoch=1, link=1, seq=1, total_num_scheduled_tokens=3, scheduled=bytes([0b111])
    )
    with profiler.step(message):
        profiler.start(ProfileRequest("cuda", ""), device, place)
    with pytest.raises(StateError, match="stop it first"):
        profiler.start(ProfileRequest("torch", ""), device, place)
    with profiler.step(message):
        assert profiler.stop("cuda") is None
    with profiler.step(message):
        profiler.end()
    assert calls == ["start", "step_context_0(0)_generation_3(3)_seq_1", "stop"]


def test_without_a_directory_traces_are_refused(start, prompts):
    driver = start(None)
    with pytest.raises(ConfigError) as caught:
        profile(driver, "start", "a")
    assert caught.value.field == "profile-dir"
    assert len(driver.generate(0, prompts([9])[0], 2)) == 2


def test_directory_that_others_may_write_is_refused(driver, traces):
    traces.mkdir(parents=True)
    traces.chmod(0o777)
    with pytest.raises(ConfigError, match="mode 0777"):
        profile(driver, "start", "a")


@contextmanager
def disk_of(num_bytes):
    """No file can grow beyond it, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_costs_the_trace_only(driver, traces, prompts):
    (prompt,) = prompts([9])
    profile(driver, "start", "a")
    profile(driver, "stop")
    before = (traces / f"a{SUFFIX}").read_bytes()
    profile(driver, "start", "a")
    driver.generate(0, prompt, 3)
    with disk_of(4096), pytest.raises(CapacityError):
        profile(driver, "stop")
    assert [path.name for path in traces.iterdir()] == [f"a{SUFFIX}"]
    assert (traces / f"a{SUFFIX}").read_bytes() == before
    profile(driver, "start", "a")
    driver.generate(0, prompt, 3)
    assert profile(driver, "stop")
    assert len(labels(traces / f"a{SUFFIX}")) == 4


def test_directory_that_vanished_costs_the_trace_only(driver, traces, prompts):
    profile(driver, "start", "a")
    traces.rmdir()
    with pytest.raises(ConfigError) as caught:
        profile(driver, "stop")
    assert caught.value.field == "profile-dir"
    assert len(driver.generate(0, prompts([9])[0], 2)) == 2
    profile(driver, "start", "a")
    assert profile(driver, "stop") == str(traces / f"a{SUFFIX}")


@pytest.mark.parametrize("level", ["MODEL_LOADED", "DEVICE_READY", "CREATED"])
def test_reset_ends_a_profile_and_keeps_its_trace(level, driver, traces, prompts):
    (prompt,) = prompts([9])
    profile(driver, "start", "a")
    driver.generate(0, prompt, 2)
    driver.reset(level)
    assert len(labels(traces / f"a{SUFFIX}")) == 3
    if level == "CREATED":
        driver.init_device()
    profile(driver, "start", "b")
    if level != "MODEL_LOADED":
        driver.load_model("llama")
    driver.profile()
    driver.allocate()
    driver.warm_up()
    driver.generate(0, prompt, 2)
    assert profile(driver, "stop") == str(traces / f"b{SUFFIX}")
    assert len(labels(traces / f"b{SUFFIX}")) == 3


def test_reset_whose_trace_cannot_be_written_succeeds(driver, traces, prompts, caplog):
    profile(driver, "start", "a")
    traces.rmdir()
    driver.reset("MODEL_LOADED")
    assert "is lost" in caplog.text
    driver.allocate()
    driver.warm_up()
    assert len(driver.generate(0, prompts([9])[0], 2)) == 2


def test_the_end_of_the_worker_ends_a_profile(driver, traces, prompts):
    profile(driver, "start", "a")
    driver.generate(0, prompts([9])[0], 1)
    driver.worker.close()
    assert len(labels(traces / f"a{SUFFIX}")) == 2


# An observer's trace.


def test_observed_steps_lie_between_start_and_stop_and_clock_marks_at_its_ends(
    driver, traces, prompts
):
    (prompt,) = prompts([9])
    before = time.monotonic_ns()
    driver.worker.start_trace()
    started = time.monotonic_ns()
    driver.generate(0, prompt, 3)
    stopping = time.monotonic_ns()
    path = driver.worker.stop_trace(keep=True).pack()
    after = time.monotonic_ns()
    assert path == traces / f"observed{SUFFIX}"
    assert [p.name for p in traces.iterdir()] == [path.name]
    assert len(labels(path)) == 4
    marks = sorted(
        (int(e["name"].removeprefix("clock_")), e["ts"], e["ts"] + e["dur"])
        for e in read(path)["traceEvents"]
        if str(e.get("name")).startswith("clock_")
    )
    times = [moment for moment, _, _ in marks]
    first, last = times[: len(times) // 2], times[len(times) // 2 :]
    assert all(before <= moment <= started for moment in first)
    assert all(stopping <= moment <= after for moment in last)
    # Each was read before its range began, and after the one before it had ended.
    ends = [0.0, *(end for _, _, end in marks)]
    assert all(end <= begin for end, (_, begin, _) in zip(ends, marks, strict=False))


def test_observer_s_trace_is_no_driver_s(driver, traces, prompts, caplog):
    worker, (prompt,) = driver.worker, prompts([9])
    worker.start_trace()
    with pytest.raises(StateError, match="an observer's trace of kind torch runs already"):
        profile(driver, "start", "mine")
    with pytest.raises(StateError, match="runs already"):
        worker.start_trace()
    assert profile(driver, "stop") == ""
    assert "no profile runs" in caplog.text
    worker.on_attach()
    driver.generate(0, prompt, 2)
    assert len(labels(worker.stop_trace(keep=True).pack())) == 3
    with pytest.raises(StateError, match="no observer's trace"):
        worker.stop_trace(keep=True)
    profile(driver, "start", "mine")
    with pytest.raises(StateError, match="a profile of kind torch runs already"):
        worker.start_trace()
    with pytest.raises(StateError, match="no observer's trace"):
        worker.stop_trace(keep=False)
    driver.generate(0, prompt, 2)
    assert len(labels(traces / profile(driver, "stop"))) == 3


def test_observer_s_trace_that_is_not_kept_leaves_nothing(driver, traces):
    driver.worker.start_trace()
    assert driver.worker.stop_trace(keep=False) is None
    driver.worker.start_trace()
    driver.worker.stop_trace(keep=True).discard()
    assert not list(traces.iterdir())


def test_reset_ends_an_observer_s_trace(driver, traces, prompts):
    driver.worker.start_trace()
    driver.generate(0, prompts([9])[0], 1)
    driver.reset("CREATED")
    assert len(labels(traces / f"observed{SUFFIX}")) == 2
    for call in (driver.worker.start_trace, lambda: driver.worker.stop_trace(keep=True)):
        with pytest.raises(StateError):
            call()


def test_observer_is_told_of_a_missing_directory_and_of_a_full_disk(start, driver, traces):
    other = start(None)
    with pytest.raises(ConfigError) as caught:
        other.worker.start_trace()
    assert caught.value.field == "profile-dir"
    driver.worker.start_trace()
    with disk_of(4096), pytest.raises(CapacityError):
        driver.worker.stop_trace(keep=True)
    assert not list(traces.iterdir())
    driver.worker.start_trace()
    plain = driver.worker.stop_trace(keep=True)
    with disk_of(512), pytest.raises((CapacityError, ConfigError)):
        plain.pack()
    assert not list(traces.iterdir())


def test_every_kind_of_step_is_named_by_its_seq():
    ids = {"epoch": 1, "link": 1}
    assert step_label(SampleTokens(**ids, seq=5, step_seq=4)) == "sample_tokens_of_4_seq_5"
    assert step_label(ExecuteDummyBatch(**ids, seq=6)) == "dummy_batch_seq_6"
    broken = ExecuteModel(
        **ids, seq=7, total_num_scheduled_tokens=1, num_scheduled_tokens=b"\1\2\3"
    )
    assert step_label(broken) == "step_context_0(0)_generation_0(0)_seq_7"


def test_profile_hides_no_error_of_a_step(driver, prompts):
    profile(driver, "start")
    message, arrays = driver.step({0: 9}, [(0, prompts([9])[0], GREEDY)])
    broken = msgspec.structs.replace(message, num_scheduled_tokens=b"\0" * 5)
    with pytest.raises(InvalidStepError):
        driver.worker.execute_model(broken, arrays)
    profile(driver, "stop")

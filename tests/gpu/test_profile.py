"""Profiles on a GPU: the trace holds the device's work, replayed graphs included, and steps go on
after a profile of either kind."""

import gzip
import io
import json
import os
import time
from pathlib import Path

import pytest
import torch

from benchmarks.stage_driver import StageDriver, pipelined
from benchmarks.timeline import timeline
from rpc_schema.codec import decode_step
from rpc_schema.lifecycle import Profile
from worker_client.tracing.clocks import ClockMap, Offset
from worker_client.tracing.trace_merge import RankTrace, merge_traces

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 8
REQUESTS = 4


@pytest.fixture(scope="module")
def driver(qwen3, tmp_path_factory):
    traces = tmp_path_factory.mktemp("traces")
    driver = StageDriver(qwen3, "cuda:0", 512, num_blocks=512, profile_dir=traces)
    driver.start()
    yield driver
    driver.worker.close()


def profile(driver, action, kind="torch"):
    message = Profile(**driver.ids(), action=action, kind=kind, prefix="gpu")
    return driver.worker.profile(message).file


def decode(driver, steps=STEPS):
    def launch():
        return driver.worker.execute_model(decode_step(driver.decode_frames(REQUESTS)), [])

    pipelined(steps, launch)


def profiled(driver):
    """The trace of STEPS decodes."""
    profile(driver, "start")
    decode(driver)
    return json.loads(gzip.decompress(Path(profile(driver, "stop")).read_bytes()))


def count(trace, category, prefix=""):
    events = [e for e in trace["traceEvents"] if e.get("cat") == category]
    return sum(str(e["name"]).startswith(prefix) for e in events)


def test_traces_hold_the_same_device_work_each_time(driver):
    driver.admit(REQUESTS, 40, 10 * STEPS)
    decode(driver)
    kernels = []
    for _ in range(3):
        trace = profiled(driver)
        assert count(trace, "user_annotation", "step_context_0(0)_generation_4(4)") == STEPS
        kernels.append(count(trace, "kernel"))
        decode(driver)
    assert kernels[0] > 10 * STEPS
    assert len(set(kernels)) == 1
    assert timeline([("rank0", trace)], 0, 1e9).count("<rect") > STEPS


def test_observer_s_trace_lies_on_our_clock(driver):
    """Merge like `worker-client trace`: a step's kernels come after its launch, and both
    lie between the times before and after the run."""
    driver.admit(REQUESTS, 40, 4 * STEPS)
    decode(driver)
    driver.worker.start_trace()
    begin = time.monotonic_ns()
    decode(driver)
    torch.cuda.synchronize()
    end = time.monotonic_ns()
    packed = driver.worker.stop_trace(keep=True).pack().read_bytes()
    same_clock = ClockMap(Offset(begin, 0, 0))
    rank = RankTrace(0, " (pp0 tp0)", os.getpid(), packed, same_clock)
    target = io.BytesIO()
    (summary,) = merge_traces([rank], [], begin, target).ranks
    assert summary.num_steps == STEPS
    assert summary.clock_bound_ns < 1_000_000
    events = json.loads(gzip.decompress(target.getvalue()))["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    steps = [e for e in events if e.get("cat") == "user_annotation" and "_seq_" in e["name"]]
    slack = summary.clock_bound_ns / 1000 + 50  # the profiler's own clock error
    first = min(step["ts"] for step in steps)
    assert kernels
    assert all(first - slack <= kernel["ts"] for kernel in kernels)
    assert all(k["ts"] + k["dur"] <= (end - begin) / 1000 + slack for k in kernels)
    assert all(-slack <= step["ts"] <= (end - begin) / 1000 for step in steps)
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {f"rank 0 (pp0 tp0): host (pid {os.getpid()})", "rank 0 (pp0 tp0): device 0"}


def test_marks_for_an_external_profiler(driver):
    driver.admit(REQUESTS, 40, 4 * STEPS)
    profile(driver, "start", "cuda")
    decode(driver)
    assert profile(driver, "stop", "cuda") == ""
    decode(driver)

"""The table of `make bench` and the table of a step: from figures to rows, on any machine."""

import json
import random
import subprocess
import sys

import psutil
import pytest

import benchmarks.__main__ as bench
from benchmarks import workloads
from benchmarks.floors import Ceilings
from benchmarks.records import BenchRun
from benchmarks.targets import FP8, WORKLOADS, Target
from benchmarks.trace_table import GAPS, group_of, tabulate
from tests.support.waiting import PATIENCE_S, wait_until

CEILINGS = Ceilings(4.5e12, 670e12, 560e12)


def run(workload, value, unit, model="llama-8b", shape="1x1"):
    return {"model": model, "shape": shape, "workload": workload, "value": value, "unit": unit}


def test_rates_and_times_are_judged_by_floor_and_target():
    rows = bench.e2e_rows(
        CEILINGS,
        [
            run("decode_bs1", 150.0, "tok/s out"),
            run("prefill_1x8192", 0.404, "s"),
            run("prefill_8x8192", 40_000.0, "tok/s in"),
            run("decode_bs64", 99.0, "tok/s out", shape="4x1"),
        ],
    )
    decode, one, eight, other = rows
    assert (decode.floor, decode.fraction) == pytest.approx((299, 0.5), rel=0.01)
    assert (decode.target, decode.met) == (262, False)
    assert (one.floor, one.fraction) == pytest.approx((0.202, 0.5), rel=0.01)
    assert (one.target, one.met) == (0.218, False)
    assert eight.met is True and eight.fraction == pytest.approx(0.987, rel=0.01)
    assert (other.target, other.met) == (None, None)
    assert bench.e2e_rows(None, [run("decode_bs1", 150.0, "tok/s out")])[0].floor is None


def test_every_target_is_of_a_workload_and_a_model_that_exist():
    models = {path.parent.name for path in bench.MODELS.glob("*/config.json")}
    for model, shape, workload in WORKLOADS:
        assert model in models and workload in (*workloads.NAMES, *workloads.NAMED)
        assert shape in ("1x1", "2x1", "1x2", f"1x1 {FP8}")
    assert Target(3.0, at_most=True).met_by(2.9) and not Target(3.0).met_by(2.9)


def test_a_section_that_needs_a_device_is_left_out_without_one(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    options = bench.parse_options(["--only", "e2e,step", "--out", str(tmp_path / "b" / "x.json")])
    parts = bench.Parts(tmp_path)
    bench.run_sections(parts, options)
    bench.report(parts, options.out, BenchRun("2026-12-01", "cpu", "abc1234", "make bench"))
    written = json.loads(options.out.read_text())
    assert written["rows"] == [] and "left out step, e2e" in written["left_out"][0]
    assert "left out step, e2e" in capsys.readouterr().out


def test_an_interruption_ends_what_a_part_has_started(tmp_path):
    told = tmp_path / "pid"
    grandchild = (
        f"import os, time; open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    )
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    script = (
        "import signal, sys; import benchmarks.__main__ as bench\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        f"bench.run_in_group([sys.executable, '-c', {child!r}])\n"
    )
    runner = subprocess.Popen([sys.executable, "-c", script])
    wait_until(lambda: told.exists() and told.read_text(), "the grandchild runs", 60.0)
    pid = int(told.read_text())
    runner.terminate()
    assert runner.wait(PATIENCE_S) == 9
    wait_until(lambda: not psutil.pid_exists(pid), "the grandchild has ended")


@pytest.mark.parametrize(
    "words", [["--only", "nothing"], ["--workloads", "decode_bs2"], ["--models", "x,llama-8b"]]
)
def test_a_wrong_choice_is_refused(words, capsys):
    with pytest.raises(SystemExit):
        bench.parse_options(words)
    assert "is not one of" in capsys.readouterr().err


def test_startup_ends_with_its_target_and_what_was_compiled():
    start = {
        "model": "llama-8b", "shape": "1x1", "kind": "warm", "compiled_files": 0,
        "startup_s": {"spawn": 1.0, "total": 12.5},
    }  # fmt: skip
    spawn, total, compiled = bench.startup_rows([start])
    assert (spawn.target, total.target, total.met) == (None, 7.0, False)
    assert compiled.value == 0


KERNEL_NAMES = {
    "nvjet_tst_64x8_64x16_4x1_v_bz_TNT": "gemm",
    "void gemv2T_kernel_val<int, int, __nv_bfloat16>": "gemm",
    "_decode_kernel": "attention",
    "_merge_parts_kernel": "attention",
    "_rms_norm_kernel": "norm",
    "_rotate_and_store_kernel": "rope and store",
    "_act_and_mul_kernel": "activation",
    "Memcpy HtoD (Pinned -> Device)": "copies",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "communication",
    "void at::native::reduce_kernel<512, 1, at::native::ArgMaxOps<float>>": "sampling",
    "void at::native::indexSelectSmallIndex<c10::BFloat16>": "inputs",
    "void at::native::vectorized_elementwise_kernel<8, CUDAFunctor_add>": "other",
}


@pytest.mark.parametrize("name", KERNEL_NAMES)
def test_a_kernel_is_put_into_its_group(name):
    assert group_of(name) == KERNEL_NAMES[name]


def test_device_time_adds_up_with_gaps_and_overlaps():
    rng = random.Random()
    base, events = rng.uniform(0, 1e9), []
    spans = [(0, 10), (5, 10), (30, 1), (32, 8)]
    for start, duration in rng.sample(spans, len(spans)):
        name = rng.choice(list(KERNEL_NAMES))
        events.append({"cat": "kernel", "name": name, "ts": base + start, "dur": duration})
    events.append({"cat": "cpu_op", "name": "aten::mm", "ts": base - 500, "dur": 1000})
    events.append({"name": "a mark without a category", "ts": 0})
    table = tabulate({"traceEvents": events}, num_steps=2)
    assert table.step_us == pytest.approx(20)
    assert table.groups[GAPS] == pytest.approx((40 - 15 - 1 - 8) / 2, abs=1e-3)
    assert sum(table.groups.values()) - table.groups[GAPS] == pytest.approx(29 / 2)
    assert sum(table.kernels.values()) == pytest.approx(29 / 2)
    assert table.kernels_per_step == 2
    assert table.share(GAPS) == pytest.approx(0.4, abs=1e-3)
    assert tabulate({"traceEvents": []}, 1).step_us == 0


def test_sleep_figures_have_floor_and_target():
    figures = [
        {"name": "sleep 1", "value": 0.5, "unit": "s", "floor": 0.3},
        {"name": "device memory asleep 2", "value": 3.0, "unit": "GB", "floor": None},
        {"name": "pinned host to device", "value": 55.0, "unit": "GB/s", "floor": None},
    ]
    asleep, memory, link = bench.sleep_rows("llama-8b", figures)
    assert (asleep.floor, asleep.fraction, asleep.target, asleep.met) == (0.3, 0.6, 1.0, True)
    assert (memory.met, link.target) == (False, None)

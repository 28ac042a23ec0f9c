"""Pictures of hand-made traces: what lies where, in which colour, on whose clock."""

import gzip
import json
import subprocess
import sys
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from benchmarks.timeline import COLOURS, LEGEND, merge, timeline

BASE_NS = 1_790_857_026_000_000_000
EARLY_US = 4_441_409_367_389.652


def trace(*events, base_ns=BASE_NS, cat="kernel"):
    """(name, start, end) in us after EARLY_US."""
    listed = [
        {"ph": "X", "cat": cat, "name": name, "ts": EARLY_US + start, "dur": end - start}
        for name, start, end in events
    ]
    process = {"ph": "M", "name": "process_name", "ts": EARLY_US - 500, "pid": 1}
    return {"baseTimeNanoseconds": base_ns, "traceEvents": [process, *listed]}


class Rect(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    colour: str


def rects(svg):
    found = []
    for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect"):
        if "x" in element.attrib:
            numbers = [float(element.attrib[key]) for key in ("x", "y", "width", "height")]
            found.append(Rect(*numbers, element.attrib["fill"]))
    return found


def texts(svg):
    return [e.text for e in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def lanes(svg):
    """{row's y: [(start, end as shares of the row, colour, whether it fills the height)]} of a
    picture of several traces."""
    bars = [rect for rect in rects(svg) if rect.y > 30]
    gaps = [rect for rect in bars if rect.colour == LEGEND["gap"]]
    found = {}
    for gap in gaps:
        inside = [r for r in bars if gap.y <= r.y < gap.y + gap.height and r is not gap]
        found[gap.y] = [
            (
                round((r.x - gap.x) / gap.width, 2),
                round((r.x + r.width - gap.x) / gap.width, 2),
                r.colour,
                r.height == gap.height,
            )
            for r in inside
        ]
    return found


NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
COMPUTATION, TRANSFER = LEGEND["computation"], LEGEND["transfer"]
FIRST = trace(("nvjet_tst_gemm", 0, 40), (NCCL, 30, 50), ("rms_norm_kernel", 90, 100))
SECOND = trace((NCCL, 10, 50), ("_decode_kernel", 50, 80))


def test_ranks_lie_one_above_the_other_on_one_axis():
    svg = timeline([("a", FIRST), ("b", SECOND)], 0, 1e9, "two")
    first, second = lanes(svg).values()
    assert first == [
        (0.3, 0.5, TRANSFER, True),
        (0.0, 0.4, COMPUTATION, True),
        (0.9, 1.0, COMPUTATION, True),
        (0.3, 0.5, TRANSFER, False),  # below the product that runs at the same time
    ]
    assert second == [
        (0.1, 0.5, TRANSFER, True),
        (0.5, 0.8, COMPUTATION, True),
        (0.1, 0.5, TRANSFER, False),
    ]
    assert list(lanes(svg)) == sorted(lanes(svg))
    assert texts(svg)[:6] == ["two", "computation", "transfer", "gap", "a", "b"]
    assert [text for text in texts(svg) if text.endswith("us")] == [
        f"{tick} us" for tick in range(0, 101, 10)
    ]


def test_clocks_with_another_base_are_brought_together():
    shifted = trace(("gemm", 0, 20), base_ns=BASE_NS + 50_000)
    svg = timeline([("a", trace(("gemm", 0, 100))), ("b", shifted)], 0, 1e9)
    assert list(lanes(svg).values())[1] == [(0.5, 0.7, COMPUTATION, True)]


def test_window_counts_from_the_first_trace_and_cuts_what_crosses_it():
    svg = timeline([("a", FIRST), ("b", SECOND)], 20, 40)
    first, second = lanes(svg).values()
    assert first[:2] == [(0.25, 0.75, TRANSFER, True), (0.0, 0.5, COMPUTATION, True)]
    assert second[:2] == [(0.0, 0.75, TRANSFER, True), (0.75, 1.0, COMPUTATION, True)]
    assert "20 us" in texts(svg)
    assert "60 us" in texts(svg)


def test_one_trace_has_a_row_for_each_kind_of_kernel():
    svg = timeline([("a", FIRST)], 0, 1e9)
    assert [name for name in texts(svg) if name in COLOURS] == ["gemm", "norm", "communication"]
    drawn = {rect.colour: rect for rect in rects(svg)}
    assert set(drawn) == {COLOURS[name] for name in ("gemm", "norm", "communication")}
    assert len({rect.y for rect in drawn.values()}) == 3
    assert drawn[COLOURS["gemm"]].width == pytest.approx(4 * drawn[COLOURS["norm"]].width, rel=1e-3)


def test_trace_without_a_device_shows_the_host():
    host = trace(
        ("aten::linear", 0, 60), ("aten::mm", 10, 20), ("c10d::send", 60, 70), cat="cpu_op"
    )
    host["traceEvents"] += trace(("gloo:send", 65, 90), cat="user_annotation")["traceEvents"]
    host["traceEvents"] += trace(("step_context_1(4)", 0, 100), cat="user_annotation")[
        "traceEvents"
    ]
    svg = timeline([("a", host), ("b", trace(("gemm", 0, 100)))], 0, 1e9)
    assert next(iter(lanes(svg).values())) == [
        (0.6, 0.9, TRANSFER, True),
        (0.0, 0.6, COMPUTATION, True),
        (0.6, 0.9, TRANSFER, False),
    ]


def test_host_operations_beside_a_device_s_are_left_out():
    both = trace(("gemm", 0, 10))
    both["traceEvents"] += trace(("aten::mm", 0, 100), cat="cpu_op")["traceEvents"]
    assert timeline([("a", both)], 0, 1e9) == timeline([("a", trace(("gemm", 0, 10)))], 0, 1e9)


@pytest.mark.parametrize("traces", [[("a", FIRST)], [("a", trace()), ("b", trace())]])
def test_empty_stretch_is_an_error(traces):
    with pytest.raises(ValueError, match="no events between 500 and 600 us"):
        timeline(traces, 500, 100)


def test_merge_is_the_union():
    assert merge([(0, 4), (1, 2), (4, 5), (6, 7)]) == [(0, 5), (6, 7)]
    assert merge([(0, 4), (1, 2), (4, 5), (6, 7)], 1) == [(0, 7)]
    assert merge([]) == []


def test_command_line_takes_any_number_of_traces(tmp_path):
    paths = []
    for name, content in (("x-pp0-tp0-rank0", FIRST), ("x-pp1-tp0-rank1", SECOND)):
        path = tmp_path / f"{name}.json.gz"
        path.write_bytes(gzip.compress(json.dumps(content).encode()))
        paths.append(str(path))
    out = tmp_path / "out.svg"
    command = [sys.executable, "-m", "benchmarks.timeline", *paths, str(out)]
    subprocess.run([*command, "--length", "50"], check=True)
    expected = [("x-pp0-tp0-rank0", FIRST), ("x-pp1-tp0-rank1", SECOND)]
    assert out.read_text() == timeline(expected, 0, 50)
    failed = subprocess.run(
        [*command, "--start", "1e6"], capture_output=True, text=True, check=False
    )
    assert failed.returncode == 2
    assert "no events" in failed.stderr

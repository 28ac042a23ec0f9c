"""Draws a stretch of a Chrome trace of step_trace as an SVG, one row a group of kernels:
`python -m benchmarks.timeline TRACE.json.gz OUT.svg [--start US] [--length US]`.

Time runs to the right; kernels started by dependent launch overlap their predecessors. Pure but for
the two files.
"""

import argparse
import gzip
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.trace_table import group_of

WIDTH, ROW, LEFT, TOP = 1000, 22, 120, 34
COLOURS = {
    "gemm": "#4e79a7",
    "attention": "#f28e2b",
    "norm": "#59a14f",
    "rope and store": "#76b7b2",
    "activation": "#edc948",
    "sampling": "#b07aa1",
    "communication": "#e15759",
    "inputs": "#9c755f",
    "copies": "#bab0ac",
    "other": "#888888",
}


def device_events(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Kernels and copies, in order of their start."""
    kinds = {"kernel", "gpu_memcpy", "gpu_memset"}
    events = [event for event in trace["traceEvents"] if event.get("cat") in kinds]
    return sorted(events, key=lambda event: float(event["ts"]))


def window(events: Sequence[dict[str, Any]], start: float, length: float) -> list[dict[str, Any]]:
    """The events that begin within [start, start + length), us after the first event."""
    origin = float(events[0]["ts"])
    return [event for event in events if 0 <= event["ts"] - origin - start < length]


def draw(events: Sequence[dict[str, Any]], title: str) -> str:
    """SVG of the events, scaled to the width."""
    first = float(events[0]["ts"])
    span = max(event["ts"] + event["dur"] for event in events) - first
    groups = [name for name in COLOURS if any(group_of(e["name"]) == name for e in events)]
    scale = (WIDTH - LEFT) / span
    height = TOP + ROW * len(groups) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 10}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH + 10}" height="{height}" fill="white"/>',
        f'<text x="4" y="18" font-size="14">{escape(title)}</text>',
    ]
    for index, group in enumerate(groups):
        lines.append(f'<text x="4" y="{TOP + ROW * index + 15}">{escape(group)}</text>')
    for event in events:
        group = group_of(event["name"])
        x, width = LEFT + (event["ts"] - first) * scale, max(event["dur"] * scale, 0.4)
        y = TOP + ROW * groups.index(group) + 3
        lines.append(
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW - 6}" '
            f'fill="{COLOURS[group]}"/>'
        )
    lines += _axis(span, scale, height)
    return "\n".join([*lines, "</svg>", ""])


def _axis(span: float, scale: float, height: int) -> list[str]:
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 1e9) if span / s <= 12)
    ticks = range(int(span // step) + 1)
    return [
        f'<text x="{LEFT + tick * step * scale:.1f}" y="{height - 10}" fill="#555" '
        f'text-anchor="middle">{tick * step:g} us</text>'
        for tick in ticks
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--start", type=float, default=0.0, help="us after the first kernel")
    parser.add_argument("--length", type=float, default=1e9, help="us")
    parser.add_argument("--title", default="")
    arguments = parser.parse_args()
    trace = json.loads(gzip.decompress(arguments.trace.read_bytes()))
    events = window(device_events(trace), arguments.start, arguments.length)
    arguments.out.write_text(draw(events, arguments.title))


if __name__ == "__main__":
    main()

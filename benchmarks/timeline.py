"""Draws a stretch of Chrome traces of torch's profiler as an SVG; time runs to the right.

`python -m benchmarks.timeline TRACE.json.gz OUT.svg [--start US] [--length US]`: one trace, one row
per group of kernels. Kernels started by dependent launch overlap their predecessors.

`python -m benchmarks.timeline RANK0.json.gz RANK1.json.gz ... OUT.svg`: the traces of a group on
one host (`worker-client bench --profile NAME`), in pipeline order, one row each on one axis:
computation, transfers (from their launch, so with the wait for the other rank), both at once, gaps.

A trace without device events is drawn from the host's operations.
"""

import argparse
import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.trace_table import group_of

WIDTH, ROW, BAR, TOP = 1000, 22, 16, 34
FINEST = 0.2
"""Pixels; narrower gaps are not drawn."""
TRANSFER = "communication"
COLOURS = {
    "gemm": "#4e79a7",
    "attention": "#f28e2b",
    "norm": "#59a14f",
    "rope and store": "#76b7b2",
    "activation": "#edc948",
    "sampling": "#b07aa1",
    TRANSFER: "#e15759",
    "inputs": "#9c755f",
    "copies": "#bab0ac",
    "other": "#888888",
}
LEGEND = {"computation": "#4e79a7", "transfer": COLOURS[TRANSFER], "gap": "#e8e8e8"}
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})

Span = tuple[float, float]
"""(start, end) in us on the first trace's clock."""


class Bar(NamedTuple):
    """One event."""

    span: Span
    group: str


class Layer(NamedTuple):
    """Bars of one color in a row; later layers cover earlier ones. top: share of the row's height
    left free above them."""

    colour: str
    spans: Sequence[Span]
    top: float = 0.0


class Row(NamedTuple):
    label: str
    layers: Sequence[Layer]


def read_bars(trace: dict[str, Any], base_ns: int) -> list[Bar]:
    """Return kernels and copies or, if there are none, the host's operations and gloo's transfers;
    ordered by start, in us from base_ns."""
    events = [e for e in trace["traceEvents"] if e.get("cat") in _DEVICE]
    events = events or [e for e in trace["traceEvents"] if _is_host_work(e)]
    shift = (trace.get("baseTimeNanoseconds", base_ns) - base_ns) / 1000
    return sorted(
        Bar((e["ts"] + shift, e["ts"] + shift + e["dur"]), group_of(e["name"])) for e in events
    )


def _is_host_work(event: dict[str, Any]) -> bool:
    category, name = event.get("cat"), str(event.get("name"))
    return category == "cpu_op" or (category == "user_annotation" and name.startswith("gloo:"))


def merge(spans: Iterable[Span], slack: float = 0.0) -> list[Span]:
    """Return the union of sorted spans, with gaps of up to `slack` closed."""
    merged: list[Span] = []
    for start, end in spans:
        if merged and start <= merged[-1][1] + slack:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def group_rows(bars: Sequence[Bar]) -> list[Row]:
    """Return one row per group that occurs."""
    spans = {name: [bar.span for bar in bars if bar.group == name] for name in COLOURS}
    return [Row(name, [Layer(COLOURS[name], found)]) for name, found in spans.items() if found]


def rank_row(label: str, bars: Sequence[Bar], window: Span) -> Row:
    """Return one row for a rank: gaps in the background; a transfer that overlaps computation
    shows in the lower part."""
    transfers = [bar.span for bar in bars if bar.group == TRANSFER]
    computation = [bar.span for bar in bars if bar.group != TRANSFER]
    return Row(
        label,
        [
            Layer(LEGEND["gap"], [window]),
            Layer(LEGEND["transfer"], transfers),
            Layer(LEGEND["computation"], computation),
            Layer(LEGEND["transfer"], transfers, 0.6),
        ],
    )


def draw(rows: Sequence[Row], window: Span, title: str, legend: dict[str, str]) -> str:
    """Return an SVG of the rows within the window (us), scaled to the width; the axis starts at
    0."""
    left = 12 + 7 * max(len(row.label) for row in rows)
    scale, height = (WIDTH - left) / (window[1] - window[0]), TOP + ROW * len(rows) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 10}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH + 10}" height="{height}" fill="white"/>',
        f'<text x="4" y="18" font-size="14">{escape(title)}</text>',
    ]
    for index, (name, colour) in enumerate(legend.items()):
        key = WIDTH - 110 * (len(legend) - index)
        lines.append(f'<rect x="{key}" y="6" width="14" height="14" fill="{colour}"/>')
        lines.append(f'<text x="{key + 20}" y="18">{escape(name)}</text>')
    for index, row in enumerate(rows):
        y = TOP + ROW * index
        lines.append(f'<text x="4" y="{y + 15}">{escape(row.label)}</text>')
        for layer in row.layers:
            top, tall = y + 3 + BAR * layer.top, BAR * (1 - layer.top)
            for start, end in _visible(layer.spans, window, FINEST / scale):
                x, wide = left + (start - window[0]) * scale, max((end - start) * scale, 0.4)
                lines.append(
                    f'<rect x="{x:.2f}" y="{top:g}" width="{wide:.2f}" height="{tall:g}" '
                    f'fill="{layer.colour}"/>'
                )
    lines += _axis(window, left, scale, height)
    return "\n".join([*lines, "</svg>", ""])


def _visible(spans: Iterable[Span], window: Span, slack: float) -> Iterator[Span]:
    for start, end in merge(spans, slack):
        if _within((start, end), window):
            yield max(start, window[0]), min(end, window[1])


def _axis(window: Span, left: float, scale: float, height: int) -> list[str]:
    length = window[1] - window[0]
    step = next(m * 10**k for k in range(12) for m in (1, 2, 5) if length / (m * 10**k) <= 12)
    first, last = -int(-window[0] // step), int(window[1] // step)
    return [
        f'<text x="{left + (tick * step - window[0]) * scale:.1f}" y="{height - 10}" fill="#555" '
        f'text-anchor="middle">{tick * step:g} us</text>'
        for tick in range(first, last + 1)
    ]


def timeline(
    traces: Sequence[tuple[str, dict[str, Any]]], start: float, length: float, title: str = ""
) -> str:
    """Return an SVG of (label, trace); start and length in us, from the first trace's first event.

    Raises:
        ValueError: there are no events in the window.
    """
    base_ns = traces[0][1].get("baseTimeNanoseconds", 0)
    ranks = [(label, read_bars(trace, base_ns)) for label, trace in traces]
    origin = ranks[0][1][0].span[0] if ranks[0][1] else 0.0
    ranks = [(label, [_moved(bar, -origin) for bar in bars]) for label, bars in ranks]
    last = max((bar.span[1] for _, bars in ranks for bar in bars), default=0.0)
    window = (start, min(start + length, last))
    if not any(_within(bar.span, window) for _, bars in ranks for bar in bars):
        raise ValueError(f"there are no events between {start:g} and {start + length:g} us")
    if len(ranks) > 1:
        rows = [rank_row(label, bars, window) for label, bars in ranks]
        return draw(rows, window, title, LEGEND)
    return draw(group_rows([b for b in ranks[0][1] if _within(b.span, window)]), window, title, {})


def _moved(bar: Bar, by: float) -> Bar:
    return Bar((bar.span[0] + by, bar.span[1] + by), bar.group)


def _within(span: Span, window: Span) -> bool:
    return span[0] < window[1] and span[1] > window[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("out", type=Path)
    parser.add_argument("--start", type=float, default=0.0, help="us after the first event")
    parser.add_argument("--length", type=float, default=1e9, help="us")
    parser.add_argument("--title", default="")
    arguments = parser.parse_args()
    traces = [
        (path.name.removesuffix(".json.gz"), json.loads(gzip.decompress(path.read_bytes())))
        for path in arguments.traces
    ]
    try:
        picture = timeline(traces, arguments.start, arguments.length, arguments.title)
    except ValueError as error:
        parser.error(str(error))
    arguments.out.write_text(picture)


if __name__ == "__main__":
    main()

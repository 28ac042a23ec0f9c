"""Draws the plots of README and docs/performance.md, light and dark, as SVG: `python -m
benchmarks.plots [--out docs/images]`. Needs matplotlib (`pip install -c constraints.txt
".[plots]"`). The same data gives the same bytes; text stays text, in the reader's sans-serif."""

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.plot_data import (
    IMAGES,
    Curve,
    Latencies,
    PlotData,
    Recovery,
    Throughput,
    Timeline,
    Timelines,
    Workloads,
    read_plot_data,
    stamp_of,
)

WIDTH = 8.6
"""Inches of 96 CSS pixels at 72 points: 826 pixels, the width of a README."""
BATCHES = (1, 16, 64, 256)
BAR = 0.62
SMALL = 8.5
"""Points of labels beside marks: 11 pixels."""


@dataclass(frozen=True)
class Theme:
    """Colors of a background. `ours` and `vllm` are of Okabe and Ito's palette, which readers with
    any color vision can tell apart; marks differ too."""

    name: str
    text: str
    muted: str
    grid: str
    ours: str
    vllm: str


THEMES = (
    Theme("light", "#1f2328", "#59636e", "#d1d9e0", "#0072b2", "#d55e00"),
    Theme("dark", "#f0f6fc", "#9198a1", "#3d444d", "#56b4e9", "#e69f00"),
)
OURS, VLLM = "this project", "vLLM 0.25.1"


def style_of(theme: Theme) -> dict[str, object]:
    """Return matplotlib's settings."""
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": "worker-daemon",
        "font.family": ["DejaVu Sans"],
        "font.size": 9,
        "text.color": theme.text,
        "axes.labelcolor": theme.text,
        "axes.edgecolor": theme.muted,
        "axes.titlesize": 9,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
        "grid.color": theme.grid,
        "grid.linewidth": 0.6,
        "xtick.color": theme.muted,
        "ytick.color": theme.muted,
        "xtick.labelcolor": theme.text,
        "ytick.labelcolor": theme.text,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "lines.linewidth": 1.8,
        "lines.markersize": 5,
    }


def draw_throughput(data: Throughput, theme: Theme) -> Figure:
    """Draw output tokens a second of decodes over the batch, a panel for each model."""
    figure = Figure(figsize=(WIDTH, 3.0), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, len(data), sharex=True, sharey=True)
    for axes, curve in zip(panels, data, strict=True):
        _curve(axes, curve, theme)
    panels[0].set_ylabel("tokens per second")
    figure.supxlabel("requests that decode at a time", fontsize=9)
    figure.legend(
        handles=[
            Line2D([], [], color=theme.ours, marker="o", label=OURS),
            Line2D([], [], color=theme.vllm, marker="s", ls="--", label=VLLM),
        ],
        loc="outside upper center",
        ncols=2,
    )
    return figure


def _curve(axes: Axes, curve: Curve, theme: Theme) -> None:
    axes.set_xscale("log", base=4)
    axes.set_yscale("log")
    axes.plot([*curve.vllm], [*curve.vllm.values()], "s--", color=theme.vllm)
    axes.plot([*curve.ours], [*curve.ours.values()], "o-", color=theme.ours)
    for batch, value in curve.ours.items():
        if batch in curve.vllm:
            ratio = f"{value / curve.vllm[batch]:.2f}x"
            axes.annotate(
                ratio,
                (batch, value),
                (4, 7),
                textcoords="offset points",
                ha="right",
                fontsize=SMALL,
            )
    axes.set_title(curve.title)
    axes.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
    axes.set_xlim(0.2, 500)
    axes.set_ylim(120, 260_000)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_minor_locator(NullLocator())


def draw_workloads(data: Workloads, theme: Theme) -> Figure:
    """Draw the speed of whole workloads beside vLLM's, a panel for each model."""
    models = list(dict.fromkeys(workload.model for workload in data))
    names = list(dict.fromkeys(workload.name for workload in data))
    figure = Figure(figsize=(WIDTH, 2.7), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, len(models), sharex=True, sharey=True)
    for axes, model in zip(panels, models, strict=True):
        for workload in data:
            if workload.model == model:
                _speed(axes, names.index(workload.name), workload.ours, workload.vllm, theme)
        axes.set_title(model)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.45, -0.75)
        axes.set_xlim(0.78, 1.27)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1f}x"))
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False)
    figure.supxlabel("speed, vLLM 0.26.0 = 1; to the right this project is faster", fontsize=9)
    return figure


def _speed(axes: Axes, row: int, ours: float, vllm: float, theme: Theme) -> None:
    speed = vllm / ours
    color = theme.ours if speed >= 1 else theme.vllm
    axes.barh(row, speed - 1, BAR - 0.2, left=1, color=color)
    axes.plot([1, 1], [row - BAR / 2, row + BAR / 2], color=theme.muted, lw=1)
    axes.text(
        1, row - 0.33, f"{ours:g} s, vLLM {vllm:g} s", ha="center", va="bottom", fontsize=SMALL
    )
    side = 1 if speed >= 1 else -1
    axes.annotate(
        f"{speed:.2f}x",
        (speed, row),
        (3 * side, 0),
        textcoords="offset points",
        va="center",
        ha="left" if side > 0 else "right",
        fontsize=SMALL,
    )


def draw_latency(data: Latencies, theme: Theme) -> Figure:
    """Draw p50 and p99 of the times to the first and between two tokens."""
    figure = Figure(figsize=(WIDTH, 0.7 + 0.42 * len(data)), layout="constrained")
    panels: Sequence[Axes] = figure.subplots(1, 2, sharey=True)
    shown = {
        "time to first token, ms": [latency.ttft_ms for latency in data],
        "inter-token latency, ms": [latency.itl_ms for latency in data],
    }
    for axes, (what, ranges) in zip(panels, shown.items(), strict=True):
        for row, (low, high) in enumerate(ranges):
            axes.plot([low, high], [row, row], color=theme.ours, lw=2.5, zorder=1)
            axes.plot(low, row, "o", color=theme.ours)
            axes.plot(high, row, "D", color=theme.ours)
            for value in (low, high):
                axes.annotate(
                    f"{value:.3g}",
                    (value, row),
                    (0, 6),
                    textcoords="offset points",
                    ha="center",
                    fontsize=SMALL,
                )
        axes.set_yticks(range(len(data)), [latency.system for latency in data])
        axes.set_ylim(len(data) - 0.6, -0.75)
        axes.set_xlim(0, max(high for _, high in ranges) * 1.08)
        axes.set_xlabel(what)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
    figure.legend(
        handles=[
            Line2D([], [], color=theme.ours, marker="o", ls="", label="p50"),
            Line2D([], [], color=theme.ours, marker="D", ls="", label="p99"),
        ],
        loc="outside upper center",
        ncols=2,
    )
    return figure


def draw_recovery(data: Recovery, theme: Theme) -> Figure:
    """Draw the seconds until tokens come, after kills and starts."""
    figure = Figure(figsize=(WIDTH, 2.8), layout="constrained")
    axes = figure.subplots()
    for row, wait in enumerate(data):
        color = theme.vllm if wait.is_vllm else theme.ours
        axes.barh(row, wait.least_s, BAR, color=color)
        axes.barh(row, wait.most_s - wait.least_s, BAR, wait.least_s, color=color, alpha=0.5)
        is_one = wait.least_s == wait.most_s
        text = f"{wait.most_s:.3g} s" if is_one else f"{wait.least_s:.3g} to {wait.most_s:.3g} s"
        axes.annotate(
            text,
            (wait.most_s, row),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL,
        )
    axes.set_yticks(range(len(data)), [wait.what for wait in data])
    axes.set_ylim(len(data) - 0.4, -0.6)
    axes.set_xlim(0, max(wait.most_s for wait in data) * 1.15)
    axes.set_xlabel("seconds until tokens come, Llama 8B")
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False)
    axes.legend(
        handles=[
            Patch(color=theme.ours, label=OURS),
            Patch(color=theme.vllm, label="vLLM with its own workers"),
        ],
        loc="upper right",
    )
    return figure


def draw_kills(data: Timelines, theme: Theme) -> Figure:
    """Draw tokens a second over time, with the kills, a panel for each record."""
    figure = Figure(figsize=(WIDTH, 0.7 + 1.75 * len(data)), layout="constrained")
    rows = figure.subplots(len(data), 1, sharex=True, squeeze=False)
    panels: list[Axes] = [row[0] for row in rows]
    for axes, (where, timeline) in zip(panels, data.items(), strict=True):
        _timeline(axes, where, timeline, theme)
    panels[-1].set_xlabel("seconds")
    return figure


def _timeline(axes: Axes, where: str, timeline: Timeline, theme: Theme) -> None:
    edges = [index * timeline.bucket_s for index in range(len(timeline.tokens) + 1)]
    rates = [tokens / timeline.bucket_s for tokens in timeline.tokens]
    axes.stairs(rates, edges, color=theme.ours, fill=True, alpha=0.3)
    axes.stairs(rates, edges, color=theme.ours, lw=1.2)
    top = max(rates) * 1.32
    for kill in timeline.kills:
        seconds = f"{kill.outage_s:.{1 if kill.outage_s >= 1 else 2}f}"
        axes.axvline(kill.at_s, ymax=0.83, color=theme.vllm, lw=1.4, ls="--")
        axes.text(
            kill.at_s,
            top * 0.86,
            f"{kill.what} killed: {seconds} s without tokens",
            va="bottom",
            ha="left" if kill.at_s < edges[-1] / 2 else "center",
            fontsize=9,
        )
    axes.set_title(f"{timeline.requests} requests on {where}", loc="left")
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(0, top)
    axes.set_yticks([tick for tick in axes.get_yticks() if tick <= max(rates)])
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("tokens per second")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def plots_of(data: PlotData) -> dict[str, tuple[object, Callable[[Theme], Figure]]]:
    """Return each plot's data and how it is drawn, by name."""
    plots: dict[str, tuple[object, Callable[[Theme], Figure]]] = {
        "throughput": (data.throughput, partial(draw_throughput, data.throughput)),
        "workloads": (data.workloads, partial(draw_workloads, data.workloads)),
        "latency": (data.latency, partial(draw_latency, data.latency)),
        "recovery": (data.recovery, partial(draw_recovery, data.recovery)),
    }
    if data.kills:
        plots["kills"] = (data.kills, partial(draw_kills, data.kills))
    return plots


def drawn(data: PlotData) -> Iterator[tuple[str, str]]:
    """Yield each file's name and content: plots by name, each light and dark."""
    for name, (shown, draw) in plots_of(data).items():
        for theme in THEMES:
            text = StringIO()
            with mpl.rc_context(style_of(theme)):
                metadata = {"Date": None, "Creator": None, "Description": stamp_of(shown)}
                draw(theme).savefig(text, format="svg", metadata=metadata)
            yield f"{name}-{theme.name}.svg", _in_any_sans(text.getvalue())


def _in_any_sans(svg: str) -> str:
    """Return the file with fonts that readers have, numbers to a hundredth of a point, and without
    trailing spaces."""
    svg = re.sub(r"(\d\.\d\d)\d+", r"\1", svg)
    svg = svg.replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans', sans-serif")
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def main() -> None:
    """Write all files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=IMAGES)
    options = parser.parse_args()
    for name, text in drawn(read_plot_data()):
        (options.out / name).write_text(text)


if __name__ == "__main__":
    main()

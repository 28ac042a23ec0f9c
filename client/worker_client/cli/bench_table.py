"""The table of a bench object, for people. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from worker_client.cli.report import PERCENTILES, JsonObject
from worker_client.cli.terminal_lines import Line

LATENCIES: Final = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_ms": "inter-token latency",
}
SHOWN_USES: Final = ("weights", "kv_cache")
_LABEL: Final = 24
_MIB: Final = 1 << 20


def bench_table(figures: JsonObject) -> list[Line]:
    """Return the lines of what bench_object returns, of 79 columns at most, apart from names."""
    return [*_run(figures), *_times(figures), *_parts(figures)]


def shown_steps(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the times of the kinds of steps that compute something."""
    return {kind: own for kind, own in figures["step_ms"].items() if kind != "empty"}


def _run(figures: Mapping[str, Any]) -> Iterator[Line]:
    rate = figures["request_rate"]
    arrivals = "all at once" if rate is None else f"{rate:g} a second"
    failed = f" ({figures['failed']} failed)" if figures["failed"] else ""
    yield _line("model", f"{figures['model']} on {figures['device']}")
    yield _line("requests", f"{figures['requests']:,}{failed}, {arrivals}")
    yield _line("tokens", f"{figures['tokens_in']:,} in, {figures['tokens_out']:,} out")
    rates = f"{figures['seconds']:.2f} s, {figures['req_s']:.2f} requests a second"
    yield _line("duration", rates)
    yield Line(
        f"{'tokens per second':<{_LABEL}}{figures['out_tok_s']:,.1f} out, "
        f"{figures['total_tok_s']:,.1f} with prompts",
        "bold green",
    )


def _times(figures: Mapping[str, Any]) -> Iterator[Line]:
    names = ("mean", *(f"p{percent}" for percent in PERCENTILES))
    heading = "".join(f"{name:>10}" for name in names)
    yield Line("")
    yield Line(f"{'milliseconds':<{_LABEL}}{'count':>9}{heading}", "bold")
    rows = {label: figures[name] for name, label in LATENCIES.items()}
    rows |= {f"{kind} step": own for kind, own in shown_steps(figures).items()}
    for label, own in rows.items():
        cells = "".join(f"{_figure(own[name]):>10}" for name in names)
        yield Line(f"{label:<{_LABEL}}{own.get('count', ''):>9}{cells}")


def _parts(figures: Mapping[str, Any]) -> Iterator[Line]:
    yield Line("")
    drafts = figures.get("drafts")
    if drafts:
        yield _line("drafts", f"{drafts['acceptance']:.1%} of {drafts['drafted']:,} accepted")
    startup = figures["startup_s"]
    longest = max((name for name in startup if name != "total"), key=lambda name: startup[name])
    shown = f"{startup['total']:.2f}, of which {longest} {startup[longest]:.2f}"
    yield _line("start-up, s", shown)
    memory = figures["gpu_memory_bytes"]
    uses = [f"{use} {memory[use] // _MIB:,} MiB" for use in SHOWN_USES if use in memory]
    yield _line("memory of all daemons", ", ".join(uses))


def _line(label: str, value: str) -> Line:
    return Line(f"{label:<{_LABEL}}{value}")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"

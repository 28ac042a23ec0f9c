"""`worker-client bench-compare`: what changed between two JSON files of bench."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from worker_client.cli.bench_table import LATENCIES, shown_steps
from worker_client.cli.output_file import print_text
from worker_client.cli.report import JsonObject
from worker_client.cli.terminal import print_lines
from worker_client.cli.terminal_lines import Line
from worker_client.errors import config_error
from worker_host.plain_text import printable

RATES: Final = {
    "out_tok_s": "tokens per second, out",
    "total_tok_s": "tokens per second, all",
    "req_s": "requests per second",
}
CONDITIONS: Final = (
    *("model", "device", "request_rate", "requests", "failed", "tokens_in", "tokens_out"),
    *("providers", "versions"),
)
"""Fields that are the same in runs that can be compared."""
NOTABLE_PERCENT: Final = 1.0
"""Changes below this are shown, but not called better or worse."""
_LABEL: Final = 36
_MAX_SHOWN: Final = 32


class Figure(NamedTuple):
    """A figure of two runs."""

    label: str
    before: float
    after: float
    is_rate: bool
    """More is better; for a time, less is."""

    @property
    def percent(self) -> float | None:
        """Change from before to after; None if the figure was 0."""
        return 100 * (self.after / self.before - 1) if self.before else None

    @property
    def verdict(self) -> str:
        """Return better, worse, or nothing."""
        if self.percent is None or abs(self.percent) < NOTABLE_PERCENT:
            return ""
        return "better" if (self.percent > 0) == self.is_rate else "worse"


def bench_compare(
    before: Annotated[Path, typer.Argument(help="JSON of `bench`.")],
    after: Annotated[Path, typer.Argument(help="JSON of another run.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object, not a table on a terminal.")
    ] = False,
) -> None:
    """Compare two runs of bench: rates, latencies and step times, and what else differs, such as
    the number of requests. A single run of each says nothing of the noise: repeat them."""
    runs = [_read(path) for path in (before, after)]
    figures, differences = list(compared(*runs)), different_conditions(*runs)
    if as_json or not sys.stdout.isatty():
        print_text(json.dumps(_object(figures, differences), indent=None if as_json else 2) + "\n")
    else:
        names = [printable(str(path)) for path in (before, after)]
        print_lines([*_table(names, figures), *_warnings(differences)])


def compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Figure]:
    """Yield the figures that both runs have."""
    for name, label in RATES.items():
        yield from _figures(label, before.get(name), after.get(name), is_rate=True)
    for name, label in LATENCIES.items():
        yield from _spread(f"{label}, ms", before.get(name), after.get(name))
    steps = [shown_steps(run) for run in (before, after)]
    for kind in steps[0]:
        yield from _spread(f"{kind} step, ms", *(run.get(kind) for run in steps))


def _spread(label: str, before: Any, after: Any) -> Iterator[Figure]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in ("mean", "p50", "p90", "p99"):
            yield from _figures(f"{label} {name}", before.get(name), after.get(name))


def _figures(label: str, before: Any, after: Any, *, is_rate: bool = False) -> Iterator[Figure]:
    if _is_number(before) and _is_number(after):
        yield Figure(label, float(before), float(after), is_rate)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def different_conditions(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return the values of CONDITIONS that differ, by field."""
    both = {name: (before.get(name), after.get(name)) for name in CONDITIONS}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def _read(path: Path) -> Mapping[str, Any]:
    fix = "name the output of `worker-client bench --json`"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise config_error("file", str(path), f"it cannot be read: {error}", fix) from None
    if not isinstance(found, dict) or not isinstance(found.get("step_ms"), dict):
        raise config_error("file", str(path), "it is not the output of bench", fix)
    return found


def _object(figures: Sequence[Figure], differences: Mapping[str, tuple[Any, Any]]) -> JsonObject:
    return {
        "figures": [
            {
                "name": figure.label,
                "before": figure.before,
                "after": figure.after,
                "change_percent": figure.percent,
                "verdict": figure.verdict,
            }
            for figure in figures
        ],
        "differences": {name: list(pair) for name, pair in differences.items()},
    }


def _table(names: Sequence[str], figures: Sequence[Figure]) -> Iterator[Line]:
    yield Line(f"before: {names[0]}")
    yield Line(f"after:  {names[1]}")
    yield Line(f"{'':<{_LABEL}}{'before':>12}{'after':>12}{'change':>10}", "bold")
    styles = {"better": "green", "worse": "red", "": ""}
    for figure in figures:
        percent = "-" if figure.percent is None else f"{figure.percent:+.1f} %"
        cells = f"{figure.before:>12,.2f}{figure.after:>12,.2f}{percent:>10}"
        text = f"{figure.label:<{_LABEL}}{cells}  {figure.verdict}".rstrip()
        yield Line(text, styles[figure.verdict])


def _warnings(differences: Mapping[str, tuple[Any, Any]]) -> Iterator[Line]:
    for name, pair in differences.items():
        one, other = (printable(json.dumps(value)) for value in pair)
        if len(one) + len(other) > 2 * _MAX_SHOWN:
            one, other = f"{one[:_MAX_SHOWN]}...", f"{other[:_MAX_SHOWN]}..."
        yield Line(f"the runs differ in {name}: {one}, then {other}", "yellow")

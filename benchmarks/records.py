"""Keeps the figures of docs/performance.md: one record per figure in docs/performance.json, from
which the page's tables are rendered.

`make bench` adds what it measures on a GPU. `python -m benchmarks.records [BENCH.json ...]` adds
figures of runs on other machines (the files that `make bench` writes), and renders the tables.
"""

import argparse
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
RECORDS = DOCS / "performance.json"
PAGE = DOCS / "performance.md"
BEGIN = "<!-- rendered from performance.json by python -m benchmarks.records -->"
END = "<!-- end of the rendered tables -->"
RUNS = ("command", "device", "run: date, commit")
UNKNOWN = "unknown"
RECORDED_PARTS = ("e2e ", "latency ", "sleep ", "startup ")
"""Beginnings of the parts of `make bench` whose figures are kept."""


@dataclass(frozen=True)
class Record:
    """One figure, and the information needed to measure it again."""

    part: str
    """Part of `make bench`: section, model, pp x tp."""
    name: str
    value: float
    unit: str
    target: float | None
    met: bool | None
    date: str
    device: str
    commit: str
    command: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Key of a figure; a newer figure replaces an older one with the same key."""
        return self.part, self.name, self.device

    @property
    def run(self) -> "BenchRun":
        """The run that measured it."""
        return BenchRun(self.date, self.device, self.commit, self.command)


@dataclass(frozen=True)
class BenchRun:
    """Date, device, commit and command of a run of `make bench`."""

    date: str
    device: str
    commit: str
    command: str


def current_run(device: str, words: Sequence[str], commit: str = "") -> BenchRun:
    """Describe this run, by its command line and, by default, the checked-out commit."""
    command = " ".join(["python -m benchmarks", *words])
    today = datetime.now(UTC).date().isoformat()
    return BenchRun(today, device, commit or current_commit(), command)


def current_commit() -> str:
    """Return the short hash of HEAD, with a + where files differ from it; UNKNOWN outside a git
    checkout."""
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return commit + ("+" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=DOCS.parent, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def records_of(rows: Iterable[Mapping[str, Any]], run: BenchRun) -> list[Record]:
    """Select the rows of a run to keep: whole workloads, and figures with a target."""
    records = []
    for row in rows:
        is_kept = row["part"].startswith(("e2e ", "latency ")) or row["target"] is not None
        if is_kept and row["part"].startswith(RECORDED_PARTS):
            fields = {name: row[name] for name in ("part", "name", "value", "unit")}
            judged = {name: row[name] for name in ("target", "met")}
            records.append(Record(**fields, **judged, **asdict(run)))
    return records


def read_records(path: Path = RECORDS) -> list[Record]:
    """Read the kept figures."""
    return [Record(**record) for record in json.loads(path.read_text())]


def merged(old: Iterable[Record], new: Iterable[Record]) -> list[Record]:
    """Replace figures of the same key, add the others, and sort by part."""
    by_key = {record.key: record for record in old}
    by_key |= {record.key: record for record in new}
    return sorted(by_key.values(), key=lambda record: record.part)


def rendered(records: Sequence[Record]) -> str:
    """Return the page's tables: one of figures for each kind of measurement, then one of the
    commands, each with its runs. A figure has its target in parentheses, and the number of its run
    in brackets."""
    runs = {run: str(number) for number, run in enumerate(_runs_of(records), 1)}
    kinds: dict[str, list[Record]] = {}
    for record in records:
        kinds.setdefault(record.part.split(" ")[0], []).append(record)
    figures = [_figures(kind, members, runs) for kind, members in kinds.items()]
    made: dict[tuple[str, str], list[str]] = {}
    for run, number in runs.items():
        made.setdefault((f"`{run.command}`", run.device), []).append(
            f"{number}: {run.date}, {run.commit}"
        )
    rows = [(*command, "; ".join(each)) for command, each in made.items()]
    return "\n".join([*figures, _table(RUNS, rows)])


def _runs_of(records: Iterable[Record]) -> list[BenchRun]:
    """Return each run once, in the order of its first figure."""
    return list(dict.fromkeys(record.run for record in records))


def _figures(kind: str, records: Iterable[Record], runs: Mapping[BenchRun, str]) -> str:
    """Return the table of one kind: a row for each workload and device, a column for each name."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    columns: dict[str, None] = {}
    for record in records:
        row, column = _place(record)
        cells = rows.setdefault((row, record.device), {})
        cells[column] = f"{_cell(record)} [{runs[record.run]}]"
        columns[column] = None
    filled = [
        (row, *(cells.get(column, "") for column in columns)) for (row, _), cells in rows.items()
    ]
    return _table((kind, *columns), filled)


def _place(record: Record) -> tuple[str, str]:
    """Return a figure's row and column. The name of a figure may begin with a part of its row."""
    case, _, name = record.name.rpartition(": ")
    workload = record.part.partition(" ")[2]
    return ", ".join(filter(None, (workload, case))), f"{name}, {record.unit}"


def _cell(record: Record) -> str:
    """Return a figure with its target."""
    value = _number(record.value)
    if record.target is None:
        return value
    return f"{value} ({'met' if record.met else 'missed'} {_number(record.target)})"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _number(value: float) -> str:
    """Format a number: whole from a thousand on, otherwise four significant digits."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def with_tables(page: str, tables: str) -> str:
    """Return the page with the tables between its two marks replaced."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{tables}\n{END}{after}"


def write(records: Sequence[Record], docs: Path = DOCS) -> None:
    """Write the figures, and the page's tables with them."""
    lines = ",\n".join(json.dumps(asdict(record), ensure_ascii=False) for record in records)
    (docs / RECORDS.name).write_text(f"[\n{lines}\n]\n")
    page = docs / PAGE.name
    page.write_text(with_tables(page.read_text(), rendered(records)))


def keep(content: Mapping[str, Any], docs: Path = DOCS) -> int:
    """Add the figures of a file that `make bench` has written; return their number. Figures without
    a commit are not added, since they could not be measured again."""
    if content["run"]["commit"] == UNKNOWN:
        return 0
    new = records_of(content["rows"], BenchRun(**content["run"]))
    write(merged(read_records(docs / RECORDS.name), new), docs)
    return len(new)


def main() -> None:
    """Add the figures of the given files, and render the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="*", metavar="BENCH.json")
    options = parser.parse_args()
    write(read_records())
    for path in options.files:
        print(f"{keep(json.loads(path.read_text()))} figures of {path}")


if __name__ == "__main__":
    main()

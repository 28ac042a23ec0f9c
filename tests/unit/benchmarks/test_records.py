"""docs/performance.md shows what docs/performance.json records, and `make bench` updates both."""

import json
import re
import shutil
from dataclasses import asdict, replace
from datetime import date

import pytest

import benchmarks.__main__ as bench
from benchmarks import records, targets
from benchmarks.records import BenchRun

RUN = BenchRun("2026-12-01", "NVIDIA H200", "abc1234", "python -m benchmarks --only e2e")


@pytest.fixture
def docs(tmp_path):
    """A copy of the page and its records."""
    for path in (records.RECORDS, records.PAGE):
        shutil.copy(path, tmp_path)
    return tmp_path


def row(part, name, value, unit="tok/s out", target=None, met=None):
    return {
        "part": part,
        "name": name,
        "value": value,
        "unit": unit,
        "target": target,
        "met": met,
        "floor": None,
        "fraction": None,
    }


def test_the_page_shows_the_records():
    page = records.PAGE.read_text()
    tables = records.rendered(records.read_records())
    message = "run: python -m benchmarks.records"
    assert records.with_tables(page, tables) == page, message


def test_the_page_has_each_figure_with_its_run_and_each_command_once():
    kept = records.read_records()
    tables = [table.splitlines() for table in records.rendered(kept).split("\n\n")]
    *figures, made = [[cells(line) for line in table if "---" not in line] for table in tables]
    runs = {
        number: BenchRun(day, device, commit, command.strip("`"))
        for command, device, listed in made[1:]
        for number, day, commit in re.findall(r"(\d+): (\S+), (\w+\+?)", listed)
    }
    assert len(set(runs.values())) == len(runs) < len(kept) / 2
    assert len({tuple(line[:2]) for line in made}) == len(made)
    shown = {
        (f"{kind} {row}", column): re.fullmatch(r"(\S+)(?: \((\w+) (\S+)\))? \[(\d+)\]", cell)
        for (kind, *columns), *rows in figures
        for row, *values in rows
        for column, cell in zip(columns, values, strict=True)
        if cell
    }
    assert len(shown) == len(kept)
    for record in kept:
        case, _, name = record.name.rpartition(": ")
        place = record.part + (f", {case}" if case else "")
        value, outcome, target, run = shown[place, f"{name}, {record.unit}"].groups()
        assert float(value.replace(",", "")) == pytest.approx(record.value, rel=1e-3, abs=0.5)
        assert outcome == {True: "met", False: "missed", None: None}[record.met]
        assert (target is None) == (record.target is None) and runs[run] == record.run


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_every_record_has_date_device_commit_command_and_its_target():
    kept = records.read_records()
    assert len({record.key for record in kept}) == len(kept)
    for record in kept:
        assert date.fromisoformat(record.date) and record.device
        assert re.fullmatch(r"[0-9a-f]{7,}\+?", record.commit), record
        assert record.command.startswith("python -m benchmarks"), record
        section, *rest = record.part.split(",")[0].split()
        wanted = {
            "e2e": targets.WORKLOADS.get((rest[0], " ".join(rest[1:]), record.name)),
            "startup": targets.STARTUP.get(tuple(rest)),
            "sleep": targets.SLEEP.get((*rest, record.name)),
            "latency": None,
        }[section]
        bound = None if wanted is None else wanted.value
        assert record.target == bound, record
        assert record.met == (None if wanted is None else wanted.met_by(record.value)), record


def test_a_run_replaces_its_own_figures_and_leaves_the_others(docs):
    old = records.read_records()
    first = next(record for record in old if record.part == "e2e llama-8b 1x1")
    rows = [
        row(first.part, first.name, 123456.0, target=first.target, met=True),
        row("e2e new-model 1x1", "decode_bs1", 7.25),
        row("startup llama-8b 1x1 cold", "load_model", 1.0, "s"),  # a phase has no target
        row("kernels", "decode 1x160", 10.8, "us"),
    ]
    assert records.keep({"run": asdict(RUN), "rows": rows}, docs) == 2
    new = records.read_records(docs / records.RECORDS.name)
    updated = replace(first, value=123456.0, met=True, **asdict(RUN))
    assert [record for record in new if record.key == first.key] == [updated]
    assert {r.key for r in new} - {r.key for r in old} == {
        ("e2e new-model 1x1", "decode_bs1", RUN.device)
    }
    assert [r for r in new if r in old] == [r for r in old if r != first]
    page = (docs / records.PAGE.name).read_text()
    assert "| 123,456 (met 262) [" in page and "| new-model 1x1 | 7.25 [" in page
    assert re.search(
        rf"\| `{RUN.command}` \| {RUN.device} \| \d+: {RUN.date}, {RUN.commit} \|", page
    )
    assert page.count(records.BEGIN) == page.count(records.END) == 1


def test_what_make_bench_writes_can_be_kept(docs, tmp_path, capsys):
    parts = bench.Parts(tmp_path)
    figure = {"workload": "decode_bs1", "value": 401.5, "unit": "tok/s out"}
    parts.rows = bench.e2e_rows(None, [{"model": "llama-8b", "shape": "1x2"} | figure])
    bench.report(parts, tmp_path / "bench.json", RUN)
    content = json.loads((tmp_path / "bench.json").read_text())
    assert records.keep(content, docs) == 1
    page = (docs / records.PAGE.name).read_text()
    assert "401.5 (met 400) [" in page
    assert re.search(rf"\| {RUN.device} \| \d+: {RUN.date}, ", page)


def test_a_run_outside_a_checkout_has_no_commit_but_a_given_one(monkeypatch, tmp_path):
    monkeypatch.setattr(records, "DOCS", tmp_path / "docs")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    run = records.current_run("cpu", ["--only", "wire"])
    assert (run.commit, run.command) == ("unknown", "python -m benchmarks --only wire")
    assert records.current_run("cpu", [], "abc1234").commit == "abc1234"


def test_figures_without_a_commit_are_not_kept(docs):
    run = asdict(replace(RUN, commit=records.UNKNOWN))
    rows = [row("e2e new-model 1x1", "decode_bs1", 7.25)]
    assert records.keep({"run": run, "rows": rows}, docs) == 0
    assert records.read_records(docs / records.RECORDS.name) == records.read_records()

"""`make bench`: every benchmark that this machine can run, one table at the end, and the figures in
build/bench.json. Runs each in a separate process; measures nothing itself. Figures of whole
workloads, start-up and sleep also go into docs/performance.json and the tables of
docs/performance.md (benchmarks/records.py), unless --quick or --no-records says otherwise.

Sections: `wire` (codec, transport and control plane, on any machine), and with a CUDA device
`ceilings`, `kernels`, `loading`, `weights` (weight updates of a running daemon), `startup`,
`sleep`, `step` (a step's time by kernel and by phase), `latency` (TTFT and ITL of requests that
arrive at random) and `e2e` (every workload on every model, on one device and, with two, as two
pipeline stages and as two tensor ranks). `--only` chooses sections. A row's floor comes from the
ceilings measured in the same run, or from the last run that measured them; the fraction is the
share of that floor's speed that was reached.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import records, targets, workloads
from benchmarks.floors import Ceilings, ModelShape, workload_floor_s
from benchmarks.targets import Target

MODELS = Path(__file__).parent / "models"
BUILD = Path("build")
CEILINGS = BUILD / "ceilings.json"
LARGE_MODEL = "llama-8b"
"""Model of the sections that use only one."""


@dataclass(frozen=True)
class Row:
    """One line of the table; None for values that do not apply."""

    part: str
    name: str
    value: float
    unit: str
    target: float | None = None
    met: bool | None = None
    floor: float | None = None
    fraction: float | None = None
    """Fraction of the floor's speed: 1 is as fast as the device allows."""


class Parts:
    """The results of a run: its rows, and the parts that failed or were skipped."""

    def __init__(self, scratch: Path) -> None:
        self.rows: list[Row] = []
        self.failed: list[str] = []
        self.left_out: list[str] = []
        self._scratch = scratch / "figures.json"

    def run(self, part: str, arguments: Sequence[str], read: Callable[[Any], list[Row]]) -> Any:
        """Run `python -m ARGUMENTS` and return the figures that it writes to the file given as
        `{}`. A run that fails gives no rows and returns None."""
        print(f"\n# {part}", flush=True)
        self._scratch.unlink(missing_ok=True)
        command = [str(self._scratch) if word == "{}" else word for word in arguments]
        exit_code = run_in_group([sys.executable, "-m", *command])
        if exit_code:
            self.failed.append(f"{part}: exit code {exit_code}")
            return None
        figures = json.loads(self._scratch.read_text())
        self.rows += read(figures)
        return figures


def run_in_group(command: Sequence[str]) -> int:
    """Run a command and return its exit code. An interruption ends it and all processes that it
    started."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        raise


def control_plane_rows(figures: list[dict[str, Any]]) -> list[Row]:
    """Return the control plane's figures unchanged."""
    return [Row("control plane", **figure) for figure in figures]


def figure_rows(part: str, figures: list[dict[str, Any]]) -> list[Row]:
    """Return rows for figures of (name, value, unit) and an optional floor."""
    rows = []
    for figure in figures:
        floor, unit = figure.get("floor"), figure["unit"]
        rows.append(with_floor(Row(part, figure["name"], figure["value"], unit), floor))
    return rows


def sleep_rows(model: str, figures: list[dict[str, Any]]) -> list[Row]:
    """Return each figure with its floor and target."""
    rows = figure_rows(f"sleep {model}", figures)
    return [with_target(row, targets.SLEEP.get((model, row.name))) for row in rows]


def with_floor(row: Row, floor: float | None) -> Row:
    """Add a floor and the fraction reached: times should be short, rates high."""
    if floor is None or not row.value:
        return row
    is_time = row.unit in ("s", "ms", "us")
    fraction = floor / row.value if is_time else row.value / floor
    return Row(**(asdict(row) | {"floor": floor, "fraction": fraction}))


def with_target(row: Row, target: Target | None) -> Row:
    """Add a target and its verdict."""
    if target is None:
        return row
    return Row(**(asdict(row) | {"target": target.value, "met": target.met_by(row.value)}))


def kernel_rows(timings: list[dict[str, Any]]) -> list[Row]:
    """Return one row per case: its first timing, the launcher's choice."""
    first: dict[str, dict[str, Any]] = {}
    for timing in timings:
        first.setdefault(timing["case"], timing)
    return [
        Row("kernels", case, timing["ms"] * 1e3, "us")
        for case, timing in first.items()
        if timing["ms"] is not None
    ]


def weight_rows(figures: list[dict[str, Any]]) -> list[Row]:
    """Return rates with the link's rate, of which an update should reach its target share."""
    rows = []
    for row in figure_rows("weights", figures):
        bound = None if row.floor is None else targets.WEIGHT_UPDATE_SHARE * row.floor
        rows.append(with_target(row, None if bound is None else Target(bound)))
    return rows


def startup_rows(starts: list[dict[str, Any]]) -> list[Row]:
    """Return each phase, and the total with its target."""
    rows = []
    for start in starts:
        part = f"startup {start['model']} {start['shape']} {start['kind']}"
        rows += [Row(part, phase, seconds, "s") for phase, seconds in start["startup_s"].items()]
        target = targets.STARTUP.get((start["model"], start["shape"], start["kind"]))
        rows[-1] = with_target(rows[-1], target)
        rows.append(Row(part, "kernel files compiled", start["compiled_files"], ""))
    return rows


def step_rows(content: dict[str, Any]) -> list[Row]:
    """Return time by kind of kernel, and the host's time by phase."""
    rows = []
    for case in content["cases"]:
        part = f"step {content['model']} {case['name']}"
        rows.append(Row(part, "wall", case["wall_us"], "us"))
        groups = (case["table"] or {"groups": {}})["groups"]
        rows += [Row(part, group, value, "us") for group, value in groups.items()]
    for phase in content["phases"]:
        for name in ("p50", "p99"):
            rows.append(Row("step thread", f"{phase['name']}, {name}", phase[name], "us"))
    return rows


def e2e_rows(ceilings: Ceilings | None, runs: list[dict[str, Any]]) -> list[Row]:
    """Return one row per workload, with floor and target; latencies are only in the file."""
    rows = []
    for run in runs:
        model, shape, name = run["model"], run["shape"], run["workload"]
        row = Row(f"e2e {model} {shape}", name, run["value"], run["unit"])
        if ceilings is not None and " " not in shape:  # floors are those of bf16
            row = with_floor(row, workload_floor(ceilings, model, shape, name, row.unit))
        rows.append(with_target(row, targets.WORKLOADS.get((model, shape, name))))
    return rows


def workload_floor(ceilings: Ceilings, model: str, shape: str, name: str, unit: str) -> float:
    """Return the fewest seconds or the most tokens per second, in the unit of the workload's
    figure."""
    sizes = ModelShape.read(MODELS / model)
    requests = [(len(p), out) for p, out in workloads.make(name, sizes.vocab_size)]
    pp, tp = map(int, shape.split("x"))
    seconds = workload_floor_s(sizes, ceilings, requests, pp, tp)
    tokens = {"s": 1, "tok/s in": sum(i for i, _ in requests)}
    if unit == "s":
        return seconds
    return tokens.get(unit, sum(out for _, out in requests)) / seconds


def read_ceilings() -> Ceilings | None:
    """Return the ceilings of the last run that measured them, if it was on a device of this
    name."""
    if not CEILINGS.is_file():
        return None
    kept = json.loads(CEILINGS.read_text())
    if kept["device"] != torch.cuda.get_device_name():
        return None
    return Ceilings(**kept["ceilings"])


def keep_ceilings(figures: list[dict[str, Any]]) -> None:
    """Write the ceilings for this run's floors and for later runs."""
    from benchmarks.ceilings import Figure, ceilings_of  # Triton, which a CPU may lack

    ceilings = ceilings_of([Figure(**figure) for figure in figures])
    content = {"device": torch.cuda.get_device_name(), "ceilings": asdict(ceilings)}
    CEILINGS.parent.mkdir(exist_ok=True)
    CEILINGS.write_text(json.dumps(content) + "\n")


def run_wire(parts: Parts, options: argparse.Namespace) -> None:
    """Measure codec, transport and control plane."""
    command = ["benchmarks.control_plane", *quick(options), "--json", "{}"]
    parts.run("control plane", command, control_plane_rows)


def run_ceilings(parts: Parts, options: argparse.Namespace) -> None:
    """Measure the device's limits, which floors need."""
    command = ["benchmarks.ceilings", "--out", "{}"]
    figures = parts.run("ceilings", command, partial(figure_rows, "ceilings"))
    if figures is not None:
        keep_ceilings(figures)


def run_kernels(parts: Parts, options: argparse.Namespace) -> None:
    """Measure our kernels one by one."""
    parts.run("kernels", ["benchmarks.kernels", "--out", "{}"], kernel_rows)


def run_loading(parts: Parts, options: argparse.Namespace) -> None:
    """Measure loading a large checkpoint from disk to the device."""
    command = ["benchmarks.loading", "--model", str(MODELS / LARGE_MODEL), "--out", "{}"]
    parts.run("loading", command, partial(figure_rows, "loading"))


def run_sleep(parts: Parts, options: argparse.Namespace) -> None:
    """Measure sleep and wake-up at both levels."""
    command = ["benchmarks.sleep", "--model", str(MODELS / LARGE_MODEL), "--out", "{}"]
    parts.run("sleep", command, partial(sleep_rows, LARGE_MODEL))


def run_weights(parts: Parts, options: argparse.Namespace) -> None:
    """Measure weight updates of a running daemon: from its GPU, from another one, from disk."""
    command = ["benchmarks.weight_update", "--model", str(MODELS / LARGE_MODEL), "--out", "{}"]
    parts.run("weights", command, weight_rows)


def run_startups(parts: Parts, options: argparse.Namespace) -> None:
    """Measure process start to first token."""
    for pp, tp in shapes(options):
        command = ["benchmarks.startup", "--model", str(MODELS / LARGE_MODEL), "--out", "{}"]
        command += ["--pp", str(pp), "--tp", str(tp)]
        parts.run(f"startup {pp}x{tp}", command, startup_rows)


def run_steps(parts: Parts, options: argparse.Namespace) -> None:
    """Measure a step's time for every chosen model; traces stay in build/."""
    for model in options.models:
        out = BUILD / "step_trace" / model
        command = ["benchmarks.step_trace", "--model", str(MODELS / model), "--out", str(out)]
        parts.run(f"step {model}", [*command, "--json", "{}"], step_rows)


def run_latency(parts: Parts, options: argparse.Namespace) -> None:
    """Measure latency under load, with and without a target for it."""
    for pp, tp in shapes(options):
        for model in options.models:
            command = ["benchmarks.poisson", "--model", str(MODELS / model), "--out", "{}"]
            command += ["--pp", str(pp), "--tp", str(tp)]
            part = f"latency {model} {pp}x{tp}"
            parts.run(part, command, partial(figure_rows, part))


def run_workloads(parts: Parts, options: argparse.Namespace) -> None:
    """Run the chosen workloads on every chosen model and shape: one group of daemons each."""
    ceilings = read_ceilings()
    for pp, tp in shapes(options):
        for model in options.models:
            command = ["benchmarks.e2e", "--model", str(MODELS / model), "--out", "{}"]
            command += ["--pp", str(pp), "--tp", str(tp)]
            command += ["--workloads", ",".join(options.workloads), *quick(options)]
            parts.run(f"e2e {model} {pp}x{tp}", command, partial(e2e_rows, ceilings))
    if "llama-8b" in options.models:
        command = ["benchmarks.e2e", "--model", str(MODELS / "llama-8b"), "--out", "{}"]
        command += ["--workloads", ",".join([*options.workloads, *workloads.NAMED])]
        command += [*quick(options), "--options", targets.FP8]
        parts.run(f"e2e llama-8b 1x1 {targets.FP8}", command, partial(e2e_rows, ceilings))


Section = Callable[[Parts, argparse.Namespace], None]

DEVICE_SECTIONS: dict[str, Section] = {
    "ceilings": run_ceilings,
    "kernels": run_kernels,
    "loading": run_loading,
    "weights": run_weights,
    "startup": run_startups,
    "sleep": run_sleep,
    "step": run_steps,
    "latency": run_latency,
    "e2e": run_workloads,
}
SECTIONS = ("wire", *DEVICE_SECTIONS)


def run_sections(parts: Parts, options: argparse.Namespace) -> None:
    """Run the chosen sections that can run on this machine."""
    if "wire" in options.only:
        run_wire(parts, options)
    chosen = [section for section in DEVICE_SECTIONS if section in options.only]
    if not torch.cuda.is_available():
        if chosen:
            parts.left_out.append(f"no CUDA device here: left out {', '.join(chosen)}")
        return
    for section in chosen:
        DEVICE_SECTIONS[section](parts, options)


def device_name() -> str:
    """Return the GPU's name, or `cpu`."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def quick(options: argparse.Namespace) -> list[str]:
    """Return the --quick option for the benchmarks, if set."""
    return ["--quick"] if options.quick else []


def shapes(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Return (pp, tp) of the groups to run: as requested, or all that this machine has devices
    for."""
    if options.pp * options.tp > 1:
        return [(options.pp, options.tp)]
    return [(1, 1), *([(2, 1), (1, 2)] if torch.cuda.device_count() > 1 else [])]


def report(parts: Parts, out: Path, run: records.BenchRun) -> dict[str, Any]:
    """Print the table, write the file and return its content."""
    print(f"\n{'part':<30} {'figure':<52} {'value':>12} {'unit':<10} {'floor':>10} of floor")
    for row in parts.rows:
        floor = " " * 10 if row.floor is None else f"{row.floor:>10.4g}"
        fraction = " " * 8 if row.fraction is None else f"{100 * row.fraction:>6.0f} %"
        target = "" if row.target is None else f"target {row.target:g} "
        target += {None: "", True: "met", False: "NOT MET"}[row.met]
        print(
            f"{row.part:<30} {row.name:<52} {row.value:>12.3f} {row.unit:<10} {floor} {fraction} "
            f"{target}"
        )
    for line in (*parts.failed, *parts.left_out):
        print(line)
    out.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "run": asdict(run),
        "rows": [asdict(row) for row in parts.rows],
        "failed": parts.failed,
        "left_out": parts.left_out,
    }
    out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written to {out}")
    return content


def listed(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of A,B,... that accepts only allowed words."""

    def parse(text: str) -> list[str]:
        words = text.split(",")
        for word in words:
            if word not in allowed:
                raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(allowed)}")
        return words

    return parse


def parse_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    models = sorted(path.parent.name for path in MODELS.glob("*/config.json"))
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", type=listed(SECTIONS), default=list(SECTIONS), help=f"of {','.join(SECTIONS)}"
    )
    parser.add_argument("--models", type=listed(models), default=models)
    every = (*workloads.NAMES, *workloads.NAMED)
    parser.add_argument("--workloads", type=listed(every), default=list(workloads.NAMES))
    parser.add_argument("--pp", type=int, default=1, help="only this number of pipeline stages")
    parser.add_argument("--tp", type=int, default=1, help="only this many tensor ranks")
    parser.add_argument("--quick", action="store_true", help="fewer rounds; figures are rough")
    parser.add_argument("--out", type=Path, default=BUILD / "bench.json")
    parser.add_argument("--commit", default="", help="commit that runs, outside a git checkout")
    parser.add_argument(
        "--no-records", action="store_true", help="leave docs/performance.* unchanged"
    )
    return parser.parse_args(words)


def main() -> int:
    """Run the sections; return 1 if a benchmark failed. A missed target is shown, but is not an
    error. After an interruption the figures so far are reported."""
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as directory:
        parts = Parts(Path(directory))
        try:
            run_sections(parts, options)
        finally:
            run = records.current_run(device_name(), sys.argv[1:], options.commit)
            content = report(parts, options.out, run)
            if not (options.quick or options.no_records):
                print(f"{records.keep(content)} figures kept in docs/performance.json")
    return 1 if parts.failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks [--quick]`: every benchmark that this machine can run, one table at the
end, and the figures in build/bench.json. Runs each in a process of its own; measures nothing
itself."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.workloads import FIXED

MODELS = Path(__file__).parent / "models"
OUT = Path("build/bench.json")
WORKLOADS = (*FIXED, "mixed256")
DEVICE_OPTIONS = ("--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "16384")


@dataclass(frozen=True)
class Row:
    """One line of the table; target is None where there is none."""

    part: str
    name: str
    value: float
    unit: str
    target: float | None = None
    met: bool | None = None


class Parts:
    """What was run: the rows it gave, and what failed."""

    def __init__(self, scratch: Path) -> None:
        self.rows: list[Row] = []
        self.failed: list[str] = []
        self._scratch = scratch / "figures.json"

    def run(self, part: str, arguments: Sequence[str], read: Callable[[Any], list[Row]]) -> None:
        """Run `python -m ARGUMENTS`, whose figures come in the file that `{}` stands for, or on
        standard output. A run that fails gives no rows."""
        print(f"\n# {part}", flush=True)
        self._scratch.unlink(missing_ok=True)
        command = [str(self._scratch) if word == "{}" else word for word in arguments]
        done = subprocess.run(
            [sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode != 0:
            self.failed.append(f"{part}: exit code {done.returncode}")
            return
        text = self._scratch.read_text() if "{}" in arguments else done.stdout
        self.rows += read(json.loads(text))


def control_plane_rows(figures: list[dict[str, Any]]) -> list[Row]:
    """The control plane's figures as they are."""
    return [Row("control plane", **figure) for figure in figures]


def kernel_rows(timings: list[dict[str, Any]]) -> list[Row]:
    """One row a case: its first timing, which is the launcher's own choice of tile."""
    first: dict[str, dict[str, Any]] = {}
    for timing in timings:
        first.setdefault(timing["case"], timing)
    return [
        Row("kernels", case, timing["ms"] * 1e3, "us")
        for case, timing in first.items()
        if timing["ms"] is not None
    ]


def generation_rows(name: str, result: dict[str, Any]) -> list[Row]:
    """Throughput and latencies of one workload; only what was measured."""
    values = {
        "generated": (result["out_tok_s"], "tok/s"),
        "prompt and generated": (result["total_tok_s"], "tok/s"),
        "time to first token, p50": (result["ttft_ms"]["p50"], "ms"),
        "time per token, p50": (result["tpot_ms"]["p50"], "ms"),
        "time per token, p99": (result["tpot_ms"]["p99"], "ms"),
        "failed requests": (float(result["failed"]), ""),
    }
    return [
        Row(name, what, value, unit) for what, (value, unit) in values.items() if value is not None
    ]


def run_generation(parts: Parts, model: Path, scratch: Path) -> None:
    """Every workload through the client and a daemon that it launches."""
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    for workload in WORKLOADS:
        lines = subprocess.run(
            [
                *(sys.executable, "-m", "benchmarks.workloads", workload),
                *("--vocab-size", str(vocab_size)),
            ],
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        requests = scratch / f"{workload}.jsonl"
        requests.write_bytes(lines)
        name = f"{model.name} {workload}"
        command = ["client", "bench", "--model", str(model), "--input", str(requests), "--json"]
        parts.run(name, [*command, *DEVICE_OPTIONS], partial(generation_rows, name))


def report(parts: Parts, left_out: str) -> None:
    """Print the table and write the file."""
    print()
    for row in parts.rows:
        target = "" if row.target is None else f"target {row.target:g} "
        target += {None: "", True: "met", False: "NOT MET"}[row.met]
        print(f"{row.part:<28} {row.name:<52} {row.value:>12.2f} {row.unit:<14} {target}")
    for line in (*parts.failed, left_out):
        if line:
            print(line)
    OUT.parent.mkdir(exist_ok=True)
    content = {
        "rows": [asdict(row) for row in parts.rows],
        "failed": parts.failed,
        "left_out": left_out,
    }
    OUT.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written to {OUT}")


def main() -> int:
    """Run all; 1 if a benchmark failed. A missed target is shown, not an error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; figures are rough")
    quick = ["--quick"] if parser.parse_args().quick else []
    left_out = ""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        parts = Parts(scratch)
        command = ["benchmarks.control_plane", *quick, "--json", "{}"]
        parts.run("control plane", command, control_plane_rows)
        if torch.cuda.is_available():
            parts.run("kernels", ["benchmarks.kernels", "--out", "{}"], kernel_rows)
            for config in sorted(MODELS.glob("*/config.json")):
                run_generation(parts, config.parent, scratch)
        else:
            left_out = "no CUDA device here: kernels and generation were left out"
        report(parts, left_out)
    return 1 if parts.failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m benchmarks.compare_workloads BEFORE AFTER --model DIR [--workloads A,B] [--rounds N]
[--out FILE.json]`: compares whole workloads on one GPU, with daemons of two checkouts that share it
and take turns. Servers and clocks differ more from run to run than a change does; the ratio within
a pair does not.

A pass of each workload on each side is thrown away. Figures are those of benchmarks/e2e.py.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import workloads
from benchmarks.e2e import OPTIONS, bench, figure
from worker_client.launcher import LocalDaemons

DECODES = ("decode_bs1", "decode_bs64", "decode_bs256", "mixed256")
SHARE = ("--gpu-memory-utilization", "0.4")
"""Options of each side."""


def import_path(tree: Path) -> str:
    """Return PYTHONPATH with a checkout's packages first."""
    return os.pathsep.join([str(tree), str(tree / "client"), os.environ.get("PYTHONPATH", "")])


@contextlib.contextmanager
def daemon_of(tree: Path, device: str, model_root: Path) -> Iterator[LocalDaemons]:
    """Start a daemon of a checkout; it shares the GPU with the other checkout's."""
    paths = import_path(tree)

    def command(endpoint: str, device: str, pipe: int) -> list[str]:
        there = ["env", "-C", str(tree), f"PYTHONPATH={paths}", sys.executable]
        options = ["--endpoint", endpoint, "--device", device, "--model-root", str(model_root)]
        ends = ["--exit-with-parent-fd", str(pipe), "--share-gpu"]
        return [*there, "-m", "worker_daemon", "serve", *options, *ends]

    with LocalDaemons([device], model_root, command=command) as daemons:
        yield daemons


def main() -> None:
    """Print each pass, then medians and the ratio of each pair."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--workloads", default=",".join(DECODES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = options.model.resolve()
    trees = {"before": options.before.resolve(), "after": options.after.resolve()}
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    passes: dict[str, dict[str, list[float]]] = {}
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = {
            name: stack.enter_context(daemon_of(tree, options.device, model.parent))
            for name, tree in trees.items()
        }
        for name in options.workloads.split(","):
            requests = scratch / f"{name}.jsonl"
            with requests.open("w") as file:
                file.writelines(workloads.json_lines(workloads.make(name, vocab_size)))
            found: dict[str, list[float]] = {"before": [], "after": []}
            passes[name] = found
            for number in range(options.rounds + 1):
                for side in ("before", "after") if number % 2 else ("after", "before"):
                    value = one_pass(trees[side], model, sides[side], requests, name)
                    print(f"{model.name} {name} pass {number} {side} {value:.1f}", flush=True)
                    if number:
                        found[side].append(value)
            report(model.name, name, found)
    if options.out is not None:
        options.out.write_text(json.dumps(passes, indent=1) + "\n")


def one_pass(tree: Path, model: Path, daemons: LocalDaemons, requests: Path, name: str) -> float:
    """Run a workload with a checkout's own client; return its figure."""
    former = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = import_path(tree)
    try:
        with contextlib.chdir(tree):
            result: dict[str, Any] = bench(model, daemons.endpoints, requests, [*OPTIONS, *SHARE])
    except BaseException:
        print(daemons.log_tail(0), file=sys.stderr)
        raise
    finally:
        os.environ["PYTHONPATH"] = former
    return figure(name, result)[0]


def report(model: str, name: str, found: dict[str, list[float]]) -> None:
    """Print one workload."""
    before, after = found["before"], found["after"]
    pairs = statistics.median(b / a - 1 for a, b in zip(before, after, strict=True))
    medians = statistics.median(before), statistics.median(after)
    print(
        f"{model} {name:<14} {medians[0]:>10.1f} {medians[1]:>10.1f}  in pairs {pairs:+.2%}  "
        f"{[round(value, 1) for value in before]} {[round(value, 1) for value in after]}",
        flush=True,
    )


if __name__ == "__main__":
    main()

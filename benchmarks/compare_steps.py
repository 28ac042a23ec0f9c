"""`python -m benchmarks.compare_steps BEFORE AFTER [--requests N] [--rounds N] [--starts N]`:
compares the cost of a whole step of one daemon in two checkouts, alternating every 300 steps. On a
busy host, rounds differ more than a change does; the ratio within a pair does not. Processes that
do the same differ by several percent from start to start, so both sides start anew several times,
each of them first as often as the other; the result is the geometric mean of the starts' median
ratios, beside the lowest and the highest."""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from benchmarks.control_plane import LIMITS, DaemonGroup, Requests, median_us
from worker_client.steps.slots import SlotTable

Pairs: TypeAlias = list[list[dict[str, float]]]

COUNT = 300


def cpu_us(pid: int) -> dict[str, float]:
    """Return the CPU time of each thread of a process."""
    spent = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has ended
            spent[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e3
    return spent


def take_turns(num_requests: int) -> None:
    """For each line of standard input, run COUNT steps and write the time per step, in us."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        group = DaemonGroup(1, directory)
        group.start(num_requests, all_ranks=False)
        table, requests = SlotTable(num_requests, LIMITS), Requests(num_requests)
        group.step(table, requests.admission())
        print("ready", flush=True)
        for _ in sys.stdin:
            outputs = iter([requests.decode() for _ in range(COUNT)])
            pids = {"driver": os.getpid(), "daemon": group.pids[0]}
            before = {name: cpu_us(pid) for name, pid in pids.items()}
            thread_us = time.thread_time_ns() / 1e3
            figures = {"step": median_us(lambda: group.step(table, next(outputs)), COUNT)}  # noqa: B023  # called in this turn
            figures["driver's thread"] = (time.thread_time_ns() / 1e3 - thread_us) / COUNT
            for name, pid in pids.items():
                threads = [
                    (us - before[name].get(thread, 0.0)) / COUNT
                    for thread, us in cpu_us(pid).items()
                ]
                figures[f"CPU of the {name}"] = sum(threads)
                if name == "daemon":
                    figures["its step thread"] = max(threads)
            print(json.dumps(figures), flush=True)
        group.close()


class Side:
    """One checkout, in a separate process."""

    def __init__(self, tree: Path, num_requests: int) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--turns", str(num_requests)]
        places = [str(tree), str(tree / "client"), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        )
        assert self._read() == "ready", f"{tree} does not start"

    def turn(self) -> dict[str, float]:
        """Make it run its steps."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        figures: dict[str, float] = json.loads(self._read())
        return figures

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def run_start(trees: Sequence[Path], num_requests: int, rounds: int, *, is_swapped: bool) -> Pairs:
    """Start both sides, and return the figures of their turns, in pairs (before, after).
    is_swapped: the second one starts first, and has the first turn of each pair."""
    order = -1 if is_swapped else 1
    sides = [Side(tree.resolve(), num_requests) for tree in trees[::order]]
    pairs = [[side.turn() for side in sides][::order] for _ in range(1 + rounds)]
    for side in sides:
        side.close()
    return pairs[1:]  # the first pair runs cold


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", nargs="*", type=Path, metavar="TREE")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=8, help="pairs of turns of each start")
    parser.add_argument("--starts", type=int, default=10, help="an even number")
    parser.add_argument("--turns", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turns:
        take_turns(options.turns)
        return
    num_steps = COUNT * (1 + options.rounds)
    if options.requests * (1 + num_steps // LIMITS.block_size) >= LIMITS.num_blocks:
        parser.error(
            f"{options.requests} requests have no more blocks after {num_steps} steps: "
            "give fewer --rounds"
        )
    if options.starts < 2 or options.starts % 2:
        parser.error("give an even number of --starts: each side is the first in one half of them")
    starts = [
        run_start(options.trees, options.requests, options.rounds, is_swapped=bool(start % 2))
        for start in range(options.starts)
    ]
    for name in starts[0][0][0]:
        old, new = ([pair[side][name] for pairs in starts for pair in pairs] for side in (0, 1))
        ratios = [statistics.median(pair[1][name] / pair[0][name] for pair in p) for p in starts]
        low, mean, high = min(ratios), statistics.geometric_mean(ratios), max(ratios)
        medians = f"{statistics.median(old):8.2f} us {statistics.median(new):8.2f} us"
        shown = "  ".join(f"{100 * (ratio - 1):+5.1f} %" for ratio in (mean, low, high))
        print(f"{name:20} {medians}  mean, lowest, highest {shown}")


if __name__ == "__main__":
    main()

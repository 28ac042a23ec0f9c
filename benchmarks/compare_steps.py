"""`python -m benchmarks.compare_steps BEFORE AFTER [--requests N] [--rounds N]`: compares the cost
of a whole step of one daemon in two checkouts, alternating every 300 steps. On a busy host, rounds
differ more than a change does; the ratio within a pair does not."""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.control_plane import LIMITS, DaemonGroup, Requests, median_us
from worker_client.steps.slots import SlotTable

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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trees", nargs="*", type=Path, metavar="TREE")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)
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
    before, after = (Side(tree.resolve(), options.requests) for tree in options.trees)
    before.turn(), after.turn()  # the first pair runs cold
    pairs = [(before.turn(), after.turn()) for _ in range(options.rounds)]
    for name in pairs[0][0]:
        old, new = ([pair[side][name] for pair in pairs] for side in (0, 1))
        ratio = statistics.median(n / o for o, n in zip(old, new, strict=True))
        medians = f"{statistics.median(old):8.2f} us {statistics.median(new):8.2f} us"
        print(f"{name:20} {medians}  in pairs {100 * (ratio - 1):+.1f} %")
    before.close()
    after.close()


if __name__ == "__main__":
    main()

"""Runs drivers of a copy of the tree (toy_feature, refusing_feature), each in a fork of one process
of the copy that has imported what they need. `fork_each` is that process's side: the copy has this
module too."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self


def fork_each(run: Callable[[str], bytes]) -> None:
    """For each plan on stdin, a line, write what `run` returns for it in a fork, as a line, unless
    the fork dies; then its exit code."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            outcome = run(line)
            sys.stdout.buffer.write(outcome + b"\n")
            sys.stdout.buffer.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"exit {os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


class ForkedDrivers:
    """Runs drivers of a copy one at a time."""

    def __init__(self, tree: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "run.py"],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": path_of(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def live(self, plan: bytes) -> tuple[bytes, int]:
        """Run a driver until it ends; return its output, empty if it died, and its exit code."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(plan + b"\n")
        self._process.stdin.flush()
        outcome, line = b"", self._process.stdout.readline()
        if not line.startswith(b"exit "):
            outcome, line = line, self._process.stdout.readline()
        return outcome, int(line.removeprefix(b"exit "))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End the process that forks them."""
        self._process.communicate(timeout=300)
        assert self._process.returncode == 0


def path_of(tree: Path) -> str:
    """Return the PYTHONPATH for a copy of the tree."""
    former = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(tree), str(tree / "client"), *([former] if former else [])])

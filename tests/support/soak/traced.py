"""`python -m tests.support.soak.traced FILE MODULE ...`: runs a module, and traces its allocations
from the first SIGUSR1 on, since imports would take minutes. Each further one appends to FILE what
has grown since the last; the second has nothing to compare with."""

import gc
import runpy
import signal
import sys
import tracemalloc
from pathlib import Path

NUM_FRAMES = 8
NUM_LINES = 15


class Report:
    """A signal's handler."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before: tracemalloc.Snapshot | None = None

    def __call__(self, *_: object) -> None:
        if not tracemalloc.is_tracing():
            tracemalloc.start(NUM_FRAMES)
            return
        gc.collect()
        now = tracemalloc.take_snapshot()
        if self._before is not None:
            top = now.compare_to(self._before, "traceback")[:NUM_LINES]
            lines = [line for each in top for line in (str(each), *each.traceback.format())]
            with self._path.open("a") as file:
                file.write("\n".join([*lines, ""]))
        self._before = now


def main() -> None:
    """Run the module."""
    _, path, module, *arguments = sys.argv
    signal.signal(signal.SIGUSR1, Report(Path(path)))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

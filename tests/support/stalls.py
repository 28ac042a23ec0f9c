"""`python -m tests.support.stalls -- COMMAND`: runs tests while their processes are stopped at
random, one at a time, as a busy host does, and prints how often; or, with --speed, all of them for
a part of the time, as on a slow host; or, with --lines, while their threads sleep before random
lines (stalled_lines/sitecustomize.py)."""

import argparse
import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil

PERIOD_S = 0.1
"""All processes run and stand once in so long, with --speed."""
STALLED_LINES = Path(__file__).with_name("stalled_lines")


def main() -> None:
    """Exit with the command's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", action="store_true", help="sleep before lines instead")
    parser.add_argument("--speed", type=float, default=1.0, help="part of the time that all run")
    parser.add_argument("--longest", type=float, default=2.0, help="seconds of a stop, at most")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two, on average")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    if options.lines:
        sys.exit(subprocess.call(options.command, env=slow_lines(options.longest)))
    source, num_stops = random.Random(options.seed), 0
    running = subprocess.Popen(options.command)
    try:
        while running.poll() is None:
            if options.speed < 1.0:
                num_stops += stop_all(running.pid, (1 - options.speed) * PERIOD_S)
                time.sleep(options.speed * PERIOD_S)
            else:
                num_stops += stop_one(running.pid, source, options.longest)
                time.sleep(source.expovariate(1 / options.every))
    finally:
        running.terminate()
        code = running.wait()
    sys.stdout.write(f"seed {options.seed}: {num_stops} stops\n")
    sys.exit(code)


def slow_lines(longest_s: float) -> dict[str, str]:
    """Return the environment in which Python's threads sleep before lines, so long at most."""
    paths = [str(STALLED_LINES), *filter(None, [os.environ.get("PYTHONPATH")])]
    new = {"PYTHONPATH": os.pathsep.join(paths), "STALL_LONGEST_S": str(longest_s)}
    return {**os.environ, **new}


def stop_one(parent: int, source: random.Random, longest_s: float) -> bool:
    """Stop one of a process's descendants for a while; return False if none runs."""
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):
        chosen = source.choice(psutil.Process(parent).children(recursive=True))
        if chosen.status() == psutil.STATUS_STOPPED:
            return False  # a test has stopped it, and wants it so
        chosen.suspend()
        try:
            time.sleep(source.uniform(0.1, longest_s))
        finally:
            chosen.resume()
        return True
    return False


def stop_all(parent: int, seconds: float) -> int:
    """Stop a process and its descendants for so long; return how many ran."""
    stopped = []
    with contextlib.suppress(psutil.NoSuchProcess):
        own = psutil.Process(parent)
        for process in [own, *own.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_STOPPED:  # else a test wants it so
                    process.suspend()
                    stopped.append(process)
    try:
        time.sleep(seconds)
    finally:
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
    return len(stopped)


if __name__ == "__main__":
    main()

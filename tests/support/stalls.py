"""`python -m tests.support.stalls -- COMMAND`: runs tests while their processes are stopped at
random, one at a time, as a busy host does. Prints how often."""

import argparse
import contextlib
import random
import subprocess
import sys
import time

import psutil


def main() -> None:
    """Exit with the command's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--longest", type=float, default=2.0, help="seconds of a stop, at most")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two, on average")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    source, num_stops = random.Random(options.seed), 0
    running = subprocess.Popen(options.command)
    try:
        while running.poll() is None:
            num_stops += stop_one(running.pid, source, options.longest)
            time.sleep(source.expovariate(1 / options.every))
    finally:
        running.terminate()
        code = running.wait()
    sys.stdout.write(f"seed {options.seed}: {num_stops} stops\n")
    sys.exit(code)


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


if __name__ == "__main__":
    main()

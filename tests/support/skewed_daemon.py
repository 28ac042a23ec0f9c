"""`python -m tests.support.skewed_daemon SECONDS OPTIONS`: the real daemon, with a monotonic clock
that is so far ahead of everybody else's, as on another host."""

import json
import sys
import time

from worker_daemon.server.assembly import run_daemon
from worker_daemon.settings import load_settings


def main(seconds: str, options: str) -> int:
    """Serve; whatever asks for nanoseconds is told another time."""
    true_clock, ahead_ns = time.monotonic_ns, int(seconds) * 10**9
    time.monotonic_ns = lambda: true_clock() + ahead_ns
    return run_daemon(load_settings(json.loads(options), None))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

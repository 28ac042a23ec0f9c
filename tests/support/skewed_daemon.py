"""`python -m tests.support.skewed_daemon SECONDS OPTIONS`: the real daemon, with a monotonic clock
SECONDS ahead of all others, as on another host."""

import json
import sys
import time

from worker_daemon.server.assembly import run_daemon
from worker_daemon.settings import load_settings


def main(seconds: str, options: str) -> int:
    """Serve, with shifted time.monotonic_ns."""
    true_clock, ahead_ns = time.monotonic_ns, int(seconds) * 10**9
    time.monotonic_ns = lambda: true_clock() + ahead_ns
    return run_daemon(load_settings(json.loads(options), None))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

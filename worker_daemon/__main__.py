"""`python -m worker_daemon` and the script `worker-daemon`."""

import os
import sys

from worker_daemon.init_process import own_command, run_below
from worker_daemon.settings import own_environment


def main() -> None:
    """Run the command line; in a container without an init process, as a child."""
    if os.getpid() == 1:
        sys.exit(run_below(own_command(), own_environment()))
    # Imported late: the first process of a container needs none of it.
    from worker_daemon.cli import app

    app()


if __name__ == "__main__":
    main()

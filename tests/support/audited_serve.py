"""`python -m tests.support.audited_serve FILE ARGS`: the daemon's real command line under an audit
hook that writes to FILE every class that is unpickled, from before the daemon is imported. This
module unpickles one first, to detect a hook that does not work."""

import os
import pickle  # noqa: TID251  # to see that the hook sees it
import sys
from collections import OrderedDict


def main() -> None:
    """Serve."""
    descriptor = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def watch(event: str, args: tuple[object, ...]) -> None:
        if event == "pickle.find_class":
            os.write(descriptor, f"{args[0]}.{args[1]}\n".encode())

    sys.addaudithook(watch)
    pickle.loads(pickle.dumps(OrderedDict()))  # noqa: S301  # our own bytes

    from worker_daemon.cli import app  # after the hook

    app()


if __name__ == "__main__":
    main()

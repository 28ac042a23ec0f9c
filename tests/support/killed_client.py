"""`python -m tests.support.killed_client WORDS`: `worker-client WORDS`, killed as soon as it has
written a line of its output file."""

import os
import signal
from collections.abc import Iterable

from worker_client.__main__ import main
from worker_client.cli.output_file import OutputFile


def killed_by(write):
    """Return OutputFile.write with an end after its first line."""

    def write_and_die(file: OutputFile, lines: Iterable[str]) -> None:
        before = file.size
        write(file, lines)
        if file.size > before:
            os.kill(os.getpid(), signal.SIGKILL)

    return write_and_die


if __name__ == "__main__":
    OutputFile.write = killed_by(OutputFile.write)
    main()

"""`python -m tests.support.versioned_serve NAME=VALUE ARGS`: the daemon's real command line as
another release has it (release=VERSION), or one that ends late (linger=FILE: after SIGTERM it
refuses everything until the file is there); or, around the fake worker, with another protocol
version (protocol=VERSION) or another torch (link=TEXT)."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.unit.server.fake_serve import FakeRendezvous
from tests.unit.server.fake_worker import make_fake_worker
from worker_daemon.cli import app
from worker_daemon.server import assembly
from worker_daemon.server.process_exit import ProcessExit
from worker_daemon.server.session import attach


def main() -> None:
    """Serve."""
    name, value = sys.argv.pop(1).split("=")
    with pytest.MonkeyPatch.context() as patch:
        if name == "release":
            patch.setattr(attach, "SOFTWARE_VERSION", value)
        elif name == "linger":
            finish = ProcessExit.finish

            def finish_late(process: ProcessExit, exit_code: int) -> None:
                if Path(value).exists():
                    finish(process, exit_code)
                    return
                loop = asyncio.get_running_loop()
                loop.call_later(0.02, finish_late, process, exit_code)

            patch.setattr(ProcessExit, "finish", finish_late)
        else:
            if name == "protocol":
                patch.setattr(attach, "PROTOCOL_VERSION", int(value))
            else:
                patch.setattr(attach, "link_software", lambda: value)
            patch.setattr(assembly, "make_worker", make_fake_worker)
            patch.setattr(assembly, "open_rendezvous", FakeRendezvous)
        app()


if __name__ == "__main__":
    main()

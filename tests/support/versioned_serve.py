"""`python -m tests.support.versioned_serve VERSION ARGS`: the daemon's real command line around the
fake worker, of another release: it speaks that version of the protocol."""

import sys

import pytest

from tests.unit.server.fake_serve import FakeRendezvous
from tests.unit.server.fake_worker import make_fake_worker
from worker_daemon.cli import app
from worker_daemon.server import assembly, control


def main() -> None:
    """Serve."""
    version = int(sys.argv.pop(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "PROTOCOL_VERSION", version)
        patch.setattr(assembly, "make_worker", make_fake_worker)
        patch.setattr(assembly, "open_rendezvous", FakeRendezvous)
        app()


if __name__ == "__main__":
    main()

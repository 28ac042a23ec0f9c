"""`python -m tests.support.locked_serve UUID ARGS`: the daemon's real command line around the fake
worker, with a GPU of that UUID."""

import sys

import pytest

from tests.unit.server.fake_serve import FakeRendezvous
from tests.unit.server.fake_worker import make_fake_worker
from worker_daemon.cli import app
from worker_daemon.server import assembly

if __name__ == "__main__":
    uuid = sys.argv.pop(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "make_worker", make_fake_worker)
        patch.setattr(assembly, "open_rendezvous", FakeRendezvous)
        patch.setattr(assembly, "find_gpu", lambda device: uuid)
        app()

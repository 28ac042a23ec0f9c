"""`python -m tests.unit.server.fake_serve ARGS`: the daemon's real command line around the fake
worker."""

import pytest

from tests.unit.server.fake_worker import make_fake_worker
from worker_daemon.cli import app
from worker_daemon.server import assembly


class FakeRendezvous:
    port = 4242
    secret = bytes(32)

    def __init__(self, host: str, num_ranks: int) -> None:
        self.host = host

    def close(self) -> None:
        pass


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "make_worker", make_fake_worker)
        patch.setattr(assembly, "open_rendezvous", FakeRendezvous)
        app()

"""A daemon that is stopped so long that its driver's tcp connections are cut, and then continued:
requests sent in the meantime are answered, and executed once. Over ipc the connections stay."""

import os
import shutil
import signal
import tempfile
import threading
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
import zmq

from rpc_schema.lifecycle import Detach
from tests.support.secured import KeyRing, SecuredDaemon, free_port
from tests.support.stopping import stop_process
from tests.support.waiting import PATIENCE_S
from worker_client.wire.endpoint import new_driver_id, parse_endpoint
from worker_client.wire.worker_client import WorkerClient

STOPPED_S = 1.8
"""Twice as long as heartbeats may go unanswered."""
LIMIT_S = PATIENCE_S


@pytest.fixture
def directory():
    path = Path(tempfile.mkdtemp(prefix="cut-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def ring(directory):
    return KeyRing(directory / "keys")


@pytest.fixture(params=["tcp", "ipc"])
def daemon(request, directory, ring):
    """Around the fake worker."""
    is_tcp = request.param == "tcp"
    endpoint = f"tcp://127.0.0.1:{free_port()}" if is_tcp else f"ipc://{directory}/e/w0"
    ring.trust({endpoint: ring.public["daemon"]})
    tcp = ("--model-root", str(directory), "--data-interface", "lo") if is_tcp else ()
    started = SecuredDaemon(
        directory, endpoint, *ring.serve_options(), *tcp, keys=ring.keys("driver")
    )
    yield started
    started.stop()


@contextmanager
def stopped_at_first(daemon: SecuredDaemon):
    pid = daemon.process.pid
    stop_process(pid)
    timer = threading.Timer(STOPPED_S, os.kill, (pid, signal.SIGCONT))
    timer.start()
    yield
    timer.join()


def test_what_a_stopped_daemon_was_asked_is_answered(daemon, ring):
    endpoint = parse_endpoint(daemon.endpoint, ring.keys("driver"))
    with (
        zmq.Context() as context,
        closing(WorkerClient(context, endpoint, 0, new_driver_id())) as client,
    ):
        client.hello()
        with stopped_at_first(daemon):
            last = client.get_status(LIMIT_S).epoch
        with stopped_at_first(daemon):
            granted = client.prepare_attach(last + 1, LIMIT_S)
        epoch = last + 1
        if not granted.granted:  # it was, and that answer was lost
            assert granted.last_epoch == epoch
            epoch += 1
            assert client.prepare_attach(epoch).granted
        with stopped_at_first(daemon):
            committed = client.send_commit_attach(epoch, new_driver_id(), LIMIT_S).result()
        assert (committed.previous_epoch, committed.status.epoch) == (last, epoch)
        with stopped_at_first(daemon):
            client.ask(partial(Detach, epoch=epoch), LIMIT_S)
        assert client.get_status().lease.state == "free"

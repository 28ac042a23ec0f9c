"""The first word with a daemon that may not be started yet: how long to wait for something that
listens at its endpoint. Knows no group."""

import time

from rpc_schema.lifecycle import HelloReply
from worker_client.errors import WorkerDied
from worker_client.worker_client import WorkerClient

POLL_S = 0.1


def greet(client: WorkerClient, timeout_s: float, listens_by: float) -> HelloReply:
    """Exchange versions within timeout_s, which begins once something listens.

    Args:
        listens_by: of time.monotonic(): how long to wait for that; one that ends meanwhile may be
            started again.

    Raises:
        WorkerDied: nothing listens; see WorkerClient.hello for the other errors.
    """
    while True:
        try:
            return client.hello(timeout_s)
        except WorkerDied:
            if time.monotonic() >= listens_by:
                raise
        time.sleep(POLL_S)

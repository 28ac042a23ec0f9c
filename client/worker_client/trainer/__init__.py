"""A trainer's side of weight updates. It needs torch; no other module of the client imports it."""

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ImportError(
        'worker_client.trainer needs torch; fix: pip install "worker-daemon[worker]"', name="torch"
    )

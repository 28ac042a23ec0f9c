"""A trainer's side of weight updates. It needs torch; no other module of the client imports it. In
reading order:

sender.py      WeightSender: one process is driver and trainer; deltas.py, cuda_blocks.py
shards.py      ShardSender: a trainer of several processes
connection.py  what both have: the connection with the workers, and the RPCs of an update
broadcast.py   the trainer's rank in a communicator with the workers; communicator.py
"""

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ImportError(
        'worker_client.trainer needs torch; fix: pip install "worker-daemon[worker]"', name="torch"
    )

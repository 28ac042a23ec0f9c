"""Messages to and from daemons. In reading order:

worker_client.py   WorkerClient: one daemon's requests and replies
transport.py       sockets, their thread, deadlines
lease.py           the lease: its renewals, and when nothing may be delivered any more
liveness.py        signals that a daemon is dead or hangs
listener.py        whether any process listens at an endpoint; ipc_owner.py, processes.py: which one
keys.py            CURVE keys
"""

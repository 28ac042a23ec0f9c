"""Messages to and from daemons. In reading order:

worker_client.py   WorkerClient: one daemon's requests and replies
health_client.py   the part of it that a health probe needs
control_channel.py control requests, with deadlines
transport.py       sockets of steps, results and events, and their thread
sockets.py         sockets and their handshakes; endpoint.py: their addresses
lease.py           the lease: its renewals, and when nothing may be delivered any more
liveness.py        signals that a daemon is dead or hangs
listener.py        whether any process listens at an endpoint; ipc_owner.py, processes.py: which one
keys.py            CURVE keys
"""

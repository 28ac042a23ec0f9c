"""Which process is at the other end of a connection that a socket of ours has anyway. For daemons
with keys: another connection would be turned away there, and logged, while this one has proved by
its handshake who answers. Knows no daemon and no ZeroMQ socket."""

import socket
from contextlib import suppress

from rpc_schema.borrowed_sockets import borrowed
from worker_client.liveness import Process, UnknownProcess, process_behind


class PeerProcesses:
    """The processes behind one socket's ipc connections, by address. Belongs to the socket's
    thread."""

    def __init__(self) -> None:
        self._found: dict[str, Process] = {}

    def connected(self, address: str, descriptor: int) -> None:
        """A connection to `address` was made, and has this file descriptor. That is another
        thread's, which may have closed it since: what is there now has to be a connection to that
        very path."""
        self.forget(address)
        with suppress(OSError), borrowed(descriptor) as peer:
            path = address.removeprefix("ipc://")
            if peer.family == socket.AF_UNIX and peer.getpeername() == path:
                self._found[address] = process_behind(peer)

    def find(self, address: str) -> Process:
        """Return the process that answered there last; the caller closes it."""
        return self._found.get(address, UnknownProcess()).copy()

    def forget(self, address: str) -> None:
        """Nothing is known of that address any more."""
        self._found.pop(address, UnknownProcess()).close()

    def close(self) -> None:
        """Close the descriptors."""
        for address in list(self._found):
            self.forget(address)

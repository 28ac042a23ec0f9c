"""Finds processes of this host through the kernel: a daemon's own, by its connection. Also checks
whether any process listens at an address."""

import contextlib
import os
import select
import socket
import struct
from pathlib import Path
from typing import Final

from rendezvous.borrowed_sockets import borrowed

PROCESSES = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_PEER_CREDENTIALS: Final = struct.Struct("3i")
_PROBE_S: Final = 0.2


class Process:
    """A daemon's process on this host, identified by a descriptor (pidfd), so that a reused process
    id cannot stand for another process. Freed by close(). With pid 0 it is on another host, or
    hidden from this kernel or container, and counts as alive."""

    def __init__(self, pid: int = 0, fd: int = -1) -> None:
        self.pid = pid
        self._fd = fd
        self._poll = select.poll()
        if pid:
            self._poll.register(fd, select.POLLIN)
            self._memory_events = _memory_events(pid)
            self._oom_kills = _num_oom_kills(self._memory_events)

    def has_ended(self) -> bool:
        """Return True once it has exited; never waits."""
        return bool(self.pid and self._poll.poll(0))

    def cause_of_end(self) -> str:
        """Return the likely cause of its end as the kernel shows it, for an error's text."""
        if not self.pid or _num_oom_kills(self._memory_events) <= self._oom_kills:
            return ""
        return "; the kernel has killed for lack of memory in its cgroup (oom_kill has risen)"

    def copy(self) -> "Process":
        """Duplicate the handle; the copy is closed separately."""
        return Process(self.pid, os.dup(self._fd)) if self.pid else self

    def close(self) -> None:
        """Close the descriptor; the process continues."""
        if self.pid:
            os.close(self._fd)


def find_process(address: str) -> Process:
    """Return the process that listens at an ipc address, by its socket: the pid that a daemon
    reports may belong to another container's namespace."""
    with contextlib.suppress(OSError), _connected(address) as peer:
        return process_behind(peer)
    return Process()


def process_behind(peer: socket.socket) -> Process:
    """Return the process that listened where `peer`, a Unix stream socket, is connected to.

    Raises:
        OSError: the kernel has no information.
    """
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid = int(_PEER_CREDENTIALS.unpack(found)[0])
    if pid <= 0:
        return Process()
    process = Process(pid, os.pidfd_open(pid))
    hung_up = select.poll()
    hung_up.register(peer, 0)
    if not hung_up.poll(0):  # it still lives, so the pid is still its own
        return process
    process.close()
    return Process()


def nobody_listens(address: str) -> bool:
    """Return True if a connection to an address is refused; see connection_error. A name that does
    not resolve, or a path without permission, says nothing about a listener."""
    return isinstance(connection_error(address), FileNotFoundError | ConnectionRefusedError)


def connection_error(address: str) -> OSError | None:
    """Return the error of a connection to an address; None without one. A stopped process does not
    refuse, and one beyond a broken network does not answer. On ipc the daemon does not notice the
    probe: it uses a socket of another type, which Linux refuses only after it has found a listener
    (unix(7), EPROTOTYPE)."""
    try:
        if address.startswith("tcp://"):
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), _PROBE_S).close()
        else:
            _connected(address, socket.SOCK_DGRAM).close()
    except OSError as error:
        return error
    except UnicodeError:  # from Python: no such name resolves
        return socket.gaierror(socket.EAI_NONAME, "it is not a host's name")
    return None


def _connected(address: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, kind)
    try:
        peer.settimeout(_PROBE_S)
        peer.connect(str(Path(address.removeprefix("ipc://"))))
    except BaseException:
        peer.close()
        raise
    return peer


class PeerProcesses:
    """Processes behind one socket's ipc connections, by address. For daemons with keys: another
    connection would be refused there, and logged, while this connection's handshake has proved the
    daemon's identity. Belongs to the socket's thread."""

    def __init__(self) -> None:
        self._found: dict[str, Process] = {}

    def connected(self, address: str, descriptor: int) -> None:
        """Record a connection to `address` by its file descriptor. Another thread owns that and may
        have closed it since: the descriptor must be a connection to that very path."""
        self.forget(address)
        with contextlib.suppress(OSError), borrowed(descriptor) as peer:
            path = address.removeprefix("ipc://")
            if peer.family == socket.AF_UNIX and peer.getpeername() == path:
                self._found[address] = process_behind(peer)

    def find(self, address: str) -> Process:
        """Return the process that answered there last; the caller closes it."""
        return self._found.get(address, Process()).copy()

    def forget(self, address: str) -> None:
        """Forget the process at an address."""
        self._found.pop(address, Process()).close()

    def close(self) -> None:
        """Close the descriptors."""
        for address in list(self._found):
            self.forget(address)


def _memory_events(pid: int) -> Path:
    """Return the memory.events file of a live process's cgroup (version 2)."""
    group = ""
    with contextlib.suppress(OSError):
        lines = (PROCESSES / str(pid) / "cgroup").read_text().splitlines()
        group = next((line[3:] for line in lines if line.startswith("0::")), "")
    return CGROUPS / group.lstrip("/") / "memory.events"


def _num_oom_kills(events: Path) -> int:
    """Read how many of a cgroup's processes were killed for lack of memory; 0 if unknown. If it has
    risen when a process was killed, lack of memory is the likely cause, but not certain."""
    with contextlib.suppress(OSError, ValueError):
        for line in events.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0

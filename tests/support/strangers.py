"""A stranger on the loopback interface: finds a process's listening sockets, and tries to
connect."""

import contextlib
import re
import select
import socket
from pathlib import Path

Address = tuple[str, int]
_LISTEN = "0A"


def listening(pid: int) -> list[Address]:
    """Return the TCP addresses at which a process listens, IPv4 only."""
    own = set(_descriptors(pid))
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [_address(row[1]) for row in rows if row[3] == _LISTEN and f"socket:[{row[9]}]" in own]


def num_descriptors(pid: int) -> int:
    """Return the number of open descriptors of a process."""
    return len(_descriptors(pid))


def gets_in(address: Address, within_s: float = 0.1) -> bool:
    """Return True if a connection is established."""
    try:
        socket.create_connection(address, within_s).close()
    except OSError:
        return False
    return True


def flood(address: Address, count: int) -> int:
    """Open and close `count` connections, a hundred at a time; return the number established."""
    num_open = 0
    for _ in range(count // 100):
        with contextlib.ExitStack() as stack:
            tries = [stack.enter_context(socket.socket()) for _ in range(100)]
            poller = select.poll()
            for each in tries:
                each.setblocking(False)
                each.connect_ex(address)
                poller.register(each, select.POLLOUT)
            ready = poller.poll(0)
            num_open += sum(not events & select.POLLERR for _, events in ready)
    return num_open


def _descriptors(pid: int) -> list[str]:
    """Return what the open descriptors of a process refer to."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed in the meantime
            found.append(entry.readlink().name)
    return found


def _address(text: str) -> Address:
    digits, port = re.fullmatch(r"([0-9A-F]{8}):([0-9A-F]{4})", text).groups()
    return socket.inet_ntoa(bytes.fromhex(digits)[::-1]), int(port, 16)

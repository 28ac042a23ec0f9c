"""Finds the TCP sockets that gloo opened in this process. Closes the listening ones to all peers
with a packet filter: gloo itself neither closes them nor authenticates peers. Ends the connections
of a broken link: gloo has no abort. Also provides the filter for other listening sockets.

The filter is classic BPF, which needs no privilege (socket(7), SO_ATTACH_FILTER). It drops packets
for the listening socket; accepted connections are separate sockets and are not affected.
"""

import contextlib
import ctypes
import logging
import os
import resource
import select
import socket
import stat
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from rendezvous.borrowed_sockets import borrowed

Instruction: TypeAlias = tuple[int, int, int, int]
"""linux/filter.h, struct sock_filter: code, jt, jf, k."""

RETURN: Final = 0x06
NOBODY: Final[tuple[Instruction, ...]] = ((RETURN, 0, 0, 0),)
"""The filter that drops everything."""
MAX_STRAYS: Final = 1024
"""Limit on the descriptors that a rendezvous may use before its listeners are closed."""

_SO_ATTACH_FILTER: Final = 26
_INSTRUCTION: Final = struct.Struct("HBBI")
_FAMILIES: Final = (socket.AF_INET, socket.AF_INET6)
_LOOK_S: Final = 0.005
_DESCRIPTORS: Final = Path("/proc/self/fd")

_LOG = logging.getLogger(__name__)

Sockets: TypeAlias = frozenset[tuple[int, int]]
"""(file descriptor, inode) of each."""


def attach_filter(listener: socket.socket, instructions: Sequence[Instruction]) -> None:
    """Replace the socket's packet filter, at once. Raises OSError."""
    code = b"".join(_INSTRUCTION.pack(*instruction) for instruction in instructions)
    memory = ctypes.create_string_buffer(code)
    filter_ = struct.pack("HP", len(instructions), ctypes.addressof(memory))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)


def inheritable_listeners() -> Sockets:
    """Return the listening TCP sockets that a child process would inherit: those of gloo. Python
    and libzmq make theirs close-on-exec, gloo does not."""
    return _inheritable(_listens)


def inheritable_connections() -> Sockets:
    """Return the connected TCP sockets that a child process would inherit: those of gloo."""
    return _inheritable(_is_connected)


def end(connections: Sockets) -> None:
    """End these connections: both sides' waits on them fail at once. What was sent before still
    arrives. The owner keeps its descriptors. Closed ones are skipped. Any thread may call it."""
    for descriptor, inode in connections:
        with contextlib.suppress(OSError), borrowed(descriptor) as connection:
            if os.fstat(connection.fileno()).st_ino == inode:
                connection.shutdown(socket.SHUT_RDWR)


def has_ended(connections: Sockets) -> bool:
    """Return True if the other side of one of these connections has ended it, or it is closed. Any
    thread may call it."""
    for descriptor, inode in connections:
        try:
            with borrowed(descriptor) as connection:
                if os.fstat(connection.fileno()).st_ino != inode:
                    return True
                poll = select.poll()
                poll.register(connection.fileno(), select.POLLRDHUP)
                if poll.poll(0):
                    return True
        except OSError:
            return True
    return False


def shut(listeners: Sockets) -> None:
    """Stop new connections to these sockets. Sockets that are already closed are skipped."""
    for descriptor, inode in listeners:
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                with borrowed(descriptor) as listener:
                    attach_filter(listener, NOBODY)


def _descriptors() -> list[int]:
    return [int(entry.name) for entry in _DESCRIPTORS.iterdir()]


def _inheritable(is_wanted: Callable[[socket.socket], bool]) -> Sockets:
    found = set()
    for descriptor in _descriptors():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.get_inheritable(descriptor) and _is_tcp(descriptor, is_wanted):
                found.add((descriptor, os.fstat(descriptor).st_ino))
    return frozenset(found)


def _is_tcp(descriptor: int, is_wanted: Callable[[socket.socket], bool]) -> bool:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    with borrowed(descriptor) as found:
        is_tcp = found.family in _FAMILIES and found.type == socket.SOCK_STREAM
        return is_tcp and is_wanted(found)


def _listens(found: socket.socket) -> bool:
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _is_connected(found: socket.socket) -> bool:
    try:
        found.getpeername()
    except OSError:
        return False
    return True


class ListenerWatch:
    """Context in which gloo connects the members of its groups. On exit, it shuts the listeners
    that gloo opened. gloo keeps a descriptor for each stranger's connection, and aborts the process
    when none is left. So this context also shuts the listeners before that happens, and the
    rendezvous fails."""

    def __init__(self, max_strays: int = MAX_STRAYS) -> None:
        self.is_flooded = False
        self._max_strays = max_strays
        self._before: Sockets = frozenset()
        self._highest = 0
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, name="listener-watch", daemon=True)

    def __enter__(self) -> "ListenerWatch":
        self._before = inheritable_listeners()
        used, (limit, _) = len(_descriptors()), resource.getrlimit(resource.RLIMIT_NOFILE)
        self._highest = used + min(self._max_strays, (limit - used) // 2)
        self._watch.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        self._watch.join()
        if not self._shut() and kind is None:
            _LOG.error(
                "gloo's listening sockets were not found; any host can still connect to them"
            )

    def _look(self) -> None:
        while not self._over.wait(_LOOK_S):
            if _next_descriptor() > self._highest:
                self._shut()
                self.is_flooded = True
                return

    def _shut(self) -> bool:
        """Shut the listeners that gloo has opened; return True if there are any."""
        opened = inheritable_listeners() - self._before
        shut(opened)
        return bool(opened)


def _next_descriptor() -> int:
    """Return the lowest free descriptor: an estimate of the number of open ones, in two system
    calls."""
    try:
        descriptor = os.open(os.devnull, os.O_RDONLY)
    except OSError:  # none is free
        return sys.maxsize
    os.close(descriptor)
    return descriptor

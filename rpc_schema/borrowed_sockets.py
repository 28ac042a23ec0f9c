"""Sockets of another thread, used by file descriptor for a moment."""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Yield the socket with this file descriptor, which stays open. Raises OSError if it is closed,
    or is not a socket."""
    copy = _copy(descriptor)
    try:
        used = socket.socket(fileno=copy)
        try:
            yield used
        finally:
            used.detach()
    finally:
        if copy != descriptor:
            os.close(copy)


def _copy(descriptor: int) -> int:
    try:
        return os.dup(descriptor)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        # None is free, the case in which strangers matter most. Race: the owner may close the
        # descriptor, and use it again, between two calls here.
        return descriptor

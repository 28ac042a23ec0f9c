"""Uses a socket of another thread for a moment, by its file descriptor."""

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
        # No descriptor is free, as in a flood of connections. Race: the owner may close
        # and reuse the descriptor between two calls here.
        return descriptor

"""What a service manager is told, by the protocol of sd_notify(3): one datagram a message. Knows no
daemon."""

import logging
import socket
from typing import Protocol

logger = logging.getLogger(__name__)


class Notifier(Protocol):
    """Takes messages such as READY=1; never waits, never raises."""

    def notify(self, message: str) -> None:
        """Send one."""


class NoManager:
    """Nobody asked to be told."""

    def notify(self, message: str) -> None:
        return None


class ServiceManager:
    """Whoever listens on a datagram socket: systemd, as a rule."""

    def __init__(self, address: str) -> None:
        """address: of NOTIFY_SOCKET; a leading @ means an abstract one."""
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def notify(self, message: str) -> None:
        """Send one; a manager that is gone, or does not read, misses it."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode(), self._address)
        except OSError as error:
            logger.debug("the service manager was not told %s: %s", message, error)


def open_notifier(address: str) -> Notifier:
    """Return where messages go; an empty address: nowhere."""
    return ServiceManager(address) if address else NoManager()

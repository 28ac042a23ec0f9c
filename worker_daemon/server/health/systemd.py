"""Messages to the service manager by the protocol of sd_notify(3): one datagram each."""

import logging
import socket

logger = logging.getLogger(__name__)


class ServiceManager:
    """The listener on NOTIFY_SOCKET, usually systemd."""

    def __init__(self, address: str) -> None:
        """address: the value of NOTIFY_SOCKET; a leading @ means an abstract socket. Empty: no
        service manager."""
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def notify(self, message: str) -> None:
        """Send a message such as READY=1. Never waits, never raises; a manager that has exited, or
        does not read, misses it."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(message.encode(), self._address)
        except OSError as error:
            logger.debug("the service manager did not receive %s: %s", message, error)

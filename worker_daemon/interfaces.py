"""The address of a network interface of this host. Knows nothing of who listens there."""

import fcntl
import socket
import struct
from typing import Final

from worker_daemon.errors import ConfigError

_SIOCGIFADDR: Final = 0x8915
"""netdevice(7): the IPv4 address of an interface, in a struct ifreq of 40 bytes."""


def interface_address(name: str) -> str:
    """Return an interface's IPv4 address.

    Raises:
        ConfigError: there is no such interface, or it has no such address.
    """
    request = struct.pack("40s", name.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
    except OSError as error:
        known = ", ".join(entry[1] for entry in socket.if_nameindex())
        raise ConfigError(
            f"it has no IPv4 address: {error.strerror}",
            field="data-interface",
            value=name,
            fix=f"name one of {known} that has one",
        ) from None
    return socket.inet_ntoa(answer[20:24])

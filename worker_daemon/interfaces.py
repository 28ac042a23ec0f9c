"""The addresses of this host's network interfaces."""

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from worker_daemon.errors import config_error

_SIOCGIFADDR: Final = 0x8915
"""netdevice(7): the IPv4 address of an interface, in a struct ifreq of 40 bytes."""
_IPV6_ADDRESSES: Final = Path("/proc/net/if_inet6")
_LINK_LOCAL: Final = 0x20
_UNUSABLE: Final = 0x01 | 0x08 | 0x20 | 0x40
"""Flags of linux/if_addr.h: temporary, duplicate, deprecated, tentative."""


def interface_address(name: str) -> str:
    """Return an interface's IPv4 address or, if it has none, its IPv6 address.

    Raises:
        ConfigError: there is no such interface, or it has no such address. A link-local address
            (fe80::...) does not count: other hosts cannot use it.
    """
    request = struct.pack("40s", name.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)
    except OSError as error:
        address = ipv6_address(name, _ipv6_lines())
        if address:
            return address
        known = ", ".join(entry[1] for entry in socket.if_nameindex())
        raise config_error(
            "data-interface",
            name,
            f"it has no address that other hosts could use: {error.strerror}",
            f"name one of {known} that has an IPv4 address, or an IPv6 address that is not "
            "link-local",
        ) from None
    return socket.inet_ntoa(answer[20:24])


def ipv6_address(name: str, lines: Sequence[str]) -> str:
    """Return the interface's first IPv6 address that is not link-local; empty if there is none.
    lines: from /proc/net/if_inet6, each with address, index, prefix length, scope, flags, name."""
    for line in lines:
        address, _, _, scope, flags, owner = line.split()
        usable = int(scope, 16) != _LINK_LOCAL and not int(flags, 16) & _UNUSABLE
        if owner == name and usable:
            return str(ipaddress.IPv6Address(int(address, 16)))
    return ""


def _ipv6_lines() -> list[str]:
    try:
        return _IPV6_ADDRESSES.read_text().splitlines()
    except OSError:  # the kernel has no IPv6
        return []

"""The package's version, and the protocol's version with its compatibility rule."""

SOFTWARE_VERSION = "0.1.0"
"""The build reads it from here, so that an uninstalled source tree has it too."""

PROTOCOL_VERSION = 14
"""Rises with every change of bytes. Driver and daemon must have the same number, or attach is
refused with both named.

Only Hello and HelloReply never change (fields may be appended, never moved), so that two versions
can tell each other apart.
"""


def version_line(command: str) -> str:
    """Return the output of a command's --version."""
    return f"{command} {SOFTWARE_VERSION}, protocol {PROTOCOL_VERSION}\n"

"""The protocol's version and its one compatibility rule."""

PROTOCOL_VERSION = 1
"""Rises with every change of bytes. Driver and daemon must have the same number, or attach is
refused with both named.

Hello and HelloReply alone never change (fields may be appended, never moved), so that two versions
can tell each other.
"""

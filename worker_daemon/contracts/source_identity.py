"""The identity of what a rank's weights, or its part of an adapter, were read from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """See rpc_schema/identity.py:ContentIdentity, whose fields these are."""

    content: bytes
    place: bytes = b""
    stamps: bytes = b""

"""The identity of contents that every rank of a group must share: weights, LoRA adapters."""

from collections.abc import Sequence
from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Meta

from rpc_schema.base import ContentHash, Value

Digest: TypeAlias = Annotated[bytes, Meta(max_length=32)]


class ContentIdentity(Value, frozen=True, kw_only=True):
    """Names the contents that a rank's weights, or its part of an adapter, were read from.

    Equal for equal contents, on any host. Different contents have different identities with the
    exception of a few bytes that changed between the samples of a large file, on another host or in
    another directory: see worker_daemon/models/file_identity.py.
    """

    content: ContentHash
    """SHA-256 of the contents, and after a weight update of the update too."""
    place: Digest = b""
    """Digest that names the directory among all directories of all hosts. Empty: the contents are
    not those of files alone."""
    stamps: Digest = b""
    """Digest of the files' names, sizes and modification times. Comparable where `place` is equal:
    there it shows every change."""


class DifferingRanks(NamedTuple):
    """Two ranks with different contents."""

    first: int
    second: int


def first_difference(identities: Sequence[ContentIdentity | None]) -> DifferingRanks | None:
    """Return two ranks whose contents differ, or None. identities: by rank; ranks without one do
    not count."""
    known = [(rank, each) for rank, each in enumerate(identities) if each is not None]
    first_in: dict[bytes, tuple[int, ContentIdentity]] = {}
    for rank, identity in known:
        first, other = known[0]
        if identity.content != other.content:
            return DifferingRanks(first, rank)
        first, other = first_in.setdefault(identity.place, (rank, identity))
        if identity.stamps != other.stamps:
            return DifferingRanks(first, rank)
    return None

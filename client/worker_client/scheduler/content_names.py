"""Names of contents, by which groups of daemons speak of blocks to each other.

Groups may divide a model's layers into KV groups in different ways, but all keep the same of the
tokens that a window sees. So a name stands for the contents that all KV groups with one window keep
of the same tokens: a hash of these and all that decides their KV, and a byte for the window. A
block's key has a byte for its KV group instead. Groups of one model whose weights have the same
number and contents have the same names.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rpc_schema.kv_cache import BlockGroup


class HeldContents(NamedTuple):
    """Contents, and their slots."""

    name: bytes
    slots: tuple[int, ...]
    """One for each KV group of their window."""


class ContentNames:
    """The names of contents, of a group of daemons."""

    def __init__(self, groups: Sequence[BlockGroup], tag: bytes) -> None:
        """groups: the KV groups. tag: BlockHashes.contents_tag."""
        windows = sorted({group.window or 0 for group in groups})
        self.tag = tag
        """With equal tags, equal names mean equal contents."""
        self.has_windows = windows != [0]
        """True if contents of one kind alone are of no use: those of all windows belong to a
        prefix, for which the next token sees only the last ones."""
        self._kinds = [windows.index(group.window or 0) for group in groups]
        """Place of each KV group's window among all."""

    def name_of(self, key: bytes) -> bytes:
        """Return the name of a block's contents."""
        return key[:-1] + bytes((self._kinds[key[-1]],))

    def keys_of(self, name: bytes) -> list[bytes]:
        """Return the keys of the blocks that contents are in."""
        return [
            name[:-1] + bytes((group,))
            for group, kind in enumerate(self._kinds)
            if kind == name[-1]
        ]

"""Moves of blocks between groups, as a rank reads them from a request (rpc_schema/kv_transfer.py).

Shapes: n blocks, m contents, G KV groups of one window.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rpc_schema import kv_transfer as kt
from worker_daemon.contracts.arrays import Bools, Int32s
from worker_daemon.errors import config_error
from worker_daemon.runner.block_contents import Hashes


class MovedContents(NamedTuple):
    """Contents that all KV groups with one window keep of the same tokens."""

    window: int
    """NO_WINDOW: these are the groups without."""
    kv_groups: tuple[int, ...]
    """[G] ascending"""
    names: Hashes
    """[m, bytes of a hash]"""
    slots: Int32s
    """[m, G]"""
    hashes: Hashes
    """[m, G, bytes of a hash]"""

    def in_parts(self, count: int) -> Iterator["MovedContents"]:
        """Yield the contents, so many at once."""
        for first in range(0, len(self.names), count):
            own = slice(first, first + count)
            yield self._replace(
                names=self.names[own], slots=self.slots[own], hashes=self.hashes[own]
            )


@dataclass(frozen=True, slots=True)
class BlocksToMove:
    """One move, as this rank carries it out."""

    number: int
    tag: bytes
    slots: Int32s
    """[n]"""
    hashes: Hashes
    """[n, bytes of a hash]"""
    contents: tuple[MovedContents, ...]
    """By window, ascending."""


def read_move(message: kt.MoveKVBlocks, windows: Sequence[int], num_slots: int) -> BlocksToMove:
    """Check a request against this rank. windows: of each KV group, NO_WINDOW for those without.

    Raises:
        ConfigError: a slot or a KV group does not exist, a slot is named twice, columns do not fit,
            or a KV group lacks contents that another of its window has.
    """
    if len(message.slots) % 4:
        problem = "it is not a sequence of int32"
        raise config_error("slots", f"{len(message.slots)} bytes", problem, "send int32")
    slots = np.frombuffer(message.slots, "<i4").astype(np.int32)
    outside = (slots < 0) | (slots >= num_slots)
    if not slots.size or outside.any():
        value = int(slots[int(outside.argmax())]) if slots.size else "none"
        raise config_error("slots", value, "there is no such slot", f"0 to {num_slots - 1}")
    if np.unique(slots).size < slots.size:
        raise config_error("slots", slots.size, "a slot is named twice", "name it once")
    hashes = _hashes(message, "hashes", message.hashes, slots.size)
    names = _hashes(message, "names", message.names or message.hashes, slots.size)
    kv_groups = np.frombuffer(message.kv_groups or bytes(slots.size), np.uint8)
    if kv_groups.size != slots.size:
        problem = f"{slots.size} blocks are of as many KV groups"
        raise config_error("kv_groups", f"{kv_groups.size} bytes", problem, "send as many")
    if kv_groups.max() >= len(windows):
        fix = f"0 to {len(windows) - 1}"
        raise config_error("kv_groups", int(kv_groups.max()), "there is no such KV group", fix)
    found = []
    for window in sorted({windows[group] for group in np.unique(kv_groups)}):
        own = tuple(group for group, each in enumerate(windows) if each == window)
        places = [kv_groups == group for group in own]
        found.append(_contents(window, own, places, names, slots, hashes))
    return BlocksToMove(message.move, message.block_tag, slots, hashes, tuple(found))


def _contents(
    window: int,
    kv_groups: tuple[int, ...],
    places: Sequence[Bools],
    names: Hashes,
    slots: Int32s,
    hashes: Hashes,
) -> MovedContents:
    """places: for each of the KV groups, where among all blocks its own are."""
    first = names[places[0]]
    for group, own in zip(kv_groups, places, strict=True):
        if not np.array_equal(names[own], first):
            problem = f"KV group {group} has other contents than group {kv_groups[0]}"
            fix = "name the same contents in all KV groups of one window"
            raise config_error("names", f"{np.count_nonzero(own)} blocks", problem, fix)
    return MovedContents(
        window,
        kv_groups,
        first,
        np.stack([slots[own] for own in places], axis=1),
        np.stack([hashes[own] for own in places], axis=1),
    )


def _hashes(message: kt.MoveKVBlocks, field: str, raw: bytes, count: int) -> Hashes:
    expected = count * message.hash_bytes
    if len(raw) != expected:
        problem = f"{count} blocks have {expected} bytes of {field}"
        raise config_error(field, f"{len(raw)} bytes", problem, "send as many")
    return np.frombuffer(raw, np.uint8).reshape(-1, message.hash_bytes)

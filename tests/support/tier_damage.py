"""Damages the memory of a host tier from outside of its daemon, in the file on a tmpfs that has
it (worker-daemon serve --kv-host-dir), also while blocks move."""

import mmap
import random
from collections.abc import Sequence
from pathlib import Path

from worker_daemon.runner.connectors.tier_index import SlotLayout

ALIVE = ("flip", "zero", "copy", "save", "restore", "cut")
DEAD = (*ALIVE, "entry", "truncate", "remove")


class TierFile:
    """The file of one daemon's tier."""

    def __init__(self, directory: Path, num_slots: int) -> None:
        self._path = directory / "blocks"
        self._num_slots = num_slots
        self._index_bytes = SlotLayout(num_slots, 0, 0).index_bytes
        self._saved: list[tuple[int, bytes]] = []

    def damage(self, rng: random.Random, kind: str, slots: Sequence[int]) -> None:
        """slots: those whose contents matter."""
        if not self._path.exists() or not slots:
            return
        size = self._path.stat().st_size
        slot_bytes = (size - self._index_bytes) // self._num_slots
        if kind == "remove":
            self._path.unlink()
            return
        if kind == "truncate":
            with self._path.open("r+b") as file:
                file.truncate(rng.randrange(size))
            return
        if slot_bytes <= 0:
            return
        with self._path.open("r+b") as file, mmap.mmap(file.fileno(), size) as memory:
            for _ in range(rng.choice([1, 2, 5, 20])):
                self._change(rng, kind, memory, rng.choice(slots), rng.choice(slots), slot_bytes)

    def _change(self, rng, kind, memory, slot, other, slot_bytes):
        first = self._index_bytes + slot * slot_bytes
        end = first + slot_bytes
        middle = rng.randrange(first, end)
        if kind == "flip":
            for _ in range(rng.choice([1, 2, 64, 512])):
                memory[rng.randrange(first, end)] ^= 1 << rng.randrange(8)
        elif kind == "zero":
            memory[first:end] = bytes(slot_bytes)
        elif kind == "cut":  # the rest never came
            memory[middle:end] = bytes(end - middle)
        elif kind == "copy":
            source = self._index_bytes + other * slot_bytes
            memory[first:end] = memory[source : source + slot_bytes]
        elif kind == "save":
            self._saved.append((slot, memory[first:end]))
            del self._saved[:-20]
        elif kind == "restore":  # bytes that come late
            for saved, raw in self._saved:
                start = self._index_bytes + saved * slot_bytes
                memory[start : start + len(raw)] = raw
        elif kind == "entry":
            memory[rng.randrange(self._index_bytes)] ^= 1 << rng.randrange(8)

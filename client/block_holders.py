"""Which request may write to which KV block: the check that no two requests write to one block, and
that nobody writes to a block that others read. Knows slots and block ids; no request ids.

A block belongs to the admission that was given it to write; admissions have serial numbers, so that
the end of a request frees all of its blocks at once, without a list of them. Blocks that a request
begins with (a cached prefix) are read only, and counted.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

_UINT16 = np.dtype("<u2")
_UINT32 = np.dtype("<u4")
_INDEX = np.dtype(np.int64)
_NOBODY = 0
_KEPT = 1
"""The holder of the null block, and of blocks that running requests read."""

NUM_SERIALS = 1 << 16
"""Admissions between two renumberings, which look at every block."""


class BlockTaken(Exception):
    """A block cannot be written to. `index` is its place among those that were asked for, `slot`
    that of the request that writes to it, None where others read it or nobody may write to it."""

    def __init__(self, index: int, slot: int | None) -> None:
        super().__init__(f"block number {index} of those asked for is taken")
        self.index = index
        self.slot = slot


def block_indices(ids: bytes) -> Int64s:
    """Return a column of block ids (int32) as indices; negative ones are beyond any block."""
    return np.frombuffer(ids, _UINT32).astype(_INDEX)


class BlockHolders:
    """Belongs to a SlotTable. Blocks are 0 to num_blocks - 1, of which 0 is the workers' own."""

    def __init__(self, num_slots: int, num_blocks: int) -> None:
        self._holder = np.zeros(num_blocks, np.int64)
        """The serial number that bars others from each block, if that is alive."""
        self._holder[0] = _KEPT
        self._writer = np.zeros(num_blocks, np.int64)
        """Of blocks that are read, the holder of before."""
        self._num_readers = np.zeros(num_blocks, np.int32)
        self._serial_of = np.zeros(num_slots, np.int64)
        self._alive = np.zeros(num_slots + NUM_SERIALS, np.bool_)
        self._alive[_KEPT] = True
        self._next = _KEPT + 1
        self._prefixes: dict[int, Int64s] = {}
        """The blocks that a slot's request began with."""

    def check(self, slots: bytes, block_ids: Int64s, listed: Sequence[int]) -> None:
        """Raise BlockTaken unless each block is there, nobody holds it, and no other is the same.
        slots: of those that ask for them, a column; listed: the same blocks as a list."""
        try:
            held = self._alive.take(self._holder.take(block_ids))
        except IndexError:
            raise BlockTaken(self._first_outside(block_ids), None) from None
        if 1 in held.tobytes():  # for the few a third of what numpy's own takes
            index = int(held.argmax())
            raise BlockTaken(index, self._slot_of(int(self._holder[block_ids[index]])))
        if len(set(listed)) < len(listed):
            first = {block_id: index for index, block_id in reversed([*enumerate(listed)])}
            index = next(i for i, block_id in enumerate(listed) if first[block_id] < i)
            raise BlockTaken(index, int(np.frombuffer(slots, _UINT16)[first[listed[index]]]))

    def check_prefix(self, block_ids: Int64s) -> None:
        """Raise BlockTaken unless each block is there and may be read."""
        if block_ids.size and (block_ids.min() < 1 or block_ids.max() >= self._holder.size):
            raise BlockTaken(self._first_outside(block_ids), None)

    def hold(self, slots: bytes, block_ids: Int64s) -> None:
        """Give blocks that were checked to the requests in these slots, one each."""
        self._holder.put(block_ids, self._serial_of.take(np.frombuffer(slots, _UINT16)))

    def admit(self, slots: Sequence[int], prefixes: Sequence[Int64s]) -> None:
        """Begin requests in free slots, with the blocks that they read."""
        if self._next + len(slots) > self._alive.size:
            self._renumber()
        for slot, prefix in zip(slots, prefixes, strict=True):
            self._serial_of[slot] = self._next
            self._alive[self._next] = True
            self._next += 1
            if prefix.size:
                self._prefixes[slot] = prefix
                self._read(prefix)

    def release(self, slots: Sequence[int]) -> None:
        """End the requests in these slots."""
        self._alive[self._serial_of[slots]] = False
        self._serial_of[slots] = _NOBODY
        for slot in slots:
            prefix = self._prefixes.pop(slot, None)
            if prefix is not None:
                self._unread(prefix)

    @contextmanager
    def without(self, slots: Sequence[int]) -> Iterator[None]:
        """Judge as if the requests in these slots had ended; they have not afterwards."""
        serials = self._serial_of[slots]
        prefixes = [self._prefixes[slot] for slot in slots if slot in self._prefixes]
        self._alive[serials] = False
        for prefix in prefixes:
            self._unread(prefix)
        try:
            yield
        finally:
            for prefix in prefixes:
                self._read(prefix)
            self._alive[serials] = True

    def _read(self, prefix: Int64s) -> None:
        fresh = prefix[self._num_readers[prefix] == 0]
        self._writer[fresh] = self._holder[fresh]
        self._holder[fresh] = _KEPT
        self._num_readers[prefix] += 1

    def _unread(self, prefix: Int64s) -> None:
        self._num_readers[prefix] -= 1
        last = prefix[self._num_readers[prefix] == 0]
        self._holder[last] = self._writer[last]

    def _first_outside(self, block_ids: Int64s) -> int:
        return int(((block_ids < 1) | (block_ids >= self._holder.size)).argmax())

    def _slot_of(self, serial: int) -> int | None:
        slots = np.flatnonzero(self._serial_of == serial)
        return int(slots[0]) if slots.size else None

    def _renumber(self) -> None:
        """Use the serial numbers of requests that have ended again."""
        living = np.flatnonzero(self._alive)
        living = living[living > _KEPT]
        numbers = np.zeros(self._alive.size, np.int64)
        numbers[_KEPT] = _KEPT
        numbers[living] = _KEPT + 1 + np.arange(living.size)
        for column in (self._holder, self._writer, self._serial_of):
            column[:] = numbers.take(column)
        self._next = _KEPT + 1 + living.size
        self._alive[_KEPT + 1 :] = False
        self._alive[_KEPT + 1 : self._next] = True

"""Which request may write to which KV block: the check that no two requests write to one block, and
that nobody writes to a block that others read. Knows slots and block ids; no request ids.

A block belongs to the request that was given it to write until that ends. Blocks that a request
begins with (a cached prefix) are read only, and counted. Most steps give a few blocks to requests
that run on: these are taken one by one, and it is told later, for many steps at once, whose they
are.
"""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]

_WRITTEN: Final = 1
"""A running request writes to it."""
_READ: Final = 2
"""Running requests began with it."""
_NULL: Final = 4
"""The workers' own."""

_FEW: Final = 100
"""Blocks that take less time one by one than numpy's calls do."""


class BlockTaken(Exception):
    """A block cannot be written to. `index` is its place among those that were asked for, `slot`
    that of the request that writes to it, None where others read it or nobody may write to it."""

    def __init__(self, index: int, slot: int | None) -> None:
        super().__init__(f"block number {index} of those asked for is taken")
        self.index = index
        self.slot = slot


class BlockHolders:
    """Belongs to a SlotTable. Blocks are 0 to num_blocks - 1, of which 0 is the workers' own."""

    def __init__(self, num_slots: int, num_blocks: int) -> None:
        self._flags = bytearray(num_blocks)
        """Of each block; 0: it is free."""
        self._flags[0] = _NULL
        self._flag_column = np.frombuffer(self._flags, np.uint8)
        """The same memory."""
        self._num_readers = np.zeros(num_blocks, np.int32)
        self._written = [array("i") for _ in range(num_slots)]
        """The blocks that each slot's request writes to, as far as it was told."""
        self._prefixes: dict[int, Int32s] = {}
        """The blocks that a slot's request began with."""

    def check(self, slots: bytes, block_ids: Sequence[int]) -> None:
        """Raise BlockTaken unless each block is there, nobody holds it, and no other is the same.
        slots: of those that ask for them, a column of uint16."""
        if any(map(self._flags_of, block_ids)):
            raise self._taken(block_ids)
        if len({*block_ids}) < len(block_ids):
            first = {block_id: index for index, block_id in reversed([*enumerate(block_ids)])}
            index = next(i for i, block_id in enumerate(block_ids) if first[block_id] < i)
            raise BlockTaken(index, memoryview(slots).cast("H")[first[block_ids[index]]])

    def take(self, block_ids: Sequence[int]) -> bool:
        """Give blocks to the requests that asked for them, if all of them are there, free and
        different; else nothing happens. hold() or give_back() follows.

        block_ids: none is negative. Raises IndexError: one is not there.
        """
        flags, num_taken = self._flags, 0
        try:
            for block_id in block_ids:
                if flags[block_id]:
                    break
                flags[block_id] = _WRITTEN
                num_taken += 1
            else:
                return True
        except IndexError:
            self.give_back(block_ids[:num_taken])
            raise
        self.give_back(block_ids[:num_taken])
        return False

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Undo take()."""
        for block_id in block_ids:
            self._flags[block_id] = 0

    def check_prefix(self, block_ids: Int32s) -> None:
        """Raise BlockTaken unless each block is there and may be read."""
        wrong = (block_ids < 1) | (block_ids >= len(self._flags))
        if wrong.any():
            raise BlockTaken(int(wrong.argmax()), None)

    def hold(self, slots: bytes, ids: bytes) -> None:
        """Note which request, by its slot (a column of uint16), has each block (a column of int32):
        blocks that were taken, or that check() let pass."""
        blocks = array("i", ids)
        for slot, block_id in zip(array("H", slots), blocks, strict=True):
            self._written[slot].append(block_id)
        self._flag_column[np.frombuffer(blocks, np.int32)] = _WRITTEN

    def admit(self, slots: Sequence[int], prefixes: Sequence[Int32s]) -> None:
        """Begin requests in free slots, with the blocks that they read."""
        for slot, prefix in zip(slots, prefixes, strict=True):
            if prefix.size:
                self._prefixes[slot] = prefix
                self._read(prefix)

    def release(self, slots: Sequence[int]) -> None:
        """End the requests in these slots."""
        for slot in slots:
            self._unmark(slot)
            self._written[slot] = array("i")
            self._prefixes.pop(slot, None)

    @contextmanager
    def without(self, slots: Sequence[int]) -> Iterator[None]:
        """Judge as if the requests in these slots had ended; they have not afterwards."""
        for slot in slots:
            self._unmark(slot)
        try:
            yield
        finally:
            for slot in slots:
                self._mark(slot)

    def _unmark(self, slot: int) -> None:
        self._change_written(slot, ~_WRITTEN & 0xFF, 0)
        prefix = self._prefixes.get(slot)
        if prefix is not None:
            self._num_readers[prefix] -= 1
            self._flag_column[prefix[self._num_readers[prefix] == 0]] &= ~_READ & 0xFF

    def _mark(self, slot: int) -> None:
        self._change_written(slot, 0xFF, _WRITTEN)
        prefix = self._prefixes.get(slot)
        if prefix is not None:
            self._read(prefix)

    def _change_written(self, slot: int, kept: int, added: int) -> None:
        """Keep and add flags of the blocks that a slot's request writes to."""
        written = self._written[slot]
        if len(written) > _FEW:
            places = np.frombuffer(written, np.int32)
            self._flag_column[places] = self._flag_column[places] & kept | added
            return
        flags = self._flags
        for block_id in written:
            flags[block_id] = flags[block_id] & kept | added

    def _read(self, prefix: Int32s) -> None:
        self._num_readers[prefix] += 1
        self._flag_column[prefix] |= _READ

    def _taken(self, block_ids: Sequence[int]) -> BlockTaken:
        """Tell which of these cannot be written to, and who writes to it."""
        index, flags = next(
            (index, flags)
            for index, flags in enumerate(map(self._flags_of, block_ids))
            if flags != 0
        )
        if flags != _WRITTEN:
            return BlockTaken(index, None)
        slots = range(len(self._written))
        return BlockTaken(index, next(s for s in slots if block_ids[index] in self._written[s]))

    def _flags_of(self, block_id: int) -> int:
        """Nobody may write to a block that is not there."""
        return self._flags[block_id] if 0 <= block_id < len(self._flags) else _NULL

"""Tracks write access to KV blocks: no two requests write to one block, and no request writes to a
block that another one reads.

A block belongs to the request that was given it for writing, until the request ends or a window
passes the block. Blocks with which a request begins (a cached prefix) are read-only; their readers
are counted. Most steps give a few blocks to running requests: these are taken one by one, and
assigned to their rows later, for many steps at once. Blocks that windows have passed are freed only
when a requested block seems to be taken.

A row is one request in one KV group: group * num_slots + slot. Columns of rows have the type
`row_code` (of array.array).
"""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from rpc_schema.kv_cache import NULL_BLOCK, BlockGroup

Int32s = NDArray[np.int32]

_WRITTEN: Final = 1
"""A running request writes to it."""
_READ: Final = 2
"""Running requests began with it."""
_NULL: Final = 4
"""The workers' null block."""

_FEW: Final = 100
"""Number of blocks below which a Python loop is faster than numpy's calls."""


class BlockTaken(Exception):
    """A block cannot be written to. `index` is its index among the requested blocks, `row` the row
    of the request that writes to it; None if others read it, or if no request may write to it."""

    def __init__(self, index: int, row: int | None) -> None:
        super().__init__(f"block number {index} of those requested is taken")
        self.index = index
        self.row = row


class BlockHolders:
    """Blocks 0 to num_blocks - 1 of a SlotTable; 0 is the workers' null block."""

    def __init__(self, num_slots: int, num_blocks: int, groups: Sequence[BlockGroup]) -> None:
        self.row_code: Literal["H", "I"] = "H" if len(groups) == 1 else "I"
        """With one group, rows are the slots of the wire."""
        self._num_slots = num_slots
        self._groups = groups
        self._flags = bytearray(num_blocks)
        """Flags of each block; 0: it is free."""
        self._flags[0] = _NULL
        self._flag_column = np.frombuffer(self._flags, np.uint8)
        """View of the same memory."""
        self._num_readers = np.zeros(num_blocks, np.int32)
        self._written = [array("i") for _ in range(len(groups) * num_slots)]
        """Blocks to which each row's request writes, as far as they are assigned."""
        self._prefixes: dict[int, Int32s] = {}
        """Blocks with which a row's request began."""
        self._num_behind = array("i", bytes(4 * len(self._written)))
        """Number of each row's leading blocks that a window has passed: the row no longer holds
        them."""
        self._behind_column = np.frombuffer(self._num_behind, np.int32)
        """View of the same memory."""
        self._emptied: NDArray[np.bool_] | None = None
        """Blocks that no request was given since the workers' cache lost its contents, and all of
        `_kept`; None: it has not lost them."""
        self._kept: set[int] = set()
        """Rows that have KV of weights that were replaced: nobody else may begin with their
        blocks."""

    def check(self, rows: bytes, block_ids: Sequence[int]) -> None:
        """Raise BlockTaken unless each block exists, is free and occurs once. rows: of the requests
        that ask for them."""
        if not block_ids:
            return
        flags = self._flags
        exist = min(block_ids) >= 0 and max(block_ids) < len(flags)
        if not exist or any(map(flags.__getitem__, block_ids)):
            raise self._taken(block_ids)
        if len({*block_ids}) < len(block_ids):
            first = {block_id: index for index, block_id in reversed([*enumerate(block_ids)])}
            index = next(i for i, block_id in enumerate(block_ids) if first[block_id] < i)
            raise BlockTaken(index, memoryview(rows).cast(self.row_code)[first[block_ids[index]]])

    def take(self, block_ids: Sequence[int]) -> bool:
        """Take blocks for the requests that asked for them, if all exist, are free and differ; else
        change nothing. hold() or give_back() follows.

        block_ids: none is negative. Raises IndexError: one does not exist.
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

    def check_prefix(self, block_ids: Int32s, num_behind: int) -> None:
        """Raise BlockTaken unless each block exists and may be read. Any of the first num_behind
        may be the null block."""
        wrong = (block_ids < 1) | (block_ids >= len(self._flags))
        wrong[:num_behind] &= block_ids[:num_behind] != NULL_BLOCK
        if wrong.any():
            raise BlockTaken(int(wrong.argmax()), None)

    def lose_contents(self) -> None:
        """Record that the workers' cache has lost the contents of all blocks."""
        self._emptied = np.ones(len(self._flags), np.bool_)
        self._emptied[NULL_BLOCK] = False

    def leave_weights(self) -> None:
        """Record that the blocks with contents are of other weights than those of later ones, and
        are the present rows' own."""
        self.lose_contents()
        self._kept = {
            row for row, written in enumerate(self._written) if written or row in self._prefixes
        }

    def share_recomputed(self) -> None:
        """Record that the present weights have computed all that the present rows' blocks hold."""
        if self._emptied is not None:
            for row in self._kept:
                self._emptied[np.frombuffer(self._written[row], np.int32)] = False
                prefix = self._prefixes.get(row)
                if prefix is not None:
                    self._emptied[prefix] = False
        self._kept.clear()

    def first_held(self, block_ids: Sequence[int]) -> int | None:
        """Return the first of these blocks that does not exist, or that a request has."""
        flags, end = self._flags, len(self._flags)
        return next((each for each in block_ids if not 0 <= each < end or flags[each]), None)

    def fill(self, block_ids: Sequence[int]) -> None:
        """Record that a step fills blocks that no request has, before its forward pass."""
        if self._emptied is not None:
            self._emptied[[*block_ids]] = False

    def first_emptied(self, block_ids: Sequence[int], row: int | None) -> int | None:
        """Return the first of these blocks that has no contents for a request which has this row,
        or none. They exist."""
        if self._emptied is None:
            return None
        emptied = [i for i in block_ids if self._emptied[i]]
        if emptied and row in self._kept:
            own = {*self._written[row], *self._prefixes.get(row, ())}
            emptied = [i for i in emptied if i not in own]
        return emptied[0] if emptied else None

    def are_filled(self, block_ids: Int32s, num_computed: Int32s) -> NDArray[np.bool_]:
        """Return True for each block that has contents and that no request still has to fill.
        num_computed: tokens of each slot whose steps were sent (any value for free slots). Raises
        BlockTaken as check_prefix does."""
        self.check_prefix(block_ids, 0)
        filled = np.ones(len(self._flags), np.bool_) if self._emptied is None else ~self._emptied
        for number, group in enumerate(self._groups):
            for slot, num_full in enumerate((num_computed // group.block_size).tolist()):
                row = number * self._num_slots + slot
                if self._written[row]:
                    prefix = self._prefixes.get(row)
                    first = max(0, num_full - (0 if prefix is None else prefix.size))
                    filled[np.frombuffer(self._written[row][first:], np.int32)] = False
        chosen: NDArray[np.bool_] = filled[block_ids]
        return chosen

    def hold(self, rows: bytes, ids: bytes) -> None:
        """Assign blocks (a column of int32) to their requests' rows: blocks that were taken, or
        that passed check()."""
        blocks = array("i", ids)
        for row, block_id in zip(array(self.row_code, rows), blocks, strict=True):
            self._written[row].append(block_id)
        column = np.frombuffer(blocks, np.int32)
        self._flag_column[column] = _WRITTEN
        if self._emptied is not None:
            self._emptied[column] = self._are_kept(rows)

    def admit(self, rows: Sequence[int], prefixes: Sequence[Int32s]) -> None:
        """Begin requests in free slots. prefixes: blocks that each row reads; empty if none."""
        for row in rows:
            self._num_behind[row] = 0
        for row, prefix in zip(rows, prefixes, strict=False):
            if prefix.size:
                self._prefixes[row] = prefix
                self._read(prefix[prefix != NULL_BLOCK])
                if self._emptied is not None and self._emptied[prefix].any():
                    self._kept.add(row)

    def release(self, slots: Sequence[int]) -> None:
        """End the requests in these slots."""
        for row in self.rows_of(slots):
            self._mark(row, held=False)
            self._written[row] = array("i")
            self._prefixes.pop(row, None)
            self._kept.discard(row)

    def _are_kept(self, rows: bytes) -> NDArray[np.bool_]:
        """Return True for each of these rows that has KV of weights that were replaced."""
        named = np.frombuffer(rows, self.row_code)
        if not self._kept:
            return np.zeros(named.size, np.bool_)
        return np.isin(named, [*self._kept])

    def leave_behind(self, num_computed: Int32s) -> None:
        """Free the blocks that windows have passed. num_computed: tokens of each slot whose steps
        were sent (any value for free slots). A new holder writes to such a block in a later step
        than any that reads it here."""
        behind = self._behind_column.reshape(-1, self._num_slots)
        for number, group in enumerate(self._groups):
            if group.window is None:
                continue
            now = np.maximum(num_computed - group.window + 1, 0) // group.block_size
            for slot in np.flatnonzero(now > behind[number]).tolist():
                self._let_go(number * self._num_slots + slot, int(now[slot]))

    def _let_go(self, row: int, behind: int) -> None:
        """Free a row's first blocks."""
        before, prefix = self._num_behind[row], self._prefixes.get(row)
        num_read = 0
        if prefix is not None:
            num_read = prefix.size
            passed = prefix[before:behind]
            self._unread(passed[passed != NULL_BLOCK])
        for block_id in self._written[row][max(0, before - num_read) : max(0, behind - num_read)]:
            self._flags[block_id] &= ~_WRITTEN & 0xFF
        self._num_behind[row] = behind

    def rows_of(self, slots: Sequence[int]) -> list[int]:
        """Return the rows of the requests in these slots, slot by slot."""
        starts = range(0, len(self._written), self._num_slots)
        return [start + slot for slot in slots for start in starts]

    @contextmanager
    def without(self, slots: Sequence[int]) -> Iterator[None]:
        """Judge as if the requests in these slots had ended, for the duration of the context."""
        rows = self.rows_of(slots)
        for row in rows:
            self._mark(row, held=False)
        try:
            yield
        finally:
            for row in rows:
                self._mark(row, held=True)

    def _mark(self, row: int, *, held: bool) -> None:
        """Set or clear the flags of a row's blocks."""
        self._change_written(row, held=held)
        prefix = self._read_by(row)
        if prefix is not None:
            (self._read if held else self._unread)(prefix)

    def _read_by(self, row: int) -> Int32s | None:
        """Return the blocks with which a row's request began and that it still sees."""
        prefix = self._prefixes.get(row)
        if prefix is None or self._groups[row // self._num_slots].window is None:
            return prefix
        seen: Int32s = prefix[self._num_behind[row] :]
        held: Int32s = seen[seen != NULL_BLOCK]
        return held

    def _written_by(self, row: int) -> "array[int]":
        """Return the blocks that a row's request writes to, without those a window has passed."""
        behind = self._num_behind[row]
        if not behind:
            return self._written[row]
        prefix = self._prefixes.get(row)
        return self._written[row][max(0, behind - (0 if prefix is None else prefix.size)) :]

    def _change_written(self, row: int, *, held: bool) -> None:
        kept, added = (0xFF, _WRITTEN) if held else (~_WRITTEN & 0xFF, 0)
        written = self._written_by(row)
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

    def _unread(self, prefix: Int32s) -> None:
        self._num_readers[prefix] -= 1
        self._flag_column[prefix[self._num_readers[prefix] == 0]] &= ~_READ & 0xFF

    def _taken(self, block_ids: Sequence[int]) -> BlockTaken:
        """Return the error for the first of these that cannot be written to."""
        index, flags = next(
            (index, flags)
            for index, flags in enumerate(map(self._flags_of, block_ids))
            if flags != 0
        )
        if flags != _WRITTEN:
            return BlockTaken(index, None)
        rows = range(len(self._written))
        return BlockTaken(index, next(r for r in rows if block_ids[index] in self._written_by(r)))

    def _flags_of(self, block_id: int) -> int:
        """Return a block's flags. A block that does not exist is not writable."""
        return self._flags[block_id] if 0 <= block_id < len(self._flags) else _NULL

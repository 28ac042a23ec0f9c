"""The contents of KV blocks, as far as a driver has noted them: a hash for each block, for the next
driver's prefix cache. The same for the slots of the host tier, whose notes come with the steps that
store them.

The rule: a note of a block as of step s holds while the last step that gave the block to a request
to write to is s or an earlier one. It is checked when a note arrives and again when notes are read,
so a note may arrive before or after the steps that it concerns.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from worker_daemon.contracts.arrays import Bools, Int32s, Int64s

UNKNOWN: Final = 2**63 - 1
"""Takes the place of a step number: the contents of the block are unknown. It is later than any
step, so no note of the block holds."""
LAST_STEP: Final = UNKNOWN - 1
"""A step that is not before any other."""
_NOT_NOTED: Final = -1
MAX_RECENT: Final = 64
"""Steps whose writes are gathered: a scattered write to the table takes microseconds, for one block
or for many."""
VERSION_BYTES: Final = 8
"""Bytes of a version in a tag."""

Hashes = npt.NDArray[np.uint8]


def versioned_tag(tag: bytes, version: int) -> bytes:
    """Return a tag by which contents of another version of the weights never match."""
    return version.to_bytes(VERSION_BYTES, "little") + tag


class NotedBlocks(NamedTuple):
    """Blocks whose notes hold."""

    block_ids: Int32s
    """[n], ascending."""
    hashes: Hashes
    """[n, bytes of a hash]"""


class BlockContents:
    """The noted hashes and latest writes of KV blocks. Owned by RequestState. Only the step thread
    adds steps, only the control thread notes (those of the host tier: the step thread, which alone
    changes them); end_epoch, which rewrites both, runs while the daemon takes no notes. Steps are
    seqs of one epoch; 0 stands for all earlier ones."""

    def __init__(self, num_blocks: int) -> None:
        self._written_at: Int64s = np.full(num_blocks, UNKNOWN, np.int64)
        """[num_blocks] the last step that gave the block to a request to write to, without those
        in _recent."""
        self._recent: deque[tuple[Int32s, int]] = deque()
        """The newest writes, in their order: block ids and step."""
        self._settling = threading.Lock()
        self._noted_at: Int64s = np.full(num_blocks, _NOT_NOTED, np.int64)
        """[num_blocks] the step as of which the block was noted."""
        self._hashes: Hashes = np.zeros((num_blocks, 0), np.uint8)
        self._tag = b""
        self.on_loss: Callable[[Bools], None] | None = None
        """Called with [num_blocks], True for those without known contents, whenever some may have
        lost them but by store()."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks, the null block included."""
        return self._written_at.size

    # Step thread.

    def write(self, block_ids: Int32s, seq: int) -> None:
        """Record that a step gives blocks to requests to write to."""
        self._recent.append((block_ids, seq))
        if len(self._recent) > MAX_RECENT:
            self._settle()

    def fail(self, seq: int) -> None:
        """Record that a step has failed: blocks keep their contents if they were noted as of an
        earlier one. The others may be those that the step was to fill."""
        self._settle()
        keeps = (self._noted_at >= self._written_at) & (self._noted_at < seq)
        self._written_at[~keeps] = UNKNOWN
        self._tell_lost(~keeps)

    def forget(self) -> None:
        """Record that no block has known contents any more. Until a step writes to a block, notes
        of it are void, also those that are on their way."""
        self._settle()
        self._written_at.fill(UNKNOWN)
        self._tell_lost(np.ones(self.num_blocks, np.bool_))

    def end_epoch(self, last_seq: int) -> None:
        """Restart the count, and drop the notes that do not hold as of last_seq, the last step
        that is known to have succeeded."""
        self._settle()
        noted_at, written_at = self._noted_at, self._written_at
        holds = (noted_at >= written_at) & (noted_at <= last_seq)
        noted_at[:] = np.where(holds, 0, _NOT_NOTED)
        written_at[written_at != UNKNOWN] = 0
        self._tell_lost(~holds)

    # Control thread.

    def note(self, tag: bytes, block_ids: Int32s, hashes: Hashes, after_seq: int) -> int:
        """Note the contents of blocks [n] as of a step; return how many of these notes hold.
        hashes: [n, bytes of a hash]. Notes of another kind of hash are dropped."""
        if not block_ids.size:
            return 0
        if tag != self._tag or hashes.shape[1] != self._hashes.shape[1]:
            self._noted_at.fill(_NOT_NOTED)
            self._hashes = np.zeros((self.num_blocks, hashes.shape[1]), np.uint8)
            self._tag = tag
        self._settle()
        holds = self._written_at[block_ids] <= after_seq
        noted = block_ids[holds]
        # A void note must not replace one that holds.
        self._hashes[noted] = hashes[holds]
        self._noted_at[noted] = after_seq
        return int(noted.size)

    def distrust(self, block_ids: Int32s) -> None:
        """Drop the notes of blocks."""
        self._noted_at[block_ids] = _NOT_NOTED

    def noted(self, tag: bytes, first: int, last: int, last_seq: int) -> NotedBlocks:
        """Return the blocks of `first` to last - 1 whose notes hold as of step last_seq; none if
        hashes have another tag."""
        self._settle()
        noted_at = self._noted_at[first:last]
        holds = (noted_at >= self._written_at[first:last]) & (noted_at <= last_seq)
        if tag != self._tag:
            holds[:] = False
        block_ids = (np.flatnonzero(holds) + first).astype(np.int32)
        return NotedBlocks(block_ids, self._hashes[block_ids])

    # Step thread, of the host tier.

    def store(self, tag: bytes, block_ids: Int32s, hashes: Hashes, seq: int) -> None:
        """Record that a step fills blocks [n] with known contents. hashes: [n, bytes of a hash]."""
        self.write(block_ids, seq)
        self.note(tag, block_ids, hashes, seq)

    def hold(self, tag: bytes, block_ids: Int32s, hashes: Hashes) -> Bools:
        """Return [n], True for the blocks that have these contents."""
        self._settle()
        if tag != self._tag or hashes.shape[1] != self._hashes.shape[1]:
            return np.zeros(block_ids.size, np.bool_)
        is_noted = self._noted_at[block_ids] >= self._written_at[block_ids]
        same: Bools = is_noted & (self._hashes[block_ids] == hashes).all(axis=1)
        return same

    @property
    def num_known(self) -> int:
        """Number of blocks with known contents. Any thread may read it; it may see a step half
        applied."""
        return int(np.count_nonzero(self._noted_at >= self._written_at))

    # Both.

    def _tell_lost(self, are_lost: Bools) -> None:
        if self.on_loss is not None:
            self.on_loss(are_lost)

    def _settle(self) -> None:
        """Move the recent writes to the table; of several to one block, the last counts."""
        with self._settling:
            recent = [self._recent.popleft() for _ in range(len(self._recent))]
            if recent:
                blocks, steps = zip(*recent, strict=True)
                sizes = [block_ids.size for block_ids in blocks]
                self._written_at[np.concatenate(blocks)] = np.repeat(np.array(steps), sizes)

"""The index of a host tier whose memory outlives the daemon: what each slot holds, so that the next
daemon can take it over.

An entry has a checksum of itself, of its place, and of the checksums in the slot, which are those
of the block's bytes (host_tier.py). A daemon may be killed at any point: a slot loses its entry
before its bytes change, and gets one once the block is there and the step that stored it is known
to have succeeded. So an entry that is torn, or not that of its slot's bytes, is found when it is
taken over, and a bit that changes in a block's bytes when the block is loaded.

Shapes: n slots, K uint32 words that an entry's checksum is of.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rpc_schema.cached_blocks import MAX_BLOCK_HASH_BYTES, MAX_TAG_BYTES
from worker_daemon.contracts.arrays import Bools, Int32s, Int64s
from worker_daemon.device.kept_memory import KeptMapping
from worker_daemon.runner.block_contents import VERSION_BYTES, BlockContents, Hashes
from worker_daemon.runner.connectors.block_files import IDENTITY_BYTES
from worker_daemon.runner.connectors.block_identity import BlockIdentity
from worker_daemon.runner.connectors.checksums import WORD_BYTES, named_keys

FORMAT: Final = 2
"""To be changed with the format of entries or slots, or of the pages that blocks are in."""
_ENTRY: Final = np.dtype(
    [
        ("checksum", "<i8"),
        ("identity", "u1", IDENTITY_BYTES),
        ("tag", "u1", VERSION_BYTES + MAX_TAG_BYTES),
        ("hash", "u1", MAX_BLOCK_HASH_BYTES),
        ("tag_bytes", "u1"),
        ("hash_bytes", "u1"),
        ("unused", "u1", 6),
    ]
)
"""168 bytes. A slot without an entry has 0 hash_bytes."""
_ENTRY_WORDS: Final = _ENTRY.itemsize // WORD_BYTES
_PAGE_BYTES: Final = 4096
_POLL_S: Final = 0.01
_STALE_S: Final = 60.0
"""Time after which it is given up to learn that a step has succeeded."""
_STOP_S: Final = 5.0

_LOG = logging.getLogger(__name__)

_Entries: TypeAlias = npt.NDArray[Any]


class SlotLayout(NamedTuple):
    """Slots behind an index."""

    num_slots: int
    slot_bytes: int
    checksum_bytes: int
    """At the end of each slot."""

    @property
    def index_bytes(self) -> int:
        """Size of the index, a whole number of pages."""
        return -(-self.num_slots * _ENTRY.itemsize // _PAGE_BYTES) * _PAGE_BYTES

    @property
    def total_bytes(self) -> int:
        """Size of index and slots."""
        return self.index_bytes + self.num_slots * self.slot_bytes


class _Stored(NamedTuple):
    """Slots that are to get entries."""

    slots: Int32s
    generations: Int64s
    entries: _Entries
    has_left: Callable[[], None] | None
    """Waits until the blocks are in their slots; None: they are."""
    has_succeeded: Callable[[], bool]
    since: float


class TierIndex:
    """Owned by the worker, as long as the mapping. Slots lose entries on the step thread and get
    them on a thread of its own."""

    def __init__(self, mapping: KeptMapping, layout: SlotLayout, identity: BlockIdentity) -> None:
        """mapping: its head is the index, its body the slots."""
        self._mapping = mapping
        self._layout = layout
        self._identity = identity
        self._entries: _Entries = np.frombuffer(mapping.memory, _ENTRY, layout.num_slots)
        # All of an entry but its checksum, the slot's number, and the checksums in it.
        num_words = _ENTRY_WORDS - 2 + 1 + layout.checksum_bytes // WORD_BYTES
        self._keys = named_keys("tier index", num_words).view(np.uint64)
        self._changing = threading.Lock()
        self._generations: Int64s = np.zeros(layout.num_slots, np.int64)
        """Number of times that each slot has lost its contents."""
        self._waiting: deque[_Stored] = deque()
        self._is_writing = False
        self._has_work = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="host-index", daemon=True)
        self._thread.start()
        self.num_restored = 0
        """Blocks that were taken over from an earlier daemon."""
        self.num_rejected = 0
        """Entries of earlier daemons that were not: damaged, or of other weights or blocks."""

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return self._layout.total_bytes

    @property
    def num_waiting(self) -> int:
        """Number of stores whose slots have no entries yet. Any thread may ask."""
        return len(self._waiting) + self._is_writing

    def restore(self, contents: BlockContents) -> None:
        """Note what earlier daemons have left of these blocks, give up all else, and follow what
        becomes of the contents from now on."""
        with self._changing:
            self._generations += 1  # what waits gets no entry any more
            raw = bytearray(self._layout.num_slots * _ENTRY.itemsize)
            self._mapping.read(0, memoryview(raw))
            entries: _Entries = np.frombuffer(raw, _ENTRY)
            slots = np.flatnonzero(entries["hash_bytes"]).astype(np.int32)
            entries = entries[slots]
            are_right = entries["checksum"] == self._checksums(slots, entries)
            if not self._identity.is_whole:
                are_right[:] = False
            kinds = Counter(map(_kind_of, entries[are_right]))
            tag, width = next(iter(kinds.most_common(1)), ((b"", 0), 0))[0]
            name = np.frombuffer(self._identity.of(tag), np.uint8)
            are_right &= (entries["identity"] == name).all(axis=1)
            are_right &= np.array([_kind_of(each) == (tag, width) for each in entries], np.bool_)
            slots, entries = slots[are_right], entries[are_right]
            self._entries["hash_bytes"][np.setdiff1d(np.arange(self._layout.num_slots), slots)] = 0
        self.num_restored, self.num_rejected = slots.size, int(np.count_nonzero(~are_right))
        contents.store(tag, slots, np.ascontiguousarray(entries["hash"][:, :width]), 0)
        contents.on_loss = self._lose
        if self.num_restored or self.num_rejected:
            _LOG.info(
                "%d blocks of an earlier daemon are in host memory, %d others are given up",
                self.num_restored,
                self.num_rejected,
            )

    # Step thread.

    def replace(self, slots: Int32s) -> None:
        """Remove the entries of slots whose bytes are about to change."""
        with self._changing:
            self._entries["hash_bytes"][slots] = 0
            self._generations[slots] += 1

    def add(
        self,
        tag: bytes,
        slots: Int32s,
        hashes: Hashes,
        has_left: Callable[[], None] | None,
        has_succeeded: Callable[[], bool],
    ) -> None:
        """Give slots [n] entries once their blocks are there and their step has succeeded, unless
        they have lost them by then. tag: of a version of the weights. hashes: [n, bytes of a hash].
        has_left: waits until the blocks are in their slots; None: they are. Both functions are
        called on another thread."""
        entries: _Entries = np.zeros(slots.size, _ENTRY)
        entries["identity"] = np.frombuffer(self._identity.of(tag), np.uint8)
        entries["tag"][:, : len(tag)] = np.frombuffer(tag, np.uint8)
        entries["hash"][:, : hashes.shape[1]] = hashes
        entries["tag_bytes"], entries["hash_bytes"] = len(tag), hashes.shape[1]
        generations = self._generations[slots]
        now = time.monotonic()
        self._waiting.append(_Stored(slots, generations, entries, has_left, has_succeeded, now))
        self._has_work.set()

    def close(self) -> None:
        """Write what can be written, and stop. Idempotent."""
        self._stopping = True
        self._has_work.set()
        self._thread.join(_STOP_S)

    def _lose(self, are_lost: Bools) -> None:
        with self._changing:
            self._entries["hash_bytes"][are_lost] = 0
            self._generations[are_lost] += 1

    # Own thread.

    def _run(self) -> None:
        while not self._stopping:
            self._has_work.wait()
            self._has_work.clear()
            while self._write_ready() and not self._stopping:
                time.sleep(_POLL_S)

    def _write_ready(self) -> bool:
        """Write the entries whose steps have succeeded; return True if others wait."""
        waiting, oldest = [], time.monotonic() - _STALE_S
        self._is_writing = True
        while self._waiting:
            stored = self._waiting.popleft()
            if not self._are_kept(stored).any() or stored.since < oldest:
                continue
            if stored.has_succeeded():
                self._write(stored)
            else:
                waiting.append(stored)
        self._waiting.extend(waiting)
        self._is_writing = False
        return bool(waiting)

    def _write(self, stored: _Stored) -> None:
        if stored.has_left is not None:
            stored.has_left()
        stored.entries["checksum"] = self._checksums(stored.slots, stored.entries)
        with self._changing:
            kept = self._are_kept(stored)
            self._entries[stored.slots[kept]] = stored.entries[kept]

    def _are_kept(self, stored: _Stored) -> Bools:
        kept: Bools = self._generations[stored.slots] == stored.generations
        return kept

    def _checksums(self, slots: Int32s, entries: _Entries) -> Int64s:
        """Return int64 [n] for the entries of these slots, of whose own checksums nothing is
        read."""
        layout, place = self._layout, self._layout.index_bytes
        of_blocks = bytearray(slots.size * layout.checksum_bytes)
        view = memoryview(of_blocks)
        for number, slot in enumerate(slots.tolist()):
            end = place + (slot + 1) * layout.slot_bytes
            first = number * layout.checksum_bytes
            part = view[first : first + layout.checksum_bytes]
            self._mapping.read(end - layout.checksum_bytes, part)
        own = np.ascontiguousarray(entries).view(np.uint32).reshape(slots.size, _ENTRY_WORDS)
        others = np.frombuffer(of_blocks, np.uint32)
        others = others.reshape(slots.size, layout.checksum_bytes // WORD_BYTES)
        words = np.concatenate([own[:, 2:], slots[:, None].view(np.uint32), others], axis=1)
        summed = (words * self._keys).sum(axis=1, dtype=np.uint64)
        checksums: Int64s = summed.view(np.int64)
        return checksums


def _kind_of(entry: Any) -> tuple[bytes, int]:
    """Return the tag of an entry, and the length of its hash."""
    return entry["tag"][: entry["tag_bytes"]].tobytes(), int(entry["hash_bytes"])

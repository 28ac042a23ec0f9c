"""vLLM's prefix cache outlives the server: hashes of its cached blocks are noted on the daemons.
The next server begins with them."""

import logging
import time
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from operator import attrgetter
from typing import Any, Final, NamedTuple

from rpc_schema.errors import (
    WorkerDaemonError,
)
from worker_client.group.outcomes import StepFuture
from worker_client.steps.cached_blocks import CachedBlocks
from worker_client.vllm.settings import LOGGER
from worker_client.worker_group import WorkerGroup

SWEPT_AT_ONCE: Final = 256
"""Blocks looked at after every SWEEP_STEPS-th step. Steps thus cost the same, whatever the cache's
size."""
SWEEP_STEPS: Final = 4
SENT_AT_ONCE: Final = 4096
"""Changed blocks that are sent before all blocks were looked at."""

ROUND_S: Final = 1.0
"""Shortest time between two rounds over all blocks at once, which takes milliseconds."""

_HASH_OF = attrgetter("block_hash")
_LOG = logging.getLogger(LOGGER)


class _WaitingNotes(NamedTuple):
    """Changes that are noted once a step has succeeded."""

    hashes: dict[int, bytes]
    """Hash of each block that has changed."""
    distrusted: Sequence[int]
    after: StepFuture
    """The last step that was sent when they were seen: it and those before it fill the blocks."""


def tag_of(*parts: object) -> bytes:
    """Return the name of a way to hash: what makes equal hashes of equal contents."""
    return blake2b(repr(parts).encode(), digest_size=32).digest()


class PrefixNotes:
    """Notes the hashes of vLLM's cached blocks on the daemons, and restores them at the start.
    Serves one scheduler and one group, on their thread."""

    def __init__(self, group: WorkerGroup, tag: bytes) -> None:
        self._group = group
        self._tag = tag
        self._blocks: Sequence[Any] = ()
        """vLLM's KVCacheBlock of each id."""
        self._noted: list[bytes | None] = []
        """The hash that was noted of each block; None also once it has been seen without one."""
        self._changed: dict[int, bytes] = {}
        self._distrusted: set[int] = set()
        self._next = 0
        """The block to look at next."""
        self._newest: StepFuture | None = None
        self._waiting: _WaitingNotes | None = None
        self._next_round = 0.0
        self._num_steps = 0

    def restore(self, pool: Any) -> int:
        """Take the blocks that an earlier server has noted into vLLM's BlockPool, whose blocks are
        all free; return their number. If the daemons cannot tell, the cache begins empty."""
        self._blocks = pool.blocks
        self._noted = [None] * len(self._blocks)
        try:
            known = self._group.prefixes.get(self._tag)
        except WorkerDaemonError as error:
            _LOG.warning("the prefix cache of earlier servers is not restored: %s", error)
            return 0
        for block_id, row in zip(known.block_ids.tolist(), known.hashes, strict=True):
            block, block_hash = self._blocks[block_id], row.tobytes()
            block.set_block_hash(block_hash)
            pool.cached_block_hash_to_block.insert(block_hash, block)
            self._noted[block_id] = block_hash
        if len(known.block_ids):
            _LOG.info("restored %d cached blocks of earlier servers", len(known.block_ids))
        return len(known.block_ids)

    def proceed(self, newest: StepFuture) -> None:
        """Look at some blocks, and note what has changed. newest: the last step that was sent; it
        and those before it fill all blocks that have a hash."""
        self._newest = newest
        self._num_steps += 1
        if self._num_steps % SWEEP_STEPS:
            return
        if self._look(self._next + SWEPT_AT_ONCE) or len(self._changed) >= SENT_AT_ONCE:
            self._collect(newest)

    def finish_round(self) -> None:
        """Look at the rest of the blocks: there is nothing to compute at the moment. Does so at
        most once in ROUND_S."""
        now = time.monotonic()
        if self._newest is None or now < self._next_round:
            return
        self._next_round = now + ROUND_S
        self._look(len(self._blocks))
        self._collect(self._newest)
        self.settle()

    def _look(self, end: int) -> bool:
        """Look at the blocks up to `end`; return True if these are the last ones."""
        first, self._next = self._next, end
        hashes = list(map(_HASH_OF, self._blocks[first:end]))
        noted = self._noted[first:end]
        if hashes != noted:
            pairs = zip(hashes, noted, strict=True)
            for block_id, (block_hash, known) in enumerate(pairs, first):
                if block_hash is None:
                    self._noted[block_id] = None  # so that equal lists are the usual case
                elif block_hash != known:
                    self._changed[block_id] = block_hash
        if end < len(self._blocks):
            return False
        self._next = 0
        return True

    def distrust(self, block_ids: Iterable[int]) -> None:
        """Drop the notes of blocks whose contents nobody may share."""
        self._distrusted.update(block_ids)
        if self._waiting is not None:
            for block_id in self._distrusted:
                self._waiting.hashes.pop(block_id, None)

    def forget(self) -> None:
        """Note all blocks again: the daemons have dropped their notes, or may have."""
        self._noted = [None] * len(self._blocks)
        self._changed.clear()
        self._newest = self._waiting = None

    def settle(self) -> None:
        """Send what waits for a step, if that has succeeded. To be called when steps have ended."""
        waiting = self._waiting
        if waiting is None or waiting.after.value is None:
            return
        blocks = CachedBlocks.of(list(waiting.hashes), list(waiting.hashes.values()))
        if self._group.prefixes.note(
            self._tag, blocks, waiting.after, distrusted=waiting.distrusted
        ):
            for block_id in waiting.distrusted:
                self._noted[block_id] = None
            for block_id, block_hash in waiting.hashes.items():
                self._noted[block_id] = block_hash
            self._waiting = None

    def _collect(self, newest: StepFuture) -> None:
        """Let changes wait for the newest step, unless others wait already."""
        if self._waiting is not None or not (self._changed or self._distrusted):
            return
        current = {
            block_id: block_hash
            for block_id, block_hash in self._changed.items()
            if self._blocks[block_id].block_hash == block_hash
        }
        self._waiting = _WaitingNotes(current, sorted(self._distrusted), newest)
        self._changed.clear()
        self._distrusted.clear()

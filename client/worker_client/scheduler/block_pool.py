"""KV blocks: references, free blocks, and blocks whose contents another request may share."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple, Protocol, TypeAlias

from rpc_schema.kv_cache import NULL_BLOCK, has_checkpoint

FIRST_BLOCK_ID = 1
"""Block 0 is the workers' null block."""


_GROUP_BYTES: Final = [bytes((group,)) for group in range(256)]

OnEvict: TypeAlias = Callable[[Mapping[int, bytes]], None]
"""Takes keys by block: a key names contents by their hash, and a byte for their group."""

OnFree: TypeAlias = Callable[[Sequence[int]], None]
"""Takes blocks that have no reference any more."""


class PoolChanges(NamedTuple):
    """Changes of the cached blocks, other than by allocation."""

    cached: list[int]
    """Blocks whose contents were recorded, and are still cached."""
    distrusted: list[int]
    """Blocks whose cached contents were dropped because they cannot be trusted: the logits of a
    request were NaN or infinite."""


class FreeBlocks(Protocol):
    """Blocks without references, in the order in which they were freed."""

    def __len__(self) -> int: ...

    def __contains__(self, block_id: int) -> bool: ...

    def take(self, count: int) -> list[int]:
        """Remove so many blocks, the first ones; there are as many."""

    def add(self, block_ids: Iterable[int]) -> None:
        """Add blocks that are not there, the last ones."""

    def remove(self, block_ids: Iterable[int]) -> None:
        """Remove blocks, as far as they are there."""


class PlainFreeBlocks:
    """Free blocks of one kind."""

    def __init__(self, num_blocks: int) -> None:
        self._all: OrderedDict[int, None] = OrderedDict.fromkeys(range(FIRST_BLOCK_ID, num_blocks))

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._all

    def take(self, count: int) -> list[int]:
        """See FreeBlocks."""
        return _take(self._all, count)

    def add(self, block_ids: Iterable[int]) -> None:
        """See FreeBlocks."""
        for block_id in block_ids:  # faster than update()
            self._all[block_id] = None

    def remove(self, block_ids: Iterable[int]) -> None:
        """See FreeBlocks."""
        for block_id in block_ids:
            self._all.pop(block_id, None)


class SortedFreeBlocks:
    """Free blocks of which some have a checkpoint of a request's state (rpc_schema/kv_cache.py).
    Those are kept for borders, as long as there are others."""

    def __init__(self, num_blocks: int, checkpoint_blocks: int) -> None:
        self._every = checkpoint_blocks
        self._plain: OrderedDict[int, None] = OrderedDict()
        self._with_checkpoint: OrderedDict[int, None] = OrderedDict()
        self.add(range(FIRST_BLOCK_ID, num_blocks))

    def __len__(self) -> int:
        return len(self._plain) + len(self._with_checkpoint)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._plain or block_id in self._with_checkpoint

    def take(self, count: int) -> list[int]:
        """Remove so many blocks, those without a checkpoint first."""
        block_ids = _take(self._plain, min(count, len(self._plain)))
        return block_ids + _take(self._with_checkpoint, count - len(block_ids))

    def take_for_border(self) -> int:
        """Remove a block, one with a checkpoint if there is one."""
        return _take(self._with_checkpoint or self._plain, 1)[0]

    def add(self, block_ids: Iterable[int]) -> None:
        """See FreeBlocks: the last of their kind."""
        for block_id in block_ids:
            self._list_of(block_id)[block_id] = None

    def remove(self, block_ids: Iterable[int]) -> None:
        """See FreeBlocks."""
        for block_id in block_ids:
            self._list_of(block_id).pop(block_id, None)

    def _list_of(self, block_id: int) -> OrderedDict[int, None]:
        has_one = has_checkpoint(block_id, self._every)
        return self._with_checkpoint if has_one else self._plain


class RankedFreeBlocks:
    """Free blocks of which the first ones are known as those that are allocated next: as many as
    add_next() was called for."""

    def __init__(self, num_blocks: int) -> None:
        self._next: OrderedDict[int, None] = OrderedDict()
        self._others: OrderedDict[int, None] = OrderedDict.fromkeys(
            range(FIRST_BLOCK_ID, num_blocks)
        )
        self._kept: list[int] = []

    def __len__(self) -> int:
        return len(self._next) + len(self._others)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._others or block_id in self._next

    def take(self, count: int) -> list[int]:
        """See FreeBlocks."""
        block_ids = _take(self._next, min(count, len(self._next)))
        return block_ids + _take(self._others, count - len(block_ids))

    def add(self, block_ids: Iterable[int]) -> None:
        """See FreeBlocks."""
        for block_id in block_ids:
            self._others[block_id] = None

    def remove(self, block_ids: Iterable[int]) -> None:
        """See FreeBlocks."""
        others, next_ = self._others, self._next
        for block_id in block_ids:
            if block_id in next_:
                del next_[block_id]
                self._kept.append(block_id)
            else:
                others.pop(block_id, None)

    @property
    def num_next(self) -> int:
        """Number of blocks that are next."""
        return len(self._next)

    def behind_next(self, count: int) -> list[int]:
        """Return so many blocks that are not, the first ones; fewer if there are not as many."""
        return [*islice(self._others, count)]

    def add_next(self, count: int) -> None:
        """Let so many of those be next, behind the others that are."""
        self._next.update(dict.fromkeys(_take(self._others, count)))

    def take_kept(self) -> list[int]:
        """Return the blocks that were next and are in use again, without having been allocated,
        since the last call."""
        kept, self._kept = self._kept, []
        return kept


def _take(blocks: OrderedDict[int, None], count: int) -> list[int]:
    take = blocks.popitem
    return [take(last=False)[0] for _ in range(count)]


class BlockPool:
    """Reference-counted blocks 1 to num_blocks - 1 for all KV groups, and the hashes of the
    full ones; a block's contents belong to one group.

    A block without references keeps its contents until it is allocated again; the least recently
    freed goes first.
    """

    def __init__(
        self,
        num_blocks: int,
        num_groups: int,
        checkpoint_blocks: int = 0,
        on_evict: OnEvict | None = None,
        on_free: OnFree | None = None,
    ) -> None:
        """checkpoint_blocks: blocks of the first group from a border to the next; 0: no block has a
        checkpoint. on_evict: is told of each block whose cached contents an allocation takes.
        on_free: is told of each block whose last reference is dropped."""
        self._on_evict = on_evict
        self._on_free = on_free
        self._num_refs = [0] * num_blocks
        self._checkpoint_blocks = checkpoint_blocks
        self._sorted = (
            SortedFreeBlocks(num_blocks, checkpoint_blocks) if checkpoint_blocks else None
        )
        self.ranked: RankedFreeBlocks | None = None
        """The free blocks, if somebody is told of evictions, and no block has a checkpoint."""
        self._free: FreeBlocks
        if self._sorted is not None:
            self._free = self._sorted
        elif on_evict is not None:
            self._free = self.ranked = RankedFreeBlocks(num_blocks)
        else:
            self._free = PlainFreeBlocks(num_blocks)
        self._block_of: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._hash_of: dict[int, bytes] = {}
        self._group_of = [0] * num_blocks
        """Group of each block that has a hash. Kept apart from _hash_of: a tuple (hash, group) for
        each block would be one more object for Python's garbage collector to traverse."""
        self._fresh: set[int] = set()
        """Blocks whose contents were recorded since the last take_changes()."""
        self._distrusted: set[int] = set()
        """Blocks whose contents were dropped by forget() since the last take_changes()."""

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated, with or without cached contents."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks, none if it is negative, and forget their cached contents. Check
        num_free first."""
        assert count <= len(self._free), "allocate more blocks than are free"
        block_ids, num_refs = self._free.take(count), self._num_refs
        for block_id in block_ids:
            num_refs[block_id] = 1
        cached = self.keys_of(block_ids)
        if cached:
            if self._on_evict is not None:
                self._on_evict(cached)
            self.forget_blocks(cached)
        return block_ids

    def allocate_from(self, index: int, count: int) -> list[int]:
        """Allocate `count` blocks for the places from `index` on among a request's blocks of the
        first group, of a pool with checkpoints: those that end at borders have checkpoints, as far
        as there are any. Check num_free first."""
        assert self._sorted is not None and count <= len(self._sorted), "see allocate"
        block_ids = []
        for number in range(index + 1, index + count + 1):
            if number % self._checkpoint_blocks:
                block_ids += self.allocate(1)
                continue
            block_id = self._sorted.take_for_border()
            self._num_refs[block_id] = 1
            self.forget_blocks((block_id,))
            block_ids.append(block_id)
        return block_ids

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop a reference to each block, in a request's order: its last blocks are reused first.
        Null blocks are skipped."""
        num_refs, freed = self._num_refs, []
        for block_id in reversed(block_ids):
            if block_id != NULL_BLOCK:
                num_refs[block_id] -= 1
                if num_refs[block_id] == 0:
                    freed.append(block_id)
        self._free.add(freed)
        if self._on_free is not None:
            self._on_free(freed)

    def contents(self, group: int) -> Mapping[bytes, int]:
        """The cached blocks of a group, by hash."""
        return self._block_of[group]

    def find(self, group: int, block_hash: bytes) -> int | None:
        """Return the cached block of a group with this hash, without taking a reference."""
        return self._block_of[group].get(block_hash)

    def num_free_among(self, block_ids: Sequence[int]) -> int:
        """Return how many of these blocks have no reference, null blocks not counted."""
        return sum([self._num_refs[i] == 0 for i in block_ids if i != NULL_BLOCK])

    def hold(self, block_ids: Sequence[int]) -> None:
        """Take a reference to cached blocks. Null blocks are skipped."""
        num_refs, taken = self._num_refs, []
        for block_id in block_ids:
            if block_id != NULL_BLOCK:
                if num_refs[block_id] == 0:
                    taken.append(block_id)
                num_refs[block_id] += 1
        self._free.remove(taken)

    def remember(self, group: int, block_id: int, block_hash: bytes) -> None:
        """Record the contents of a full block. Of equal blocks the first stays the cached one."""
        if block_hash not in self._block_of[group]:
            self._block_of[group][block_hash] = block_id
            self._hash_of[block_id] = block_hash
            self._group_of[block_id] = group
            self._fresh.add(block_id)

    def remember_all(
        self, group: int, block_ids: Sequence[int], block_hashes: Sequence[bytes]
    ) -> None:
        """Record the contents of full blocks, of which no block is cached yet."""
        self._block_of[group].update(zip(block_hashes, block_ids, strict=True))
        self._hash_of.update(zip(block_ids, block_hashes, strict=True))
        self._fresh.update(block_ids)
        for block_id in block_ids:
            self._group_of[block_id] = group

    def remember_border(self, block_id: int, block_hash: bytes) -> None:
        """Record the contents of a full block of the first group that ends at a border, of a pool
        with checkpoints. Of equal blocks, one with a checkpoint becomes the cached one."""
        known = self._block_of[0].get(block_hash)
        if known is not None and self._is_better(block_id, known):
            self.forget_blocks((known,))
        self.remember(0, block_id, block_hash)

    def has_checkpoint(self, block_id: int) -> bool:
        """Return True if a block at a border has a checkpoint, in a pool with checkpoints."""
        return has_checkpoint(block_id, self._checkpoint_blocks)

    def _is_better(self, block_id: int, known: int) -> bool:
        """Return True if a block can have a checkpoint, and an equal one cannot."""
        if not self._checkpoint_blocks:
            return False
        return self.has_checkpoint(block_id) and not self.has_checkpoint(known)

    def restore(self, group: int, block_id: int, block_hash: bytes) -> bool:
        """Record the contents of a block that an earlier driver has filled. Return False, with
        nothing recorded, if it is not free, or known already. Of several, the last to be restored
        is reused last."""
        if block_id not in self._free or block_id in self._hash_of:
            return False
        known = self._block_of[group].get(block_hash)
        if known is not None:
            if group or not self._is_better(block_id, known):
                return False
            self.forget_blocks((known,))
        self.remember(group, block_id, block_hash)
        self._fresh.discard(block_id)  # the daemons have told us
        self._free.remove((block_id,))
        self._free.add((block_id,))
        return True

    def take_changes(self) -> PoolChanges:
        """Return the changes since the last call."""
        changes = PoolChanges(
            [i for i in self._fresh if i in self._hash_of], list(self._distrusted)
        )
        self._fresh.clear()
        self._distrusted.clear()
        return changes

    def hash_of(self, block_id: int) -> bytes | None:
        """Return the hash of a block; None if it is not cached."""
        return self._hash_of.get(block_id)

    def keys_of(self, block_ids: Iterable[int]) -> dict[int, bytes]:
        """Return the keys of the contents of blocks, those of them that are cached: their hash, and
        a byte for their group."""
        hash_of, group_of = self._hash_of, self._group_of
        return {i: hash_of[i] + _GROUP_BYTES[group_of[i]] for i in block_ids if i in hash_of}

    def forget_blocks(self, block_ids: Iterable[int]) -> None:
        """Drop the cached contents of blocks, if they have any: they will be written to."""
        hash_of, group_of, block_of = self._hash_of, self._group_of, self._block_of
        for block_id in block_ids:
            if block_id in hash_of:
                del block_of[group_of[block_id]][hash_of.pop(block_id)]

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Drop the cached blocks with these hashes: their contents cannot be trusted."""
        for of_group in self._block_of:
            for block_hash in hashes:
                block_id = of_group.pop(block_hash, None)
                if block_id is not None:
                    del self._hash_of[block_id]
                    self._distrusted.add(block_id)

    def forget_all(self) -> None:
        """Drop every cached hash: the contents cannot be trusted."""
        for of_group in self._block_of:
            of_group.clear()
        self._hash_of.clear()
        self._fresh.clear()
        self._distrusted.clear()

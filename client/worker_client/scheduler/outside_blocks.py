"""The contents of blocks outside of the KV cache, as the prefix cache sees them: in the ranks' host
memory, in files, in both or in neither. A key is a block's hash and a byte for its KV group."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from worker_client.scheduler.block_pool import OnEvict, OnFree
from worker_client.scheduler.filed_blocks import FetchedBlocks
from worker_client.scheduler.host_tier import HostPlace
from worker_client.scheduler.idle_blocks import IdleBlocks
from worker_client.scheduler.interface import SchedulerLimits
from worker_client.scheduler_output import SchedulerOutput, StepValues
from worker_client.steps.block_moves import BlockMoves, HostMoves
from worker_client.steps.cached_blocks import CachedBlocks


class OutsidePlace(Protocol):
    """One place: contents that the next step can load, and those that it stores. Contents are given
    as keys by block."""

    @property
    def room(self) -> int:
        """Number of blocks that the next step may still load."""

    def held(self, keys: Iterable[bytes]) -> set[bytes]:
        """Return those of the contents that the next step can load."""

    def keep(self, keys: Iterable[bytes]) -> None:
        """Evict none of these contents, which are there, before the next step."""

    def load(self, contents: Mapping[int, bytes]) -> None:
        """Load contents that are kept into blocks with the next step."""

    def cancel_loads(self, block_ids: Collection[int]) -> None:
        """Undo load(): the blocks are filled from other places."""

    def offer(self, key: bytes, block_id: int) -> None:
        """Note that a block has contents that a request has sampled a token from, and keeps them
        until the next step at least."""

    def evict(self, contents: Mapping[int, bytes]) -> None:
        """Note that blocks, which have these contents, lose them with the next step."""

    def take_moves(self, tag: bytes) -> tuple[BlockMoves, ...]:
        """Return what the step that is sent now moves. tag: of the hashes."""

    def fail(self, outputs: Iterable[SchedulerOutput]) -> None:
        """Forget what failed steps, and the one that was being planned, were to move."""

    def blocks_lost(self) -> None:
        """Store nothing that was offered: the KV cache has lost it."""

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forget contents that cannot be trusted. Call it between steps."""

    def forget_all(self) -> None:
        """Forget all contents."""


class OutsideBlocks:
    """The places that a scheduler's limits name, in the order in which contents are taken from
    them: host memory, then files. Owned by a scheduler, and belongs to its thread. Methods without
    a docstring are those of OutsidePlace, for all places.

    A step does all stores before all loads, of whatever places: so a block that the next step loads
    does not have its contents yet.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        """Without a prefix cache nothing is moved: then there is no place."""
        self.tier: HostPlace | None = None
        self.files: FetchedBlocks | None = None
        self._places: list[OutsidePlace] = []
        self._idle = IdleBlocks()
        self._are_idle = True
        """True if all that the next step loads goes to idle blocks."""
        if limits.num_host_blocks and limits.shares_prefixes:
            self.tier = HostPlace(limits.num_host_blocks)
            self._places.append(self.tier)
        if limits.has_kv_files and limits.shares_prefixes:
            self.files = FetchedBlocks()
            self._places.append(self.files)
        self._loads: set[int] = set()
        """Blocks that the next step loads."""
        self._pinned: dict[str, list[bytes]] = {}
        """Contents in host memory that wait for others to be read from files, by request."""

    @property
    def if_any(self) -> "OutsideBlocks | None":
        """This object; None if there is no place."""
        return self if self._places else None

    @property
    def on_evict(self) -> OnEvict | None:
        """Callback of a pool, for the contents that its allocations take."""
        return self.evict if self._places else None

    @property
    def on_free(self) -> OnFree | None:
        """Callback of a pool, for the blocks that requests give back."""
        return None if self.tier is None else self._idle.leave

    @property
    def has_moves(self) -> bool:
        """True if the next step has something to move, for which it is sent if need be. Files can
        wait."""
        return self.tier is not None and self.tier.has_moves

    @property
    def room(self) -> int:
        """Number of blocks that the next step may still load, from any places."""
        return min(place.room for place in self._places)

    def held(self, keys: Iterable[bytes]) -> set[bytes]:
        wanted, *others = [place.held for place in self._places]
        if not others:
            return wanted(keys)
        asked = [*keys]
        return wanted(asked).union(*(each(asked) for each in others))

    def keep(self, keys: Iterable[bytes]) -> None:
        left, (*places, last) = [*keys], self._places
        for place in places:
            held = place.held(left)
            place.keep([key for key in left if key in held])
            left = [key for key in left if key not in held]
        last.keep(left)

    def load(self, contents: Mapping[int, bytes]) -> None:
        loaded_again = self._loads & contents.keys()
        for place in self._places if loaded_again else ():
            place.cancel_loads(loaded_again)
        self._loads.update(contents)
        # Loads beside steps and those that steps wait for are in no order but by steps.
        if not self._idle.have(contents) or not contents.keys().isdisjoint(self.loading_beside):
            self._are_idle = False
        left, (*places, last) = contents, self._places
        for place in places:
            held = place.held(left.values())
            place.load({block_id: key for block_id, key in left.items() if key in held})
            left = {block_id: key for block_id, key in left.items() if key not in held}
        last.load(left)

    def load_beside(self, block_ids: Iterable[int]) -> set[int]:
        """Do those loads of the next step beside steps that are from host memory into these
        blocks; return them."""
        return set() if self.tier is None else self.tier.load_beside(block_ids)

    @property
    def loading(self) -> Collection[int]:
        """Blocks that the next step loads."""
        return self._loads

    @property
    def loading_beside(self) -> Collection[int]:
        """Blocks that are loaded beside steps and have not arrived."""
        return () if self.tier is None else self.tier.loading_beside

    def have_arrived(self, block_ids: Iterable[int]) -> None:
        """Note that what was loaded beside steps is there."""
        if self.tier is not None:
            self.tier.have_arrived(block_ids)

    def offer(self, key: bytes, block_id: int) -> None:
        for place in self._places:
            place.offer(key, block_id)

    def evict(self, contents: Mapping[int, bytes]) -> None:
        if not self._loads.isdisjoint(contents):
            contents = {b: key for b, key in contents.items() if b not in self._loads}
        for place in self._places:
            place.evict(contents)

    def store_ahead(self, contents: Mapping[int, bytes], most: int) -> Collection[int]:
        """Let the next step store contents in host memory, in all no more than `most`. Return the
        blocks whose contents are not there, nor stored."""
        if self.tier is None:
            return contents.keys()
        loaded = self._loads & contents.keys()  # they have not got them yet
        others = {b: key for b, key in contents.items() if b not in loaded} if loaded else contents
        return {*loaded, *self.tier.store(others, most)}

    def give_way(self, keys: Iterable[bytes]) -> None:
        """Let contents be the first to make room in host memory."""
        if self.tier is not None:
            self.tier.slots.give_way(keys)

    def step_ended(self, *, has_tokens: bool) -> None:
        """Note that the oldest step in flight has its result, before its requests end."""
        self._idle.step_ended(has_tokens=has_tokens)

    def take_moves(self, tag: bytes) -> tuple[StepValues, ...]:
        if not self._places:
            return ()
        moves = [each for place in self._places for each in place.take_moves(tag)]
        self._idle.step_sent()
        if not moves:
            return ()
        stored = {block_id for each in moves for block_id in each.stored[0]}
        self._idle.leave(stored)
        are_idle, self._are_idle = self._are_idle and stored.isdisjoint(self._loads), True
        self._loads.clear()
        return tuple(
            replace(each, are_idle=True)
            if are_idle and isinstance(each, HostMoves) and each.loaded.block_ids
            else each
            for each in moves
        )

    def fail(self, outputs: Sequence[SchedulerOutput]) -> None:
        self._idle.steps_failed()
        self._loads.clear()
        for place in self._places:
            place.fail(outputs)

    def blocks_lost(self) -> None:
        for place in self._places:
            place.blocks_lost()

    def forget(self, keys: Iterable[bytes]) -> None:
        lost = [*keys]
        for place in self._places:
            place.forget(lost)

    def forget_all(self) -> None:
        for place in self._places:
            place.forget_all()

    def forget_tier(self) -> None:
        """Forget what is in host memory: a rank may have lost it."""
        if self.tier is not None:
            self.tier.forget_all()

    def restore_tier(self, slots: CachedBlocks) -> int:
        """Take the contents of the slots that an earlier driver has filled; return how many."""
        return 0 if self.tier is None else self.tier.slots.restore(slots)

    def forget_fetched(self) -> None:
        """Forget what was read from files: a rank has lost it."""
        if self.files is not None:
            self.files.forget_all()

    def begin_fetch(
        self, req_id: str, by_group: Sequence[Sequence[bytes]]
    ) -> Sequence[Sequence[bytes]]:
        """Return those of the contents a request could begin with that host memory does not have.
        If there are any, what it has stays there until end_fetch()."""
        tier = self.tier
        if tier is None:
            return by_group
        held = [tier.held(keys) for keys in by_group]
        lacking = [
            [key for key in keys if key not in own]
            for keys, own in zip(by_group, held, strict=True)
        ]
        if any(lacking):
            kept = [key for keys in by_group for key in keys if tier.pin(key, None) is not None]
            self._pinned.setdefault(req_id, []).extend(kept)
        return lacking

    def end_fetch(self, req_id: str) -> None:
        """Let what a request could begin with make room again."""
        kept = self._pinned.pop(req_id, None)
        if kept is not None and self.tier is not None:
            self.tier.slots.unpin(kept)

    def note_fetched(self, keys: Iterable[bytes]) -> None:
        """Note contents that all ranks have read from files."""
        if self.files is not None:
            self.files.fetched(keys)


def keys_of(hashes: Sequence[bytes], num_groups: int) -> Iterator[bytes]:
    """Yield the keys of hashes in all groups."""
    for group in range(num_groups):
        yield from keys_in(group, hashes)


def keys_in(group: int, hashes: Iterable[bytes]) -> list[bytes]:
    """Return the keys of the contents of a group's blocks."""
    own = bytes((group,))
    return [each + own for each in hashes]


def key_of(group: int, block_hash: bytes) -> bytes:
    """Return the key of a block's contents."""
    return block_hash + bytes((group,))

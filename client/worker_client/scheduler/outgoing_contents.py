"""Blocks that another group gets of prompts that this one computes: each goes to host memory with
the step behind the one that has filled it, and may be sent from then on. It is of use once the one
that has filled it has succeeded."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from worker_client.scheduler.block_pool import BlockPool
from worker_client.scheduler.content_names import ContentNames, HeldContents
from worker_client.scheduler.host_tier import HostPlace


class StepNumbers(Protocol):
    """The steps of a scheduler: OpenSteps."""

    @property
    def next(self) -> int:
        """Number of the next step."""

    @property
    def oldest(self) -> int:
        """The number of the oldest step in flight, or of the next one."""

    @property
    def num_failures(self) -> int:
        """Times that steps in flight have failed."""


class StoredContents(NamedTuple):
    """Contents, and the step that stores them, unless they were in their slots before. Those before
    it have filled them."""

    step: int
    contents: HeldContents


@dataclass(slots=True, eq=False)
class _Wanted:
    """Contents of a prompt."""

    lacking: deque[bytes]
    """Names of those that are in no slot yet, in the order in which they are filled."""
    kept: deque[StoredContents] = field(default_factory=deque)
    """Those that are in slots, or will be."""


class OutgoingContents:
    """A view of the scheduler's host tier. Belongs to its thread."""

    def __init__(
        self, tier: HostPlace, pool: BlockPool, names: ContentNames, steps: StepNumbers
    ) -> None:
        self._tier = tier
        self._slots = tier.slots
        self._pool = pool
        self._names = names
        self._steps = steps
        self._wanted: dict[int, _Wanted] = {}
        """By number of the prompt."""

    def want(self, number: int, names: Sequence[bytes]) -> None:
        """Keep contents of a prompt in host memory as they are computed, up to some that find no
        room: until drop(), or release() for those that were taken."""
        # Those without a window first: the others are the last blocks of a prompt.
        self._wanted[number] = _Wanted(deque(sorted(names, key=lambda name: name[-1])))

    def keep_filled(self) -> None:
        """Keep what the steps sent so far have filled. The next step stores what only the KV cache
        has: call it whenever one is about to be planned."""
        for wanted in self._wanted.values():
            if not all(self._is_kept(contents) for _, contents in wanted.kept):
                self._give_back(wanted)
        for wanted in self._wanted.values():
            while wanted.lacking and (slots := self._pin(wanted.lacking[0])) is not None:
                contents = HeldContents(wanted.lacking.popleft(), slots)
                wanted.kept.append(StoredContents(self._steps.next, contents))

    @property
    def must_store(self) -> bool:
        """True if the next step has something to store, and another group waits."""
        return bool(self._wanted) and self._tier.has_moves

    def take(self, number: int) -> list[StoredContents]:
        """Return contents of a prompt that are kept, that steps which were sent store, and that
        were not taken before."""
        wanted = self._wanted[number]
        taken: list[StoredContents] = []
        while wanted.kept and wanted.kept[0].step < self._steps.next:
            if not self._is_kept(wanted.kept[0].contents):
                self._give_back(wanted)
                break
            taken.append(wanted.kept.popleft())
        return taken

    def are_filled(self, step: int) -> bool:
        """Return True if all steps before this one have ended: with success, if num_failures has
        not grown since it was sent."""
        return step <= self._steps.oldest

    @property
    def num_failures(self) -> int:
        """Times that steps in flight have failed."""
        return self._steps.num_failures

    def has_kept(self, number: int) -> bool:
        """Return True if contents of a prompt are kept that were not taken."""
        return bool(self._wanted[number].kept)

    def drop(self, number: int) -> None:
        """Keep no more of a prompt but what was taken."""
        self._give_back(self._wanted.pop(number))

    def release(self, contents: Iterable[HeldContents]) -> None:
        """Let contents go that were taken."""
        self._slots.unpin(self._keys_of(contents))

    def _give_back(self, wanted: _Wanted) -> None:
        """Release what was not taken, and want it again."""
        kept = [contents for _, contents in wanted.kept]
        self.release(kept)
        wanted.lacking.extendleft(each.name for each in reversed(kept))
        wanted.kept.clear()

    def _pin(self, name: bytes) -> tuple[int, ...] | None:
        """Keep contents in their slots; return these, or None if a block is not there, or finds no
        room."""
        blocks = [
            (key, self._pool.find(key[-1], key[:-1]), self._slots.get(key))
            for key in self._names.keys_of(name)
        ]
        if any(block_id is None and slot is None for _, block_id, slot in blocks):
            return None
        slots: list[int] = []
        for key, block_id, _ in blocks:
            slot = self._tier.pin(key, block_id)
            if slot is None:
                self._slots.unpin([pinned for pinned, _, _ in blocks[: len(slots)]])
                return None
            slots.append(slot)
        return tuple(slots)

    def _is_kept(self, contents: HeldContents) -> bool:
        """Return False for contents that were forgotten: their prompt is computed again."""
        keys = self._names.keys_of(contents.name)
        slots = tuple(self._slots.get(key) for key in keys)
        return slots == contents.slots

    def _keys_of(self, contents: Iterable[HeldContents]) -> Iterator[bytes]:
        for each in contents:
            yield from self._names.keys_of(each.name)

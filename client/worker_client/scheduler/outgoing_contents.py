"""Blocks that another group gets of prompts that this one computes: each goes to host memory with
the step that fills it or, if there is no room then, with a later one, and may be sent from then on.
It is of use once the one that fills it has succeeded."""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
    """Contents, and the step that stores them, unless they were in their slots before."""

    step: int
    contents: HeldContents
    filled_before: int
    """They are filled by steps before this one."""


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
            if not all(self._is_kept(each.contents) for each in wanted.kept):
                self._give_back(wanted)
        self._keep({}, (), self._steps.next)

    @property
    def are_wanted(self) -> bool:
        """True if another group waits for contents."""
        return bool(self._wanted)

    def keep_filling(self, filled: Mapping[bytes, int], loaded: Collection[int]) -> None:
        """Keep also what the step fills that was planned last, and which stores it: call it before
        its moves are taken. filled: blocks that it fills, by key. loaded: blocks that it loads:
        before it, they have other contents."""
        self._keep(filled, loaded, self._steps.next - 1)

    def _keep(self, filled: Mapping[bytes, int], loaded: Collection[int], step: int) -> None:
        filled_before = step + bool(filled)
        for wanted in self._wanted.values():
            while wanted.lacking:
                slots = self._pin(wanted.lacking[0], filled, loaded)
                if slots is None:
                    break
                contents = HeldContents(wanted.lacking.popleft(), slots)
                wanted.kept.append(StoredContents(step, contents, filled_before))

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
        kept = [each.contents for each in wanted.kept]
        self.release(kept)
        wanted.lacking.extendleft(each.name for each in reversed(kept))
        wanted.kept.clear()

    def _pin(
        self, name: bytes, filled: Mapping[bytes, int], loaded: Collection[int]
    ) -> tuple[int, ...] | None:
        """Keep contents in their slots; return these, or None if a block is not there, or finds no
        room. filled, loaded: see keep_filling()."""
        keys = self._names.keys_of(name)
        found = [filled.get(key, self._pool.find(key[-1], key[:-1])) for key in keys]
        known = [None if block_id in loaded else block_id for block_id in found]
        blocks = [*zip(keys, known, strict=True)]
        if any(block_id is None and self._slots.get(key) is None for key, block_id in blocks):
            return None
        slots: list[int] = []
        for key, block_id in blocks:
            slot = self._tier.pin(key, block_id, is_filled=key in filled)
            if slot is None:
                self._slots.unpin(keys[: len(slots)])
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

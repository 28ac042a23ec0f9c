"""The transitions of the memory tags by sleep, wake_up and discard. Pure: no torch, no memory, no
clock.

    awake       mapped, with its content
    asleep      unmapped; waking restores it (weights with their content, the KV cache empty)
    discarded   unmapped, and the content is lost
    lost        mapped and zeroed: weights that have to be loaded again
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from rpc_schema.lifecycle import MemoryTag, SleepLevel, TagState

TAGS: Final[tuple[MemoryTag, ...]] = ("weights", "kv_cache")
KEEPING: Final[SleepLevel] = 1
"""The sleep level that keeps the weights on the host."""

_Moves = Mapping[TagState, TagState]
_TO_SLEEP: Final[_Moves] = MappingProxyType({"awake": "asleep", "lost": "discarded"})
_TO_NOTHING: Final[_Moves] = MappingProxyType(
    dict.fromkeys(("awake", "asleep", "lost"), "discarded")
)
_WAKING: Final[_Moves] = MappingProxyType({"asleep": "awake", "discarded": "lost"})


@dataclass(frozen=True, slots=True)
class MemoryTags:
    """The state of every tag. A tag without memory counts as awake."""

    weights: TagState = "awake"
    kv_cache: TagState = "awake"

    def __str__(self) -> str:
        """Return the tags that are not awake: `weights asleep/kv_cache asleep`."""
        return "/".join(f"{tag} {state}" for tag, state in self.states.items() if state != "awake")

    @property
    def states(self) -> dict[MemoryTag, TagState]:
        return {"weights": self.weights, "kv_cache": self.kv_cache}

    def after_sleep(self, level: SleepLevel) -> "MemoryTags":
        """Return the state after a sleep. Level 2 discards the weights, even if they sleep at level
        1."""
        weights = _TO_SLEEP if level == KEEPING else _TO_NOTHING
        return MemoryTags(_move(self.weights, weights), _move(self.kv_cache, _TO_SLEEP))

    def after_wake_up(self, tags: Collection[MemoryTag] | None) -> "MemoryTags":
        """Return the state after a wake-up. tags: None for all. Discarded weights become lost."""
        woken = TAGS if tags is None else tags
        return MemoryTags(
            _move(self.weights, _WAKING) if "weights" in woken else self.weights,
            "awake" if "kv_cache" in woken else self.kv_cache,
        )

    def after_discard(self, tags: Collection[MemoryTag]) -> "MemoryTags":
        """Return the state after a discard, which loses the tags' content, host copies included."""
        return MemoryTags(
            "discarded" if "weights" in tags else self.weights,
            "discarded" if "kv_cache" in tags else self.kv_cache,
        )

    def after_filling(self) -> "MemoryTags":
        """Return the state after all weights were written again."""
        return replace(self, weights="awake")

    def after_dropping_kv_cache(self) -> "MemoryTags":
        """Return the state after the KV cache was dropped."""
        return replace(self, kv_cache="awake")


ALL_AWAKE: Final = MemoryTags()


def _move(state: TagState, moves: _Moves) -> TagState:
    return moves.get(state, state)

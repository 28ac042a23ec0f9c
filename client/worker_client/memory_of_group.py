"""Sleeping memory of a group: which tags sleep, and the operations that restore that state after a
group had to be woken."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias

from rpc_schema.lifecycle import (
    Discard,
    MemoryTag,
    Sleep,
    Status,
    TagState,
    WakeUp,
)

Tags: TypeAlias = Mapping[MemoryTag, TagState]
Build: TypeAlias = partial[Sleep] | partial[WakeUp] | partial[Discard]
_AWAY = ("asleep", "discarded")


def is_away(tags: Tags) -> bool:
    """Return True if some memory is not mapped: steps, warm-up and graphs need all of it."""
    return any(state in _AWAY for state in tags.values())


def common_tags(statuses: Sequence[Status]) -> Tags:
    """Return the tags of all these ranks; nothing if they differ, or there are none. Ranks that
    differ were not brought there by an operation that succeeded."""
    tags = [status.memory_tags for status in statuses]
    return tags[0] if tags and all(each == tags[0] for each in tags) else {}


def way_back(tags: Tags) -> list[tuple[str, Build]]:
    """Return the operations, by name, that bring ranks from awake to these tags. A KV cache that
    was asleep is discarded: it had no content."""
    if tags.get("weights") == "asleep":
        operations: list[tuple[str, Build]] = [("sleep", partial(Sleep, level=1))]
        if tags["kv_cache"] not in _AWAY:
            operations.append(("wake_up", partial(WakeUp, tags=("kv_cache",))))
        return operations
    gone = tuple(tag for tag, state in tags.items() if state in _AWAY)
    return [("discard", partial(Discard, tags=gone))] if gone else []

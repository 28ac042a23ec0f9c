"""Which memory of a group is away, and how a group that had to be woken is brought back to that.
Knows no socket."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from rpc_schema.lifecycle import MemoryTag, Status, TagState
from worker_client.group_channel import Send
from worker_client.worker_client import StepIds, WorkerClient

Tags: TypeAlias = Mapping[MemoryTag, TagState]
_AWAY = ("asleep", "discarded")


def is_away(tags: Tags) -> bool:
    """Tell whether memory is not there: steps, warm-up and graphs need all of it."""
    return any(state in _AWAY for state in tags.values())


def common_tags(statuses: Sequence[Status]) -> Tags:
    """Return what all these ranks have; nothing where they differ, or there are none: a group
    whose ranks differ was not brought there by an operation that succeeded."""
    tags = [status.memory_tags for status in statuses]
    return tags[0] if tags and all(each == tags[0] for each in tags) else {}


def way_back(tags: Tags) -> list[tuple[str, Send]]:
    """Return the operations that bring ranks that are awake to these tags. A KV cache that was
    asleep is discarded: it had no content to keep."""
    if tags.get("weights") == "asleep":
        operations: list[tuple[str, Send]] = [("sleep", _sleep)]
        if tags["kv_cache"] not in _AWAY:
            operations.append(("wake_up", _wake_kv_cache))
        return operations
    gone = tuple(tag for tag, state in tags.items() if state in _AWAY)

    def discard(client: WorkerClient, ids: StepIds) -> None:
        client.discard(ids, gone)

    return [("discard", discard)] if gone else []


def _sleep(client: WorkerClient, ids: StepIds) -> None:
    client.sleep(ids, 1)


def _wake_kv_cache(client: WorkerClient, ids: StepIds) -> None:
    client.wake_up(ids, ("kv_cache",))

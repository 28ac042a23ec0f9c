"""Sleep mode of a group: releases the memory of weights and KV cache on all ranks, and allocates it
again at the same addresses."""

from collections.abc import Callable, Sequence
from functools import partial

from rpc_schema.lifecycle import Discard, MemoryTag, MemoryTagsReply, Sleep, SleepLevel, WakeUp
from worker_client.group.group_channel import GroupChannel
from worker_client.group.outcomes import StepsInFlight
from worker_client.group.waiting import Waiter


class GroupMemory:
    """`WorkerGroup.memory`. Belongs to the group's thread."""

    def __init__(self, channel: GroupChannel, steps: StepsInFlight, waiter: Waiter) -> None:
        self._channel = channel
        self._steps = steps
        self._waiter = waiter
        self.is_half_done = False
        """True from an operation that has failed, perhaps on some ranks only, until one succeeds.
        After the replacement of a rank all are awake then."""

    def sleep(self, level: SleepLevel = 1) -> list[MemoryTagsReply]:
        """Release the memory of weights and KV cache on every rank; addresses stay. Level 1 keeps
        the weights in host memory, level 2 keeps nothing: they must be loaded again after wake_up.
        Repeating it changes nothing.

        Requests are lost as in WorkerGroup.relink(), and blocks have no contents any more: a
        scheduler must forget its cached prefixes.

        Raises:
            CapacityError: a host has no room for the weights. That rank is as it was; others
                may sleep: call wake_up, or sleep again.
            ConfigError: the model was loaded without enable_sleep_mode.
        """
        self._waiter.wait_for_all()
        self._steps.lose_cache("the group was put to sleep")
        return self._ask(partial(Sleep, level=level))

    def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> list[MemoryTagsReply]:
        """Allocate the memory of tags again on every rank, by default of all; in any order. Steps
        are refused until both are awake. Repeating it changes nothing.

        Raises:
            CapacityError: a device has not that much left. That rank stays asleep; others may
                be awake: call it again once there is memory, or sleep.
            ConfigError: as sleep() does.
        """
        wanted = None if tags is None else tuple(tags)
        return self._ask(partial(WakeUp, tags=wanted))

    def discard(self, tags: Sequence[MemoryTag]) -> list[MemoryTagsReply]:
        """Release the memory of tags on every rank, awake or asleep, and keep nothing of it. With
        the KV cache, requests are lost as in sleep().

        Raises:
            ConfigError: as sleep() does.
        """
        self._waiter.wait_for_all()
        if "kv_cache" in tags:
            self._steps.lose_cache("the group's KV cache was discarded")
        return self._ask(partial(Discard, tags=tuple(tags)))

    def _ask(self, build: Callable[..., Sleep | WakeUp | Discard]) -> list[MemoryTagsReply]:
        self.is_half_done = True
        replies = self._channel.ask(build)
        self.is_half_done = False
        return replies

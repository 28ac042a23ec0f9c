"""Profiles of all ranks of a group, which their daemons write as traces."""

from functools import partial
from typing import Literal, TypeAlias

from rpc_schema.lifecycle import Profile, ProfileReply
from worker_client.group.group_channel import LONG_TIMEOUT_S, GroupChannel

ProfileKind: TypeAlias = Literal["torch", "cuda"]


class GroupProfiling:
    """`WorkerGroup.profiling`. Belongs to the group's thread."""

    def __init__(self, channel: GroupChannel) -> None:
        self._channel = channel

    def start(self, prefix: str = "", kind: ProfileKind = "torch") -> list[ProfileReply]:
        """Begin a profile of every rank. After an error some ranks may record: stop() ends that.

        prefix names the traces; without one they have the previous names, and replace those files.

        Raises:
            StateError: a profile runs already.
            ConfigError: the prefix is not a plain name, or traces cannot be written.
        """
        return self._channel.ask(
            partial(Profile, action="start", kind=kind, prefix=prefix), timeout_s=LONG_TIMEOUT_S
        )

    def stop(self, kind: ProfileKind = "torch") -> list[ProfileReply]:
        """End the profile; one of kind torch writes a trace for each rank, which may take minutes.
        It does not fail on ranks that do not record.

        Raises:
            StateError: a profile of the other kind runs.
            ConfigError: traces cannot be written.
            CapacityError: the disk is full.
        """
        return self._channel.ask(
            partial(Profile, action="stop", kind=kind), timeout_s=LONG_TIMEOUT_S
        )

"""Saves a group's weights as a set of files: all ranks write, and keep the files if all have
succeeded."""

import contextlib
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from rpc_schema import lifecycle as lc
from rpc_schema.base import StepReply, StepRequest
from rpc_schema.config import WorkerConfig
from rpc_schema.errors import WorkerDaemonError, WorkerError
from worker_client.errors import DeadlineExceeded
from worker_client.group.group_channel import GroupChannel
from worker_client.group.weights_state import check_same_weights

ReplyT = TypeVar("ReplyT", bound=StepReply)


def save_set(channel: GroupChannel, build: Callable[..., StepRequest[ReplyT]]) -> list[ReplyT]:
    """Have each rank write, and keep the files if all have succeeded; else remove them, as far as
    ranks can be reached. build: returns the request, with the save's id as `save`.

    Raises:
        ContentMismatchError: ranks hold different weights; nothing was written.
        WorkerError: a rank has failed; of an earlier set of this name, nothing is lost.
    """
    statuses = channel.daemons.get_status()
    config = statuses[0].config
    writers = _writers(channel, config)
    check_same_weights(statuses, "" if config is None else config.model.model)
    save = secrets.token_bytes(16)
    try:
        replies = _ask_writers(channel, writers, partial(build, save=save))
    except (WorkerError, DeadlineExceeded):
        _remove(channel, writers, save)
        raise
    try:
        _ask_writers(channel, writers, partial(lc.FinishShardedState, save=save, keep=True))
    except WorkerError as error:
        if error.rank == writers[0]:  # otherwise it may be about to move those files into place
            _remove(channel, writers, save)
        raise
    return replies


def _writers(channel: GroupChannel, config: WorkerConfig | None) -> Sequence[int]:
    """Return the ranks that write a set: of one replica, as those in lockstep have the same parts,
    or of all that share experts."""
    ranks = channel.daemons.ranks
    if config is not None and config.model.enable_expert_parallel:
        return ranks
    return ranks[: len(ranks) // channel.num_replicas]


def _ask_writers(
    channel: GroupChannel, writers: Sequence[int], build: Callable[..., StepRequest[ReplyT]]
) -> list[ReplyT]:
    """Have the ranks that write do an operation."""

    def build_for(rank: int) -> Callable[..., StepRequest[Any]]:
        return build if rank in writers else lc.GetSupportedTasks

    return channel.ask_each(build_for)[: len(writers)]


def _remove(channel: GroupChannel, writers: Sequence[int], save: bytes) -> None:
    with contextlib.suppress(WorkerDaemonError):  # the next save cleans up as well
        _ask_writers(channel, writers, partial(lc.FinishShardedState, save=save, keep=False))

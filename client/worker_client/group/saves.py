"""Saves a group's weights: all ranks write at once, then rank 0 puts the files in place, or all
remove them."""

import contextlib
import secrets
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from rpc_schema.base import StepReply, StepRequest
from rpc_schema.errors import WireError
from rpc_schema.lifecycle import FinishShardedState
from worker_client.errors import ClientError, DeadlineExceeded, RemoteError
from worker_client.group.group_channel import GroupChannel

SHARD_PATTERN = "model-rank-{rank}-part-{part}.safetensors"
SHARD_MAX_SIZE_BYTES = 5 << 30

ReplyT = TypeVar("ReplyT", bound=StepReply)


def save_weights(channel: GroupChannel, build: Callable[..., StepRequest[ReplyT]]) -> list[ReplyT]:
    """Have each rank write, and keep the files if all have succeeded; else remove them, as far as
    ranks can be reached. build: returns the request, with the save's id as `save`. Raises what
    GroupChannel.ask does."""
    save = secrets.token_bytes(16)

    def finish(*, keep: bool) -> None:
        channel.ask(partial(FinishShardedState, save=save, keep=keep))

    def discard() -> None:
        with contextlib.suppress(ClientError, WireError):  # the next save cleans up as well
            finish(keep=False)

    try:
        replies = channel.ask(partial(build, save=save))
    except (RemoteError, DeadlineExceeded):
        discard()
        raise
    try:
        finish(keep=True)
    except RemoteError as error:
        if error.rank == 0:  # otherwise rank 0 may be about to move those files into place
            discard()
        raise
    return replies

"""A save of a group's weights: all ranks write at once, then what they wrote is put in its place,
or removed. Knows neither what is written nor where."""

import contextlib
import secrets
from collections.abc import Callable
from typing import TypeVar

from rpc_schema.codec import StepReplyMessage
from rpc_schema.errors import WireError
from rpc_schema.step import Done
from worker_client.errors import ClientError, DeadlineExceeded, RemoteError
from worker_client.group_channel import GroupChannel
from worker_client.load_chain import LOAD_TIMEOUT_S
from worker_client.worker_client import StepIds, WorkerClient

SHARD_PATTERN = "model-rank-{rank}-part-{part}.safetensors"
SHARD_MAX_SIZE_BYTES = 5 << 30
FINISH_SAVE_TIMEOUT_S = 600.0
"""Removing the files of a large set takes a while."""

ReplyT = TypeVar("ReplyT", bound=StepReplyMessage)


def save_weights(
    channel: GroupChannel,
    operation: str,
    write: Callable[[WorkerClient, StepIds, bytes], None],
    reply_type: type[ReplyT],
) -> list[ReplyT]:
    """Have each rank write(client, ids, the save's id), and keep that where all have; else nothing
    is left of it, as far as ranks can be reached. Raises what GroupChannel.fan_out does."""
    save = secrets.token_bytes(16)
    try:
        replies = channel.fan_out(
            operation,
            lambda client, ids: write(client, ids, save),
            reply_type,
            timeout_s=LOAD_TIMEOUT_S,
        )
    except (RemoteError, DeadlineExceeded):
        _discard(channel, save)
        raise
    try:
        _finish(channel, save, keep=True)
    except RemoteError as error:
        if error.rank == 0:  # else rank 0 may be about to put those files in place
            _discard(channel, save)
        raise
    return replies


def _discard(channel: GroupChannel, save: bytes) -> None:
    with contextlib.suppress(ClientError, WireError):  # the next save cleans up as well
        _finish(channel, save, keep=False)


def _finish(channel: GroupChannel, save: bytes, *, keep: bool) -> None:
    channel.fan_out(
        "finish_sharded_state",
        lambda client, ids: client.finish_sharded_state(ids, save, keep=keep),
        Done,
        timeout_s=FINISH_SAVE_TIMEOUT_S,
    )

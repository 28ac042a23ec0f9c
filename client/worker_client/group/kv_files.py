"""Reads of a group's files of KV blocks, ahead of the steps that load them."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from rpc_schema.cached_blocks import MAX_BLOCKS_AT_ONCE
from rpc_schema.kv_files import FetchKVBlocks
from worker_client.group.group_channel import GroupChannel

ANSWER_TIMEOUT_S = 5.0
"""Limit on a rank's answer, which waits for no disk."""


class FetchProgress(NamedTuple):
    """Progress of a fetch on all ranks."""

    num_ready: int
    """Leading blocks that every rank has in host memory."""
    is_done: bool
    """True if no rank is reading more of them."""


class GroupKVFiles:
    """`WorkerGroup.kv_files`: blocks that the ranks have in files. Belongs to the group's
    thread."""

    def __init__(self, channel: GroupChannel) -> None:
        self._channel = channel

    def fetch(self, tag: bytes, hashes: Sequence[bytes]) -> FetchProgress:
        """Have all ranks read the leading ones of these blocks, and tell how far they have come: a
        step may load those that are ready (steps/block_moves.py). Call it again until it is done.
        Does not wait for the reads.

        tag and hashes: as for GroupPrefixes.note; hashes of one length. Of more than
        MAX_BLOCKS_AT_ONCE, the first ones.

        Raises:
            WorkerError: a rank refuses; names the first one.
            DeadlineExceeded: a rank does not answer.
            WorkerDied: a daemon has ended.
        """
        asked = hashes[:MAX_BLOCKS_AT_ONCE]
        if not asked:
            return FetchProgress(0, is_done=True)
        self._channel.check_usable()
        build = partial(
            FetchKVBlocks,
            epoch=self._channel.epoch,
            block_tag=tag,
            hash_bytes=len(asked[0]),
            hashes=b"".join(asked),
        )
        present = self._channel.daemons.present
        calls = [client.begin(build, ANSWER_TIMEOUT_S) for client in present]
        replies = [call.result() for call in calls]
        return FetchProgress(
            min(reply.num_ready for reply in replies), all(reply.is_done for reply in replies)
        )

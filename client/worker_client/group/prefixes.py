"""Notes of the contents of KV blocks on a group's ranks: sent without waiting, and read where all
ranks have the same."""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np

from rpc_schema import cached_blocks as cb
from rpc_schema.errors import BadFrameError, WorkerDaemonError
from worker_client.errors import config_error
from worker_client.group.group_channel import GroupChannel
from worker_client.group.outcomes import StepFuture, StepsInFlight
from worker_client.steps.cached_blocks import NO_CACHED_BLOCKS, CachedBlocks
from worker_client.wire.control_channel import PendingCall
from worker_client.wire.worker_client import WorkerClient

SEND_TIMEOUT_S: Final = 0.05
"""Limit on sending a note to one rank: it may be lost."""
ANSWER_TIMEOUT_S: Final = 5.0
"""Time after which the answer to a note counts as lost."""


class GroupPrefixes:
    """`WorkerGroup.prefixes`: what the ranks' KV blocks hold, noted for the next driver. Belongs to
    the group's thread."""

    def __init__(self, channel: GroupChannel, steps: StepsInFlight) -> None:
        self._channel = channel
        self._steps = steps
        self._sent: list[tuple[WorkerClient, PendingCall[cb.NoteCachedBlocksReply]]] = []
        """The last note to each rank."""

    def note(
        self,
        tag: bytes,
        blocks: CachedBlocks,
        after: StepFuture,
        *,
        distrusted: Sequence[int] = (),
    ) -> bool:
        """Have all ranks note the contents of full blocks, for get() of the next driver; does not
        wait: a rank that cannot take the note at once lacks it. Return False, with nothing sent,
        while ranks have not answered earlier notes: try again later.

        tag: at most 64 bytes that identify how the hashes were made, with everything that decides a
        block's contents and is not hashed. Notes of another tag replace all others. A hash has at
        most 64 bytes, and names the KV group of its block, if there are several.
        after: a step of execute_model. Once it and those before it have run, the blocks have these
        contents, by the weights of its version. Pass one whose result has arrived: otherwise, and
        for one of an earlier attach, nothing is noted. Later steps may already have given the
        blocks to other requests: ranks allow for that, however late the note arrives.
        distrusted: blocks whose earlier notes are to be dropped.

        Blocks that a running request still has to fill, and those that have lost their contents by
        new weights or sleep, are left out; get() offers none of another version of the weights.

        Raises:
            ClientConfigError: a block does not exist, or a field is out of bounds. Nothing was
                sent.
        """
        if self._are_pending:
            return False
        chosen, result = self._steps.slots.with_contents(blocks), after.value
        if result is None or after.epoch != self._channel.epoch:
            chosen = NO_CACHED_BLOCKS  # seqs of another epoch would mean other steps
        _check(tag, chosen)
        version = 0 if result is None else result.weights_version
        for build in _messages(tag, chosen, after.seq, version, distrusted, self._channel.epoch):
            for client in self._channel.daemons.present:
                try:
                    self._sent.append((client, client.begin(build, SEND_TIMEOUT_S)))
                except WorkerDaemonError:
                    continue  # callers that wait for that rank learn why
        return True

    def get(self, tag: bytes, *, in_host_tier: bool = False) -> CachedBlocks:
        """Return the blocks with known contents on every rank, as noted by this driver and by
        earlier ones; none if their tag is another. A daemon that was started or loaded since has
        none. For a driver that has prepared the group and not yet sent a step.

        A request may begin with such a block as with any that was filled before. in_host_tier:
        return slots of the host tier instead, from which a step may load (steps/block_moves.py).

        Raises:
            WorkerError: a rank refuses; names the first one.
        """
        self._channel.check_usable()
        epoch = self._channel.epoch
        present = self._channel.daemons.present
        ranks = [_read_rank(client, tag, epoch, in_host_tier) for client in present]
        common = ranks[0]
        for other in ranks[1:]:
            common = _common(common, other)
        return common

    @property
    def _are_pending(self) -> bool:
        """True while a rank has not answered the last notes."""
        present = self._channel.daemons.present
        sent_since = time.monotonic() - ANSWER_TIMEOUT_S
        self._sent = [
            (client, call)
            for client, call in self._sent
            if client in present and call.deadline > sent_since and not call.is_answered
        ]
        return bool(self._sent)


def _check(tag: bytes, blocks: CachedBlocks) -> None:
    if not 1 <= len(tag) <= cb.MAX_TAG_BYTES:
        fix = f"use 1 to {cb.MAX_TAG_BYTES} bytes"
        raise config_error("tag", f"{len(tag)} bytes", "its length is out of bounds", fix)
    num_hashes, width = blocks.hashes.shape
    if num_hashes and not 1 <= width <= cb.MAX_BLOCK_HASH_BYTES:
        fix = f"use hashes of 1 to {cb.MAX_BLOCK_HASH_BYTES} bytes"
        raise config_error("hashes", f"{width} bytes", "their length is out of bounds", fix)
    if num_hashes != blocks.block_ids.size:
        fix = f"one for each of {blocks.block_ids.size} blocks"
        raise config_error("hashes", f"{num_hashes} hashes", "they do not fit", fix)


def _messages(
    tag: bytes,
    blocks: CachedBlocks,
    after_seq: int,
    weights_version: int,
    distrusted: Sequence[int],
    epoch: int,
) -> Iterator["partial[cb.NoteCachedBlocks]"]:
    """Yield the messages of notes, without their calls."""
    most = cb.MAX_BLOCKS_AT_ONCE
    for first in range(0, max(len(blocks.block_ids), len(distrusted)), most):
        part = slice(first, first + most)
        yield partial(
            cb.NoteCachedBlocks,
            epoch=epoch,
            block_tag=tag,
            after_seq=after_seq,
            hash_bytes=max(1, blocks.hashes.shape[1]),
            block_ids=blocks.block_ids[part].astype("<i4", copy=False).tobytes(),
            hashes=blocks.hashes[part].tobytes(),
            weights_version=weights_version,
            distrusted=np.array(distrusted[part], "<i4").tobytes(),
        )


def _read_rank(client: WorkerClient, tag: bytes, epoch: int, in_host_tier: bool) -> CachedBlocks:
    pages, first = [NO_CACHED_BLOCKS], 0
    ask = partial(cb.GetCachedBlocks, epoch=epoch, block_tag=tag, in_host_tier=in_host_tier)
    while True:
        build = partial(ask, first_block=first)
        reply = client.ask(build)
        if reply.hash_bytes and reply.block_ids:
            pages.append(_read_page(reply))
        if not reply.next_block:
            break
        if reply.next_block <= first:
            raise BadFrameError("GetCachedBlocksReply.next_block does not advance")
        first = reply.next_block
    filled = [page for page in pages if page.block_ids.size]
    if not filled:
        return NO_CACHED_BLOCKS
    if len({page.hashes.shape[1] for page in filled}) > 1:
        raise BadFrameError("pages of GetCachedBlocksReply have hashes of different lengths")
    block_ids, hashes = zip(*filled, strict=True)
    return CachedBlocks(np.concatenate(block_ids), np.concatenate(hashes))


def _read_page(reply: cb.GetCachedBlocksReply) -> CachedBlocks:
    """Return a page's blocks. Raises BadFrameError: its columns do not fit."""
    num_blocks, rest = divmod(len(reply.block_ids), 4)
    if rest or len(reply.hashes) != num_blocks * reply.hash_bytes:
        raise BadFrameError("the columns of GetCachedBlocksReply do not match")
    hashes = np.frombuffer(reply.hashes, np.uint8).reshape(num_blocks, reply.hash_bytes)
    return CachedBlocks(np.frombuffer(reply.block_ids, "<i4").astype(np.int32), hashes)


def _common(one: CachedBlocks, other: CachedBlocks) -> CachedBlocks:
    """Return the blocks of both that have the same hash."""
    if one.hashes.shape[1] != other.hashes.shape[1]:
        return NO_CACHED_BLOCKS
    block_ids, mine, theirs = np.intersect1d(
        one.block_ids, other.block_ids, assume_unique=True, return_indices=True
    )
    same = (one.hashes[mine] == other.hashes[theirs]).all(axis=1)
    return CachedBlocks(block_ids[same], one.hashes[mine[same]])

"""Moves KV blocks between the host tiers of this group's ranks and those of another group: requests
that daemons answer at once, beside their steps."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from rpc_schema import kv_transfer as kt
from rpc_schema.config import RendezvousAddress
from worker_client.group.group_channel import GroupChannel
from worker_client.wire.control_channel import PendingCall
from worker_client.wire.worker_client import WorkerClient

ANSWER_S: Final = 0.25
"""Time after which the answer to a question counts as lost: a later request takes its place."""
ANSWER_WAIT_S: Final = 0.001
"""Wait for the answers of ranks that have time for them."""


@dataclass(frozen=True, slots=True)
class TransferLink:
    """A transfer link between two groups."""

    number: int
    """Larger than those of earlier links of this process."""
    place: RendezvousAddress
    sources: tuple[kt.KVShard, ...]
    """Each rank of the group that sends, and what it keeps."""
    destinations: tuple[kt.KVShard, ...]
    timeout_s: float
    """Limit on the meeting, and on each move."""


class ExchangedBlocks(NamedTuple):
    """The blocks of contents, in columns."""

    slots: list[int]
    keys: list[bytes]
    kv_groups: bytes
    """A byte each."""
    names: list[bytes]


class BlockMove(NamedTuple):
    """Blocks that move over a link, as one of the groups knows them."""

    number: int
    """1 for the first of a link, then one more each."""
    tag: bytes
    """Tag of the keys."""
    blocks: ExchangedBlocks
    """Names are those of the other group, too, in the same order."""


class MovesReport(NamedTuple):
    """State of a link and its moves on all ranks of a group."""

    is_open: bool
    """All ranks have met."""
    fault: str
    """Why the link is of no use any more; empty while it is."""
    num_ended: int
    """Moves up to this one have ended on every rank."""
    failed: frozenset[int]
    """Those that a rank has not carried out."""


class GroupTransfers:
    """`WorkerGroup.transfers`. Belongs to the group's thread."""

    def __init__(self, channel: GroupChannel) -> None:
        self._channel = channel
        self._asked: list[tuple[WorkerClient, PendingCall[kt.GetKVTransfersReply]]] = []
        self._answers: dict[WorkerClient, kt.GetKVTransfersReply] = {}
        self._ask_again_at = 0.0

    def get_metadata(self) -> tuple[kt.KVShard, ...] | None:
        """Return what the ranks of another group must know of each rank, in rank order; None
        without a host tier.

        Raises:
            ConfigError: another group cannot use their blocks.
            WorkerDied, WorkerError, DeadlineExceeded: a rank does not answer.
        """
        ask = partial(kt.GetKVConnectorHandshakeMetadata, epoch=self._channel.epoch)
        pending = [client.begin(ask) for client in self._channel.daemons.present]
        shards = [call.result().shard for call in pending]
        known = tuple(shard for shard in shards if shard is not None)
        return known if known and len(known) == len(shards) else None

    def open(self, link: TransferLink, *, sends: bool) -> None:
        """Have all ranks begin to meet those of the other group, and leave an earlier link. sends:
        this group is the source. Raises as get_metadata does, and ConfigError: blocks of the groups
        are not alike."""
        self._forget_answers()
        first = 0 if sends else len(link.sources)
        pending = [
            client.begin(
                partial(
                    kt.OpenKVTransfer,
                    epoch=self._channel.epoch,
                    number=link.number,
                    place=link.place,
                    rank=first + index,
                    sources=link.sources,
                    destinations=link.destinations,
                    timeout_ms=round(1000 * link.timeout_s),
                )
            )
            for index, client in enumerate(self._channel.daemons.present)
        ]
        for call in pending:
            call.result()

    def move(self, link: TransferLink, move: BlockMove) -> None:
        """Have all ranks send or receive blocks. Raises as open() does."""
        blocks = move.blocks
        ask = partial(
            kt.MoveKVBlocks,
            epoch=self._channel.epoch,
            number=link.number,
            move=move.number,
            block_tag=move.tag,
            hash_bytes=len(blocks.keys[0]),
            slots=np.array(blocks.slots, "<i4").tobytes(),
            hashes=b"".join(blocks.keys),
            kv_groups=blocks.kv_groups,
            names=b"".join(blocks.names),
        )
        for call in [client.begin(ask) for client in self._channel.daemons.present]:
            call.result()
        self._forget_answers()

    def poll(self, link: TransferLink) -> MovesReport | None:
        """Return a report once all ranks have answered; None if one has not within a moment: call
        it again. Raises as get_metadata does."""
        now = time.monotonic()
        if not self._asked or now >= self._ask_again_at:
            ask = partial(kt.GetKVTransfers, epoch=self._channel.epoch)
            self._answers.clear()
            self._asked = [(client, client.begin(ask)) for client in self._channel.daemons.present]
            self._ask_again_at = now + ANSWER_S
        until = now + ANSWER_WAIT_S
        for client, call in self._asked:
            if client not in self._answers and (reply := call.poll(until)) is not None:
                self._answers[client] = reply
        if len(self._answers) < len(self._asked):
            return None
        replies = [*self._answers.values()]
        self._forget_answers()
        return _report(link, replies)

    def close(self) -> None:
        """Have all ranks leave the link, without waiting: nothing that arrives from then on is
        kept. Raises as get_metadata does."""
        self._forget_answers()
        for client in self._channel.daemons.present:
            client.begin(partial(kt.CloseKVTransfer, epoch=self._channel.epoch))

    def _forget_answers(self) -> None:
        """Ask anew with the next poll(): of a rank's requests only the last is answered."""
        self._asked = []
        self._answers.clear()


def _report(link: TransferLink, replies: Sequence[kt.GetKVTransfersReply]) -> MovesReport:
    others = [reply for reply in replies if reply.number != link.number]
    broken = [reply.fault for reply in replies if reply.state in ("broken", "none")]
    fault = "a rank has left it" if others else ""
    return MovesReport(
        is_open=all(reply.state == "open" for reply in replies) and not others,
        fault=fault or next((each or "it was closed" for each in broken), ""),
        num_ended=min(reply.num_ended for reply in replies),
        failed=frozenset(number for reply in replies for number in reply.failed),
    )

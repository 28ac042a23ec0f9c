"""Moves KV blocks from the host tiers of one group to those of another, whose ranks may divide the
model in another way. All ranks of both groups form a transfer link, over which the source's ranks
send and the destination's receive, beside their steps.

The driver of both groups says which slots move where, as it does for steps (host_tier.py). Daemons
send only what their slots hold under the given hashes, layer by layer while a step fills them. The
destination loads a block as any other of its tier: one whose bytes have changed on the way is
filled with NaN.
"""

from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta

from rpc_schema.base import (
    ContentHash,
    ControlReply,
    ControlRequest,
    Count,
    Name,
    Positive,
    Text,
    Unsigned,
    Value,
)
from rpc_schema.cached_blocks import BlockTag, HashBytes
from rpc_schema.config import RendezvousAddress
from rpc_schema.kv_cache import MAX_GROUPS, DType
from rpc_schema.lifecycle import Acknowledged
from rpc_schema.moved_blocks import MAX_MOVED_BLOCKS, MovedHashes, MovedNumbers

MAX_SHARDS: Final = 256
"""Bound on the ranks of a group in a transfer link."""
MAX_FAILED_MOVES: Final = 1024
"""Failed moves that a rank remembers, the latest ones."""

KVTransferState: TypeAlias = Literal["none", "opening", "open", "broken"]


class KVShardGroup(Value, frozen=True, kw_only=True):
    """A KV group of a shard."""

    num_layers: Count
    """Layers of this rank."""
    sliding_window: Positive | None = None


class KVDraftPages(Value, frozen=True, kw_only=True):
    """The parts that a rank keeps of a draft model in each block of the first group. See KVShard
    for the fields."""

    layer_names: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=4096)]
    first_head: Count
    num_heads: Positive
    rows: Positive
    words: Positive
    dtype: DType
    weights: ContentHash
    """Names the contents of the draft model's weights."""


class KVShard(Value, frozen=True, kw_only=True):
    """The parts that a rank keeps of each block in its host tier: its handshake with the ranks of
    another group. A page is [rows, heads, words], in words of 4 bytes."""

    pp_rank: Count
    tp_rank: Count
    layer_names: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=4096)]
    """In the order of their pages, group after group."""
    first_head: Count
    """Number of its first KV head among the model's. Ranks may have the same heads."""
    num_heads: Positive
    rows: Positive
    """2 * block_size for keys and values, which have a row each for a token."""
    words: Positive
    """Words of a head in a row."""
    dtype: DType
    weights: ContentHash
    """Names the contents of the weights that compute the blocks."""
    groups: Annotated[tuple[KVShardGroup, ...], Meta(max_length=MAX_GROUPS)] = ()
    """Empty: one, without a window."""
    drafts: KVDraftPages | None = None
    """None: this rank keeps nothing of a draft model."""


Shards = Annotated[tuple[KVShard, ...], Meta(min_length=1, max_length=MAX_SHARDS)]


class GetKVConnectorHandshakeMetadata(
    ControlRequest["GetKVConnectorHandshakeMetadataReply"], frozen=True, tag=51, kw_only=True
):
    """Return what the ranks of another group must know of this one. Refused by name if they cannot
    use its blocks."""

    epoch: Unsigned


class GetKVConnectorHandshakeMetadataReply(ControlReply, frozen=True, tag=51, kw_only=True):
    shard: KVShard | None = None
    """None without a host tier."""


class OpenKVTransfer(ControlRequest[Acknowledged], frozen=True, tag=47, kw_only=True):
    """Begin to meet the other ranks of a transfer link, in the place of an earlier link; answered
    before they have met. GetKVTransfers tells when they have."""

    epoch: Unsigned
    number: Unsigned
    """Names the link; grows with each of an epoch."""
    place: RendezvousAddress
    rank: Count
    """Rank of this daemon in the link: the sources come first, then the destinations."""
    sources: Shards
    destinations: Shards
    timeout_ms: Positive
    """Limit on the meeting, on each move, and on the wait for blocks that a step has still to
    store."""


class MoveKVBlocks(ControlRequest[Acknowledged], frozen=True, tag=48, kw_only=True):
    """Send the blocks in these slots, or receive blocks into them; answered at once. The ranks of a
    link do the same moves in the same order. Until the move has ended, the driver has no step store
    to these slots.

    Groups of ranks may divide layers into KV groups in different ways. What both have alike are the
    contents that all KV groups with one sliding window keep of the same tokens: their blocks, one
    of each of these KV groups, have one name. Both name the same contents in the same order.
    """

    epoch: Unsigned
    number: Unsigned
    """Number of the link."""
    move: Positive
    """1 for the first of a link, then one more each."""
    block_tag: BlockTag
    hash_bytes: HashBytes
    slots: MovedNumbers
    """No slot twice."""
    hashes: MovedHashes
    kv_groups: Annotated[bytes, Meta(max_length=MAX_MOVED_BLOCKS)] = b""
    """The KV group of each block, a byte each; empty: the first."""
    names: MovedHashes = b""
    """The name of each block's contents, as long as hashes; empty: hashes."""


class GetKVTransfers(ControlRequest["GetKVTransfersReply"], frozen=True, tag=49, kw_only=True):
    """Return what has become of the moves of the present link."""

    epoch: Unsigned


class GetKVTransfersReply(ControlReply, frozen=True, tag=49, kw_only=True):
    number: Unsigned = 0
    """Number of the link; 0 before the first."""
    state: KVTransferState = "none"
    num_ended: Unsigned = 0
    """All moves up to this one have ended."""
    failed: Annotated[tuple[Unsigned, ...], Meta(max_length=MAX_FAILED_MOVES)] = ()
    """The latest of these that have moved nothing on this rank."""
    fault: Text = ""
    """Why the link is broken, or else the last move has failed."""


class CloseKVTransfer(ControlRequest[Acknowledged], frozen=True, tag=50, kw_only=True):
    """Leave the transfer link. What arrives from now on is not kept."""

    epoch: Unsigned

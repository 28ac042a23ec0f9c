"""Hashes of the contents of KV blocks, which a driver tells the daemons so that the next one finds
its prefix cache. Hashes are opaque to daemons; a tag says how they were made.

They are sent over the control socket, outside the order of seqs, and cost a step nothing. A daemon
knows which step gave a block to a request last, and offers a block only if that step is not later
than the one that a note names. So a note may come late, or never.
"""

from typing import Annotated, Final

from msgspec import Meta

from rpc_schema.base import ControlReply, ControlRequest, Count, Unsigned

MAX_BLOCKS_AT_ONCE: Final = 8192
"""Bound on the blocks of a message."""
MAX_BLOCK_HASH_BYTES: Final = 64
MAX_TAG_BYTES: Final = 64

BlockTag = Annotated[bytes, Meta(min_length=1, max_length=MAX_TAG_BYTES)]
"""Name of a way to make hashes: the function, and all that a hash does not name by itself."""

BlockIds = Annotated[bytes, Meta(max_length=4 * MAX_BLOCKS_AT_ONCE)]
"""Little-endian int32: block ids, of any KV group."""

BlockHashes = Annotated[bytes, Meta(max_length=MAX_BLOCK_HASH_BYTES * MAX_BLOCKS_AT_ONCE)]
"""A hash for each block, all of one length, concatenated."""

HashBytes = Annotated[int, Meta(ge=1, le=MAX_BLOCK_HASH_BYTES)]


class NoteCachedBlocks(ControlRequest["NoteCachedBlocksReply"], frozen=True, tag=43, kw_only=True):
    """Note the contents of full blocks as of the step after_seq: each has its contents once that
    step and those before it have run. A note of another tag, or of hashes of another length,
    replaces all earlier ones.

    A note is void, and stays so, if a step after after_seq gave the block to a request to write to,
    if a step failed, if the weights have another version, or if the cache lost its contents: by new
    weights, Sleep, Discard, a replaced or removed adapter, a warm-up, or a new KV cache. No error
    is reported then.
    """

    epoch: Unsigned
    block_tag: BlockTag
    after_seq: Unsigned
    """A step of this epoch that was sent."""
    hash_bytes: HashBytes
    """Length of each hash."""
    block_ids: BlockIds
    hashes: BlockHashes
    weights_version: Unsigned
    """Number of the version of the weights that have computed the contents."""
    distrusted: BlockIds = b""
    """Blocks whose notes are dropped first: their contents are not to be shared."""


class NoteCachedBlocksReply(ControlReply, frozen=True, tag=43, kw_only=True):
    num_noted: Count
    """Number of notes that are not void yet."""


class GetCachedBlocks(ControlRequest["GetCachedBlocksReply"], frozen=True, tag=44, kw_only=True):
    """Return the blocks whose contents are known, from first_block on."""

    epoch: Unsigned
    block_tag: BlockTag
    """Notes of other tags, and of other versions of the weights, are not returned."""
    first_block: Count = 0
    in_host_tier: bool = False
    """Return slots of the host tier (rpc_schema/host_tier.py) in place of blocks, in the same
    fields."""


class GetCachedBlocksReply(ControlReply, frozen=True, tag=44, kw_only=True):
    """Blocks by ascending id; a reply covers a bounded range of ids, and may be empty."""

    block_ids: BlockIds
    hash_bytes: Annotated[int, Meta(ge=0, le=MAX_BLOCK_HASH_BYTES)]
    """0 if nothing is noted."""
    hashes: BlockHashes
    next_block: Count
    """The first block of the next request; 0 if no block follows."""

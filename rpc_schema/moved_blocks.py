"""Columns of the blocks that a step moves between the KV cache and another place, and how much has
moved."""

from typing import Annotated, Final

from msgspec import Meta

from rpc_schema.base import Unsigned, Value
from rpc_schema.cached_blocks import MAX_BLOCK_HASH_BYTES

MAX_MOVED_BLOCKS: Final = 8192
"""Bound on the blocks that a step stores, and on those that it loads."""

MovedNumbers = Annotated[bytes, Meta(max_length=4 * MAX_MOVED_BLOCKS)]
"""Little-endian int32: block ids, or slots of the host tier."""

MovedHashes = Annotated[bytes, Meta(max_length=MAX_BLOCK_HASH_BYTES * MAX_MOVED_BLOCKS)]
"""A hash for each block, all of one length, concatenated."""


class BlockTraffic(Value, frozen=True, kw_only=True):
    """Blocks that have moved one way."""

    num_bytes: Unsigned = 0
    num_us: Unsigned = 0
    """Microseconds that it took."""


NO_TRAFFIC: Final = BlockTraffic()

"""Files of KV blocks, in a directory of each rank's daemon. A driver names blocks by hash; each
rank has its part of a block in a file, and takes nothing back that it has not checked.

Shapes: S blocks to store, L blocks to load.
"""

from rpc_schema.base import ControlReply, ControlRequest, Count, FramedExtension, Unsigned, Value
from rpc_schema.cached_blocks import BlockHashes, BlockTag, HashBytes
from rpc_schema.moved_blocks import NO_TRAFFIC, BlockTraffic, MovedHashes, MovedNumbers


class FileMoves(FramedExtension, frozen=True, tag=3, kw_only=True):
    """Blocks that a step copies to files, and fetched ones that it copies from host memory, before
    its forward pass: all stores, then all loads. A block to store has the contents that the steps
    before have left; a step may give it to a request, or load into it. With HostTierMoves, the
    stores of both come before the loads of both, and no block is loaded by both.

    Files are written later. A store is in vain, without an error, if there is a file of these
    contents, if too many blocks wait, or if the file system refuses. A load whose block was not
    fetched (FetchKVBlocks), or has other bytes than were stored, fills its block with NaN: requests
    that read it get NO_TOKEN, on any rank (ModelRunnerOutput.invalid_blocks names those of the rank
    that answers).
    """

    block_tag: BlockTag
    hash_bytes: HashBytes
    """Length of each hash."""
    store_blocks: MovedNumbers = b""
    """[S] no block twice."""
    store_hashes: MovedHashes = b""
    load_blocks: MovedNumbers = b""
    """[L] no block twice."""
    load_hashes: MovedHashes = b""
    """No hash twice: a load uses up what was fetched."""


class FetchKVBlocks(ControlRequest["FetchKVBlocksReply"], frozen=True, tag=46, kw_only=True):
    """Read the leading ones of these blocks from files into host memory, for the loads of a step,
    up to the first that is in no file of the present weights. Repeat it until that is done. Blocks
    that no step loads make room for others after half a minute."""

    epoch: Unsigned
    block_tag: BlockTag
    hash_bytes: HashBytes
    hashes: BlockHashes


class FetchKVBlocksReply(ControlReply, frozen=True, tag=46, kw_only=True):
    num_ready: Count
    """Leading blocks that are in host memory."""
    is_done: bool
    """True if no more of them are being read."""


class KVFilesStatus(Value, frozen=True, kw_only=True):
    """A rank's files of KV blocks. Counts are of blocks, since the daemon's start."""

    num_files: Count
    """Those of other weights and models included."""
    size_bytes: Unsigned
    most_bytes: Unsigned
    num_stored: Unsigned
    """Written to files."""
    num_dropped: Unsigned
    """Not written, because too many waited."""
    num_failed: Unsigned
    """Not written, because the file system refused: a full disk, for example."""
    num_loaded: Unsigned
    """Loads that were asked for, the invalid ones included."""
    num_bad_files: Unsigned
    """Files that could not be read, or were cut off or those of other blocks: removed."""
    num_invalid: Unsigned
    """Loads that were not fetched, or did not match their checksum; the files of these are removed
    too."""
    written: BlockTraffic = NO_TRAFFIC
    """Its time is that of a thread which writes files."""
    read: BlockTraffic = NO_TRAFFIC
    """Its time is that of all threads which read files, together."""

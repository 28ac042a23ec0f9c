"""The host tier: KV blocks in the host memory of each rank. The driver decides which block is in
which slot, as it does for blocks of the KV cache, so that all ranks do the same; a daemon keeps
what each slot holds, and takes nothing back that it has not checked.

Shapes: S blocks to store, L blocks to load.
"""

from rpc_schema.base import Count, FramedExtension, Unsigned, Value
from rpc_schema.cached_blocks import BlockTag, HashBytes
from rpc_schema.config import KVTierMemory
from rpc_schema.moved_blocks import NO_TRAFFIC, BlockTraffic, MovedHashes, MovedNumbers


class HostTierMoves(FramedExtension, frozen=True, tag=2, kw_only=True):
    """Blocks that a step copies to the host tier and from there, before its forward pass: all
    stores, then all loads. A block to store has the contents that the steps before have left; a
    step may give it to a request, or load into it. Those of num_filled are the exception.

    A load whose slot does not hold this hash, of this tag and of the present weights, or whose
    bytes have changed, fills its block with NaN: requests that read it get NO_TOKEN, on any rank
    (ModelRunnerOutput.invalid_blocks names those of the rank that answers). What a failed step has
    stored is not kept.
    """

    block_tag: BlockTag
    hash_bytes: HashBytes
    """Length of each hash."""
    store_blocks: MovedNumbers = b""
    """[S] no block twice, but once more among those of num_filled."""
    store_slots: MovedNumbers = b""
    """[S] no slot twice, and none of load_slots."""
    store_hashes: MovedHashes = b""
    load_blocks: MovedNumbers = b""
    """[L] no block twice."""
    load_slots: MovedNumbers = b""
    """[L]"""
    load_hashes: MovedHashes = b""
    num_beside: Count = 0
    """The last so many loads run beside this step and those after it, none of which waits for them
    but one that gives their blocks to a request, or moves them.
    ModelRunnerOutput.arrived_blocks tells when they are there."""
    are_idle: bool = False
    """The blocks to load are of no account to the steps before this one, which may still run, nor
    are they stored by this one: so the loads wait for none of them."""
    num_filled: Count = 0
    """The last so many stores are of blocks as this step leaves them: while it is computed, as far
    as layers have been written, else behind its forward pass."""


class HostTierStatus(Value, frozen=True, kw_only=True):
    """A rank's host tier. Counts are since the KV cache was made."""

    num_slots: Count
    num_held: Count
    """Slots with known contents."""
    size_bytes: Unsigned
    """Without the checksums of the blocks."""
    is_pinned: bool
    """False while its memory is being page-locked, and on the CPU."""
    num_stored: Unsigned
    num_loaded: Unsigned
    """Loads that were asked for, the invalid ones included."""
    num_invalid: Unsigned
    """Loads that did not match."""
    num_sent: Unsigned = 0
    """Blocks sent to another group (rpc_schema/kv_transfer.py)."""
    num_received: Unsigned = 0
    """Blocks received from another group."""
    num_restored: Unsigned = 0
    """Blocks that were taken over from an earlier daemon (worker-daemon serve --kv-host-dir)."""
    num_rejected: Unsigned = 0
    """Blocks of earlier daemons that were not: damaged, or of other weights or another layout."""
    file_bytes: Unsigned = 0
    """Size of the file that is left to the next daemon, with checksums and index; 0: there is
    none."""
    num_failed: Unsigned = 0
    """Blocks of moves to another group, or from one, that have failed."""
    stored: BlockTraffic = NO_TRAFFIC
    """Its time is that of the copies, as for `loaded`."""
    loaded: BlockTraffic = NO_TRAFFIC
    sent: BlockTraffic = NO_TRAFFIC
    """Its time is that of the moves, without the wait for blocks that a step has still to store."""
    received: BlockTraffic = NO_TRAFFIC
    memory: KVTierMemory = "host"
    """Place of its memory (CacheConfig.kv_tier_memory)."""
    num_mapped: Unsigned = 0
    """Those of num_received that this rank's device has read from the other's memory."""

"""Handles control requests for the contents of KV blocks: checks sender and values;
runner/block_contents.py keeps the notes, runner/connectors/filed_blocks.py the files.

Only the lease's holder may note contents, and an attach takes the lease before it is posted to the
step thread. So no note of an epoch comes after the step thread has ended that epoch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from rpc_schema import cached_blocks as cb
from rpc_schema.codec import ControlMessage, ControlReplyMessage
from rpc_schema.kv_cache import NULL_BLOCK
from rpc_schema.kv_files import FetchKVBlocks, FetchKVBlocksReply
from worker_daemon.contracts.arrays import Int32s
from worker_daemon.errors import config_error
from worker_daemon.runner.block_contents import BlockContents, versioned_tag
from worker_daemon.server.progress import Progress

_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class CachedBlocksHandler:
    """Answers every request of rpc_schema/cached_blocks.py and kv_files.py, only for the lease
    holder."""

    _need_attached: Callable[[int], None]
    """Raises unless the epoch is the attached driver's."""
    _progress: Progress

    @property
    def handlers(self) -> Mapping[type[ControlMessage], Callable[..., ControlReplyMessage]]:
        """Return the method for each request."""
        return {
            cb.NoteCachedBlocks: self._note_cached_blocks,
            cb.GetCachedBlocks: self._get_cached_blocks,
            FetchKVBlocks: self._fetch_kv_blocks,
        }

    def _note_cached_blocks(self, message: cb.NoteCachedBlocks) -> ControlReplyMessage:
        """Raises as need_attached does, and ConfigError: a block does not exist, or has no hash.
        Then nothing is noted."""
        self._need_attached(message.epoch)
        contents, version = self._contents()
        if contents is None:
            return cb.NoteCachedBlocksReply(call=message.call, num_noted=0)
        block_ids = _read("block_ids", message.block_ids, contents.num_blocks)
        distrusted = _read("distrusted", message.distrusted, contents.num_blocks)
        expected = block_ids.size * message.hash_bytes
        if len(message.hashes) != expected:
            problem = f"{block_ids.size} blocks have {expected} bytes of hashes"
            raise config_error("hashes", f"{len(message.hashes)} bytes", problem, "send as many")
        hashes = np.frombuffer(message.hashes, np.uint8).reshape(-1, message.hash_bytes)
        contents.distrust(distrusted)
        if message.weights_version != version:
            return cb.NoteCachedBlocksReply(call=message.call, num_noted=0)
        tag = versioned_tag(message.block_tag, version)
        num_noted = contents.note(tag, block_ids, hashes, message.after_seq)
        return cb.NoteCachedBlocksReply(call=message.call, num_noted=num_noted)

    def _get_cached_blocks(self, message: cb.GetCachedBlocks) -> ControlReplyMessage:
        self._need_attached(message.epoch)
        contents, version = self._contents()
        if message.in_host_tier:
            contents = self._progress.snapshot.description.host_contents
        if contents is None:
            return _no_blocks(message.call)
        first, end = message.first_block, contents.num_blocks
        last = min(end, first + cb.MAX_BLOCKS_AT_ONCE)
        # Steps that are sent but have not run yet may still fill a block that is noted.
        tag = versioned_tag(message.block_tag, version)
        noted = contents.noted(tag, first, last, self._progress.last_seq)
        if not noted.block_ids.size and last >= end:
            return _no_blocks(message.call)
        return cb.GetCachedBlocksReply(
            call=message.call,
            block_ids=noted.block_ids.astype("<i4", copy=False).tobytes(),
            hash_bytes=noted.hashes.shape[1],
            hashes=noted.hashes.tobytes(),
            next_block=last if last < end else 0,
        )

    def _fetch_kv_blocks(self, message: FetchKVBlocks) -> ControlReplyMessage:
        """Raises as need_attached does, and ConfigError: the hashes do not fit."""
        self._need_attached(message.epoch)
        width, raw = message.hash_bytes, message.hashes
        if len(raw) % width:
            problem = f"it is no whole number of hashes of {width} bytes"
            raise config_error("hashes", f"{len(raw)} bytes", problem, "send whole ones")
        filed = self._progress.snapshot.description.filed
        if filed is None:
            return FetchKVBlocksReply(call=message.call, num_ready=0, is_done=True)
        hashes = [raw[first : first + width] for first in range(0, len(raw), width)]
        fetched = filed.fetch(message.block_tag, hashes)
        return FetchKVBlocksReply(
            call=message.call, num_ready=fetched.num_ready, is_done=fetched.is_done
        )

    def _contents(self) -> tuple[BlockContents | None, int]:
        """Return what is known of the blocks, if there are any, and the weights' version."""
        description = self._progress.snapshot.description
        weights = description.weights()
        return description.block_contents, 0 if weights is None else weights.version


def _no_blocks(call: int) -> cb.GetCachedBlocksReply:
    return cb.GetCachedBlocksReply(call=call, block_ids=b"", hash_bytes=0, hashes=b"", next_block=0)


def _read(field: str, raw: bytes, num_blocks: int) -> Int32s:
    """Return a column of block ids. Raises ConfigError."""
    if len(raw) % _ITEM_BYTES:
        problem = "it is not a sequence of int32"
        raise config_error(field, f"{len(raw)} bytes", problem, "send little-endian int32")
    block_ids = np.frombuffer(raw, "<i4")
    outside = (block_ids <= NULL_BLOCK) | (block_ids >= num_blocks)
    if outside.any():
        block_id = int(block_ids[int(outside.argmax())])
        raise config_error(field, block_id, "there is no such block", f"1 to {num_blocks - 1}")
    return block_ids.astype(np.int32, copy=False)

"""Handles control requests for blocks that move between groups: checks the sender;
runner/connectors/peers.py moves them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rpc_schema import kv_transfer as kt
from rpc_schema.codec import ControlMessage, ControlReplyMessage
from rpc_schema.lifecycle import Acknowledged
from worker_daemon.errors import config_error
from worker_daemon.server.progress import Progress
from worker_daemon.worker.description import KVPeers


@dataclass(frozen=True, slots=True, eq=False)
class KVTransferHandler:
    """Answers every request of rpc_schema/kv_transfer.py, only for the lease holder."""

    _need_attached: Callable[[int], None]
    """Raises unless the epoch is the attached driver's."""
    _progress: Progress

    @property
    def handlers(self) -> Mapping[type[ControlMessage], Callable[..., ControlReplyMessage]]:
        """Return the method for each request."""
        return {
            kt.GetKVConnectorHandshakeMetadata: self._get_metadata,
            kt.OpenKVTransfer: self._open,
            kt.MoveKVBlocks: self._move,
            kt.GetKVTransfers: self._get_transfers,
            kt.CloseKVTransfer: self._close,
        }

    def _get_metadata(self, message: kt.GetKVConnectorHandshakeMetadata) -> ControlReplyMessage:
        self._need_attached(message.epoch)
        peers = self._progress.snapshot.description.peers
        shard = None if peers is None else peers.shard
        return kt.GetKVConnectorHandshakeMetadataReply(call=message.call, shard=shard)

    def _open(self, message: kt.OpenKVTransfer) -> ControlReplyMessage:
        self._need_attached(message.epoch)
        self._peers.open(message)
        return Acknowledged(call=message.call)

    def _move(self, message: kt.MoveKVBlocks) -> ControlReplyMessage:
        self._need_attached(message.epoch)
        self._peers.move(message)
        return Acknowledged(call=message.call)

    def _get_transfers(self, message: kt.GetKVTransfers) -> ControlReplyMessage:
        self._need_attached(message.epoch)
        peers = self._progress.snapshot.description.peers
        return (
            kt.GetKVTransfersReply(call=message.call)
            if peers is None
            else peers.report(message.call)
        )

    def _close(self, message: kt.CloseKVTransfer) -> ControlReplyMessage:
        self._need_attached(message.epoch)
        peers = self._progress.snapshot.description.peers
        if peers is not None:
            peers.close()
        return Acknowledged(call=message.call)

    @property
    def _peers(self) -> KVPeers:
        peers = self._progress.snapshot.description.peers
        if peers is None:
            problem = "this rank has no host tier, or not yet"
            fix = "load the group with one"
            raise config_error("cache.kv_host_memory_bytes", 0, problem, fix)
        return peers

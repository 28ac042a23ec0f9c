"""Handles control requests for uploads: checks sender and state; worker/uploads.py keeps the
tensors. A chunk takes the main thread about a millisecond, mostly without the GIL."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from rpc_schema import lifecycle as lc
from rpc_schema import uploads as up
from rpc_schema.codec import ControlMessage, ControlReplyMessage
from rpc_schema.errors import StateError
from worker_daemon.server.progress import Progress
from worker_daemon.server.session.draining import Draining
from worker_daemon.worker.uploads import Uploads

_WITHOUT_MODEL: Final = ("CREATED", "DEVICE_READY")


@dataclass(frozen=True, slots=True, eq=False)
class UploadHandler:
    """Answers every request of rpc_schema/uploads.py, only for the lease holder."""

    _uploads: Uploads
    _need_attached: Callable[[int], None]
    """Raises unless the epoch is the attached driver's."""
    _draining: Draining
    _progress: Progress

    @property
    def handlers(self) -> Mapping[type[ControlMessage], Callable[..., ControlReplyMessage]]:
        """Return the method for each request."""
        return {
            up.UploadChunk: self._upload_chunk,
            up.FindUploads: self._find_uploads,
            up.ReadUpload: self._read_upload,
            up.DropUploads: self._drop_uploads,
        }

    def _upload_chunk(self, message: up.UploadChunk) -> ControlReplyMessage:
        """Raises as need_attached, the draining and Uploads.put do; StateError below
        MODEL_LOADED."""
        self._need_attached(message.epoch)
        self._draining.check_takes_drivers()
        load = self._progress.snapshot.state.load
        if load in _WITHOUT_MODEL:
            problem = f"the state is {load}: uploads are for the steps of a model"
            raise StateError(problem, fix="load it first, up to MODEL_LOADED")
        return up.UploadChunkReply(call=message.call, is_complete=self._uploads.put(message))

    def _find_uploads(self, message: up.FindUploads) -> ControlReplyMessage:
        self._need_attached(message.epoch)
        found = [self._uploads.get(name) is not None for name in message.content_hashes]
        return up.FindUploadsReply(call=message.call, are_complete=tuple(found))

    def _read_upload(self, message: up.ReadUpload) -> ControlReplyMessage:
        """Raises as need_attached and Uploads.read do."""
        self._need_attached(message.epoch)
        upload, data = self._uploads.read(message.content_hash, message.offset)
        shape = upload.array.shape
        return up.ReadUploadReply(call=message.call, dtype=upload.dtype, shape=shape, data=data)

    def _drop_uploads(self, message: up.DropUploads) -> ControlReplyMessage:
        self._need_attached(message.epoch)
        self._uploads.drop(message.content_hashes)
        return lc.Acknowledged(call=message.call)

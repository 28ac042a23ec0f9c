"""The files of a rank's KV blocks: which file has a block, and how far the daemon's traffic with
them has come. Outlives the KV cache, and holds none of its memory."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from rpc_schema.kv_files import KVFilesStatus
from worker_daemon.models.weight_state import WeightState
from worker_daemon.runner.connectors.block_files import IDENTITY_BYTES, FileName, ReadProgress
from worker_daemon.runner.connectors.file_traffic import FileTraffic


@dataclass(slots=True, eq=False)
class FiledBlocks:
    """Any thread may call it; the step thread counts."""

    traffic: FileTraffic
    weights: Sequence[WeightState]
    """The states of the weights that compute the blocks: the model's, and the draft model's."""
    layout: bytes
    """All else that decides the bytes of a block and is not hashed: the configuration, the pages,
    and which part of them this rank has."""
    block_bytes: int
    page_locks: bool
    """True for a GPU."""
    num_loaded: int = 0
    num_invalid: int = 0
    _life: bytes = field(default_factory=lambda: os.urandom(16))
    """Names this object. Weights that were sent have an identity by the updates that have sent
    them, which another daemon may give to other weights."""

    def names(self, tag: bytes, hashes: Sequence[bytes]) -> list[FileName]:
        """Return the files of blocks, by the present weights. tag: of the hashes."""
        digest = blake2b(digest_size=IDENTITY_BYTES)
        for part in (tag, self.layout, *self._weights()):
            digest.update(len(part).to_bytes(8, "little") + part)
        identity = digest.digest()
        return [FileName(identity, each) for each in hashes]

    def _weights(self) -> list[bytes]:
        parts = []
        for state in self.weights:
            report = state.report  # one value: another thread may be changing the state
            identity = report.identity
            parts += [report.version.to_bytes(8, "little"), identity.content]
            parts.append(identity.stamps or self._life)
        return parts

    def fetch(self, tag: bytes, hashes: Sequence[bytes]) -> ReadProgress:
        """See FileTraffic.fetch."""
        names = self.names(tag, hashes)
        return self.traffic.fetch(names, self.block_bytes, page_locks=self.page_locks)

    def status(self) -> KVFilesStatus:
        """Return the present state; counts of the last steps may lack."""
        files, counts = self.traffic.files, self.traffic.counts
        return KVFilesStatus(
            num_files=files.num_files,
            size_bytes=files.size_bytes,
            most_bytes=files.most_bytes,
            num_stored=counts.num_written,
            num_dropped=counts.num_dropped,
            num_failed=counts.num_failed,
            num_loaded=self.num_loaded,
            num_bad_files=counts.num_bad_files,
            num_invalid=self.num_invalid,
        )

"""The files of a rank's KV blocks: which file has a block, and how far the daemon's traffic with
them has come. Outlives the KV cache, and holds none of its memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from rpc_schema.kv_files import KVFilesStatus
from worker_daemon.runner.connectors.block_files import FileName, ReadProgress
from worker_daemon.runner.connectors.block_identity import BlockIdentity
from worker_daemon.runner.connectors.file_traffic import FileTraffic


@dataclass(slots=True, eq=False)
class FiledBlocks:
    """Any thread may call it; the step thread counts."""

    traffic: FileTraffic
    identity: BlockIdentity
    block_bytes: int
    page_locks: bool
    """True for a GPU."""
    num_loaded: int = 0
    num_invalid: int = 0

    def names(self, tag: bytes, hashes: Sequence[bytes]) -> list[FileName]:
        """Return the files of blocks, by the present weights. tag: of the hashes."""
        identity = self.identity.of(tag)
        return [FileName(identity, each) for each in hashes]

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
            written=counts.written.status(),
            read=counts.read.status(),
        )

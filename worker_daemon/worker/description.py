"""The worker's state between operations: a value that any thread may read; and what it tells in
between."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from rpc_schema.config import WorkerConfig
from rpc_schema.expert_placement import ExpertMoves, RankPlacement
from rpc_schema.host_tier import HostTierStatus
from rpc_schema.kv_cache import KVCacheConfig
from rpc_schema.kv_files import KVFilesStatus
from rpc_schema.kv_transfer import (
    GetKVTransfersReply,
    KVShard,
    MoveKVBlocks,
    OpenKVTransfer,
)
from rpc_schema.lifecycle import KVCacheAdvice, MemoryTag, TagState
from worker_daemon.models.weight_state import WeightReport
from worker_daemon.runner.block_contents import BlockContents
from worker_daemon.runner.connectors.block_files import ReadProgress
from worker_host.draft_counts import DraftCounts


class KVFiles(Protocol):
    """The files of a rank's KV blocks: runner/connectors/filed_blocks.py:FiledBlocks, which imports
    torch."""

    def fetch(self, tag: bytes, hashes: Sequence[bytes]) -> ReadProgress:
        """Read blocks into host memory, or go on with it."""

    def status(self) -> KVFilesStatus:
        """Return the present state; counts of the last steps may lack."""


class KVPeers(Protocol):
    """Moves blocks to another group and from there: runner/connectors/peers.py:PeerTransfers."""

    @property
    def shard(self) -> KVShard:
        """This rank, as the ranks of another group must know it."""

    def open(self, message: OpenKVTransfer) -> None:
        """Begin to meet the members of a transfer link."""

    def move(self, message: MoveKVBlocks) -> None:
        """Queue a move."""

    def report(self, call: int) -> GetKVTransfersReply:
        """Return what has become of moves."""

    def close(self) -> None:
        """Leave the link."""


class MoveEnd(NamedTuple):
    """The end of a move of experts."""

    epoch: int
    seq: int
    """Seq of its MoveExperts, as epoch is its epoch."""
    layer: int
    fault: str
    """Empty: the weights are there."""
    is_dropped: bool
    """True if it was dropped for another operation."""


OnMoveEnd: TypeAlias = Callable[[MoveEnd], None]
"""Returns at once; called on any thread."""


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """The worker's state, for other threads to read. Made on the step thread after every lifecycle
    operation and published by reference."""

    device: str
    config: WorkerConfig | None = None
    """The loaded configuration; None below MODEL_LOADED."""
    kv_cache: KVCacheConfig | None = None
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    """Device (or host) memory by use (MemoryLedger.by_kind), and the kinds of
    TaggedMemory.bytes_by_kind."""
    kv_cache_advice: KVCacheAdvice | None = None
    """Set once the worker is warm."""
    memory_tags: Mapping[MemoryTag, TagState] = field(default_factory=dict)
    """Empty if memory cannot sleep."""
    providers: Mapping[str, str] = field(default_factory=dict)
    """The implementation of each part of a step."""
    weights: Callable[[], WeightReport | None] = lambda: None
    """Returns the state of the weights now; None below MODEL_LOADED."""
    draft_weights: Callable[[], WeightReport | None] = lambda: None
    """Returns the state of the draft model's weights now; None without one."""
    num_requests: Callable[[], int] = int
    """Returns the number of requests that run now."""
    num_kv_blocks_held: Callable[[], int] = int
    """Returns the number of KV blocks that running requests hold now."""
    draft_counts: DraftCounts | None = None
    """Outcomes of drafts, which grow; None below KV_READY."""
    uploads_in_use: Callable[[], frozenset[bytes]] = frozenset
    """Returns the hashes of the uploads that running requests use now."""
    input_wait_share: Callable[[], float] = float
    """Returns the share of recent time in which the stage waited for its input."""
    expert_loads: Callable[[], Mapping[int, bytes]] = dict
    """Returns the tokens of each expert by layer, little-endian int64, as last read from the
    device; empty without experts."""
    expert_placements: Callable[[], tuple[RankPlacement, ...]] = tuple
    """Returns the placements of the stage's experts now; none without enable_eplb."""
    expert_moves: Callable[[], ExpertMoves | None] = lambda: None
    """Returns the counts of moved experts now; None without enable_eplb."""
    block_contents: BlockContents | None = None
    """None below KV_READY. The control thread takes and reads notes there."""
    host_contents: BlockContents | None = None
    """Those of the host tier's slots; None without one."""
    host_tier: Callable[[], HostTierStatus | None] = lambda: None
    """Returns the state of the host tier now; None without one."""
    filed: KVFiles | None = None
    """The files of the model's KV blocks; None if it keeps none."""
    peers: KVPeers | None = None
    """None if no block of this rank can move to another group."""
    model_names: tuple[str, ...] = ()
    """See ResolvedModel.names."""

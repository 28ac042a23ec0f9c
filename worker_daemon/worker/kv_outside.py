"""The places of KV blocks outside of the KV cache: the host tier's memory, files, and the moves to
other groups. runner/connectors/ has what uses them in steps."""

import threading
from functools import partial
from typing import Final

from rpc_schema.config import CacheConfig
from rpc_schema.errors import ConfigError
from rpc_schema.kv_cache import KVCacheConfig
from rpc_schema.version import SOFTWARE_VERSION
from worker_daemon.device.kept_memory import KeptMemory
from worker_daemon.device.peer_rows import PeerRows
from worker_daemon.runner.connectors.block_identity import BlockIdentity
from worker_daemon.runner.connectors.checksums import WORD_BYTES
from worker_daemon.runner.connectors.file_traffic import FileTraffic
from worker_daemon.runner.connectors.filed_blocks import FiledBlocks
from worker_daemon.runner.connectors.files import FileConnector
from worker_daemon.runner.connectors.host_tier import HostTier, KeptSlots
from worker_daemon.runner.connectors.interface import KVConnector
from worker_daemon.runner.connectors.kv_connectors import KVConnectors
from worker_daemon.runner.connectors.peer_copies import SharedMemory
from worker_daemon.runner.connectors.peers import (
    NoTransfers,
    PeerTransfers,
    PeerWeights,
    SharedSlots,
)
from worker_daemon.runner.connectors.tier_index import FORMAT, SlotLayout
from worker_daemon.runner.kv_cache import BlockPages
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.token_history import TokenHistory
from worker_daemon.worker.block_layout import block_parts, layers_of_pages, own_shard
from worker_daemon.worker.filing import check_kv_files, open_filed_blocks
from worker_daemon.worker.host_memory import (
    TierMemory,
    check_host_memory,
    open_tier_memory,
)
from worker_daemon.worker.loading import LoadedModel
from worker_daemon.worker.naming_blocks import block_identity
from worker_daemon.worker.serving import OpenConnectors
from worker_daemon.worker.stage_loading import RankPlace

_LEAVE_S: Final = 2.0
"""Longest wait for moves that end, before their memory is given up."""


class KVOutside:
    """Owned by the worker, and used on its step thread. Memory and files of a plan are opened
    before the KV cache is served, and outlive drivers, as the KV cache does."""

    def __init__(
        self,
        most_host_bytes: int | None,
        traffic: FileTraffic | None,
        kept_memory: KeptMemory | None,
    ) -> None:
        """Takes over traffic and kept_memory. most_host_bytes: of the host tier; None: what the
        host has free. traffic: with the files; None: files are refused. kept_memory: where the host
        tier outlives the daemon; None: it does not."""
        self._most_host_bytes = most_host_bytes
        self._traffic = traffic
        self._kept_memory = kept_memory
        self.meeting = threading.Lock()
        """Held while gloo connects the members of a group: its sockets are told by their time."""
        self._tier: TierMemory | None = None
        self._filed: FiledBlocks | None = None
        """The files of the plan's blocks; None if it keeps none."""
        self._connectors: KVConnectors | None = None
        self._peers: PeerTransfers | NoTransfers | None = None
        """Moves blocks of the host tier to other groups, and from there; None without a tier."""

    @property
    def peers(self) -> PeerTransfers | NoTransfers | None:
        """The moves of blocks to other groups, once their memory is there."""
        return self._peers if self._tier is not None and self._tier.is_there else None

    def check(self, cache: CacheConfig) -> None:
        """Check a configuration against what the operator allows, and against the room. Raises: see
        check_host_memory and check_kv_files."""
        check_host_memory(cache, self._most_host_bytes, self._kept_memory)
        check_kv_files(cache, self._traffic)

    def open(self, plan: KVCacheConfig, model: LoadedModel, place: RankPlace) -> None:
        """Open the memory and the files of a plan's blocks, after close_plan().

        Raises: see open_tier_memory and open_filed_blocks.
        """
        device, parallel = place.device, place.parallel
        if plan.num_host_blocks:
            parts = block_parts(plan, model, parallel)

            def identify(layout: SlotLayout) -> BlockIdentity:
                form = (FORMAT, SOFTWARE_VERSION, device.type, layout, parts)
                return block_identity(plan, model, parallel, *form)

            checksum_bytes = WORD_BYTES * parts.checksum_words
            self._tier = open_tier_memory(
                plan, model.config.cache, device, checksum_bytes, self._kept_memory, identify
            )
        elif self._kept_memory is not None:
            self._kept_memory.remove()
        self._filed = open_filed_blocks(plan, model, parallel, device, self._traffic)

    def connecting(
        self, plan: KVCacheConfig, model: LoadedModel, place: RankPlace
    ) -> OpenConnectors | None:
        """Return what opens the connectors of a KV cache with the plan that was opened; None if it
        has none. Ends the moves of the one before."""
        self.leave_peers()
        self._peers = None
        if self._tier is None and self._filed is None:
            return None
        return partial(self._connect, plan, model, place)

    def stop_pinning(self) -> None:
        """Lock no further pages of host memory until pin_ahead()."""
        if self._tier is not None:
            self._tier.rows.stop_pinning()

    def pin_ahead(self) -> None:
        """Wait until the host memory is there, and lock its pages in the background. Raises: see
        KeptMapping.wait_until_there."""
        if self._tier is not None:
            self._tier.wait_until_there()
            self._tier.rows.pin_ahead()

    def leave_peers(self) -> None:
        """Leave the other groups, whose blocks would come to memory that nobody reads."""
        if self._peers is not None:
            self._peers.close()

    def close_plan(self) -> None:
        """Free the memory of the plan, once no copy is in progress, but for what outlives the
        daemon."""
        self.leave_peers()
        if self._peers is not None:
            self._peers.await_end(_LEAVE_S)
        if self._connectors is not None:
            self._connectors.settle()
        if self._tier is not None:
            self._tier.close()
        self._tier = self._filed = self._connectors = self._peers = None

    def close(self) -> None:
        """Close everything, for good."""
        self.close_plan()
        if self._kept_memory is not None:
            self._kept_memory.close()
        if self._traffic is not None:
            self._traffic.close()

    def _connect(
        self,
        plan: KVCacheConfig,
        model: LoadedModel,
        place: RankPlace,
        pages: BlockPages,
        state: RequestState,
        history: TokenHistory,
    ) -> KVConnectors:
        connectors: list[KVConnector] = []
        if self._tier is not None:
            tier = self._connect_tier(self._tier, plan, model, place, pages, state, history)
            connectors.append(tier)
        if self._filed is not None:
            connectors.append(FileConnector(pages, self._filed, state))
        self._connectors = KVConnectors(connectors)
        return self._connectors

    def _connect_tier(
        self,
        memory: TierMemory,
        plan: KVCacheConfig,
        model: LoadedModel,
        place: RankPlace,
        pages: BlockPages,
        state: RequestState,
        history: TokenHistory,
    ) -> HostTier:
        parallel = place.parallel
        parts = block_parts(plan, model, parallel)
        kept = None if memory.index is None else KeptSlots(memory.index, history.has_confirmed)
        where = model.config.cache.kv_tier_memory
        layers = layers_of_pages(plan, model)
        tier = HostTier(pages, memory.rows, state, model.weights, parts, kept, where, layers)
        try:
            own = own_shard(plan, model, parallel, parts)
        except ConfigError as refusal:
            self._peers = NoTransfers(refusal)
            return tier
        shared = None
        if memory.rows.handle:
            shared = SharedMemory(memory.rows.handle, partial(PeerRows, device=place.device))
        slots = SharedSlots(
            memory.rows.rows,
            tier.arrivals,
            tier.counts,
            tier.pieces_left,
            state.host_contents,
            shared,
        )
        weights = PeerWeights(model.weights, model.draft_weights)
        self._peers = PeerTransfers(own, slots, weights, self.meeting)
        return tier

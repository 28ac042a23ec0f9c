"""vLLM's KV connector for the daemons' host tier: the scheduler's side, which is all of it. What it
plans goes to the daemons with the step."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from worker_client.steps.block_moves import HostMoves
from worker_client.vllm.configuration import MEMORY_KEY, host_tier_bytes
from worker_client.vllm.offloaded_blocks import OffloadedBlocks


def choose_connector(vllm_config: Any) -> None:
    """Put our connector in the place of vLLM's own, if the configuration has a host tier. vLLM
    calls this several times, also for copies.

    Raises:
        ClientConfigError: the daemons do not serve what it asks for.
    """
    size = host_tier_bytes(vllm_config)
    if not size:
        return
    vllm_config.cache_config.kv_offloading_size = None  # otherwise vLLM chooses its own later
    vllm_config.kv_transfer_config = KVTransferConfig(
        kv_connector=HostTierConnector.__name__,
        kv_connector_module_path=__name__,
        kv_role="kv_both",
        kv_connector_extra_config={MEMORY_KEY: size},
    )


class MovesOfStep(KVConnectorMetadata):  # type: ignore[misc]
    """Moves of a step, for the executor."""

    def __init__(self, moves: Sequence[HostMoves]) -> None:
        self.moves = tuple(moves)


class HostTierConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Loads what vLLM's prefix cache has lost, with the step that needs it. Evicted blocks are
    stored by the step that gives them to other requests, before it writes there."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._tier: OffloadedBlocks | None = None
        self._first = 0
        """The token from which on the request that is being admitted would load."""

    def use(self, tier: OffloadedBlocks) -> None:
        """Keep blocks in this tier. To be called before the first step."""
        self._tier = tier

    @property
    def requires_kv_delivery(self) -> bool:
        """False: nobody waits for a block, so that preempted requests keep their last tokens."""
        return False

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Learn of vLLM's evictions."""
        gpu_block_pool.metrics_collector = _Evictions(self._evict, gpu_block_pool.metrics_collector)

    def _evict(self, name: bytes, block_id: int) -> None:
        self._own.evict(name, block_id)

    @property
    def _own(self) -> OffloadedBlocks:
        assert self._tier is not None, "WorkerDaemonScheduler gives it one"
        return self._tier

    # ------------------------------------------------------------------ a step

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded behind those that the device has. False: with the
        request's first step."""
        self._first = num_computed_tokens
        if request.skip_reading_prefix_cache:
            return 0, False
        found = self._own.find(request.block_hashes, num_computed_tokens, request.num_tokens)
        return found, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the loads of the request that was asked for last."""
        if num_external_tokens:
            end = self._first + num_external_tokens
            self._own.load(request.block_hashes, self._first, end, blocks.get_block_ids())

    def build_connector_meta(self, scheduler_output: Any) -> MovesOfStep:
        """Return what the step moves. A step without tokens is not sent: the next one moves it."""
        if not scheduler_output.total_num_scheduled_tokens:
            return MovesOfStep(())
        return MovesOfStep(self._own.take_moves())

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return that the blocks can be freed: no copy reads them later."""
        return False, None

    def reset_cache(self) -> bool:
        """Forget all blocks, as vLLM's own connectors do."""
        self._own.begin_anew()
        return True

    # ------------------------------------------------------------------ a worker's side

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> NoReturn:
        """Not called: the daemons load."""
        raise _no_worker()

    def wait_for_layer_load(self, layer_name: str) -> NoReturn:
        """Not called."""
        raise _no_worker()

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> NoReturn:
        """Not called."""
        raise _no_worker()

    def wait_for_save(self) -> NoReturn:
        """Not called."""
        raise _no_worker()


def _no_worker() -> NotImplementedError:
    return NotImplementedError("the daemons move blocks; vLLM has no workers")


class _Evictions:
    """Stands where a BlockPool reports what becomes of its blocks, and passes on what it reports
    (vLLM's KVCacheMetricsCollector)."""

    def __init__(self, evict: Callable[[bytes, int], None], others: Any) -> None:
        """evict is called with the contents that a block loses to a request, and with the block."""
        self._evict = evict
        self._others = others

    def on_block_evicted(self, block: Any) -> None:
        """Handle a block that loses its contents: one that was taken from the free ones is being
        given to a request. Others are dropped because their contents cannot be shared any more."""
        is_taken = block.ref_cnt == 0 and block.prev_free_block is None
        if is_taken and block.block_hash is not None:
            self._evict(block.block_hash, block.block_id)
        if self._others is not None:
            self._others.on_block_evicted(block)

    def on_block_allocated(self, block: Any) -> None:
        """Pass it on."""
        if self._others is not None:
            self._others.on_block_allocated(block)

    def on_block_accessed(self, block: Any) -> None:
        """Pass it on."""
        if self._others is not None:
            self._others.on_block_accessed(block)

    def reset(self) -> None:
        """Pass it on."""
        if self._others is not None:
            self._others.reset()

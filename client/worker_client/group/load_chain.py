"""The operations that move a group along the load chain, and those that describe the loaded model.
Each is sent to all ranks, or to some while the others only advance their seqs."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from rpc_schema import lifecycle as lc
from rpc_schema.base import StepReply, StepRequest
from rpc_schema.config import Rendezvous, WorkerConfig
from rpc_schema.expert_placement import ExpertPlacement
from rpc_schema.kv_cache import KVCacheConfig
from worker_client.group.group_channel import GroupChannel

ReplyT = TypeVar("ReplyT", bound=StepReply)


def init_device(config: WorkerConfig, rendezvous: Rendezvous) -> partial[lc.InitDevice]:
    """Return the InitDevice of one rank, without its ids."""
    return partial(
        lc.InitDevice,
        parallel=config.parallel,
        rendezvous=rendezvous,
        cache=config.cache,
        scheduler=config.scheduler,
    )


class LoadChain:
    """Replies are in rank order. Each method raises what GroupChannel.ask does."""

    def __init__(self, channel: GroupChannel, ranks: Collection[int] | None = None) -> None:
        """ranks: those that take part; None for all. The others only advance their seqs."""
        self._channel = channel
        self._ranks = ranks

    def init_device(self, config: WorkerConfig) -> list[lc.InitDeviceReply]:
        """Create device contexts and the first link."""
        channel = self._channel
        channel.links.allow(config.scheduler.step_deadline_ms / 1000)
        rendezvous = channel.open_rendezvous()
        replies = self._ask_each(lambda rank: init_device(config, rendezvous[rank]))
        channel.use_link(rendezvous)
        return replies

    def relink(self) -> None:
        """Build new communicators on all ranks."""
        channel = self._channel
        rendezvous = channel.open_rendezvous()
        channel.ask_each(
            lambda rank: partial(lc.Relink, rendezvous=rendezvous[rank]),
            timeout_s=channel.links.timeout_s,
            stands_alone=True,
        )
        channel.use_link(rendezvous)

    def reset(self, to: Literal["CREATED", "DEVICE_READY", "MODEL_LOADED"]) -> None:
        """Return all ranks to an earlier state of the load chain."""
        timeout_s = self._channel.links.timeout_s
        self._ask(partial(lc.Reset, to=to), timeout_s, stands_alone=self._ranks is None)
        self._channel.refresh_links()

    def load_model(
        self,
        config: WorkerConfig,
        weights_version: int | None = None,
        content: bytes | None = None,
        expert_placements: Sequence[ExpertPlacement] = (),
    ) -> list[lc.LoadModelReply]:
        """Load every rank's part of the model. weights_version and so on: see LoadModel."""
        return self._ask(
            partial(
                lc.LoadModel,
                model=config.model,
                scheduler=config.scheduler,
                cache=config.cache,
                graph=config.graph,
                lora=config.lora,
                speculative=config.speculative,
                weights_version=weights_version,
                content=content,
                expert_placements=tuple(expert_placements),
            )
        )

    def get_kv_cache_spec(self) -> list[lc.GetKVCacheSpecReply]:
        """Return the KV cache per token of each rank's layers."""
        return self._ask(lc.GetKVCacheSpec)

    def determine_available_memory(self) -> list[lc.DetermineAvailableMemoryReply]:
        """Profile the memory of every rank."""
        return self._ask(lc.DetermineAvailableMemory)

    def initialize_from_config(self, configs: Sequence[KVCacheConfig]) -> None:
        """Allocate every rank's KV cache. configs: one for each rank of the group."""
        num_replicas, ranks = self._channel.num_replicas, self._channel.daemons.ranks
        size, num_ranks = len(configs) // num_replicas, len(ranks) // num_replicas

        def build_for(rank: int) -> partial[lc.InitializeFromConfig]:
            begin = (rank - ranks[0]) // num_ranks * size
            own = tuple(configs[begin : begin + size])
            return partial(lc.InitializeFromConfig, kv_cache_configs=own)

        self._ask_each(build_for)

    def initialize_cache(self, num_gpu_blocks: int) -> None:
        """Send every rank the number of blocks."""
        self._ask(partial(lc.InitializeCache, num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=0))

    def update_max_model_len(self, max_model_len: int) -> None:
        """Send every rank the longest context."""
        self._ask(partial(lc.UpdateMaxModelLen, max_model_len=max_model_len))

    def compile_or_warm_up_model(self) -> list[lc.CompileOrWarmUpModelReply]:
        """Warm every rank up."""
        return self._ask(lc.CompileOrWarmUpModel)

    def get_supported_tasks(self) -> list[lc.GetSupportedTasksReply]:
        """Return the tasks of each rank's model."""
        return self._ask(lc.GetSupportedTasks)

    def get_model_metadata(self) -> list[lc.GetModelMetadataReply]:
        """Return each rank's description of the model."""
        return self._ask(lc.GetModelMetadata)

    def _ask(
        self,
        build: Callable[..., StepRequest[ReplyT]],
        timeout_s: float | None = None,
        *,
        stands_alone: bool = False,
    ) -> list[ReplyT]:
        return self._ask_each(lambda _: build, timeout_s, stands_alone=stands_alone)

    def _ask_each(
        self,
        build_for: Callable[[int], Callable[..., StepRequest[ReplyT]]],
        timeout_s: float | None = None,
        *,
        stands_alone: bool = False,
    ) -> list[ReplyT]:
        channel, ranks = self._channel, self._ranks
        if ranks is None:
            return channel.ask_each(build_for, timeout_s=timeout_s, stands_alone=stands_alone)

        def build_either(rank: int) -> Callable[..., StepRequest[Any]]:
            return build_for(rank) if rank in ranks else lc.GetSupportedTasks

        replies = channel.ask_each(build_either, timeout_s=timeout_s)
        return [reply for reply in replies if reply.rank in ranks]

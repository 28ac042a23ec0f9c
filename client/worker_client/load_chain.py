"""The operations that take a group down the load chain, and those that tell what it then is: each
sent to all ranks, or to some while the others keep step. Knows neither their order
(`loading.py`) nor what becomes of requests.
"""

from collections.abc import Collection, Sequence
from typing import Literal, TypeVar

from rpc_schema import lifecycle as lc
from rpc_schema.codec import StepReplyMessage
from rpc_schema.config import WorkerConfig
from rpc_schema.kv_cache import KVCacheConfig
from rpc_schema.step import Done
from worker_client.group_channel import OPERATION_TIMEOUT_S, GroupChannel, Send
from worker_client.worker_client import StepIds, WorkerClient

LOAD_TIMEOUT_S = 3600.0

ReplyT = TypeVar("ReplyT", bound=StepReplyMessage)


class LoadChain:
    """Replies are in rank order. Each method raises what GroupChannel.fan_out does."""

    def __init__(self, channel: GroupChannel, ranks: Collection[int] | None = None) -> None:
        """ranks: those that take part, None for all. The others, whose seqs must go on too, do next
        to nothing."""
        self._channel = channel
        self._ranks = ranks

    def init_device(self, config: WorkerConfig) -> list[lc.InitDeviceReply]:
        """Create device contexts and the first link."""
        channel = self._channel
        channel.links.allow(config.scheduler.step_deadline_ms / 1000)
        rendezvous = channel.open_rendezvous()
        replies = self._send(
            "init_device",
            lambda client, ids: client.init_device(
                ids, config.parallel, rendezvous[client.rank], config.cache, config.scheduler
            ),
            lc.InitDeviceReply,
            channel.links.timeout_s + OPERATION_TIMEOUT_S,
        )
        channel.use_link(rendezvous)
        return replies

    def relink(self) -> None:
        """Build new communicators on all ranks."""
        channel = self._channel
        rendezvous = channel.open_rendezvous()
        channel.fan_out(
            "relink",
            lambda client, ids: client.relink(ids, rendezvous[client.rank]),
            Done,
            timeout_s=channel.links.timeout_s,
            stands_alone=True,
        )
        channel.use_link(rendezvous)

    def reset(self, to: Literal["CREATED", "DEVICE_READY", "MODEL_LOADED"]) -> None:
        """Go back up to a level."""
        self._send(
            "reset",
            lambda client, ids: client.reset(ids, to),
            Done,
            self._channel.links.timeout_s,
            stands_alone=self._ranks is None,
        )
        self._channel.refresh_links()

    def load_model(self, config: WorkerConfig) -> list[lc.LoadModelReply]:
        """Load every rank's part of the model."""
        return self._send(
            "load_model",
            lambda client, ids: client.load_model(
                ids, config.model, config.scheduler, config.cache, config.graph
            ),
            lc.LoadModelReply,
            LOAD_TIMEOUT_S,
        )

    def get_kv_cache_spec(self) -> list[lc.GetKVCacheSpecReply]:
        """What each rank's layers keep per token."""
        return self._send(
            "get_kv_cache_spec", WorkerClient.get_kv_cache_spec, lc.GetKVCacheSpecReply
        )

    def determine_available_memory(self) -> list[lc.DetermineAvailableMemoryReply]:
        """Profile every rank."""
        return self._send(
            "determine_available_memory",
            WorkerClient.determine_available_memory,
            lc.DetermineAvailableMemoryReply,
            LOAD_TIMEOUT_S,
        )

    def initialize_from_config(self, configs: Sequence[KVCacheConfig]) -> None:
        """Allocate every rank's KV cache. configs: one a rank of the group."""
        self._send(
            "initialize_from_config",
            lambda client, ids: client.initialize_from_config(ids, tuple(configs)),
            Done,
        )

    def initialize_cache(self, num_gpu_blocks: int) -> None:
        """Tell every rank the block count."""
        self._send(
            "initialize_cache",
            lambda client, ids: client.initialize_cache(ids, num_gpu_blocks),
            Done,
        )

    def update_max_model_len(self, max_model_len: int) -> None:
        """Tell every rank the longest context."""
        self._send(
            "update_max_model_len",
            lambda client, ids: client.update_max_model_len(ids, max_model_len),
            Done,
        )

    def compile_or_warm_up_model(self) -> list[lc.CompileOrWarmUpModelReply]:
        """Warm every rank up."""
        return self._send(
            "compile_or_warm_up_model",
            WorkerClient.compile_or_warm_up_model,
            lc.CompileOrWarmUpModelReply,
            LOAD_TIMEOUT_S,
        )

    def get_supported_tasks(self) -> list[lc.GetSupportedTasksReply]:
        """What each rank's model can do."""
        return self._send(
            "get_supported_tasks", WorkerClient.get_supported_tasks, lc.GetSupportedTasksReply
        )

    def get_model_metadata(self) -> list[lc.GetModelMetadataReply]:
        """What a driver needs to know of the model, from each rank."""
        return self._send(
            "get_model_metadata", WorkerClient.get_model_metadata, lc.GetModelMetadataReply
        )

    def _send(
        self,
        operation: str,
        send: Send,
        reply_type: type[ReplyT],
        timeout_s: float = OPERATION_TIMEOUT_S,
        *,
        stands_alone: bool = False,
    ) -> list[ReplyT]:
        channel, ranks = self._channel, self._ranks
        if ranks is None:
            return channel.fan_out(
                operation, send, reply_type, timeout_s=timeout_s, stands_alone=stands_alone
            )

        def send_either(client: WorkerClient, ids: StepIds) -> None:
            if client.rank in ranks:
                send(client, ids)
            else:
                client.get_supported_tasks(ids)

        replies = channel.exchange(operation, send_either, timeout_s)
        return [reply for reply in replies if isinstance(reply, reply_type)]

"""vLLM's platform for a server whose devices belong to worker daemons: this process has none."""

import os
from typing import Any, ClassVar, Final

import torch
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.platforms.interface import Platform, PlatformEnum
from vllm.utils.import_utils import resolve_obj_by_qualname

from worker_client.errors import RequestError
from worker_client.vllm.configuration import check_config, check_drafts
from worker_client.vllm.refusals import end_with_reason
from worker_client.vllm.requests import (
    POOLING_FIELDS,
    check_fields,
    sampling_params,
)
from worker_client.vllm.sections import check_sections
from worker_client.vllm.settings import LOGGER, settings_of

_LOG = init_logger(LOGGER)
_EXECUTOR: Final = "worker_client.vllm.hooks.executor.WorkerDaemonExecutor"
_DEFAULTS: Final = "worker_client.vllm.hooks.defaults.defaults_of"
_CHOOSE_CONNECTOR: Final = "worker_client.vllm.hooks.connector.choose_connector"
"""Not imported here: vLLM makes its platform while it imports its configuration."""
_WORKER: Final = "vllm.v1.worker.worker_base.WorkerBase"
"""vLLM looks at the signatures of this class; nobody makes one."""


class WorkerDaemonPlatform(Platform):  # type: ignore[misc]
    """Keeps CUDA out of vLLM's processes, chooses the executor, and refuses what is not served."""

    _enum = PlatformEnum.OOT
    device_name = "worker-daemon"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    supported_quantization: ClassVar[list[str]] = []

    _has_ended = False

    def end(self) -> None:
        """Record that this process serves no more."""
        self._has_ended = True

    def is_cpu(self) -> bool:
        """Return True only at the end: vLLM then frees an accelerator's memory on other platforms,
        which fails where there is none. Before that it would choose its defaults for CPUs."""
        return self._has_ended

    @classmethod
    def pre_register_and_update(cls, parser: Any = None) -> None:
        """Choose the semantics of steps in which resumed requests arrive as new ones."""
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        """Refuse fields that are not served, while those that vLLM derives still have their
        defaults; log those without an effect. Raises ClientConfigError."""
        parallel = vllm_config.parallel_config
        if (parallel.worker_cls, parallel.distributed_executor_backend) == (_WORKER, _EXECUTOR):
            return  # a copy of one that was checked, and has what vLLM derives
        check_drafts(vllm_config, settings_of(vllm_config))
        defaults = resolve_obj_by_qualname(_DEFAULTS)(vllm_config)
        if parallel.distributed_executor_backend == _EXECUTOR:
            defaults.parallel_config.distributed_executor_backend = _EXECUTOR
        for field, why in check_sections(vllm_config, defaults).items():
            _LOG.warning_once("%s has no effect: %s", field, why)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Refuse what is not served, and choose the executor. Raises ClientConfigError."""
        end_with_reason()
        settings_of(vllm_config)
        check_config(vllm_config)
        resolve_obj_by_qualname(_CHOOSE_CONNECTOR)(vllm_config)
        parallel = vllm_config.parallel_config
        if parallel.worker_cls == "auto":
            parallel.worker_cls = _WORKER
        parallel.distributed_executor_backend = _EXECUTOR

    @classmethod
    def get_kv_cache_config_builder_cls(cls, vllm_config: Any) -> str:
        """Take the daemons' KV groups as they are."""
        return "worker_client.vllm.hooks.kv_cache.GroupsAsGiven"

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Refuse, with HTTP 400, a request that sets a field which is not served."""
        try:
            if hasattr(params, "task"):
                check_fields(params, POOLING_FIELDS)
            else:
                sampling_params(params, 0)
        except RequestError as error:
            raise VLLMValidationError(
                error.reason, parameter=error.field, value=error.value
            ) from None

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """All dtypes of the daemons' models."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Leave the check to the daemons."""

    def is_sleep_mode_available(self) -> bool:
        """Return True: the daemons have a sleep mode."""
        return True

    def is_cumem_allocator_available(self) -> bool:
        """Return True: the daemons have their own allocator for it."""
        return True

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """Return a name for logs."""
        return "worker-daemon"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Return a size for which vLLM chooses its defaults for large devices."""
        return 80 << 30

    @classmethod
    def inference_mode(cls) -> Any:
        """Return torch's inference mode."""
        return torch.inference_mode(mode=True)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Do nothing: there is none."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Do nothing: nothing is sampled here."""

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Return False: page-locked memory would need a CUDA context."""
        return False

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Return True: the daemons plan several KV groups."""
        return True

    @classmethod
    def import_kernels(cls) -> None:
        """Do nothing: nothing is computed here."""

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: Any) -> None:
        """Keep the block size."""

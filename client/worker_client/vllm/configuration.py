"""vLLM's configuration as ours, and what of it is refused at start."""

import dataclasses
from typing import Any, Final

from rpc_schema.config import (
    CacheConfig,
    GraphConfig,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from worker_client.errors import config_error
from worker_client.vllm.settings import Settings

_ABSENT: Final = (
    "diffusion_config",
    "ec_transfer_config",
    "engram_config",
    "kv_transfer_config",
    "quant_config",
    "speculative_config",
    "watermark_config",
)
"""Sections of vLLM's configuration that must not be there."""

_LOAD_FORMATS: Final = {
    "auto": "auto",
    "safetensors": "auto",
    "dummy": "dummy",
    "sharded_state": "sharded_state",
    "tensorizer": "tensorizer",
}


def parallel_config(vllm_config: Any) -> ParallelConfig:
    """Return the shape of the group."""
    theirs = vllm_config.parallel_config
    return ParallelConfig(
        pipeline_parallel_size=theirs.pipeline_parallel_size,
        tensor_parallel_size=theirs.tensor_parallel_size,
    )


def worker_config(vllm_config: Any, settings: Settings, directory: str) -> WorkerConfig:
    """Translate vLLM's configuration, which was checked. directory: of the checkpoint, where the
    settings name none."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    cache, lora = vllm_config.cache_config, vllm_config.lora_config
    step = (
        {} if settings.step_deadline_ms is None else {"step_deadline_ms": settings.step_deadline_ms}
    )
    return WorkerConfig(
        parallel=parallel_config(vllm_config),
        model=ModelConfig(
            model=settings.model or directory,
            dtype=str(model.dtype).removeprefix("torch."),  # type: ignore[arg-type]
            load_format=_LOAD_FORMATS[str(vllm_config.load_config.load_format)],  # type: ignore[arg-type]
            max_model_len=None if fits_max_model_len(vllm_config) else model.max_model_len,
            seed=model.seed,
            enable_sleep_mode=model.enable_sleep_mode,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            logits_processors=settings.logits_processors,
            **step,
        ),
        cache=CacheConfig(
            block_size=cache.block_size,
            gpu_memory_utilization=cache.gpu_memory_utilization,
            kv_cache_memory_bytes=cache.kv_cache_memory_bytes,
        ),
        graph=GraphConfig(enforce_eager=model.enforce_eager),
        lora=LoraConfig()
        if lora is None
        else LoraConfig(
            max_loras=lora.max_loras,
            max_lora_rank=lora.max_lora_rank,
            max_cpu_loras=lora.max_cpu_loras,
        ),
    )


def fits_max_model_len(vllm_config: Any) -> bool:
    """Return True if max_model_len is to be as large as the KV cache allows."""
    return bool(vllm_config.model_config.original_max_model_len == -1)


def check_config(vllm_config: Any) -> None:
    """Check the configuration as far as no daemon is needed. vLLM calls this several times.

    Raises:
        ClientConfigError: a setting is not served.
    """
    model = vllm_config.model_config
    if model is not None:
        _check_model(model)
    for section in _ABSENT:
        if getattr(vllm_config, section, None) is not None:
            _refuse(section, getattr(vllm_config, section), "leave it out")
    parallel = vllm_config.parallel_config
    for field in (
        "data_parallel_size",
        "decode_context_parallel_size",
        "nnodes",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, field, 1) != 1:
            _refuse(field, getattr(parallel, field), "leave it out: start one server per group")
    if parallel.enable_expert_parallel:
        _refuse("enable_expert_parallel", True, "leave it out")
    load_format = str(vllm_config.load_config.load_format)
    if load_format not in _LOAD_FORMATS:
        _refuse("load_format", load_format, f"use one of {', '.join(_LOAD_FORMATS)}")
    cache = vllm_config.cache_config
    if cache.cache_dtype != "auto":
        _refuse("kv_cache_dtype", cache.cache_dtype, "use auto: the cache has the model's dtype")
    if vllm_config.scheduler_config.async_scheduling is False:
        _refuse("async_scheduling", False, "leave it out: steps are sent ahead of their results")


def _check_model(model: Any) -> None:
    if model.quantization is not None:
        _refuse("quantization", model.quantization, "use a checkpoint that is not quantized")
    if model.is_encoder_decoder:
        _refuse("model", model.model, "use a decoder-only model")
    if model.is_multimodal_model and not model.multimodal_config.language_model_only:
        _refuse("model", model.model, "use a text model, or --language-model-only")
    for field in ("logits_processors", "enable_prompt_embeds", "enable_return_routed_experts"):
        value = getattr(model, field, None)
        if value:
            _refuse(field, value, _FIXES.get(field, "leave it out"))
    if model.logprobs_mode != "raw_logprobs":
        _refuse("logprobs_mode", model.logprobs_mode, "use raw_logprobs")


_FIXES: Final = {
    "logits_processors": "name them in additional_config.worker_daemon.logits_processors: "
    "the daemons have their code"
}


def _refuse(field: str, value: object, fix: str) -> None:
    if dataclasses.is_dataclass(value):
        value = type(value).__name__
    raise config_error(field, value, "worker daemons do not serve this setting", fix)

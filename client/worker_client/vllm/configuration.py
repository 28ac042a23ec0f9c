"""vLLM's configuration as ours, and what of it is refused at start."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from rpc_schema.config import (
    CacheConfig,
    GraphConfig,
    KVCacheDtype,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    Quantization,
    SchedulerConfig,
    WorkerConfig,
)
from rpc_schema.lifecycle import GetModelMetadataReply
from rpc_schema.pooling import NO_POOLING, PooledStates, PoolingSupport
from rpc_schema.sampling import MAX_LOGPROBS
from worker_client.errors import config_error
from worker_client.vllm.settings import Settings

_ABSENT: Final = (
    "diffusion_config",
    "ec_transfer_config",
    "engram_config",
    "kv_transfer_config",
    "speculative_config",
    "watermark_config",
)
"""Sections of vLLM's configuration that must not be there."""

_SERVED: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "cache_config": frozenset(
            (
                "block_size",
                "cache_dtype",
                "enable_prefix_caching",
                "gpu_memory_utilization",
                "is_attention_free",
                "kv_cache_memory_bytes",
                "num_gpu_blocks_override",
                "prefix_caching_hash_algo",
                "sliding_window",
            )
        ),
        "load_config": frozenset(("download_dir", "load_format", "use_tqdm_on_load")),
        "lora_config": frozenset(("lora_dtype", "max_cpu_loras", "max_lora_rank", "max_loras")),
        "model_config": frozenset(
            (
                "code_revision",
                "config_format",
                "convert",
                "disable_cascade_attn",
                "dtype",
                "enable_sleep_mode",
                "enforce_eager",
                "generation_config",
                "hf_config_path",
                "hf_token",
                "io_processor_plugin",
                "language_model_only",
                "max_logprobs",
                "max_model_len",
                "model",
                "model_weights",
                "multimodal_config",
                "override_generation_config",
                "pooler_config",
                "quantization",
                "renderer_num_workers",
                "revision",
                "runner",
                "seed",
                "served_model_name",
                "skip_tokenizer_init",
                "tokenizer",
                "tokenizer_mode",
                "tokenizer_revision",
                "trust_remote_code",
            )
        ),
        "parallel_config": frozenset(
            (
                "data_parallel_master_ip",  # vLLM sets these itself
                "data_parallel_master_port",
                "data_parallel_rank_local",
                "data_parallel_rpc_port",
                "dcp_comm_backend",
                "dcp_q_replicate",
                "disable_custom_all_reduce",
                "disable_nccl_for_dp_synchronization",
                "distributed_executor_backend",
                "elastic_ep_max_dp_size",
                "enable_expert_parallel",
                "is_moe_model",
                "master_addr",
                "master_port",
                "pipeline_parallel_size",
                "tensor_parallel_size",
                "worker_cls",
            )
        ),
        "pooler_config": frozenset(
            (
                "dimensions",
                "enable_chunked_processing",
                "enable_flash_late_interaction",
                "max_embed_len",
                "pooling_type",
                "seq_pooling_type",
                "task",
                "tok_pooling_type",
                "use_activation",
            )
        ),
    }
)
"""Fields that may differ from vLLM's defaults, by section: they are translated, or vLLM serves or
sets them itself. scheduler_config is vLLM's own."""

_LOAD_FORMATS: Final = {
    "auto": "auto",
    "safetensors": "auto",
    "dummy": "dummy",
    "sharded_state": "sharded_state",
    "tensorizer": "tensorizer",
}


_CACHE_DTYPES: Final[Mapping[str, KVCacheDtype]] = MappingProxyType(
    {"auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8"}
)
_QUANTIZED_CHECKPOINTS: Final = (
    "compressed-tensors",
    "fp8",
    "awq",
    "awq_marlin",
    "gptq",
    "gptq_marlin",
    "mxfp4",
    "gpt_oss_mxfp4",
)
"""Methods of a checkpoint's quantization_config, or the kernels that vLLM would choose for them.
The daemons check the rest of it."""


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
            quantization=_quantization(model),
            enable_expert_parallel=vllm_config.parallel_config.enable_expert_parallel,
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
            kv_cache_dtype=_CACHE_DTYPES[str(cache.cache_dtype)],
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
    for section, served in _SERVED.items():
        _check_section(getattr(vllm_config, section, None), served)
    for section in _ABSENT:
        if getattr(vllm_config, section, None) is not None:
            _refuse(section, getattr(vllm_config, section), "leave it out")
    if vllm_config.model_config is not None:
        _check_model(vllm_config.model_config)
        _check_pooling(vllm_config)
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if cache_dtype not in _CACHE_DTYPES:
        _refuse("cache_dtype", cache_dtype, f"use one of {', '.join(_CACHE_DTYPES)}")
    load_format = str(vllm_config.load_config.load_format)
    if load_format not in _LOAD_FORMATS:
        _refuse("load_format", load_format, f"use one of {', '.join(_LOAD_FORMATS)}")
    scheduler_cls = getattr(vllm_config.scheduler_config, "scheduler_cls", None)
    if isinstance(scheduler_cls, str):
        _refuse("scheduler_cls", scheduler_cls, "leave it out: ours survives lost steps")
    if vllm_config.scheduler_config.async_scheduling is False and not pools(vllm_config):
        _refuse("async_scheduling", False, "leave it out: steps are sent ahead of their results")


def pools(vllm_config: Any) -> bool:
    """Return True if the server computes outputs of pooling instead of tokens."""
    model = vllm_config.model_config
    return model is not None and model.runner_type == "pooling"


def _check_section(section: Any, served: frozenset[str]) -> None:
    """Refuse a field of a section that is not at its default, unless it is served."""
    if section is None:
        return
    for entry in dataclasses.fields(section):
        if not entry.init or entry.name in served or entry.name.startswith("_"):
            continue
        value = getattr(section, entry.name)
        if value not in (None, False, _default(entry)):
            _refuse(entry.name, value, _FIXES.get(entry.name, "leave it out"))


def _default(entry: "dataclasses.Field[Any]") -> object:
    """Return the default of a field of a dataclass of pydantic."""
    default: Any = entry.default
    if hasattr(default, "get_default"):  # its FieldInfo
        return default.get_default(call_default_factory=True)
    if entry.default_factory is not dataclasses.MISSING:
        return entry.default_factory()
    return default


_FIXES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "data_parallel_size": "start one server for each group of daemons",
        "logits_processors": "name them in additional_config.worker_daemon.logits_processors: the "
        "daemons have their code",
        "quantization_config": "use --quantization fp8",
    }
)


def _is_quantized(model: Any) -> bool:
    """Return True if the checkpoint is quantized. vLLM names its method, if no option does."""
    return getattr(model.hf_config, "quantization_config", None) is not None


def _quantization(model: Any) -> Quantization:
    """Return the quantization of a checkpoint that is not quantized."""
    return "auto" if model.quantization is None or _is_quantized(model) else "fp8"


def _check_model(model: Any) -> None:
    served = _QUANTIZED_CHECKPOINTS if _is_quantized(model) else ("fp8",)
    if model.quantization not in (None, *served):
        fix = (
            "use a checkpoint of compressed-tensors, fp8, awq, gptq or mxfp4, or --quantization fp8"
        )
        _refuse("quantization", model.quantization, fix)
    if model.is_encoder_decoder:
        _refuse("model", model.model, "use a decoder-only model")
    if model.is_multimodal_model and not model.multimodal_config.language_model_only:
        _refuse("model", model.model, "use a text model, or --language-model-only")
    if not 0 <= model.max_logprobs <= MAX_LOGPROBS:
        _refuse("max_logprobs", model.max_logprobs, f"use at most {MAX_LOGPROBS}")


def _check_pooling(vllm_config: Any) -> None:
    """Check what concerns pooling alone."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    if not pools(vllm_config):
        return
    pooler = model.pooler_config
    _check_section(pooler, _SERVED["pooler_config"])
    if pooler.tok_pooling_type == "STEP":
        _refuse("pooler_config.tok_pooling_type", "STEP", "use ALL")
    threshold = scheduler.long_prefill_token_threshold
    if threshold:  # many prompts would be unfinished at once, whose tokens' outputs are kept
        _refuse("long_prefill_token_threshold", threshold, "leave it out")
    _check_activation(model.hf_config)


def _check_activation(config: Any) -> None:
    """Refuse a checkpoint that chooses how scores are made of logits in a field that the daemons do
    not read."""
    if getattr(config, "problem_type", None) is not None:
        return  # it decides, for vLLM too
    chosen = {
        "sbert_ce_default_activation_function": getattr(
            config, "sbert_ce_default_activation_function", None
        ),
        "sentence_transformers.activation_fn": (
            getattr(config, "sentence_transformers", None) or {}
        ).get("activation_fn"),
    }
    for field, value in chosen.items():
        is_ours = str(value).endswith(".Sigmoid") and config.num_labels == 1
        if value is not None and not is_ours:
            fix = "set problem_type in config.json: regression keeps logits as they are"
            _refuse(f"hf_config.{field}", value, fix)


_STATES: Final[Mapping[str, PooledStates]] = MappingProxyType(
    {"CLS": "first", "LAST": "last", "MEAN": "mean"}
)
"""vLLM's names of the states that an output is computed from."""


def check_loaded(vllm_config: Any, metadata: GetModelMetadataReply) -> None:
    """Check what the loaded model must be able to do, by the daemons' description of it.

    Raises:
        ClientConfigError: it cannot, or it does something else than vLLM expects.
    """
    if not pools(vllm_config):
        if not metadata.generates:
            _refuse("runner", "generate", "use --runner pooling: the model has no output layer")
        return
    model, support = vllm_config.model_config, metadata.pooling or NO_POOLING
    wanted = "" if model.convert_type == "none" else model.convert_type
    if not any(each.task.endswith(wanted) for each in support.tasks):
        _refuse("convert", wanted, f"leave it out: the model has {support.names}")
    if support.whole_prompts and vllm_config.scheduler_config.enable_chunked_prefill:
        fix = "leave it out: the model computes a prompt in one step"
        _refuse("enable_chunked_prefill", True, fix)
    _check_states(model.pooler_config.seq_pooling_type, support)


def _check_states(theirs: str, support: PoolingSupport) -> None:
    """Refuse another kind of pooling than the daemons': it is theirs that counts."""
    for each in support.tasks:
        if each.states not in ("each", _STATES.get(theirs)):
            kind = next(name for name, states in _STATES.items() if states == each.states)
            fix = f'use --pooler-config \'{{"pooling_type": "{kind}"}}\', as the daemons do'
            _refuse("pooler_config.pooling_type", theirs, fix)


def _refuse(field: str, value: object, fix: str) -> None:
    if dataclasses.is_dataclass(value):
        value = type(value).__name__
    raise config_error(field, value, "worker daemons do not serve this setting", fix)

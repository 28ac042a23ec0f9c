"""vLLM's configuration as ours, and which of its values are refused at start. sections.py says
which fields may have another value than vLLM's default."""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from rpc_schema.config import (
    MAX_DRAFTS,
    MAX_LOOKUP,
    CacheConfig,
    GraphConfig,
    KVCacheDtype,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    Quantization,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from rpc_schema.lifecycle import GetModelMetadataReply
from rpc_schema.pooling import NO_POOLING, PooledStates, PoolingSupport
from rpc_schema.sampling import MAX_LOGPROBS
from worker_client.vllm.sections import refusal
from worker_client.vllm.settings import Settings

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
_NGRAM: Final = ("ngram", "ngram_gpu")
"""vLLM's methods whose drafts are looked up in a request's own tokens."""
_DRAFT_MODEL: Final = "draft_model"
"""vLLM's method, and ours, whose drafts are those of a smaller model."""
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


def worker_config(
    vllm_config: Any, settings: Settings, directory: str, draft_directory: str | None = None
) -> WorkerConfig:
    """Translate vLLM's configuration, which was checked. directory, draft_directory: of the
    checkpoint and of the draft model's, where the settings name none."""
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
            hf_overrides=_overrides(model),
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
            prompt_attention_dtype=settings.prompt_attention_dtype,
            kv_host_memory_bytes=_rank_bytes(vllm_config),
        ),
        graph=GraphConfig(enforce_eager=model.enforce_eager),
        lora=LoraConfig()
        if lora is None
        else LoraConfig(
            max_loras=lora.max_loras,
            max_lora_rank=lora.max_lora_rank,
            max_cpu_loras=lora.max_cpu_loras,
        ),
        speculative=_speculative(vllm_config.speculative_config, settings, draft_directory),
    )


def draft_model(vllm_config: Any) -> Any:
    """Return vLLM's configuration of the model that drafts; None: there is none."""
    theirs = vllm_config.speculative_config
    is_one = theirs is not None and theirs.method == _DRAFT_MODEL
    return theirs.draft_model_config if is_one else None


def _speculative(theirs: Any, settings: Settings, directory: str | None) -> SpeculativeConfig:
    if theirs is None:
        return SpeculativeConfig()
    if theirs.method == _DRAFT_MODEL:
        return SpeculativeConfig(
            method="draft_model",
            num_speculative_tokens=theirs.num_speculative_tokens,
            model=settings.draft_model or directory,
        )
    return SpeculativeConfig(
        method="suffix" if settings.suffix_lookup else "ngram",
        num_speculative_tokens=theirs.num_speculative_tokens,
        prompt_lookup_max=theirs.prompt_lookup_max,
        prompt_lookup_min=theirs.prompt_lookup_min,
    )


def fits_max_model_len(vllm_config: Any) -> bool:
    """Return True if max_model_len is to be as large as the KV cache allows."""
    return bool(vllm_config.model_config.original_max_model_len == -1)


def check_config(vllm_config: Any) -> None:
    """Check the configuration as far as no daemon is needed. vLLM calls this several times.

    Raises:
        ClientConfigError: a setting is not served.
    """
    if vllm_config.model_config is not None:
        _check_model(vllm_config.model_config)
        _overrides(vllm_config.model_config)
        _check_pooling(vllm_config)
        _check_lora(vllm_config.lora_config, vllm_config.model_config.dtype)
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if cache_dtype not in _CACHE_DTYPES:
        _refuse("cache_dtype", cache_dtype, f"use one of {', '.join(_CACHE_DTYPES)}")
    load_format = str(vllm_config.load_config.load_format)
    if load_format not in _LOAD_FORMATS:
        _refuse("load_format", load_format, f"use one of {', '.join(_LOAD_FORMATS)}")
    scheduler_cls = getattr(vllm_config.scheduler_config, "scheduler_cls", None)
    if isinstance(scheduler_cls, str):
        _refuse("scheduler_cls", scheduler_cls, "leave it out: ours survives lost steps")
    host_tier_bytes(vllm_config)
    if vllm_config.scheduler_config.async_scheduling is False and not pools(vllm_config):
        _refuse("async_scheduling", False, "leave it out: steps are sent ahead of their results")


MEMORY_KEY: Final = "cpu_bytes_to_use"
"""Key of kv_connector_extra_config with the size of all ranks' host memory for KV blocks."""
_CONNECTORS: Final = ("OffloadingConnector", "HostTierConnector")
"""vLLM's connector to host memory, and ours that takes its place."""
_GIB: Final = 1 << 30
_MOST_BYTES: Final = 1 << 62


def host_tier_bytes(vllm_config: Any) -> int:
    """Return the size of the host tier, of all ranks together; 0: there is none.

    Raises:
        ClientConfigError: another place for KV blocks is asked for, or another kind of tier.
    """
    cache, transfer = vllm_config.cache_config, vllm_config.kv_transfer_config
    size = cache.kv_offloading_size
    if cache.kv_offloading_backend != "native":
        fix = "leave it out: blocks go to the host memory of the daemons"
        _refuse("kv_offloading_backend", cache.kv_offloading_backend, fix)
    if transfer is not None:
        _check_transfer(transfer, needs_connector=size is None)
    if size is None and transfer is None:
        return 0
    if not cache.enable_prefix_caching:
        field = "kv_transfer_config" if size is None else "kv_offloading_size"
        _refuse(field, transfer if size is None else size, "use it with --enable-prefix-caching")
    if size is not None:
        if not 1 <= size * _GIB < _MOST_BYTES:
            _refuse("kv_offloading_size", size, "give GiB of all ranks together, or leave it out")
        return int(size * _GIB)
    given: Any = transfer.kv_connector_extra_config.get(MEMORY_KEY)
    if (
        isinstance(given, bool)
        or not isinstance(given, int | float)
        or not 1 <= given < _MOST_BYTES
    ):
        field = f"kv_transfer_config.kv_connector_extra_config.{MEMORY_KEY}"
        _refuse(field, given, "give bytes of all ranks together")
    return int(given)


def _check_transfer(transfer: Any, *, needs_connector: bool) -> None:
    """Check the connector that is named. needs_connector: no other option chooses it."""
    section, name = "kv_transfer_config", transfer.kv_connector
    if name not in _CONNECTORS and (needs_connector or name is not None):
        _refuse(f"{section}.kv_connector", name, f"use {_CONNECTORS[0]}, or --kv-offloading-size")
    if transfer.kv_role not in ("kv_both", None):
        fix = "use kv_both: prefill apart from decode is not served through vLLM"
        _refuse(f"{section}.kv_role", transfer.kv_role, fix)
    for key, value in transfer.kv_connector_extra_config.items():
        if key != MEMORY_KEY:
            _refuse(f"{section}.kv_connector_extra_config.{key}", value, "leave it out")


def _rank_bytes(vllm_config: Any) -> int:
    """Return a rank's share of the host tier, not 0 if there is one."""
    size = host_tier_bytes(vllm_config)
    return -(-size // parallel_config(vllm_config).world_size)


_MOST_DRAFTS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "num_speculative_tokens": MAX_DRAFTS,
        "prompt_lookup_max": MAX_LOOKUP,
        "prompt_lookup_min": MAX_LOOKUP,
    }
)


def check_drafts(vllm_config: Any, settings: Settings) -> None:
    """Check the source of drafts and their number, before fields that only other sources have.

    Raises:
        ClientConfigError: a setting is not served.
    """
    theirs = vllm_config.speculative_config
    method = None if theirs is None else theirs.method
    if settings.suffix_lookup and method not in (*_NGRAM, "suffix"):
        fix = "leave it out, or give --speculative-config with the method ngram"
        _refuse("additional_config.worker_daemon.suffix_lookup", True, fix)
    if settings.draft_model and method != _DRAFT_MODEL:
        fix = "leave it out, or give --speculative-config with the method draft_model"
        _refuse("additional_config.worker_daemon.draft_model", settings.draft_model, fix)
    if theirs is None:
        return
    if method not in (*_NGRAM, _DRAFT_MODEL):
        fix = "use ngram or draft_model"
        if method == "suffix":
            fix = "use ngram, and set suffix_lookup in additional_config.worker_daemon"
        _refuse("speculative_config.method", method, fix)
    if pools(vllm_config):
        _refuse("speculative_config", theirs, "leave it out: the model pools")
    for field, most in _MOST_DRAFTS.items():
        value = getattr(theirs, field)
        if value > most:
            _refuse(f"speculative_config.{field}", value, f"use at most {most}")
    if method == _DRAFT_MODEL:
        _check_draft_model(theirs, vllm_config.parallel_config.tensor_parallel_size)


def _check_draft_model(theirs: Any, tp_size: int) -> None:
    """Check what the daemons would do in another way. They check the checkpoint itself before they
    read any weights, and vLLM compares the vocabularies."""
    section, model = "speculative_config", theirs.draft_model_config
    if theirs.draft_tensor_parallel_size != tp_size:
        fix = f"leave it out: each of the {tp_size} ranks has its part"
        _refuse(f"{section}.draft_tensor_parallel_size", theirs.draft_tensor_parallel_size, fix)
    if theirs.max_model_len is not None:
        fix = "use --max-model-len: both models serve the same lengths"
        _refuse(f"{section}.max_model_len", theirs.max_model_len, fix)
    if model.quantization is not None and not _is_quantized(model):
        fix = "leave it out: a draft model is quantized by its checkpoint alone"
        _refuse(f"{section}.quantization", model.quantization, fix)
    if model.quantization not in (None, *_QUANTIZED_CHECKPOINTS):
        _refuse(
            f"{section}.model", theirs.model, f"use another checkpoint than {model.quantization}"
        )
    if model.is_encoder_decoder or model.is_multimodal_model or model.runner_type == "pooling":
        _refuse(f"{section}.model", theirs.model, "use a text model that generates")


def pools(vllm_config: Any) -> bool:
    """Return True if the server computes outputs of pooling instead of tokens."""
    model = vllm_config.model_config
    return model is not None and model.runner_type == "pooling"


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


_ROPE: Final = ("rope_parameters", "rope_scaling")
"""vLLM's names of one field."""
_LENGTH: Final = "max_position_embeddings"


def _overrides(model: Any) -> str:
    """Return what the daemons are to read in place of config.json's fields: what vLLM has made of
    its hf_overrides."""
    given = model.hf_overrides
    if not given:
        return ""
    if not isinstance(given, Mapping):
        _refuse("hf_overrides", str(given), f"give a JSON object with {_ROPE[0]} or {_LENGTH}")
    nested = given.get("text_config")
    named = dict(given)
    if isinstance(nested, Mapping):
        named = {**given, **nested}
        del named["text_config"]
    for key, value in named.items():
        if key not in (*_ROPE, _LENGTH):
            fix = f"change it in config.json; only {_ROPE[0]} and {_LENGTH} are replaced"
            _refuse(f"hf_overrides.{key}", value, fix)
    text, overrides = model.hf_text_config, {}
    if _LENGTH in named:
        overrides[_LENGTH] = text.max_position_embeddings
    if any(key in named for key in _ROPE):
        overrides[_ROPE[0]] = _whole_rope(text.rope_parameters)
    return json.dumps(overrides, sort_keys=True)


def _whole_rope(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return rope_parameters whose fields do not depend on who supplies defaults: they replace the
    checkpoint's as a whole."""
    by_type = [each for each in parameters.values() if isinstance(each, Mapping)]
    for part in by_type or [parameters]:
        for key in ("rope_type", "rope_theta"):
            if key not in part:
                fix = f"add {key}, as config.json has it"
                _refuse(f"hf_overrides.{_ROPE[0]}", dict(part), fix)
    return parameters


def _check_lora(lora: Any, dtype: object) -> None:
    if lora is not None and lora.lora_dtype not in ("auto", dtype):
        _refuse("lora_dtype", lora.lora_dtype, "leave it out: adapters have the model's dtype")


def _check_pooling(vllm_config: Any) -> None:
    """Check what concerns pooling alone."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    if not pools(vllm_config):
        return
    pooler = model.pooler_config
    if pooler.tok_pooling_type == "STEP":
        _refuse("pooler_config.tok_pooling_type", "STEP", "use ALL")
    # Many prompts would be unfinished at once, whose tokens' outputs are kept.
    for field in ("long_prefill_token_threshold", "long_prefill_token_threshold_adaptive"):
        value = getattr(scheduler, field)
        if value:
            _refuse(field, value, "leave it out")
    _check_activation(model.hf_config)


_PROBLEM_ACTIVATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "single_label_classification": "Softmax",
        "multi_label_classification": "Sigmoid",
        "regression": "Identity",
    }
)
"""torch's names of the functions that problem_type means."""


def _check_activation(config: Any) -> None:
    """Refuse a checkpoint with two functions that make scores of logits: its problem_type decides
    for vLLM, and the other field for the daemons, as for sentence-transformers."""
    problem = getattr(config, "problem_type", None)
    if problem is None:
        return
    chosen = {
        "sbert_ce_default_activation_function": getattr(
            config, "sbert_ce_default_activation_function", None
        ),
        "sentence_transformers.activation_fn": (
            getattr(config, "sentence_transformers", None) or {}
        ).get("activation_fn"),
    }
    for field, value in chosen.items():
        name = str(value).rpartition(".")[2]
        if value is not None and name != _PROBLEM_ACTIVATIONS.get(problem):
            _refuse(f"hf_config.{field}", value, f"remove it or problem_type {problem} there")


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


def check_keeps_state(vllm_config: Any) -> None:
    """Check what vLLM may not do with a model whose layers keep a state per request: share
    prefixes, or refuse drafts. Raises ClientConfigError as check_loaded does."""
    if vllm_config.cache_config.enable_prefix_caching:
        fix = "use --no-enable-prefix-caching: layers of the model keep a state per request"
        _refuse("enable_prefix_caching", True, fix)
    if vllm_config.speculative_config is not None:
        fix = "leave it out: layers of the model keep a state per request"
        _refuse("speculative_config", vllm_config.speculative_config, fix)


def _check_states(theirs: str, support: PoolingSupport) -> None:
    """Refuse another kind of pooling than the daemons': it is theirs that counts."""
    for each in support.tasks:
        if each.states not in ("each", _STATES.get(theirs)):
            kind = next(name for name, states in _STATES.items() if states == each.states)
            fix = f'use --pooler-config \'{{"pooling_type": "{kind}"}}\', as the daemons do'
            _refuse("pooler_config.pooling_type", theirs, fix)


def _refuse(field: str, value: object, fix: str) -> None:
    raise refusal(field, value, fix)

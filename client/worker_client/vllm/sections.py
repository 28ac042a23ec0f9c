"""Fields of vLLM's configuration that may differ from vLLM's defaults before worker daemons, and
why. Every section is closed: a field that is not named here is refused once it differs, also one
that a later vLLM adds."""

import dataclasses
from collections.abc import Iterator, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from worker_client.errors import (
    ClientConfigError,
    config_error,
)


class Idle(NamedTuple):
    """A field that cannot matter where daemons compute: it is logged, not refused."""

    why: str
    values: tuple[str, ...] | None = None
    """The values for which this holds; None: all."""


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """Fields of one section that may differ from their defaults. Dots lead into parts of it."""

    sent: tuple[str, ...] = ()
    """Translated to a setting of the daemons, or checked in configuration.py."""
    own: tuple[str, ...] = ()
    """vLLM's server and scheduler act on it themselves."""
    derived: tuple[str, ...] = ()
    """No option: vLLM sets it, by the model, by other options or by the platform."""
    idle: Mapping[str, Idle] = dataclasses.field(default_factory=dict)
    is_option: bool = False
    """Its fields are options of the same name: errors need not name the section."""

    def allows(self, path: str) -> bool:
        """Return whether a field may have any value."""
        return path in self.sent or path in self.own or path in self.derived


_COMPILES: Final = Idle("daemons compile no model")
_MEETS: Final = Idle("daemons meet at a separate rendezvous")
_NO_MEDIA: Final = Idle("requests with media are refused")
_READS: Final = Idle("daemons read files in their own way")
_WARMS: Final = Idle("vLLM's kernels do not run")

SECTIONS: Final[Mapping[str, Section]] = MappingProxyType(
    {
        "vllm_config": Section(
            own=("additional_config", "shutdown_timeout"),
            derived=("device_config", "instance_id", "quant_config"),
            is_option=True,
        ),
        "cache_config": Section(
            sent=(
                "block_size",
                "cache_dtype",
                "gpu_memory_utilization",
                "kv_cache_memory_bytes",
                "kv_offloading_backend",
                "kv_offloading_size",
                "num_gpu_blocks_override",
            ),
            own=("enable_prefix_caching", "prefix_caching_hash_algo"),
            derived=("is_attention_free", "sliding_window"),
            is_option=True,
        ),
        "compilation_config": Section(
            idle={
                "backend": _COMPILES,
                "cache_dir": _COMPILES,
                "compile_cache_save_format": _COMPILES,
                "compile_ranges_endpoints": _COMPILES,
                "compile_sizes": _COMPILES,
                "custom_ops": _COMPILES,
                "dynamic_shapes_config": _COMPILES,
                "fast_moe_cold_start": _COMPILES,
                "inductor_compile_config": _COMPILES,
                "inductor_passes": _COMPILES,
                "ir_enable_torch_wrap": _COMPILES,
                "mode": _COMPILES,
                "pass_config": _COMPILES,
                "splitting_ops": _COMPILES,
                "use_inductor_graph_partition": _COMPILES,
            }
        ),
        "kernel_config": Section(
            idle={
                "enable_cutedsl_warmup": _WARMS,
                "enable_flashinfer_autotune": _WARMS,
                "enable_jit_warmup": _WARMS,
            }
        ),
        "kv_events_config": Section(
            own=(
                "buffer_steps",
                "enable_kv_cache_events",
                "endpoint",
                "hwm",
                "max_queue_size",
                "publisher",
                "replay_endpoint",
                "topic",
            )
        ),
        "kv_transfer_config": Section(
            sent=("kv_connector", "kv_connector_extra_config", "kv_role"),
            derived=("engine_id",),
            idle={
                "kv_load_failure_policy": Idle("blocks that do not match are computed again"),
            },
        ),
        "load_config": Section(
            sent=("download_dir", "load_format"),
            idle={
                "safetensors_load_strategy": _READS,
                "safetensors_prefetch_block_size": _READS,
                "safetensors_prefetch_num_threads": _READS,
                "use_tqdm_on_load": Idle("daemons show no progress bar"),
            },
            is_option=True,
        ),
        "logging_config": Section(
            own=("configure_logging", "formatter", "log_level", "pylogging_config_file")
        ),
        "lora_config": Section(
            sent=("lora_dtype", "max_cpu_loras", "max_lora_rank", "max_loras"), is_option=True
        ),
        "model_config": Section(
            sent=(
                "dtype",
                "enable_prompt_embeds",
                "enable_sleep_mode",
                "enforce_eager",
                "hf_overrides",
                "max_logprobs",
                "max_model_len",
                "model",
                "quantization",
                "revision",
                "seed",
            ),
            own=(
                "allow_deprecated_quantization",
                "code_revision",
                "convert",
                "generation_config",
                "hf_token",
                "io_processor_plugin",
                "multimodal_config",  # with --language-model-only, all requests with media fail
                "override_generation_config",
                "renderer_num_workers",
                "runner",
                "served_model_name",
                "skip_tokenizer_init",
                "tokenizer",
                "tokenizer_mode",
                "tokenizer_revision",
                "trust_remote_code",
            ),
            idle={
                "allowed_local_media_path": _NO_MEDIA,
                "allowed_media_domains": _NO_MEDIA,
                "config_format": Idle("daemons read config.json", ("hf",)),
                "disable_cascade_attn": Idle("daemons have no cascade attention"),
            },
            is_option=True,
        ),
        "observability_config": Section(
            own=(
                "custom_histogram_buckets",
                "enable_logging_iteration_details",
                "kv_cache_metrics",
                "kv_cache_metrics_sample",
                "otlp_traces_endpoint",
                "per_request_spec_decode_metrics",
                "show_hidden_metrics_for_version",
            ),
            idle={"jit_monitor_mode": _WARMS, "jit_monitor_verbose": _WARMS},
            is_option=True,
        ),
        "parallel_config": Section(
            sent=("enable_expert_parallel", "pipeline_parallel_size", "tensor_parallel_size"),
            derived=("disable_nccl_for_dp_synchronization", "is_moe_model"),
            idle={
                "data_parallel_rpc_port": Idle("there is no data parallelism"),
                "distributed_executor_backend": Idle("daemons are processes", ("mp", "uni")),
                "master_addr": _MEETS,
                "master_port": _MEETS,
                "max_parallel_loading_workers": Idle("vLLM ignores it itself"),
            },
            is_option=True,
        ),
        "pooler_config": Section(
            sent=("pooling_type", "seq_pooling_type", "tok_pooling_type"),
            own=(
                "dimensions",
                "enable_chunked_processing",
                "enable_flash_late_interaction",
                "max_embed_len",
                "task",
                "use_activation",
            ),
            is_option=True,
        ),
        "profiler_config": Section(own=("ignore_frontend", "profiler", "torch_profiler_dir")),
        "reasoning_config": Section(
            own=("reasoning_end_str", "reasoning_parser", "reasoning_start_str")
        ),
        "scheduler_config": Section(
            sent=("async_scheduling", "max_num_batched_tokens", "max_num_seqs", "scheduler_cls"),
            own=(
                "disable_chunked_mm_input",
                "disable_hybrid_kv_cache_manager",
                "enable_chunked_prefill",
                "long_prefill_token_threshold",
                "long_prefill_token_threshold_adaptive",
                "max_num_active_seqs",
                "max_num_queued_reqs",
                "max_num_queued_tokens",
                "max_num_scheduled_tokens",
                "policy",
                "prefill_schedule_interval",
                "scheduler_reserve_full_isl",
                "stream_interval",
                "watermark",
            ),
            derived=("is_multimodal_model", "runner_type"),
            is_option=True,
        ),
        "speculative_config": Section(
            sent=(
                "draft_tensor_parallel_size",
                "method",
                "model",
                "num_speculative_tokens",
                "prompt_lookup_max",
                "prompt_lookup_min",
                "quantization",
                "revision",
            ),
            own=("code_revision", "num_speculative_tokens_per_batch_size"),
            derived=(
                "draft_model_config",
                "draft_parallel_config",
                "target_model_config",
                "target_parallel_config",
            ),
            idle={"max_model_len": Idle("there is no draft model")},
        ),
        "structured_outputs_config": Section(
            own=(
                "backend",
                "disable_additional_properties",
                "disable_any_whitespace",
                "enable_in_reasoning",
                "reasoning_parser",
                "reasoning_parser_plugin",
            )
        ),
        "watchdog_config": Section(own=("check_interval", "dump_dir", "timeout")),
    }
)
"""Sections that are not named have no field that may differ."""

OPTIONAL: Final = (
    "kv_events_config",
    "kv_transfer_config",
    "lora_config",
    "reasoning_config",
    "speculative_config",
)
"""Sections that are absent by default, and may be there."""

_CLOSED: Final = Section()
_EPLB: Final = "leave it out, or use worker-client serve, whose daemons balance experts"
_NUMA: Final = "leave it out: bind the daemons' processes"
_TIMEOUT: Final = "set step_deadline_ms in additional_config.worker_daemon"
_FIXES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "compilation_config.cudagraph_mode": "leave it out; --enforce-eager turns CUDA graphs off",
        "cpu_distributed_timeout_seconds": _TIMEOUT,
        "data_parallel_size": "start one server for each group of daemons",
        "distributed_executor_backend": "leave it out: the daemons are the workers",
        "distributed_timeout_seconds": _TIMEOUT,
        "enable_eplb": _EPLB,
        "eplb_config.num_redundant_experts": _EPLB,
        "eplb_config.step_interval": _EPLB,
        "enable_cumem_allocator": "use --enable-sleep-mode",
        "hf_config_path": "put its config.json into the model's directory",
        "logits_processors": "name them in additional_config.worker_daemon.logits_processors: the "
        "daemons have their code",
        "numa_bind": _NUMA,
        "numa_bind_cpus": _NUMA,
        "numa_bind_nodes": _NUMA,
        "optimization_level": "leave it out; --enforce-eager turns CUDA graphs off",
        "quantization_config": "use --quantization fp8",
        "weight_transfer_config": "leave it out: the operation init_weight_transfer_engine chooses",
        "worker_cls": "leave it out: the daemons are the workers",
    }
)


class Difference(NamedTuple):
    """A field that differs from its default, where that is not simply served."""

    field: str
    value: object
    idle: Idle | None
    """None: it is to be refused."""


def check_sections(vllm_config: Any, defaults: Any) -> Mapping[str, str]:
    """Return the fields that differ from their defaults without an effect, and why there is none.
    defaults: vLLM's own, with the same sections.

    Raises:
        ClientConfigError: a field differs that is not served. The error names all of these.
    """
    found = list(_differences("vllm_config", vllm_config, defaults))
    refused = [each for each in found if each.idle is None]
    if refused:
        first, *others = refused
        more = f", nor {', '.join(each.field for each in others)}" if others else ""
        raise refusal(first.field, first.value, _FIXES.get(first.field, "leave it out"), more)
    return {each.field: each.idle.why for each in found if each.idle is not None}


def refusal(field: str, value: object, fix: str, more: str = "") -> ClientConfigError:
    """Return the error of a setting that is not served."""
    if dataclasses.is_dataclass(value):
        value = type(value).__name__
    elif isinstance(value, Enum):
        value = value.name
    return config_error(field, value, f"worker daemons do not serve this setting{more}", fix)


def _differences(name: str, theirs: Any, default: Any, parent: str = "") -> Iterator[Difference]:
    """Yield the differences of a section, or of a part of one: parent is then the part's path, with
    a dot."""
    section = SECTIONS.get(name, _CLOSED)
    for entry in dataclasses.fields(theirs):
        path = parent + entry.name
        if not entry.init or entry.name.startswith("_") or section.allows(path):
            continue
        value, usual = getattr(theirs, entry.name), getattr(default, entry.name, None)
        if _is_same(value, usual):
            continue
        idle = section.idle.get(path)
        if idle is not None and (idle.values is None or value in idle.values):
            yield Difference(_shown(name, section, path), value, idle)
        elif not dataclasses.is_dataclass(value) or usual is None:
            yield Difference(_shown(name, section, path), value, None)
        elif name == "vllm_config" or entry.name in SECTIONS:
            yield from _differences(entry.name, value, usual)
        else:
            yield from _differences(name, value, usual, f"{path}.")


def _shown(name: str, section: Section, path: str) -> str:
    return path if section.is_option else f"{name}.{path}"


def _is_same(value: object, usual: object) -> bool:
    """Return whether two values of a field mean the same. None and False both mean off."""
    is_off = value is None or value is False
    return usual is None or usual is False if is_off else bool(value == usual)

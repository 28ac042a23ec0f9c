"""The options of `generate`, `bench`, `embed` and `serve`, in groups. A group's `config` checks its
values and puts them into its part of the worker configuration; raises ClientConfigError."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, get_args

import typer

from rpc_schema.config import (
    FIT_MAX_MODEL_LEN,
    MAX_DRAFTS,
    MAX_REDUNDANT_EXPERTS,
    CacheConfig,
    DraftMethod,
    Dtype,
    KVCacheDtype,
    KVTierMemory,
    LoadFormat,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    PromptAttentionDtype,
    Quantization,
    SchedulerConfig,
    SpeculativeConfig,
    read_layer_partition,
)
from worker_client.cli.devices import Device
from worker_client.cli.options import KeyFile, KnownDaemons, Wait, one_of
from worker_client.driver_parts.experts import EPLB_STEP_INTERVAL
from worker_client.errors import config_error
from worker_client.group.loading import check_model, check_speculative
from worker_client.group.replacement import REPLACE_WITHIN_S
from worker_client.inputs.tokenizer import LARGEST_TEXT_BYTES, MAX_TEXT_BYTES
from worker_client.scheduler.step_budget import check_max_itl_ms
from worker_client.wire.endpoint import split_endpoints
from worker_client.wire.keys import NO_KEYS, Keys, read_keys

DEFAULT_MAX_TOKENS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The model, and the form in which it is loaded."""

    model: Annotated[
        str,
        typer.Option(help="Checkpoint directory, or a repository of the hub: ORG/NAME[@REVISION]."),
    ]
    dtype: Annotated[str, typer.Option(help=", ".join(get_args(Dtype)))] = "auto"
    quantization: Annotated[
        str, typer.Option(help="auto; fp8 quantizes the matrices of layers while they are loaded.")
    ] = "auto"
    load_format: Annotated[str, typer.Option(help=", ".join(get_args(LoadFormat)))] = "auto"
    enable_expert_parallel: Annotated[
        bool, typer.Option(help="Give each tensor-parallel rank whole experts.")
    ] = False
    enable_eplb: Annotated[
        bool, typer.Option(help="Move experts between ranks, to balance loads.")
    ] = False
    num_redundant_experts: Annotated[
        int,
        typer.Option(
            min=0, max=MAX_REDUNDANT_EXPERTS, help="Further copies of each layer's experts."
        ),
    ] = 0
    eplb_step_interval: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="STEPS",
            help=f"Balance experts every so many steps; default: {EPLB_STEP_INTERVAL}.",
        ),
    ] = None
    enable_return_routed_experts: Annotated[
        bool, typer.Option(help="Keep the experts of tokens, for requests that ask for them.")
    ] = False
    hf_overrides: Annotated[
        str,
        typer.Option(
            help="JSON object of fields that replace those of config.json: rope_parameters, "
            "max_position_embeddings."
        ),
    ] = ""
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=FIT_MAX_MODEL_LEN,
            help="Default: the model's own limit; -1: up to what the KV cache holds.",
        ),
    ] = None
    fit_max_model_len: Annotated[
        bool, typer.Option(help="Lower max_model_len to what the cache holds.")
    ] = False
    enable_sleep_mode: Annotated[
        bool,
        typer.Option(
            "--enable-sleep-mode",
            help="Lay memory out so that a driver can put the group to sleep.",
        ),
    ] = False
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seeds dummy weights and requests without one.")
    ] = None

    @property
    def is_fitted(self) -> bool:
        """True if max_model_len may be lowered to what the KV cache holds."""
        return self.fit_max_model_len or self.max_model_len == FIT_MAX_MODEL_LEN

    @property
    def step_interval(self) -> int | None:
        """Steps between two rebalances of experts; None: these do not move. Raises
        ClientConfigError."""
        if self.enable_eplb:
            return self.eplb_step_interval or EPLB_STEP_INTERVAL
        if self.eplb_step_interval is not None:
            problem, fix = "the experts do not move", "leave it out, or use enable_eplb"
            raise config_error("eplb_step_interval", self.eplb_step_interval, problem, fix)
        return None

    def config(self) -> ModelConfig:
        """Return the model's configuration, with the model as it was named."""
        if self.max_model_len == 0:
            fix = "use at least 1, or -1 to fit it"
            raise config_error("max_model_len", 0, "out of bounds", fix)
        config = ModelConfig(
            model=self.model,
            dtype=one_of("dtype", self.dtype, Dtype),
            quantization=one_of("quantization", self.quantization, Quantization),
            load_format=one_of("load_format", self.load_format, LoadFormat),
            max_model_len=None if self.max_model_len == FIT_MAX_MODEL_LEN else self.max_model_len,
            enable_expert_parallel=self.enable_expert_parallel,
            enable_eplb=self.enable_eplb,
            num_redundant_experts=self.num_redundant_experts,
            enable_return_routed_experts=self.enable_return_routed_experts,
            seed=self.seed or 0,
            enable_sleep_mode=self.enable_sleep_mode,
            hf_overrides=self.hf_overrides,
        )
        check_model(config)
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """The daemons: those that run, or how to start and replace local ones."""

    endpoints: Annotated[
        str | None, typer.Option(help="Running daemons, in rank order: EP,EP,...")
    ] = None
    device: Annotated[Device | None, typer.Option(help="Default: cuda if there is a GPU.")] = None
    key_file: KeyFile = None
    known_daemons: KnownDaemons = None
    wait: Wait = 0.0
    reload: Annotated[
        bool, typer.Option("--reload", help="Load again, even if a configuration is loaded.")
    ] = False
    force: Annotated[
        bool, typer.Option("--force", help="Take daemons from a live driver (role admin).")
    ] = False
    replace_within: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Wait for a dead daemon to be restarted; 0: give up at once.",
        ),
    ] = REPLACE_WITHIN_S
    restart: Annotated[bool, typer.Option("--restart", help="Restart local daemons that died.")] = (
        False
    )

    def running(self) -> tuple[str, ...]:
        """Return the endpoints of running daemons; empty: local ones are to be started. Raises
        ClientConfigError if the option names none."""
        if self.endpoints is None:
            return ()
        if not (endpoints := split_endpoints(self.endpoints)):
            fix = "give EP,EP,..., or leave the option out to start daemons"
            raise config_error("endpoints", self.endpoints, "it names no daemon", fix)
        return endpoints

    def keys(self) -> Keys:
        """Return the keys for running daemons; local ones have none."""
        return NO_KEYS if self.endpoints is None else read_keys(self.key_file, self.known_daemons)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    """The sizes of the group."""

    pipeline_parallel_size: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks of a stage; default: 1, of `serve` one for each GPU."),
    ] = None
    data_parallel_size: Annotated[
        int, typer.Option(min=1, help="Replicas of the model, each with all stages and ranks.")
    ] = 1
    layer_partition: Annotated[
        str | None, typer.Option(help="Layers of each stage: N,N,...; default: even.")
    ] = None

    def config(self) -> ParallelConfig:
        """Return the group's sizes."""
        return ParallelConfig(
            pipeline_parallel_size=self.pipeline_parallel_size,
            tensor_parallel_size=self.tensor_parallel_size or 1,
            layer_partition=self._layers(),
            data_parallel_size=self.data_parallel_size,
        )

    def _layers(self) -> tuple[int, ...] | None:
        """Return the layers of each stage. The daemons check them against the model."""
        if self.layer_partition is None:
            return None
        try:
            return read_layer_partition(self.layer_partition)
        except ValueError as error:
            fix = "give each stage's number of layers, as in 17,15"
            given = self.layer_partition
            raise config_error("layer_partition", given, str(error), fix) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """Limits of a step, and the way it runs."""

    max_num_seqs: Annotated[
        int, typer.Option(min=1, max=65535, help="Requests running at once.")
    ] = 256
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a step.")] = 8192
    max_itl_ms: Annotated[
        float | None,
        typer.Option(metavar="MS", help="Cut prompts so that tokens come within this time."),
    ] = None
    logits_processors: Annotated[
        str, typer.Option(help="Custom ones that requests may ask for: NAME,NAME,...")
    ] = ""
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")] = False

    def config(self) -> SchedulerConfig:
        """Return the limits of steps."""
        if self.max_itl_ms is not None:
            check_max_itl_ms(self.max_itl_ms)
        names = [part.strip() for part in self.logits_processors.split(",")]
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            logits_processors=tuple(filter(None, names)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """Drafts of tokens, for steps to verify."""

    speculative_method: Annotated[
        str, typer.Option(help="What drafts tokens: " + ", ".join(get_args(DraftMethod)))
    ] = "none"
    num_speculative_tokens: Annotated[
        int, typer.Option(min=0, max=MAX_DRAFTS, help="Drafts of a request in a step at most.")
    ] = 0
    speculative_model: Annotated[
        str | None, typer.Option(help="draft_model: the draft model, named as --model is.")
    ] = None
    prompt_lookup_max: Annotated[
        int, typer.Option(min=1, max=32, help="ngram, suffix: longest match that counts.")
    ] = 4
    prompt_lookup_min: Annotated[
        int, typer.Option(min=1, max=32, help="ngram, suffix: shortest match.")
    ] = 2

    def config(self) -> SpeculativeConfig:
        """Return what drafts tokens, with the draft model as it was named."""
        config = SpeculativeConfig(
            method=one_of("speculative_method", self.speculative_method, DraftMethod),
            num_speculative_tokens=self.num_speculative_tokens,
            model=self.speculative_model,
            prompt_lookup_max=self.prompt_lookup_max,
            prompt_lookup_min=self.prompt_lookup_min,
        )
        check_speculative(config)
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """The KV cache, and the memory for it."""

    block_size: Annotated[int, typer.Option(min=1, max=1024, help="Tokens in a KV block.")] = 16
    kv_cache_dtype: Annotated[
        str, typer.Option(help="auto (the model's), fp8 (half the memory of bfloat16)")
    ] = "auto"
    prompt_attention_dtype: Annotated[
        str, typer.Option(help="auto (the model's), fp8 (faster long prompts, over an fp8 cache)")
    ] = "auto"
    num_gpu_blocks: Annotated[
        int | None, typer.Option(min=2, help="KV blocks; default: what fits.")
    ] = None
    gpu_memory_utilization: Annotated[float, typer.Option(max=1.0, help="Share of the memory.")] = (
        0.9
    )
    kv_cache_memory_bytes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=2**63 - 1,
            help="Size of each rank's KV cache, instead of the memory share; `status` advises.",
        ),
    ] = None
    kv_host_memory_bytes: Annotated[
        int,
        typer.Option(min=0, max=2**63 - 1, help="Each rank's host memory for KV blocks; 0: none."),
    ] = 0
    kv_files: Annotated[
        bool, typer.Option("--kv-files", help="Keep KV blocks in files of the daemons.")
    ] = False
    kv_tier_memory: Annotated[
        str, typer.Option(help="Place of --kv-host-memory-bytes: host, or device (the GPU's).")
    ] = "host"

    def config(self) -> CacheConfig:
        """Return the cache's configuration."""
        share = self.gpu_memory_utilization
        if not 0.0 < share <= 1.0:
            fix = "use more than 0, at most 1"
            raise config_error("gpu_memory_utilization", share, "out of bounds", fix)
        return CacheConfig(
            block_size=self.block_size,
            gpu_memory_utilization=share,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            kv_cache_dtype=one_of("kv_cache_dtype", self.kv_cache_dtype, KVCacheDtype),
            prompt_attention_dtype=one_of(
                "prompt_attention_dtype", self.prompt_attention_dtype, PromptAttentionDtype
            ),
            kv_host_memory_bytes=self.kv_host_memory_bytes,
            kv_files=self.kv_files,
            kv_tier_memory=one_of("kv_tier_memory", self.kv_tier_memory, KVTierMemory),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """LoRA adapters: their directory and their number."""

    lora_root: Annotated[
        Path | None, typer.Option(help="Directory of LoRA adapters, for local daemons.")
    ] = None
    max_loras: Annotated[
        int, typer.Option(min=0, max=256, help="LoRA adapters in a step; 0: none at all.")
    ] = 0
    max_lora_rank: Annotated[
        int, typer.Option(min=1, max=512, help="Largest rank of an adapter.")
    ] = 16
    max_cpu_loras: Annotated[
        int | None, typer.Option(min=1, help="Adapters in host memory; default: --max-loras.")
    ] = None

    def config(self) -> LoraConfig:
        """Return the limits of adapters."""
        return LoraConfig(
            max_loras=self.max_loras,
            max_lora_rank=self.max_lora_rank,
            max_cpu_loras=self.max_cpu_loras,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Requests, and the file for their results."""

    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="A prompt; may be repeated.")
    ] = None
    max_text_bytes: Annotated[
        int,
        typer.Option(min=1, max=LARGEST_TEXT_BYTES, help="UTF-8 bytes of a prompt's text at most."),
    ] = MAX_TEXT_BYTES
    input_: Annotated[
        Path | None, typer.Option("--input", help="Requests, one JSON object a line (JSONL).")
    ] = None
    output: Annotated[
        Path | None, typer.Option("--output", help="File for the results, as JSONL.")
    ] = None
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to generate for each --prompt.")
    ] = DEFAULT_MAX_TOKENS

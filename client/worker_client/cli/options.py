"""The shared options of `generate` and `bench`, and the sources of their defaults: command line,
then environment (WORKER_CLIENT_*), then the TOML file of --config."""

import copy
import functools
import inspect
import os
import tomllib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import typer
from msgspec import structs

from rpc_schema.config import (
    FIT_MAX_MODEL_LEN,
    MAX_DRAFTS,
    CacheConfig,
    DraftMethod,
    Dtype,
    GraphConfig,
    KVCacheDtype,
    LoadFormat,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    Quantization,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
    read_layer_partition,
)
from worker_client.cli.downloads import shown_downloads
from worker_client.errors import config_error
from worker_client.group.loading import check_speculative
from worker_client.group.replacement import REPLACE_WITHIN_S
from worker_client.inputs.model_source import ModelSource, find_model
from worker_client.inputs.tokenizer import LARGEST_TEXT_BYTES, MAX_TEXT_BYTES
from worker_client.scheduler.step_budget import check_max_itl_ms
from worker_client.wire.endpoint import split_endpoints
from worker_client.wire.keys import NO_KEYS, Keys, read_keys

DEFAULT_MAX_TOKENS: Final = 64
_LINE_ONLY: Final = ("force", "config", "prompt", "input_", "output", "max_tokens")
"""Options without an environment variable."""


class Device(StrEnum):
    """Device of local daemons."""

    CPU = "cpu"
    CUDA = "cuda"


def default_device() -> Device:
    """Return cuda if there is an NVIDIA device node."""
    found = any(Path("/dev").glob("nvidia[0-9]*"))
    return Device.CUDA if found else Device.CPU


def _num_gpus() -> int:
    """Return the number of GPUs that processes of ours can use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    names = [name.strip() for name in visible.split(",")]
    wrong = [place for place, name in enumerate(names) if name in ("", "-1")]
    return wrong[0] if wrong else len(names)


def cuda_devices() -> list[str]:
    """Return the GPUs that daemons can be started on. Raises ClientConfigError: there is none."""
    found = _num_gpus()
    if not found:
        fix = "give --device cpu, or make the GPU visible (CUDA_VISIBLE_DEVICES, /dev/nvidia0)"
        raise config_error("device", Device.CUDA.value, "there is no GPU", fix)
    return [f"cuda:{index}" for index in range(found)]


def read_config_file(context: typer.Context, path: Path | None) -> Path | None:
    """Make a TOML file's keys (`max_num_seqs = 64`) the defaults of a command's options."""
    if path is None:
        return None
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise typer.BadParameter(f"cannot read {path}: {error}") from None
    known = {parameter.name for parameter in context.command.params}
    unknown = sorted(set(values) - known)
    if unknown:
        near = get_close_matches(unknown[0].replace("-", "_"), filter(None, known), 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise typer.BadParameter(
            f"{path} sets {unknown[0]!r}, which is not an option of this command{meant}"
        )
    context.default_map = {**values, **(context.default_map or {})}
    return path


ENV_PREFIX: Final = "WORKER_CLIENT_"


def _env(name: str) -> str:
    return ENV_PREFIX + name


KeyFile = Annotated[
    str | None,
    typer.Option(
        envvar=_env("KEY_FILE"), help="Our secret file, or credential:NAME; needed on tcp."
    ),
]
KnownDaemons = Annotated[
    Path | None,
    typer.Option(envvar=_env("KNOWN_DAEMONS"), help="JSON file of the daemons' public keys."),
]
Wait = Annotated[
    float,
    typer.Option(
        envvar=_env("WAIT"),
        min=0.0,
        metavar="SECONDS",
        help="Wait for daemons that are not started, or do not answer, yet.",
    ),
]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Checked options of generate and bench."""

    model: ModelSource
    endpoints: tuple[str, ...]
    device: Device
    config: WorkerConfig
    num_gpu_blocks: int | None
    fit_max_model_len: bool
    seed: int | None
    reload: bool
    force: bool
    keys: Keys = NO_KEYS
    """Keys for the daemons of `endpoints`; local ones have none."""
    replace_within_s: float = REPLACE_WITHIN_S
    restart: bool = False
    wait_s: float = 0.0
    prompts: tuple[str, ...] = ()
    input: Path | None = None
    output: Path | None = None
    max_tokens: int = DEFAULT_MAX_TOKENS
    """Applies to each prompt."""
    lora_root: Path | None = None
    """Directory of the LoRA adapters of local daemons."""
    adapter_cache: Path | None = None
    """Hub cache with adapters, for local daemons too."""
    draft: ModelSource | None = None
    """The draft model, if there is one."""
    max_text_bytes: int = MAX_TEXT_BYTES
    """Bound on the UTF-8 bytes of a prompt's text."""
    max_itl_ms: float | None = None
    """Target for the time between two tokens of a request, in milliseconds."""


def build_run_options(
    *,
    model: Annotated[
        str,
        typer.Option(help="Checkpoint directory, or a repository of the hub: ORG/NAME[@REVISION]."),
    ],
    endpoints: Annotated[
        str | None, typer.Option(help="Running daemons, in rank order: EP,EP,...")
    ] = None,
    pipeline_parallel_size: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks of a stage; default: 1, of `serve` one for each GPU."),
    ] = None,
    data_parallel_size: Annotated[
        int, typer.Option(min=1, help="Replicas of the model, each with all stages and ranks.")
    ] = 1,
    layer_partition: Annotated[
        str | None, typer.Option(help="Layers of each stage: N,N,...; default: even.")
    ] = None,
    device: Annotated[Device | None, typer.Option(help="Default: cuda if there is a GPU.")] = None,
    dtype: Annotated[str, typer.Option(help=", ".join(get_args(Dtype)))] = "auto",
    quantization: Annotated[
        str, typer.Option(help="auto; fp8 quantizes the matrices of layers while they are loaded.")
    ] = "auto",
    load_format: Annotated[str, typer.Option(help=", ".join(get_args(LoadFormat)))] = "auto",
    enable_expert_parallel: Annotated[
        bool, typer.Option(help="Give each tensor-parallel rank whole experts.")
    ] = False,
    enable_return_routed_experts: Annotated[
        bool, typer.Option(help="Keep the experts of tokens, for requests that ask for them.")
    ] = False,
    hf_overrides: Annotated[
        str,
        typer.Option(
            help="JSON object of fields that replace those of config.json: rope_parameters, "
            "max_position_embeddings."
        ),
    ] = "",
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=FIT_MAX_MODEL_LEN,
            help="Default: the model's own limit; -1: up to what the KV cache holds.",
        ),
    ] = None,
    fit_max_model_len: Annotated[
        bool, typer.Option(help="Lower max_model_len to what the cache holds.")
    ] = False,
    max_num_seqs: Annotated[
        int, typer.Option(min=1, max=65535, help="Requests running at once.")
    ] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a step.")] = 8192,
    max_itl_ms: Annotated[
        float | None,
        typer.Option(metavar="MS", help="Cut prompts so that tokens come within this time."),
    ] = None,
    logits_processors: Annotated[
        str, typer.Option(help="Custom ones that requests may ask for: NAME,NAME,...")
    ] = "",
    speculative_method: Annotated[
        str, typer.Option(help="What drafts tokens: " + ", ".join(get_args(DraftMethod)))
    ] = "none",
    num_speculative_tokens: Annotated[
        int, typer.Option(min=0, max=MAX_DRAFTS, help="Drafts of a request in a step at most.")
    ] = 0,
    speculative_model: Annotated[
        str | None, typer.Option(help="draft_model: the draft model, named as --model is.")
    ] = None,
    prompt_lookup_max: Annotated[
        int, typer.Option(min=1, max=32, help="ngram, suffix: longest match that counts.")
    ] = 4,
    prompt_lookup_min: Annotated[
        int, typer.Option(min=1, max=32, help="ngram, suffix: shortest match.")
    ] = 2,
    block_size: Annotated[int, typer.Option(min=1, max=1024, help="Tokens in a KV block.")] = 16,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="auto (the model's), fp8 (half the memory of bfloat16)")
    ] = "auto",
    num_gpu_blocks: Annotated[
        int | None, typer.Option(min=2, help="KV blocks; default: what fits.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(max=1.0, help="Share of the memory.")
    ] = 0.9,
    kv_cache_memory_bytes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=2**63 - 1,
            help="Size of each rank's KV cache, instead of the memory share; `status` advises.",
        ),
    ] = None,
    kv_host_memory_bytes: Annotated[
        int,
        typer.Option(min=0, max=2**63 - 1, help="Each rank's host memory for KV blocks; 0: none."),
    ] = 0,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="No CUDA graphs.")] = False,
    lora_root: Annotated[
        Path | None, typer.Option(help="Directory of LoRA adapters, for local daemons.")
    ] = None,
    max_loras: Annotated[
        int, typer.Option(min=0, max=256, help="LoRA adapters in a step; 0: none at all.")
    ] = 0,
    max_lora_rank: Annotated[
        int, typer.Option(min=1, max=512, help="Largest rank of an adapter.")
    ] = 16,
    max_cpu_loras: Annotated[
        int | None, typer.Option(min=1, help="Adapters in host memory; default: --max-loras.")
    ] = None,
    enable_sleep_mode: Annotated[
        bool,
        typer.Option(
            "--enable-sleep-mode",
            help="Lay memory out so that a driver can put the group to sleep.",
        ),
    ] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seeds dummy weights and requests without one.")
    ] = None,
    reload: Annotated[
        bool, typer.Option("--reload", help="Load again, even if a configuration is loaded.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Take daemons from a live driver (role admin).")
    ] = False,
    key_file: KeyFile = None,
    known_daemons: KnownDaemons = None,
    replace_within: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            help="Wait for a dead daemon to be restarted; 0: give up at once.",
        ),
    ] = REPLACE_WITHIN_S,
    restart: Annotated[
        bool, typer.Option("--restart", help="Restart local daemons that died.")
    ] = False,
    wait: Wait = 0.0,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", is_eager=True, callback=read_config_file, help="TOML file with defaults."
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", help="A prompt; may be repeated.")
    ] = None,
    max_text_bytes: Annotated[
        int,
        typer.Option(min=1, max=LARGEST_TEXT_BYTES, help="UTF-8 bytes of a prompt's text at most."),
    ] = MAX_TEXT_BYTES,
    input_: Annotated[
        Path | None, typer.Option("--input", help="Requests, one JSON object a line (JSONL).")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="File for the results, as JSONL.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens to generate for each --prompt.")
    ] = DEFAULT_MAX_TOKENS,
) -> RunOptions:
    """Check the options and put them into a worker configuration.

    Downloads the small files of models that are named by their repositories.

    Raises:
        ClientConfigError: one of them is invalid.
        HubModelError: a repository cannot be read.
    """
    _check_bounds(gpu_memory_utilization, max_model_len)
    if max_itl_ms is not None:
        check_max_itl_ms(max_itl_ms)
    is_fitted = max_model_len == FIT_MAX_MODEL_LEN
    speculative = SpeculativeConfig(
        method=one_of("speculative_method", speculative_method, DraftMethod),
        num_speculative_tokens=num_speculative_tokens,
        model=speculative_model,
        prompt_lookup_max=prompt_lookup_max,
        prompt_lookup_min=prompt_lookup_min,
    )
    check_speculative(speculative)
    with shown_downloads() as show:
        found = find_model(model, show=show)
        draft = None
        if speculative_model is not None:
            draft = find_model(speculative_model, "speculative_model", show)
            speculative = structs.replace(speculative, model=draft.sent_as)
    group = WorkerConfig(
        parallel=ParallelConfig(
            pipeline_parallel_size=pipeline_parallel_size,
            tensor_parallel_size=tensor_parallel_size or 1,
            layer_partition=None if layer_partition is None else _counts(layer_partition),
            data_parallel_size=data_parallel_size,
        ),
        model=ModelConfig(
            model=found.sent_as,
            dtype=one_of("dtype", dtype, Dtype),
            quantization=one_of("quantization", quantization, Quantization),
            load_format=one_of("load_format", load_format, LoadFormat),
            max_model_len=None if is_fitted else max_model_len,
            enable_expert_parallel=enable_expert_parallel,
            enable_return_routed_experts=enable_return_routed_experts,
            seed=seed or 0,
            enable_sleep_mode=enable_sleep_mode,
            hf_overrides=hf_overrides,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            logits_processors=tuple(
                name for part in logits_processors.split(",") if (name := part.strip())
            ),
        ),
        cache=CacheConfig(
            block_size=block_size,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            kv_cache_dtype=one_of("kv_cache_dtype", kv_cache_dtype, KVCacheDtype),
            kv_host_memory_bytes=kv_host_memory_bytes,
        ),
        graph=GraphConfig(enforce_eager=enforce_eager),
        lora=LoraConfig(
            max_loras=max_loras, max_lora_rank=max_lora_rank, max_cpu_loras=max_cpu_loras
        ),
        speculative=speculative,
    )
    return RunOptions(
        model=found,
        endpoints=() if endpoints is None else _endpoints(endpoints),
        device=device or default_device(),
        config=group,
        num_gpu_blocks=num_gpu_blocks,
        fit_max_model_len=fit_max_model_len or is_fitted,
        seed=seed,
        reload=reload,
        force=force,
        keys=NO_KEYS if endpoints is None else read_keys(key_file, known_daemons),
        replace_within_s=replace_within,
        restart=restart,
        wait_s=wait,
        prompts=tuple(prompt or ()),
        input=input_,
        output=output,
        max_tokens=max_tokens,
        lora_root=lora_root,
        draft=draft,
        max_text_bytes=max_text_bytes,
        max_itl_ms=max_itl_ms,
    )


def _check_bounds(gpu_memory_utilization: float, max_model_len: int | None) -> None:
    if not 0.0 < gpu_memory_utilization <= 1.0:
        fix = "use more than 0, at most 1"
        raise config_error("gpu_memory_utilization", gpu_memory_utilization, "out of bounds", fix)
    if max_model_len == 0:
        raise config_error("max_model_len", 0, "out of bounds", "use at least 1, or -1 to fit it")


def _endpoints(text: str) -> tuple[str, ...]:
    """Return the endpoints of `EP,EP,...`. Raises ClientConfigError if there are none: then it
    would be local daemons that are started."""
    if not (endpoints := split_endpoints(text)):
        fix = "give EP,EP,..., or leave the option out to start daemons"
        raise config_error("endpoints", text, "it names no daemon", fix)
    return endpoints


def _counts(text: str) -> tuple[int, ...]:
    """Return the counts of "N,N,...". The daemons check them against the model."""
    try:
        return read_layer_partition(text)
    except ValueError as error:
        fix = "give each stage's number of layers, as in 17,15"
        raise config_error("layer_partition", text, str(error), fix) from None


def takes_run_options(
    command: Callable[..., None],
    *,
    without: Collection[str] = (),
    complete: Callable[[dict[str, Any]], None] = lambda values: None,
) -> Callable[..., None]:
    """Return a command with the parameters of build_run_options and its own. The wrapped function
    gets a RunOptions as its first argument. without: parameters that it does not have. complete: is
    called with the values of all, and may change those of build_run_options."""
    parameters = inspect.signature(build_run_options).parameters.values()
    shared = [_from_environment(each) for each in parameters if each.name not in without]
    own = list(inspect.signature(command).parameters.values())[1:]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        complete(values)
        options = build_run_options(**{entry.name: values.pop(entry.name) for entry in shared})
        command(options, **values)

    keyword_only = [entry.replace(kind=inspect.Parameter.KEYWORD_ONLY) for entry in own]
    vars(run)["__signature__"] = inspect.Signature([*shared, *keyword_only])
    run.__annotations__ = {entry.name: entry.annotation for entry in (*shared, *own)}
    return run


def _from_environment(parameter: inspect.Parameter) -> inspect.Parameter:
    """Let an option be set by the environment variable of its name."""
    if parameter.name in _LINE_ONLY:
        return parameter
    kind, option = get_args(parameter.annotation)
    option = copy.copy(option)
    option.envvar = _env(parameter.name.upper())
    return parameter.replace(annotation=Annotated[kind, option])


def one_of(field: str, value: str, kind: Any) -> Any:
    """Return the value if it is one of a Literal's."""
    if value not in get_args(kind):
        fix = "use " + ", ".join(get_args(kind))
        raise config_error(field, value, "unknown value", fix)
    return value

"""Resolves the driver's configuration, with the checkpoint and the device, to the values that the
worker runs with. Reads files, changes nothing. This is where "auto" is replaced by a value."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rpc_schema.config import (
    MIN_STEP_DEADLINE_MS,
    CacheConfig,
    LoraConfig,
    ModelConfig,
    Quantization,
    SchedulerConfig,
    SpeculativeConfig,
)
from rpc_schema.errors import CheckpointError
from rpc_schema.pooling import PooledStates, PooledTask, PoolingSupport
from rpc_schema.routed_experts import RoutedExpertsShape
from worker_daemon.contracts.fp8 import FP8
from worker_daemon.contracts.layer_ops import LayerOps
from worker_daemon.distributed.ep import ReplicaExperts
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.distributed.tp import TensorParallel
from worker_daemon.errors import config_error
from worker_daemon.layers.adapters import AdapterLayout
from worker_daemon.layers.attention import NullAttention
from worker_daemon.layers.cache_spec import LatentLayerSpec
from worker_daemon.layers.expert_slots import ExpertSlots
from worker_daemon.layers.quantization import ONLINE
from worker_daemon.layers.rotary import max_table_length
from worker_daemon.models.config import pooling_files, read_model_config, read_overrides
from worker_daemon.models.decoder import DecoderStage, build_stage, checkpoint_pieces
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.saved_set import (
    CONFIG_FILES,
    LOAD_FORMATS,
    SAFETENSORS,
    TENSORS_SUFFIX,
    SavedSet,
    read_saved_set,
)
from worker_daemon.models.stored_head import with_saved_head, with_stored_head
from worker_daemon.regular_file import read_whole
from worker_host.plain_text import one_line

_LOG = logging.getLogger(__name__)
_MAX_SHOWN = 1000
"""Limit on the bytes of names in a log line."""
READ_SUFFIXES = (".json", SAFETENSORS.suffix, TENSORS_SUFFIX)
"""Suffixes of the files that are read from a model's directory: indices may name no others."""
DEADLINE_MARGIN = 2
"""The factor by which a step's deadline must exceed the longest step's time: a host may be busy."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The model's values that LoadModel resolves."""

    directory: Path
    """The directory of config.json and the weights; for a saved set, that of the current save."""
    decoder: DecoderConfig
    dtype: torch.dtype
    max_model_len: int
    saved: SavedSet | None
    """The saved set, for load_formats sharded_state and tensorizer; None for the others."""
    config_files: Mapping[str, bytes]
    """Content of CONFIG_FILES and pooling_files, for later saves: the directory may be removed by
    then."""
    names: tuple[str, ...]
    """Names of the model, as a driver may give them: its absolute path and, if it is below the
    first root, the path from there."""
    routed_experts: RoutedExpertsShape | None = None
    """Sizes of the experts that requests may ask for; None: they may not."""

    def build_stage(
        self,
        layers: range,
        place: ParallelState,
        tp: TensorParallel,
        ops: LayerOps,
        adapters: AdapterLayout | None = None,
        *,
        has_fp8_cache: bool = False,
        replica_experts: ReplicaExperts | None = None,
        expert_slots: ExpertSlots | None = None,
    ) -> DecoderStage:
        """Return a rank's stage without memory: its parameters have only shapes. adapters and the
        options: see models.decoder.build_stage."""
        return build_stage(
            self.decoder,
            layers,
            place.is_first_stage,
            place.is_last_stage,
            tp,
            self.dtype,
            torch.device("meta"),
            self.max_model_len,
            NullAttention(),
            ops,
            adapters,
            has_fp8_cache=has_fp8_cache,
            keeps_experts=self.routed_experts is not None,
            replica_experts=replica_experts,
            expert_slots=expert_slots,
        )


def resolve_model(config: ModelConfig, model_roots: Sequence[Path]) -> ResolvedModel:
    """Resolve a model that is to be loaded: its configuration, and the head that its files have.
    Warns of fields of config.json without effect.

    Raises:
        ConfigError, CheckpointError: as resolve_config and with_stored_head do.
    """
    resolved = resolve_config(config, model_roots)
    if resolved.decoder.unknown_fields:
        names = one_line(", ".join(resolved.decoder.unknown_fields), _MAX_SHOWN)
        _LOG.warning("config.json has fields without effect; are they misspelt? %s", names)
    if config.load_format != "auto":
        return resolved
    return replace(resolved, decoder=with_stored_head(resolved.decoder, resolved.directory))


def resolve_config(config: ModelConfig, model_roots: Sequence[Path]) -> ResolvedModel:
    """Read the checkpoint's config.json, or a saved set's, and resolve directory, dtype and context
    length. Of weights only a saved set's index is read.

    Raises:
        ConfigError: the model lies outside the roots, or a value does not fit it.
        CheckpointError: the directory or its config.json is missing or broken.
    """
    _check_combinations(config)
    directory = named = confine_directory(config.model, model_roots)
    saved = read_saved_set(directory) if config.load_format in LOAD_FORMATS.values() else None
    if saved is not None:
        saved.check_files(config.load_format)
        directory = confine_directory(str(saved.directory), model_roots)
    decoder = read_model_config(directory, read_overrides(config.hf_overrides))
    if saved is not None:
        decoder = with_saved_head(decoder, saved.model)
    decoder = _quantized(decoder, config.quantization)
    if config.enable_expert_parallel:
        decoder = _with_expert_parallelism(decoder)
    if config.enable_eplb:
        if saved is not None:
            check_saved_experts(decoder, "load_format", config.load_format)
        decoder = replace(decoder, num_redundant_experts=config.num_redundant_experts)
    if decoder.quantization is not None:
        # Refuses merged matrices in mixed formats, equally on all ranks.
        checkpoint_pieces(decoder)
    stated = decoder.dtype or "float32" if saved is None else saved.shape.dtype
    return ResolvedModel(
        directory=directory,
        decoder=decoder,
        dtype=_resolve_dtype(config.dtype, stated),
        max_model_len=_resolve_length(config.max_model_len, decoder),
        saved=saved,
        config_files=_read_config_files(directory, decoder),
        names=_names(named, model_roots[0].resolve()),
        routed_experts=_routed_experts(decoder) if config.enable_return_routed_experts else None,
    )


def _names(directory: Path, root: Path) -> tuple[str, ...]:
    """Return ResolvedModel.names."""
    inside = directory.is_relative_to(root)
    return (str(directory), str(directory.relative_to(root))) if inside else (str(directory),)


def _with_expert_parallelism(decoder: DecoderConfig) -> DecoderConfig:
    if not any(decoder.layer_experts):
        problem = f"{decoder.architecture} has no experts"
        raise config_error("enable_expert_parallel", True, problem, "leave it out")
    return replace(decoder, expert_parallel=True)


def _check_combinations(config: ModelConfig) -> None:
    """Raise ConfigError for options of a model that mean nothing together."""
    fault = config.find_fault()
    if fault is not None:
        field, value, problem, fix = fault
        raise config_error(field, value, problem, fix)


def check_saved_experts(decoder: DecoderConfig, field: str, value: object) -> None:
    """Raise ConfigError if a saved set cannot have a model's experts wherever they are: it has a
    rank's biases in one tensor."""
    if any(each is not None and each.has_biases for each in decoder.layer_experts):
        problem = "a saved set cannot have biases of experts that move"
        raise config_error(field, value, problem, "use the checkpoint, or leave out enable_eplb")


def _routed_experts(decoder: DecoderConfig) -> RoutedExpertsShape:
    experts = [each for each in decoder.layer_experts if each is not None]
    sizes = {each.routing.top_k for each in experts}
    if len(sizes) != 1:
        problem = (
            f"layers of {decoder.architecture} choose {sorted(sizes)} experts of a token"
            if experts
            else f"{decoder.architecture} has no experts"
        )
        raise config_error("enable_return_routed_experts", True, problem, "leave it out")
    return RoutedExpertsShape(
        num_layers=len(experts),
        top_k=sizes.pop(),
        num_experts=max(each.num_experts for each in experts),
    )


def check_routed_experts(model: ResolvedModel, scheduler: SchedulerConfig) -> None:
    """Raise ConfigError if a step's experts do not fit into its reply."""
    shape, most = model.routed_experts, scheduler.max_num_batched_tokens
    if shape is not None and most > shape.max_positions:
        problem = f"the experts of a step's tokens take {shape.bytes_per_token} bytes each"
        fix = f"at most {shape.max_positions}, or leave out enable_return_routed_experts"
        raise config_error("scheduler.max_num_batched_tokens", most, problem, fix)


def pooling_support(decoder: DecoderConfig) -> PoolingSupport:
    """Return the pooling that a model supports, in wire types."""
    spec, head = decoder.pooler, decoder.pooler.head
    states: PooledStates = spec.states
    encoder = decoder.encoder
    of_encoder = {
        "whole_prompts": encoder is not None,
        "token_types": encoder is not None and encoder.num_token_types > 1,
    }
    if head is None:
        width = decoder.hidden_size
        tasks = (
            PooledTask(task="embed", width=width, states=states),
            PooledTask(task="token_embed", width=width, states="each"),
        )
        return PoolingSupport(tasks=tasks, **of_encoder)
    if head.per_token:
        task = PooledTask(task="token_classify", width=head.num_labels, states="each")
    else:
        task = PooledTask(task="classify", width=head.num_labels, states=states)
    return PoolingSupport(tasks=(task,), **of_encoder)


def check_cache(cache: CacheConfig, scheduler: SchedulerConfig) -> None:
    """Raise ConfigError for cache and scheduler settings with which no step could run."""
    size = cache.block_size
    if size & (size - 1):
        raise config_error("cache.block_size", size, "the block size must be a power of two", "16")
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise config_error(
            "scheduler.max_num_batched_tokens",
            scheduler.max_num_batched_tokens,
            "a step must have room for one token per sequence",
            f"at least max_num_seqs, {scheduler.max_num_seqs}",
        )
    if scheduler.step_deadline_ms < MIN_STEP_DEADLINE_MS:
        problem = "a step that is only slow would count as hung"
        fix = f"at least {MIN_STEP_DEADLINE_MS}"
        raise config_error("scheduler.step_deadline_ms", scheduler.step_deadline_ms, problem, fix)


def resolve_cache_dtype(cache: CacheConfig, model: ResolvedModel) -> torch.dtype:
    """Return the dtype of the KV cache. Raises ConfigError if layers cannot keep it in FP8."""
    if cache.kv_cache_dtype != "fp8":
        return model.dtype
    decoder = model.decoder
    kept = decoder.cache_specs(range(decoder.num_hidden_layers), tp_size=1)
    if any(isinstance(spec, LatentLayerSpec) for spec in kept):
        problem = "this model has layers that keep other things of a token than keys and values"
        raise config_error("cache.kv_cache_dtype", cache.kv_cache_dtype, problem, "auto")
    return FP8


def check_connector(cache: CacheConfig, model: ResolvedModel, *, in_lockstep: bool = False) -> None:
    """Check that the model's blocks can be kept outside the KV cache, if they are to be.
    in_lockstep: replicas take each step together.

    Raises:
        ConfigError: they cannot.
    """
    if not (cache.kv_files or cache.kv_host_memory_bytes):
        return
    field, value, none = "kv_host_memory_bytes", cache.kv_host_memory_bytes, "0"
    if cache.kv_files:
        field, value, none = "kv_files", True, "False"
    problem, fix = "", none
    if model.decoder.keeps_state:
        problem = "layers of the model keep a state per request, which blocks do not have"
    elif model.routed_experts is not None:
        problem = "the experts of tokens would come back unchecked"
        fix = f"{none}, or leave out enable_return_routed_experts"
    elif in_lockstep:
        problem = "replicas in lockstep keep blocks in the KV cache alone"
        fix = f"{none}, or replicas with steps of their own"
    if problem:
        raise config_error(f"cache.{field}", value, problem, fix)


def check_lora(config: LoraConfig) -> None:
    """Raise ConfigError if host memory has room for fewer adapters than device memory."""
    if config.num_cpu_loras < config.max_loras:
        problem = "adapters in device memory are in host memory too"
        fix = f"at least max_loras, {config.max_loras}"
        raise config_error("lora.max_cpu_loras", config.max_cpu_loras, problem, fix)


def check_speculative(config: SpeculativeConfig) -> None:
    """Raise ConfigError for settings of drafts that mean nothing together."""
    fault = config.find_fault()
    if fault is not None:
        field, value, problem, fix = fault
        raise config_error(f"speculative.{field}", value, problem, fix)


def check_deadline(deadline_ms: int, step_s: float, num_stages: int) -> None:
    """Raise ConfigError if a legal step would count as hung. step_s: the longest step's time on
    this stage. num_stages: a stage waits for those before it."""
    needed_ms = math.ceil(DEADLINE_MARGIN * num_stages * step_s * 1000)
    if deadline_ms < needed_ms:
        problem = f"the longest step takes {step_s:.2f} s on each of {num_stages} stages"
        fix = f"at least {needed_ms}, or a lower max_num_batched_tokens"
        raise config_error("scheduler.step_deadline_ms", deadline_ms, problem, fix)


def confine_directory(
    name: str, roots: Sequence[Path], field: str = "model", option: str = "--model-root"
) -> Path:
    """Return the real directory of a model (or adapter: `field` and the daemon's `option` name it).
    The directory and every file that may be read from it must be under a root, with symbolic links
    resolved.

    Raises:
        ConfigError: the directory, or a file in it, is outside the roots.
        CheckpointError: there is no such directory.
    """
    try:
        for root in (root.resolve() for root in roots):
            directory = (root / name).resolve()
            if directory.is_relative_to(root):
                _check_directory(name, directory, root, field)
                return directory
    except (OSError, ValueError, RuntimeError) as error:  # a symlink loop, a null byte
        problem = f"this is not a path: {error}"
        raise config_error(field, name, problem, "name a directory") from None
    problem = f"the {field} lies outside this daemon's {field} roots"
    under = f"a directory under {[str(root) for root in roots]}"
    fix = f"{under}, or start the daemon with another {option}"
    raise config_error(field, name, problem, fix)


def _check_directory(name: str, directory: Path, root: Path, field: str) -> None:
    if not directory.is_dir():
        fix = f"the directory of the {field}"
        raise CheckpointError("no such directory", field=field, value=name, fix=fix)
    patterns = [*(f"*{suffix}" for suffix in READ_SUFFIXES), "*/config.json"]
    for file in (file for pattern in patterns for file in directory.glob(pattern)):
        if not file.resolve().is_relative_to(root):
            problem = f"a file of the {field} is a link to outside this daemon's {field} roots"
            raise config_error(field, str(file), problem, f"keep it under {root}")


def config_paths(directory: Path, decoder: DecoderConfig) -> dict[str, Path]:
    """Return the files that configure a model, by their names in a saved set, whether or not they
    exist."""
    paths = {name: directory / name for name in CONFIG_FILES}
    paths.update(pooling_files(directory, decoder))
    return paths


def _read_config_files(directory: Path, decoder: DecoderConfig) -> dict[str, bytes]:
    paths = config_paths(directory, decoder)
    try:
        return {name: read_whole(path) for name, path in paths.items() if path.exists()}
    except OSError as error:
        problem = f"a file of the model cannot be read: {error}"
        fix = "make it a regular file of at most 16 MiB"
        raise CheckpointError(problem, field="model", value=str(directory), fix=fix) from error


def _resolve_dtype(asked: str, stated: str) -> torch.dtype:
    name = stated if asked == "auto" else asked
    if name not in DTYPES:
        fix = f"ask for one of {sorted(DTYPES)}"
        raise config_error("dtype", name, "the checkpoint's dtype is not supported", fix)
    return DTYPES[name]


def _quantized(decoder: DecoderConfig, asked: Quantization) -> DecoderConfig:
    """Return the decoder with the quantization that was asked for, unless its checkpoint has
    one."""
    if asked == "auto" or decoder.quantization is not None:
        return decoder
    if decoder.encoder is not None:
        problem = "encoders are not quantized"
        raise config_error("quantization", asked, problem, "auto")
    return replace(decoder, quantization=ONLINE)


def _resolve_length(asked: int | None, decoder: DecoderConfig) -> int:
    longest = decoder.max_position_embeddings
    length = asked or longest
    tabled = max_table_length(decoder.ropes)
    if tabled < length <= longest:
        problem = "the rotary tables would be too large for this context length"
        fix = f"give a max_model_len of at most {tabled}"
        raise config_error("max_model_len", length, problem, fix)
    if length <= longest:
        return length
    why = "exact only up to" if decoder.max_supported_len is not None else "made for"
    fix = f"at most {longest}"
    raise config_error("max_model_len", asked, f"the model is {why} {longest} tokens", fix)

"""Resolves the driver's configuration, with the checkpoint and the device, to the values that the
worker runs with. Pure. This is where "auto" is replaced by a value."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rpc_schema.config import MIN_STEP_DEADLINE_MS, CacheConfig, ModelConfig, SchedulerConfig
from worker_daemon.errors import CheckpointError, ConfigError
from worker_daemon.layers.rotary import max_table_length
from worker_daemon.models.config import read_model_config
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.saved_set import (
    CONFIG_FILES,
    LOAD_FORMATS,
    SAFETENSORS,
    TENSORS_SUFFIX,
    SavedSet,
    read_saved_set,
)
from worker_daemon.regular_file import read_whole

READ_SUFFIXES = (".json", SAFETENSORS.suffix, TENSORS_SUFFIX)
"""Suffixes of the files that are read from a model's directory: indices may name no others."""
DEADLINE_MARGIN = 2
"""The factor by which a step's deadline must exceed the longest step's time: a host may be busy."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The model's values that LoadModel resolves."""

    directory: Path
    """The directory of config.json and the weights; in a saved set that of the current save."""
    decoder: DecoderConfig
    dtype: torch.dtype
    max_model_len: int
    saved: SavedSet | None
    """The saved set, for load_formats sharded_state and tensorizer; None for the others."""
    config_files: Mapping[str, bytes]
    """Content of CONFIG_FILES, for a save to keep: the directory may be removed by then."""


def resolve_model(config: ModelConfig, model_roots: Sequence[Path]) -> ResolvedModel:
    """Read the checkpoint's config.json, or a saved set's, and resolve directory, dtype and context
    length.

    Raises:
        ConfigError: the model lies outside the roots, or a value does not fit it.
        CheckpointError: the directory or its config.json is missing or broken.
    """
    directory = confine_directory(config.model, model_roots)
    saved = read_saved_set(directory) if config.load_format in LOAD_FORMATS.values() else None
    if saved is not None:
        saved.check_files(config.load_format)
        directory = confine_directory(str(saved.directory), model_roots)
    decoder = read_model_config(directory)
    stated = decoder.dtype or "float32" if saved is None else saved.shape.dtype
    return ResolvedModel(
        directory=directory,
        decoder=decoder,
        dtype=_resolve_dtype(config.dtype, stated),
        max_model_len=_resolve_length(config.max_model_len, decoder),
        saved=saved,
        config_files=_read_config_files(directory),
    )


def check_cache(cache: CacheConfig, scheduler: SchedulerConfig) -> None:
    """Raise ConfigError for cache and scheduler settings that no step could run with."""
    size = cache.block_size
    if size & (size - 1):
        raise ConfigError(
            "the block size must be a power of two", field="cache.block_size", value=size, fix="16"
        )
    if scheduler.max_num_batched_tokens < scheduler.max_num_seqs:
        raise ConfigError(
            "a step must have room for a token of each sequence",
            field="scheduler.max_num_batched_tokens",
            value=scheduler.max_num_batched_tokens,
            fix=f"at least max_num_seqs, {scheduler.max_num_seqs}",
        )
    if scheduler.step_deadline_ms < MIN_STEP_DEADLINE_MS:
        raise ConfigError(
            "a step that is only slow would count as hung",
            field="scheduler.step_deadline_ms",
            value=scheduler.step_deadline_ms,
            fix=f"at least {MIN_STEP_DEADLINE_MS}",
        )


def check_deadline(deadline_ms: int, step_s: float, num_stages: int) -> None:
    """Raise ConfigError if a legal step would count as hung. step_s: the longest step's time on
    this stage. num_stages: a stage waits for those before it."""
    needed_ms = math.ceil(DEADLINE_MARGIN * num_stages * step_s * 1000)
    if deadline_ms < needed_ms:
        raise ConfigError(
            f"the longest step takes {step_s:.2f} s on each of {num_stages} stages",
            field="scheduler.step_deadline_ms",
            value=deadline_ms,
            fix=f"at least {needed_ms}, or a lower max_num_batched_tokens",
        )


def confine_directory(model: str, roots: Sequence[Path]) -> Path:
    """Return the model's real directory. It and every file that may be read from it must be under a
    root, symbolic links resolved.

    Raises:
        ConfigError: it, or a file of it, is outside the roots.
        CheckpointError: there is no such directory.
    """
    try:
        for root in (root.resolve() for root in roots):
            directory = (root / model).resolve()
            if directory.is_relative_to(root):
                _check_directory(model, directory, root)
                return directory
    except (OSError, ValueError, RuntimeError) as error:  # a loop of links, a null byte
        raise ConfigError(
            f"this is not a path: {error}", field="model", value=model, fix="name a directory"
        ) from None
    raise ConfigError(
        "the model lies outside this daemon's model roots",
        field="model",
        value=model,
        fix=f"a directory under {[str(root) for root in roots]}, or another --model-root",
    )


def _check_directory(model: str, directory: Path, root: Path) -> None:
    if not directory.is_dir():
        raise CheckpointError(
            "no such directory", field="model", value=model, fix="the directory of config.json"
        )
    for file in (file for suffix in READ_SUFFIXES for file in directory.glob(f"*{suffix}")):
        if not file.resolve().is_relative_to(root):
            raise ConfigError(
                "a file of the model is a link to outside this daemon's model roots",
                field="model",
                value=str(file),
                fix=f"keep it under {root}",
            )


def _read_config_files(directory: Path) -> dict[str, bytes]:
    paths = [directory / name for name in CONFIG_FILES]
    try:
        return {path.name: read_whole(path) for path in paths if path.exists()}
    except OSError as error:
        raise CheckpointError(
            f"a file of the model cannot be read: {error}",
            field="model",
            value=str(directory),
            fix="make it a regular file of at most 16 MiB",
        ) from error


def _resolve_dtype(asked: str, stated: str) -> torch.dtype:
    name = stated if asked == "auto" else asked
    if name not in DTYPES:
        raise ConfigError(
            "the checkpoint's dtype is not supported",
            field="dtype",
            value=name,
            fix=f"ask for one of {sorted(DTYPES)}",
        )
    return DTYPES[name]


def _resolve_length(asked: int | None, decoder: DecoderConfig) -> int:
    longest = decoder.max_position_embeddings
    length = asked or longest
    tabled = max_table_length(decoder.head_dim)
    if tabled < length <= longest:
        raise ConfigError(
            "the rotary table would be too large for this context length",
            field="max_model_len",
            value=length,
            fix=f"give a max_model_len of at most {tabled}",
        )
    if length <= longest:
        return length
    why = "exact only up to" if decoder.max_supported_len is not None else "made for"
    raise ConfigError(
        f"the model is {why} {longest} tokens",
        field="max_model_len",
        value=asked,
        fix=f"at most {longest}",
    )

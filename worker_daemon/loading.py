"""From a LoadModel request to this rank's stage, built and filled. Knows no runner, no link and no
socket; what it makes belongs to the worker.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rpc_schema import lifecycle as lc
from rpc_schema.config import ModelConfig, ParallelConfig, WorkerConfig
from worker_daemon.device.init import supports
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.distributed.tp import TensorParallel
from worker_daemon.errors import CapacityError, ConfigError
from worker_daemon.layers.attention import NullAttention
from worker_daemon.layers.attention_provider import (
    AttentionProvider,
    HeadShape,
    add_prompt_attention,
    probe_attention,
)
from worker_daemon.layers.ops_provider import probe_layer_ops
from worker_daemon.layers.rotary import rotary_table
from worker_daemon.models.config import DecoderConfig
from worker_daemon.models.decoder import DecoderStage, build_stage, checkpoint_names
from worker_daemon.models.partition import check_partition, partition_layers
from worker_daemon.models.saved_set import LOAD_FORMATS, GroupShape, load_saved
from worker_daemon.models.saving import RankWeights
from worker_daemon.models.tensorized import read_tensorized, require_tensorizer
from worker_daemon.models.weights import LoadProgress, load_dummy_weights, load_weights
from worker_daemon.resolve import ResolvedModel, check_cache, resolve_model
from worker_daemon.tagged_memory import TaggedMemory, open_memory

_LOG = logging.getLogger(__name__)
_PROGRESS_EVERY_S = 1.0
_LONG_OPERATION_S = 1800.0

SetPhase = Callable[[str, float], None]
"""(phase, seconds of legal silence): what the worker is at, for whoever watches."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank stands in its group, and what it computes on."""

    device: torch.device
    config: ParallelConfig
    parallel: ParallelState
    tp: TensorParallel


@dataclass(frozen=True, slots=True)
class Roots:
    """Directories under which models may lie."""

    model_roots: Sequence[Path]
    save_root: Path | None
    """Saved sets may lie there too."""

    def resolve(self, config: ModelConfig) -> ResolvedModel:
        """Find a model. Raises ConfigError and CheckpointError as resolve_model does."""
        if config.load_format not in LOAD_FORMATS.values() or self.save_root is None:
            return resolve_model(config, self.model_roots)
        return resolve_model(config, (self.save_root, *self.model_roots))


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What load_model makes and reset(DEVICE_READY) gives up."""

    config: WorkerConfig
    resolved: ResolvedModel
    stage: DecoderStage
    attention: AttentionProvider
    max_model_len: int
    memory: TaggedMemory
    """Where the stage's parameters lie, and its KV cache will: closed by whoever drops this."""


def load(message: lc.LoadModel, place: RankPlace, roots: Roots, set_phase: SetPhase) -> LoadedModel:
    """Build this rank's stage and shard, and fill it.

    Raises:
        ConfigError: the model, its partition or a size is not possible.
        CheckpointError: its files are missing, truncated or not what config.json says.
        CapacityError: it does not fit on the device.
    """
    check_cache(message.cache, message.scheduler)
    if message.model.load_format == "tensorizer":
        require_tensorizer("load_format", "tensorizer")
    resolved = roots.resolve(message.model)
    if not supports(place.device, resolved.dtype):
        raise ConfigError(
            "the device does not compute in it",
            field="dtype",
            value=str(resolved.dtype),
            fix="float16",
        )
    if resolved.saved is not None:
        resolved.saved.check(_group_shape(resolved, place), resolved.decoder)
    memory = open_memory(place.device, can_sleep=message.model.enable_sleep_mode)
    try:
        stage = _build_stage(resolved, place, memory)
        _fill(stage, message.model, resolved, place.parallel.rank, set_phase)
    except (torch.OutOfMemoryError, CapacityError) as error:
        memory.close()
        raise CapacityError(
            f"the weights do not fit: {error}", fix="more pipeline stages or tensor ranks"
        ) from None
    except BaseException:
        memory.close()
        raise
    return LoadedModel(
        config=WorkerConfig(
            parallel=place.config,
            model=message.model,
            scheduler=message.scheduler,
            cache=message.cache,
            graph=message.graph,
        ),
        resolved=resolved,
        stage=stage,
        attention=_probe_attention(stage, resolved.decoder, resolved.dtype, place),
        max_model_len=resolved.max_model_len,
        memory=memory,
    )


def rank_weights(model: LoadedModel, place: RankPlace) -> RankWeights:
    """Return what a saved set holds of this rank."""
    return RankWeights(
        rank=place.parallel.rank,
        shape=_group_shape(model.resolved, place),
        decoder=model.resolved.decoder,
        config_files=model.resolved.config_files,
        tensors=model.stage.checkpoint_views(),
    )


def _partition(decoder: DecoderConfig, place: RankPlace) -> tuple[range, ...]:
    return partition_layers(
        decoder.num_hidden_layers, place.parallel.pp_size, place.config.layer_partition
    )


def _group_shape(resolved: ResolvedModel, place: RankPlace) -> GroupShape:
    return GroupShape(
        pipeline_parallel_size=place.config.pipeline_parallel_size,
        tensor_parallel_size=place.config.tensor_parallel_size,
        layer_partition=tuple(map(len, _partition(resolved.decoder, place))),
        dtype=str(resolved.dtype).removeprefix("torch."),
    )


def _build_stage(resolved: ResolvedModel, place: RankPlace, memory: TaggedMemory) -> DecoderStage:
    """Without memory first: then its size is known, and memory says where it lies."""
    decoder, parallel = resolved.decoder, place.parallel
    check_partition(decoder, parallel.pp_size, parallel.tp_size)
    stage = build_stage(
        decoder,
        _partition(decoder, place)[parallel.pp_rank],
        parallel.is_first_stage,
        parallel.is_last_stage,
        place.tp,
        resolved.dtype,
        torch.device("meta"),
        resolved.max_model_len,
        NullAttention(),
        probe_layer_ops(place.device),
    )
    rotary = rotary_table(decoder.rope, resolved.max_model_len, place.device)
    memory.hold_stage(stage, rotary)
    return stage


def _probe_attention(
    stage: DecoderStage, decoder: DecoderConfig, dtype: torch.dtype, place: RankPlace
) -> AttentionProvider:
    heads = HeadShape(
        decoder.num_attention_heads // place.parallel.tp_size,
        stage.kv_layer_specs[0].num_kv_heads,
        decoder.head_dim,
    )
    paged = probe_attention(place.device, decoder.head_dim)
    return add_prompt_attention(paged, place.device, heads, dtype)


def _fill(
    stage: DecoderStage,
    config: ModelConfig,
    resolved: ResolvedModel,
    rank: int,
    set_phase: SetPhase,
) -> None:
    parameters = list(stage.parameters())
    progress = _ProgressLine(set_phase)
    if config.load_format == "dummy":
        report = load_dummy_weights(parameters, config.seed, progress)
    elif resolved.saved is not None:
        verify = config.verify_checksums
        load_file = read_tensorized if config.load_format == "tensorizer" else None
        report = load_saved(
            parameters, resolved.saved, rank, progress, verify=verify, load_file=load_file
        )
    else:
        names = checkpoint_names(resolved.decoder)
        report = load_weights(parameters, resolved.directory, names, progress)
    _LOG.info("loaded %.3f GB in %.1f s", report.bytes_loaded / 1e9, report.seconds)
    if report.ignored_tensors:
        _LOG.warning("the model does not use %s", ", ".join(report.ignored_tensors))


class _ProgressLine:
    """Says how far a load has come, in the log and in the phase, once a second."""

    def __init__(self, set_phase: SetPhase) -> None:
        self._set_phase = set_phase
        self._last_s = 0.0

    def __call__(self, progress: LoadProgress) -> None:
        if progress.seconds - self._last_s < _PROGRESS_EVERY_S:
            return
        self._last_s = progress.seconds
        rate = progress.bytes_done / progress.seconds
        left_s = (progress.bytes_total - progress.bytes_done) / rate
        percent = 100 * progress.bytes_done // progress.bytes_total
        self._set_phase(
            f"LOADING {percent}%, {rate / 1e9:.1f} GB/s, {left_s:.0f} s left", _LONG_OPERATION_S
        )
        _LOG.info(
            "loading: %.2f of %.2f GB, %.2f GB/s, %.0f s left",
            progress.bytes_done / 1e9,
            progress.bytes_total / 1e9,
            rate / 1e9,
            left_s,
        )

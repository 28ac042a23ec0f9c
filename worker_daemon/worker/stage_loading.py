"""Fills the stages of a rank, and chooses their attention: what the loads of a model and of its
draft model have in common."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from msgspec import structs

from model_hub.needed_files import NeededPart
from rpc_schema.config import ModelConfig, ParallelConfig
from worker_daemon.backend import Backend
from worker_daemon.contracts.hub import NO_HUB, HubSettings
from worker_daemon.distributed.ep import ReplicaExperts
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.distributed.tp import TensorParallel
from worker_daemon.errors import config_error
from worker_daemon.layers.attention import AttentionSpec, HeadSizes, NullAttention
from worker_daemon.layers.attention_choice import ChosenAttention, choose_attention
from worker_daemon.layers.prompt_providers import ScoreKind
from worker_daemon.layers.provider_records import ProviderRecords
from worker_daemon.models.decoder import DecoderStage, checkpoint_names
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.int4_order import load_orders, reset_orders
from worker_daemon.models.kv_scales import load_kv_scales
from worker_daemon.models.saved_set import LOAD_FORMATS, load_saved
from worker_daemon.models.tensorized import read_tensorized
from worker_daemon.models.weights import (
    LoadProgress,
    LoadReport,
    WriteObserver,
    load_dummy_weights,
    load_weights,
)
from worker_daemon.phases import LONG_OPERATION_S, SetPhase
from worker_daemon.settings import prepared_kernel_cache
from worker_daemon.worker.hub_models import HubModels
from worker_daemon.worker.resolve import (
    ResolvedModel,
    confine_directory,
    resolve_config,
    resolve_model,
)

_LOG = logging.getLogger(__name__)
_PROGRESS_EVERY_S = 1.0
_MAX_NAMES = 16
"""Limit on tensor names in a log line."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's place in its group, and its device."""

    device: torch.device
    config: ParallelConfig
    parallel: ParallelState
    tp: TensorParallel
    backend: Backend
    experts: ReplicaExperts | None = None
    """The ranks of this stage in all replicas; None unless these are in lockstep."""

    def sharing_experts(self, decoder: DecoderConfig) -> ReplicaExperts | None:
        """Return the ranks of all replicas that share a model's experts; None if each replica has
        all of them."""
        return self.experts if decoder.expert_parallel else None

    def expert_ranks(self, decoder: DecoderConfig) -> TensorParallel | ReplicaExperts:
        """Return the ranks of this stage that a model's experts lie on."""
        return self.sharing_experts(decoder) or self.tp

    def rank_in_set(self, decoder: DecoderConfig) -> int:
        """Return this rank's number in a saved set of a model: replicas have the same parts, unless
        they share experts."""
        shares = self.sharing_experts(decoder) is not None
        return self.parallel.rank_in_group if shares else self.parallel.rank_in_replica


@dataclass(frozen=True, slots=True)
class Roots:
    """The directories of models."""

    model_roots: Sequence[Path]
    save_root: Path | None
    """Saved sets may be there too."""
    lora_roots: Sequence[Path] = ()
    """Directories of LoRA adapters; none: adapters are refused."""
    hub: HubSettings = NO_HUB

    def resolve(
        self, config: ModelConfig, set_phase: SetPhase | None = None, content: bytes | None = None
    ) -> ResolvedModel:
        """Find a model, and download it if it is a repository's and may be. set_phase and content:
        see HubModels.locate. Raises ConfigError, CheckpointError and CapacityError as that and
        resolve_model do."""
        roots = self._of(config)
        directory = HubModels(self.hub, roots).locate(
            config.model, needed_part(config), set_phase, content
        )
        resolved = resolve_model(structs.replace(config, model=directory), roots)
        return replace(resolved, names=(*resolved.names, config.model))

    def find(self, config: ModelConfig) -> ResolvedModel:
        """Find a model by its configuration alone, without a download. Raises as resolve_config
        does."""
        roots = self._of(config)
        directory = HubModels(self.hub, roots).find(config.model, needed_part(config))
        return resolve_config(structs.replace(config, model=directory), roots)

    def adapter(self, name: str, *, may_download: bool) -> Path:
        """Return the directory of a LoRA adapter. Any thread may call it. Raises as
        confine_directory and HubModels.locate do."""
        if not self.lora_roots:
            problem = "this daemon has no directory of LoRA adapters"
            raise config_error("adapter", name, problem, "start it with --lora-root")
        hub = HubModels(self.hub, self.lora_roots, "adapter", "--lora-root")
        find = hub.locate if may_download else hub.find
        directory = find(name, NeededPart.ADAPTER)
        return confine_directory(directory, self.lora_roots, "adapter", "--lora-root")

    def _of(self, config: ModelConfig) -> Sequence[Path]:
        if config.load_format not in LOAD_FORMATS.values() or self.save_root is None:
            return self.model_roots
        return (self.save_root, *self.model_roots)


def needed_part(config: ModelConfig) -> NeededPart:
    """Return what a load needs of a repository."""
    return NeededPart.TEXTS if config.load_format == "dummy" else NeededPart.MODEL


def choose_stage_attention(
    stage: DecoderStage,
    decoder: DecoderConfig,
    dtype: torch.dtype,
    place: RankPlace,
    *,
    in_fp8: bool = False,
) -> ChosenAttention:
    """Return the attention of a rank's stage. in_fp8: see choose_attention. Raises as that does."""
    if not stage.kv_layer_specs:
        return ChosenAttention("whole", NullAttention())
    model, tp_size = decoder.heads, place.parallel.tp_size
    if model is None:
        return ChosenAttention("none", NullAttention())
    heads = HeadSizes(
        model.num_attention_heads // tp_size, model.local_kv_heads(tp_size), model.head_dim
    )
    kinds = [
        ScoreKind(mixer.sliding_window, mixer.logit_softcap, mixer.has_sinks)
        for mixer in decoder.mixers
        if isinstance(mixer, AttentionSpec)
    ]
    records = ProviderRecords(prepared_kernel_cache())
    return choose_attention(
        place.backend.attention, place.device, heads, dtype, kinds, records, in_fp8=in_fp8
    )


def fill_stage(
    stage: DecoderStage,
    config: ModelConfig,
    resolved: ResolvedModel,
    rank: int,
    set_phase: SetPhase,
    observer: WriteObserver | None = None,
) -> LoadReport:
    """Write a stage's weights. rank: see RankPlace.rank_in_set. Raises CheckpointError: files
    are missing, truncated, or do not match config.json."""
    parameters = list(stage.parameters())
    progress = _ProgressLine(set_phase)
    for each in stage.kv_scales:
        each.reset()
    if config.load_format == "dummy":
        reset_orders(parameters)
    if config.load_format == "dummy":
        report = load_dummy_weights(parameters, config.seed, progress, observer)
    elif resolved.saved is not None:
        report = load_saved(
            parameters,
            resolved.saved,
            rank,
            progress,
            verify=config.verify_checksums,
            load_file=read_tensorized if config.load_format == "tensorizer" else None,
            observer=observer,
            buffers=[each.parameter for each in stage.kv_scales],
            experts_move=stage.expert_slots is not None,
        )
    else:
        names = checkpoint_names(resolved.decoder)
        names |= load_kv_scales(stage.kv_scales, resolved.directory)
        names |= load_orders(parameters, resolved.directory, observer)
        report = load_weights(parameters, resolved.directory, names, progress, observer)
    size_gb = report.bytes_loaded / 1e9
    _LOG.info("loaded %s: %.3f GB in %.1f s", resolved.directory, size_gb, report.seconds)
    if report.ignored_tensors:
        shown = ", ".join(map(repr, report.ignored_tensors[:_MAX_NAMES]))
        _LOG.warning("the model does not use %d tensors: %s", len(report.ignored_tensors), shown)
    return report


class _ProgressLine:
    """Reports the progress of a load, in the log and in the phase, once a second."""

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
            f"LOADING {percent}%, {rate / 1e9:.1f} GB/s, {left_s:.0f} s left",
            LONG_OPERATION_S,
            done=progress.bytes_done / progress.bytes_total,
        )
        _LOG.info(
            "loading: %.2f of %.2f GB, %.2f GB/s, %.0f s left",
            progress.bytes_done / 1e9,
            progress.bytes_total / 1e9,
            rate / 1e9,
            left_s,
        )

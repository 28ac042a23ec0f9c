"""Loads a model for a LoadModel request, and again in place. The model belongs to the worker."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace

import torch
from msgspec import structs

from rpc_schema import lifecycle as lc
from rpc_schema.config import (
    CacheConfig,
    LoraConfig,
    ModelConfig,
    WorkerConfig,
)
from rpc_schema.errors import CapacityError, WorkerError
from rpc_schema.kv_cache import KVCacheConfig, KVCacheSpec
from rpc_schema.lifecycle import MemoryTag, SleepLevel
from worker_daemon.contracts.fp8 import FP8
from worker_daemon.contracts.logits_processor import MakeLogitsProcessor
from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.device.failures import FailureKind, drop_scratch, failure_kind, out_of_memory
from worker_daemon.device.init import computes_in_fp8, supports
from worker_daemon.distributed.tp import SingleRank
from worker_daemon.errors import config_error
from worker_daemon.layers.adapters import AdapterLayout, new_layout
from worker_daemon.layers.attention import NullAttention
from worker_daemon.layers.attention_choice import ChosenAttention
from worker_daemon.layers.expert_slots import Placement
from worker_daemon.layers.rotary import rotary_table
from worker_daemon.lora.adapter_files import AdapterFormat, adapter_stamps
from worker_daemon.lora.adapters import Adapters
from worker_daemon.lora.device_slots import DeviceSlots
from worker_daemon.lora.host_store import HostStore
from worker_daemon.lora.reader import AdapterReader
from worker_daemon.models.decoder import (
    DecoderStage,
    checkpoint_pieces,
    make_expert_slots,
    whole_model,
)
from worker_daemon.models.description import DecoderConfig, LayerSpec
from worker_daemon.models.file_identity import NO_STAMPS
from worker_daemon.models.partition import check_partition, partition_layers
from worker_daemon.models.saved_set import GroupShape
from worker_daemon.models.saving import RankWeights
from worker_daemon.models.tensorized import require_tensorizer
from worker_daemon.models.weight_state import WeightState
from worker_daemon.models.weights import (
    WriteObserver,
    check_checkpoint,
)
from worker_daemon.phases import SetPhase
from worker_daemon.runner.kv_cache import (
    FurtherPages,
    KVMemory,
    allocate_kv_caches,
    describe_further,
    describe_layers,
    routed_pages,
)
from worker_daemon.worker.draft_model import (
    DraftModel,
    build_draft,
    draft_layers,
    find_draft,
)
from worker_daemon.worker.expert_moves import read_placements
from worker_daemon.worker.logits_processors import find_logits_processors
from worker_daemon.worker.model_identity import ModelFiles
from worker_daemon.worker.resolve import (
    ResolvedModel,
    check_cache,
    check_connector,
    check_lora,
    check_routed_experts,
    check_saved_experts,
    check_speculative,
    resolve_cache_dtype,
)
from worker_daemon.worker.sleep_memory import HeldStage, TaggedMemory, open_memory
from worker_daemon.worker.stage_loading import RankPlace, Roots, choose_stage_attention, fill_stage

_LOG = logging.getLogger(__name__)
_FP8_HEAD_MULTIPLE = 16
"""The kernels read heads in units of 16 bytes."""
_FIT = "more pipeline stages or tensor ranks, or free memory and load again"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model, from load_model until reset(DEVICE_READY)."""

    config: WorkerConfig
    resolved: ResolvedModel
    stage: DecoderStage
    attention: ChosenAttention
    max_model_len: int
    memory: TaggedMemory
    """The memory of the stage's parameters, and later of its KV cache; closed when the model is
    dropped."""
    weights: WeightState
    next_load: ModelConfig
    """The configuration that reload_weights reads: as loaded, until update_config changes it."""
    adapters: Adapters | None = None
    """None if it was loaded without LoRA adapters."""
    processors: Mapping[str, MakeLogitsProcessor] = field(default_factory=dict)
    """Custom logits processors that requests may ask for."""
    draft: DraftModel | None = None
    """The draft model; of other stages than the last one too, but without memory."""
    draft_weights: WeightState | None = None
    """State of the draft model's weights, which have a version of their own; None without one."""

    def limited_to(self, max_model_len: int) -> "LoadedModel":
        """Return the model with another length limit, at most the one that it was loaded with.

        Raises:
            ConfigError: it is longer than that.
        """
        longest = self.resolved.max_model_len
        if max_model_len > longest:
            problem = "the model was loaded for shorter contexts"
            raise config_error("max_model_len", max_model_len, problem, f"at most {longest}")
        return replace(self, max_model_len=max_model_len)

    def require_adapters(self) -> Adapters:
        """Return the model's LoRA adapters. Raises ConfigError if it was loaded without."""
        if self.adapters is None:
            problem = "the model was loaded without LoRA adapters"
            raise config_error("max_loras", 0, problem, "load it with max_loras of at least 1")
        return self.adapters

    def sleep(self, level: SleepLevel) -> None:
        """Unmap the memory of both tags. Raises: see TaggedMemory.sleep."""
        self._leave(lambda: self.memory.sleep(level), "Sleep")

    def discard(self, tags: Collection[MemoryTag]) -> None:
        """Unmap the memory of tags. Raises: see TaggedMemory.discard."""
        self._leave(lambda: self.memory.discard(tags), "Discard")

    def _leave(self, change: Callable[[], None], cause: str) -> None:
        had_gone = self.memory.tags.weights == "discarded"
        change()
        if self.memory.tags.weights == "discarded" and not had_gone:
            scales = (p.pieces for p in self.stage.parameters() if p.is_kept)
            kept = {piece.name for pieces in scales for piece in pieces}
            self.weights.discard(f"{cause} kept nothing of them", kept)

    def finish_update(self, identity: SourceIdentity, version: int) -> None:
        """Record that all weights were written: they are complete, and no longer lost. Takes and
        raises as WeightState.finish does."""
        self.weights.finish(identity, version)
        self.memory.weights_filled()

    @property
    def kv_cache_specs(self) -> tuple[KVCacheSpec, ...]:
        """The KV layers of this stage and shard, in wire types."""
        own = describe_layers(self.stage.kv_layer_specs, self.cache_dtype)
        return own + describe_further(self.further_pages)

    @property
    def further_pages(self) -> tuple[FurtherPages, ...]:
        """Pages that this rank keeps besides its layers' KV: none on stages but the last."""
        return self.last_stage_pages if self.stage.is_last else ()

    @property
    def last_stage_pages(self) -> tuple[FurtherPages, ...]:
        """The further pages of each rank of the last stage: a draft model's, then the experts of
        tokens."""
        return draft_layers(self.draft) + routed_pages(self.resolved.routed_experts)

    @property
    def local_draft(self) -> DraftModel | None:
        """The draft model on a rank that runs it."""
        return self.draft if self.draft is not None and self.draft.is_local else None

    @property
    def weights_bytes(self) -> int:
        """Bytes of all parameters on this rank."""
        own, draft = self.stage.num_parameters_bytes, self.local_draft
        return own if draft is None else own + draft.stage.num_parameters_bytes

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of the KV cache."""
        return resolve_cache_dtype(self.config.cache, self.resolved)

    def allocate_kv_caches(
        self, plan: KVCacheConfig, make_zeros: Callable[[int, torch.dtype], torch.Tensor]
    ) -> KVMemory:
        """Return zeroed caches. Raises: see runner.kv_cache.allocate_kv_caches."""
        rows, specs = self.config.scheduler.max_num_seqs, self.stage.kv_layer_specs
        dtype, further = self.cache_dtype, self.further_pages
        return allocate_kv_caches(plan, specs, dtype, rows, make_zeros, further)

    def attend(self, *, is_real: bool) -> None:
        """Use the layers' attention from now on, or one that computes nothing."""
        self.stage.set_attention(self.attention.backend if is_real else NullAttention())
        if self.local_draft is not None:
            self.local_draft.attend(is_real=is_real)


def load(message: lc.LoadModel, place: RankPlace, roots: Roots, set_phase: SetPhase) -> LoadedModel:
    """Build this rank's stage and shard, and fill it.

    Raises:
        ConfigError: the model, its partition or a size is not possible, or a logits processor is
            not installed.
        CheckpointError: its files are missing, truncated, or do not match config.json.
        CapacityError: it does not fit on the device.
    """
    check_cache(message.cache, message.scheduler)
    check_lora(message.lora)
    check_speculative(message.speculative)
    processors = find_logits_processors(message.scheduler.logits_processors)
    if message.model.load_format == "tensorizer":
        require_tensorizer("load_format", "tensorizer")
    resolved = roots.resolve(message.model, set_phase, message.content)
    check_routed_experts(resolved, message.scheduler)
    placements = read_placements(message.expert_placements, resolved.decoder)
    check_connector(message.cache, resolved, in_lockstep=place.parallel.lockstep)
    if not supports(place.device, resolved.dtype):
        problem = "this device does not support this dtype"
        raise config_error("dtype", str(resolved.dtype), problem, "float16")
    has_fp8_cache = _has_fp8_cache(message.cache, resolved, place.device)
    attends_in_fp8 = _attends_in_fp8(message.cache, has_fp8_cache, place.device)
    if resolved.saved is not None:
        resolved.saved.check(_group_shape(resolved, place), resolved.decoder)
    found = find_draft(message.speculative, message.model, resolved, roots, set_phase)
    draft = None if found is None else build_draft(found, place)
    if draft is not None:
        draft.check_files()
    files = ModelFiles.of(resolved, message.model)
    identity = files.identity()
    memory = open_memory(place.device, can_sleep=message.model.enable_sleep_mode)
    try:
        layout = new_layout(message.lora.max_loras, message.lora.max_lora_rank)
        stage = _build_stage(resolved, place, layout, placements, has_fp8_cache=has_fp8_cache)
        _hold(memory, stage, draft, resolved.max_model_len, place.device)
        adapters = _make_adapters(layout, message.lora, resolved, place, memory, roots)
        fill_stage(stage, message.model, resolved, place.rank_in_set(resolved.decoder), set_phase)
        draft_weights = None
        if draft is not None:
            draft_weights = WeightState(draft.names, draft.fill(set_phase), 0)
        files.check_unchanged(identity)
    except CapacityError as error:
        memory.close()
        drop_scratch(error)
        raise CapacityError(f"the weights do not fit: {error}", fix=_FIT) from None
    except BaseException as error:
        memory.close()
        if isinstance(error, Exception) and failure_kind(error) is FailureKind.OUT_OF_MEMORY:
            drop_scratch(error)
            raise out_of_memory(error, _FIT, "the weights do not fit") from None
        raise
    return LoadedModel(
        config=WorkerConfig(
            parallel=place.config,
            model=message.model,
            scheduler=message.scheduler,
            cache=message.cache,
            graph=message.graph,
            lora=message.lora,
            speculative=message.speculative,
        ),
        resolved=resolved,
        stage=stage,
        attention=choose_stage_attention(
            stage, resolved.decoder, resolved.dtype, place, in_fp8=attends_in_fp8
        ),
        max_model_len=resolved.max_model_len,
        memory=memory,
        weights=WeightState(stage.loaded_names(), identity, _loaded_version(message, resolved)),
        next_load=message.model,
        adapters=adapters,
        processors=processors,
        draft=draft,
        draft_weights=draft_weights,
    )


def _loaded_version(message: lc.LoadModel, resolved: ResolvedModel) -> int:
    if message.weights_version is not None:
        return message.weights_version
    return 0 if resolved.saved is None else resolved.saved.version


def _make_adapters(
    layout: AdapterLayout | None,
    config: LoraConfig,
    resolved: ResolvedModel,
    place: RankPlace,
    memory: TaggedMemory,
    roots: Roots,
) -> Adapters | None:
    """Allocate the device slots of a layout that the stage has filled."""
    if layout is None:
        return None
    whole = AdapterLayout(1, 1)
    whole_model(resolved.decoder, SingleRank(), resolved.dtype, whole)
    is_cuda = place.device.type == "cuda"
    files = AdapterFormat(layout, whole.shapes, resolved.dtype, pinned=is_cuda)
    slots = memory.make_adapters((layout.max_slots, layout.slot_size), resolved.dtype)
    layout.bind(slots)
    return Adapters(
        layout,
        whole.shapes,
        HostStore(config.num_cpu_loras),
        DeviceSlots(slots),
        AdapterReader(
            lambda name: files.read(roots.adapter(name, may_download=True)),
            lambda name, loaded: _adapter_changed(name, loaded, roots),
        ),
    )


def _adapter_changed(name: str, loaded: SourceIdentity, roots: Roots) -> bool:
    """Return True if an adapter's files have changed. Files that are gone do not count: nothing
    else could be loaded."""
    try:
        directory = roots.adapter(name, may_download=False)
    except WorkerError:
        return False
    return adapter_stamps(directory) not in (loaded.stamps, NO_STAMPS)


def reload(
    model: LoadedModel,
    config: ModelConfig,
    version: int,
    place: RankPlace,
    roots: Roots,
    set_phase: SetPhase,
) -> tuple[LoadedModel, int]:
    """Fill the stage again, in place: no tensor moves, and none is held twice. Return the model and
    the bytes read. version: the number of the weights from then on.

    The expert loads are set to 0 if the directory is another one, or its files were replaced since
    the last load. After a weight update in between, replaced files are not detected.

    All checks that the headers allow are made before the first byte is written; a later failure
    leaves the weights dirty.

    Raises:
        ConfigError: the directory lies outside the roots, or holds another model.
        CheckpointError: its files are missing, truncated, or do not match config.json.
    """
    resolved = roots.resolve(config, set_phase)
    _check_same_model(resolved.decoder, model.resolved.decoder)
    if resolved.saved is not None:
        resolved.saved.check(_group_shape(model.resolved, place), resolved.decoder)
    elif config.load_format == "auto":
        check_checkpoint(resolved.directory, checkpoint_pieces(resolved.decoder))
    if model.draft is not None:
        model.draft.check_files()
    files = ModelFiles.of(resolved, config)
    identity = files.identity()
    is_other = resolved.directory != model.resolved.directory
    is_other |= model.weights.identity.stamps not in (b"", identity.stamps)  # files were replaced
    overwriting = _Overwriting(model.weights)
    try:
        report = fill_stage(
            model.stage,
            config,
            resolved,
            place.rank_in_set(model.resolved.decoder),
            set_phase,
            overwriting,
        )
        files.check_unchanged(identity)
        _refill_draft(model, set_phase)
        model.finish_update(identity, version)
    except BaseException as error:
        overwriting.failed(f"{type(error).__name__} in reload_weights: {error}")
        raise
    if is_other:
        model.stage.expert_loads.reset()
    resolved = replace(
        resolved, dtype=model.resolved.dtype, max_model_len=model.resolved.max_model_len
    )
    renewed = replace(
        model,
        config=structs.replace(model.config, model=config),
        resolved=resolved,
        next_load=config,
    )
    return renewed, report.bytes_loaded


def _refill_draft(model: LoadedModel, set_phase: SetPhase) -> None:
    """Read the draft model's weights again, if there is one."""
    if model.draft is None or model.draft_weights is None:
        return
    weights = model.draft_weights
    weights.begin(partial=False)
    weights.writing(model.draft.names)
    try:
        identity = model.draft.fill(set_phase)
    except BaseException as error:
        weights.interrupt(f"{type(error).__name__} in reload_weights: {error}")
        raise
    weights.written(model.draft.names)
    weights.finish(identity, weights.next_version(None))


def checkpoint_changed(model: LoadedModel, roots: Roots) -> bool:
    """Return True if the files that the weights were read from have been replaced since. Files that
    are gone, or that no longer are a model, do not count: nothing else could be loaded."""
    loaded = model.weights.identity
    if not loaded.stamps:
        return False
    try:
        resolved = roots.find(model.config.model)
        return ModelFiles.of(resolved, model.config.model).stamps() != loaded.stamps
    except (WorkerError, OSError):
        return False


class _Overwriting(WriteObserver):
    """Opens an update of a model's weights at the first byte written, not before."""

    def __init__(self, weights: WeightState) -> None:
        self._weights = weights
        self._has_begun = False

    def writing(self, names: Iterable[str]) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._weights.begin(partial=False)
        self._weights.writing(names)

    def written(self, names: Iterable[str]) -> None:
        self._weights.written(names)

    def failed(self, cause: str) -> None:
        if self._has_begun:
            self._weights.interrupt(cause)


def _check_same_model(found: DecoderConfig, loaded: DecoderConfig) -> None:
    """Raise ConfigError unless the models are the same; dtype and eos tokens may differ."""
    found = replace(found, dtype=loaded.dtype, eos_token_ids=loaded.eos_token_ids)
    for name, value, mine in _differences(found, loaded):
        fix = "reload weights of the same model, or reset and load this one"
        raise config_error(name, value, f"the loaded model has {mine!r}", fix)


def _differences(
    found: DecoderConfig, loaded: DecoderConfig
) -> Iterator[tuple[str, object, object]]:
    """Yield the name and both values of every setting in which two decoders differ: first the
    number of layers, then those around the layers, then the layers'."""
    first, second = found.layers, loaded.layers
    if len(first) != len(second):
        yield "num_hidden_layers", len(first), len(second)
    yield from _nested_differences(_values(found), _values(loaded))
    for layer, mine in zip(first, second, strict=True):
        yield from _nested_differences(_layer_values(layer), _layer_values(mine))


def _values(decoder: DecoderConfig) -> dict[str, object]:
    """Return the settings around the layers, nested like their specs."""
    values = asdict(decoder) | {"quantization": decoder.quantization}
    del values["layers"], values["unknown_fields"]
    return values


def _layer_values(layer: LayerSpec) -> dict[str, object]:
    """Return a layer's settings, nested like its specs, with its rotation as one value."""
    values = asdict(layer)
    values["attention"]["rope"] = layer.attention.rope
    return values


def _nested_differences(
    values: Mapping[str, object], mine: Mapping[str, object]
) -> Iterator[tuple[str, object, object]]:
    for name in dict.fromkeys((*values, *mine)):
        value, my_value = values.get(name), mine.get(name)
        if isinstance(value, dict) and isinstance(my_value, dict):
            yield from _nested_differences(value, my_value)
        elif value != my_value:
            yield name, value, my_value


def rank_weights(model: LoadedModel, place: RankPlace) -> RankWeights:
    """Return this rank's part of a saved set. Raises ConfigError: see check_saved_experts."""
    if model.stage.expert_slots is not None:
        check_saved_experts(model.resolved.decoder, "enable_eplb", True)
    return RankWeights(
        rank=place.rank_in_set(model.resolved.decoder),
        shape=_group_shape(model.resolved, place),
        decoder=model.resolved.decoder,
        config_files=model.resolved.config_files,
        tensors={**model.stage.checkpoint_views(), **model.stage.scale_views()},
        version=model.weights.version,
    )


def stage_layers(decoder: DecoderConfig, place: RankPlace) -> range:
    """Return the layers of this rank's stage."""
    return _partition(decoder, place)[place.parallel.pp_rank]


def _partition(decoder: DecoderConfig, place: RankPlace) -> tuple[range, ...]:
    return partition_layers(
        decoder.num_hidden_layers, place.parallel.pp_size, place.config.layer_partition
    )


def _group_shape(resolved: ResolvedModel, place: RankPlace) -> GroupShape:
    experts = place.sharing_experts(resolved.decoder)
    return GroupShape(
        pipeline_parallel_size=place.config.pipeline_parallel_size,
        tensor_parallel_size=place.config.tensor_parallel_size,
        layer_partition=tuple(map(len, _partition(resolved.decoder, place))),
        dtype=str(resolved.dtype).removeprefix("torch."),
        enable_expert_parallel=resolved.decoder.expert_parallel,
        replicas_sharing_experts=1 if experts is None else experts.dp_size,
    )


def _build_stage(
    resolved: ResolvedModel,
    place: RankPlace,
    adapters: AdapterLayout | None,
    placements: Mapping[int, Placement],
    *,
    has_fp8_cache: bool,
) -> DecoderStage:
    """Build the stage on the meta device, to learn its size."""
    decoder, parallel = resolved.decoder, place.parallel
    experts = place.sharing_experts(decoder)
    dp_size = 1 if experts is None else experts.dp_size
    check_partition(decoder, parallel.pp_size, parallel.tp_size, dp_size)
    layers, ops = stage_layers(decoder, place), place.backend.make_ops()
    ranks = place.expert_ranks(decoder)
    slots = make_expert_slots(decoder, ranks.rank, ranks.size, parallel.dp_rank, placements)
    return resolved.build_stage(
        layers,
        parallel,
        place.tp,
        ops,
        adapters,
        has_fp8_cache=has_fp8_cache,
        replica_experts=experts,
        expert_slots=slots,
    )


def _hold(
    memory: TaggedMemory,
    stage: DecoderStage,
    draft: DraftModel | None,
    length: int,
    device: torch.device,
) -> None:
    """Allocate the memory of the stages."""
    target = HeldStage(stage, [rotary_table(rope, length, device) for rope in stage.ropes])
    held = None
    if draft is not None and draft.is_local:
        held = HeldStage(draft.stage, draft.rotary_tables(device))
    memory.hold_stages(target, held)


def _has_fp8_cache(cache: CacheConfig, resolved: ResolvedModel, device: torch.device) -> bool:
    """Return True if the model has a KV cache, and it is in FP8. Raises ConfigError if the device
    or its kernels do not support that."""
    dtype, heads = resolve_cache_dtype(cache, resolved), resolved.decoder.heads
    if dtype is not FP8 or resolved.decoder.encoder is not None or heads is None:
        return False
    if not supports(device, dtype):
        problem = "this device has no conversions to FP8: its compute capability is below 8.9"
        raise config_error("cache.kv_cache_dtype", cache.kv_cache_dtype, problem, "auto")
    if device.type == "cuda" and heads.head_dim % _FP8_HEAD_MULTIPLE:
        problem = f"a KV cache in FP8 needs heads of a multiple of {_FP8_HEAD_MULTIPLE} elements"
        fix = f"auto: this model's heads have {heads.head_dim}"
        raise config_error("cache.kv_cache_dtype", cache.kv_cache_dtype, problem, fix)
    return True


def _attends_in_fp8(cache: CacheConfig, has_fp8_cache: bool, device: torch.device) -> bool:
    """Return True if long prompts are to be computed with products in FP8. Raises ConfigError if
    the cache or the device do not allow it."""
    if cache.prompt_attention_dtype != "fp8":
        return False
    problem = ""
    if cache.kv_cache_dtype != "fp8":
        problem, fix = "it needs a KV cache in FP8", "auto, or kv_cache_dtype fp8 too"
    elif has_fp8_cache and not computes_in_fp8(device):
        problem, fix = "it needs a GPU of compute capability 9 or more", "auto"
    if problem:
        field, value = "cache.prompt_attention_dtype", cache.prompt_attention_dtype
        raise config_error(field, value, problem, fix)
    return has_fp8_cache

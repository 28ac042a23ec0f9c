"""Computes the memory plan of a group of daemons from config.json and sizes: the report of
`worker-daemon plan`. Uses no device, and needs no weights: of those that there are, it reads only
what tells whether the LM head is the embedding (models/stored_head.py).

Weights are exact: those of the stages that the daemons would build, built without memory. The
largest step is an estimate (plan/step_memory.py). Blocks are counted as the driver counts them
(rpc_schema/kv_cache.py).
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from model_hub.cache import hub_cache
from model_hub.faults import HubError, HubFault
from model_hub.fetching import fetch
from model_hub.names import read_name
from model_hub.needed_files import NeededPart
from rpc_schema.config import KVTierMemory, ModelConfig, WorkerConfig, read_layer_partition
from rpc_schema.errors import CapacityError, CheckpointError, ConfigError
from rpc_schema.kv_cache import (
    KVCacheSpec,
    LayerGroup,
    RowState,
    border_tokens,
    bytes_per_block,
    choose_checkpoint_blocks,
    fitting_blocks,
    fitting_host_blocks,
    longest_requests,
    most_blocks,
    num_checkpoints,
    plan_groups,
    rank_states,
    request_blocks,
    smallest_fitting_blocks,
    usable_tokens,
)
from worker_daemon.contracts.experts import MAX_TILE_ROWS
from worker_daemon.contracts.fp8 import FP8
from worker_daemon.device.memory import MemorySnapshot, request_memory
from worker_daemon.distributed.ep import replica_experts
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.distributed.tp import tensor_parallel
from worker_daemon.drafting.registry import drafter_bytes
from worker_daemon.errors import config_error
from worker_daemon.layers.adapters import new_layout
from worker_daemon.layers.embedding import padded_vocab_size
from worker_daemon.layers.int4 import Int4Values
from worker_daemon.layers.quantization import Int4Quantization
from worker_daemon.layers.rotary import Rope, table_bytes
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.models.decoder import DecoderStage, make_expert_slots, whole_model
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.expert_tensors import is_stack_of_experts
from worker_daemon.models.partition import check_partition, partition_layers
from worker_daemon.plan.step_memory import StageWidths, estimate_step_bytes
from worker_daemon.runner.connectors.host_tier import tier_device_bytes
from worker_daemon.runner.connectors.staging import staging_device_bytes
from worker_daemon.runner.kv_cache import describe_further, describe_layers, routed_pages
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.worker.draft_model import find_draft, layers_of
from worker_daemon.worker.resolve import (
    ResolvedModel,
    check_cache,
    check_connector,
    check_lora,
    check_routed_experts,
    check_speculative,
    resolve_cache_dtype,
    resolve_config,
    resolve_model,
)
from worker_daemon.worker.stage_loading import Roots

_MOST_BYTES = 1 << 50
_INT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One daemon's part. All sizes are bytes of its device."""

    rank: int
    pp_rank: int
    tp_rank: int
    first_layer: int
    num_layers: int
    weights_bytes: int
    """Exact."""
    adapter_bytes: int
    """Slots of LoRA adapters. Exact."""
    rotary_table_bytes: int
    """Exact."""
    step_estimate_bytes: int
    """Memory of the largest step: an estimate."""
    kv_available_bytes: int
    """Rest of the group's requested_bytes, without state_bytes; it holds the checkpoints too."""
    state_bytes: int
    """States of all request rows. Exact."""
    checkpoint_bytes: int
    """Checkpoints of states in num_blocks blocks. Exact."""
    kv_block_bytes: int
    """Bytes of a block: one page for each layer of the KV group with the most layers on this
    rank."""
    num_blocks: int
    """Blocks that fit here; one of them is the null block."""
    num_tokens: int
    """Tokens in the blocks other than the null block."""
    num_longest_requests: int
    """Requests of max_model_len tokens that fit into these blocks at once."""
    host_tier_bytes: int
    """Memory of the host tier's num_host_blocks, without checksums. Exact."""


@dataclass(frozen=True, slots=True)
class LayersPlan:
    """A KV group: layers that share a block table."""

    num_layers: int
    """Number of layers on all stages."""
    block_size: int
    sliding_window: int | None
    num_blocks_longest_request: int
    """Blocks that a request of max_model_len tokens has at once."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The plan of a group, limited by its smallest rank. `worker-daemon plan --json` prints these
    fields."""

    architecture: str
    dtype: str
    quantization: str | None
    """fp8 or int4, or None if no matrix is quantized."""
    kv_cache_dtype: str
    """Dtype of the KV cache; none if no layer has one."""
    memory_bytes: int
    """Memory of each device."""
    requested_bytes: int
    """Memory that a daemon may use from its baseline on: memory_bytes times
    gpu_memory_utilization."""
    max_model_len: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    """Blocks of every rank, the null block included."""
    num_tokens: int
    num_longest_requests: int
    """Requests of max_model_len tokens at once, regardless of max_num_seqs."""
    checkpoint_tokens: int
    """Tokens from a checkpoint of a request's state to the next; 0: there are none."""
    layer_groups: tuple[LayersPlan, ...]
    longest_request_bytes: int
    """Bytes of KV cache of a request of max_model_len tokens, on all ranks."""
    longest_request_bytes_without_windows: int
    """The same if no layer had a window."""
    max_model_len_fits: bool
    longest_model_len: int
    """The longest max_model_len that would fit, within the model's own limit; 0 if none."""
    kv_cache_memory_bytes_request: int
    """The kv_cache_memory_bytes that gives these num_blocks, within requested_bytes."""
    kv_cache_memory_bytes_card: int
    """The kv_cache_memory_bytes that would fill the device, if no other process used it."""
    num_host_blocks: int
    """Slots of the host tier, the same on all ranks; 0: there is none."""
    kv_tier_memory: KVTierMemory
    """Place of the host tier: with device, kv_available_bytes is what it leaves."""
    ranks: tuple[RankPlan, ...]


def plan_memory(config: WorkerConfig, memory_bytes: int, model_roots: Sequence[Path]) -> GroupPlan:
    """Plan a group whose devices have memory_bytes each.

    Raises:
        ConfigError: a value is not allowed, or the model or its partition is not possible.
        CheckpointError: the directory or its config.json is missing or broken.
        CapacityError: a rank has nothing left for a KV cache.
    """
    if not 1 <= memory_bytes <= _MOST_BYTES:
        fix = "its total bytes"
        raise config_error("memory_bytes", memory_bytes, "no device has that much memory", fix)
    _check_values(config)
    check_cache(config.cache, config.scheduler)
    check_lora(config.lora)
    check_speculative(config.speculative)
    resolved = _resolve(config.model, model_roots)
    check_routed_experts(resolved, config.scheduler)
    check_connector(config.cache, resolved)
    roots = Roots(model_roots, None)
    found = find_draft(config.speculative, config.model, resolved, roots)
    draft = None if found is None else found[1]
    ranks = _PlannedRanks(config, resolved, _rank_sizes(config, resolved, draft))
    requested = request_memory(
        MemorySnapshot(memory_bytes, memory_bytes, 0, 0), config.cache.gpu_memory_utilization
    )
    return ranks.plan(memory_bytes, requested)


def plan_fitted_memory(
    config: WorkerConfig, memory_bytes: int, model_roots: Sequence[Path]
) -> GroupPlan:
    """Plan for the longest max_model_len that fits, like a driver with max_model_len -1. Raises as
    plan_memory does."""
    plan = plan_memory(config, memory_bytes, model_roots)
    if plan.max_model_len_fits:
        return plan
    model = msgspec.structs.replace(config.model, max_model_len=plan.longest_model_len)
    return plan_memory(msgspec.structs.replace(config, model=model), memory_bytes, model_roots)


class PlannedModel(NamedTuple):
    """The place of a model that is planned."""

    directory: Path
    """Directory of its config.json, with symbolic links resolved."""
    root: Path
    """The directory that its files do not lead out of."""


def find_model(model: str, environment: Mapping[str, str], *, field: str = "model") -> PlannedModel:
    """Find a model by a directory, which has precedence, or by a repository of the hub, whose small
    files are downloaded.

    Raises:
        ConfigError: it is not a path, or not the name of a repository.
        CheckpointError: the repository cannot be read.
    """
    try:
        name = None if Path(model).is_dir() else read_name(model)
        if name is None:
            directory = Path(model).resolve()
            return PlannedModel(directory, directory.parent)
        cache = hub_cache(environment)
        if cache is None:
            raise config_error(field, model, "this user has no hub cache", "set HF_HOME")
        return PlannedModel(fetch(name, cache, NeededPart.TEXTS, environment).directory, cache)
    except HubError as error:
        kind = ConfigError if error.fault in (HubFault.NAME, HubFault.EXTRA) else CheckpointError
        raise kind(error.problem, field=field, value=model, fix=error.fix) from None
    except (OSError, RuntimeError, ValueError) as error:  # a symlink loop
        fix = "name a directory"
        raise config_error(field, model, f"this is not a path: {error}", fix) from None


def read_partition(text: str) -> tuple[int, ...]:
    """Return the counts of "N,N,...". Raises ConfigError for any other text."""
    try:
        return read_layer_partition(text)
    except ValueError as error:
        fix = "give each stage's number of layers, as in 17,15"
        raise config_error("layer_partition", text, str(error), fix) from None


@dataclass(frozen=True, slots=True)
class _RankSizes:
    """The sizes of a rank that do not depend on steps and lengths."""

    state: ParallelState
    layers: range
    weights_bytes: int
    adapter_bytes: int
    kv_specs: tuple[KVCacheSpec, ...]
    ropes: tuple[Rope, ...]
    """Rotations that have tables."""
    widths: StageWidths


class _PlannedRanks:
    """The ranks of one configuration, for any max_model_len."""

    def __init__(
        self, config: WorkerConfig, resolved: ResolvedModel, sizes: Sequence[_RankSizes]
    ) -> None:
        self._config = config
        self._resolved = resolved
        self._sizes = sizes
        self._block_size = config.cache.block_size
        self._max_num_batched_tokens = config.scheduler.max_num_batched_tokens
        self._layers = self._cut([rank.kv_specs for rank in sizes])
        self._groups = [group.blocks for group in self._layers]
        self._states = [rank_states(rank.kv_specs, config.scheduler.max_num_seqs) for rank in sizes]
        self._checkpoint_blocks = choose_checkpoint_blocks(
            [rank.kv_specs for rank in sizes], self._layers, resolved.max_model_len
        )

    @property
    def _num_host_blocks(self) -> int:
        memory_bytes = self._config.cache.kv_host_memory_bytes
        return fitting_host_blocks(memory_bytes, self._layers, len(self._sizes))

    def plan(self, memory_bytes: int, requested: int) -> GroupPlan:
        length = self._resolved.max_model_len
        ranks = tuple(self._plan_rank(sizes, requested) for sizes in self._sizes)
        smallest = min(ranks, key=lambda rank: rank.num_blocks)
        if not smallest.num_tokens:
            raise self._nothing_left(smallest, requested)
        return GroupPlan(
            architecture=self._resolved.decoder.architecture,
            dtype=str(self._resolved.dtype).removeprefix("torch."),
            quantization=_quantization_name(self._resolved.decoder),
            kv_cache_dtype=self._layers[0].kind.dtype,
            memory_bytes=memory_bytes,
            requested_bytes=requested,
            max_model_len=length,
            block_size=self._block_size,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            max_num_batched_tokens=self._config.scheduler.max_num_batched_tokens,
            num_blocks=smallest.num_blocks,
            num_tokens=smallest.num_tokens,
            num_longest_requests=smallest.num_longest_requests,
            checkpoint_tokens=border_tokens(self._groups, self._checkpoint_blocks),
            layer_groups=tuple(map(self._plan_layers, self._layers)),
            longest_request_bytes=self._longest_request_bytes(self._layers),
            longest_request_bytes_without_windows=self._longest_request_bytes(
                self._cut([_without_windows(rank.kv_specs) for rank in self._sizes])
            ),
            max_model_len_fits=smallest.num_longest_requests > 0,
            longest_model_len=self._longest_model_len(requested),
            kv_cache_memory_bytes_request=self._kv_cache_memory_bytes(smallest.num_blocks),
            kv_cache_memory_bytes_card=self._kv_cache_memory_bytes(
                self._num_blocks(length, memory_bytes)
            ),
            num_host_blocks=self._num_host_blocks,
            kv_tier_memory=self._config.cache.kv_tier_memory,
            ranks=ranks,
        )

    def _plan_rank(self, sizes: _RankSizes, requested: int) -> RankPlan:
        length, block_bytes = self._resolved.max_model_len, self._block_bytes(sizes)
        available = self._available(sizes, length, requested)
        states, every = self._states[sizes.state.rank], self._checkpoint_blocks
        blocks = fitting_blocks(available, block_bytes, states, every)
        return RankPlan(
            rank=sizes.state.rank,
            pp_rank=sizes.state.pp_rank,
            tp_rank=sizes.state.tp_rank,
            first_layer=sizes.layers.start,
            num_layers=len(sizes.layers),
            weights_bytes=sizes.weights_bytes,
            adapter_bytes=sizes.adapter_bytes,
            rotary_table_bytes=self._rotary_table_bytes(sizes, length),
            step_estimate_bytes=self._step_bytes(sizes, length),
            kv_available_bytes=available,
            state_bytes=states.size_bytes,
            checkpoint_bytes=self._state_bytes(sizes, blocks) - states.size_bytes,
            kv_block_bytes=block_bytes,
            num_blocks=blocks,
            num_tokens=usable_tokens(blocks, self._groups, length, self._max_num_batched_tokens),
            num_longest_requests=longest_requests(
                blocks, self._groups, length, self._max_num_batched_tokens
            ),
            host_tier_bytes=self._num_host_blocks * block_bytes,
        )

    def _cut(self, ranks: Sequence[Sequence[KVCacheSpec]]) -> tuple[LayerGroup, ...]:
        length, step = self._resolved.max_model_len, self._max_num_batched_tokens
        return plan_groups(ranks, self._block_size, length, step)

    def _plan_layers(self, group: LayerGroup) -> LayersPlan:
        length = self._resolved.max_model_len
        # The tensor-parallel ranks of a stage have the same layers.
        stages = group.layer_names[:: self._config.parallel.tensor_parallel_size]
        return LayersPlan(
            num_layers=sum(map(len, stages)),
            block_size=group.blocks.block_size,
            sliding_window=group.blocks.window,
            num_blocks_longest_request=most_blocks(
                length, group.blocks, self._max_num_batched_tokens
            ),
        )

    def _longest_request_bytes(self, layers: Sequence[LayerGroup]) -> int:
        blocks = [group.blocks for group in layers]
        length = self._resolved.max_model_len
        num_blocks = request_blocks(length, blocks, self._max_num_batched_tokens)
        return num_blocks * sum(bytes_per_block(layers, rank) for rank in range(len(self._sizes)))

    def _longest_model_len(self, requested: int) -> int:
        """Return the longest length that fits. A longer context takes a longer rotary table and
        block table, so if a length does not fit, no longer one does."""
        most = min(self._resolved.decoder.max_position_embeddings, requested)  # rotary tables alone
        lengths = range(1, most + 1)
        return bisect_left(lengths, True, key=partial(self._is_too_long, requested=requested))

    def _is_too_long(self, length: int, requested: int) -> bool:
        num_blocks = self._num_blocks(length, requested)
        return not longest_requests(num_blocks, self._groups, length, self._max_num_batched_tokens)

    def _kv_cache_memory_bytes(self, num_blocks: int) -> int:
        """Return one value for all ranks. Each rank uses only as much of it as its blocks need, so
        the rank with the largest blocks decides."""
        return max(
            num_blocks * self._block_bytes(sizes) + self._state_bytes(sizes, num_blocks)
            for sizes in self._sizes
        )

    def _num_blocks(self, length: int, budget: int) -> int:
        available = [self._available(sizes, length, budget) for sizes in self._sizes]
        return smallest_fitting_blocks(
            self._layers, available, self._states, self._checkpoint_blocks
        )

    def _available(self, sizes: _RankSizes, length: int, budget: int) -> int:
        taken = sizes.weights_bytes + sizes.adapter_bytes + self._rotary_table_bytes(sizes, length)
        num_connectors = bool(self._num_host_blocks) + self._config.cache.kv_files
        if num_connectors:
            block_bytes = self._block_bytes(sizes)
            taken += num_connectors * staging_device_bytes(block_bytes)
            pages = [each for each in sizes.kv_specs if not isinstance(each, RowState)]
            taken += tier_device_bytes(self._config.cache, pages, block_bytes)
        return budget - taken - self._state_bytes(sizes) - self._step_bytes(sizes, length)

    def _state_bytes(self, sizes: _RankSizes, num_blocks: int = 0) -> int:
        """Return the bytes of all rows' states, and of the checkpoints of so many blocks."""
        states = self._states[sizes.state.rank]
        return states.bytes_with(num_checkpoints(num_blocks, self._checkpoint_blocks))

    def _block_bytes(self, sizes: _RankSizes) -> int:
        return bytes_per_block(self._layers, sizes.state.rank)

    def _rotary_table_bytes(self, sizes: _RankSizes, length: int) -> int:
        return table_bytes(sizes.ropes, length)

    def _step_bytes(self, sizes: _RankSizes, length: int) -> int:
        scheduler = self._config.scheduler
        limits = StepLimits(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=length,
            vocab_size=self._resolved.decoder.vocab_size,
            block_size=self._block_size,
            num_blocks=1 << 30,
            groups=tuple(self._groups),
            max_samples_per_seq=scheduler.max_samples_per_seq,
            max_drafts=self._config.speculative.num_speculative_tokens,
        )
        num_bytes = estimate_step_bytes(sizes.widths, limits)
        if sizes.widths.is_last_stage:
            speculative = self._config.speculative
            num_bytes += drafter_bytes(speculative, limits.max_num_seqs, length)
        return num_bytes

    def _nothing_left(self, rank: RankPlan, requested: int) -> CapacityError:
        return CapacityError(
            f"on rank {rank.rank} weights take {rank.weights_bytes}, LoRA adapters "
            f"{rank.adapter_bytes}, the states of requests {rank.state_bytes}, the rotary tables "
            f"{rank.rotary_table_bytes} and a step about {rank.step_estimate_bytes} of {requested} "
            f"bytes: nothing is left for a KV cache",
            field="gpu_memory_utilization",
            value=self._config.cache.gpu_memory_utilization,
            fix="a larger share, a larger device, smaller steps, or more ranks",
        )


def _resolve(config: ModelConfig, model_roots: Sequence[Path]) -> ResolvedModel:
    """Resolve the model with the head that its files have; where they are not complete, with the
    one of config.json. Raises as plan_memory does."""
    try:
        return resolve_model(config, model_roots)
    except CheckpointError:
        return resolve_config(config, model_roots)


def _check_values(config: WorkerConfig) -> None:
    """Check every field against the schema: msgspec itself checks only when it decodes."""
    for section, part in msgspec.structs.asdict(config).items():
        values = msgspec.structs.asdict(part)
        for entry in msgspec.structs.fields(part):
            value = values[entry.name]
            try:
                msgspec.convert(value, entry.type)
            except msgspec.ValidationError as error:
                problem = "the value is not allowed"
                raise config_error(f"{section}.{entry.name}", value, problem, str(error)) from None


def _rank_sizes(
    config: WorkerConfig, resolved: ResolvedModel, draft: ResolvedModel | None
) -> list[_RankSizes]:
    """Build every rank's stage without memory, and measure it. draft: the draft model."""
    parallel = config.parallel
    pp_size, tp_size = parallel.pipeline_parallel_size, parallel.tensor_parallel_size
    decoder = resolved.decoder
    shares = parallel.data_parallel_lockstep and decoder.expert_parallel
    check_partition(decoder, pp_size, tp_size, parallel.data_parallel_size if shares else 1)
    if draft is not None:
        check_partition(draft.decoder, 1, tp_size)
    layers = partition_layers(decoder.num_hidden_layers, pp_size, parallel.layer_partition)
    # Replica 0: if the experts do not divide evenly, the first ranks have one more.
    states = [
        ParallelState(
            pp_size, tp_size, rank, parallel.data_parallel_size, parallel.data_parallel_lockstep
        )
        for rank in range(parallel.world_size)
    ]
    try:
        return [
            _measure(
                state,
                layers[state.pp_rank],
                resolved,
                config,
                draft if state.is_last_stage else None,
            )
            for state in states
        ]
    except (RuntimeError, TypeError, OverflowError) as error:  # sizes beyond 64 bits
        problem = f"this model's tensor sizes are not possible: {str(error).splitlines()[0]}"
        fix = "correct the sizes in config.json"
        raise config_error("model", str(resolved.directory), problem, fix) from None


def _measure(
    state: ParallelState,
    layers: range,
    resolved: ResolvedModel,
    config: WorkerConfig,
    draft: ResolvedModel | None,
) -> _RankSizes:
    tp = tensor_parallel(state.tp_rank, state.tp_size)
    adapters = new_layout(config.lora.max_loras, config.lora.max_lora_rank)
    experts = replica_experts(state) if resolved.decoder.expert_parallel else None
    sharing = tp if experts is None else experts
    slots = make_expert_slots(resolved.decoder, sharing.rank, sharing.size, state.dp_rank)
    stage = resolved.build_stage(
        layers, state, tp, TorchOps(), adapters, replica_experts=experts, expert_slots=slots
    )
    cache_dtype = resolve_cache_dtype(config.cache, resolved)
    specs = describe_layers(stage.kv_layer_specs, cache_dtype)
    weights_bytes, ropes = stage.num_parameters_bytes, stage.ropes
    if draft is not None:
        drafting = whole_model(draft.decoder, tp, draft.dtype)
        specs += describe_further(layers_of(drafting, draft.dtype))
        weights_bytes += drafting.num_parameters_bytes
        ropes += drafting.ropes
    if state.is_last_stage:
        specs += describe_further(routed_pages(resolved.routed_experts))
    decoder, tp_size = resolved.decoder, state.tp_size
    widths = [decoder.layers[index].attention.widths(tp_size) for index in layers]
    num_logits = decoder.vocab_size if decoder.generates else 0
    return _RankSizes(
        state=state,
        layers=layers,
        weights_bytes=weights_bytes,
        adapter_bytes=0 if adapters is None else adapters.num_elements * resolved.dtype.itemsize,
        kv_specs=specs,
        ropes=ropes,
        widths=StageWidths(
            hidden_size=decoder.hidden_size,
            projected_size=max(each.projected for each in widths),
            mixed_size=max(each.mixed for each in widths),
            inner_size=_inner_size(decoder) // tp_size,
            routed_size=_routed_size(decoder, tp_size),
            padded_size=_padded_size(decoder, tp_size if experts is None else experts.size),
            num_replicas=1 if experts is None else experts.dp_size,
            has_shared_expert=any(each and each.shared for each in decoder.layer_experts),
            vocab_size=num_logits,
            vocab_rows=padded_vocab_size(num_logits, tp_size) // tp_size,
            itemsize=resolved.dtype.itemsize,
            pp_size=state.pp_size,
            tp_size=tp_size,
            is_first_stage=state.is_first_stage,
            is_last_stage=state.is_last_stage,
            gathered_size=max(each.gathered for each in widths),
            dequantized_bytes=_dequantized_bytes(stage, decoder, resolved.dtype),
            expert_load_bytes=stage.routing_bytes,
            chosen_bytes=_chosen_bytes(resolved, layers, is_last=state.is_last_stage),
        ),
    )


def _chosen_bytes(resolved: ResolvedModel, layers: range, *, is_last: bool) -> int:
    """Return the bytes of a token's experts in a step, if they are collected: the choices of a
    stage's layers, joined, and on the last stage what it keeps."""
    shape, experts = resolved.routed_experts, resolved.decoder.layer_experts
    if shape is None:
        return 0
    num_layers = sum(each is not None for each in experts[: layers.stop])
    kept = shape.bytes_per_token + _INT32_BYTES if is_last else 0
    return 2 * _INT32_BYTES * shape.top_k * num_layers + kept


def _inner_size(decoder: DecoderConfig) -> int:
    """Return the inner size of the widest MLP that every token runs through."""
    shared = (each.shared for each in decoder.layer_experts if each is not None)
    sizes = [each.intermediate_size for each in shared if each is not None]
    return max(decoder.intermediate_size or 0, *sizes, 0)


def _padded_size(decoder: DecoderConfig, num_ranks: int) -> int:
    """Return the inner values of all padding rows at worst, if each expert's last tile has one
    row. num_ranks: those that share the experts."""
    parts, ranks = (1, num_ranks) if decoder.expert_parallel else (num_ranks, 1)
    return max(
        (
            -(-experts.num_experts // ranks)
            * (MAX_TILE_ROWS - 1)
            * (experts.intermediate_size // parts)
            for experts in decoder.layer_experts
            if experts is not None
        ),
        default=0,
    )


def _routed_size(decoder: DecoderConfig, tp_size: int) -> int:
    """Return the most elements of a token in a layer with experts: of each of its experts, the
    inner values and the result."""
    num_parts = 1 if decoder.expert_parallel else tp_size
    return max(
        (
            experts.routing.top_k * (experts.intermediate_size // num_parts + decoder.hidden_size)
            for experts in decoder.layer_experts
            if experts is not None
        ),
        default=0,
    )


def _quantization_name(decoder: DecoderConfig) -> str | None:
    if decoder.quantization is None:
        return None
    return "int4" if isinstance(decoder.quantization, Int4Quantization) else "fp8"


def _dequantized_bytes(stage: DecoderStage, decoder: DecoderConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the largest matrix that a Hopper GPU dequantizes in steps of many rows
    (kernels/fp8_linear.py, kernels/int4_linear.py). dtype: the model's."""
    quantization, itemsize = decoder.quantization, dtype.itemsize
    if isinstance(quantization, Int4Quantization):
        matrices = (each for each in stage.parameters() if isinstance(each, Int4Values))
        return max((each.num_values for each in matrices), default=0) * itemsize
    if quantization is None:
        return 0
    if quantization.scales == "block":
        multiplies = quantization.activations == "dynamic" and dtype != torch.float32
    else:
        multiplies = quantization.activations != "none" and dtype == torch.bfloat16
    if multiplies:
        return 0
    largest = max(
        (
            p.data.numel()
            for p in stage.parameters()
            if p.data.dtype == FP8 and not is_stack_of_experts(p.name)
        ),
        default=0,
    )
    return largest * itemsize


def _without_windows(layers: Sequence[KVCacheSpec]) -> list[KVCacheSpec]:
    return [
        layer
        if isinstance(layer, RowState)
        else msgspec.structs.replace(layer, sliding_window=None)
        for layer in layers
    ]

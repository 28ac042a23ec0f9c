"""From daemons in any state to a loaded model: recognise what is loaded, refuse or reset what is
not wanted, and walk down the load chain with the KV cache planned on the way.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from rpc_schema.config import MIN_STEP_DEADLINE_MS, WorkerConfig
from rpc_schema.kv_cache import (
    BlockGroup,
    KVCacheConfig,
    build_kv_cache_config,
    groups_of,
    smallest_fitting_blocks,
)
from rpc_schema.lifecycle import GetModelMetadataReply, Status
from rpc_schema.weight_transfer import ReloadWeightsReply
from worker_client.errors import ClientConfigError, ConfigMismatchError
from worker_client.kv_planning import choose_groups, choose_num_blocks, fit_max_model_len
from worker_client.load_chain import LoadChain
from worker_client.step_checks import GroupLimits

PROFILE_ATTEMPTS = 3
"""How often memory is profiled, at most, while other processes take or free some."""

_LOG = logging.getLogger(__name__)
_ResetLevel: TypeAlias = Literal["CREATED", "DEVICE_READY"]
_CHAIN = ("CREATED", "DEVICE_READY", "MODEL_LOADED", "KV_READY", "READY")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What a driver decides beside the configuration."""

    num_gpu_blocks: int | None = None
    fit_max_model_len: bool = field(default=False, kw_only=True)
    """Lower max_model_len to what one request can have, where the KV cache is too small for it."""
    reload: bool = field(default=False, kw_only=True)
    """Load anew, whatever is loaded."""


@dataclass(frozen=True, slots=True)
class LoadedGroup:
    """A group that is ready to serve."""

    metadata: GetModelMetadataReply
    max_model_len: int
    kv_cache: tuple[KVCacheConfig, ...]
    """Of each rank."""
    was_loaded: bool
    """Nothing had to be loaded."""
    seconds: dict[str, float]
    """By operation."""

    @property
    def num_blocks(self) -> int:
        """Null block included: usable ids are 1 to num_blocks - 1."""
        return self.kv_cache[0].num_blocks

    @property
    def block_size(self) -> int:
        """Tokens of a block, as configured."""
        return self.kv_cache[0].block_size

    @property
    def groups(self) -> tuple[BlockGroup, ...]:
        """What decides which blocks a request has: the same on all ranks."""
        return groups_of(self.kv_cache[0])


@dataclass(frozen=True, slots=True)
class AttachedGroup:
    """A group as loading needs it, without a step in flight."""

    load_chain: LoadChain
    output_rank: int
    needs_relink: bool
    """Its communicators cannot stay."""
    relink: Callable[[], None]
    reset: Callable[[_ResetLevel], None]
    reload_weights: Callable[[], list[ReloadWeightsReply]]


class Stopwatch:
    """Durations of named phases, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the body of a `with`, unless it raises."""
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start


def check_config(config: WorkerConfig) -> None:
    """Check every field against the schema, which does so itself only when it decodes.

    Raises:
        ClientConfigError: a value that no message can carry.
    """
    for section in WorkerConfig.__struct_fields__:
        part: msgspec.Struct = getattr(config, section)
        for entry in msgspec.structs.fields(part):
            value = getattr(part, entry.name)
            try:
                msgspec.convert(value, entry.type)
            except msgspec.ValidationError as error:
                raise ClientConfigError(
                    "the value is not allowed",
                    field=f"{section}.{entry.name}",
                    value=value,
                    fix=str(error),
                ) from None
    deadline_ms = config.scheduler.step_deadline_ms
    if deadline_ms < MIN_STEP_DEADLINE_MS:
        raise ClientConfigError(
            "steps that are only slow would be taken for hanging ones",
            field="scheduler.step_deadline_ms",
            value=deadline_ms,
            fix=f"use at least {MIN_STEP_DEADLINE_MS}",
        )


def group_limits(config: WorkerConfig, model: LoadedGroup) -> GroupLimits:
    """Return what a group that was loaded with `config` takes in a step."""
    return GroupLimits(
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        vocab_size=model.metadata.vocab_size,
        num_blocks=model.num_blocks,
        block_size=model.block_size,
        groups=model.groups,
    )


def load(
    group: AttachedGroup, config: WorkerConfig, statuses: Sequence[Status], options: LoadOptions
) -> LoadedGroup:
    """Make `group`, whose daemons were in `statuses` at attach, ready to serve `config`."""
    clock = Stopwatch()
    if not options.reload and all(status.load == "READY" for status in statuses):
        _check_same(config, statuses, options)
        return _resume(group, statuses, clock)
    if not options.reload:
        _check_same(config, [s for s in statuses if s.load == "READY"], options)
    level = _reset(group, config, statuses, clock)
    if level == "CREATED":
        with clock.phase("init_device"):
            group.load_chain.init_device(config)
    with clock.phase("load_model"):
        resolved_len = min(reply.max_model_len for reply in group.load_chain.load_model(config))
    kv_cache, max_model_len = _load_kv_cache(group, config, resolved_len, options, clock)
    with clock.phase("compile_or_warm_up_model"):
        group.load_chain.compile_or_warm_up_model()
    metadata = group.load_chain.get_model_metadata()[group.output_rank]
    return LoadedGroup(metadata, max_model_len, kv_cache, False, clock.seconds)


def _check_same(config: WorkerConfig, statuses: Sequence[Status], options: LoadOptions) -> None:
    differences: dict[str, None] = {}
    for rank, status in enumerate(statuses):
        loaded = status.config
        if loaded is None or loaded.fingerprint() != config.fingerprint():
            fields = ["config: none"] if loaded is None else config.differing_fields(loaded)
            differences.update(dict.fromkeys(fields))
        if status.rank != rank and len(statuses) == config.parallel.world_size:
            differences[f"rank of {status.endpoint}: {rank} != {status.rank}"] = None
        blocks = status.kv_cache.num_blocks if status.kv_cache is not None else None
        if options.num_gpu_blocks not in (None, blocks):
            differences[f"num_gpu_blocks: {options.num_gpu_blocks} != {blocks}"] = None
    if differences:
        raise ConfigMismatchError(list(differences))


def _resume(group: AttachedGroup, statuses: Sequence[Status], clock: Stopwatch) -> LoadedGroup:
    if group.needs_relink:
        with clock.phase("relink"):
            group.relink()
    if any(map(_needs_weights, statuses)):
        with clock.phase("reload_weights"):
            group.reload_weights()
    metadata = group.load_chain.get_model_metadata()[group.output_rank]
    plans = [status.kv_cache for status in statuses if status.kv_cache is not None]
    if len(plans) < len(statuses):
        without = next(status.endpoint for status in statuses if status.kv_cache is None)
        raise ConfigMismatchError([f"kv_cache of {without}: none"])
    return LoadedGroup(metadata, metadata.max_model_len, tuple(plans), True, clock.seconds)


def _needs_weights(status: Status) -> bool:
    """Whether another driver has left an update open, or woken weights that were kept nowhere.
    Whoever lets weights sleep wakes them."""
    is_there = status.memory_tags.get("weights", "awake") in ("awake", "lost")
    return is_there and status.weights is not None and status.weights.state != "whole"


def _reset(
    group: AttachedGroup, config: WorkerConfig, statuses: Sequence[Status], clock: Stopwatch
) -> _ResetLevel:
    """Bring all ranks to one level: to DEVICE_READY where device and link can stay, else to
    CREATED."""
    if all(status.load == "CREATED" for status in statuses):
        return "CREATED"
    level: _ResetLevel = "CREATED"
    if not group.needs_relink and all(map(_same_device(config), range(len(statuses)), statuses)):
        level = "DEVICE_READY"
    with clock.phase("reset"):
        group.reset(level)
    return level


def _same_device(config: WorkerConfig) -> Callable[[int, Status], bool]:
    def same(rank: int, status: Status) -> bool:
        loaded = status.config
        return (
            loaded is not None
            and status.rank == rank
            and status.link_state == "up"
            and _CHAIN.index(status.load) > _CHAIN.index("DEVICE_READY")
            and loaded.parallel == config.parallel
            and loaded.cache == config.cache
            and loaded.scheduler == config.scheduler
        )

    return same


def _load_kv_cache(
    group: AttachedGroup,
    config: WorkerConfig,
    resolved_len: int,
    options: LoadOptions,
    clock: Stopwatch,
) -> tuple[tuple[KVCacheConfig, ...], int]:
    """Plan and allocate the KV cache; return it, and the context length that it allows."""
    specs = [reply.layers for reply in group.load_chain.get_kv_cache_spec()]
    with clock.phase("determine_available_memory"):
        available = _profile_memory(group)
    groups = choose_groups(specs, config, resolved_len)
    fitting = smallest_fitting_blocks(groups, available)
    num_blocks = choose_num_blocks(fitting, options.num_gpu_blocks)
    max_model_len = fit_max_model_len(
        num_blocks,
        [group.blocks for group in groups],
        resolved_len,
        config.scheduler.max_num_batched_tokens,
        may_lower=options.fit_max_model_len,
    )
    plans = tuple(build_kv_cache_config(groups, rank, num_blocks) for rank in range(len(specs)))
    if max_model_len != resolved_len:
        group.load_chain.update_max_model_len(max_model_len)
    with clock.phase("initialize_from_config"):
        group.load_chain.initialize_from_config(plans)
        group.load_chain.initialize_cache(num_blocks)
    return plans, max_model_len


def _profile_memory(group: AttachedGroup) -> list[int]:
    """Return the bytes that each rank has for its KV cache.

    All ranks profile again, since they compute together, until none saw another process take or
    free memory meanwhile. If that does not end, the least that each of them found counts.
    """
    found: list[list[int]] = []
    for _ in range(PROFILE_ATTEMPTS):
        replies = group.load_chain.determine_available_memory()
        found.append([reply.available_bytes for reply in replies])
        changes = [(reply.rank, change) for reply in replies for change in reply.changes]
        if not changes:
            return found[-1]
        for rank, change in changes:
            _LOG.warning(
                "while rank %d profiled its memory, %s %s %d bytes of it",
                rank,
                f"process {change.pid}" if change.pid else "an unknown process",
                "took" if change.num_bytes > 0 else "freed",
                abs(change.num_bytes),
            )
    return [min(of_rank) for of_rank in zip(*found, strict=True)]

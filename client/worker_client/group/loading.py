"""Brings daemons from any state to a loaded model: keeps an equal configuration, refuses or resets
another one, and runs the load chain with a plan of the KV cache."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import PurePosixPath
from typing import Literal, TypeAlias

import msgspec

from rpc_schema.config import (
    MIN_STEP_DEADLINE_MS,
    ModelConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from rpc_schema.kv_cache import (
    BlockGroup,
    KVCacheConfig,
    build_kv_cache_config,
    choose_checkpoint_blocks,
    groups_of,
    rank_states,
    smallest_fitting_blocks,
)
from rpc_schema.lifecycle import GetModelMetadataReply, Status
from rpc_schema.weight_transfer import ReloadWeightsReply
from worker_client.errors import ConfigMismatchError, config_error
from worker_client.group.kv_planning import (
    bytes_for_pages,
    choose_groups,
    choose_host_blocks,
    choose_num_blocks,
    fit_max_model_len,
)
from worker_client.group.load_chain import LoadChain
from worker_client.group.weights_state import check_same_weights, differing_ranks
from worker_client.steps.step_checks import GroupLimits

PROFILE_ATTEMPTS = 3
"""Limit on memory profiles while other processes take or free memory."""

_LOG = logging.getLogger(__name__)
_ResetLevel: TypeAlias = Literal["CREATED", "DEVICE_READY"]


@dataclass(frozen=True, slots=True)
class LoadedGroup:
    """A group that is ready to serve."""

    metadata: GetModelMetadataReply
    max_model_len: int
    kv_cache: tuple[KVCacheConfig, ...]
    """Configuration of each rank."""
    was_loaded: bool
    """Nothing had to be loaded."""
    seconds: dict[str, float]
    """Duration of each operation."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks, null block included: usable ids are 1 to num_blocks - 1."""
        return self.kv_cache[0].num_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block, as configured."""
        return self.kv_cache[0].block_size

    @property
    def groups(self) -> tuple[BlockGroup, ...]:
        """Block size and window of each KV group; the same on all ranks."""
        return groups_of(self.kv_cache[0])

    @property
    def keeps_state(self) -> bool:
        """True if layers keep a state per request: requests begin at position 0, or at a border."""
        return any(rank.state_layers for rank in self.kv_cache)

    @property
    def checkpoint_blocks(self) -> int:
        """Blocks of the first group from a border to the next; 0: there are no checkpoints of
        states."""
        return self.kv_cache[0].checkpoint_blocks

    @property
    def num_host_blocks(self) -> int:
        """Slots of the host tier; 0: there is none."""
        return self.kv_cache[0].num_host_blocks


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


def check_speculative(config: SpeculativeConfig) -> None:
    """Raise ClientConfigError for settings of drafts that mean nothing together."""
    fault = config.find_fault()
    if fault is not None:
        field, value, problem, fix = fault
        raise config_error(f"speculative.{field}", value, problem, fix)


def check_model(config: ModelConfig) -> None:
    """Raise ClientConfigError for options of a model that mean nothing together."""
    fault = config.find_fault()
    if fault is not None:
        raise config_error(*fault)


def check_kind(name: str, value: object, kind: type[object]) -> None:
    """Raise ClientConfigError for a value of another type."""
    if not isinstance(value, kind):
        raise config_error(name, value, "the type is wrong", f"give a {kind.__name__}")


def check_fields(section: str, part: msgspec.Struct, kind: type[msgspec.Struct]) -> None:
    """Raise ClientConfigError for a section of a configuration, which must be of a type, with a
    value that no message can carry."""
    check_kind(section, part, kind)
    for entry in msgspec.structs.fields(kind):
        value = getattr(part, entry.name)
        try:
            msgspec.convert(value, entry.type)
        except msgspec.ValidationError as error:
            problem = "the value is not allowed"
            raise config_error(f"{section}.{entry.name}", value, problem, str(error)) from None


def check_config(config: WorkerConfig) -> None:
    """Check every field against the schema, which itself checks only when it decodes.

    Raises:
        ClientConfigError: a value that no message can carry, or settings that exclude each other.
    """
    check_kind("config", config, WorkerConfig)
    for entry in msgspec.structs.fields(WorkerConfig):
        check_fields(entry.name, getattr(config, entry.name), entry.type)
    check_model(config.model)
    check_speculative(config.speculative)
    deadline_ms = config.scheduler.step_deadline_ms
    if deadline_ms < MIN_STEP_DEADLINE_MS:
        problem = "slow steps would count as hung"
        fix = f"use at least {MIN_STEP_DEADLINE_MS}"
        raise config_error("scheduler.step_deadline_ms", deadline_ms, problem, fix)


def group_limits(config: WorkerConfig, model: LoadedGroup) -> GroupLimits:
    """Return the limits on the steps of a group that was loaded with `config`."""
    return GroupLimits(
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        vocab_size=model.metadata.vocab_size,
        hidden_size=model.metadata.hidden_size,
        keeps_state=model.keeps_state,
        checkpoint_blocks=model.checkpoint_blocks,
        num_blocks=model.num_blocks,
        block_size=model.block_size,
        groups=model.groups,
        generates=model.metadata.generates,
        pooling=model.metadata.pooling,
        max_loras=config.lora.max_loras,
        logits_processors=config.scheduler.logits_processors,
        max_samples_per_seq=config.scheduler.max_samples_per_seq,
        num_speculative_tokens=config.speculative.num_speculative_tokens,
        keeps_experts=model.metadata.routed_experts is not None,
        routed_experts=model.metadata.routed_experts,
    )


def config_differences(
    config: WorkerConfig, status: Status, *, any_directory: bool = False
) -> list[str]:
    """Return the fields in which a daemon's loaded configuration differs from `config`, as text.
    The name of the model may differ, if both names mean the same directory to that daemon, or with
    any_directory."""
    loaded = status.config
    if loaded is None:
        return ["config: none"]
    if any_directory or (
        PurePosixPath(config.model.model) in map(PurePosixPath, status.model_names)
    ):
        named = msgspec.structs.replace(loaded.model, model=config.model.model)
        loaded = msgspec.structs.replace(loaded, model=named)
    return config.differing_fields(loaded)


def check_same_config(
    config: WorkerConfig,
    statuses: Sequence[Status],
    first_rank: int = 0,
    num_gpu_blocks: int | None = None,
    *,
    state_checkpoints: bool = True,
) -> None:
    """Raise ConfigMismatchError if one of a group's daemons is ready with another configuration.
    statuses: of the daemons, by rank from first_rank on; the rest is as in Loader."""
    ready = [status for status in statuses if status.load == "READY"]
    differences: dict[str, None] = {}
    is_whole = len(ready) == config.parallel.group_size
    is_read_again = is_whole and _must_read_again(ready)
    for rank, status in enumerate(ready, first_rank):
        own = config_differences(config, status, any_directory=is_read_again)
        differences.update(dict.fromkeys(own))
        if status.rank != rank and is_whole:
            differences[f"rank of {status.endpoint}: {rank} != {status.rank}"] = None
        blocks = status.kv_cache.num_blocks if status.kv_cache is not None else None
        if num_gpu_blocks not in (None, blocks):
            differences[f"num_gpu_blocks: {num_gpu_blocks} != {blocks}"] = None
        if not state_checkpoints and status.kv_cache and status.kv_cache.checkpoint_blocks:
            differences["state_checkpoints: False != True"] = None
    if differences:
        raise ConfigMismatchError(list(differences))


@dataclass(slots=True)
class Loader:
    """Makes an attached group without steps in flight ready to serve a configuration, once."""

    config: WorkerConfig
    num_gpu_blocks: int | None
    """None: all that fit."""
    fit_max_model_len: bool
    """Lower max_model_len to the longest request that the KV cache can hold."""
    reload: bool
    """Load again, even if an equal configuration is loaded."""
    load_chain: LoadChain
    output_place: int
    """Index of the output rank among the group's ranks."""
    needs_relink: bool
    """The communicators cannot stay."""
    relink: Callable[[], None]
    reset: Callable[[_ResetLevel], None]
    reload_weights: Callable[[str], list[ReloadWeightsReply]]
    """Read the weights again from a directory."""
    get_status: Callable[[], list[Status]]
    finish_switches: Callable[[Sequence[Status]], None]
    """Bring all ranks to one placement of experts."""
    first_rank: int = 0
    weights_version: int | None = None
    """See LoadModel."""
    state_checkpoints: bool = True
    """False: plan no checkpoints of states."""
    content: bytes | None = None
    """See LoadModel."""
    clock: Stopwatch = field(default_factory=Stopwatch)

    def load(self, statuses: Sequence[Status]) -> LoadedGroup:
        """Load the group. statuses: of its daemons, by rank.

        Raises:
            ConfigMismatchError: another configuration, or an earlier version of the checkpoint's
                files, is loaded, and `reload` is False.
            ContentMismatchError: ranks have read different files.
            KVPlanError: the KV cache cannot hold the requested blocks or context.
        """
        ready = [status for status in statuses if status.load == "READY"]
        if not self.reload:
            check_same_config(
                self.config,
                statuses,
                self.first_rank,
                self.num_gpu_blocks,
                state_checkpoints=self.state_checkpoints,
            )
            if len(ready) == len(statuses):
                return self._resume(statuses)
        if self._reset(statuses) == "CREATED":
            with self.clock.phase("init_device"):
                self.load_chain.init_device(self.config)
        with self.clock.phase("load_model"):
            replies = self.load_chain.load_model(self.config, self.weights_version, self.content)
        check_same_weights(self.get_status(), self.config.model.model)
        kv_cache, max_model_len = self._load_kv_cache(min(r.max_model_len for r in replies))
        with self.clock.phase("compile_or_warm_up_model"):
            self.load_chain.compile_or_warm_up_model()
        metadata = self.load_chain.get_model_metadata()[self.output_place]
        return LoadedGroup(metadata, max_model_len, kv_cache, False, self.clock.seconds)

    def _resume(self, statuses: Sequence[Status]) -> LoadedGroup:
        if self.needs_relink:
            with self.clock.phase("relink"):
                self.relink()
        self.finish_switches(statuses)
        if _must_read_again(statuses):
            with self.clock.phase("reload_weights"):
                self.reload_weights(self.config.model.model)
            check_same_weights(self.get_status(), self.config.model.model)
        replies = self.load_chain.get_model_metadata()
        if any(reply.checkpoint_changed for reply in replies):
            raise ConfigMismatchError([f"files of {self.config.model.model}: newer != loaded"])
        metadata = replies[self.output_place]
        plans = [status.kv_cache for status in statuses if status.kv_cache is not None]
        if len(plans) < len(statuses):
            without = next(status.endpoint for status in statuses if status.kv_cache is None)
            raise ConfigMismatchError([f"kv_cache of {without}: none"])
        seconds = self.clock.seconds
        return LoadedGroup(metadata, metadata.max_model_len, tuple(plans), True, seconds)

    def _reset(self, statuses: Sequence[Status]) -> _ResetLevel:
        """Bring all ranks to one level: to DEVICE_READY if device and link can stay, else to
        CREATED."""
        if all(status.load == "CREATED" for status in statuses):
            return "CREATED"
        ranks = count(self.first_rank)
        keeps_devices = not self.needs_relink and all(map(self._keeps_device, ranks, statuses))
        level: _ResetLevel = "DEVICE_READY" if keeps_devices else "CREATED"
        with self.clock.phase("reset"):
            self.reset(level)
        return level

    def _keeps_device(self, rank: int, status: Status) -> bool:
        loaded = status.config
        return (
            loaded is not None
            and status.rank == rank
            and status.link_state == "up"
            and status.load not in ("CREATED", "DEVICE_READY")
            and loaded.parallel == self.config.parallel
            and loaded.cache == self.config.cache
            and loaded.scheduler == self.config.scheduler
        )

    def _load_kv_cache(self, resolved_len: int) -> tuple[tuple[KVCacheConfig, ...], int]:
        """Plan and allocate the KV cache; return it, and the context length that it allows."""
        specs = [reply.layers for reply in self.load_chain.get_kv_cache_spec()]
        with self.clock.phase("determine_available_memory"):
            available = _profile_memory(self.load_chain)
        states = [rank_states(layers, self.config.scheduler.max_num_seqs) for layers in specs]
        for_pages = bytes_for_pages(available, states, self.config.scheduler.max_num_seqs)
        groups = choose_groups(specs, self.config, resolved_len)
        every = 0
        if self.state_checkpoints:
            every = choose_checkpoint_blocks(specs, groups, resolved_len)
        fitting = smallest_fitting_blocks(groups, for_pages, states, every)
        num_blocks = choose_num_blocks(fitting, self.num_gpu_blocks)
        max_model_len = fit_max_model_len(
            num_blocks,
            [group.blocks for group in groups],
            resolved_len,
            self.config.scheduler.max_num_batched_tokens,
            may_lower=self.fit_max_model_len,
        )
        host_bytes = self.config.cache.kv_host_memory_bytes
        num_host_blocks = choose_host_blocks(host_bytes, groups, len(specs))
        plans = tuple(
            build_kv_cache_config(groups, rank, num_blocks, own, every, num_host_blocks)
            for rank, own in enumerate(states)
        )
        if max_model_len != resolved_len:
            self.load_chain.update_max_model_len(max_model_len)
        with self.clock.phase("initialize_from_config"):
            self.load_chain.initialize_from_config(plans)
            self.load_chain.initialize_cache(num_blocks)
        return plans, max_model_len


def _must_read_again(statuses: Sequence[Status]) -> bool:
    """Return True if an earlier driver has left weights that are not whole, or differ. If it has
    died in a reload, ranks may name different directories."""
    return any(map(_needs_weights, statuses)) or differing_ranks(statuses) is not None


def _needs_weights(status: Status) -> bool:
    """Return True if another driver has left an update open, or weights that were woken without
    content. A driver that puts weights to sleep must wake them itself."""
    is_there = status.memory_tags.get("weights", "awake") in ("awake", "lost")
    return is_there and status.weights is not None and status.weights.state != "whole"


def _profile_memory(load_chain: LoadChain) -> list[int]:
    """Return the bytes that each rank has for its KV cache.

    All ranks profile again, since they compute together, until no other process takes or frees
    memory meanwhile. If that fails, the smallest result of each rank is used.
    """
    found: list[list[int]] = []
    for _ in range(PROFILE_ATTEMPTS):
        replies = load_chain.determine_available_memory()
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

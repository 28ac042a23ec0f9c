"""Profiles the memory left for a KV cache: runs the largest step, and captures some of the graphs,
over a KV cache of two blocks."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from rpc_schema.errors import CapacityError, CommError
from rpc_schema.kv_cache import (
    KVCacheConfig,
    build_kv_cache_config,
    plan_groups,
    rank_states,
)
from rpc_schema.operations import StepMessage
from worker_daemon.device.memory import MemoryProfile, profile
from worker_daemon.kernel_compiler import KernelCompiler
from worker_daemon.models.partition import partition_layers
from worker_daemon.phases import LONG_OPERATION_S, SetPhase
from worker_daemon.runner.kv_cache import KVMemory, describe_further, describe_layers
from worker_daemon.worker.loading import LoadedModel
from worker_daemon.worker.rank_device import OpenedDevice
from worker_daemon.worker.resolve import check_deadline
from worker_daemon.worker.serving import Serving, describe_steps
from worker_daemon.worker.sleep_memory import TaggedMemory

_LOG = logging.getLogger(__name__)
SHORT_DEADLINE_MS: Final = 20_000
"""A deadline below this may be too short for a legal step."""
_NUM_BLOCKS: Final = 2
"""The null block, and one that all synthetic requests share: their output is not used."""


@dataclass(frozen=True, slots=True)
class ProfiledMemory:
    """The result of a profile, in bytes."""

    available: int
    """For the KV cache, with the states of requests; negative if nothing is left because other
    processes allocated memory meanwhile."""
    graphs: int
    profile: MemoryProfile


def profile_memory(
    opened: OpenedDevice,
    model: LoadedModel,
    message: StepMessage,
    set_phase: SetPhase,
    compiler: KernelCompiler | None = None,
) -> ProfiledMemory:
    """Run the largest step over a KV cache of two blocks, capture some of the graphs, and return
    the memory left in the budget and on the device. compiler: compiles the kernels of all steps
    first; None: each kernel is compiled at its first launch.

    Raises:
        CapacityError: nothing is left, though no other process allocated any.
    """
    set_phase("PROFILING", LONG_OPERATION_S)
    memory, cache = opened.memory, model.config.cache
    with _profiling_runner(opened, model, set_phase) as serving:
        if compiler is not None:
            _compile_ahead(serving, opened, model, compiler)
    # `serving` stays until the end: its rows and its buffer of logits take the memory that those of
    # steps will. The profile has a separate runner, whose buffer stands for the logits that
    # deferred rows keep.
    with profile(memory, opened.baseline) as result:
        _run_largest_step(opened, model, message, set_phase)
    opened.ledger.activations_peak = result.transient
    graphs = _estimate_graphs(opened, model, set_phase)
    memory.reset_peak()  # frees the memory of the profiled graphs
    _log(result, graphs)
    # The steps' own states, of all rows, are the size of those that the driver will plan.
    own = _plan(opened, model).state_bytes if opened.place.device.type == "cuda" else 0
    available = memory.limit_kv_cache(result.available(opened.budget_bytes, graphs) + own)
    # If other processes allocated memory meanwhile, the driver may ask again.
    if cache.kv_cache_memory_bytes is None and available <= 0 and not result.changes:
        raise _nothing_left(result, graphs, cache.gpu_memory_utilization)
    return ProfiledMemory(available, graphs, result)


def _compile_ahead(
    serving: Serving, opened: OpenedDevice, model: LoadedModel, compiler: KernelCompiler
) -> None:
    """Compile the steps' kernels, unless a marker says that the cache has all of them. The ranks of
    a tensor-parallel stage, or of replicas that share experts, have collectives meanwhile, which
    none of them may skip."""
    place = opened.place
    shares = place.sharing_experts(model.resolved.decoder) is not None
    is_alone = place.parallel.tp_size == 1 and not shares
    steps = describe_steps(opened, model)
    if is_alone and compiler.has_compiled(steps):
        return
    if serving.compile_ahead(compiler):
        compiler.mark_compiled(steps)


def check_step_deadline(
    opened: OpenedDevice, model: LoadedModel, message: StepMessage, set_phase: SetPhase
) -> None:
    """Time the longest step if its deadline is short. Depends only on the configuration, so all
    ranks take part. Only for the CPU, where steps are slow and run on this thread.

    Raises:
        ConfigError: a legal step would count as hung.
        CommError: it took so long that a neighbor did not wait for it.
    """
    deadline_ms, device = model.config.scheduler.step_deadline_ms, opened.place.device
    if deadline_ms >= SHORT_DEADLINE_MS or device.type != "cpu":
        return
    try:
        with _profiling_runner(opened, model, set_phase, is_timed=True) as serving:
            step_s = serving.time_longest_step(message)
    except CommError as error:  # the communicators' timeout is only slightly longer
        problem = "a rank is lost, or takes longer for the longest step than its deadline"
        fix = "a longer deadline, or a lower max_num_batched_tokens"
        raise CommError(
            problem, field="scheduler.step_deadline_ms", value=deadline_ms, fix=fix
        ) from error
    check_deadline(deadline_ms, step_s, opened.place.parallel.pp_size)


def _run_largest_step(
    opened: OpenedDevice, model: LoadedModel, message: StepMessage, set_phase: SetPhase
) -> None:
    """Run the longest step and free everything on return, so that the profile measures only its own
    step."""
    with _profiling_runner(opened, model, set_phase) as serving:
        serving.run_largest_step(message)


def _estimate_graphs(opened: OpenedDevice, model: LoadedModel, set_phase: SetPhase) -> int:
    def used_bytes() -> int:
        opened.memory.reset_peak()
        return opened.memory.taken_since(opened.baseline, opened.memory.snapshot())

    with _profiling_runner(opened, model, set_phase) as serving:
        return serving.estimate_graphs(used_bytes)


@contextmanager
def _profiling_runner(
    opened: OpenedDevice, model: LoadedModel, set_phase: SetPhase, *, is_timed: bool = False
) -> Iterator[Serving]:
    """Serve steps over a KV cache of two blocks. On the CPU, where graphs do not need it, attention
    is left out because it is slow there, unless the steps are timed."""
    plan = _plan(opened, model)
    kv = KVMemory([], [])
    if is_timed or opened.place.device.type == "cuda":
        kv = model.allocate_kv_caches(plan, TaggedMemory(opened.place.device).make_kv_cache)
        model.attend(is_real=True)
    try:
        yield Serving(opened, model, plan, kv, set_phase)
    finally:
        model.attend(is_real=False)


def _plan(opened: OpenedDevice, model: LoadedModel) -> KVCacheConfig:
    """Return the KV groups of the whole pipeline, which the driver will plan in the same way."""
    decoder, parallel = model.resolved.decoder, model.config.parallel
    stages = [
        describe_layers(
            decoder.cache_specs(layers, parallel.tensor_parallel_size), model.cache_dtype
        )
        for layers in partition_layers(
            decoder.num_hidden_layers, parallel.pipeline_parallel_size, parallel.layer_partition
        )
    ]
    stages[-1] += describe_further(model.last_stage_pages)
    groups = plan_groups(
        stages,
        model.config.cache.block_size,
        model.max_model_len,
        model.config.scheduler.max_num_batched_tokens,
    )
    pp_rank = opened.place.parallel.pp_rank
    states = rank_states(stages[pp_rank], model.config.scheduler.max_num_seqs)
    return build_kv_cache_config(groups, pp_rank, _NUM_BLOCKS, states)


def _log(profile: MemoryProfile, graphs: int) -> None:
    _LOG.info(
        "profile: %.3f GB taken since the baseline (%.3f GB of it kept by the allocator), "
        "%.3f GB for the largest step, %.3f GB for graphs",
        profile.consumed / 1e9,
        profile.pinned / 1e9,
        profile.transient / 1e9,
        graphs / 1e9,
    )
    for change in profile.changes:
        _LOG.warning("during the memory profile, %s", change)


def _nothing_left(profile: MemoryProfile, graphs: int, utilization: float) -> CapacityError:
    problem = (
        f"{profile.consumed} bytes were taken since the baseline, a step takes {profile.transient} "
        f"and graphs about {graphs}, and {profile.free} are free: nothing is left"
    )
    fix = "a larger share, smaller steps, or more ranks"
    return CapacityError(problem, field="gpu_memory_utilization", value=utilization, fix=fix)

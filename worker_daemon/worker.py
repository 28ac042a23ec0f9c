"""The worker: one short method an operation, in the order in which a driver calls them. Composes
device, link, model and runner.

Knows no socket and no lifecycle state: server/lifecycle.py has decided that a call is legal before
it comes here. Used on the step thread only, abort_link apart.
"""

import gc
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from rpc_schema import lifecycle as lc
from rpc_schema import weight_transfer as wt
from rpc_schema.adoption import AdoptRequests, AdoptRequestsReply
from rpc_schema.base import StepRequest
from rpc_schema.codec import Frame
from rpc_schema.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    Rendezvous,
    SchedulerConfig,
)
from rpc_schema.kv_cache import KVCacheConfig, build_kv_cache_config
from rpc_schema.step import Done, ExecuteDummyBatch, ExecuteModel, SampleTokens
from worker_daemon.description import WorkerDescription, no_weights
from worker_daemon.device.failures import Verdict, drop_scratch, judge, typed_device_error
from worker_daemon.device.health import DeviceHealth, NoHealth, open_health
from worker_daemon.device.init import device_name, open_capture_stream, open_device
from worker_daemon.device.memory import (
    MemoryProfile,
    MemorySnapshot,
    MemorySource,
    memory_source,
    profile,
)
from worker_daemon.distributed import flight_recorder
from worker_daemon.distributed.bubbles import InputWaits
from worker_daemon.distributed.link import Link, meeting_s
from worker_daemon.distributed.parallel_state import ParallelState
from worker_daemon.distributed.tp import LinkedTensorParallel, tensor_parallel
from worker_daemon.errors import CapacityError, CommError, ConfigError, StateError
from worker_daemon.kv_cache.allocate import allocate_kv_caches
from worker_daemon.kv_cache.spec import describe_layers
from worker_daemon.layers.attention import NullAttention
from worker_daemon.layers.reduction_provider import probe_reduction
from worker_daemon.loading import (
    LoadedModel,
    RankPlace,
    Roots,
    SetPhase,
    load,
    rank_weights,
    reload,
)
from worker_daemon.memory_ledger import MemoryLedger, memory_line
from worker_daemon.models.saving import Saver, SaveRequest
from worker_daemon.models.tensor_bytes import checksum
from worker_daemon.models.tensorized import TENSORIZER_PATTERN, tensorizer_files
from worker_daemon.models.weight_state import WeightReport, WeightState
from worker_daemon.profiling import PlainTrace, Profiler, ProfileRequest
from worker_daemon.runner.assemble import RunnerParts, assemble_runner, step_graphs, tie_stage
from worker_daemon.runner.cuda_graph import NoGraphs, StepGraphs
from worker_daemon.runner.model_runner import ModelRunner
from worker_daemon.runner.request_state import StepLimits
from worker_daemon.runner.stage_ends import PendingReply
from worker_daemon.runner.warmup import (
    SyntheticStep,
    largest_step,
    size_sweep,
    warm_up_steps,
)
from worker_daemon.tagged_memory import PlainMemory
from worker_daemon.weight_transfer.overrides import apply_overrides
from worker_daemon.weight_transfer.session import WeightTransfer

_LOG = logging.getLogger(__name__)
_LONG_OPERATION_S = 1800.0
_DISPOSAL_S = 0.5
_REHEARSAL_BLOCKS = 2
"""The null block, and one that all synthetic requests share: nobody reads their output."""


@dataclass(frozen=True, slots=True)
class _DeviceContext:
    """What init_device makes and reset(CREATED) gives up; a relink replaces link."""

    device: torch.device
    memory: MemorySource
    baseline: MemorySnapshot
    budget_bytes: int
    ledger: MemoryLedger
    config: ParallelConfig
    parallel: ParallelState
    tp: LinkedTensorParallel
    link: Link
    timeout_s: float


class Worker:
    """One daemon's worker, from an idle process to a serving stage and back."""

    def __init__(
        self,
        device: str,
        model_roots: Sequence[Path],
        set_phase: SetPhase,
        save_root: Path | None = None,
        profile_dir: Path | None = None,
        open_memory: Callable[[torch.device], MemorySource] = memory_source,
        open_health: Callable[[torch.device], DeviceHealth] = open_health,
    ) -> None:
        """Touches no device: that is init_device's. Without a save_root nothing can be saved,
        without a profile_dir no trace written. open_memory: what measures a device's memory;
        open_health: what looks after the device itself."""
        self._device_name = device
        self._roots = Roots(model_roots, save_root)
        self._saver = Saver(save_root)
        self._profiler = Profiler(profile_dir, self._settle_transfers)
        self._set_phase = set_phase
        self._open_memory = open_memory
        self._open_health = open_health
        self._health: DeviceHealth = NoHealth()
        self._transfer = WeightTransfer(set_phase)
        self._next_load: ModelConfig | None = None
        """What update_config has made of the model's configuration, for the next reload."""
        self._max_threads = torch.get_num_threads()
        self._opening: Link | None = None
        """The newest link, open or not, for abort_link to see while it is opened."""
        self._capture_stream: torch.cuda.Stream | None = None
        """Outlives a reset: cuBLAS keeps what it has for a stream as long as the process lives."""
        self._context_or_none: _DeviceContext | None = None
        self._model_or_none: LoadedModel | None = None
        self._runner_or_none: ModelRunner | None = None
        self._kv_caches: Sequence[torch.Tensor] = ()
        self._graphs: StepGraphs = NoGraphs()
        self._is_warm = False
        """The runner has been through its first warm-up."""
        self._plan: KVCacheConfig | None = None
        self._advice: lc.KVCacheAdvice | None = None

    @property
    def rank(self) -> int:
        """The global rank; 0 before init_device."""
        return self._context_or_none.parallel.rank if self._context_or_none else 0

    # Start-up, in order.

    def init_device(self, message: lc.InitDevice) -> lc.InitDeviceReply:
        """Device context, then the link, then the baseline: what those two take is not the KV
        cache's to lose.

        Raises:
            ConfigError: no such device, or no such rank.
            CommError: the other ranks did not come.
            CapacityError: less memory is free than gpu_memory_utilization asks for.
        """
        rendezvous = message.rendezvous
        parallel = ParallelState(
            message.parallel.pipeline_parallel_size,
            message.parallel.tensor_parallel_size,
            rendezvous.rank,
        )
        device = open_device(self._device_name, rendezvous.local_world_size, self._max_threads)
        timeout_s = message.scheduler.step_deadline_ms / 1000 + 1
        tp = tensor_parallel(parallel.tp_rank, parallel.tp_size, probe_reduction(device))
        link = self._open_link(rendezvous, parallel, device, timeout_s, tp)
        try:
            if self._capture_stream is None:
                self._capture_stream = open_capture_stream(device)
            memory = self._open_memory(device)
            memory.reset_peak()
            baseline = memory.snapshot()
            budget = memory.budget(baseline, message.cache.gpu_memory_utilization)
        except BaseException:
            link.leave()
            raise
        self._context_or_none = _DeviceContext(
            device=device,
            memory=memory,
            baseline=baseline,
            budget_bytes=budget,
            ledger=MemoryLedger(memory, baseline, budget),
            config=message.parallel,
            parallel=parallel,
            tp=tp,
            link=link,
            timeout_s=timeout_s,
        )
        self._health = self._open_health(device)
        return lc.InitDeviceReply(
            **self._identity(message),
            device_name=device_name(device),
            total_memory_bytes=baseline.total,
            free_memory_bytes=baseline.free,
            backend=link.backend,
        )

    def load_model(self, message: lc.LoadModel) -> lc.LoadModelReply:
        """Build this rank's stage and shard, and fill it.

        Raises:
            ConfigError: the model, its partition or a size is not possible.
            CheckpointError: its files are missing, truncated or not what config.json says.
            CapacityError: it does not fit on the device.
        """
        began = time.monotonic()
        self._set_phase("LOADING", _LONG_OPERATION_S)
        with self._context.ledger.taking("weights"):
            model = load(message, self._place, self._roots, self._set_phase)
        self._model_or_none = model
        self._next_load = None
        return lc.LoadModelReply(
            **self._identity(message),
            model_memory_bytes=model.stage.num_parameters_bytes,
            seconds=time.monotonic() - began,
            max_model_len=model.max_model_len,
        )

    def get_kv_cache_spec(self, message: lc.GetKVCacheSpec) -> lc.GetKVCacheSpecReply:
        """Describe the layers of this stage and shard."""
        model = self._model
        layers = describe_layers(model.stage.kv_layer_specs, model.resolved.dtype)
        return lc.GetKVCacheSpecReply(**self._identity(message), layers=layers)

    def determine_available_memory(
        self, message: lc.DetermineAvailableMemory
    ) -> lc.DetermineAvailableMemoryReply:
        """Run the largest step over a KV cache of next to nothing, capture some of the graphs, and
        see what that leaves of the budget, and of the device.

        Raises:
            CapacityError: it leaves nothing.
        """
        self._set_phase("PROFILING", _LONG_OPERATION_S)
        context, model = self._context, self._model
        with self._rehearsal() as runner, self._capturing():
            self._step_graphs(runner).compile(runner)
        with profile(context.memory, context.baseline) as result:
            self._run_largest_step(message)
        context.ledger.activations_peak = result.transient
        graphs = self._estimate_graphs()
        context.memory.reset_peak()  # the rehearsed graphs' memory goes back to the device
        _log_profile(result, graphs)
        available = context.memory.limit_kv_cache(result.available(context.budget_bytes, graphs))
        override = model.config.cache.kv_cache_memory_bytes
        # Where others were at work meanwhile, the driver may ask again.
        if override is None and available <= 0 and not result.changes:
            raise _nothing_left(result, graphs, model.config.cache.gpu_memory_utilization)
        return lc.DetermineAvailableMemoryReply(
            **self._identity(message),
            available_bytes=max(0, available) if override is None else override,
            weights_bytes=model.stage.num_parameters_bytes,
            activation_peak_bytes=result.transient,
            requested_bytes=context.budget_bytes,
            graph_bytes=graphs,
            changes=tuple(
                lc.MemoryChange(pid=change.pid, num_bytes=change.num_bytes)
                for change in result.changes
            ),
        )

    def _run_largest_step(self, message: StepRequest) -> None:
        with self._rehearsal() as runner:
            _run_all(runner, [largest_step(message, runner.state.limits)])
            runner.settle()

    def _estimate_graphs(self) -> int:
        context = self._context

        def used_bytes() -> int:
            context.memory.reset_peak()
            return context.memory.taken_since(context.baseline, context.memory.snapshot())

        with self._rehearsal() as runner, self._capturing():
            return self._step_graphs(runner).rehearse(runner, used_bytes)

    @contextmanager
    def _rehearsal(self) -> Iterator[ModelRunner]:
        """A runner as it will be, but over a KV cache of one block; on the CPU, where graphs do not
        need it, without attention, which is slow there."""
        model = self._model
        caches: list[torch.Tensor] = []
        if self._context.device.type == "cuda":
            layers = describe_layers(model.stage.kv_layer_specs, model.resolved.dtype)
            block_size = model.config.cache.block_size
            plan = build_kv_cache_config(layers, _REHEARSAL_BLOCKS, block_size)
            caches = self._allocate(plan, PlainMemory(self._context.device).make_kv_cache)
            model.stage.set_attention(model.attention.backend)
        try:
            yield self._assemble(self._limits(_REHEARSAL_BLOCKS), caches)
        finally:
            model.stage.set_attention(NullAttention())

    def initialize_from_config(self, message: lc.InitializeFromConfig) -> Done:
        """Allocate the KV cache by this rank's entry, and tie attention to it.

        Raises:
            ConfigError: there is no entry for this rank, or it does not fit its layers.
            CapacityError: it does not fit on the device.
        """
        model, configs = self._model, message.kv_cache_configs
        if len(configs) != self._context.parallel.world_size:
            raise ConfigError(
                "one entry a rank",
                field="kv_cache_configs",
                value=len(configs),
                fix=f"{self._context.parallel.world_size} entries",
            )
        plan = configs[self.rank]
        if plan.block_size != model.config.cache.block_size:
            raise ConfigError(
                "the model was loaded for another block size",
                field="kv_cache_config.block_size",
                value=plan.block_size,
                fix=str(model.config.cache.block_size),
            )
        with self._context.ledger.taking("kv_cache"):
            self._kv_caches = self._allocate(plan, model.memory.make_kv_cache)
        model.stage.set_attention(model.attention.backend)
        self._runner_or_none = self._assemble(self._limits(plan.num_blocks), self._kv_caches)
        self._plan = plan
        return Done(**self._identity(message))

    def initialize_cache(self, message: lc.InitializeCache) -> Done:
        """Check that the block counts which the driver settled on are those that were allocated.

        Raises:
            ConfigError: they are not.
        """
        assert self._plan is not None, "legal after initialize_from_config only"
        if message.num_gpu_blocks != self._plan.num_blocks:
            raise ConfigError(
                "another number of blocks was allocated",
                field="num_gpu_blocks",
                value=message.num_gpu_blocks,
                fix=str(self._plan.num_blocks),
            )
        if message.num_cpu_blocks:
            raise ConfigError(
                "no blocks are kept in host memory",
                field="num_cpu_blocks",
                value=message.num_cpu_blocks,
                fix="0",
            )
        return Done(**self._identity(message))

    def update_max_model_len(self, message: lc.UpdateMaxModelLen) -> Done:
        """Take another limit, up to the one that the model was loaded with.

        Raises:
            ConfigError: it is longer than that.
        """
        model = self._model
        longest = model.resolved.max_model_len
        if message.max_model_len > longest:
            raise ConfigError(
                "the model was loaded for shorter contexts",
                field="max_model_len",
                value=message.max_model_len,
                fix=f"at most {longest}",
            )
        runner = self._runner_or_none
        self._model_or_none = replace(model, max_model_len=message.max_model_len)
        if runner is not None and self._plan is not None:
            runner.settle()
            self._runner_or_none = self._assemble(
                self._limits(self._plan.num_blocks), self._kv_caches
            )
        return Done(**self._identity(message))

    def compile_or_warm_up_model(
        self, message: lc.CompileOrWarmUpModel
    ) -> lc.CompileOrWarmUpModelReply:
        """Run synthetic steps through the normal entry, leave no trace of them in the rows, and
        capture the graphs that steps replay. Done again beside a rank that is new, it keeps the
        graphs that are there.

        Raises:
            CapacityError: the graphs do not fit beside weights and KV cache.
        """
        began = time.monotonic()
        runner = self._runner
        if self._is_warm:
            return self._warm_up_again(runner, message)
        self._warm_up(runner, message)
        with self._context.ledger.taking("graphs"):
            self._graphs = self._capture(runner)
        # What start-up has made stays: the collector need never look at it again.
        gc.collect()
        gc.freeze()
        self._model.memory.prepare()
        self._is_warm = True
        seconds = time.monotonic() - began
        _LOG.info("%d graphs, ready in %.1f s", self._graphs.count, seconds)
        self._report_memory()
        return lc.CompileOrWarmUpModelReply(**self._identity(message), seconds=seconds)

    def _warm_up_again(
        self, runner: ModelRunner, message: lc.CompileOrWarmUpModel
    ) -> lc.CompileOrWarmUpModelReply:
        """Take part in a new rank's warm-up, which runs kernel by kernel and unpadded: so must we,
        for what is passed between ranks to agree."""
        began = time.monotonic()
        self._graphs.set_aside(runner)
        self._warm_up(runner, message)
        with self._capturing():
            self._graphs.restore(runner)
        seconds = time.monotonic() - began
        return lc.CompileOrWarmUpModelReply(**self._identity(message), seconds=seconds)

    def _report_memory(self) -> None:
        self._advice = advice = self._context.ledger.advise()
        _LOG.info("memory: %s", memory_line(self._memory_by_kind()))
        _LOG.info(
            "kv_cache_memory_bytes: %d would fit the request, %d would fill the card",
            advice.request_bytes,
            advice.card_bytes,
        )

    def _warm_up(self, runner: ModelRunner, message: lc.CompileOrWarmUpModel) -> None:
        self._set_phase("COMPILING", _LONG_OPERATION_S)
        limits = runner.state.limits
        if self._context.device.type == "cuda":  # elsewhere there is nothing to compile
            _run_all(runner, [largest_step(message, limits)])
            runner.use(runner.eager.thinned())
            _run_all(runner, size_sweep(message, limits))
            runner.use(runner.eager)
        _run_all(runner, warm_up_steps(message, limits))
        runner.forget_requests()

    def _capture(self, runner: ModelRunner) -> StepGraphs:
        graphs = self._step_graphs(runner)
        with self._capturing():
            graphs.capture(runner)
        return graphs

    def _step_graphs(self, runner: ModelRunner) -> StepGraphs:
        enforce_eager = self._model.config.graph.enforce_eager
        return step_graphs(self._parts, runner, enforce_eager=enforce_eager)

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        self._set_phase("CAPTURING", _LONG_OPERATION_S)
        try:
            yield
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
            # The driver's own memory for a graph is no allocator's.
            if "out of memory" not in str(error):
                raise
            raise CapacityError(
                f"the graphs do not fit: {error}",
                fix="a smaller kv_cache_memory_bytes or max_num_seqs, or enforce_eager",
            ) from None

    # Serving.

    def execute_model(self, message: ExecuteModel, arrays: Sequence[Frame]) -> PendingReply | None:
        """See ModelRunner.execute_model. Raises StateError, alike on every rank, while a weight
        update is open or has failed."""
        if not self._model.weights.is_whole:
            self._model.weights.require_whole("ExecuteModel")
        with self._profiler.step(message):
            return self._runner.execute_model(message, arrays)

    def sample_tokens(self, message: SampleTokens, arrays: Sequence[Frame]) -> PendingReply | None:
        """See ModelRunner.sample_tokens."""
        with self._profiler.step(message):
            return self._runner.sample_tokens(message, arrays)

    def execute_dummy_batch(self, message: ExecuteDummyBatch) -> PendingReply | None:
        """See ModelRunner.execute_dummy_batch."""
        with self._profiler.step(message):
            return self._runner.execute_dummy_batch(message)

    def get_supported_tasks(self, message: lc.GetSupportedTasks) -> lc.GetSupportedTasksReply:
        """Every architecture of the registry generates."""
        return lc.GetSupportedTasksReply(**self._identity(message), tasks=("generate",))

    def get_model_metadata(self, message: lc.GetModelMetadata) -> lc.GetModelMetadataReply:
        """Say what a driver needs to know of the model."""
        model = self._model
        decoder = model.resolved.decoder
        return lc.GetModelMetadataReply(
            **self._identity(message),
            architecture=decoder.architecture,
            vocab_size=decoder.vocab_size,
            hidden_size=decoder.hidden_size,
            num_layers=decoder.num_hidden_layers,
            max_model_len=model.max_model_len,
            dtype=str(model.resolved.dtype).removeprefix("torch."),
            eos_token_ids=decoder.eos_token_ids,
            attention_backend=model.attention.name,
        )

    # Weights.

    def compute_weight_checksums(
        self, message: lc.ComputeWeightChecksums
    ) -> lc.ComputeWeightChecksumsReply:
        """Hash what this rank holds of each tensor of the checkpoint."""
        self._set_phase("HASHING", _LONG_OPERATION_S)
        views = self._model.stage.checkpoint_views()
        checksums = {name: checksum(view) for name, view in views.items()}
        return lc.ComputeWeightChecksumsReply(**self._identity(message), checksums=checksums)

    def save_sharded_state(self, message: lc.SaveShardedState) -> lc.SaveShardedStateReply:
        """Write this rank's weights beside the set of that name, which stays in use.

        Raises: see Saver.write; StateError while the weights are not whole.
        """
        began = time.monotonic()
        self._model.weights.require_whole("SaveShardedState")
        request = SaveRequest(
            message.save.hex(), message.name, message.pattern, message.max_size_bytes
        )
        report = self._saver.write(
            request,
            rank_weights(self._model, self._place),
            lambda: self._set_phase("SAVING", _LONG_OPERATION_S),
        )
        seconds = time.monotonic() - began
        _LOG.info("saved %.3f GB in %.1f s", report.size_bytes / 1e9, seconds)
        return lc.SaveShardedStateReply(
            **self._identity(message),
            num_files=report.num_files,
            size_bytes=report.size_bytes,
            seconds=seconds,
        )

    def save_tensorized_model(self, message: lc.SaveTensorizedModel) -> lc.SaveTensorizedModelReply:
        """The same through the tensorizer library, in one file.

        Raises: see Saver.write and tensorizer_files.
        """
        self._model.weights.require_whole("SaveTensorizedModel")
        began = time.monotonic()
        files = tensorizer_files("name", message.name)
        request = SaveRequest(
            message.save.hex(), message.name, TENSORIZER_PATTERN, sys.maxsize, files
        )
        report = self._saver.write(
            request,
            rank_weights(self._model, self._place),
            lambda: self._set_phase("SAVING", _LONG_OPERATION_S),
        )
        seconds = time.monotonic() - began
        _LOG.info("saved %.3f GB in %.1f s", report.size_bytes / 1e9, seconds)
        return lc.SaveTensorizedModelReply(
            **self._identity(message), size_bytes=report.size_bytes, seconds=seconds
        )

    def finish_sharded_state(self, message: lc.FinishShardedState) -> Done:
        """Put what save_sharded_state wrote in place, or remove it.

        Raises: see Saver.finish.
        """
        self._saver.finish(message.save.hex(), keep=message.keep)
        return Done(**self._identity(message))

    # Sleep. A failure is typed and has changed nothing.

    def sleep(self, message: lc.Sleep) -> lc.MemoryTagsReply:
        """Give up the memory of weights and KV cache, and all requests. Raises: see
        TaggedMemory.sleep."""
        memory = self._model.memory
        return self._change_tags(message, lambda: memory.sleep(message.level))

    def wake_up(self, message: lc.WakeUp) -> lc.MemoryTagsReply:
        """Take memory for tags again. Raises: see TaggedMemory.wake_up."""
        memory = self._model.memory
        return self._change_tags(message, lambda: memory.wake_up(message.tags))

    def discard(self, message: lc.Discard) -> lc.MemoryTagsReply:
        """Give up the memory of tags, and what it holds. Raises: see TaggedMemory.discard."""
        memory = self._model.memory
        return self._change_tags(message, lambda: memory.discard(message.tags))

    def _change_tags(
        self, message: lc.Sleep | lc.WakeUp | lc.Discard, change: Callable[[], None]
    ) -> lc.MemoryTagsReply:
        began = time.monotonic()
        memory, runner = self._model.memory, self._runner_or_none
        change()
        if runner is not None and memory.tags.kv_cache != "awake":
            runner.forget_requests()
        if memory.tags.weights == "discarded":
            self._model.weights.discard(f"{type(message).__name__} kept nothing of them")
        return lc.MemoryTagsReply(
            **self._identity(message),
            memory_tags=dict(memory.states),
            seconds=time.monotonic() - began,
        )

    # Weights that come in.

    def init_weight_transfer_engine(
        self, message: wt.InitWeightTransferEngine
    ) -> wt.InitWeightTransferEngineReply:
        """Choose where updates come from; wait for the trainer, where there is one.

        Raises: see WeightTransfer.init_engine.
        """
        rank = self._transfer.init_engine(
            message.engine, message.timeout_ms / 1000, self._place, self._roots
        )
        return wt.InitWeightTransferEngineReply(**self._identity(message), transfer_rank=rank)

    def start_weight_update(self, message: wt.StartWeightUpdate) -> Done:
        """Open an update: no step runs until it is finished."""
        self._transfer.start(message, self._model, self._place)
        self._forget_requests()
        return Done(**self._identity(message))

    def update_weights(self, message: wt.UpdateWeights) -> wt.UpdateWeightsReply:
        """Take some tensors, in place.

        Raises: see WeightTransfer.update.
        """
        report = self._transfer.update(message)
        return wt.UpdateWeightsReply(
            **self._identity(message),
            num_tensors=report.num_tensors,
            size_bytes=report.size_bytes,
            seconds=report.seconds,
        )

    def finish_weight_update(self, message: wt.FinishWeightUpdate) -> wt.FinishWeightUpdateReply:
        """Close the update.

        Raises: see WeightTransfer.finish.
        """
        number = self._transfer.finish()
        self._model.memory.weights_filled()
        if self._context.device.type == "cuda":
            torch.cuda.empty_cache()  # of the buffers: others may need that memory
        return wt.FinishWeightUpdateReply(**self._identity(message), num_updates=number)

    def reload_weights(self, message: wt.ReloadWeights) -> wt.ReloadWeightsReply:
        """Read the weights again, in place; an update that is open is given up.

        Raises: see loading.reload.
        """
        began = time.monotonic()
        self._set_phase("LOADING", _LONG_OPERATION_S)
        config = self._next_load or self._model.config.model
        if message.model:
            config = apply_overrides(config, {"model.model": message.model})
        done = reload(self._model, config, self._place, self._roots, self._set_phase)
        self._transfer.drop_update()
        self._forget_requests()
        self._model_or_none = done.model
        done.model.memory.weights_filled()
        self._next_load = None
        return wt.ReloadWeightsReply(
            **self._identity(message),
            size_bytes=done.size_bytes,
            seconds=time.monotonic() - began,
            num_updates=done.num_updates,
        )

    def _forget_requests(self) -> None:
        """Their KV is of weights that were replaced: nobody may adopt them."""
        if self._runner_or_none is not None:
            self._runner_or_none.forget_requests()

    def update_config(self, message: wt.UpdateConfig) -> Done:
        """Change what the next reload_weights reads.

        Raises: see apply_overrides.
        """
        config = self._next_load or self._model.config.model
        self._next_load = apply_overrides(config, message.overrides)
        return Done(**self._identity(message))

    # Profiles.

    def profile(self, message: lc.Profile) -> lc.ProfileReply:
        """Begin or end a profile. What the device was given before belongs to what was before.

        Raises: see Profiler.start and Profiler.stop.
        """
        context = self._context
        if context.device.type == "cuda":
            torch.cuda.synchronize(context.device)
        if message.action == "start":
            request = ProfileRequest(message.kind, message.prefix)
            self._profiler.start(request, context.device, context.parallel)
            return lc.ProfileReply(**self._identity(message), file="")
        self._set_phase("WRITING TRACE", _LONG_OPERATION_S)
        written = self._profiler.stop(message.kind)
        return lc.ProfileReply(**self._identity(message), file=str(written or ""))

    def start_trace(self) -> None:
        """Record the steps to come for an observer.

        Raises:
            StateError: there is no device yet, or see Profiler.start_observed.
        """
        context = self._context_or_none
        if context is None:
            raise StateError("there is nothing to trace in CREATED", fix="trace a group that runs")
        if context.device.type == "cuda":
            torch.cuda.synchronize(context.device)
        self._profiler.start_observed(context.device, context.parallel)

    def stop_trace(self, *, keep: bool) -> PlainTrace | None:
        """End that. Raises: see Profiler.stop_observed."""
        return self._profiler.stop_observed(keep=keep)

    # Changes of hands, and the way back.

    def on_attach(self, *, keep_requests: bool = False) -> bool:
        """Drop all requests unless they are to be kept, and the profile of the driver before. True
        if no step was cut off; whether every send was received, only the group's seqs tell."""
        self._profiler.abandon()
        self._transfer.abandon("its driver was replaced")
        runner = self._runner_or_none
        if runner is None:
            return True
        clean = not runner.state.has_failed
        if not keep_requests:
            runner.forget_requests()
        return clean

    def adopt_requests(self, message: AdoptRequests) -> AdoptRequestsReply:
        """Tell which requests there are, and how far: see ModelRunner.adopt_requests."""
        page = self._runner.adopt_requests(message.first_slot)
        return AdoptRequestsReply(
            **self._identity(message),
            rows=page.rows,
            next_slot=page.next_slot,
            token_ids=page.token_ids,
            block_ids=page.block_ids,
        )

    def relink(self, message: lc.Relink) -> Done:
        """Leave the link as it is, meet the other ranks anew. Weights, KV cache and rows stay.

        Raises:
            CommError: the other ranks did not come. This rank then has no link, and can be linked
            again.
        """
        context, runner = self._context, self._runner_or_none
        if runner is not None:
            self._graphs.before_relink(runner)
        self._profiler.link_left(context.link.leave())
        link = self._open_link(
            message.rendezvous, context.parallel, context.device, context.timeout_s, context.tp
        )
        self._context_or_none = replace(context, link=link)
        if runner is not None:
            limits = runner.state.limits
            runner.tie(tie_stage(self._parts, link, limits, runner.inputs, runner.history))
            if not message.warm_up_follows:
                with self._capturing():
                    self._graphs.restore(runner)
        return Done(**self._identity(message))

    def reset(self, message: lc.Reset) -> Done:
        """Give up the KV cache, then the model, then the device, as far down as asked; then end a
        profile."""
        if self._runner_or_none is not None and message.to != "CREATED":
            with suppress(CommError):  # what a lost neighbour has not received is nobody's now
                self._runner_or_none.settle()
        self._runner_or_none = None
        self._graphs = NoGraphs()
        self._is_warm = False
        self._kv_caches = ()
        self._plan = None
        self._transfer.interrupt("the group was reset")
        self._advice = None
        if self._context_or_none is not None:
            self._context_or_none.ledger.forget("graphs", "kv_cache")
            if message.to != "MODEL_LOADED":
                self._context_or_none.ledger.forget("weights")
        model = self._model_or_none
        if message.to == "MODEL_LOADED":
            self._model.stage.set_attention(NullAttention())
            self._model.memory.drop_kv_cache()
        else:
            self._model_or_none = None
            self._transfer.close_engine()
        reply = Done(**self._identity(message))
        if message.to == "CREATED" and self._context_or_none is not None:
            self._profiler.link_left(self._context_or_none.link.leave())
            self._context_or_none = None
        if model is not None and message.to != "MODEL_LOADED":
            model.memory.close()
        del model
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # until the next reset; mostly modules
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._set_phase("WRITING TRACE", _LONG_OPERATION_S)
        self._profiler.end()
        return reply

    def _settle_transfers(self) -> None:
        """Wait for what is under way from and to the neighbours; after a failure that is the
        link's business."""
        runner = self._runner_or_none
        if runner is not None and not runner.state.has_failed:
            with suppress(CommError):
                runner.settle()

    def abort_link(self) -> bool:
        """Unblock whoever waits in NCCL; tell whether there was a link to abort. A wait for a
        trainer ends without the link. The guard thread's only call."""
        if self._transfer.abort():
            return False
        return self._opening is not None and self._opening.abort()

    def dump_link(self) -> bytes:
        """What the communicators last did, as JSON; empty where nobody keeps it. For the guard
        thread."""
        context = self._context_or_none
        return b"" if context is None or context.link.backend != "nccl" else flight_recorder.dump()

    def check_device(self) -> str:
        """What is amiss with the device, though it may compute; empty: nothing. For the guard
        thread."""
        return self._health.check()

    def typed_error(self, error: Exception) -> Exception:
        """Return what an operation's failure is called: OutOfMemoryError, after which what it held
        is free again, DeviceError, or the error itself."""
        typed = typed_device_error(error, "smaller settings, or free memory and try again")
        if judge(error) is Verdict.OUT_OF_MEMORY:
            drop_scratch(error)
        if typed is not error:
            typed.__cause__ = error
        return typed.with_traceback(error.__traceback__)

    def close(self) -> None:
        """Leave the link, in good order where the peers let us; the process's end gives back the
        rest."""
        self._profiler.end()
        self._transfer.close_engine()
        # Graphs first: NCCL gives a communicator up only once no graph holds its kernels.
        self._runner_or_none = None
        self._graphs = NoGraphs()
        if self._model_or_none is not None:
            self._model_or_none.memory.stop()
        if self._context_or_none is not None:
            disposal = self._context_or_none.link.leave()
            if disposal is not None:
                disposal.join(_DISPOSAL_S)

    def describe(self) -> WorkerDescription:
        """Say what is on the device now, and who uses how much of it."""
        model, runner = self._model_or_none, self._runner_or_none
        return WorkerDescription(
            device=self._device_name,
            config=model.config if model else None,
            kv_cache=self._plan,
            memory_bytes=self._memory_by_kind(),
            kv_cache_advice=self._advice,
            providers=self._providers(),
            memory_tags=model.memory.states if model else {},
            weights=no_weights if model is None else partial(_weights_report, model.weights),
            # What is published outlives a reset: it must hold nothing of the runner.
            input_wait_share=_no_wait if runner is None else partial(_waiting_share, runner.waits),
        )

    def _memory_by_kind(self) -> dict[str, int]:
        context, model = self._context_or_none, self._model_or_none
        if context is None:
            return {}
        held = dict(model.memory.bytes_by_kind()) if model else {}
        weights = model.stage.num_parameters_bytes if model else 0
        kv_cache = self._plan.size_bytes if self._plan else 0
        kinds = context.ledger.by_kind(
            {"weights": held.pop("weights", weights), "kv_cache": held.pop("kv_cache", kv_cache)}
        )
        return kinds | held

    def _providers(self) -> dict[str, str]:
        model, context = self._model_or_none, self._context_or_none
        if model is None or context is None:
            return {}
        return {
            "attention": model.attention.name,
            "layers": model.stage.ops_name,
            "all_reduce": context.tp.all_reduce_name,
            "graphs": str(self._graphs.count),
        }

    # Parts.

    @property
    def _context(self) -> _DeviceContext:
        assert self._context_or_none is not None, "legal after init_device only"
        return self._context_or_none

    @property
    def _place(self) -> RankPlace:
        context = self._context
        return RankPlace(context.device, context.config, context.parallel, context.tp)

    @property
    def _model(self) -> LoadedModel:
        assert self._model_or_none is not None, "legal after load_model only"
        return self._model_or_none

    @property
    def _runner(self) -> ModelRunner:
        assert self._runner_or_none is not None, "legal after initialize_from_config only"
        return self._runner_or_none

    @property
    def _parts(self) -> RunnerParts:
        context, model = self._context, self._model
        return RunnerParts(
            parallel=context.parallel,
            tp=context.tp,
            stage=model.stage,
            hidden_size=model.resolved.decoder.hidden_size,
            dtype=model.resolved.dtype,
            device=context.device,
            capture_stream=self._capture_stream,
        )

    def _identity(self, message: StepRequest) -> dict[str, int]:
        return {"epoch": message.epoch, "seq": message.seq, "rank": self.rank}

    def _open_link(
        self,
        rendezvous: Rendezvous,
        parallel: ParallelState,
        device: torch.device,
        timeout_s: float,
        tp: LinkedTensorParallel,
    ) -> Link:
        self._set_phase("LINKING", meeting_s(timeout_s) + _DISPOSAL_S)
        self._opening = Link(rendezvous.link, device)
        self._opening.open(parallel, rendezvous.host, rendezvous.port, timeout_s)
        try:
            tp.bind(self._opening.groups.stage, self._opening.peers)
        except BaseException:
            self._opening.leave()
            raise
        return self._opening

    def _limits(self, num_blocks: int) -> StepLimits:
        model = self._model
        scheduler: SchedulerConfig = model.config.scheduler
        cache: CacheConfig = model.config.cache
        return StepLimits(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=model.max_model_len,
            vocab_size=model.resolved.decoder.vocab_size,
            block_size=cache.block_size,
            num_blocks=num_blocks,
        )

    def _allocate(
        self, plan: KVCacheConfig, make_zeros: Callable[[int, torch.dtype], torch.Tensor]
    ) -> list[torch.Tensor]:
        model = self._model
        return allocate_kv_caches(
            plan, model.stage.kv_layer_specs, model.resolved.dtype, make_zeros
        )

    def _assemble(self, limits: StepLimits, kv_caches: Sequence[torch.Tensor]) -> ModelRunner:
        return assemble_runner(self._parts, self._context.link, limits, kv_caches)


def _no_wait() -> float:
    return 0.0


def _weights_report(weights: WeightState) -> WeightReport:
    return weights.report


def _waiting_share(waits: InputWaits) -> float:
    return waits.bubbles.waiting_share


def _run_all(runner: ModelRunner, steps: Iterable[SyntheticStep]) -> None:
    """Run synthetic steps, and wait for each. Raises what a step raised."""
    for step in steps:
        reply = runner.execute_model(step.message, step.arrays)
        if reply is not None:
            reply.result()


def _log_profile(profile: MemoryProfile, graphs: int) -> None:
    _LOG.info(
        "profile: %.3f GB taken since the baseline (%.3f GB of it kept by the allocator), "
        "%.3f GB for the largest step, %.3f GB for graphs",
        profile.consumed / 1e9,
        profile.pinned / 1e9,
        profile.transient / 1e9,
        graphs / 1e9,
    )
    for change in profile.changes:
        _LOG.warning("while the memory was profiled, %s", change)


def _nothing_left(profile: MemoryProfile, graphs: int, utilization: float) -> CapacityError:
    return CapacityError(
        f"{profile.consumed} bytes were taken since the baseline, a step takes {profile.transient} "
        f"and graphs about {graphs}, and {profile.free} are free: nothing is left",
        field="gpu_memory_utilization",
        value=utilization,
        fix="a larger share, smaller steps, or more ranks",
    )

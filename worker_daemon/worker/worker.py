"""The worker: one short method per operation, in the order in which a driver calls them, over its
device and link (rank_device.py), its model (loading.py) and its runner (serving.py).

server/lifecycle.py has checked that each call is legal. Used on the step thread; the guard thread
calls abort_link, dump_link and check_device.
"""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch

from rpc_schema import expert_placement as ep
from rpc_schema import lifecycle as lc
from rpc_schema import lora
from rpc_schema import weight_transfer as wt
from rpc_schema.adoption import AdoptRequests, AdoptRequestsReply
from rpc_schema.codec import Frame
from rpc_schema.drafts import RowDrafts, TakeDraftTokenIds, TakeDraftTokenIdsReply
from rpc_schema.errors import CommError, StateError
from rpc_schema.kv_cache import KVCacheConfig
from rpc_schema.operations import StepMessage
from rpc_schema.step import Done, ExecuteDummyBatch, ExecuteModel, SampleTokens
from worker_daemon.contracts.fp8 import FP8
from worker_daemon.contracts.hub import NO_HUB, HubSettings
from worker_daemon.contracts.uploads import FindUpload, no_uploads
from worker_daemon.device.failures import (
    FailureKind,
    drop_scratch,
    failure_kind,
    typed_device_error,
)
from worker_daemon.device.health import CheckDevice, open_health
from worker_daemon.device.init import device_name
from worker_daemon.device.kept_memory import KeptMemory
from worker_daemon.device.memory import MemorySource
from worker_daemon.device.memory_sources import memory_source
from worker_daemon.errors import config_error
from worker_daemon.kernel_compiler import KernelCompiler
from worker_daemon.models.saving import Saver, SaveReport, SaveRequest
from worker_daemon.models.tensor_bytes import checksum
from worker_daemon.models.tensorized import TENSORIZER_PATTERN, tensorizer_files
from worker_daemon.phases import LONG_OPERATION_S, SetPhase
from worker_daemon.runner.connectors.file_traffic import FileTraffic
from worker_daemon.runner.kv_cache import KVMemory
from worker_daemon.runner.output import PendingOutput
from worker_daemon.worker.describing import describe, memory_by_kind
from worker_daemon.worker.description import MoveEnd, OnMoveEnd, WorkerDescription
from worker_daemon.worker.expert_moves import ExpertMover
from worker_daemon.worker.frozen_start import FrozenStart
from worker_daemon.worker.host_memory import (
    connector_bytes,
)
from worker_daemon.worker.kv_outside import KVOutside
from worker_daemon.worker.loading import (
    LoadedModel,
    checkpoint_changed,
    load,
    rank_weights,
    reload,
)
from worker_daemon.worker.memory_ledger import memory_line
from worker_daemon.worker.memory_profile import check_step_deadline, profile_memory
from worker_daemon.worker.profiling import PlainTrace, Profiler, ProfileRequest
from worker_daemon.worker.rank_device import RankDevice
from worker_daemon.worker.resolve import pooling_support
from worker_daemon.worker.serving import Serving
from worker_daemon.worker.stage_loading import Roots
from worker_daemon.worker.weight_transfer.overrides import apply_overrides
from worker_daemon.worker.weight_transfer.session import WeightTransfer
from worker_daemon.worker.wire_identity import on_wire

_LOG = logging.getLogger(__name__)


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
        open_health: Callable[[torch.device], CheckDevice] = open_health,
        num_threads: int | None = None,
        lora_roots: Sequence[Path] = (),
        find_upload: FindUpload = no_uploads,
        compiler: KernelCompiler | None = None,
        hub: HubSettings = NO_HUB,
        max_kv_host_bytes: int | None = None,
        kv_traffic: FileTraffic | None = None,
        kept_memory: KeptMemory | None = None,
    ) -> None:
        """Touches no device before init_device. save_root: directory of saved weights; None: saving
        is refused. profile_dir: directory of traces; None: traces are refused. num_threads:
        torch's, if the user set it. lora_roots: directories of LoRA adapters; empty: adapters are
        refused. compiler: see profile_memory; not closed here. hub: of models by name.
        max_kv_host_bytes: most host memory of the host tier; None: what the host has free.
        kv_traffic: with the files of KV blocks, closed here; None: files are refused. kept_memory:
        where the host tier outlives the daemon, closed here; None: it does not."""
        self._roots = Roots(model_roots, save_root, lora_roots, hub)
        self._saver = Saver(save_root)
        self._profiler = Profiler(profile_dir, self._settle_transfers)
        self._set_phase = set_phase
        self._find_upload = find_upload
        self._compiler = compiler
        self._device = RankDevice(device, set_phase, open_memory, open_health, num_threads)
        self._transfer = WeightTransfer(set_phase)
        self._model_or_none: LoadedModel | None = None
        self._serving_or_none: Serving | None = None
        self._expert_mover_or_none: ExpertMover | None = None
        """The mover of the loaded model's experts."""
        self._on_move_end: OnMoveEnd = _ignore
        self._frozen_start = FrozenStart()
        self._kv_outside = KVOutside(max_kv_host_bytes, kv_traffic, kept_memory)

    @property
    def rank(self) -> int:
        """The global rank; 0 before init_device."""
        opened = self._device.opened_or_none
        return opened.place.parallel.rank if opened else 0

    # Start-up, in order.

    def init_device(self, message: lc.InitDevice) -> lc.InitDeviceReply:
        """Open the device and the link. Raises: see RankDevice.open."""
        opened = self._device.open(message)
        return lc.InitDeviceReply(
            **self._identity(message),
            device_name=device_name(opened.place.device),
            total_memory_bytes=opened.baseline.total,
            free_memory_bytes=opened.baseline.free,
            backend=opened.link.backend,
        )

    def load_model(self, message: lc.LoadModel) -> lc.LoadModelReply:
        """Build this rank's stage and shard, and fill it. Raises: see loading.load."""
        began = time.monotonic()
        self._set_phase("LOADING", LONG_OPERATION_S)
        opened = self._device.opened
        self._kv_outside.check(message.cache)
        with opened.ledger.taking("weights"):
            model = load(message, opened.place, self._roots, self._set_phase)
        self._model_or_none = model
        ranks = opened.place.expert_ranks(model.resolved.decoder)
        self._expert_mover_or_none = ExpertMover(
            *(model.stage, model.weights, ranks, opened.place.device),
            *(self._kv_outside.meeting, self._on_move_end),
        )
        return lc.LoadModelReply(
            **self._identity(message),
            model_memory_bytes=model.weights_bytes,
            seconds=time.monotonic() - began,
            max_model_len=model.max_model_len,
        )

    def get_kv_cache_spec(self, message: lc.GetKVCacheSpec) -> lc.GetKVCacheSpecReply:
        """Describe the layers of this stage and shard."""
        layers = self._model.kv_cache_specs
        return lc.GetKVCacheSpecReply(**self._identity(message), layers=layers)

    def determine_available_memory(
        self, message: lc.DetermineAvailableMemory
    ) -> lc.DetermineAvailableMemoryReply:
        """Profile the memory of the largest step and of the graphs.

        Raises: see profile_memory and check_step_deadline.
        """
        self._drop_move("the memory is profiled")
        opened, model = self._device.opened, self._model
        found = profile_memory(opened, model, message, self._set_phase, self._compiler)
        check_step_deadline(opened, model, message, self._set_phase)
        override = model.config.cache.kv_cache_memory_bytes
        available = found.available - connector_bytes(model, opened.place.device)
        return lc.DetermineAvailableMemoryReply(
            **self._identity(message),
            available_bytes=max(0, available) if override is None else override,
            weights_bytes=model.weights_bytes,
            activation_peak_bytes=found.profile.transient,
            requested_bytes=opened.budget_bytes,
            graph_bytes=found.graphs,
            changes=tuple(
                lc.MemoryChange(pid=change.pid, num_bytes=change.num_bytes)
                for change in found.profile.changes
            ),
        )

    def initialize_from_config(self, message: lc.InitializeFromConfig) -> Done:
        """Allocate the KV cache that this rank's entry describes, and attach attention to it.

        Raises:
            ConfigError: there is no entry for this rank, or it does not fit its layers.
            CapacityError: it does not fit on the device.
        """
        model, configs = self._model, message.kv_cache_configs
        opened = self._device.opened
        world_size = opened.place.parallel.world_size
        if len(configs) != world_size:
            problem = "one entry per rank of the replica is needed"
            raise config_error("kv_cache_configs", len(configs), problem, f"{world_size} entries")
        plan = configs[opened.place.parallel.rank_in_replica]
        has_pages = any(group.layer_names for group in plan.groups)
        if has_pages and plan.block_size != model.config.cache.block_size:
            problem = "the model was loaded for another block size"
            fix = str(model.config.cache.block_size)
            raise config_error("kv_cache_config.block_size", plan.block_size, problem, fix)
        self._kv_outside.close_plan()
        with opened.ledger.taking("kv_cache"):
            self._kv_outside.open(plan, model, opened.place)
            kv = model.allocate_kv_caches(plan, model.memory.make_kv_cache)
        model.attend(is_real=True)
        self._serve(plan, kv)
        return Done(**self._identity(message))

    def initialize_cache(self, message: lc.InitializeCache) -> Done:
        """Check the driver's block counts against the allocated ones.

        Raises:
            ConfigError: they differ.
        """
        num_blocks = self._serving.plan.num_blocks
        if message.num_gpu_blocks != num_blocks:
            problem = "another number of blocks was allocated"
            raise config_error("num_gpu_blocks", message.num_gpu_blocks, problem, str(num_blocks))
        if message.num_cpu_blocks:
            problem = "KV blocks in host memory are not supported"
            raise config_error("num_cpu_blocks", message.num_cpu_blocks, problem, "0")
        return Done(**self._identity(message))

    def update_max_model_len(self, message: lc.UpdateMaxModelLen) -> Done:
        """Set another length limit. Raises: see LoadedModel.limited_to."""
        self._model_or_none = self._model.limited_to(message.max_model_len)
        serving = self._serving_or_none
        if serving is not None:
            serving.runner.settle()
            self._serve(serving.plan, serving.kv)
        return Done(**self._identity(message))

    def compile_or_warm_up_model(
        self, message: lc.CompileOrWarmUpModel
    ) -> lc.CompileOrWarmUpModelReply:
        """Run synthetic steps, and capture graphs of them. If repeated for a new rank of the group,
        the existing graphs are kept.

        Raises:
            CapacityError: the graphs do not fit in addition to weights and KV cache.
        """
        began = time.monotonic()
        self._drop_unfinished_move("graphs are captured")
        serving = self._serving
        self._kv_outside.stop_pinning()
        if serving.is_warm:
            serving.warm_up_again(message)
        else:
            serving.warm_up(message)
            with self._device.opened.ledger.taking("graphs"):
                serving.capture_graphs()
            serving.take_memory_of_steps(message)
            self._frozen_start.freeze()
            self._model.memory.prepare()
            _LOG.info("%d graphs, ready in %.1f s", serving.num_graphs, time.monotonic() - began)
            self._log_memory()
        self._kv_outside.pin_ahead()
        serving.runner.state.contents.forget()  # synthetic steps have written to blocks
        seconds = time.monotonic() - began
        return lc.CompileOrWarmUpModelReply(**self._identity(message), seconds=seconds)

    def _log_memory(self) -> None:
        advice = self._device.opened.ledger.advise()
        _LOG.info(
            "memory: %s", memory_line(memory_by_kind(self._device, self._model, self._serving))
        )
        _LOG.info(
            "kv_cache_memory_bytes: %d would fit the request, %d would fill the card",
            advice.request_bytes,
            advice.card_bytes,
        )

    # Serving.

    def execute_model(self, message: ExecuteModel, arrays: Sequence[Frame]) -> PendingOutput | None:
        """See ModelRunner.execute_model. Raises StateError, on every rank, while a weight
        update is open or has failed."""
        if not self._model.weights.is_whole:
            self._model.weights.require_whole("ExecuteModel")
        if self._profiler.recording is None and self._profiler.abandoned is None:
            return self._serving.runner.execute_model(message, arrays)
        with self._profiler.step(message):
            return self._serving.runner.execute_model(message, arrays)

    def sample_tokens(self, message: SampleTokens, arrays: Sequence[Frame]) -> PendingOutput | None:
        """See ModelRunner.sample_tokens."""
        with self._profiler.step(message):
            return self._serving.runner.sample_tokens(message, arrays)

    def execute_dummy_batch(self, message: ExecuteDummyBatch) -> PendingOutput | None:
        """See ModelRunner.execute_dummy_batch."""
        with self._profiler.step(message):
            return self._serving.runner.execute_dummy_batch(message)

    def refuse_step(self, seq: int) -> None:
        """Make the steps after `seq`, which could not be read, fail until a resynchronization."""
        if self._serving_or_none is not None:
            self._serving_or_none.runner.state.mark_failed(seq)

    def take_draft_token_ids(self, message: TakeDraftTokenIds) -> TakeDraftTokenIdsReply:
        """Return the drafts made after the last step, or those that a step verifies: see
        Serving.find_drafts."""
        found = self._serving.find_drafts(message.step_seq)
        drafts = None if found is None else RowDrafts(**found._asdict())
        return TakeDraftTokenIdsReply(**self._identity(message), drafts=drafts)

    def get_supported_tasks(self, message: lc.GetSupportedTasks) -> lc.GetSupportedTasksReply:
        """Return the tasks: generation, if the model has an output layer, and pooling."""
        decoder = self._model.resolved.decoder
        pooling = [each.task for each in pooling_support(decoder).tasks]
        tasks = (*(["generate"] if decoder.generates else []), *pooling)
        return lc.GetSupportedTasksReply(**self._identity(message), tasks=tasks)

    def get_model_metadata(self, message: lc.GetModelMetadata) -> lc.GetModelMetadataReply:
        """Return the model's metadata."""
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
            generates=decoder.generates,
            pooling=pooling_support(decoder),
            checkpoint_changed=checkpoint_changed(model, self._roots),
            routed_experts=model.resolved.routed_experts,
        )

    # Weights.

    def compute_weight_checksums(
        self, message: lc.ComputeWeightChecksums
    ) -> lc.ComputeWeightChecksumsReply:
        """Hash this rank's part of each tensor of the checkpoint, and of its KV scales."""
        self._set_phase("HASHING", LONG_OPERATION_S)
        stage = self._model.stage
        views = stage.checkpoint_views() | stage.scale_views()
        checksums = {name: checksum(view) for name, view in views.items()}
        return lc.ComputeWeightChecksumsReply(**self._identity(message), checksums=checksums)

    def save_sharded_state(self, message: lc.SaveShardedState) -> lc.SaveShardedStateReply:
        """Write this rank's weights next to the set of that name, which stays in use.

        Raises: see Saver.write; StateError while the weights are not complete.
        """
        request = SaveRequest(
            message.save.hex(), message.name, message.pattern, message.max_size_bytes
        )
        report = self._save(message, request)
        return lc.SaveShardedStateReply(**self._identity(message), **asdict(report))

    def save_tensorized_model(self, message: lc.SaveTensorizedModel) -> lc.SaveTensorizedModelReply:
        """Write this rank's weights through the tensorizer library, in one file.

        Raises: see Saver.write and tensorizer_files.
        """
        files = tensorizer_files("name", message.name)
        request = SaveRequest(
            message.save.hex(), message.name, TENSORIZER_PATTERN, sys.maxsize, files
        )
        report = self._save(message, request)
        return lc.SaveTensorizedModelReply(
            **self._identity(message), size_bytes=report.size_bytes, seconds=report.seconds
        )

    def _save(self, message: StepMessage, request: SaveRequest) -> SaveReport:
        model = self._model
        model.weights.require_whole(type(message).__name__)
        report = self._saver.write(
            request,
            rank_weights(model, self._device.opened.place),
            lambda: self._set_phase("SAVING", LONG_OPERATION_S),
        )
        _LOG.info("saved %.3f GB in %.1f s", report.size_bytes / 1e9, report.seconds)
        return report

    def finish_sharded_state(self, message: lc.FinishShardedState) -> Done:
        """Put the files of save_sharded_state in place, or remove them.

        Raises: see Saver.finish.
        """
        self._saver.finish(message.save.hex(), keep=message.keep)
        return Done(**self._identity(message))

    # Sleep. A failure is typed and changes nothing.

    def sleep(self, message: lc.Sleep) -> lc.MemoryTagsReply:
        """Unmap the memory of weights and KV cache, and drop all requests. Raises: see
        TaggedMemory.sleep."""
        return self._change_memory(message, lambda model: model.sleep(message.level))

    def wake_up(self, message: lc.WakeUp) -> lc.MemoryTagsReply:
        """Map memory for tags again. Raises: see TaggedMemory.wake_up."""
        return self._change_memory(message, lambda model: model.memory.wake_up(message.tags))

    def discard(self, message: lc.Discard) -> lc.MemoryTagsReply:
        """Unmap the memory of tags; its content is lost. Raises: see TaggedMemory.discard."""
        return self._change_memory(message, lambda model: model.discard(message.tags))

    def _change_memory(
        self, message: lc.Sleep | lc.WakeUp | lc.Discard, change: Callable[[LoadedModel], None]
    ) -> lc.MemoryTagsReply:
        began = time.monotonic()
        self._drop_move(f"the memory changes ({type(message).__name__})")
        model = self._model
        change(model)
        if model.memory.tags.kv_cache != "awake":
            self._forget_cache()
        if model.adapters is not None:
            model.adapters.slots.forget()  # their device memory was unmapped; the host has copies
        return lc.MemoryTagsReply(
            **self._identity(message),
            memory_tags=dict(model.memory.states),
            seconds=time.monotonic() - began,
        )

    # Weight updates.

    def init_weight_transfer_engine(
        self, message: wt.InitWeightTransferEngine
    ) -> wt.InitWeightTransferEngineReply:
        """Choose the source of updates; wait for the trainer, if there is one.

        Raises: see WeightTransfer.init_engine.
        """
        rank = self._transfer.init_engine(
            message.engine, message.timeout_ms / 1000, self._device.opened.place
        )
        return wt.InitWeightTransferEngineReply(**self._identity(message), transfer_rank=rank)

    def start_weight_update(self, message: wt.StartWeightUpdate) -> Done:
        """Open an update: no step runs until it is finished, unless it is the draft model's, whose
        drafts change no token, or an adapter's, which is changed as a whole then.

        Raises: see WeightTransfer.start, and
            ConfigError: rows are to be recomputed, and layers keep a state per request.
        """
        self._check_recomputes(message.running)
        if message.target == "model":
            self._drop_move("a weight update has begun")
        self._transfer.start(message, self._model, self._device.opened.place, self._roots)
        if message.target == "model":
            self._leave_weights(message.running)
        return Done(**self._identity(message))

    def update_weights(self, message: wt.UpdateWeights) -> wt.UpdateWeightsReply:
        """Receive some tensors, in place.

        Raises: see WeightTransfer.update.
        """
        report = self._transfer.update(message)
        return wt.UpdateWeightsReply(**self._identity(message), **asdict(report))

    def finish_weight_update(self, message: wt.FinishWeightUpdate) -> wt.FinishWeightUpdateReply:
        """Close the update.

        Raises: see WeightTransfer.finish.
        """
        before, draft = self._model.weights.version, self._model.draft_weights
        draft_before = None if draft is None else draft.version
        version = self._transfer.finish()
        if self._model.weights.version != before:  # it may have been another target's
            self._weights_changed(before)
        if draft is not None and draft.version != draft_before:
            self._draft_weights_changed()
        if self._device.opened.place.device.type == "cuda":
            torch.cuda.empty_cache()  # frees the buffers for other processes
        return wt.FinishWeightUpdateReply(**self._identity(message), version=version)

    def reload_weights(self, message: wt.ReloadWeights) -> wt.ReloadWeightsReply:
        """Read the weights again, in place; an open update is dropped.

        Raises: see WeightState.next_version and loading.reload, and
            ConfigError: rows are to be kept, whose KV needs the scales that it was written with; or
                to be recomputed, and layers keep a state per request.
        """
        began = time.monotonic()
        before = self._model.weights.version
        version = self._model.weights.next_version(message.version)
        if message.running == "keep" and self._model.cache_dtype is FP8:
            problem = "a reload reads the scales of the KV cache in FP8 again"
            fix = "recompute, drop, or a weight update"
            raise config_error("running", message.running, problem, fix)
        self._check_recomputes(message.running)
        self._drop_move("the weights are reloaded")
        self._leave_weights(message.running)
        self._set_phase("LOADING", LONG_OPERATION_S)
        config = self._model.next_load
        if message.model:
            config = apply_overrides(config, {"model.model": message.model})
        place = self._device.opened.place
        model, size_bytes = reload(
            self._model, config, version, place, self._roots, self._set_phase
        )
        self._transfer.drop_update()
        self._model_or_none = model
        self._weights_changed(before)
        if model.draft_weights is not None:
            self._draft_weights_changed()
        return wt.ReloadWeightsReply(
            **self._identity(message),
            size_bytes=size_bytes,
            seconds=time.monotonic() - began,
            version=version,
        )

    def _leave_weights(self, running: wt.RunningRows) -> None:
        """Drop all requests or none, and what is known of the blocks' contents: they belong to
        weights that are about to be replaced."""
        if running == "drop":
            self._forget_cache()
            self._forget_contents()
            return
        self._forget_contents()
        if running == "recompute" and self._serving_or_none is not None:
            self._serving_or_none.runner.await_recompute()

    def _check_recomputes(self, running: wt.RunningRows) -> None:
        if running == "recompute" and self._model.resolved.decoder.keeps_state:
            problem = "layers of the model keep a state per request, which cannot be recomputed"
            raise config_error("running", running, problem, "keep or drop")

    def recompute_requests(self, message: wt.RecomputeRequests) -> wt.RecomputeRequestsReply:
        """Compute KV of rows again, with the present weights. Raises: see
        ModelRunner.recompute_requests, and StateError while the weights are not complete, and
        ConfigError as start_weight_update does."""
        began = time.monotonic()
        self._check_recomputes("recompute")
        self._model.weights.require_whole("RecomputeRequests")
        step_deadline_s = self._model.config.scheduler.step_deadline_ms / 1000

        def begin(num_passes: int) -> None:
            self._set_phase("RECOMPUTING", step_deadline_s * max(1, num_passes))

        num_tokens, num_passes = self._serving.runner.recompute_requests(message, begin)
        self._device.opened.synchronize()
        return wt.RecomputeRequestsReply(
            **self._identity(message),
            num_tokens=num_tokens,
            num_passes=num_passes,
            seconds=time.monotonic() - began,
        )

    def _weights_changed(self, before: int) -> None:
        """Tell the runner that the rows go on with other weights than those of version `before`."""
        if self._serving_or_none is not None:
            self._serving_or_none.runner.weights_changed(before)

    def _draft_weights_changed(self) -> None:
        """Tell the runner that the draft model has other weights than those of its KV cache."""
        if self._serving_or_none is not None:
            self._serving_or_none.runner.inputs.distrust_drafter()

    def _forget_cache(self) -> None:
        """Drop all requests, and what is known of the blocks' contents: they are lost. Those in
        host memory stay."""
        if self._serving_or_none is not None:
            self._serving_or_none.runner.forget_requests()
            self._serving_or_none.runner.state.contents.forget()

    def update_config(self, message: wt.UpdateConfig) -> Done:
        """Change what the next reload_weights reads.

        Raises: see apply_overrides.
        """
        model = self._model
        changed = apply_overrides(model.next_load, message.overrides)
        self._model_or_none = replace(model, next_load=changed)
        return Done(**self._identity(message))

    # Placement of experts.

    def move_experts(self, message: ep.MoveExperts) -> ep.MoveExpertsReply:
        """Begin to receive weights for another placement of a layer's experts. Raises: see
        ExpertMover.begin."""
        begun = self._expert_mover.begin(message)
        return ep.MoveExpertsReply(**self._identity(message), **begun._asdict())

    def switch_experts(self, message: ep.SwitchExperts) -> Done:
        """Use these weights from the next step on. Raises: see ExpertMover.switch."""
        self._expert_mover.switch(message.placement)
        return Done(**self._identity(message))

    def listen_to_moves(self, on_end: OnMoveEnd) -> None:
        """Tell the ends of moves to this function from the next load on."""
        self._on_move_end = on_end

    def _drop_move(self, cause: str) -> None:
        """End a move of experts: it would touch the device beside the step thread."""
        if self._expert_mover_or_none is not None:
            self._expert_mover_or_none.drop(cause)

    def _drop_unfinished_move(self, cause: str) -> None:
        """Like _drop_move, but keep weights that have come: another rank may have switched."""
        if self._expert_mover_or_none is not None:
            self._expert_mover_or_none.drop_unfinished(cause)

    # LoRA adapters.

    def prepare_lora(self, message: lora.PrepareLora) -> lora.PrepareLoraReply:
        """Start to read an adapter; report whether it has been read. Raises: see
        AdapterReader.prepare."""
        identity = self._model.require_adapters().reader.prepare(message.name, message.version)
        read = None if identity is None else on_wire(identity)
        return lora.PrepareLoraReply(**self._identity(message), identity=read)

    def add_lora(self, message: lora.AddLora) -> lora.AddLoraReply:
        """Put an adapter into host memory. Raises: see Adapters.add."""
        adapters = self._model.require_adapters()
        self._set_phase("LOADING ADAPTER", LONG_OPERATION_S)
        added = adapters.add(
            message.name, message.lora_id, message.version, load_inplace=message.load_inplace
        )
        if message.load_inplace:
            self._forget_contents()
        return lora.AddLoraReply(
            **self._identity(message),
            version=added.version,
            identity=on_wire(added.identity),
            evicted=added.evicted,
            files_changed=added.files_changed,
            weights_version=added.weights_version,
        )

    def remove_lora(self, message: lora.RemoveLora) -> lora.RemoveLoraReply:
        """Remove an adapter from host memory."""
        removed = self._model.require_adapters().store.remove(message.lora_id)
        if removed:
            self._forget_contents()
        return lora.RemoveLoraReply(**self._identity(message), removed=removed)

    def _forget_contents(self) -> None:
        """Forget what blocks contain, in host memory too: hashes may name weights, or an adapter,
        that change."""
        if self._serving_or_none is not None:
            self._serving_or_none.runner.state.contents.forget()
            self._serving_or_none.runner.state.host_contents.forget()

    def list_loras(self, message: lora.ListLoras) -> lora.ListLorasReply:
        """List the adapters in host memory; none for a model without adapters."""
        adapters = self._model.adapters
        there = () if adapters is None else adapters.store.adapters()
        infos = (
            lora.LoraInfo(
                name=each.name,
                lora_id=each.lora_id,
                version=each.version,
                rank=each.rank,
                is_pinned=each.is_pinned,
                size_bytes=each.weights.nbytes,
                identity=on_wire(each.identity),
                weights_version=each.weights_version,
            )
            for each in there
        )
        return lora.ListLorasReply(**self._identity(message), adapters=tuple(infos))

    def pin_lora(self, message: lora.PinLora) -> Done:
        """Never evict an adapter. Raises: see HostStore.pin."""
        self._model.require_adapters().store.pin(message.lora_id)
        return Done(**self._identity(message))

    # Profiles.

    def profile(self, message: lc.Profile) -> lc.ProfileReply:
        """Start or stop a profile. The device's earlier work is finished first.

        Raises: see Profiler.start and Profiler.stop.
        """
        opened = self._device.opened
        opened.synchronize()
        if message.action == "start":
            request = ProfileRequest(message.kind, message.prefix)
            self._profiler.start(request, opened.place.device, opened.place.parallel)
            return lc.ProfileReply(**self._identity(message), file="")
        self._set_phase("WRITING TRACE", LONG_OPERATION_S)
        written = self._profiler.stop(message.kind)
        return lc.ProfileReply(**self._identity(message), file=str(written or ""))

    def start_trace(self) -> None:
        """Record the steps to come for an observer.

        Raises:
            StateError: there is no device yet, or see Profiler.start_observed.
        """
        opened = self._device.opened_or_none
        if opened is None:
            raise StateError("no trace can run in CREATED", fix="trace a group that is initialized")
        opened.synchronize()
        self._profiler.start_observed(opened.place.device, opened.place.parallel)

    def stop_trace(self, *, keep: bool) -> PlainTrace | None:
        """Stop the observer's trace. Raises: see Profiler.stop_observed."""
        return self._profiler.stop_observed(keep=keep)

    def read_expert_loads(self) -> Callable[[], bool]:
        """Start to read the expert loads for the description. Returns the function that
        ExpertLoads.start_reading returns; without a model, one that returns True at once."""
        model = self._model_or_none
        return (lambda: True) if model is None else model.stage.expert_loads.start_reading()

    # Attach, relink, reset.

    def on_attach(self, *, keep_requests: bool = False) -> bool:
        """Drop all requests unless they are to be kept, and the former driver's profile. Return
        True if no step was cut off; only the group's seqs show whether every send was received."""
        if self._serving_or_none is not None:
            self._serving_or_none.runner.end_epoch()  # whatever fails below
        self._profiler.abandon()
        self._drop_unfinished_move("its driver was replaced")
        self._transfer.abandon("its driver was replaced")
        self._kv_outside.leave_peers()
        if self._model_or_none is not None and self._model_or_none.adapters is not None:
            self._model_or_none.adapters.reader.drop_all()
        if self._serving_or_none is None:
            return True
        clean = not self._serving_or_none.runner.state.has_failed
        if not keep_requests:
            self._serving_or_none.runner.forget_requests()
        return clean

    def adopt_requests(self, message: AdoptRequests) -> AdoptRequestsReply:
        """Return a page of the requests and their progress: see ModelRunner.adopt_requests."""
        page = self._serving.runner.adopt_requests(message.first_slot)
        return AdoptRequestsReply(
            **self._identity(message),
            rows=page.rows,
            next_slot=page.next_slot,
            token_ids=page.token_ids,
            block_ids=page.block_ids,
        )

    def relink(self, message: lc.Relink) -> Done:
        """Leave the link, and open a new one. Weights, KV cache and rows stay.

        Raises:
            ConfigError: it is a link of another replica.
            CommError: the other ranks did not connect. This rank then has no link; another relink
                may follow.
        """
        self._device.opened.place.parallel.check_link(message.rendezvous.link)
        self._drop_unfinished_move("the ranks link anew")
        serving = self._serving_or_none
        if serving is not None:
            serving.runner.before_relink(message.epoch)
            serving.before_relink()
        self._profiler.link_left(self._device.leave_link())
        with self._kv_outside.meeting:
            link = self._device.relink(message.rendezvous)
        self._kv_outside.stop_pinning()
        if serving is not None:
            serving.rebind_stage(link, restore_graphs=not message.warm_up_follows)
        if not message.warm_up_follows:
            self._kv_outside.pin_ahead()
        return Done(**self._identity(message))

    def reset(self, message: lc.Reset) -> Done:
        """Drop the KV cache, then the model, then the device, as far down as asked; then end a
        profile."""
        if self._serving_or_none is not None and message.to != "CREATED":
            with suppress(CommError):  # a lost neighbor no longer needs the messages
                self._serving_or_none.runner.settle()
        self._drop_move("the group is reset")
        self._kv_outside.close_plan()
        self._serving_or_none = None
        self._transfer.interrupt("the group was reset")
        opened = self._device.opened_or_none
        if opened is not None:
            opened.ledger.forget("graphs", "kv_cache")
            if message.to != "MODEL_LOADED":
                opened.ledger.forget("weights")
        model = self._model_or_none
        if message.to == "MODEL_LOADED":
            self._model.attend(is_real=False)
            self._model.memory.drop_kv_cache()
        else:
            self._model_or_none = self._expert_mover_or_none = None
            self._transfer.close_engine()
        reply = Done(**self._identity(message))
        if message.to == "CREATED" and opened is not None:
            self._profiler.link_left(self._device.give_up())
        if model is not None and message.to != "MODEL_LOADED":
            model.memory.close()
        del model
        self._frozen_start.collect(has_model=self._model_or_none is not None)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if self._profiler.is_recording:
            self._set_phase("WRITING TRACE", LONG_OPERATION_S)
        self._profiler.end()
        return reply

    def _settle_transfers(self) -> None:
        if self._serving_or_none is not None:
            self._serving_or_none.drain_transfers_if_healthy()

    def abort_link(self, *, frees_peers: bool) -> bool:
        """Abort waits for other ranks; see Link.abort. A wait for a trainer is ended without the
        link. Called by the guard thread."""
        if self._transfer.abort():
            return False
        return self._device.abort(frees_peers=frees_peers)

    def dump_link(self) -> bytes:
        """Return the communicators' last operations, as JSON; empty if they are not recorded.
        Called by the guard thread."""
        return self._device.dump()

    def check_device(self) -> str:
        """Return the device's present problem; empty if none. Called by the guard thread."""
        return self._device.check()

    def typed_error(self, error: Exception) -> Exception:
        """Return the typed error of a failed operation: OutOfMemoryError, after freeing the
        operation's memory, DeviceError, or the error itself."""
        typed = typed_device_error(error, "smaller settings, or free memory and try again")
        if failure_kind(error) is FailureKind.OUT_OF_MEMORY:
            drop_scratch(error)
        if typed is not error:
            typed.__cause__ = error
        return typed.with_traceback(error.__traceback__)

    def step_error(self, error: Exception) -> Exception:
        """Return the typed error of an unexpected failure in a step. Other ranks of the step wait
        for this one, so it breaks the link."""
        opened = self._device.opened_or_none
        if opened is None:
            return error
        if opened.place.parallel.world_size == 1 and not self._shares_experts:
            return error
        broken = CommError(f"rank {self.rank} failed in a step of several ranks: {error}")
        broken.__cause__ = error
        return broken.with_traceback(error.__traceback__)

    def close(self) -> None:
        """Leave the link, after settling transfers if the peers respond; process exit frees the
        rest."""
        self._profiler.end()
        self._drop_move("the daemon ends")
        self._transfer.close_engine()
        self._kv_outside.close()
        # Graphs first: NCCL releases a communicator only once no graph holds its kernels.
        self._serving_or_none = None
        if self._model_or_none is not None:
            self._model_or_none.memory.stop()
        self._device.close()

    def describe(self) -> WorkerDescription:
        """Describe the loaded objects on the device, and the memory by use."""
        peers = self._kv_outside.peers
        return describe(self._device, self._model_or_none, self._serving_or_none, peers)

    # Parts.

    @property
    def _model(self) -> LoadedModel:
        assert self._model_or_none is not None, "legal after load_model only"
        return self._model_or_none

    @property
    def _expert_mover(self) -> ExpertMover:
        assert self._expert_mover_or_none is not None, "legal after load_model only"
        return self._expert_mover_or_none

    @property
    def _shares_experts(self) -> bool:
        """True if ranks of other replicas have some of the model's experts."""
        opened, model = self._device.opened_or_none, self._model_or_none
        if opened is None or model is None:
            return False
        return opened.place.sharing_experts(model.resolved.decoder) is not None

    @property
    def _serving(self) -> Serving:
        assert self._serving_or_none is not None, "legal after initialize_from_config only"
        return self._serving_or_none

    def _serve(self, plan: KVCacheConfig, kv: KVMemory) -> None:
        opened, model = self._device.opened, self._model
        connecting = self._kv_outside.connecting(plan, model, opened.place)
        self._serving_or_none = Serving(
            opened, model, plan, kv, self._set_phase, self._find_upload, connecting
        )

    def _identity(self, message: StepMessage) -> dict[str, int]:
        return {"epoch": message.epoch, "seq": message.seq, "rank": self.rank}


def _ignore(end: MoveEnd) -> None:
    return None

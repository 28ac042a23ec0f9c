"""The runner over its KV cache, and its graphs. Made by initialize_from_config and, with a small
cache, by the memory profile (worker/memory_profile.py)."""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from rpc_schema.errors import CapacityError, CommError
from rpc_schema.kv_cache import KVCacheConfig, groups_of
from rpc_schema.operations import StepMessage
from worker_daemon.contracts.uploads import FindUpload, no_uploads
from worker_daemon.device.init import device_name
from worker_daemon.distributed.link import Link
from worker_daemon.drafting.interface import Drafter, MakeDrafter
from worker_daemon.drafting.model import ModelDrafter
from worker_daemon.drafting.registry import make_drafter
from worker_daemon.drafting.row_texts import DraftLimits, RowTexts
from worker_daemon.kernel_compiler import KernelCompiler, hash_sources
from worker_daemon.phases import LONG_OPERATION_S, SetPhase
from worker_daemon.raising import Translation
from worker_daemon.runner.assemble import RunnerParts, assemble_runner, step_graphs, tie_stage
from worker_daemon.runner.connectors.kv_connectors import KVConnectors
from worker_daemon.runner.cuda_graph import StepGraphs
from worker_daemon.runner.kv_cache import BlockPages, KVMemory
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.routed_experts import StageRouting
from worker_daemon.runner.rows_drafts import RowsDrafts, read_deferred, read_drafts
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.runner.stage_program import EagerProgram
from worker_daemon.runner.token_history import TokenHistory
from worker_daemon.runner.warmup import (
    SyntheticStep,
    decode_lengths,
    decode_sweep,
    largest_step,
    longest_step,
    proposal_lengths,
    size_lengths,
    size_sweep,
    warm_up_lengths,
    warm_up_steps,
)
from worker_daemon.worker.draft_model import draft_layers
from worker_daemon.worker.loading import LoadedModel, stage_layers
from worker_daemon.worker.rank_device import OpenedDevice
from worker_daemon.worker.resolve import pooling_support
from worker_host.draft_counts import DraftCounts

OpenConnectors: TypeAlias = Callable[[BlockPages, RequestState, TokenHistory], KVConnectors]
"""Opens the KV connectors over the blocks of a KV cache."""


class Serving:
    """Owned by the worker and used on the step thread; freed by reset, with its device memory."""

    def __init__(
        self,
        opened: OpenedDevice,
        model: LoadedModel,
        plan: KVCacheConfig,
        kv: KVMemory,
        set_phase: SetPhase,
        find_upload: FindUpload = no_uploads,
        open_connectors: OpenConnectors | None = None,
    ) -> None:
        """Starts with empty rows and without graphs. kv: of plan.num_blocks, or none for
        NullAttention. open_connectors: None: blocks stay in the KV cache."""
        self.plan = plan
        self.kv = kv
        self._set_phase = set_phase
        self._enforce_eager = model.config.graph.enforce_eager
        limits = _limits(model, plan)
        kernels = opened.place.backend.blocks
        self._parts = RunnerParts(
            parallel=opened.place.parallel,
            tp=opened.place.tp,
            stage=model.stage,
            weights=model.weights,
            hidden_size=model.resolved.decoder.hidden_size,
            layer_weights=model.resolved.decoder.layer_weights // opened.place.parallel.tp_size,
            dtype=model.resolved.dtype,
            device=opened.place.device,
            capture_stream=opened.capture_stream,
            sampling=opened.place.backend.sampling,
            rows=opened.place.backend.rows,
            open_staging=opened.place.backend.open_staging,
            adapters=model.adapters,
            processors=model.processors,
            find_upload=find_upload,
            make_drafter=_drafters(opened, model, limits, kv.further),
            routing=_routing(opened, model, kv.further),
            open_connectors=(
                None
                if open_connectors is None
                else partial(open_connectors, BlockPages(kv, kernels))
            ),
            experts=opened.place.sharing_experts(model.resolved.decoder),
        )
        self.runner = assemble_runner(self._parts, opened.link, limits, kv.layers)
        self._graphs = StepGraphs()
        self.is_warm = False
        """True after its first warm-up."""

    @property
    def num_graphs(self) -> int:
        """The number of graphs."""
        return self._graphs.count

    @property
    def draft_counts(self) -> DraftCounts:
        """The outcomes of drafts since the KV cache was made, for any thread; none but on the rank
        that answers steps."""
        return self._parts.draft_counts

    def find_drafts(self, step_seq: int | None) -> RowsDrafts | None:
        """Return the drafts made after the last step, or those of the rows that the step of a seq
        has deferred: see read_drafts and read_deferred. None without a drafter.

        Raises:
            PrecededByError: a step has failed, on this rank at least.
        """
        state = self.runner.state
        state.check_failure()
        if self.runner.inputs.drafter is None:
            return None
        if step_seq is not None:
            return read_deferred(state, self.runner.find_deferred(step_seq))
        return read_drafts(state, self.runner.inputs.tables.next_tokens)

    def warm_up(self, message: StepMessage) -> None:
        """Run synthetic steps through the normal entry, then clear the rows."""
        self._set_phase("COMPILING", LONG_OPERATION_S)
        runner = self.runner
        limits = runner.state.limits
        if self._parts.device.type == "cuda":  # on other devices there is nothing to compile
            with runner.using(runner.eager.compile_subset()):
                self._run_all(size_sweep(message, limits))
                if self._enforce_eager:
                    self._run_all(decode_sweep(message, limits))
        self._run_all(warm_up_steps(message, limits, runner.state.parts.heaviest))
        runner.forget_requests()
        torch.cuda.empty_cache()  # graphs cannot use memory cached for steps

    def capture_graphs(self) -> None:
        """Capture the graphs that steps replay, at the end of the first warm-up.

        Raises:
            CapacityError: they do not fit in addition to weights and KV cache.
        """
        graphs = self._step_graphs()
        with self._capturing(), self._parts.stage.expert_loads.unchanged():
            graphs.capture(self.runner)
        torch.cuda.empty_cache()  # from the steps before each capture; not part of the graphs
        self._graphs = graphs
        self.is_warm = True

    def warm_up_again(self, message: StepMessage) -> None:
        """Take part in a new rank's warm-up, which runs eagerly and unpadded: this rank must do
        the same, so that the messages between ranks agree. Keeps its graphs."""
        self._graphs.set_aside(self.runner)
        self.warm_up(message)
        self._restore_graphs()
        self.take_memory_of_steps(message)

    def take_memory_of_steps(self, message: StepMessage) -> None:
        """Make the allocator cache the memory of the largest step, after everything else is
        allocated. If smaller steps ran first, fragmentation would make the largest step need more
        memory."""
        if self._parts.device.type == "cuda":  # on other devices no allocator caches it
            self.run_largest_step(message)
            self.runner.forget_requests()

    def run_largest_step(self, message: StepMessage) -> None:
        """Run the largest possible step, and on a GPU the one that gathers the most keys. On a GPU
        they run through two layers of each kind: further layers would reuse the same memory."""
        runner, limits = self.runner, self.runner.state.limits
        steps = [largest_step(message, limits, runner.state.parts.heaviest)]
        program = runner.eager
        if self._parts.device.type == "cuda":
            steps.append(longest_step(message, limits))
            program = program.compile_subset()
        with runner.using(program):
            self._run_all(steps)
        runner.settle()

    def time_longest_step(self, message: StepMessage) -> float:
        """Return the CPU time of this thread in the longest step: on the CPU, its computation
        without waits for other ranks and processes."""
        began = time.thread_time()
        self._run_all([longest_step(message, self.runner.state.limits)])
        self.runner.settle()
        return time.thread_time() - began

    def compile_ahead(self, compiler: KernelCompiler) -> bool:
        """Compile the kernels that steps will launch, many at once. Nothing runs. Return True if
        all were compiled. Those of large steps are left out, and compiled in the profile, where
        torch's operations would run: the collectives of tensor-parallel stages, and the look-up of
        slots, by experts that no router has chosen."""
        # Imports Triton, which a CPU daemon does not need.
        from worker_daemon.kernels.compile_ahead import compiling_ahead

        with self._capturing(), compiling_ahead(compiler) as batch:
            subset, limits = self.runner.eager.compile_subset(), self.runner.state.limits
            stage = self._parts.stage
            if self._parts.parallel.tp_size == 1 and stage.expert_slots is None:
                # First, as kernels of large steps take the longest. The profile's cache of two
                # blocks does not limit them, since nothing runs.
                self._launch_layers(subset, replace(limits, num_blocks=limits.max_num_seqs + 1))
            subset.launch_sampling(limits.max_num_samples)
            self.runner.inputs.launch_drafting()
            self._step_graphs().launch(self.runner)
        return not batch.has_failed

    def _launch_layers(self, program: EagerProgram, limits: StepLimits) -> None:
        """Launch the layers of the steps that warm_up runs before there are graphs."""
        drafter = self.runner.inputs.drafter
        has_follower = drafter is not None and drafter.follower is not None
        steps = itertools.chain(
            size_lengths(limits),
            decode_lengths(limits) if self._enforce_eager else (),
            proposal_lengths(limits) if has_follower else (),
            warm_up_lengths(limits),
        )
        for lengths, counts in steps:
            hidden = torch.empty(
                (sum(counts), self._parts.hidden_size),
                dtype=self._parts.dtype,
                device=self._parts.device,
            )
            if self._parts.experts is not None:
                self._parts.experts.begin(hidden.shape[0], reaches_peers=False)
            program.launch_layers(hidden, np.array(counts, np.int32), np.array(lengths, np.int32))

    def estimate_graphs(self, used_bytes: Callable[[], int]) -> int:
        """Return an estimate of the graphs' bytes: see StepGraphs.estimate_bytes."""
        with self._capturing(), self._parts.stage.expert_loads.unchanged():
            return self._step_graphs().estimate_bytes(self.runner, used_bytes)

    def before_relink(self) -> None:
        """Drop the graphs that use the communicators, before a relink."""
        self._graphs.before_relink(self.runner)

    def rebind_stage(self, link: Link, *, restore_graphs: bool) -> None:
        """Use a new link. Graphs that were dropped are captured again now, or at the next
        warm-up."""
        runner = self.runner
        state, inputs = runner.state, runner.inputs
        runner.rebind_stage(
            tie_stage(self._parts, link, state, inputs, runner.waits, runner.history)
        )
        if restore_graphs:
            self._restore_graphs()

    def drain_transfers_if_healthy(self) -> None:
        """Wait for the transfers from and to the neighbors; after a failure the relink handles
        them."""
        if not self.runner.state.has_failed:
            with suppress(CommError):
                self.runner.settle()

    def _run_all(self, steps: Iterable[SyntheticStep]) -> None:
        """Run synthetic steps, and wait for each. Raises the steps' errors."""
        with self._parts.stage.expert_loads.unchanged(), self.runner.computing_nothing():
            for step in steps:
                reply = self.runner.execute_model(step.message, step.arrays)
                if reply is not None:
                    reply.result()

    def _step_graphs(self) -> StepGraphs:
        return step_graphs(self._parts, self.runner, enforce_eager=self._enforce_eager)

    def _restore_graphs(self) -> None:
        with self._capturing(), self._parts.stage.expert_loads.unchanged():
            self._graphs.restore(self.runner)

    def _capturing(self) -> Translation:
        self._set_phase("CAPTURING", LONG_OPERATION_S)
        return Translation((torch.OutOfMemoryError, torch.AcceleratorError), _too_large_graphs)


def describe_steps(opened: OpenedDevice, model: LoadedModel) -> str:
    """Return a text that differs if the kernels of a model's steps may differ: it has the model,
    its configuration, the rank, the device, the versions of torch and Triton, and the sources of
    this package with its measured tiles."""
    # Imports Triton, which a CPU daemon does not need.
    from worker_daemon.kernels.triton_hash import hash_triton

    place = opened.place
    return repr(
        (
            model.resolved.decoder,
            model.config,
            model.max_model_len,
            model.attention.name,
            model.draft and (model.draft.resolved.decoder, model.draft.attention.name),
            (place.parallel, model.stage.ops_name, device_name(place.device)),
            (torch.__version__, hash_triton(), hash_sources()),
        )
    )


def _too_large_graphs(error: Exception) -> CapacityError | None:
    # The GPU driver allocates memory for graphs outside of torch's allocator.
    if "out of memory" not in str(error):
        return None
    fix = "a smaller kv_cache_memory_bytes or max_num_seqs, or enforce_eager"
    return CapacityError(f"the graphs do not fit: {error}", fix=fix)


def _routing(
    opened: OpenedDevice, model: LoadedModel, further: Sequence[Tensor]
) -> StageRouting | None:
    """Return what the stage keeps of tokens' experts. further: KVMemory.further."""
    shape, decoder = model.resolved.routed_experts, model.resolved.decoder
    if shape is None:
        return None
    layers = stage_layers(decoder, opened.place)
    has_experts = [each is not None for each in decoder.layer_experts]
    return StageRouting(
        shape,
        num_before=sum(has_experts[: layers.start]),
        num_here=sum(has_experts[layers.start : layers.stop]),
        pages=further[-1] if further and model.stage.is_last else None,
    )


def _drafters(
    opened: OpenedDevice, model: LoadedModel, limits: StepLimits, further: Sequence[Tensor]
) -> MakeDrafter:
    """Return what makes the last stage's drafter. further: KVMemory.further, which begins with the
    pages of a draft model's layers."""
    speculative, place = model.config.speculative, opened.place
    pages = further[: len(draft_layers(model.local_draft))]
    bounds = DraftLimits(
        limits.max_num_seqs, limits.max_model_len, speculative.num_speculative_tokens
    )

    def make(block_table: Tensor) -> Drafter | None:
        if not place.parallel.is_last_stage:
            return None
        if model.draft is not None:
            size = limits.block_groups[0].block_size
            texts = RowTexts(bounds, place.device, place.backend.texts)
            return ModelDrafter(model.draft.stage, pages, block_table, size, bounds, texts)
        return make_drafter(speculative, *bounds[:2], place.device, place.backend.texts)

    return make


def _limits(model: LoadedModel, plan: KVCacheConfig) -> StepLimits:
    scheduler = model.config.scheduler
    return StepLimits(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        vocab_size=model.resolved.decoder.vocab_size,
        block_size=model.config.cache.block_size,
        num_blocks=plan.num_blocks,
        groups=groups_of(plan),
        generates=model.resolved.decoder.generates,
        pooling=pooling_support(model.resolved.decoder),
        logits_processors=scheduler.logits_processors,
        hidden_size=model.resolved.decoder.hidden_size,
        keeps_state=model.resolved.decoder.keeps_state,
        checkpoint_blocks=plan.checkpoint_blocks,
        max_samples_per_seq=scheduler.max_samples_per_seq,
        max_drafts=model.config.speculative.num_speculative_tokens,
        makes_drafts=model.config.speculative.on_device,
        routed_experts=model.resolved.routed_experts,
        num_host_blocks=plan.num_host_blocks,
        has_kv_files=model.config.cache.kv_files,
    )

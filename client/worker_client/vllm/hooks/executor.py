"""vLLM's executor whose workers are daemons that outlive it."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import vllm
from huggingface_hub import snapshot_download
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    DraftTokenIds,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
)

from rpc_schema.errors import (
    WorkerDaemonError,
)
from rpc_schema.extensions import RequestExtension
from worker_client.errors import (
    config_error,
)
from worker_client.group.loading import group_limits
from worker_client.vllm.batches import RequestBatch
from worker_client.vllm.configuration import (
    check_keeps_state,
    check_loaded,
    draft_model,
    fits_max_model_len,
    parallel_config,
    pools,
    worker_config,
)
from worker_client.vllm.embedded_prompts import EmbeddedPrompts
from worker_client.vllm.grammar_masks import read_masks
from worker_client.vllm.hooks.connector import MovesOfStep
from worker_client.vllm.hooks.embedded_rows import rows_of
from worker_client.vllm.hooks.kv_cache import available_bytes, specs_of
from worker_client.vllm.hooks.platform import WorkerDaemonPlatform
from worker_client.vllm.hooks.scheduler import DaemonsOutput, WorkerDaemonScheduler
from worker_client.vllm.offloaded_blocks import OffloadedBlocks
from worker_client.vllm.operations import Operations
from worker_client.vllm.outputs import LogprobRows, OutputReader, ResultColumns
from worker_client.vllm.parent_watch import ParentWatch
from worker_client.vllm.prefix_notes import PrefixNotes, tag_of
from worker_client.vllm.refusals import leave_reason, unusable
from worker_client.vllm.requests import Requests, wire_id
from worker_client.vllm.settings import ENDPOINTS_VARIABLE, read_endpoints, settings_of
from worker_client.vllm.steps import StepWriter, split_by_outputs
from worker_client.vllm.weight_changes import WeightChanges
from worker_client.vllm.workers import LostStep, PendingStep, Workers
from worker_client.worker_group import WorkerGroup

_LAYOUT: Final = "LBNHC"
"""A name that vLLM wants for the KV cache's layout. The daemons have their own."""


class _VllmStep(NamedTuple):
    """A step of vLLM's whose outcome is pending."""

    batch: RequestBatch
    sent: list[PendingStep]


class _Output:
    """A step's output, waited for by the thread that calls result(), which owns the group. The
    engine core uses nothing else of a step's future, and one of threads would cost more than a
    step's translation."""

    __slots__ = ("_error", "_output", "_pending", "_wait")

    def __init__(
        self,
        wait: Callable[[_VllmStep], ModelRunnerOutput],
        pending: _VllmStep | None,
    ) -> None:
        """pending: waited for by `wait`; None: the output is None."""
        self._wait, self._pending = wait, pending
        self._output: ModelRunnerOutput | None = None
        self._error: Exception | None = None

    def result(self, timeout: float | None = None) -> ModelRunnerOutput | None:
        pending = self._pending
        if pending is not None:
            self._pending = None
            try:
                self._output = self._wait(pending)
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._output


class WorkerDaemonExecutor(Executor):  # type: ignore[misc]
    """Sends vLLM's steps to a group of daemons. All methods run on the thread that made it."""

    supports_pp = True

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Return True: steps are sent before the results of earlier ones are known."""
        return True

    # ------------------------------------------------------------------ start

    def _init_executor(self) -> None:
        try:
            self._start()
        except WorkerDaemonError as error:
            reason = unusable(error)
            leave_reason(reason)
            raise reason from error

    def _start(self) -> None:
        if not isinstance(current_platform, WorkerDaemonPlatform):
            fix = f"set {ENDPOINTS_VARIABLE} before vLLM is imported: its platform plugin reads it"
            problem = "vLLM runs on another platform, which would use this process's devices"
            raise config_error("platform", type(current_platform).__name__, problem, fix)
        config, settings = self.vllm_config, settings_of(self.vllm_config)
        endpoints = read_endpoints()
        if not endpoints:
            fix = "name the daemons in rank order: EP,EP,..."
            raise config_error(ENDPOINTS_VARIABLE, "", "there are no daemons", fix)
        parallel = parallel_config(config)
        group = WorkerGroup(endpoints, parallel, settings.keys(), lease=settings.lease)
        cache, draft = config.load_config.download_dir, draft_model(config)
        draft_directory = None if draft is None else local_directory(draft, cache)
        directory = local_directory(config.model_config, cache)
        ours = worker_config(config, settings, directory, draft_directory)
        num_blocks = config.cache_config.num_gpu_blocks_override
        fits = fits_max_model_len(config)
        self._workers = Workers(group, ours, settings, num_blocks, fits)
        self._parent = ParentWatch()
        try:
            self._model = self._workers.open()
            check_loaded(config, self._model.metadata)
            if self._model.keeps_state:
                check_keeps_state(config)
        except BaseException:
            group.close()
            raise
        config.model_config.max_model_len = self._model.max_model_len
        self._is_pooling = pools(config)
        changes = WeightChanges()
        self._workers.group.weights.on_version = changes.note
        self._tier = self._host_tier(ours.cache.kv_host_memory_bytes)
        self._operations = Operations(
            self._workers,
            self._model,
            self._flush,
            changes,
            self._forget_tier,
            pools=self._is_pooling,
        )
        limits = group_limits(ours, self._model)
        self._embeds = self._embedded_prompts()
        self._requests = Requests(
            limits.bounds, self._operations.ensure_lora, self._operations.why_closed, self._embeds
        )
        sizes = [each.block_size for each in self._model.groups]
        slots = lambda req_id: req_id in group.slots  # noqa: E731
        num_drafts = ours.speculative.num_speculative_tokens
        most_beyond = num_drafts * config.max_concurrent_batches + config.num_lookahead_tokens
        self._writer = StepWriter(self._requests, self._adapter_of, slots, sizes, most_beyond)
        self._reader = OutputReader(self._requests)
        self._num_words = -(-self._model.metadata.vocab_size // 32)
        self._unsampled: _VllmStep | None = None
        """The step for which vLLM calls sample_tokens next."""
        self._no_output = _Output(self._take, None)
        """Output of each execute_model that sample_tokens follows."""
        self._noted = self._prefix_notes()
        config.scheduler_config.scheduler_cls = partial(
            WorkerDaemonScheduler,
            translated=self._requests,
            noted=self._noted,
            weights=changes,
            tier=self._tier,
        )

    def _embedded_prompts(self) -> EmbeddedPrompts | None:
        model = self.vllm_config.model_config
        if not model.enable_prompt_embeds:
            return None
        return EmbeddedPrompts(self._workers, str(model.dtype), partial(rows_of, dtype=model.dtype))

    def _prefix_notes(self) -> PrefixNotes | None:
        """Return what keeps the prefix cache for the next server. None without one; with adapters,
        as vLLM hashes their names, which another server may give to others; and with KV events:
        they announce a block by its tokens, which no note has, so that a router would learn of
        restored blocks only as parents that it does not know."""
        cache, events = self.vllm_config.cache_config, self.vllm_config.kv_events_config
        is_announced = events is not None and events.enable_kv_cache_events
        has_adapters = self.vllm_config.lora_config is not None
        if not cache.enable_prefix_caching or has_adapters or is_announced:
            return None
        return PrefixNotes(self._workers.group, self._hash_tag())

    def _host_tier(self, memory_bytes: int) -> OffloadedBlocks | None:
        """Return the tier of the ranks' host memory, if they have some. With adapters, no server
        finds another one's blocks: see _prefix_notes."""
        if not memory_bytes:
            return None
        has_adapters = self.vllm_config.lora_config is not None
        tag = tag_of(self._hash_tag(), os.urandom(16) if has_adapters else b"")
        model = self._model
        return OffloadedBlocks(
            self._workers.group.prefixes,
            make_block_hash_with_group_id,
            model.groups,
            model.num_host_blocks,
            tag,
        )

    def _hash_tag(self) -> bytes:
        """Return the name of vLLM's way to hash blocks."""
        algorithm = self.vllm_config.cache_config.prefix_caching_hash_algo
        hashing = algorithm, os.environ.get("PYTHONHASHSEED")
        return tag_of("vllm", vllm.__version__, *hashing, self._model.groups)

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        """Return one layer for each KV group of the daemons."""
        return [specs_of(self._model)]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """Return a name that vLLM accepts."""
        return [[_LAYOUT]]

    def set_kv_cache_layout(self, layout_name: str, cp_kv_cache_interleave_size: int) -> None:
        """Ignore vLLM's choice: the daemons' cache is there already."""

    def determine_available_memory(self) -> list[int]:
        """Return the memory size from which vLLM computes the daemons' number of blocks."""
        return [available_bytes(self._model)]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """Check that vLLM has planned the KV cache that the daemons have."""
        (planned,) = kv_cache_configs
        there = self._model.num_blocks, len(self._model.groups)
        wanted = planned.num_blocks, len(planned.kv_cache_groups)
        if wanted != there:
            fix = "leave num_gpu_blocks_override out, or restart the daemons"
            problem = f"the daemons have (blocks, groups) {there}"
            raise config_error("kv_cache_config", wanted, problem, fix)

    def compile_or_warm_up_model(self) -> None:
        """Do nothing: the daemons are ready."""

    # ------------------------------------------------------------------ steps

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Send a step. The result is None, and sample_tokens follows, except for a step without
        tokens and for models that pool."""
        self._parent.check()
        finished = scheduler_output.finished_req_ids
        if finished:
            self._reader.forget([wire_id(each) for each in finished])
        if scheduler_output.total_num_scheduled_tokens == 0:
            self._writer.end_of(scheduler_output)
            self._drop_embeds()
            if self._noted is not None:
                self._noted.finish_round()
            return _at_once(EMPTY_MODEL_RUNNER_OUTPUT, non_block)
        steps = self._writer.write(scheduler_output)
        if self._is_pooling:
            steps = [part for step in steps for part in split_by_outputs(step, self._requests)]
        moves = scheduler_output.kv_connector_metadata
        if isinstance(moves, MovesOfStep) and moves.moves:
            # Before any of the parts: the first one may write to a block that is to be stored.
            steps[0].extensions = (*steps[0].extensions, *moves.moves)
        sent = [self._workers.send(step) for step in steps]
        newest = sent[-1].future
        if self._noted is not None and newest is not None:
            self._noted.proceed(newest)
        pending = _VllmStep(self._writer.batch, sent)
        if self._is_pooling:
            return self._output(pending, non_block)
        self._unsampled = pending
        return self._no_output if non_block else None

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """Sample the requests of the last step that wait for their masks, and return its result."""
        pending, self._unsampled = self._unsampled, None
        assert pending is not None, "vLLM calls it after each execute_model with tokens"
        named = read_masks(grammar_output, self._num_words)
        masks = {wire_id(req_id): own for req_id, own in named.items()}
        later = [part for each in pending.sent for part in self._workers.sample(each, masks)]
        if later:
            pending = _VllmStep(pending.batch, pending.sent + later)
        return self._output(pending, non_block)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the drafts that the step which waits for its masks has of requests with a grammar;
        None: there are none. vLLM asks between the result of the step before and sample_tokens, and
        makes the masks for these drafts. Nobody asks for those of other requests."""
        pending = self._unsampled
        assert pending is not None, "vLLM samples every other step at once"
        drafts: dict[str, list[int]] = {}
        for each in pending.sent:
            drafts |= self._workers.take_drafts(each)
        if not drafts:
            return None
        rows = zip(pending.batch.wire_ids, pending.batch.req_ids, strict=True)
        names = [req_id for own, req_id in rows if own in drafts]
        return DraftTokenIds(names, [drafts[wire_id(req_id)] for req_id in names])

    def _output(self, pending: _VllmStep, non_block: bool) -> Any:
        output = _Output(self._take, pending)
        return output if non_block else output.result()

    def _take(self, pending: _VllmStep) -> ModelRunnerOutput:
        """Wait for a step's result."""
        outcome = self._workers.outcome(pending.sent)
        self._drop_embeds()
        if not isinstance(outcome, LostStep):
            if self._noted is not None:
                self._noted.settle()
            output = _as_vllm(self._reader.read(pending.batch, outcome))
            output.invalid_blocks = frozenset(outcome.invalid_blocks)
            return output
        if not outcome.is_known:
            gone = self._workers.group.slots.req_ids
            self._writer.end(gone)
            self._reader.forget(gone)
            self._forget_notes()
        batch = pending.batch
        columns = ResultColumns(batch.listed, batch.row_of, [[] for _ in batch.listed])
        output = _as_vllm(columns)
        output.begins_again = not outcome.is_known
        return output

    def _flush(self) -> None:
        """End requests on the workers that vLLM has ended since the last step, before an operation
        that empties the KV cache."""
        self._forget_notes()
        step = self._writer.take_ended()
        if step is not None:
            self._workers.outcome([self._workers.send(step)])

    def _drop_embeds(self) -> None:
        if self._embeds is not None:
            self._embeds.drop_unused()

    def _forget_notes(self) -> None:
        if self._noted is not None:
            self._noted.forget()

    def _forget_tier(self) -> None:
        if self._tier is not None:
            self._tier.begin_anew()

    def _adapter_of(self, lora_id: int) -> RequestExtension:
        return self._workers.group.loras.known[lora_id].extension

    # ------------------------------------------------------------------ other operations

    def get_kv_connector_handshake_metadata(self) -> list[Any]:
        """Return none: the connector's other side is not vLLM's."""
        return []

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        """Run an operation by its name on all daemons.

        Raises:
            NotImplementedError: the daemons have no such operation, or `method` is code, which does
                not travel to them.
        """
        if not isinstance(method, str):
            raise NotImplementedError("code does not travel to worker daemons: name an operation")
        return _at_once(self._operations.run(method, *args, **(kwargs or {})), non_block)

    def check_health(self) -> None:
        """Raise RuntimeError if a daemon is not healthy."""
        for reply in self._workers.group.check_health():
            if not reply.healthy:
                raise RuntimeError(f"a worker daemon is not healthy: {reply}")

    def shutdown(self) -> None:
        """Give the daemons back. They keep model, KV cache and graphs for the next server."""
        if self._embeds is not None:
            self._embeds.close()
        self._workers.close()
        if isinstance(current_platform, WorkerDaemonPlatform):
            current_platform.end()


def local_directory(model: Any, cache: str | None) -> str:
    """Return the directory of a checkpoint: a path, or a repository's revision in a local cache of
    huggingface_hub. model: vLLM's configuration of it."""
    path = model.model
    if not Path(path).is_dir():
        path = snapshot_download(
            path, revision=model.revision, cache_dir=cache, local_files_only=True
        )
    return str(Path(path).resolve())


def _at_once(value: Any, non_block: bool) -> Any:
    if not non_block:
        return value
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _as_vllm(columns: ResultColumns) -> DaemonsOutput:
    """Return a result as vLLM's scheduler takes it."""
    if not columns.has_more:
        return DaemonsOutput(columns.req_ids, columns.row_of, columns.sampled)
    sampled, pooled = columns.logprobs, columns.pooled
    return DaemonsOutput(
        req_ids=columns.req_ids,
        req_id_to_index=columns.row_of,
        sampled_token_ids=columns.sampled,
        logprobs=None if sampled is None else LogprobsLists(*sampled, columns.first_rows),
        prompt_logprobs_dict={r: _tensors(rows) for r, rows in columns.prompt_logprobs.items()},
        pooler_output=None
        if pooled is None
        else [None if each is None else torch.from_numpy(each.copy()) for each in pooled],
        failed_req_ids=columns.failed,
    )


def _tensors(rows: LogprobRows) -> LogprobsTensors:
    return LogprobsTensors(*map(torch.from_numpy, rows))

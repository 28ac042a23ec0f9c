"""vLLM's scheduler for workers that outlive a lost step."""

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.logger import init_logger
from vllm.outputs import RequestError
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from rpc_schema.kv_cache import NULL_BLOCK
from worker_client.vllm.configuration import pools
from worker_client.vllm.offloaded_blocks import OffloadedBlocks
from worker_client.vllm.prefix_notes import PrefixNotes
from worker_client.vllm.requests import Requests
from worker_client.vllm.settings import LOGGER
from worker_client.vllm.weight_changes import WeightChanges, salt_kept

_LOG = init_logger(LOGGER)
_NOT_FINITE: Final = RequestError(
    code="internal_error",
    message="no token could be sampled for this request, or its output is not finite",
)


@dataclass
class DaemonsOutput(ModelRunnerOutput):  # type: ignore[misc]
    """A step's result, with what vLLM has no field for."""

    failed_req_ids: tuple[str, ...] = ()
    """Failed requests: they got no token, or their pooled output is not finite."""
    begins_again: bool = False
    """The step is lost: the workers have no rows, and no block keeps its contents."""
    invalid_blocks: frozenset[int] = frozenset()
    """Blocks that the step was to load and that did not match."""


class WorkerDaemonScheduler(AsyncScheduler):  # type: ignore[misc]
    """Schedules as vLLM does. A lost step preempts all running requests; a request that the daemons
    would refuse, or that gets no token, fails alone."""

    def __init__(
        self,
        *args: Any,
        translated: Requests,
        noted: PrefixNotes | None,
        weights: WeightChanges,
        tier: OffloadedBlocks | None,
        **kwargs: Any,
    ) -> None:
        """translated: the requests as the executor sends them. noted: what the daemons know of the
        prefix cache; None if it is not to be kept. tier: where evicted blocks go; None: nowhere."""
        self._weights = weights
        self._num_seen = weights.count
        """Changes of the weights that the prefix cache knows of."""
        super().__init__(*args, **kwargs)
        self._translated = translated
        self._noted = noted
        self._sharing: set[str] = set()
        """Requests that have begun with blocks which others had filled."""
        self._is_pooling = pools(self.vllm_config)
        groups = self.kv_cache_config.kv_cache_groups
        self._block_sizes = [group.kv_cache_spec.block_size for group in groups]
        if noted is not None:
            noted.restore(self.kv_cache_manager.block_pool)
        self._tier = tier
        if tier is not None:
            assert self.kv_cache_manager.block_pool.hash_block_size == tier.unit
            tier.read()
            self.connector.use(tier)
            # The daemons run steps in order, loads included: nothing writes to a block too late.
            self.defer_block_free = False

    @property
    def _pause_state(self) -> PauseState:
        """vLLM's own; requests are held as by its pause mode `keep` while an update is open."""
        return PauseState.PAUSED_ALL if self._weights.is_open else self._asked_pause

    @_pause_state.setter
    def _pause_state(self, state: PauseState) -> None:
        self._asked_pause = state

    def add_request(self, request: Request) -> None:
        """Take a request in."""
        self._translated.salt_hashes(request)
        super().add_request(request)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Return True if a waiting request may be scheduled; vLLM asks before it schedules one. A
        request that cannot be translated ends as one whose grammar does not compile; one whose
        embeddings are being uploaded waits, and others go first."""
        if request.request_id in self.grammar_compile_error_reqs:
            return False
        if not super()._handle_blocked_waiting_request(request):
            return False
        refusal = self._translated.find_refusal(request)
        if not refusal:
            return self._translated.is_ready(request.request_id)
        _LOG.info("request %s is refused: %s", request.request_id, refusal)
        error = RequestError(code="validation_error", message=refusal)
        self.grammar_compile_error_reqs[request.request_id] = error
        return False

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan a step."""
        if self._num_seen != self._weights.count:
            self._num_seen = self._weights.count
            self._leave_weights()
        self._translated.proceed()
        output = super().schedule(*args, **kwargs)
        self._sharing -= output.finished_req_ids
        for new in output.scheduled_new_reqs:
            if new.num_computed_tokens:
                self._sharing.add(new.req_id)
            else:
                self._sharing.discard(new.req_id)
        return output

    def _leave_weights(self) -> None:
        """Drop all cached prefixes, which are of earlier weights. Requests that have blocks go on
        with these, and share none of them from now on."""
        pool = self.kv_cache_manager.block_pool
        cached = {block.block_id for block in pool.blocks if block.block_hash is not None}
        self.kv_cache_manager.evict_blocks(cached)
        if self._tier is not None:
            self._tier.forget_all()
        for request in self.requests.values():
            if request.num_computed_tokens:
                salt_kept(request, self._weights.count)

    def update_from_output(
        self, scheduler_output: Any, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take a step's result in."""
        if isinstance(model_runner_output, DaemonsOutput):
            if model_runner_output.begins_again:
                self.reset_prefix_cache(reset_running_requests=True)
                if self._tier is not None:
                    self._tier.read()
            again = self._give_up(model_runner_output.invalid_blocks)
            self._fail(r for r in model_runner_output.failed_req_ids if r not in again)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        if self._is_pooling:
            _mark_failed(outputs)
        return outputs

    def _fail(self, req_ids: Iterable[str]) -> None:
        """End requests with this step; nobody may share the blocks that they wrote. For a
        request that began with others' blocks, the fault may be in those: it is computed again
        without them."""
        for req_id in req_ids:
            request = self.requests.get(req_id)
            if request is None:
                continue
            self._distrust(request)
            if request.num_stale_output_tokens:
                continue  # from before it was preempted: it is computed again anyway
            if req_id in self._sharing:
                self._begin_alone(request)
            else:
                self.grammar_compile_error_reqs[req_id] = _NOT_FINITE

    def _give_up(self, invalid: frozenset[int]) -> Collection[str]:
        """Compute the requests again that have one of these blocks, from there on; return their
        ids. vLLM's own way, to go on with fewer computed tokens, is none that workers with rows
        could follow, nor for several KV groups."""
        if self._tier is None or not invalid:
            return ()
        self._drop(invalid)
        again = []
        for request in [*self.running]:
            held = self.kv_cache_manager.get_block_ids(request.request_id)
            pairs = zip(self._block_sizes, held, strict=True)
            places = (i * size for size, own in pairs for i, b in enumerate(own) if b in invalid)
            first = min(places, default=None)
            if first is None:
                continue
            self._drop(self._blocks_from(first, request))
            self._tier.distrust(request.block_hashes, first)
            self._begin_again(request)
            again.append(request.request_id)
        return again

    def _distrust(self, request: Request) -> None:
        self._drop(self._blocks_from(0, request))
        if self._tier is not None:
            self._tier.distrust(request.block_hashes)

    def _blocks_from(self, first: int, request: Request) -> set[int]:
        """Return a request's blocks with tokens from `first` on."""
        held = self.kv_cache_manager.get_block_ids(request.request_id)
        pairs = zip(self._block_sizes, held, strict=True)
        return {b for size, own in pairs for b in own[first // size :]} - {NULL_BLOCK}

    def _drop(self, block_ids: Collection[int]) -> None:
        """Let nobody share these blocks, this server's requests or those of the next."""
        self.kv_cache_manager.evict_blocks(block_ids)
        if self._noted is not None:
            self._noted.distrust(block_ids)

    def _begin_alone(self, request: Request) -> None:
        """Restart a request, without blocks of others."""
        request.skip_reading_prefix_cache = True
        if request.status == RequestStatus.RUNNING:
            self._begin_again(request)

    def _begin_again(self, request: Request) -> None:
        """Restart a running request."""
        self.running.remove(request)
        self._preempt_request(request, time.monotonic(), drop_stale_output=True)

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Take a request's blocks. One that leaves the step which is being planned leaves blocks
        that vLLM has cached, and that nobody will fill."""
        unfilled = self._blocks_from(request.num_computed_tokens, request)
        self.kv_cache_manager.evict_blocks(unfilled)
        super()._preempt_request(request, *args, **kwargs)


def _mark_failed(outputs: Mapping[int, EngineCoreOutputs]) -> None:
    """Give failed requests that pool an output. A server reports their error instead; the LLM class
    reads no error of such a request, and expects an output."""
    for own in outputs.values():
        for each in own.outputs:
            if each.error is not None:
                each.pooling_output = torch.full((1,), torch.nan)

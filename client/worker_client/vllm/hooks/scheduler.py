"""vLLM's scheduler for workers that outlive a lost step."""

import time
from collections.abc import Iterable, Mapping
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


class WorkerDaemonScheduler(AsyncScheduler):  # type: ignore[misc]
    """Schedules as vLLM does. A lost step preempts all running requests; a request that the daemons
    would refuse, or that gets no token, fails alone."""

    def __init__(
        self,
        *args: Any,
        translated: Requests,
        noted: PrefixNotes | None,
        weights: WeightChanges,
        **kwargs: Any,
    ) -> None:
        """translated: the requests as the executor sends them. noted: what the daemons know of the
        prefix cache; None if it is not to be kept."""
        self._weights = weights
        self._num_seen = weights.count
        """Changes of the weights that the prefix cache knows of."""
        super().__init__(*args, **kwargs)
        self._translated = translated
        self._noted = noted
        self._sharing: set[str] = set()
        """Requests that have begun with blocks which others had filled."""
        self._is_pooling = pools(self.vllm_config)
        if noted is not None:
            noted.restore(self.kv_cache_manager.block_pool)

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
            self._fail(model_runner_output.failed_req_ids)
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
            self._distrust(req_id)
            if request.num_stale_output_tokens:
                continue  # from before it was preempted: it is computed again anyway
            if req_id in self._sharing:
                self._begin_alone(request)
            else:
                self.grammar_compile_error_reqs[req_id] = _NOT_FINITE

    def _distrust(self, req_id: str) -> None:
        by_group = self.kv_cache_manager.get_block_ids(req_id)
        held = {block_id for own in by_group for block_id in own} - {NULL_BLOCK}
        self.kv_cache_manager.evict_blocks(held)
        if self._noted is not None:
            self._noted.distrust(held)

    def _begin_alone(self, request: Request) -> None:
        """Restart a request, without blocks of others."""
        request.skip_reading_prefix_cache = True
        if request.status == RequestStatus.RUNNING:
            self.running.remove(request)
            self._preempt_request(request, time.monotonic(), drop_stale_output=True)


def _mark_failed(outputs: Mapping[int, EngineCoreOutputs]) -> None:
    """Give failed requests that pool an output. A server reports their error instead; the LLM class
    reads no error of such a request, and expects an output."""
    for own in outputs.values():
        for each in own.outputs:
            if each.error is not None:
                each.pooling_output = torch.full((1,), torch.nan)

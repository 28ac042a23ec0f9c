"""vLLM's scheduler for workers that outlive a lost step."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.logger import init_logger
from vllm.outputs import RequestError
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from rpc_schema.kv_cache import NULL_BLOCK
from worker_client.vllm.configuration import pools
from worker_client.vllm.prefix_notes import PrefixNotes
from worker_client.vllm.requests import Requests
from worker_client.vllm.settings import LOGGER

_LOG = init_logger(LOGGER)
_NOT_FINITE: Final = RequestError(
    code="internal_error", message="the model's output for this request is not finite"
)


@dataclass
class DaemonsOutput(ModelRunnerOutput):  # type: ignore[misc]
    """A step's result, with what vLLM has no field for."""

    failed_req_ids: tuple[str, ...] = ()
    """Requests whose logits were no numbers."""
    begins_again: bool = False
    """The step is lost: the workers have no rows, and no block keeps its contents."""


class WorkerDaemonScheduler(AsyncScheduler):  # type: ignore[misc]
    """Schedules as vLLM does. A lost step preempts all running requests; a request that the daemons
    would refuse, or whose logits are no numbers, fails alone."""

    def __init__(
        self, *args: Any, translated: Requests, noted: PrefixNotes | None, **kwargs: Any
    ) -> None:
        """translated: the requests as the executor sends them. noted: what the daemons know of the
        prefix cache; None if it is not to be kept."""
        super().__init__(*args, **kwargs)
        self._translated = translated
        self._noted = noted
        self._is_pooling = pools(self.vllm_config)
        if noted is not None:
            noted.restore(self.kv_cache_manager.block_pool)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Return True if a waiting request may be scheduled; vLLM asks before it schedules one. A
        request that cannot be translated ends as one whose grammar does not compile."""
        if request.request_id in self.grammar_compile_error_reqs:
            return False
        if not super()._handle_blocked_waiting_request(request):
            return False
        refusal = self._translated.find_refusal(request)
        if not refusal:
            return True
        _LOG.info("request %s is refused: %s", request.request_id, refusal)
        error = RequestError(code="validation_error", message=refusal)
        self.grammar_compile_error_reqs[request.request_id] = error
        return False

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
        """End requests with this step; nobody may share the blocks that they wrote."""
        for req_id in req_ids:
            if req_id in self.requests:
                by_group = self.kv_cache_manager.get_block_ids(req_id)
                held = {block_id for own in by_group for block_id in own}
                self.kv_cache_manager.evict_blocks(held - {NULL_BLOCK})
                if self._noted is not None:
                    self._noted.distrust(held - {NULL_BLOCK})
                self.grammar_compile_error_reqs[req_id] = _NOT_FINITE


def _mark_failed(outputs: Mapping[int, EngineCoreOutputs]) -> None:
    """Give failed requests that pool an output. A server reports their error instead; the LLM class
    reads no error of such a request, and expects an output."""
    for own in outputs.values():
        for each in own.outputs:
            if each.error is not None:
                each.pooling_output = torch.full((1,), torch.nan)

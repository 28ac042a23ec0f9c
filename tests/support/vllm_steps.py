"""vLLM's steps as StepWriter translates them for a real SlotTable: which requests share a
step."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

from rpc_schema.kv_cache import BlockGroup
from worker_client.steps.slots import SlotTable
from worker_client.steps.step_checks import GroupLimits
from worker_client.vllm.requests import KnownRequest
from worker_client.vllm.steps import StepWriter

NONE_RUNNING = ((), (), ())
NO_DRAFTS: Mapping[str, Sequence[int]] = MappingProxyType({})


class PlannedSteps:
    """A writer before a table of slots, as one scheduler uses them."""

    def __init__(self, block_size: int, num_slots: int = 32) -> None:
        limits = GroupLimits(
            num_blocks=256,
            block_size=block_size,
            groups=(BlockGroup(block_size),),
            vocab_size=1000,
        )
        self.table = SlotTable(num_slots, limits)
        self._params = SimpleNamespace(structured_outputs=None)
        self.writer = StepWriter(self, lambda _: None, lambda r: r in self.table, [block_size])
        self._seq = 0

    def __getitem__(self, req_id: str) -> KnownRequest:
        return KnownRequest(self._params, req_id, ())

    def forget(self, req_ids: Sequence[str]) -> None:
        """Do nothing; Requests forgets them here."""

    def write(
        self,
        new: Sequence[Any],
        counts: Mapping[str, int],
        cached: Sequence[Sequence[Any]] = NONE_RUNNING,
        deferred: bool = False,
        drafts: Mapping[str, Sequence[int]] = NO_DRAFTS,
    ) -> list[set[str]]:
        """Write a step, and let the table take what it becomes; return the requests of each part.
        cached: ids, computed tokens and new blocks of the running requests."""
        req_ids, computed, blocks = cached
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=req_ids, num_computed_tokens=computed, new_block_ids=blocks
            ),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens=drafts,
            skip_drafts=False,
            finished_req_ids=set(),
            preempted_req_ids=None,
            has_structured_output_requests=deferred,
        )
        steps = self.writer.write(output)
        for step in steps:
            self._seq += 1
            self.table.encode(step, epoch=1, link=1, seq=self._seq)
        return [{*step.num_scheduled_tokens, *step.decode_req_ids} for step in steps]


def new_request(
    req_id: str, num_tokens: int, blocks: Sequence[int], computed: int = 0
) -> SimpleNamespace:
    """Return vLLM's data of a new request."""
    return SimpleNamespace(
        req_id=req_id,
        prompt_token_ids=[7] * num_tokens,
        prefill_token_ids=None,
        prompt_embeds=None,
        prompt_is_token_ids=None,
        num_computed_tokens=computed,
        block_ids=(blocks,),
    )

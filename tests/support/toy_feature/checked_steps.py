"""Asks for several samples in the step that computes the last token of a request with checked
tokens: those in place of the tokens, and the one that continues it."""

from dataclasses import replace

from rpc_schema.checked_tokens import CheckedTokens

from rpc_schema.extensions import extension_of
from worker_client.driver_parts.interface import DriverPart
from worker_client.scheduler_output import SchedulerOutput


class CheckedTokensPart(DriverPart):
    """Follows requests until their last token is computed."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[int, int]] = {}
        """Tokens that no step has computed, and the number to check."""

    def plan(self, output: SchedulerOutput) -> SchedulerOutput:
        for new in output.scheduled_new_reqs:
            wanted = extension_of(new.extensions, CheckedTokens)
            if wanted is not None:
                left = len(new.token_ids) - new.num_computed_tokens
                self._left[new.req_id] = (left, wanted.count)
        num_samples: dict[str, int] = {}
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            if req_id in self._left:
                left, count = self._left.pop(req_id)
                if left > num_tokens:
                    self._left[req_id] = (left - num_tokens, count)
                else:
                    num_samples[req_id] = min(count + 1, num_tokens)
        return replace(output, num_samples=num_samples) if num_samples else output

    def ended(self, req_id: str) -> None:
        self._left.pop(req_id, None)

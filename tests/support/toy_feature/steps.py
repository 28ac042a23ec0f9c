"""The driver's half of the feature: tells each step the rows whose bias counts in it, those that
sample an even token of their outputs. It follows the requests with a bias through their steps."""

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rpc_schema.token_bias import BiasedRows, TokenBias

from rpc_schema.codec import Frame
from rpc_schema.extensions import StepExtension, extension_of
from worker_client.driver_parts.interface import DriverPart
from worker_client.scheduler_output import NewRequest, SchedulerOutput, StepValues


@dataclass(frozen=True, slots=True)
class BiasedRequests(StepValues):
    """The requests of a step whose bias counts in it."""

    names: Collection[str]

    @property
    def req_ids(self) -> Collection[str]:
        return self.names

    def encode(self, slot_of: Mapping[str, int]) -> tuple[StepExtension, Sequence[Frame]] | None:
        slots = [slot_of[name] for name in self.names if name in slot_of]
        return (BiasedRows(slots=array("H", slots).tobytes()), ()) if slots else None


@dataclass(slots=True)
class _Row:
    num_left: int
    """Known tokens that no step has computed; the step that computes the last one samples."""
    num_sampled: int
    """Tokens of its output that are known, or that steps in flight sample."""


class EvenTokensPart(DriverPart):
    """Counts the tokens of requests that have a bias, as steps are sent."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}

    def plan(self, output: SchedulerOutput) -> SchedulerOutput:
        self._forget([*output.finished_req_ids, *output.preempted_req_ids])
        for new in output.scheduled_new_reqs:
            self._admit(new)
        names = []
        decodes, counts = frozenset(output.decode_req_ids), output.num_scheduled_tokens
        for req_id, row in self._rows.items():
            num_tokens = 1 if req_id in decodes else counts.get(req_id, 0)
            if not num_tokens:
                continue
            row.num_left -= num_tokens
            if not row.num_left:
                row.num_left = 1
                if row.num_sampled % 2 == 0:
                    names.append(req_id)
                row.num_sampled += 1
        if not names:
            return output
        return replace(output, extensions=(*output.extensions, BiasedRequests(names)))

    def ended(self, req_id: str) -> None:
        self._forget([req_id])

    def _admit(self, new: NewRequest) -> None:
        self._forget([new.req_id])
        if extension_of(new.extensions, TokenBias) is not None:
            num_left = len(new.token_ids) - new.num_computed_tokens
            self._rows[new.req_id] = _Row(num_left, len(new.token_ids) - new.num_prompt_tokens)

    def _forget(self, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            self._rows.pop(req_id, None)

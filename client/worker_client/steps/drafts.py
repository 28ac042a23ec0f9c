"""Drafts of a step (speculative decoding): what a scheduler says of them, checked, which rows have
upper bounds as counts because of them, and what a reply says that their requests have gained."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker_client.scheduler_output import DraftOutcome, SchedulerOutput
from worker_client.steps.several_samples import ONE_EACH, TokenRows
from worker_client.steps.step_checks import WRONG_TYPE, GroupLimits, is_integer
from worker_client.steps.step_fault import StepFault

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

NO_DRAFTS: Final = ONE_EACH
"""SchedulerOutput.num_drafts of a step without drafts."""
NONE_BROUGHT: Final[Mapping[str, Sequence[int]]] = MappingProxyType({})
ON_DEVICE: Final = -1
"""In place of a draft in the message: the device has it."""
_NO_TRACK: Final = -1


class StepDrafts(NamedTuple):
    """The drafts of a scheduler's output."""

    counts: Mapping[str, int] = NO_DRAFTS
    """SchedulerOutput.num_drafts."""
    token_ids: Mapping[str, Sequence[int]] = NONE_BROUGHT
    """SchedulerOutput.draft_token_ids."""

    @classmethod
    def of(cls, output: SchedulerOutput) -> "StepDrafts":
        """Return those of an output whose fields have the right types."""
        if not (output.num_drafts or output.draft_token_ids):
            return NONE_DRAFTED
        return cls(output.num_drafts, output.draft_token_ids)

    def find_fault(
        self,
        counts: Mapping[str, int],
        refusing: Iterable[str],
        num_samples: Mapping[str, int],
        limits: GroupLimits,
    ) -> StepFault | None:
        """Check the drafts of each request by themselves. counts: SchedulerOutput's
        num_scheduled_tokens; refusing: its requests that cannot have drafts, because they pool or a
        feature of theirs may refuse tokens; num_samples: that of the step."""
        if num_samples:
            fix = "give one of num_drafts and num_samples in a step"
            return StepFault("a step has drafts or several samples", "num_samples", "both", fix)
        for req_id, count in self.counts.items():
            fault = _count_fault(req_id, count, counts, limits)
            if fault is not None:
                return fault
        wrong = next((req_id for req_id in refusing if self.counts.get(req_id)), None)
        if wrong is not None:
            fix = "give none to requests that pool, or have a feature that may refuse tokens"
            return _fault(self.counts[wrong], fix, wrong)
        return self.tokens_fault(limits.vocab_size)

    def tokens_fault(self, vocab_size: int) -> StepFault | None:
        """Check the drafts that the driver brings."""
        field, message = "draft_token_ids", "it cannot have these drafts"
        for req_id, own in self.token_ids.items():
            wanted = self.counts.get(req_id, 0)
            try:
                num = len(own)
            except WRONG_TYPE:
                num = -1
            if num != wanted or isinstance(own, str | bytes | Mapping):
                value = own if num < 0 else f"{num} tokens"
                fix = f"give {wanted} token ids, as num_drafts says"
                return StepFault(message, field, value, fix, req_id)
            for token_id in own:
                if type(token_id) is bool or not is_integer(token_id, 0, vocab_size - 1):
                    fix = f"use token ids from 0 to {vocab_size - 1}"
                    return StepFault(message, field, token_id, fix, req_id)
        return None

    def by_row(self, req_ids: Sequence[str]) -> Int32s:
        """Return the number of drafts of each request."""
        counts = (self.counts.get(req_id, 0) for req_id in req_ids)
        return np.fromiter(counts, np.int32, len(req_ids))

    def token_column(self, req_ids: Iterable[str]) -> bytes:
        """Return the drafts of these requests, in their order, as the message has them."""
        if not self.token_ids:
            return b""
        column = array("i")
        for req_id in req_ids:
            own = self.token_ids.get(req_id)
            column.extend([ON_DEVICE] * self.counts[req_id] if own is None else map(int, own))
        return np.array(column, "<i4").tobytes()


NONE_DRAFTED: Final = StepDrafts()


def _count_fault(
    req_id: str, count: object, counts: Mapping[str, int], limits: GroupLimits
) -> StepFault | None:
    """Check a request's number of drafts. counts: scheduled tokens of the requests."""
    if req_id not in counts:
        fix = "name requests of num_scheduled_tokens"
        return _fault(count, fix, req_id, "it has no tokens there")
    most, scheduled = limits.num_speculative_tokens, int(counts[req_id])
    if type(count) is bool or not is_integer(count, 0, most):
        fix = f"give 0 to {most}, num_speculative_tokens of the configuration"
        if not most:
            fix = "give none, or load with a speculative.method and num_speculative_tokens"
        return _fault(count, fix, req_id)
    if not is_integer(count, 0, scheduled - 1):
        fix = f"give at most {scheduled - 1}: the drafts are the last of its {scheduled} scheduled "
        return _fault(count, fix + "tokens, and at least one before them is known", req_id)
    if count and limits.keeps_state:
        fix = "give none: layers of this model keep a state per request"
        return _fault(count, fix, req_id)
    return None


def _fault(
    value: object, fix: str, req_id: str, message: str = "it cannot have these drafts"
) -> StepFault:
    return StepFault(message, "num_drafts", value, fix, req_id)


class DraftedRows:
    """The rows of a SlotTable whose counts are upper bounds because of drafts."""

    def __init__(self, num_slots: int) -> None:
        self._last_seq = np.full(num_slots, _NO_TRACK, np.int64)
        """For each slot, the seq of its last step with drafts whose outcome is unknown."""
        self._known: set[int] = set()
        """Slots of which all steps with drafts have their outcomes, but the workers do not know
        yet."""

    @property
    def has_known(self) -> bool:
        """True if a row can be settled."""
        return bool(self._known)

    def to_settle(self, bits: NDArray[np.bool_]) -> list[int]:
        """Return those of the scheduled slots whose counts the step makes exact."""
        return sorted(slot for slot in self._known if bits[slot])

    def settle(self, slots: Iterable[int]) -> None:
        """Note that a step makes the counts of these slots exact."""
        self._known.difference_update(slots)

    def draft(self, slots: Int32s, seq: int) -> None:
        """Note that a step has drafts for these slots."""
        self._last_seq[slots] = seq
        if self._known:
            self._known.difference_update(slots.tolist())

    def take_outcome(self, slot: int, seq: int) -> None:
        """Note that the outcome of a slot's drafts in the step `seq` is known."""
        if self._last_seq[slot] == seq:
            self._last_seq[slot] = _NO_TRACK
            self._known.add(slot)

    def release(self, slots: Sequence[int]) -> None:
        """End the requests in these slots."""
        self._last_seq[slots] = _NO_TRACK
        self._known.difference_update(slots)


def read_gains(
    req_ids: Sequence[str], num_sampled: bytes, num_drafts: Mapping[str, int]
) -> tuple[TokenRows, dict[str, DraftOutcome]] | None:
    """Return the requests of a reply's tokens, and the outcomes of their drafts; None if their
    counts do not fit the step. A request with drafts gains one token more than were accepted; its
    places are in `several`. req_ids: those that sample; num_sampled: as in ModelRunnerOutput;
    num_drafts: the step's."""
    counts = num_sampled or bytes([1]) * len(req_ids)
    if len(counts) != len(req_ids):
        return None
    gained: list[str] = []
    refused: dict[str, int] = {}
    outcomes: dict[str, DraftOutcome] = {}
    for req_id, count in zip(req_ids, counts, strict=True):
        drafts = num_drafts.get(req_id, 0)
        if not (drafts > 0) <= count <= drafts + 1:
            return None
        gained += [req_id] * count
        if count <= drafts:
            refused[req_id] = drafts + 1 - count
        if drafts:
            outcomes[req_id] = DraftOutcome(drafts, count - 1)
    firsts = accumulate(counts, initial=0)
    places = zip(req_ids, firsts, counts, strict=False)
    several = {name: range(first, first + n) for name, first, n in places if n > 1}
    return TokenRows(gained, refused, several), outcomes

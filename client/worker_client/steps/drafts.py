"""Drafts of a step (speculative decoding): what a scheduler says of them, checked, which rows have
upper bounds as counts because of them, and what a reply says that their requests have gained."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, repeat
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rpc_schema.config import MAX_DRAFTS
from worker_client.scheduler_output import DraftOutcome, SchedulerOutput
from worker_client.steps.several_samples import ONE_EACH
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
        self._is_known = np.zeros(num_slots, np.bool_)
        """True for slots of which all steps with drafts have their outcomes, but the workers do not
        know yet."""
        self.has_known = False
        """True if a row can be settled."""

    def to_settle(self, bits: NDArray[np.bool_]) -> Int64s:
        """Return those of the scheduled slots whose counts the step makes exact, ascending."""
        return np.flatnonzero(self._is_known & bits)

    def draft(self, slots: Int32s, seq: int) -> None:
        """Note that a step has drafts for these slots."""
        self._last_seq[slots] = seq
        self.settle(slots)

    def settle(self, slots: Int32s | Int64s | Sequence[int]) -> None:
        """Note that the counts of these slots are exact, or bounds again."""
        if self.has_known:
            self._is_known[slots] = False
            self.has_known = bool(self._is_known.any())

    def take_outcomes(self, slots: Int64s, seq: int) -> None:
        """Note that the outcomes of these slots' drafts in the step `seq` are known."""
        known = slots[self._last_seq[slots] == seq]
        if known.size:
            self._last_seq[known] = _NO_TRACK
            self._is_known[known] = self.has_known = True

    def release(self, slots: Sequence[int]) -> None:
        """End the requests in these slots."""
        self._last_seq[slots] = _NO_TRACK
        self.settle(slots)


class DraftedSamples:
    """The requests that sample in a step with drafts, in the order of their reply."""

    def __init__(self, req_ids: Sequence[str], num_drafts: Int32s) -> None:
        """num_drafts: int32 [requests]."""
        self.req_ids = req_ids
        self._names: NDArray[np.object_] = np.array(req_ids, object)
        self._least, self._most = num_drafts > 0, num_drafts + 1
        """Tokens that each may gain."""
        self._drafted = np.flatnonzero(num_drafts)
        """Places of those with drafts."""
        self._own_drafts = num_drafts[self._drafted]
        self._drafted_ids: list[str] = self._names[self._drafted].tolist()

    @classmethod
    def of(cls, req_ids: Sequence[str], num_drafts: Mapping[str, int]) -> "DraftedSamples":
        """Return these requests, which have num_drafts."""
        counts = map(num_drafts.get, req_ids, repeat(0))
        return cls(req_ids, np.fromiter(counts, np.int32, len(req_ids)))

    def read_gains(self, num_sampled: bytes) -> "Gains | None":
        """Return the requests of a reply's tokens, and the outcomes of their drafts; None if their
        counts do not fit the step. A request with drafts gains one token more than were accepted.
        num_sampled: as in ModelRunnerOutput."""
        counts = np.frombuffer(num_sampled or b"\1" * len(self.req_ids), np.uint8)
        if counts.size != self._most.size:
            return None
        refused = self._most - counts
        if np.count_nonzero((refused < 0) | (counts < self._least)):
            return None
        names, lacking = self._names, refused.nonzero()[0]
        outcomes = _OUTCOMES[self._own_drafts, counts[self._drafted] - 1].tolist()
        return Gains(
            names.repeat(counts).tolist(),
            dict(zip(names[lacking].tolist(), refused[lacking].tolist(), strict=True)),
            dict(zip(self._drafted_ids, outcomes, strict=True)),
            counts,
        )

    def several(self, counts: NDArray[np.uint8]) -> dict[str, range]:
        """Return the places of the tokens of each request that has gained several."""
        own = counts.tolist()
        places = zip(self.req_ids, accumulate(own, initial=0), own, strict=False)
        return {name: range(first, first + n) for name, first, n in places if n > 1}


class Gains(NamedTuple):
    """Tokens that the requests of a step with drafts have gained, as a reply says."""

    req_ids: list[str]
    """The request of each token."""
    refused: dict[str, int]
    """Tokens that requests did not gain, although the step counted them."""
    outcomes: dict[str, DraftOutcome]
    counts: NDArray[np.uint8]
    """Tokens of each request that samples."""


def _all_outcomes() -> NDArray[np.object_]:
    """Return the outcome of each number of drafts and of accepted ones: most of a step's repeat."""
    size = MAX_DRAFTS + 1
    outcomes = np.empty((size, size), object)
    for place in np.ndindex(size, size):
        outcomes[place] = DraftOutcome(*place)
    return outcomes


_OUTCOMES: Final = _all_outcomes()

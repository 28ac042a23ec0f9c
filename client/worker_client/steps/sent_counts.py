"""Mirrors the counts of the workers' rows, by slot: tokens computed and tokens known, so that a
step can be checked before it is sent, and sent in full."""

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rpc_schema.pooling import MAX_POOLED_BYTES
from worker_client.parts.registry import NONE_POOLED, may_refuse, pools
from worker_client.scheduler_output import NewRequest
from worker_client.steps.drafts import NONE_DRAFTED, DraftedRows, StepDrafts
from worker_client.steps.several_samples import ONE_EACH
from worker_client.steps.step_checks import (
    MAX_COUNT,
    WRONG_TYPE,
    GroupLimits,
    is_integer,
    output_bytes,
)
from worker_client.steps.step_fault import StepFault, malformed, wrong_count

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
_NO_SLOTS: Final = np.zeros(0, np.int64)


class ScheduledRows(NamedTuple):
    """Scheduled rows, slots ascending, with their counts after the step."""

    slots: Int32s
    num_scheduled: Int32s
    num_computed: Int32s
    num_tokens: Int32s
    num_samples: Int32s
    """Tokens that each row samples; 0 for most rows with a part of a prompt."""
    sampling_ids: Sequence[str]
    """Ids of the requests whose rows sample, in the order of slots."""
    pooled: Mapping[int, str]
    """By slot, the ids of the requests whose pooled output the step computes."""
    num_drafts: Int32s | None = None
    """Drafts of each row; None: no row has any."""

    @property
    def sampling_slots(self) -> list[int]:
        """Slots of the rows that sample."""
        slots: list[int] = self.slots[self.num_samples > 0].tolist()
        return slots

    @property
    def drafted_slots(self) -> Int32s | None:
        """Slots of the rows with drafts; None if no row has any."""
        return None if self.num_drafts is None else self.slots[self.num_drafts > 0]

    @property
    def drafted_ids(self) -> list[str]:
        """Ids of the requests with drafts, in the order of slots."""
        if self.num_drafts is None:
            return []
        counts = self.num_drafts[self.num_samples > 0].tolist()  # those with drafts sample
        return [r for r, count in zip(self.sampling_ids, counts, strict=True) if count]


class RowNotes(NamedTuple):
    """Facts about rows that a step tells the workers, besides their tokens."""

    corrected: Int64s = _NO_SLOTS
    """Slots of ExecuteModel.corrections, ascending."""
    by: Int32s = _NO_SLOTS.astype(np.int32)
    """Tokens by which the counts of each of them fall."""
    settled: Int64s = _NO_SLOTS
    """Slots of ExecuteModel.settled, ascending."""

    @property
    def corrections(self) -> bytes:
        """ExecuteModel.corrections."""
        return pairs(self.corrected, self.by) if self.corrected.size else b""


NO_NOTES: Final = RowNotes()


def pairs(slots: Int32s | Int64s, numbers: Int32s) -> bytes:
    """Return pairs (slot, number), as the message has them."""
    columns = np.empty((slots.size, 2), "<i4")
    columns[:, 0], columns[:, 1] = slots, numbers
    return columns.tobytes()


def read_counts(counts: Mapping[str, int]) -> Int64s | StepFault:
    """Return the scheduled tokens of each request."""
    try:
        if bool not in map(type, counts.values()):
            return np.frombuffer(array("q", counts.values()), np.int64)
    except WRONG_TYPE:
        pass
    for req_id, count in counts.items():
        if type(count) is bool or not is_integer(count, -MAX_COUNT, MAX_COUNT):
            return wrong_count(req_id, count, "give a whole number")
    return malformed("num_scheduled_tokens", counts, "give whole numbers")


def _samples_fault(
    wanted: Mapping[str, int], tokens: Mapping[str, int], most: int
) -> StepFault | None:
    """Check a step's num_samples. tokens: scheduled tokens of the requests that sample; most:
    max_samples_per_seq."""
    message = "it cannot sample so many tokens in this step"
    for req_id, count in wanted.items():
        own = tokens.get(req_id, 0)
        if not own:
            fix = "name requests whose last known token the step computes, and which do not pool"
            return StepFault("it does not sample", "num_samples", count, fix, req_id)
        if type(count) is bool or not is_integer(count, 1, min(own, most)):
            fix = f"give 1 to {min(own, most)}: {own} of its tokens are scheduled, and "
            fix += f"max_samples_per_seq of the configuration is {most}"
            return StepFault(message, "num_samples", count, fix, req_id)
    return None


class _AskedRows(NamedTuple):
    """The rows of a step's requests, in the order of the requests."""

    req_ids: Sequence[str]
    num_scheduled: Int64s
    num_computed: Int32s
    left: Int32s
    """Tokens that are left to compute, with the step's drafts."""
    drafted: Int32s | None
    """The step's drafts of each; None: there are none."""


def _drafted_fault(
    asked: _AskedRows, drafted: Int32s, refused: Int64s, most: int
) -> StepFault | None:
    """Check that the tokens of each row with drafts reach its last draft, and that none of these
    rows ends beyond `most` tokens, max_model_len. refused: recorded refusals of each row."""
    scheduled, left = asked.num_scheduled, asked.left
    ends = asked.num_computed + scheduled - refused
    wrong = (drafted > 0) & ((scheduled != left) | (ends > most))
    for at in np.flatnonzero(wrong)[:1].tolist():
        if scheduled[at] != left[at]:
            fix = f"give {left[at]}: all tokens that are left, and its drafts"
            return wrong_count(asked.req_ids[at], int(scheduled[at]), fix)
        fix = f"give fewer: its tokens would end at {ends[at]}, and max_model_len is {most}"
        message = "it cannot have these drafts"
        return StepFault(message, "num_drafts", int(drafted[at]), fix, asked.req_ids[at])
    return None


def _crossing_fault(
    req_ids: Sequence[str], num_computed: Int32s, num_scheduled: Int64s, limits: GroupLimits
) -> StepFault | None:
    """Check that no request's tokens lie on both sides of a border."""
    interval = limits.border_tokens
    crosses = num_computed // interval != (num_computed + num_scheduled - 1) // interval
    for at in np.flatnonzero(crosses)[:1].tolist():
        left = interval - int(num_computed[at]) % interval
        fix = (
            f"give at most {left}: a checkpoint of its state is kept after every {interval} tokens"
        )
        return wrong_count(req_ids[at], int(num_scheduled[at]), fix)
    return None


class SentCounts:
    """The counts of a SlotTable's rows, after the steps that were sent."""

    def __init__(self, num_slots: int, limits: GroupLimits) -> None:
        self._limits = limits
        self.num_computed = np.zeros(num_slots, np.int32)
        """For each slot, tokens whose steps were sent."""
        self._num_tokens = np.zeros(num_slots, np.int32)
        self._output_bytes = np.zeros(num_slots, np.int32)
        """Bytes of each slot's output; 0 unless its request pools."""
        self._admitted_at = np.zeros(num_slots, np.int64)
        """For each slot, the seq of the step that admitted its request."""
        self._refused = np.zeros(num_slots, np.int32)
        """For each slot, the number of refused tokens that the workers' counts still include."""
        self._has_refused = False
        self._may_refuse = np.zeros(num_slots, np.bool_)
        """True where a feature of the request may refuse its tokens."""
        self.drafted = DraftedRows(num_slots)

    def can_decode(self, slots: Int32s) -> bool:
        """Return True if each of these rows has exactly one token left to compute, and samples."""
        if np.any(self.num_computed[slots] + 1 != self._num_tokens[slots]):
            return False
        return not self._output_bytes[slots].any()

    def advance(self, slots: Int32s, num_tokens: int | Int32s) -> None:
        """Count tokens of rows that decode."""
        self.num_computed[slots] += num_tokens
        self._num_tokens[slots] += num_tokens

    def room(self, slots: Int32s) -> int:
        """Return how many more tokens each of these rows may have within max_model_len, at least:
        refused ones that the workers still count are not left out."""
        return self._limits.max_model_len - int(self.num_computed[slots].max())

    def check(
        self,
        counts: Mapping[str, int],
        slots: Int32s,
        new: Sequence[NewRequest],
        slot_of_new: Mapping[str, int],
        wanted: Mapping[str, int] = ONE_EACH,
        decoding: Collection[str] = (),
        drafts: StepDrafts = NONE_DRAFTED,
    ) -> ScheduledRows | StepFault:
        """Check the scheduled tokens of requests; return their rows' counts after the step, or the
        fault: a count does not fit its row, or outputs are too large. Nothing changes.

        slots: of the requests, in the order of counts. wanted: the step's num_samples; decoding:
        its requests that are not in counts.
        """
        req_ids = list(counts)
        num_scheduled = read_counts(counts)
        if isinstance(num_scheduled, StepFault):
            return num_scheduled
        num_computed, num_tokens = self.num_computed[slots], self._num_tokens[slots]
        if new:
            place = {req_id: index for index, req_id in enumerate(req_ids)}
            begun = [request for request in new if request.req_id in place]
            at = [place[request.req_id] for request in begun]
            num_computed[at] = [request.num_computed_tokens for request in begun]
            num_tokens[at] = [len(request.token_ids) for request in begun]
        drafted = self._read_drafts(drafts, counts, slots, new, wanted)
        if isinstance(drafted, StepFault):
            return drafted
        if drafted is not None:
            num_tokens = num_tokens + drafted
        asked = _AskedRows(req_ids, num_scheduled, num_computed, num_tokens - num_computed, drafted)
        fault = self._asked_fault(asked, slots, slot_of_new)
        if fault is not None:
            return fault
        order = np.argsort(slots)
        scheduled = num_scheduled[order].astype(np.int32)
        num_computed, num_tokens = num_computed[order] + scheduled, num_tokens[order]
        samples: NDArray[np.bool_] = num_computed == num_tokens
        pooled = NONE_POOLED
        if self._output_bytes.any() or any(r.extensions and pools(r.extensions) for r in new):
            sizes = self._output_sizes(slots[order], new, slot_of_new, scheduled, samples)
            if isinstance(sizes, StepFault):
                return sizes
            ends = samples & (sizes > 0)
            samples &= sizes == 0
            names = [req_ids[at] for at in order[ends].tolist()]
            pooled = dict(zip(slots[order][ends].tolist(), names, strict=True))
        names = [req_ids[at] for at in order[samples].tolist()]
        num_tokens[samples] += 1
        num_samples = samples.astype(np.int32)
        if wanted:
            tokens = dict.fromkeys(decoding, 1)
            tokens |= zip(names, scheduled[samples].tolist(), strict=True)
            fault = _samples_fault(wanted, tokens, self._limits.max_samples_per_seq)
            if fault is not None:
                return fault
            num_samples[samples] = [wanted.get(name, 1) for name in names]
        in_order = None if drafted is None else drafted[order]
        return ScheduledRows(
            slots[order], scheduled, num_computed, num_tokens, num_samples, names, pooled, in_order
        )

    def _read_drafts(
        self,
        drafts: StepDrafts,
        counts: Mapping[str, int],
        slots: Int32s,
        new: Sequence[NewRequest],
        wanted: Mapping[str, int],
    ) -> Int32s | StepFault | None:
        """Check a step's drafts by themselves; return those of each request, None if no request has
        any."""
        if drafts is NONE_DRAFTED:
            return None
        cannot = (self._output_bytes > 0) | self._may_refuse
        begun = {request.req_id: request.extensions for request in new}
        pairs = zip(counts, cannot[slots].tolist(), strict=True)
        refusing = [req_id for req_id, is_one in pairs if is_one and req_id not in begun]
        refusing += [name for name, own in begun.items() if pools(own) or may_refuse(own)]
        fault = drafts.find_fault(counts, refusing, wanted, self._limits)
        return drafts.by_row([*counts]) if fault is None else fault

    def _asked_fault(
        self, asked: _AskedRows, slots: Int32s, slot_of_new: Mapping[str, int]
    ) -> StepFault | None:
        """Check each row's number of tokens. slots: of the rows."""
        left, scheduled, names = asked.left, asked.num_scheduled, asked.req_ids
        for at in np.flatnonzero((scheduled < 1) | (scheduled > left))[:1].tolist():
            fix = f"give 1 to {left[at]}: it has {left[at]} tokens left to compute"
            return wrong_count(names[at], int(scheduled[at]), fix)
        if asked.drafted is not None:
            refused = self._refused.astype(np.int64)
            refused[list(slot_of_new.values())] = 0
            fault = _drafted_fault(asked, asked.drafted, refused[slots], self._limits.max_model_len)
            if fault is not None:
                return fault
        if not self._limits.border_tokens:
            return None
        return _crossing_fault(names, asked.num_computed, scheduled, self._limits)

    def _output_sizes(
        self,
        slots: Int32s,
        new: Sequence[NewRequest],
        slot_of_new: Mapping[str, int],
        scheduled: Int32s,
        is_last: NDArray[np.bool_],
    ) -> Int32s | StepFault:
        """Return the bytes of each row's output, 0 where its request samples; check those of the
        rows whose last token the step computes."""
        by_slot = self._output_bytes.copy()
        for request in new:
            by_slot[slot_of_new[request.req_id]] = output_bytes(request, self._limits)
        sizes: Int32s = by_slot[slots]
        support = self._limits.pooling
        if support is not None and support.whole_prompts:
            for at in np.flatnonzero((sizes > 0) & ~is_last)[:1].tolist():
                name = next((r for r, s in slot_of_new.items() if s == slots[at]), "")
                fix = "give it all its tokens: the model computes a prompt in one step"
                return wrong_count(name, int(scheduled[at]), fix)
        total = int(sizes[is_last].sum(dtype=np.int64))
        if total > MAX_POOLED_BYTES:
            return StepFault(
                f"the outputs of the prompts that end take more than {MAX_POOLED_BYTES} bytes",
                field="num_scheduled_tokens",
                value=f"{total} bytes",
                fix="let fewer of them end in a step",
            )
        return sizes

    def apply(
        self, rows: ScheduledRows, new: Sequence[NewRequest], slots: Sequence[int], seq: int
    ) -> None:
        """Account for the checked step `seq`: begin its new requests in these free slots, and count
        the tokens of its rows."""
        if new:
            at = list(slots)
            self.num_computed[at] = [request.num_computed_tokens for request in new]
            self._num_tokens[at] = [len(request.token_ids) for request in new]
            self._admitted_at[at] = seq
            for request, slot in zip(new, at, strict=True):
                if request.extensions and pools(request.extensions):
                    self._output_bytes[slot] = output_bytes(request, self._limits)
                elif request.extensions and may_refuse(request.extensions):
                    self._may_refuse[slot] = True
        self.num_computed[rows.slots] = rows.num_computed
        self._num_tokens[rows.slots] = rows.num_tokens
        if rows.num_drafts is not None:
            self.drafted.draft(rows.slots[rows.num_drafts > 0], seq)

    def release(self, slots: Sequence[int]) -> None:
        """End the requests in these slots."""
        self._output_bytes[slots] = 0
        self._may_refuse[slots] = False
        self.drafted.release(slots)
        if self._has_refused:
            self._refused[slots] = 0

    def refuse(self, slots: Int64s, counts: Int64s, seq: int) -> None:
        """Record tokens of the step `seq` that these rows' requests did not gain after all, though
        the workers' counts include them: a later step that schedules a row corrects the workers."""
        is_same = self._admitted_at[slots] <= seq
        self._refused[slots[is_same]] += counts[is_same].astype(np.int32)
        self._has_refused = True

    def take_outcomes(self, slots: Int64s, seq: int) -> None:
        """Record that the outcomes of these rows' drafts in the step `seq` are known."""
        self.drafted.take_outcomes(slots[self._admitted_at[slots] <= seq], seq)

    def notes(
        self,
        bits: NDArray[np.bool_],
        leaving_out: Sequence[int] = (),
        drafted: Int32s | None = None,
    ) -> RowNotes:
        """Return what a step says of rows besides their tokens. bits: the scheduled slots;
        leaving_out: those whose requests end; drafted: those to which the step gives drafts, whose
        counts stay bounds. Rows that are not scheduled wait: if the step fails, they keep their
        counts."""
        if not self._has_refused and not self.drafted.has_known:
            return NO_NOTES
        if len(leaving_out):
            bits = bits.copy()
            bits[leaving_out] = False
        slots = (self._refused * bits).nonzero()[0]
        if not self.drafted.has_known:
            return RowNotes(slots, self._refused[slots])
        if drafted is not None:
            bits = bits.copy()
            bits[drafted] = False
        return RowNotes(slots, self._refused[slots], self.drafted.to_settle(bits))

    def tell(self, notes: RowNotes) -> None:
        """Account for a step's notes: it carries them to the workers."""
        slots = notes.corrected
        if slots.size:
            self.num_computed[slots] -= notes.by
            self._num_tokens[slots] -= notes.by
            self._refused[slots] = 0
            self._has_refused = bool(self._refused.any())
        if notes.settled.size:
            self.drafted.settle(notes.settled)

    def columns(self, slots: Int32s) -> Iterable[Int32s]:
        """Yield the columns of these rows that a step sent in full has."""
        yield self.num_computed[slots]
        yield self._num_tokens[slots]

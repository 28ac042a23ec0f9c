"""Translates between request ids and slots: from SchedulerOutput to rpc_schema.step.ExecuteModel,
and back from ModelRunnerOutput.

Put together from the counts of the rows (sent_counts.py), their block tables (block_tables.py) and
the requests whose sampling waits (deferred_sampling.py). A pure decode step with an unchanged set
costs nothing per request: bitmap, slots and the ids of the reply are kept in SteadyRequests, whose
rows' counts are brought up to date only when they are read.
"""

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rpc_schema.codec import Frame, encode_step
from rpc_schema.step import ExecuteModel, ModelRunnerOutput, NewRequestData
from worker_client.errors import InvalidSchedulerOutput
from worker_client.parts.registry import Extensions, pools, reports
from worker_client.scheduler_output import NewRequest, SchedulerOutput, StepResult, StepValues
from worker_client.steps.block_tables import BlockTables, CheckedBlocks
from worker_client.steps.cached_blocks import CachedBlocks
from worker_client.steps.deferred_sampling import DeferredSampling
from worker_client.steps.encoded_step import (
    NONE_DEFERRED,
    EncodedStep,
    SteadyRequests,
    decode_reply,
    pack_bits,
)
from worker_client.steps.sent_counts import ScheduledRows, SentCounts
from worker_client.steps.step_checks import MAX_ADMITTED_TOKENS as MAX_ADMITTED_TOKENS
from worker_client.steps.step_checks import (
    WIRE_LIMITS,
    GroupLimits,
    check_admissions,
    check_more_blocks,
    check_shape,
    check_step_values,
    encode_checked,
    named_ids,
    not_running,
    read_tokens,
    repeated,
    unknown_request,
    wrong_ids,
)
from worker_client.steps.step_values import ALL_AT_ONCE, StepSampling, sampling_of

MAX_STEADY = 16
"""Number of steady sets that are kept: more than a pipeline has micro-batches."""

Int32s = NDArray[np.int32]
_NONE_NEW: Mapping[str, int] = {}


class _Change(NamedTuple):
    """Changes that a checked step makes to the table."""

    ended_ids: Sequence[str]
    ended: Sequence[int]
    """Slots of those, ascending."""
    slot_of_new: Mapping[str, int]
    admitted: Sequence[NewRequest]
    blocks: CheckedBlocks
    rows: ScheduledRows
    total: int
    """Scheduled tokens, decodes included."""
    sampling: StepSampling


class SlotTable:
    """Maps requests to slots, and tracks the progress of each row. Belongs to one thread. Has
    `max_num_seqs` slots; the lowest free one is assigned first."""

    def __init__(self, max_num_seqs: int, limits: GroupLimits = WIRE_LIMITS) -> None:
        """limits: the group's limits, if they are lower than a message's."""
        self.capacity = max_num_seqs
        self._limits = limits
        self._slot_of: dict[str, int] = {}
        self._is_free = np.ones(max_num_seqs, np.bool_)
        self._rows = SentCounts(max_num_seqs, limits)
        self._blocks = BlockTables(max_num_seqs, limits)
        self._deferred = DeferredSampling(max_num_seqs)
        self._reporting: Mapping[str, Extensions] = {}
        """Extensions of the requests whose replies contain more than tokens. Replaced, never
        changed: steps in flight share it."""
        self._steady: list[SteadyRequests] = []
        """The steady sets of the last values of decode_req_ids."""
        self._must_resync = False

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._slot_of

    @property
    def req_ids(self) -> list[str]:
        """Ids of the requests that have a slot."""
        return list(self._slot_of)

    def slot_of(self, req_id: str) -> int:
        """Return the slot of a request; KeyError if it has none."""
        return self._slot_of[req_id]

    def encode(self, output: SchedulerOutput, *, epoch: int, link: int, seq: int) -> EncodedStep:
        """Encode a step and account for it as applied. The table changes only after the step is
        checked and encoded, when nothing can fail any more.

        Raises:
            InvalidSchedulerOutput: the output breaks a rule; nothing has changed.
        """
        ids = epoch, link, seq
        only_decodes = self._only_decodes(output)
        for steady in self._steady:
            if steady.req_ids is output.decode_req_ids:
                break
        else:
            steady = None
        if steady is None or not only_decodes:
            check_shape(output, self.capacity)
            self._flush()
            steady = steady or self._make_steady(output.decode_req_ids)
        if steady is not None and only_decodes:
            return self._encode_steady(output, steady, ids)
        counts = output.num_scheduled_tokens
        if steady is None and output.decode_req_ids:
            counts = {**dict.fromkeys(output.decode_req_ids, 1), **counts}
            if len(counts) != len(output.decode_req_ids) + len(output.num_scheduled_tokens):
                both = chain(output.decode_req_ids, output.num_scheduled_tokens)
                message = "it is in decode_req_ids twice, or in num_scheduled_tokens too"
                raise wrong_ids(message, "decode_req_ids", repeated(both))
        return self._encode_changed(output, steady, counts, ids)

    def _only_decodes(self, output: SchedulerOutput) -> bool:
        """Return True if a step only decodes and appends blocks."""
        blocks: object = output.new_block_ids
        if type(blocks) is not dict and not isinstance(blocks, Mapping):
            return False
        if len(blocks) > self.capacity:
            return False
        if type(output.more_new_block_ids) is not tuple or output.more_new_block_ids:
            num_groups = len(self._limits.block_groups)
            check_more_blocks(output.more_new_block_ids, num_groups, self.capacity)
        try:
            return not (
                self._must_resync
                or self._deferred.slots
                or output.extensions
                or output.num_scheduled_tokens
                or output.finished_req_ids
                or output.preempted_req_ids
                or output.scheduled_new_reqs
            )
        except ValueError:  # an array in place of a sequence
            return False

    def encode_later(
        self, step: EncodedStep, values: Sequence[StepValues], req_ids: Collection[str] | None
    ) -> tuple[dict[int, str], StepSampling]:
        """Return the deferred requests of `step` that are to be sampled now, by slot, and what a
        SampleTokens says of them; values of requests that have left their slots since are left out.
        req_ids: some of those that are left, None for all. None are left once rows were lost.

        Raises:
            InvalidSchedulerOutput: the step has not deferred a request, or it was sampled, or
            values are malformed.
        """
        check_step_values(values)
        chosen = {} if self._must_resync else step.left  # then its rows are gone
        if req_ids is not None:
            chosen = {slot: req_id for slot, req_id in chosen.items() if req_id in req_ids}
        slot_of = {req_id: slot for slot, req_id in chosen.items()}
        given = [("extensions", each.req_ids) for each in values]
        for field, names in (*given, ("req_ids", req_ids or ())):
            wrong = [req_id for req_id in names if req_id not in slot_of]
            if wrong:
                raise wrong_ids(f"step {step.seq} has not deferred it", field, wrong)
        staying = {name: slot for name, slot in slot_of.items() if self._slot_of.get(name) == slot}
        return chosen, sampling_of(values, staying)._replace(deferred=NONE_DEFERRED)

    def take_later(self, step: EncodedStep, chosen: Iterable[int]) -> None:
        """Note that deferred requests of a step, given by slot, were sampled."""
        self._deferred.take(step, chosen, self._slot_of)

    @staticmethod
    def decode(step: EncodedStep, reply: ModelRunnerOutput, arrays: Sequence[Frame]) -> StepResult:
        """Turn a reply to `step` into request ids. Raises as decode_reply does."""
        return decode_reply(step, reply, arrays)

    def fail(self, outputs: Iterable[SchedulerOutput]) -> frozenset[str]:
        """Undo failed steps: forget every request that took part or was to end in them, or whose
        last token waits to be sampled, and send the next step in full.

        Return the ids of those that took part.
        """
        self._flush()
        lost: set[str] = set()
        for output in outputs:
            lost.update(output.decode_req_ids, output.num_scheduled_tokens, output.new_block_ids)
            lost.update(*output.more_new_block_ids)
            lost.update(new.req_id for new in output.scheduled_new_reqs)
            self._release(self._known(output.finished_req_ids, output.preempted_req_ids))
        lost.update(name for name, slot in self._slot_of.items() if slot in self._deferred.slots)
        self._release(self._known(lost))
        self._must_resync = True
        return frozenset(lost)

    def drop_all(self) -> frozenset[str]:
        """Forget every request; the next step is sent in full, with no rows. Return their ids."""
        self._flush()
        dropped = frozenset(self._slot_of)
        self._release(list(dropped))
        self._must_resync = True
        return dropped

    def lose_contents(self) -> None:
        """Record that the workers' KV cache has lost its contents: requests cannot begin with
        blocks that were filled before."""
        self._blocks.lose_contents()

    def with_contents(self, blocks: CachedBlocks) -> CachedBlocks:
        """Return those of these blocks that are full, as far as the table knows: the cache may have
        lost their contents, or a request that still has to fill them.

        Raises:
            ClientConfigError: a block does not exist.
        """
        self._flush()
        return self._blocks.with_contents(blocks, self._rows.num_computed)

    def withdraw(self, output: SchedulerOutput) -> frozenset[str]:
        """Drop every request, because a step was not sent. Return their ids, and those in the step,
        whose fields may have any type."""
        return self.drop_all() | named_ids(output)

    def require_resync(self) -> None:
        """Send the next step in full."""
        self._must_resync = True

    def _make_steady(self, req_ids: tuple[str, ...]) -> SteadyRequests | None:
        """Return those of decode_req_ids; None where not all of them are at their last token and
        sample."""
        if not req_ids:
            return None
        slots = self._slots(req_ids)
        if not self._rows.can_decode(slots):
            return None
        steady = SteadyRequests(req_ids, slots, self.capacity)
        if int(np.count_nonzero(steady.bits)) != len(req_ids):
            twice = repeated(req_ids)
            raise wrong_ids("it is in decode_req_ids twice", "decode_req_ids", twice)
        self._check_total(len(req_ids))
        if len(self._steady) == MAX_STEADY:
            self._steady.clear()
        self._steady.append(steady)
        return steady

    def _encode_steady(
        self, output: SchedulerOutput, steady: SteadyRequests, ids: tuple[int, int, int]
    ) -> EncodedStep:
        epoch, link, seq = ids
        blocks = self._blocks.take_free(output, self._slot_of)
        if blocks is None:
            self._flush()
            blocks = self._blocks.take(output, self._slot_of, self._rows.num_computed)
        corrections = self._rows.corrections()
        message = ExecuteModel(
            epoch=epoch,
            link=link,
            seq=seq,
            total_num_scheduled_tokens=len(steady.req_ids),
            scheduled=steady.bitmap,
            new_block_slots=blocks.slots,
            new_block_ids=blocks.ids,
            new_block_groups=blocks.groups,
            corrections=corrections,
        )
        try:
            frames = encode_step(message)
        except BaseException:
            self._blocks.give_back(blocks)
            raise
        steady.num_pending += 1
        if corrections:
            self._rows.correct()
        if blocks.slots:
            self._blocks.append_later(blocks)
        return EncodedStep(seq, output, frames, steady, (), (), self._reporting)

    def _encode_changed(
        self,
        output: SchedulerOutput,
        steady: SteadyRequests | None,
        counts: Mapping[str, int],
        ids: tuple[int, int, int],
    ) -> EncodedStep:
        change = self._check(output, steady, counts)
        resync = self._resync_rows(change.ended) if self._must_resync else None
        frames = self._encode_change(output, steady, change, resync, ids)
        self._apply(change, ids[2])
        self._must_resync = False
        if steady is not None:
            steady.num_pending += 1
        rows = change.rows
        return EncodedStep(
            ids[2],
            output,
            frames,
            steady,
            rows.slots[rows.samples].tolist(),
            rows.sampling_ids,
            self._reporting,
            pooled=rows.pooled,
            resync=resync is not None,
            deferred=change.sampling.deferred,
        )

    def _check(
        self, output: SchedulerOutput, steady: SteadyRequests | None, counts: Mapping[str, int]
    ) -> _Change:
        """Check a whole step, and return its changes. Nothing changes yet."""
        new = tuple(islice(output.scheduled_new_reqs, self.capacity + 1))
        ended_ids = self._known(output.finished_req_ids, output.preempted_req_ids)
        ended = sorted(self._slot_of[req_id] for req_id in ended_ids)
        new_slots = self._check_admissions(new, ended_ids, ended)
        slot_of_new = dict(zip((request.req_id for request in new), new_slots, strict=True))
        gone = set(ended_ids)
        self._check_gone(output, gone.difference(slot_of_new), ended, steady, counts)
        slots = self._slots([*counts], slot_of_new)
        rows = self._rows.check(counts, slots, new, slot_of_new)
        num_decodes = 0
        if steady is not None:
            num_decodes = len(steady.req_ids)
            if steady.bits[rows.slots].any():
                both = counts.keys() & set(steady.req_ids)
                message = "it is in decode_req_ids and in num_scheduled_tokens"
                raise wrong_ids(message, "decode_req_ids", both)
        total = num_decodes + int(rows.num_scheduled.sum())
        self._check_total(total)
        for given in (output.new_block_ids, *output.more_new_block_ids):
            self._check_standing(given, gone, slot_of_new)
        sampling = ALL_AT_ONCE
        if self._deferred.slots:
            decoding = [] if steady is None else steady.slots.tolist()
            self._deferred.check_sampled(chain(rows.slots.tolist(), decoding), ended, self._slot_of)
        if output.extensions:
            slot_of = dict(zip(rows.sampling_ids, rows.slots[rows.samples].tolist(), strict=True))
            if steady is not None:
                slot_of |= zip(steady.sorted_req_ids, steady.slots.tolist(), strict=True)
            sampling = sampling_of(output.extensions, slot_of)
            if sampling.deferred:
                self._deferred.check_room(len(slot_of), resync=self._must_resync)
        blocks = self._blocks.check(
            output, new, ended, self._slot_of, slot_of_new, self._rows.num_computed
        )
        return _Change(ended_ids, ended, slot_of_new, new, blocks, rows, total, sampling)

    def _check_admissions(
        self, new: Sequence[NewRequest], ended_ids: Sequence[str], ended: Sequence[int]
    ) -> list[int]:
        """Check new requests; return their slots, the lowest free ones."""
        if not new:
            return []
        check_admissions(new, self._limits)
        names = {request.req_id for request in new}
        if len(names) < len(new):
            twice = repeated(request.req_id for request in new)
            raise wrong_ids("it is new twice in one step", "scheduled_new_reqs", twice)
        gone = set(ended_ids)
        taken = [name for name in names if name in self._slot_of and name not in gone]
        if taken:
            raise wrong_ids("it is new, but has a slot", "scheduled_new_reqs", taken)
        is_free = self._is_free.copy()
        is_free[ended] = True
        slots: list[int] = np.flatnonzero(is_free)[: len(new)].tolist()
        if len(slots) < len(new):
            raise InvalidSchedulerOutput(
                f"only {len(slots)} of max_num_seqs = {self.capacity} slots are free",
                field="scheduled_new_reqs",
                value=f"{len(new)} requests",
                fix="admit some later",
            )
        return slots

    def _check_gone(
        self,
        output: SchedulerOutput,
        gone: set[str],
        ended: Sequence[int],
        steady: SteadyRequests | None,
        counts: Mapping[str, int],
    ) -> None:
        decodes_on = steady is not None and steady.bits[ended].any()
        if decodes_on or any(req_id in counts for req_id in gone):
            scheduled = {*counts, *output.decode_req_ids}
            message = "it is finished and scheduled in the same step"
            again = [name for name in output.decode_req_ids if self._slot_of.get(name) in ended]
            raise wrong_ids(message, "finished_req_ids", gone & scheduled or again)

    def _check_total(self, num_tokens: int) -> None:
        most = self._limits.max_num_batched_tokens
        if num_tokens > most:
            raise InvalidSchedulerOutput(
                f"the step has more tokens than max_num_batched_tokens = {most}",
                field="num_scheduled_tokens",
                value=num_tokens,
                fix=f"schedule at most {most} tokens, decodes included",
            )

    def _check_standing(
        self, given: Mapping[str, object], gone: set[str], slot_of_new: Mapping[str, int]
    ) -> None:
        """Check that blocks are appended only to requests that continue; new requests bring their
        own."""
        for req_id in given:
            if req_id in slot_of_new or req_id in gone or req_id not in self._slot_of:
                raise not_running(req_id, given[req_id])

    def _encode_change(
        self,
        output: SchedulerOutput,
        steady: SteadyRequests | None,
        change: _Change,
        resync: bytes | None,
        ids: tuple[int, int, int],
    ) -> list[Frame]:
        """Encode a checked step."""
        rows, new = change.rows, change.admitted
        bits = np.zeros(self.capacity, np.bool_) if steady is None else steady.bits.copy()
        bits[rows.slots] = True
        several = rows.num_scheduled != 1
        pairs = np.empty((int(np.count_nonzero(several)), 2), "<i4")
        pairs[:, 0], pairs[:, 1] = rows.slots[several], rows.num_scheduled[several]
        tokens = [read_tokens(new, self._limits).astype("<i4", copy=False).tobytes()] if new else []
        message = ExecuteModel(
            epoch=ids[0],
            link=ids[1],
            seq=ids[2],
            total_num_scheduled_tokens=change.total,
            scheduled=pack_bits(bits),
            num_scheduled_tokens=pairs.tobytes(),
            new_block_slots=change.blocks.given.slots,
            new_block_ids=change.blocks.given.ids,
            new_block_groups=change.blocks.given.groups,
            finished=b"" if resync is not None else array("H", change.ended).tobytes(),
            scheduled_new_reqs=tuple(
                _as_message(request, change.slot_of_new[request.req_id]) for request in new
            ),
            resync=resync,
            deferred=change.sampling.bitmap,
            extensions=change.sampling.extensions,
            corrections=self._rows.corrections(change.ended),
        )
        return encode_checked(message, [*tokens, *change.sampling.frames], new, self._limits)

    def count_refused(self, step: EncodedStep, refused: Mapping[str, int]) -> None:
        """Record tokens that a step counted for requests, but that they did not gain: a later step
        corrects the workers."""
        for req_id, count in refused.items():
            slot = self._slot_of.get(req_id)
            if slot is not None:
                self._rows.count_refused(slot, step.seq, count)

    def _apply(self, change: _Change, seq: int) -> None:
        """Account for a checked and encoded step; nothing here can fail."""
        self._release(change.ended_ids)
        if change.admitted:
            self._admit(change, seq)
        self._blocks.append(change.blocks)
        self._rows.apply(change.rows)
        if self._must_resync:
            self._deferred.drop_held()
        if change.sampling.deferred:
            self._deferred.defer(seq, change.sampling.deferred)
        self._rows.correct()

    def _slots(self, req_ids: Sequence[str], slot_of_new: Mapping[str, int] = _NONE_NEW) -> Int32s:
        slot_of = self._slot_of
        if slot_of_new:
            slot_of = {req_id: slot_of[req_id] for req_id in req_ids if req_id in slot_of}
            slot_of.update(slot_of_new)
        try:
            return np.fromiter(map(slot_of.__getitem__, req_ids), np.int32, len(req_ids))
        except (KeyError, TypeError):
            unknown = next(r for r in req_ids if not isinstance(r, str) or r not in slot_of)
            raise unknown_request(unknown) from None

    def _known(self, *groups: Iterable[str]) -> list[str]:
        try:
            return list(dict.fromkeys(name for name in chain(*groups) if name in self._slot_of))
        except TypeError:
            wrong = [name for name in chain(*groups) if not isinstance(name, str)]
            raise wrong_ids("request ids are strings", "finished_req_ids", wrong) from None

    def _release(self, req_ids: Sequence[str]) -> None:
        """Free the slots of known requests, and drop the steady sets that name them. Call _flush()
        first: otherwise pending counts of rows and blocks would be lost, or would go to the slots'
        next requests."""
        if not req_ids:
            return
        slots = [self._slot_of.pop(req_id) for req_id in req_ids]
        if not self._reporting.keys().isdisjoint(req_ids):
            gone = set(req_ids)
            self._reporting = {k: v for k, v in self._reporting.items() if k not in gone}
        self._is_free[slots] = True
        self._rows.release(slots)
        self._deferred.release(slots)
        self._blocks.release(slots)
        self._steady = [steady for steady in self._steady if not steady.bits[slots].any()]

    def _admit(self, change: _Change, seq: int) -> None:
        self._slot_of.update(change.slot_of_new)
        slots = list(change.slot_of_new.values())
        self._is_free[slots] = False
        self._rows.admit(change.admitted, slots, seq)
        self._blocks.admit(slots, change.blocks.prefixes)
        for new in change.admitted:
            if new.extensions and not pools(new.extensions) and reports(new.extensions):
                self._reporting = {**self._reporting, new.req_id: new.extensions}

    def _flush(self) -> None:
        for steady in self._steady:
            if steady.num_pending:
                self._rows.advance(steady.slots, steady.num_pending)
                steady.num_pending = 0
        self._blocks.count_appended()

    def _resync_rows(self, ended: Sequence[int]) -> bytes:
        is_live = ~self._is_free
        is_live[ended] = False
        slots = np.flatnonzero(is_live).astype(np.int32)
        columns = (slots, *self._rows.columns(slots), *self._blocks.lengths(slots))
        return np.stack(columns, axis=1).astype("<i4").tobytes()


def _as_message(request: NewRequest, slot: int) -> NewRequestData:
    return NewRequestData(
        slot=slot,
        req_id=request.req_id,
        num_tokens=len(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        extensions=tuple(request.extensions),
        note=request.note,
    )

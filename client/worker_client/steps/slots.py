"""Translates requests to slots: from SchedulerOutput to rpc_schema.step.ExecuteModel.

Who has which slot: assignment.py. The counts of the rows: sent_counts.py. Their block tables:
block_tables.py. The requests whose sampling waits: deferred_sampling.py. A step whose requests go
on as before is encoded in steady_steps.py, and any other one here.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum, auto
from itertools import chain

import numpy as np

from worker_client.parts.registry import Extensions
from worker_client.scheduler_output import NewRequest, SchedulerOutput, StepResult, StepValues
from worker_client.steps.assignment import SlotAssignment
from worker_client.steps.block_tables import BlockTables
from worker_client.steps.cached_blocks import CachedBlocks
from worker_client.steps.changed_step import ChangedStep
from worker_client.steps.deferred_sampling import DeferredSampling
from worker_client.steps.drafts import StepDrafts
from worker_client.steps.encoded_step import (
    Confirm,
    EncodedStep,
    SteadyRequests,
    StepEnvelope,
    pack_bits,
)
from worker_client.steps.sent_counts import RowNotes, SentCounts
from worker_client.steps.steady_steps import SteadyStep, SteadySteps
from worker_client.steps.step_checks import (
    WIRE_LIMITS,
    GroupLimits,
    ReadStep,
    more_blocks_fault,
    named_ids,
    read_step,
    repeated,
    total_fault,
    values_fault,
)
from worker_client.steps.step_fault import StepFault, refuse, wrong_ids


class _Kind(Enum):
    """Kinds of steps, by what they do."""

    DECODES = auto()
    """It only decodes, one token of each request."""
    MORE = auto()
    """Some of its requests have several tokens, such as drafts."""
    OTHER = auto()


class SlotTable:
    """The rows of the workers, as the steps that were sent leave them. Belongs to one thread. Has
    `max_num_seqs` slots."""

    def __init__(self, max_num_seqs: int, limits: GroupLimits = WIRE_LIMITS) -> None:
        """limits: the group's limits, if they are lower than a message's."""
        self.capacity = max_num_seqs
        self.limits = limits
        """The limits of each step."""
        self._assignment = SlotAssignment(max_num_seqs)
        self._rows = SentCounts(max_num_seqs, limits)
        self._blocks = BlockTables(max_num_seqs, limits)
        self._deferred = DeferredSampling(max_num_seqs)
        self._steady = SteadySteps(max_num_seqs, self._assignment, self._rows, self._blocks, limits)
        self.must_resync = False
        """The next step is sent in full: the workers may have other rows than these."""
        self.stale: set[str] = set()
        """Requests with KV of weights that were replaced, which wait until it is recomputed."""

    def __len__(self) -> int:
        return len(self._assignment.slot_of)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._assignment.slot_of

    @property
    def tables(self) -> "Sequence[SlotTable]":
        """The table of each replica: of one, this one."""
        return (self,)

    @property
    def req_ids(self) -> list[str]:
        """Ids of the requests that have a slot."""
        return list(self._assignment.slot_of)

    def slot_of(self, req_id: str) -> int:
        """Return the slot of a request; KeyError if it has none."""
        return self._assignment.slot_of[req_id]

    def awaits_sampling(self, req_id: str) -> bool:
        """Return True if the last token of a request with a slot waits to be sampled."""
        return self._assignment.slot_of[req_id] in self._deferred.slots

    def encode(
        self,
        output: SchedulerOutput,
        *,
        epoch: int,
        link: int,
        seq: int,
        confirm: Confirm | None = None,
        replica_counts: bytes = b"",
    ) -> EncodedStep:
        """Encode a step and account for it as applied. The table changes only after the step is
        checked and encoded, when nothing can fail any more.

        confirm: called just before the table changes. What it raises is raised, and nothing has
        changed then. replica_counts: see ExecuteModel.

        Raises:
            InvalidSchedulerOutput: the output breaks a rule; nothing has changed.
        """
        envelope = StepEnvelope(epoch, link, seq, confirm, replica_counts)
        kind, encoded_step = self._kind(output), None
        if kind is _Kind.DECODES:
            encoded_step = self._steady.encode(output, envelope)
        elif kind is _Kind.MORE:
            encoded_step = self._steady.encode_drafts(output, envelope)
        if encoded_step is None:
            encoded_step = self._encode_other(output, kind, envelope)
        if not isinstance(encoded_step, EncodedStep):
            refuse(encoded_step)
        return encoded_step

    def begin_steady(self, output: SchedulerOutput) -> SteadyStep | None:
        """Take the blocks of a step that goes on as before; finish_steady() or give_back() follows
        at once. Return None if it is another one, or has a fault: encode() it."""
        if self._kind(output) is not _Kind.DECODES:
            return None
        step = self._steady.begin(output)
        return step if isinstance(step, SteadyStep) else None

    def finish_steady(self, step: SteadyStep) -> None:
        """Account for a steady step that is encoded, as applied."""
        self._steady.finish(step)

    def give_back(self, step: SteadyStep) -> None:
        """Undo begin_steady()."""
        self._steady.give_back(step)

    @property
    def reporting(self) -> Mapping[str, Extensions]:
        """Extensions of the requests whose replies have more than tokens. Replaced, never
        changed."""
        return self._assignment.reporting

    def _encode_other(
        self, output: SchedulerOutput, kind: _Kind, envelope: StepEnvelope
    ) -> EncodedStep | StepFault:
        """Encode a step that may have any fault."""
        self._steady.forget_room()
        read = read_step(output, self.capacity, self.limits)
        if isinstance(read, StepFault):
            return read
        self._steady.flush()
        counts = output.num_scheduled_tokens
        steady: SteadyRequests | None = None
        if output.decode_req_ids:
            found = self._steady.find(output.decode_req_ids)
            if isinstance(found, StepFault):
                return found
            steady = found
            if steady is None:
                counts = {**dict.fromkeys(output.decode_req_ids, 1), **counts}
                if len(counts) != len(output.decode_req_ids) + len(output.num_scheduled_tokens):
                    both = chain(output.decode_req_ids, output.num_scheduled_tokens)
                    message = "it is in decode_req_ids twice, or in num_scheduled_tokens too"
                    return wrong_ids(message, "decode_req_ids", repeated(both))
            elif kind is _Kind.DECODES:
                encoded_step = self._steady.encode(output, envelope)
                if encoded_step is not None:
                    return encoded_step
        return self._encode_changed(output, steady, counts, read, envelope)

    def _kind(self, output: SchedulerOutput) -> "_Kind":
        """Return what a step does that only schedules running requests and appends blocks. Its
        fields may have any type."""
        skips: object = output.skip_drafts
        blocks: object = output.new_block_ids
        is_mapping = type(blocks) is dict or isinstance(blocks, Mapping)
        if type(skips) is not bool or not is_mapping or len(output.new_block_ids) > self.capacity:
            return _Kind.OTHER
        more = output.more_new_block_ids
        if type(more) is not tuple or more:
            num_groups = len(self.limits.block_groups)
            if more_blocks_fault(more, num_groups, self.capacity) is not None:
                return _Kind.OTHER
        try:
            if (
                self.must_resync
                or self._deferred.slots
                or output.extensions
                or output.finished_req_ids
                or output.preempted_req_ids
                or output.scheduled_new_reqs
                or output.num_samples
            ):
                return _Kind.OTHER
            decodes = not (
                output.num_scheduled_tokens or output.num_drafts or output.draft_token_ids
            )
            return _Kind.DECODES if decodes else _Kind.MORE
        except ValueError:  # an array in place of a sequence
            return _Kind.OTHER

    def encode_sampling(
        self,
        step: EncodedStep,
        values: Sequence[StepValues],
        req_ids: Collection[str] | None,
        *,
        epoch: int,
        link: int,
        seq: int,
    ) -> EncodedStep | None:
        """Encode a SampleTokens of requests that a step has deferred, and account for it; None if
        none are left. Values of requests that have left their slots since are left out. req_ids:
        some of those that are left, None for all.

        Raises:
            InvalidSchedulerOutput: the step has not deferred a request, or it was sampled, or
                values are malformed; nothing has changed.
            TooLargeError: the values do not fit into a message; nothing has changed.
        """
        check_values(values)
        chosen = self.left_of(step, req_ids)
        check_deferred(step.seq, values, req_ids, chosen.values())
        if not chosen:
            return None
        return self.encode_chosen(step, chosen, values, epoch=epoch, link=link, seq=seq)

    def left_of(self, step: EncodedStep, req_ids: Collection[str] | None) -> dict[int, str]:
        """Return the requests among these (None: all) that a step has deferred and that were not
        sampled, by slot. None are left once rows were lost."""
        if self.must_resync:
            return {}
        return {s: r for s, r in step.left.items() if req_ids is None or r in req_ids}

    def encode_chosen(
        self,
        step: EncodedStep,
        chosen: Mapping[int, str],
        values: Sequence[StepValues],
        *,
        epoch: int,
        link: int,
        seq: int,
        confirm: Confirm | None = None,
    ) -> EncodedStep:
        """Encode a SampleTokens of requests of left_of, and account for it. Values of other
        requests are left out. confirm: as in encode."""
        frames = self._deferred.encode(
            step, chosen, values, self._assignment.slot_of, StepEnvelope(epoch, link, seq, confirm)
        )
        return step.later(chosen, frames)

    def take_outcome(self, seq: int, result: StepResult) -> None:
        """Record tokens that the step `seq` counted for requests, but that they did not gain, and
        which outcomes of drafts are known: a later step tells the workers."""
        if result.refused:
            slots = self._assignment.slots_left(result.refused)
            counts = np.fromiter(result.refused.values(), np.int64, slots.size)
            has_slot = slots >= 0
            self._rows.refuse(slots[has_slot], counts[has_slot], seq)
        if result.drafts:
            slots = self._assignment.slots_left(result.drafts)
            self._rows.take_outcomes(slots[slots >= 0], seq)

    def fail(self, outputs: Iterable[SchedulerOutput]) -> frozenset[str]:
        """Undo failed steps: forget every request that took part or was to end in them, or whose
        last token waits to be sampled, and send the next step in full.

        Return the ids of those that took part.
        """
        self._steady.flush()
        lost: set[str] = set()
        for output in outputs:
            lost.update(output.decode_req_ids, output.num_scheduled_tokens, output.new_block_ids)
            lost.update(*output.more_new_block_ids)
            lost.update(new.req_id for new in output.scheduled_new_reqs)
            self._release(self._assignment.known(output.finished_req_ids, output.preempted_req_ids))
        lost.update(filter(self.awaits_sampling, self.req_ids))
        self._release(self._assignment.known(lost))
        self.must_resync = True
        return frozenset(lost)

    def drop_all(self) -> frozenset[str]:
        """Forget every request; the next step is sent in full, with no rows. Return their ids."""
        self._steady.flush()
        dropped = frozenset(self._assignment.slot_of)
        self._release(list(dropped))
        self.must_resync = True
        return dropped

    def drop(self, req_ids: Collection[str]) -> frozenset[str]:
        """Forget those of these requests that have a slot; the next step is sent in full. Return
        their ids."""
        self._steady.flush()
        dropped = self._assignment.known(req_ids)
        self._release(dropped)
        self.must_resync = True
        return frozenset(dropped)

    def drop_stale(self) -> frozenset[str]:
        """Drop the requests that wait to be recomputed, if there are any. Return their ids."""
        return self.drop(self.stale) if self.stale else frozenset()

    def withdraw(self, output: SchedulerOutput) -> frozenset[str]:
        """Drop every request, because a step was not sent. Return their ids, and those in the step,
        whose fields may have any type."""
        return self.drop_all() | named_ids(output)

    def require_resync(self) -> None:
        """Send the next step in full."""
        self.must_resync = True

    def lose_contents(self) -> None:
        """Record that the workers' KV cache has lost its contents: requests cannot begin with
        blocks that were filled before."""
        self._blocks.lose_contents()

    def leave_weights(self, planned: SchedulerOutput | None) -> None:
        """Record that other weights compute the rows from now on. Only the requests that have
        blocks filled before, or by rows that were kept, may go on with them. planned: a step that
        was made before and will be sent; its new requests may begin as it says."""
        self._steady.flush()
        new = () if planned is None else planned.scheduled_new_reqs
        self._blocks.leave_weights(frozenset(request.req_id for request in new))

    def await_recompute(self, req_ids: Iterable[str]) -> None:
        """Record that these requests, as far as they have slots, wait until their KV is recomputed,
        and no others."""
        self.stale = {req_id for req_id in req_ids if req_id in self._assignment.slot_of}

    def note_recomputed(self, req_ids: Iterable[str]) -> None:
        """Record that the present weights have computed the KV of these requests."""
        self.stale.difference_update(req_ids)

    def share_recomputed(self) -> None:
        """Record that the present weights have computed the KV of all rows: requests may begin with
        their full blocks."""
        self._steady.flush()
        self._blocks.share_recomputed()

    def with_contents(self, blocks: CachedBlocks) -> CachedBlocks:
        """Return those of these blocks that are full, as far as the table knows: the cache may have
        lost their contents, or a request that still has to fill them.

        Raises:
            ClientConfigError: a block does not exist.
        """
        self._steady.flush()
        return self._blocks.with_contents(blocks, self._rows.num_computed)

    def _encode_changed(
        self,
        output: SchedulerOutput,
        steady: SteadyRequests | None,
        counts: Mapping[str, int],
        read: ReadStep,
        envelope: StepEnvelope,
    ) -> EncodedStep | StepFault:
        change = self._check(output, steady, counts, read.new)
        if isinstance(change, StepFault):
            return change
        resync = self._resync_rows(change.members.ended) if self.must_resync else None
        bits = np.zeros(self.capacity, np.bool_) if steady is None else steady.bits.copy()
        bits[change.rows.slots] = True
        notes = self._rows.notes(bits, change.members.ended, change.rows.drafted_slots)
        bitmap = pack_bits(bits)
        frames = change.encode(envelope, bitmap, read.tokens, resync, notes, self.limits)
        if isinstance(frames, StepFault):
            return frames
        if envelope.confirm is not None:
            envelope.confirm()
        self._apply(change, notes, envelope.seq)
        self.must_resync = False
        if steady is not None:
            steady.num_pending += 1
        rows = change.rows
        encoded = EncodedStep(
            envelope.seq,
            output,
            frames,
            steady,
            rows.sampling_slots,
            rows.sampling_ids,
            self._assignment.reporting,
            pooled=rows.pooled,
            resync=resync is not None,
            deferred=change.sampling.deferred,
            num_samples={**output.num_samples},
            num_drafts={**change.drafts.counts},
        )
        if rows.num_drafts is not None and rows.num_drafts.all():
            self._steady.keep_drafts(encoded, rows, bits, bitmap)
        return encoded

    def _check(
        self,
        output: SchedulerOutput,
        steady: SteadyRequests | None,
        counts: Mapping[str, int],
        new: Sequence[NewRequest],
    ) -> ChangedStep | StepFault:
        """Check a whole step, and return its changes. Nothing changes yet."""
        members = self._assignment.check(output, steady, counts, new)
        if isinstance(members, StepFault):
            return members
        ended, slot_of_new = members.ended, members.slot_of_new
        decoding = () if steady is None else steady.req_ids
        drafts = StepDrafts.of(output)
        rows = self._rows.check(
            counts, members.slots, new, slot_of_new, output.num_samples, decoding, drafts
        )
        if isinstance(rows, StepFault):
            return rows
        num_decodes = 0 if steady is None else len(steady.req_ids)
        total = num_decodes + int(rows.num_scheduled.sum())
        fault = total_fault(total, self.limits)
        if fault is not None:
            return fault
        sampling = self._deferred.check(
            output, steady, rows, ended, self._assignment.slot_of, resync=self.must_resync
        )
        if isinstance(sampling, StepFault):
            return sampling
        blocks = self._blocks.check(
            output, new, ended, self._assignment.slot_of, slot_of_new, self._rows.num_computed
        )
        if isinstance(blocks, StepFault):
            return blocks
        return ChangedStep(members, blocks, rows, total, sampling, drafts, output.skip_drafts)

    def _apply(self, change: ChangedStep, notes: RowNotes, seq: int) -> None:
        """Account for a checked and encoded step; nothing here can fail."""
        members = change.members
        if members.ended_ids:
            self._release(members.ended_ids)
        slots = list(members.slot_of_new.values())
        self._blocks.apply(change.blocks, slots)
        self._rows.apply(change.rows, members.new, slots, seq)
        self._rows.tell(notes)
        if members.new:
            self._assignment.admit(members, slots)
        if self.must_resync:
            self._deferred.drop_held()
        if change.sampling.deferred:
            self._deferred.defer(seq, change.sampling.deferred)

    def _release(self, req_ids: Sequence[str]) -> None:
        """Free the slots of known requests, after SteadySteps.flush()."""
        if not req_ids:
            return
        slots = self._assignment.release(req_ids)
        self.stale.difference_update(req_ids)
        self._rows.release(slots)
        self._deferred.release(slots)
        self._blocks.release(slots)
        self._steady.release(slots)

    def _resync_rows(self, ended: Sequence[int]) -> bytes:
        slots = self._assignment.live(ended)
        columns = (slots, *self._rows.columns(slots), *self._blocks.lengths(slots))
        return np.stack(columns, axis=1).astype("<i4").tobytes()


def check_values(values: Sequence[StepValues]) -> None:
    """Raise InvalidSchedulerOutput if values are malformed."""
    fault = values_fault(values)
    if fault is not None:
        refuse(fault)


def check_deferred(
    seq: int,
    values: Sequence[StepValues],
    req_ids: Collection[str] | None,
    left: Collection[str],
) -> None:
    """Raise InvalidSchedulerOutput if values, or req_ids, name a request that is not left."""
    given = [("extensions", each.req_ids) for each in values]
    for field, names in (*given, ("req_ids", req_ids or ())):
        wrong = [req_id for req_id in names if req_id not in left]
        if wrong:
            refuse(wrong_ids(f"step {seq} has not deferred it", field, wrong))

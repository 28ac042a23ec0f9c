"""Translates between request ids and slots: from SchedulerOutput to rpc_schema.step.ExecuteModel,
and back from ModelRunnerOutput.

Put together from the counts of the rows (sent_counts.py), their block tables (block_tables.py) and
the requests whose sampling waits (deferred_sampling.py). A pure decode step with an unchanged set
costs nothing per request: bitmap, slots and the ids of the reply are kept in SteadyRequests, whose
rows' counts are brought up to date only when they are read. SteadyDrafts is the same for decodes
with as many drafts as before.
"""

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum, auto
from itertools import chain, repeat
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rpc_schema.codec import Frame, encode_step
from rpc_schema.step import ExecuteModel, ModelRunnerOutput, NewRequestData, SampleTokens
from worker_client.parts.registry import Extensions, pools, reports
from worker_client.scheduler_output import NewRequest, SchedulerOutput, StepResult, StepValues
from worker_client.steps.block_tables import BlockTables, CheckedBlocks, GivenBlocks
from worker_client.steps.cached_blocks import CachedBlocks
from worker_client.steps.deferred_sampling import DeferredSampling
from worker_client.steps.drafts import DraftedSamples, StepDrafts
from worker_client.steps.encoded_step import (
    EncodedStep,
    SteadyRequests,
    decode_reply,
    pack_bits,
)
from worker_client.steps.sent_counts import NO_NOTES, RowNotes, ScheduledRows, SentCounts, pairs
from worker_client.steps.steady_drafts import SteadyDrafts
from worker_client.steps.step_checks import MAX_ADMITTED_TOKENS as MAX_ADMITTED_TOKENS
from worker_client.steps.step_checks import (
    WIRE_LIMITS,
    GroupLimits,
    ReadStep,
    encode_checked,
    more_blocks_fault,
    named_ids,
    read_step,
    repeated,
    unknown_request,
    values_fault,
)
from worker_client.steps.step_fault import StepFault, not_running, refuse, wrong_ids
from worker_client.steps.step_values import ALL_AT_ONCE, StepSampling, named, sampling_of

MAX_STEADY = 16
"""Number of steady sets that are kept: more than a pipeline has micro-batches."""

Int32s = NDArray[np.int32]
_NONE_NEW: Mapping[str, int] = {}

Confirm: TypeAlias = Callable[[], None]
_Ids: TypeAlias = tuple[int, int, int, Confirm | None]
"""Epoch, link and seq of a step, and what is called before it is accounted for."""


class _Kind(Enum):
    """Kinds of steps, by what they do."""

    DECODES = auto()
    """It only decodes, one token of each request."""
    MORE = auto()
    """Some of its requests have several tokens, such as drafts."""
    OTHER = auto()


class _Members(NamedTuple):
    """Requests of a checked step."""

    ended_ids: Sequence[str]
    ended: Sequence[int]
    """Slots of those, ascending."""
    slot_of_new: Mapping[str, int]
    new: Sequence[NewRequest]
    slots: Int32s
    """Slots of the requests of num_scheduled_tokens."""


class _Change(NamedTuple):
    """Changes that a checked step makes to the table."""

    members: _Members
    blocks: CheckedBlocks
    rows: ScheduledRows
    total: int
    """Scheduled tokens, decodes included."""
    sampling: StepSampling
    drafts: StepDrafts
    skips_drafts: bool
    """See SchedulerOutput.skip_drafts."""


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
        self._steady_drafts: list[SteadyDrafts] = []
        """The rows of the last steps that only decode, with drafts; a row is in one of them."""
        self._must_resync = False
        self._stale: set[str] = set()

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

    @property
    def limits(self) -> GroupLimits:
        """The limits of each step."""
        return self._limits

    @property
    def must_resync(self) -> bool:
        """True if the next step is sent in full: the workers may have other rows than these."""
        return self._must_resync

    @property
    def stale(self) -> Collection[str]:
        """Requests with KV of weights that were replaced, which wait until it is recomputed."""
        return self._stale

    def awaits_sampling(self, req_id: str) -> bool:
        """Return True if the last token of a request with a slot waits to be sampled."""
        return self._slot_of[req_id] in self._deferred.slots

    def encode(
        self,
        output: SchedulerOutput,
        *,
        epoch: int,
        link: int,
        seq: int,
        confirm: Confirm | None = None,
    ) -> EncodedStep:
        """Encode a step and account for it as applied. The table changes only after the step is
        checked and encoded, when nothing can fail any more.

        confirm: called just before the table changes. What it raises is raised, and nothing has
        changed then.

        Raises:
            InvalidSchedulerOutput: the output breaks a rule; nothing has changed.
        """
        ids = epoch, link, seq, confirm
        for steady in self._steady:
            if steady.req_ids is output.decode_req_ids:
                break
        else:
            steady = None
        kind = self._kind(output)
        drafts = self._find_drafts(output) if kind is _Kind.MORE else None
        if steady is not None and kind is _Kind.DECODES and not self._settles(steady):
            encoded_step = self._encode_steady(output, steady, ids)
        elif drafts is not None:
            encoded_step = self._encode_drafts(output, drafts, ids)
        else:
            encoded_step = self._encode_other(output, steady, ids)
        if drafts is None and self._steady_drafts:  # the step may have tokens of their rows
            for own in self._steady_drafts:
                own.num_left = 0
        if not isinstance(encoded_step, EncodedStep):
            refuse(encoded_step)
        return encoded_step

    def _encode_other(
        self, output: SchedulerOutput, steady: SteadyRequests | None, ids: _Ids
    ) -> EncodedStep | StepFault:
        """Encode a step that may have any fault. steady: the requests of decode_req_ids, if they
        are known as such."""
        read = read_step(output, self.capacity, self._limits)
        if isinstance(read, StepFault):
            return read
        self._flush()
        counts = output.num_scheduled_tokens
        if steady is None and output.decode_req_ids:
            found = self._make_steady(output.decode_req_ids)
            if isinstance(found, StepFault):
                return found
            if found is None:
                counts = {**dict.fromkeys(output.decode_req_ids, 1), **counts}
                if len(counts) != len(output.decode_req_ids) + len(output.num_scheduled_tokens):
                    both = chain(output.decode_req_ids, output.num_scheduled_tokens)
                    message = "it is in decode_req_ids twice, or in num_scheduled_tokens too"
                    return wrong_ids(message, "decode_req_ids", repeated(both))
            elif self._kind(output) is _Kind.DECODES and not self._settles(found):
                return self._encode_steady(output, found, ids)
            steady = found
        return self._encode_changed(output, steady, counts, read, ids)

    def _find_drafts(self, output: SchedulerOutput) -> SteadyDrafts | None:
        """Return the rows of a step that go on as before, with as many drafts."""
        for steady in self._steady_drafts:
            if steady.go_on_in(output):
                if not steady.num_left:
                    self._flush_counts()
                    steady.num_left = self._rows.room(steady.slots) // steady.most_tokens
                return steady if steady.num_left > 0 else None
        return None

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
            num_groups = len(self._limits.block_groups)
            if more_blocks_fault(more, num_groups, self.capacity) is not None:
                return _Kind.OTHER
        try:
            if (
                self._must_resync
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

    def _settles(self, steady: SteadyRequests) -> bool:
        """Return True if a step of these requests makes counts exact that were bounds."""
        drafted = self._rows.drafted
        return drafted.has_known and bool(drafted.to_settle(steady.bits).size)

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
        if self._must_resync:
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
        sampling = self._sampling_later(chosen, values)
        request = SampleTokens(
            epoch=epoch,
            link=link,
            seq=seq,
            step_seq=step.seq,
            extensions=sampling.extensions,
            slots=None if len(chosen) == len(step.left) else named(chosen),
        )
        frames = encode_step(request, sampling.frames)
        if confirm is not None:
            confirm()
        self._deferred.take(step, chosen, self._slot_of)
        return step.later(chosen, frames)

    def _sampling_later(
        self, chosen: Mapping[int, str], values: Sequence[StepValues]
    ) -> StepSampling:
        staying = {name: slot for slot, name in chosen.items() if self._slot_of.get(name) == slot}
        sampling = sampling_of(values, staying)
        if isinstance(sampling, StepFault):
            refuse(sampling)
        return sampling._replace(deferred=ALL_AT_ONCE.deferred)

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

    def drop(self, req_ids: Collection[str]) -> frozenset[str]:
        """Forget those of these requests that have a slot; the next step is sent in full. Return
        their ids."""
        self._flush()
        dropped = self._known(req_ids)
        self._release(dropped)
        self._must_resync = True
        return frozenset(dropped)

    def drop_stale(self) -> frozenset[str]:
        """Drop the requests that wait to be recomputed, if there are any. Return their ids."""
        return self.drop(self._stale) if self._stale else frozenset()

    def lose_contents(self) -> None:
        """Record that the workers' KV cache has lost its contents: requests cannot begin with
        blocks that were filled before."""
        self._blocks.lose_contents()

    def leave_weights(self, planned: SchedulerOutput | None) -> None:
        """Record that other weights compute the rows from now on. Only the requests that have
        blocks filled before, or by rows that were kept, may go on with them. planned: a step that
        was made before and will be sent; its new requests may begin as it says."""
        self._flush()
        new = () if planned is None else planned.scheduled_new_reqs
        self._blocks.leave_weights(frozenset(request.req_id for request in new))

    def await_recompute(self, req_ids: Iterable[str]) -> None:
        """Record that these requests, as far as they have slots, wait until their KV is recomputed,
        and no others."""
        self._stale = {req_id for req_id in req_ids if req_id in self._slot_of}

    def note_recomputed(self, req_ids: Iterable[str]) -> None:
        """Record that the present weights have computed the KV of these requests."""
        self._stale.difference_update(req_ids)

    def share_recomputed(self) -> None:
        """Record that the present weights have computed the KV of all rows: requests may begin with
        their full blocks."""
        self._flush()
        self._blocks.share_recomputed()

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

    def _make_steady(self, req_ids: tuple[str, ...]) -> SteadyRequests | StepFault | None:
        """Return those of decode_req_ids; None where not all of them are at their last token and
        sample."""
        slots = self._slots(req_ids)
        if isinstance(slots, StepFault):
            return slots
        if not self._rows.can_decode(slots):
            return None
        steady = SteadyRequests(req_ids, slots, self.capacity)
        if int(np.count_nonzero(steady.bits)) != len(req_ids):
            twice = repeated(req_ids)
            return wrong_ids("it is in decode_req_ids twice", "decode_req_ids", twice)
        if len(req_ids) > self._limits.max_num_batched_tokens:
            return self._too_many_tokens(len(req_ids))
        if len(self._steady) == MAX_STEADY:
            self._steady.clear()
        self._steady.append(steady)
        return steady

    def _encode_steady(
        self, output: SchedulerOutput, steady: SteadyRequests, ids: _Ids
    ) -> EncodedStep | StepFault:
        epoch, link, seq, confirm = ids
        blocks = self._blocks.take_free(output, self._slot_of) or self._take_blocks(output)
        if isinstance(blocks, StepFault):
            return blocks
        notes = self._rows.notes(steady.bits)
        message = ExecuteModel(
            epoch=epoch,
            link=link,
            seq=seq,
            total_num_scheduled_tokens=len(steady.req_ids),
            scheduled=steady.bitmap,
            new_block_slots=blocks.slots,
            new_block_ids=blocks.ids,
            new_block_groups=blocks.groups,
            corrections=notes.corrections,
            skip_drafts=output.skip_drafts,
        )
        frames = self._confirmed(message, blocks, confirm)
        steady.num_pending += 1
        if notes is not NO_NOTES:
            self._rows.tell(notes)
        if blocks.slots:
            self._blocks.append_later(blocks)
        return EncodedStep(seq, output, frames, steady, (), (), self._reporting)

    def _encode_drafts(
        self, output: SchedulerOutput, steady: SteadyDrafts, ids: _Ids
    ) -> EncodedStep | StepFault:
        """Encode a step whose rows go on as before, with as many drafts."""
        epoch, link, seq, confirm = ids
        drafts = StepDrafts(steady.drafts, output.draft_token_ids)
        fault = drafts.tokens_fault(self._limits.vocab_size)
        if fault is not None:
            return fault
        blocks = self._blocks.take_free(output, self._slot_of) or self._take_blocks(output)
        if isinstance(blocks, StepFault):
            return blocks
        notes = self._rows.notes(steady.bits, drafted=steady.drafted_slots)
        brought = drafts.token_ids
        message = ExecuteModel(
            epoch=epoch,
            link=link,
            seq=seq,
            total_num_scheduled_tokens=steady.total,
            scheduled=steady.bitmap,
            num_scheduled_tokens=steady.num_scheduled,
            new_block_slots=blocks.slots,
            new_block_ids=blocks.ids,
            new_block_groups=blocks.groups,
            corrections=notes.corrections,
            num_drafts=steady.num_drafts,
            draft_token_ids=drafts.token_column(steady.drafted_req_ids) if brought else b"",
            settled=named(notes.settled.tolist()) if notes.settled.size else b"",
            skip_drafts=output.skip_drafts,
        )
        frames = self._confirmed(message, blocks, confirm)
        steady.num_pending += 1
        steady.num_left -= 1
        self._rows.drafted.draft(steady.drafted_slots, seq)
        self._rows.tell(notes)
        if blocks.slots:
            self._blocks.append_later(blocks)
        return EncodedStep(
            seq,
            output,
            frames,
            None,
            (),
            (),
            self._reporting,
            num_drafts=steady.drafts,
            steady_drafts=steady,
        )

    def _take_blocks(self, output: SchedulerOutput) -> GivenBlocks | StepFault:
        """Take the blocks that a step gives to running requests: several to one, for example."""
        self._flush()
        return self._blocks.take(output, self._slot_of, self._rows.num_computed)

    def _confirmed(
        self, message: ExecuteModel, blocks: GivenBlocks, confirm: Confirm | None
    ) -> list[Frame]:
        """Return the frames of a step that has taken these blocks, once it is confirmed."""
        try:
            frames = encode_step(message)
            if confirm is not None:
                confirm()
        except BaseException:
            self._blocks.give_back(blocks)
            raise
        return frames

    def _encode_changed(
        self,
        output: SchedulerOutput,
        steady: SteadyRequests | None,
        counts: Mapping[str, int],
        read: ReadStep,
        ids: _Ids,
    ) -> EncodedStep | StepFault:
        change = self._check(output, steady, counts, read.new)
        if isinstance(change, StepFault):
            return change
        resync = self._resync_rows(change.members.ended) if self._must_resync else None
        bits = np.zeros(self.capacity, np.bool_) if steady is None else steady.bits.copy()
        bits[change.rows.slots] = True
        notes = self._rows.notes(bits, change.members.ended, change.rows.drafted_slots)
        bitmap = pack_bits(bits)
        frames = self._encode_change(bitmap, change, read.tokens, resync, notes, ids)
        if isinstance(frames, StepFault):
            return frames
        if ids[3] is not None:
            ids[3]()
        self._apply(change, notes, ids[2])
        self._must_resync = False
        if steady is not None:
            steady.num_pending += 1
        rows = change.rows
        encoded = EncodedStep(
            ids[2],
            output,
            frames,
            steady,
            rows.sampling_slots,
            rows.sampling_ids,
            self._reporting,
            pooled=rows.pooled,
            resync=resync is not None,
            deferred=change.sampling.deferred,
            num_samples={**output.num_samples},
            num_drafts={**change.drafts.counts},
        )
        if rows.num_drafts is not None and rows.num_drafts.all():
            self._keep_drafts(encoded, rows, bits, bitmap)
        return encoded

    def _keep_drafts(
        self, step: EncodedStep, rows: ScheduledRows, bits: NDArray[np.bool_], bitmap: bytes
    ) -> None:
        """Keep the rows of a sent step, all of which decode; rows: those with drafts."""
        self._steady_drafts = [own for own in self._steady_drafts if not own.bits[rows.slots].any()]
        samples = DraftedSamples.of(step.sampled()[1], step.num_drafts)
        if len(samples.req_ids) == step.output.num_requests:  # none waits for its mask
            step.steady_drafts = SteadyDrafts(step.output, rows, bits, bitmap, samples)
            self._steady_drafts.append(step.steady_drafts)

    def _check(
        self,
        output: SchedulerOutput,
        steady: SteadyRequests | None,
        counts: Mapping[str, int],
        new: Sequence[NewRequest],
    ) -> _Change | StepFault:
        """Check a whole step, and return its changes. Nothing changes yet."""
        members = self._members(output, steady, counts, new)
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
        if total > self._limits.max_num_batched_tokens:
            return self._too_many_tokens(total)
        sampling = self._sampling(output, steady, rows, ended)
        if isinstance(sampling, StepFault):
            return sampling
        blocks = self._blocks.check(
            output, new, ended, self._slot_of, slot_of_new, self._rows.num_computed
        )
        if isinstance(blocks, StepFault):
            return blocks
        return _Change(members, blocks, rows, total, sampling, drafts, output.skip_drafts)

    def _members(
        self,
        output: SchedulerOutput,
        steady: SteadyRequests | None,
        counts: Mapping[str, int],
        new: Sequence[NewRequest],
    ) -> _Members | StepFault:
        """Check who takes part in a step, who begins and who ends."""
        try:
            ended_ids = self._known(output.finished_req_ids, output.preempted_req_ids)
        except TypeError:  # not hashable
            names = chain(output.finished_req_ids, output.preempted_req_ids)
            wrong = [name for name in names if not isinstance(name, str)]
            return wrong_ids("request ids are strings", "finished_req_ids", wrong)
        ended, gone = sorted(self._slot_of[req_id] for req_id in ended_ids), set(ended_ids)
        slot_of_new = self._place(new, gone, ended) if new else {}
        if isinstance(slot_of_new, StepFault):
            return slot_of_new
        fault = self._ended_fault(output, gone.difference(slot_of_new), ended, steady, counts)
        fault = fault or self._standing_fault(output, gone, slot_of_new)
        if fault is not None:
            return fault
        slots = self._slots([*counts], slot_of_new)
        if isinstance(slots, StepFault):
            return slots
        if steady is not None and steady.bits[slots].any():
            both = counts.keys() & set(steady.req_ids)
            message = "it is in decode_req_ids and in num_scheduled_tokens"
            return wrong_ids(message, "decode_req_ids", both)
        return _Members(ended_ids, ended, slot_of_new, new, slots)

    def _place(
        self, new: Sequence[NewRequest], gone: Collection[str], ended: Sequence[int]
    ) -> Mapping[str, int] | StepFault:
        """Return the slots of new requests, the lowest free ones."""
        names = [request.req_id for request in new]
        if len({*names}) < len(new):
            return wrong_ids("it is new twice in one step", "scheduled_new_reqs", repeated(names))
        taken = [name for name in names if name in self._slot_of and name not in gone]
        if taken:
            return wrong_ids("it is new, but has a slot", "scheduled_new_reqs", taken)
        is_free = self._is_free.copy()
        is_free[ended] = True
        slots: list[int] = np.flatnonzero(is_free)[: len(new)].tolist()
        if len(slots) < len(new):
            return StepFault(
                f"only {len(slots)} of max_num_seqs = {self.capacity} slots are free",
                field="scheduled_new_reqs",
                value=f"{len(new)} requests",
                fix="admit some later",
            )
        return dict(zip(names, slots, strict=True))

    def _ended_fault(
        self,
        output: SchedulerOutput,
        gone: Collection[str],
        ended: Sequence[int],
        steady: SteadyRequests | None,
        counts: Mapping[str, int],
    ) -> StepFault | None:
        """Check that no request ends and is scheduled. gone: those that do not restart."""
        decodes_on = steady is not None and steady.bits[ended].any()
        if not decodes_on and counts.keys().isdisjoint(gone):
            return None
        both = {*counts, *output.decode_req_ids}.intersection(gone)
        again = [name for name in output.decode_req_ids if self._slot_of.get(name) in ended]
        message = "it is finished and scheduled in the same step"
        return wrong_ids(message, "finished_req_ids", both or again)

    def _standing_fault(
        self, output: SchedulerOutput, gone: Collection[str], slot_of_new: Mapping[str, int]
    ) -> StepFault | None:
        """Check that blocks are appended only to requests that continue; new requests bring their
        own."""
        for given in (output.new_block_ids, *output.more_new_block_ids):
            for req_id in given:
                if req_id in slot_of_new or req_id in gone or req_id not in self._slot_of:
                    return not_running(req_id, given[req_id])
        return None

    def _too_many_tokens(self, num_tokens: int) -> StepFault:
        most = self._limits.max_num_batched_tokens
        return StepFault(
            f"the step has more tokens than max_num_batched_tokens = {most}",
            field="num_scheduled_tokens",
            value=num_tokens,
            fix=f"schedule at most {most} tokens, decodes included",
        )

    def _sampling(
        self,
        output: SchedulerOutput,
        steady: SteadyRequests | None,
        rows: ScheduledRows,
        ended: Sequence[int],
    ) -> StepSampling | StepFault:
        """Check what a step samples at once and later, and under which masks."""
        fault = None
        if self._deferred.slots:
            decoding = [] if steady is None else steady.slots.tolist()
            scheduled = chain(rows.slots.tolist(), decoding)
            fault = self._deferred.waiting_fault(scheduled, ended, self._slot_of)
        if fault is not None:
            return fault
        if not output.extensions:
            return ALL_AT_ONCE
        slot_of = dict(zip(rows.sampling_ids, rows.sampling_slots, strict=True))
        if steady is not None:
            slot_of |= zip(steady.sorted_req_ids, steady.slots.tolist(), strict=True)
        sampling = sampling_of(output.extensions, slot_of)
        if isinstance(sampling, StepSampling) and sampling.deferred:
            fault = self._deferred.room_fault(len(slot_of), resync=self._must_resync)
        return fault or sampling

    def _encode_change(
        self,
        scheduled: bytes,
        change: _Change,
        tokens: Sequence[Frame],
        resync: bytes | None,
        notes: RowNotes,
        ids: _Ids,
    ) -> list[Frame] | StepFault:
        """Encode a checked step. scheduled: its slots as a bitmap."""
        rows, new, slot_of_new = change.rows, change.members.new, change.members.slot_of_new
        drafts, draft_ids = b"", b""
        if rows.num_drafts is not None:
            drafts = _chosen(rows.slots, rows.num_drafts, rows.num_drafts > 0)
            draft_ids = change.drafts.token_column(rows.drafted_ids)
        message = ExecuteModel(
            epoch=ids[0],
            link=ids[1],
            seq=ids[2],
            total_num_scheduled_tokens=change.total,
            scheduled=scheduled,
            num_scheduled_tokens=_chosen(rows.slots, rows.num_scheduled, rows.num_scheduled != 1),
            new_block_slots=change.blocks.given.slots,
            new_block_ids=change.blocks.given.ids,
            new_block_groups=change.blocks.given.groups,
            finished=b"" if resync is not None else array("H", change.members.ended).tobytes(),
            scheduled_new_reqs=tuple([_as_message(r, slot_of_new[r.req_id]) for r in new]),
            resync=resync,
            deferred=change.sampling.bitmap,
            extensions=change.sampling.extensions,
            corrections=notes.corrections,
            num_drafts=drafts,
            draft_token_ids=draft_ids,
            settled=named(notes.settled.tolist()) if notes.settled.size else b"",
            num_samples=_chosen(rows.slots, rows.num_samples, rows.num_samples > 1),
            skip_drafts=change.skips_drafts,
        )
        return encode_checked(message, [*tokens, *change.sampling.frames], new, self._limits)

    def take_outcome(self, seq: int, result: StepResult) -> None:
        """Record tokens that the step `seq` counted for requests, but that they did not gain, and
        which outcomes of drafts are known: a later step tells the workers."""
        if result.refused:
            slots = self._slots_left(result.refused)
            counts = np.fromiter(result.refused.values(), np.int64, slots.size)
            has_slot = slots >= 0
            self._rows.refuse(slots[has_slot], counts[has_slot], seq)
        if result.drafts:
            slots = self._slots_left(result.drafts)
            self._rows.take_outcomes(slots[slots >= 0], seq)

    def _slots_left(self, req_ids: Collection[str]) -> NDArray[np.int64]:
        """Return the slots of requests, -1 for those that have none any more."""
        return np.fromiter(map(self._slot_of.get, req_ids, repeat(-1)), np.int64, len(req_ids))

    def _apply(self, change: _Change, notes: RowNotes, seq: int) -> None:
        """Account for a checked and encoded step; nothing here can fail."""
        members = change.members
        if members.ended_ids:
            self._release(members.ended_ids)
        slots = list(members.slot_of_new.values())
        self._blocks.apply(change.blocks, slots)
        self._rows.apply(change.rows, members.new, slots, seq)
        self._rows.tell(notes)
        if members.new:
            self._admit(members, slots)
        if self._must_resync:
            self._deferred.drop_held()
        if change.sampling.deferred:
            self._deferred.defer(seq, change.sampling.deferred)

    def _slots(
        self, req_ids: Sequence[str], slot_of_new: Mapping[str, int] = _NONE_NEW
    ) -> Int32s | StepFault:
        slot_of = self._slot_of
        if slot_of_new:
            slot_of = {req_id: slot_of[req_id] for req_id in req_ids if req_id in slot_of}
            slot_of.update(slot_of_new)
        try:
            return np.fromiter(map(slot_of.__getitem__, req_ids), np.int32, len(req_ids))
        except (KeyError, TypeError):
            unknown = next(r for r in req_ids if not isinstance(r, str) or r not in slot_of)
            return unknown_request(unknown)

    def _known(self, *groups: Iterable[str]) -> list[str]:
        """Return those that have a slot, each once. Raises TypeError: one is not hashable."""
        return list(dict.fromkeys([name for name in chain(*groups) if name in self._slot_of]))

    def _release(self, req_ids: Sequence[str]) -> None:
        """Free the slots of known requests, and drop the steady sets that name them. Call _flush()
        first: otherwise pending counts of rows and blocks would be lost, or would go to the slots'
        next requests."""
        if not req_ids:
            return
        slots = [self._slot_of.pop(req_id) for req_id in req_ids]
        self._stale.difference_update(req_ids)
        if not self._reporting.keys().isdisjoint(req_ids):
            gone = set(req_ids)
            self._reporting = {k: v for k, v in self._reporting.items() if k not in gone}
        self._is_free[slots] = True
        self._rows.release(slots)
        self._deferred.release(slots)
        self._blocks.release(slots)
        self._steady = [steady for steady in self._steady if not steady.bits[slots].any()]
        self._steady_drafts = [own for own in self._steady_drafts if not own.bits[slots].any()]

    def _admit(self, members: _Members, slots: Sequence[int]) -> None:
        self._slot_of.update(members.slot_of_new)
        self._is_free[slots] = False
        for new in members.new:
            if new.extensions and not pools(new.extensions) and reports(new.extensions):
                self._reporting = {**self._reporting, new.req_id: new.extensions}

    def _flush(self) -> None:
        self._flush_counts()
        self._blocks.count_appended()

    def _flush_counts(self) -> None:
        for steady in self._steady:
            if steady.num_pending:
                self._rows.advance(steady.slots, steady.num_pending)
                steady.num_pending = 0
        for drafts in self._steady_drafts:
            if drafts.num_pending:
                self._rows.advance(drafts.slots, drafts.num_pending * drafts.tokens_of_slots)
                drafts.num_pending = 0

    def _resync_rows(self, ended: Sequence[int]) -> bytes:
        is_live = ~self._is_free
        is_live[ended] = False
        slots = np.flatnonzero(is_live).astype(np.int32)
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


def _chosen(slots: Int32s, numbers: Int32s, chosen: NDArray[np.bool_]) -> bytes:
    """Return pairs (slot, number) of the chosen rows."""
    return pairs(slots[chosen], numbers[chosen])


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

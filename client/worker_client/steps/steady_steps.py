"""Steps whose requests go on as before: each decodes one token, or has as many drafts as in the
step before. Their messages cost nothing per request: what stays the same is kept in SteadyRequests
and SteadyDrafts, and the counts of their rows are brought up to date only when they are read."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rpc_schema.codec import Frame, encode_step
from rpc_schema.step import ExecuteModel
from worker_client.scheduler_output import SchedulerOutput
from worker_client.steps.assignment import SlotAssignment
from worker_client.steps.block_tables import BlockTables, GivenBlocks
from worker_client.steps.drafts import DraftedSamples, StepDrafts
from worker_client.steps.encoded_step import (
    Confirm,
    EncodedStep,
    SteadyRequests,
    StepEnvelope,
)
from worker_client.steps.sent_counts import NO_NOTES, RowNotes, ScheduledRows, SentCounts
from worker_client.steps.steady_drafts import SteadyDrafts
from worker_client.steps.step_checks import GroupLimits, repeated, total_fault
from worker_client.steps.step_fault import StepFault, wrong_ids
from worker_client.steps.step_values import named

MAX_STEADY: Final = 16
"""Number of steady sets that are kept: more than a pipeline has micro-batches."""


class SteadyStep(Struct, frozen=True, gc=False):
    """A step that only decodes, before it is sent. Its blocks are taken; the rest of it is not
    accounted for."""

    steady: SteadyRequests
    blocks: GivenBlocks
    notes: RowNotes
    skips_drafts: bool
    """See SchedulerOutput.skip_drafts."""

    def message(self, envelope: StepEnvelope) -> ExecuteModel:
        """Return its message."""
        steady, blocks = self.steady, self.blocks
        return ExecuteModel(
            epoch=envelope.epoch,
            link=envelope.link,
            seq=envelope.seq,
            total_num_scheduled_tokens=len(steady.req_ids),
            scheduled=steady.bitmap,
            new_block_slots=blocks.slots,
            new_block_ids=blocks.ids,
            new_block_groups=blocks.groups,
            corrections=self.notes.corrections,
            skip_drafts=self.skips_drafts,
            replica_counts=envelope.replica_counts,
        )


class SteadySteps:
    """The steady sets of a SlotTable, and the counts that its rows and blocks still lack."""

    def __init__(
        self,
        num_slots: int,
        assignment: SlotAssignment,
        rows: SentCounts,
        blocks: BlockTables,
        limits: GroupLimits,
    ) -> None:
        self._num_slots = num_slots
        self._assignment = assignment
        self._rows = rows
        self._blocks = blocks
        self._limits = limits
        self._sets: list[SteadyRequests] = []
        """Requests of the last values of decode_req_ids."""
        self._idle = SteadyRequests((), np.zeros(0, np.int32), num_slots)
        """Those of steps without requests."""
        self._drafted: list[SteadyDrafts] = []
        """The rows of the last steps that only decode, with drafts; a row is in one of them."""

    def find(self, req_ids: tuple[str, ...]) -> SteadyRequests | StepFault | None:
        """Return the requests of decode_req_ids, which are kept from here on; None where not all of
        them are at their last token and sample. Call flush() before."""
        for steady in self._sets:
            if steady.req_ids is req_ids:
                return steady
        slots = self._assignment.slots(req_ids)
        if isinstance(slots, StepFault):
            return slots
        if not self._rows.can_decode(slots):
            return None
        steady = SteadyRequests(req_ids, slots, self._num_slots)
        if int(np.count_nonzero(steady.bits)) != len(req_ids):
            twice = repeated(req_ids)
            return wrong_ids("it is in decode_req_ids twice", "decode_req_ids", twice)
        fault = total_fault(len(req_ids), self._limits)
        if fault is not None:
            return fault
        if len(self._sets) == MAX_STEADY:
            self._sets.clear()
        self._sets.append(steady)
        return steady

    def keep_drafts(
        self, step: EncodedStep, rows: ScheduledRows, bits: NDArray[np.bool_], bitmap: bytes
    ) -> None:
        """Keep the rows of a sent step, all of which decode; rows: those with drafts."""
        self._drafted = [own for own in self._drafted if not own.bits[rows.slots].any()]
        samples = DraftedSamples.of(step.sampled()[1], step.num_drafts)
        if len(samples.req_ids) == step.output.num_requests:  # none waits for its mask
            step.steady_drafts = SteadyDrafts(step.output, rows, bits, bitmap, samples)
            self._drafted.append(step.steady_drafts)

    def forget_room(self) -> None:
        """Record that another step is sent, which may have tokens of the rows with drafts."""
        for own in self._drafted:
            own.num_left = 0

    def encode(
        self, output: SchedulerOutput, envelope: StepEnvelope
    ) -> EncodedStep | StepFault | None:
        """Encode a step that only decodes, and account for it. Return None where begin does."""
        step = self.begin(output)
        if not isinstance(step, SteadyStep):
            return step
        frames = self._confirmed(step.message(envelope), step.blocks, envelope.confirm)
        self.finish(step)
        reporting = self._assignment.reporting
        return EncodedStep(envelope.seq, output, frames, step.steady, (), (), reporting)

    def begin(self, output: SchedulerOutput) -> SteadyStep | StepFault | None:
        """Take the blocks of a step that only decodes; finish() or give_back() follows. Return None
        if its requests are not known as such, or it makes counts exact that were bounds."""
        for steady in self._sets:
            if steady.req_ids is output.decode_req_ids:
                break
        else:
            if not _is_idle(output):
                return None
            steady = self._idle
        drafted = self._rows.drafted
        if drafted.has_known and drafted.to_settle(steady.bits).size:
            return None
        if self._drafted:
            self.forget_room()
        slot_of = self._assignment.slot_of
        blocks = self._blocks.take_free(output, slot_of) or self._take_blocks(output)
        if isinstance(blocks, StepFault):
            return blocks
        return SteadyStep(steady, blocks, self._rows.notes(steady.bits), output.skip_drafts)

    def finish(self, step: SteadyStep) -> None:
        """Account for a step that is encoded."""
        step.steady.num_pending += 1
        if step.notes is not NO_NOTES:
            self._rows.tell(step.notes)
        if step.blocks.slots:
            self._blocks.append_later(step.blocks)

    def give_back(self, step: SteadyStep) -> None:
        """Undo begin(): the step is not sent."""
        self._blocks.give_back(step.blocks)

    def encode_drafts(
        self, output: SchedulerOutput, envelope: StepEnvelope
    ) -> EncodedStep | StepFault | None:
        """Encode a step whose rows go on as before, with as many drafts, and account for it. Return
        None if they do not, or may not have room."""
        for steady in self._drafted:
            if steady.go_on_in(output):
                break
        else:
            return None
        if not steady.num_left:
            self._flush_counts()
            steady.num_left = self._rows.room(steady.slots) // steady.most_tokens
        if steady.num_left <= 0:
            return None
        drafts = StepDrafts(steady.drafts, output.draft_token_ids)
        fault = drafts.tokens_fault(self._limits.vocab_size)
        if fault is not None:
            return fault
        slot_of = self._assignment.slot_of
        blocks = self._blocks.take_free(output, slot_of) or self._take_blocks(output)
        if isinstance(blocks, StepFault):
            return blocks
        notes = self._rows.notes(steady.bits, drafted=steady.drafted_slots)
        brought = drafts.token_ids
        message = ExecuteModel(
            epoch=envelope.epoch,
            link=envelope.link,
            seq=envelope.seq,
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
            replica_counts=envelope.replica_counts,
        )
        frames = self._confirmed(message, blocks, envelope.confirm)
        steady.num_pending += 1
        steady.num_left -= 1
        self._rows.drafted.draft(steady.drafted_slots, envelope.seq)
        self._rows.tell(notes)
        if blocks.slots:
            self._blocks.append_later(blocks)
        return EncodedStep(
            envelope.seq,
            output,
            frames,
            None,
            (),
            (),
            self._assignment.reporting,
            num_drafts=steady.drafts,
            steady_drafts=steady,
        )

    def flush(self) -> None:
        """Bring the counts of all rows and their blocks up to date."""
        self._flush_counts()
        self._blocks.count_appended()

    def release(self, slots: Sequence[int]) -> None:
        """Drop the steady sets that have one of these slots. Call flush() before: otherwise counts
        of rows and blocks would be lost, or would go to the slots' next requests."""
        self._sets = [steady for steady in self._sets if not steady.bits[slots].any()]
        self._drafted = [own for own in self._drafted if not own.bits[slots].any()]

    def _flush_counts(self) -> None:
        for steady in self._sets:
            if steady.num_pending:
                self._rows.advance(steady.slots, steady.num_pending)
                steady.num_pending = 0
        for drafts in self._drafted:
            if drafts.num_pending:
                self._rows.advance(drafts.slots, drafts.num_pending * drafts.tokens_of_slots)
                drafts.num_pending = 0

    def _take_blocks(self, output: SchedulerOutput) -> GivenBlocks | StepFault:
        """Take the blocks that a step gives to running requests: several to one, for example."""
        self.flush()
        return self._blocks.take(output, self._assignment.slot_of, self._rows.num_computed)

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


def _is_idle(output: SchedulerOutput) -> bool:
    """Return True if a step has nothing in any field, whose types are right too."""
    sequences = (
        output.decode_req_ids,
        output.scheduled_new_reqs,
        output.finished_req_ids,
        output.preempted_req_ids,
        output.extensions,
    )
    mappings = (
        output.num_scheduled_tokens,
        output.new_block_ids,
        output.num_samples,
        output.num_drafts,
        output.draft_token_ids,
    )
    return all(type(own) in (tuple, list) and not own for own in sequences) and all(
        type(own) is dict and not own for own in mappings
    )

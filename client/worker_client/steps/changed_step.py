"""A step that changes more than the tokens of its rows, once it is checked; and its message."""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rpc_schema.codec import Frame
from rpc_schema.step import ExecuteModel, NewRequestData
from worker_client.scheduler_output import NewRequest
from worker_client.steps.assignment import Members
from worker_client.steps.block_tables import CheckedBlocks
from worker_client.steps.drafts import StepDrafts
from worker_client.steps.encoded_step import StepEnvelope
from worker_client.steps.sent_counts import RowNotes, ScheduledRows, pairs
from worker_client.steps.step_checks import GroupLimits, encode_checked
from worker_client.steps.step_fault import StepFault
from worker_client.steps.step_values import StepSampling, named

Int32s = NDArray[np.int32]


class ChangedStep(NamedTuple):
    """Changes that a checked step makes to a SlotTable."""

    members: Members
    blocks: CheckedBlocks
    rows: ScheduledRows
    total: int
    """Scheduled tokens, decodes included."""
    sampling: StepSampling
    drafts: StepDrafts
    skips_drafts: bool
    """See SchedulerOutput.skip_drafts."""

    def encode(
        self,
        envelope: StepEnvelope,
        scheduled: bytes,
        tokens: Sequence[Frame],
        resync: bytes | None,
        notes: RowNotes,
        limits: GroupLimits,
    ) -> list[Frame] | StepFault:
        """Return the step's frames, or a fault: they are too large. scheduled: its slots as a
        bitmap; tokens: of its new requests; resync: the rows before it, if it is sent in full."""
        rows, new, slot_of_new = self.rows, self.members.new, self.members.slot_of_new
        drafts, draft_ids = b"", b""
        if rows.num_drafts is not None:
            drafts = _chosen(rows.slots, rows.num_drafts, rows.num_drafts > 0)
            draft_ids = self.drafts.token_column(rows.drafted_ids)
        message = ExecuteModel(
            epoch=envelope.epoch,
            link=envelope.link,
            seq=envelope.seq,
            total_num_scheduled_tokens=self.total,
            scheduled=scheduled,
            num_scheduled_tokens=_chosen(rows.slots, rows.num_scheduled, rows.num_scheduled != 1),
            new_block_slots=self.blocks.given.slots,
            new_block_ids=self.blocks.given.ids,
            new_block_groups=self.blocks.given.groups,
            finished=b"" if resync is not None else array("H", self.members.ended).tobytes(),
            scheduled_new_reqs=tuple([_as_message(r, slot_of_new[r.req_id]) for r in new]),
            resync=resync,
            deferred=self.sampling.bitmap,
            extensions=self.sampling.extensions,
            corrections=notes.corrections,
            num_drafts=drafts,
            draft_token_ids=draft_ids,
            settled=named(notes.settled.tolist()) if notes.settled.size else b"",
            num_samples=_chosen(rows.slots, rows.num_samples, rows.num_samples > 1),
            skip_drafts=self.skips_drafts,
            replica_counts=envelope.replica_counts,
        )
        return encode_checked(message, [*tokens, *self.sampling.frames], new, limits)


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

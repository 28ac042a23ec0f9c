"""Drafts that the daemons have made (speculative decoding), as reported to the driver."""

from typing import Annotated

from msgspec import Meta

from rpc_schema.base import Name, RawUInt8, StepReply, StepRequest, Unsigned, Value
from rpc_schema.config import MAX_DRAFTS

MAX_ROWS = 65535


class RowDrafts(Value, frozen=True, kw_only=True):
    """The drafts of a step's rows."""

    req_ids: Annotated[tuple[Name, ...], Meta(max_length=MAX_ROWS)]
    """The requests that took part in the step, slots ascending. With step_seq: those of them that
    wait to be sampled and have drafts."""
    num_drafts: RawUInt8
    """Number of drafts of each; 0 for one that has no new token since its last drafts: it is still
    to be sampled, has prompt tokens left, pools, or has failed."""
    token_ids: Annotated[bytes, Meta(max_length=4 * MAX_ROWS * MAX_DRAFTS)]
    """Little-endian int32: the drafts of all, concatenated, in the order of their places. Token 0
    also stands for a draft that the drafter lacks; a step verifies it all the same."""


class TakeDraftTokenIds(StepRequest["TakeDraftTokenIdsReply"], frozen=True, tag=71, kw_only=True):
    """Report the drafts that were made after the last step. Reading them changes nothing; steps
    need not read them. Waits for the device. Refused after a failed step, until a
    resynchronization."""

    step_seq: Unsigned | None = None
    """Report instead the drafts that this step verifies for the slots that it has deferred, as far
    as they still wait to be sampled; none if it has deferred nothing."""


class TakeDraftTokenIdsReply(StepReply, frozen=True, tag=71, kw_only=True):
    """The drafts of a rank."""

    drafts: RowDrafts | None = None
    """None on ranks that make no drafts: all but those of the last stage, and all without a
    drafter."""

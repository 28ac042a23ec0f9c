"""The drafts that a group's last stage has made on the device (speculative decoding)."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from rpc_schema.drafts import RowDrafts, TakeDraftTokenIds
from rpc_schema.errors import BadFrameError
from worker_client.group.group_channel import GroupChannel
from worker_client.group.outcomes import StepFuture, StepsInFlight


class DraftTokenIds(NamedTuple):
    """Drafts of requests."""

    req_ids: list[str]
    """In batch order: by slots, replica after replica."""
    draft_token_ids: list[list[int]]
    """The drafts of each request's next tokens, num_speculative_tokens of them; empty if it has no
    new token since its last drafts. Of a deferred request, those in its step. Token 0 also stands
    for a draft that the drafter lacks."""


class GroupDrafts:
    """`WorkerGroup.drafts`. Belongs to the group's thread."""

    def __init__(self, channel: GroupChannel, steps: StepsInFlight) -> None:
        self._channel = channel
        self._steps = steps

    def take_token_ids(self, deferred: StepFuture | None = None) -> DraftTokenIds | None:
        """Return the drafts made after the last step sent; None without a drafter. The next step
        verifies them where it brings none (-1 in SchedulerOutput.draft_token_ids). This waits for
        that step, but steps do not wait for this: ask only for drafts that the driver must see.
        Asking again gives the same.

        deferred: return instead the drafts that this step has of the requests that it has deferred
            and that were not sampled yet: their masks are made for these.

        Raises:
            PrecededByError: a step has failed, and none has been sent in full since.
            StateError: the link is broken, or nothing is loaded.
            WorkerDied: the group is unusable.
        """
        step_seq = None if deferred is None else deferred.seq
        replies = self._channel.ask(partial(TakeDraftTokenIds, step_seq=step_seq))
        found = [reply.drafts for reply in replies if reply.rank in self._steps.output_ranks]
        made = [rows for rows in found if rows is not None]
        return read_drafts(made) if made else None


def read_drafts(replies: Sequence[RowDrafts]) -> DraftTokenIds:
    """Return the drafts of all replicas. Raises BadFrameError: a reply's columns do not match."""
    found = DraftTokenIds([], [])
    for rows in replies:
        if len(rows.token_ids) % 4:
            raise BadFrameError("RowDrafts.token_ids is not a sequence of int32")
        tokens, counts = np.frombuffer(rows.token_ids, "<i4"), list(rows.num_drafts)
        if (len(counts), sum(counts)) != (len(rows.req_ids), tokens.size):
            raise BadFrameError("the columns of RowDrafts do not match its requests")
        ends = np.cumsum(counts, dtype=np.int64)
        found.req_ids.extend(rows.req_ids)
        found.draft_token_ids.extend(part.tolist() for part in np.split(tokens, ends)[:-1])
    return found

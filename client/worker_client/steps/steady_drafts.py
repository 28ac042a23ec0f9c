"""Requests that go on with as many drafts in each step, and what stays the same in their steps'
messages and replies."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from worker_client.scheduler_output import SchedulerOutput
from worker_client.steps.drafts import DraftedSamples
from worker_client.steps.sent_counts import ScheduledRows, pairs

Int32s = NDArray[np.int32]


class SteadyDrafts:
    """The rows of a step that only decodes, some or all of them with drafts: what SteadyRequests is
    for steps without. Valid for as long as no request of it leaves its slot."""

    __slots__ = (
        "_counts",
        "_decode_req_ids",
        "bitmap",
        "bits",
        "drafted_slots",
        "drafts",
        "most_tokens",
        "num_drafts",
        "num_left",
        "num_pending",
        "num_scheduled",
        "samples",
        "slots",
        "tokens_of_slots",
        "total",
    )

    def __init__(
        self,
        output: SchedulerOutput,
        rows: ScheduledRows,
        bits: NDArray[np.bool_],
        bitmap: bytes,
        samples: DraftedSamples,
    ) -> None:
        """output: a checked step, each of whose requests decodes; rows: those with drafts;
        bits: bool [slots], the slots of all its requests; bitmap: the same in a message; samples:
        all its requests."""
        assert rows.num_drafts is not None, "the step has drafts"
        self._decode_req_ids = output.decode_req_ids
        self._counts = {**output.num_scheduled_tokens}
        self.drafts = {**output.num_drafts}
        """Drafts of each request with some."""
        self.bits, self.bitmap, self.samples = bits, bitmap, samples
        self.slots: Int32s = np.flatnonzero(bits).astype(np.int32)
        by_slot = np.ones(bits.size, np.int32)
        by_slot[rows.slots] = rows.num_scheduled
        self.tokens_of_slots: Int32s = by_slot[self.slots]
        """Tokens of each of the slots in a step."""
        self.total = int(self.tokens_of_slots.sum())
        self.most_tokens = int(self.tokens_of_slots.max())
        """Most tokens of one of them."""
        self.num_left = 0
        """Further steps for which each of them is known to have room within max_model_len."""
        self.num_pending = 0
        """Steps whose effect on the rows' counts is not in the arrays yet."""
        self.drafted_slots = rows.slots
        self.num_scheduled = pairs(rows.slots, rows.num_scheduled)
        self.num_drafts = pairs(rows.slots, rows.num_drafts)

    @property
    def drafted_req_ids(self) -> Sequence[str]:
        """Requests with drafts, by slots."""
        return [req_id for req_id in self.samples.req_ids if req_id in self.drafts]

    def go_on_in(self, output: SchedulerOutput) -> bool:
        """Return True if a step schedules the same tokens, of which as many are drafts. Its fields
        may have any type."""
        return (
            type(output.num_drafts) is dict
            and type(output.num_scheduled_tokens) is dict
            and type(output.decode_req_ids) is tuple
            and isinstance(output.draft_token_ids, Mapping)
            and len(output.draft_token_ids) <= len(self.drafts)
            and output.num_drafts == self.drafts
            and output.num_scheduled_tokens == self._counts
            and output.decode_req_ids == self._decode_req_ids
        )

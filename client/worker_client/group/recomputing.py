"""Recomputes the KV of a group's running requests after new weights, in place: RecomputeRequests.
The workers report their rows and tokens, so that no scheduler need take part."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from rpc_schema import lifecycle as lc
from rpc_schema.adoption import AdoptRequests, AdoptRequestsReply
from rpc_schema.errors import WorkerError
from rpc_schema.kv_cache import BlockGroup, groups_of
from rpc_schema.weight_transfer import RecomputeRequests, RecomputeRequestsReply
from worker_client.errors import DeadlineExceeded
from worker_client.group.adoption import RankRow, read_page
from worker_client.group.failure_state import ENDS_OWNERSHIP, Change, FailureState
from worker_client.group.group_channel import OPERATION_TIMEOUT_S, GroupChannel
from worker_client.group.outcomes import StepsInFlight
from worker_client.group.recompute_plan import RowsMessage, RowsPlan, is_in_place
from worker_client.group.waiting import Waiter
from worker_client.scheduler_output import SchedulerOutput
from worker_client.steps.slots import SlotTable

NOT_IN_PLACE: Final = "the weights were replaced, and the KV cannot be recomputed in place"

ALL_TOKENS: Final = 1 << 62
"""A budget that every recomputation fits into."""


class Recomputed(NamedTuple):
    """The work of a recomputation, so far."""

    num_tokens: int
    """Tokens whose KV was computed again, those of shared blocks once."""
    num_passes: int
    """Forward passes."""
    seconds: float
    """Time of the slowest rank, over all messages."""
    lost_req_ids: frozenset[str] = frozenset()
    """Requests that could not be recomputed in place."""


class Recomputation:
    """Recomputes the requests of a group, message by message; steps may be sent in between. The
    slot table has the requests that wait (SlotTable.stale). Belongs to the group's thread."""

    def __init__(
        self, channel: GroupChannel, steps: StepsInFlight, state: FailureState, waiter: Waiter
    ) -> None:
        self._channel = channel
        self._steps = steps
        self._state = state
        self._waiter = waiter
        self._plan: RowsPlan | None = None
        self._budget = ALL_TOKENS
        self.report: Recomputed | None = None
        """The work of the last recomputation; None: there was none, or no row was left after a
        failure."""

    @property
    def is_open(self) -> bool:
        """True from begin() on, until advance() has found that no request waits any more."""
        return self._plan is not None

    def begin(self, planned: SchedulerOutput | None, budget: int | None) -> None:
        """Let all requests with a row wait for advance(); no step is in flight. Requests whose KV
        cannot be computed in place, or that `planned`, an unsent step, begins with KV of other
        weights, are lost: the next step's failure names them. So are all if a rank cannot report
        its rows, or if a step has failed before. budget: most tokens of an advance(); None: all.

        Raises:
            WorkerDied: a daemon is dead.
            WorkerError: the lease is lost.
        """
        self._plan = self.report = None
        slots = self._slots
        if slots.must_resync:  # workers and scheduler may not know yet which rows are left
            self._steps.lose_rows(NOT_IN_PLACE)
            return
        new = () if planned is None else planned.scheduled_new_reqs
        lost = {request.req_id for request in new if request.num_computed_tokens}
        kept: list[RankRow] = []
        groups: Sequence[BlockGroup] = ()
        if len(slots):
            try:
                rows = {row.row.req_id: row for row in self._read_rows()}
            except (WorkerError, DeadlineExceeded) as error:
                self._fail(error)
                return
            groups = self._groups()
            for req_id in slots.req_ids:
                found = rows.get(req_id)
                waits = slots.awaits_sampling(req_id)
                if found is not None and is_in_place(found, groups, awaits_sampling=waits):
                    kept.append(found)
                else:
                    lost.add(req_id)
        if lost:
            self._steps.lose_rows(NOT_IN_PLACE, req_ids=lost)
        slots.await_recompute(row.row.req_id for row in kept)
        self._plan = RowsPlan(kept, groups)
        self._budget = ALL_TOKENS if budget is None else budget
        self.report = Recomputed(0, 0, 0.0, frozenset(lost))

    def advance(self) -> bool:
        """Have the ranks recompute as many tokens as the budget allows, once the steps in flight
        are over. Return True if no request waits any more, and all that run have KV of the present
        weights. If a rank fails, all requests are lost.

        Raises:
            WorkerDied: a daemon is dead.
            WorkerError: the lease is lost.
            DrainingError, WeightsNotWhole: as execute_model does; nothing was sent.
        """
        self._channel.check_usable()
        self._channel.check_serving()
        self._waiter.wait_for_all()
        slots, report = self._slots, self.report
        if self._plan is None or report is None:
            return False
        message = self._plan.take(slots.stale, self._budget)
        if not message.req_ids and not message.rows and slots.stale:
            # A message before was interrupted: nobody knows which of its passes have run.
            self._steps.lose_rows(NOT_IN_PLACE, req_ids=frozenset(slots.stale))
        try:
            replies = self._send(message, slots.limits.max_num_batched_tokens)
        except (WorkerError, DeadlineExceeded) as error:
            self._fail(error)
            return False
        slots.note_recomputed(message.req_ids)
        if replies:
            self.report = report._replace(
                num_tokens=report.num_tokens + replies[0].num_tokens,
                num_passes=report.num_passes + replies[0].num_passes,
                seconds=report.seconds + max(reply.seconds for reply in replies),
            )
        if slots.stale:
            return False
        self._plan = None
        if slots.must_resync:  # some were lost, and the scheduler may not know it yet
            return False
        slots.share_recomputed()
        return True

    @property
    def _slots(self) -> SlotTable:
        slots = self._steps.slots
        assert isinstance(slots, SlotTable), "for replicas in lockstep, refused before the update"
        return slots

    def _fail(self, error: WorkerError | DeadlineExceeded) -> None:
        """Lose all requests, and raise an error that ends the group."""
        if isinstance(error, ENDS_OWNERSHIP):
            raise error
        self._plan = self.report = None
        if len(self._channel.daemons.ranks) > 1:  # others may wait for the one that failed
            self._channel.abort_links(str(error))
            self._state.apply(Change.LINK_BROKEN)
        self._steps.lose_rows(f"{NOT_IN_PLACE}: {error}", cause=error)

    def _read_rows(self) -> Iterator[RankRow]:
        """Yield the rows of the rank that has all tokens, page by page."""
        first_slot = 0
        while True:
            ask = partial(AdoptRequests, first_slot=first_slot)

            def build_for(rank: int, ask: Any = ask) -> Any:
                return ask if rank == self._steps.output_rank else lc.GetSupportedTasks

            replies = self._channel.ask_each(build_for)
            page = next(reply for reply in replies if isinstance(reply, AdoptRequestsReply))
            yield from read_page(page)
            first_slot = page.next_slot
            if not first_slot:
                return

    def _groups(self) -> Sequence[BlockGroup]:
        kv_cache = self._channel.daemons.clients[0].get_status().kv_cache
        assert kv_cache is not None, "legal in READY only"
        return groups_of(kv_cache)

    def _send(self, message: RowsMessage, most: int) -> list[RecomputeRequestsReply]:
        """Have all ranks recompute rows, in passes of at most `most` tokens."""
        if not message.rows:
            return []
        num_passes = -(-message.num_tokens // most)
        return self._channel.ask(
            partial(
                RecomputeRequests,
                rows=np.array(message.rows, "<i4").tobytes(),
                token_ids=b"".join(message.token_ids),
                max_num_tokens=most,
                is_cut=message.is_cut,
            ),
            timeout_s=OPERATION_TIMEOUT_S + num_passes * self._channel.links.step_deadline_s,
        )

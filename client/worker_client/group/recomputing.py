"""Recomputes the KV of a group's running requests after new weights, in place: RecomputeRequests.
The workers report their rows and tokens, so that no scheduler need take part."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from rpc_schema import lifecycle as lc
from rpc_schema.adoption import AdoptRequests, AdoptRequestsReply
from rpc_schema.errors import WorkerError
from rpc_schema.kv_cache import BlockGroup, groups_of
from rpc_schema.weight_transfer import RecomputeRequests, RecomputeRequestsReply
from worker_client.errors import DeadlineExceeded, config_error
from worker_client.group.adoption import RankRow, read_page
from worker_client.group.failure_state import ENDS_OWNERSHIP, Change, FailureState
from worker_client.group.group_channel import OPERATION_TIMEOUT_S, GroupChannel
from worker_client.group.outcomes import StepsInFlight
from worker_client.group.recompute_plan import RowsMessage, RowsPlan, is_in_place
from worker_client.group.running import RunningRequests
from worker_client.group.waiting import Waiter
from worker_client.scheduler_output import SchedulerOutput

NOT_IN_PLACE: Final = "the weights were replaced, and the KV cannot be recomputed in place"

ALL_TOKENS: Final = 1 << 62
"""A budget that every recomputation fits into."""


class Recomputed(NamedTuple):
    """The work of a recomputation, so far."""

    num_tokens: int
    """Tokens whose KV was computed again, those of shared blocks once."""
    num_passes: int
    """Forward passes; of replicas in lockstep, those of the one that had the most."""
    seconds: float
    """Time of the slowest rank, over all messages."""
    lost_req_ids: frozenset[str] = frozenset()
    """Requests that could not be recomputed in place."""


class Recomputation:
    """Recomputes the requests that a group keeps when its weights change, message by message; steps
    may be sent in between. The slot tables have the requests that wait (SlotTable.stale). Belongs
    to the group's thread."""

    def __init__(
        self, channel: GroupChannel, steps: StepsInFlight, state: FailureState, waiter: Waiter
    ) -> None:
        self._channel = channel
        self._steps = steps
        self._state = state
        self._waiter = waiter
        self._is_due = False
        """Requests are to be recomputed once the weights are complete."""
        self._next_budget: int | None = None
        """Most tokens that are then recomputed between two steps; None: all before the first."""
        self._plans: Sequence[RowsPlan] = ()
        """Those of each replica; none unless requests wait."""
        self._budget = ALL_TOKENS
        self.report: Recomputed | None = None
        """The work of the last recomputation, so far; None: there was none, or no row was left
        after a failure."""
        self.on_complete: Callable[[], None] | None = None
        """Called once the KV of all running requests is of the newest version, before another step
        can run; must not call the group. The newest driver of the group sets it."""
        self.on_waiting: Callable[[Collection[str]], None] | None = None
        """Called with the requests that still wait, when these change other than by steps.
        Otherwise like on_complete."""

    @property
    def is_pending(self) -> bool:
        """True while requests are recomputed between steps, or will be once the weights are
        complete: advance() goes on with that."""
        return bool(self._plans) or (self._is_due and self._next_budget is not None)

    def expect(self, running: RunningRequests, budget: int | None) -> None:
        """Note what becomes of the requests while weights are replaced. Those that are kept are to
        be recomputed afterwards if this update says so, or if some wait already."""
        if running == "recompute":
            self._next_budget, self._is_due = budget, True
        elif running == "keep":
            self._is_due |= bool(self._steps.slots.stale)
        else:
            self._is_due = False
            self._tell_waiting()

    def cancel(self) -> None:
        """Note that the weights are not replaced after all: requests go on as before."""
        self._is_due = False

    def begin(self, planned: SchedulerOutput | None) -> None:
        """Recompute requests, or let them wait for it, if they are to be and the weights are
        complete. No step is in flight. planned: an unsent step.

        Raises:
            WorkerDied: a daemon is dead.
            WorkerError: the lease is lost.
        """
        if not self._is_due or self._state.weights_cause:
            return
        self._is_due = False
        self._find_rows(planned)
        self._tell_waiting()
        while self._next_budget is None and self._plans:
            self.advance()

    def advance(self) -> None:
        """Recompute requests, as many tokens as the budget allows, once the steps in flight are
        over. `Driver` calls it before each step while is_pending; execute_model() does for the
        requests of a step that wait. If a rank fails, all requests are lost; if a step has failed,
        those that wait.

        Raises: as WorkerGroup.execute_model does, but for InvalidSchedulerOutput.
        """
        is_complete = self._compute()
        self._tell_waiting()
        if is_complete and self.on_complete is not None:
            self.on_complete()

    def advance_for(self, output: SchedulerOutput) -> None:
        """Recompute the requests that a step is to compute, and those before them, as advance()
        does."""
        try:
            scheduled = {*output.decode_req_ids, *output.num_scheduled_tokens}
        except TypeError:  # it is malformed, and will be refused
            return
        while not scheduled.isdisjoint(self._steps.slots.stale):
            self.advance()

    def _find_rows(self, planned: SchedulerOutput | None) -> None:
        """Let all requests with a row wait for advance(). Requests whose KV cannot be computed in
        place, or that `planned` begins with KV of other weights, are lost: the next step's failure
        names them. So are all if a rank cannot report its rows, or if a step has failed before."""
        self._plans, self.report = (), None
        slots = self._steps.slots
        if any(table.must_resync for table in slots.tables):
            # Workers and scheduler may not know yet which rows are left.
            self._steps.lose_rows(NOT_IN_PLACE)
            return
        new = () if planned is None else planned.scheduled_new_reqs
        lost = {request.req_id for request in new if request.num_computed_tokens}
        rows: dict[str, RankRow] = {}
        groups: Sequence[BlockGroup] = ()
        if len(slots):
            try:
                rows = {row.row.req_id: row for row in self._read_rows()}
            except (WorkerError, DeadlineExceeded) as error:
                self._fail(error)
                return
            groups = self._groups()
        by_replica: list[list[RankRow]] = []
        for table in slots.tables:
            kept: list[RankRow] = []
            for req_id in table.req_ids:
                found = rows.get(req_id)
                waits = table.awaits_sampling(req_id)
                if found is not None and is_in_place(found, groups, awaits_sampling=waits):
                    kept.append(found)
                else:
                    lost.add(req_id)
            by_replica.append(kept)
        if lost:
            self._steps.lose_rows(NOT_IN_PLACE, req_ids=lost)
        for table, own in zip(slots.tables, by_replica, strict=True):
            table.await_recompute(row.row.req_id for row in own)
        self._plans = [RowsPlan(own, groups) for own in by_replica]
        self._budget = ALL_TOKENS if self._next_budget is None else self._next_budget
        self.report = Recomputed(0, 0, 0.0, frozenset(lost))

    def _compute(self) -> bool:
        """Have the ranks compute the next message. Return True if no request waits any more, and
        all that run have KV of the present weights."""
        self._channel.check_usable()
        self._channel.check_serving()
        self._waiter.wait_for_all()
        tables, report = self._steps.slots.tables, self.report
        if not self._plans or report is None:
            return False
        messages = [
            plan.take(table.stale, self._budget)
            for plan, table in zip(self._plans, tables, strict=True)
        ]
        for table, message in zip(tables, messages, strict=True):
            if not message.req_ids and not message.rows and table.stale:
                # A message before was interrupted: nobody knows which of its passes have run.
                self._steps.lose_rows(NOT_IN_PLACE, req_ids=frozenset(table.stale))
        try:
            replies = self._send(messages, tables[0].limits.max_num_batched_tokens)
        except (WorkerError, DeadlineExceeded) as error:
            self._fail(error)
            return False
        for table, message in zip(tables, messages, strict=True):
            table.note_recomputed(message.req_ids)
        if replies:
            of_replicas = [each for each in replies if each.rank in self._steps.output_ranks]
            self.report = report._replace(
                num_tokens=report.num_tokens + sum(reply.num_tokens for reply in of_replicas),
                num_passes=report.num_passes + max(reply.num_passes for reply in of_replicas),
                seconds=report.seconds + max(reply.seconds for reply in replies),
            )
        if self._steps.slots.stale:
            return False
        self._plans = ()
        if any(table.must_resync for table in tables):
            return False  # some were lost, and the scheduler may not know it yet
        for table in tables:
            table.share_recomputed()
        return True

    def _tell_waiting(self) -> None:
        if self.on_waiting is not None:
            self.on_waiting(frozenset(self._steps.slots.stale))

    def _fail(self, error: WorkerError | DeadlineExceeded) -> None:
        """Lose all requests, and raise an error that ends the group."""
        if isinstance(error, ENDS_OWNERSHIP):
            raise error
        self._plans, self.report = (), None
        if len(self._channel.daemons.ranks) > 1:  # others may wait for the one that failed
            self._channel.abort_links(str(error))
            self._state.apply(Change.LINK_BROKEN)
        self._steps.lose_rows(f"{NOT_IN_PLACE}: {error}", cause=error)

    def _read_rows(self) -> Iterator[RankRow]:
        """Yield the rows of each replica's rank that has all tokens, page by page."""
        next_slots = dict.fromkeys(self._steps.output_ranks, 0)
        while next_slots:
            asked = {rank: partial(AdoptRequests, first_slot=at) for rank, at in next_slots.items()}

            def build_for(rank: int, asked: Mapping[int, Any] = asked) -> Any:
                return asked.get(rank, lc.GetSupportedTasks)

            replies = self._channel.ask_each(build_for)
            pages = [reply for reply in replies if isinstance(reply, AdoptRequestsReply)]
            for page in pages:
                yield from read_page(page)
            next_slots = {page.rank: page.next_slot for page in pages if page.next_slot}

    def _groups(self) -> Sequence[BlockGroup]:
        kv_cache = self._channel.daemons.clients[0].get_status().kv_cache
        assert kv_cache is not None, "legal in READY only"
        return groups_of(kv_cache)

    def _send(self, messages: Sequence[RowsMessage], most: int) -> list[RecomputeRequestsReply]:
        """Have all ranks recompute their replica's rows, in passes of at most `most` tokens."""
        if not any(message.rows for message in messages):
            return []
        counts = [[end - first for _, first, end, _ in each.rows] for each in messages]
        everyone = tuple(np.array(own, "<i4").tobytes() for own in counts)
        asked = [
            partial(
                RecomputeRequests,
                rows=np.array(message.rows, "<i4").tobytes(),
                token_ids=b"".join(message.token_ids),
                max_num_tokens=most,
                is_cut=message.is_cut,
                tokens_by_replica=everyone if len(messages) > 1 else (),
            )
            for message in messages
        ]
        num_passes = -(-max(message.num_tokens for message in messages) // most)
        return self._channel.ask_each(
            lambda rank: asked[self._channel.replica_of(rank)],
            timeout_s=OPERATION_TIMEOUT_S + num_passes * self._channel.links.step_deadline_s,
        )


def check_budget(budget: int | None, running: RunningRequests, *, is_in_place: bool = True) -> None:
    """Raise ClientConfigError for a budget that is none, or that nothing is recomputed with.
    is_in_place: the update's requests can be recomputed in place."""
    if budget is None:
        return
    if running != "recompute" or not is_in_place:
        problem, fix = "no request is recomputed in place", "leave it out, or use recompute"
        raise config_error("recompute_budget", budget, problem, fix)
    if type(budget) is not int or budget < 1:
        problem = "it is not a positive number of tokens"
        fix = "give 1 or more, or None to recompute all requests at once"
        raise config_error("recompute_budget", budget, problem, fix)

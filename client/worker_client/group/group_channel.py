"""Sends requests to a group's daemons and receives their replies: assigns epoch, link and seqs,
sends operations to all ranks, dispatches replies, and resends lost messages. Its parts read the
daemons' events (group_events.py) and fence results by the lease (lease_fence.py)."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeVar, cast

import msgspec

from rpc_schema import lifecycle as lc
from rpc_schema.base import StepRequest
from rpc_schema.codec import (
    Frame,
    StepReplyMessage,
    decode_step_reply,
    encode_step,
    split_replayed,
)
from rpc_schema.config import Rendezvous, RendezvousAddress
from rpc_schema.error_replies import ErrorReply
from rpc_schema.errors import (
    BadFrameError,
    ErrorCode,
    WireError,
    WorkerDaemonError,
    WorkerError,
)
from rpc_schema.operations import STEP_OPERATIONS, StepMessage, operation_name
from worker_client.errors import DeadlineExceeded, LeaseNotRenewed, WorkerDied, remote_error
from worker_client.group.failure_state import (
    Answer,
    Change,
    FailureState,
    GroupRequest,
    announces_end,
)
from worker_client.group.gathering import Gathering
from worker_client.group.group_daemons import GroupDaemons
from worker_client.group.group_events import EVENTS_INTERVAL_S, ChannelActivity, GroupEvents
from worker_client.group.lease_fence import LeaseFence
from worker_client.group.outcomes import DEFAULT_STEP_DEADLINE_S, ROOT_CAUSE_WAIT_S, StepsInFlight
from worker_client.group.resending import Resending
from worker_client.wire.endpoint import Endpoint
from worker_client.wire.lease import LeaseKeeper, LeaseTerms
from worker_client.wire.worker_client import StepIds, WorkerClient

DEATH_NEWS_S = 0.1
"""Time within which all connections of a killed process end (2 ms measured)."""

ANNOUNCED_END_WAIT_S = 5.0
"""Limit on the wait for an announced exit. A daemon whose device is lost exits within 1.5 s, on a
host that has time for it."""

ABORT_SEND_S = 0.05
"""Limit on sending AbortLink to one rank: a second lost rank must not delay it for the others."""

RANKS_WAIT_S = 2.0
"""Limit on the wait for ranks whose requests are all settled: a busy host may keep one from
running."""
RANKS_POLL_S = 0.002

GREETINGS_S = 1.0
"""Time in which the greetings come once all ranks have attached, unless they were lost."""

OPERATION_TIMEOUT_S = 60.0
LINK_SLACK_S = 30.0
LONG_TIMEOUT_S = 3600.0
"""Timeout of operations whose row in the table of operations has a deadline."""

_LOSSES = (WorkerDied, WorkerError, LeaseNotRenewed)
"""Errors of look() that end a group until it attaches again, or replaces a rank."""
_UNREAD = (ErrorCode.BAD_FRAME, ErrorCode.TOO_LARGE)
_LOG = logging.getLogger(__name__)

ReplyT = TypeVar("ReplyT", bound=StepReplyMessage)
CommittedT = TypeVar("CommittedT")


class ReplicaPlace(NamedTuple):
    """A replica's number, and the number of replicas, of a data-parallel group."""

    dp_rank: int
    dp_size: int


SOLE_REPLICA: Final = ReplicaPlace(0, 1)


def link_timeout_s(step_deadline_s: float) -> float:
    """Return the limit on leaving one link and joining the next.

    Ranks wait for each other for up to twice the communicators' own timeout (the step deadline and
    a second) and 5 s; their error must arrive before ours.
    """
    return 2 * (step_deadline_s + 1.0) + 5.0 + LINK_SLACK_S


class Links:
    """Links of a group's ranks. Owned by its channel."""

    def __init__(self, ranks: Iterable[int], place: ReplicaPlace) -> None:
        self.numbers = dict.fromkeys(ranks, 0)
        """Link of each rank; 0 for none."""
        self._place = place
        self.step_deadline_s = DEFAULT_STEP_DEADLINE_S
        """Longest step deadline that a rank's present link may have been built with."""

    @property
    def timeout_s(self) -> float:
        """Limit on leaving these links and joining the next."""
        return link_timeout_s(self.step_deadline_s)

    @property
    def next_number(self) -> int:
        """Number of the next link of this replica, which no link of another replica has."""
        begun = max(self.numbers.values()) + 1
        return begun + (self._place.dp_rank - begun) % self._place.dp_size

    def allow(self, step_deadline_s: float) -> None:
        """Record that a link may be built with this deadline from now on."""
        self.step_deadline_s = max(self.step_deadline_s, step_deadline_s)


class GroupChannel:
    """All messages to and from a group's daemons. Belongs to one thread; close() frees it.

    One operation runs at a time; replies to steps may arrive between its own.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        driver_id: bytes,
        steps: StepsInFlight,
        state: FailureState,
        terms: LeaseTerms,
        place: ReplicaPlace = SOLE_REPLICA,
    ) -> None:
        """Connect; nothing is sent yet. steps receives the replies that no operation waits for, and
        deaths. state: the group's. terms: of the lease. place: among the replicas of a group."""
        first_rank = place.dp_rank * len(endpoints)
        self.daemons = GroupDaemons(
            endpoints, driver_id, self.look, self._listen, self._sent, first_rank
        )
        self.lease = LeaseKeeper(self.daemons.context, driver_id, terms, self)
        self._lease_fence = LeaseFence(self.daemons, self.lease, self._listen)
        self._resending = Resending(self.daemons.clients, steps.output_ranks, first_rank)
        self.events = GroupEvents(self.daemons, state, self._resending, steps.times, self._activity)
        self.epoch = 0
        """0 before the first attach."""
        self._steps = steps
        self._state = state
        self._seq = 0
        self.links = Links(self.daemons.ranks, place)
        self._first_rank = first_rank
        self._dp_size = place.dp_size
        self._gather: Gathering | None = None

    def close(self) -> None:
        """Close all sockets. The daemons keep their loaded model, and the lease until it
        expires."""
        self.lease.stop()
        self.daemons.close()

    def check_usable(self) -> None:
        """Raise the error that ended the group, the end of its lease included, or ClientError
        before the first attach."""
        if self.lease.lost is not None and self._state.answer(GroupRequest.OPERATION) is Answer.GO:
            self.check_deaths(0.0)  # the loss may be a consequence of a death
        self.check_given_up_link()
        self._state.check(GroupRequest.OPERATION)

    @property
    def num_replicas(self) -> int:
        """Number of replicas in lockstep; 1 if the group is one replica."""
        return len(self._steps.output_ranks)

    def replica_of(self, rank: int) -> int:
        """Return the place of a rank's replica among those in lockstep."""
        return (rank - self._first_rank) // (len(self.daemons.ranks) // self.num_replicas)

    @property
    def takes_steps_at_once(self) -> bool:
        """True if check_usable() and check_serving() would find nothing, and nothing precedes the
        next step; False also if it is time to read events."""
        takes_steps = self._state.takes_steps_at_once and self.lease.lost is None
        return takes_steps and self.events.is_quiet

    def check_serving(self) -> None:
        """Raise DrainingError if an operator drains this group, and WeightsNotWhole if its weights
        are incomplete; WorkerDied if a drained daemon has ended."""
        self.events.read()
        if self._state.answer(GroupRequest.STEP) is Answer.DRAINING:
            self.check_deaths(0.0)
        endpoints = {client.rank: client.endpoint.control for client in self.daemons.clients}
        self._state.check(GroupRequest.STEP, endpoints)

    def check_deaths(self, within_s: float = DEATH_NEWS_S) -> None:
        """Raise WorkerDied if a daemon is dead, or turns out to be within a moment."""
        try:
            self.daemons.results.read_connection_events(within_s)
            self.look()
        except _LOSSES as error:
            self.lose(error)
            raise

    def await_announced_end(self) -> None:
        """Wait for the announced exit of a daemon. One that does not exit takes requests as before.

        Raises:
            WorkerDied: a daemon is dead.
        """
        self._state.apply(Change.END_AWAITED)
        until = time.monotonic() + ANNOUNCED_END_WAIT_S
        while time.monotonic() < until:
            self.check_deaths()

    def check_given_up_link(self) -> None:
        """Wait, once, before LinkGivenUp is raised: a rank that hangs on two links in a row exits,
        and its successor may recover.

        Raises:
            WorkerDied: a rank has ended.
        """
        if self._state.answer(GroupRequest.OPERATION) is Answer.AWAIT_END:
            self.await_announced_end()

    def look(self) -> None:
        """Process all signs of the daemons' liveness and the state of the lease. To be called while
        waiting or idle.

        Raises:
            WorkerDied: one of them is dead. The steps in flight are not failed by this: lose() does
                that.
            WorkerError, LeaseNotRenewed: the lease is lost.
            AuthenticationError: a daemon refused us.
        """
        self.daemons.results.read_connection_events()
        self.events.read()
        self.daemons.check_lives()
        self._lease_fence.check()
        while self.daemons.watch.returned:
            self._send_lost(self.daemons.watch.returned.pop())

    def lose(self, error: WorkerDied | WorkerError | LeaseNotRenewed) -> None:
        """Fail all steps, as a daemon or the lease is lost. For a daemon, have the other ranks
        leave the link at once."""
        if self._state.is_lost:
            return
        self._steps.die(error)
        if isinstance(error, WorkerDied):
            self.abort_links(str(error))

    def abort_links(self, cause: str) -> None:
        """Have all live daemons leave their links and rendezvous, without waiting for replies."""
        if not self.epoch:
            return
        for client in self.daemons.present:
            if not self.daemons.watch.is_dead(client.rank):
                with contextlib.suppress(WorkerDaemonError):
                    client.begin(
                        partial(lc.AbortLink, epoch=self.epoch, cause=cause[:1024]), ABORT_SEND_S
                    )

    def begin_epoch(self, epoch: int) -> None:
        """Send requests under this epoch from now on, and forget earlier ones."""
        self.epoch, self._seq = epoch, 0
        self._state.apply(Change.DRAIN_OVER)
        self._resending.begin_epoch()

    def gather_attached(
        self, commit: Callable[[], CommittedT], deadline: float, timeout_s: float
    ) -> CommittedT:
        """Return the result of commit(), which has all ranks attach, once the results socket
        reaches each of them. A greeting shows that, or else its connection: a daemon greets once,
        and the greeting is lost if the connection ends before it is read."""
        gather = self._gather = Gathering("attach", 0, len(self.daemons.present))
        try:
            committed = commit()
            overdue = time.monotonic() + GREETINGS_S
            self._collect(
                gather,
                deadline,
                timeout_s,
                lambda: time.monotonic() >= overdue and self.daemons.are_connected(),
            )
        finally:
            self._gather = None
        return committed

    def await_ranks(self) -> None:
        """Wait until every rank is done with the last step, RANKS_WAIT_S at most, unless steps have
        failed. One rank alone may owe its outcome. A rank that reads a step after Detach refuses
        it, and the others would be in that step until their deadline.

        Raises:
            WorkerDaemonError: a rank is dead, or gave no status in that time.
        """
        is_serving = self._state.takes_steps_at_once and self.lease.lost is None
        if len(self.daemons.clients) == 1 or not is_serving:
            return
        until = time.monotonic() + RANKS_WAIT_S
        for client in self.daemons.present:
            while (left_s := until - time.monotonic()) > 0:
                status = client.get_status(left_s)
                if status.epoch != self.epoch or status.last_seq >= self._seq:
                    break
                time.sleep(RANKS_POLL_S)

    def take_statuses(self, statuses: list[lc.Status]) -> list[lc.Status]:
        """Record the links and identities of the present daemons."""
        ranks = [client.rank for client in self.daemons.present]
        for rank, status in zip(ranks, statuses, strict=True):
            self.links.numbers[rank] = status.link
        self._resending.meet(ranks, statuses)
        return statuses

    def open_rendezvous(self) -> dict[int, Rendezvous]:
        """Have the first rank open the rendezvous of a new link, if there are several ranks; return
        each rank's access to it."""
        link, size = self.links.next_number, len(self.daemons.clients)
        place = None
        if size > 1:
            request = partial(lc.OpenRendezvous, epoch=self.epoch, link=link, num_ranks=size)
            place = self.daemons.clients[0].ask(request).place
        of_all = size * self._dp_size
        return {
            rank: Rendezvous(link=link, place=place, rank=rank, local_world_size=of_all)
            for rank in self.daemons.ranks
        }

    def open_meeting(self, ranks: Collection[int]) -> RendezvousAddress:
        """Have the first of some ranks open a rendezvous of these, beside the link."""
        link = self.links.next_number  # a daemon refuses one that is not above its own
        request = partial(lc.OpenRendezvous, epoch=self.epoch, link=link, num_ranks=len(ranks))
        return self.daemons.client(min(ranks)).ask(request).place

    def use_link(self, rendezvous: Mapping[int, Rendezvous]) -> None:
        """Send requests under this link from now on: all ranks have joined it."""
        self.links.numbers = {rank: entry.link for rank, entry in rendezvous.items()}
        self._resending.knows_ranks = True

    def refresh_links(self) -> None:
        """Ask each rank for its link: after a failure they may differ."""
        self.take_statuses([client.get_status() for client in self.daemons.present])

    def next_ids(self) -> StepIds:
        """Return the ids of the next step, for send_step()."""
        return StepIds(self.epoch, self.links.numbers[self._first_rank], self._seq + 1)

    def send_step(
        self,
        ids: StepIds,
        by_replica: Sequence[Sequence[Frame]],
        *,
        stands_alone: bool = False,
    ) -> None:
        """Send an encoded step, whose future exists already, to every rank. by_replica: its frames,
        once, or those of each replica in lockstep. stands_alone: it closes gaps. Raises
        WorkerDied."""
        self._seq = ids.seq
        if stands_alone:
            self._resending.restart_from(ids.seq)
        if len(by_replica) == 1:
            self._send_each(dict.fromkeys(self.daemons.present, by_replica[0]))
            return
        self._send_each(
            {client: by_replica[self.replica_of(client.rank)] for client in self.daemons.present}
        )

    def ask(
        self,
        build: Callable[..., StepRequest[ReplyT]],
        *,
        timeout_s: float | None = None,
        stands_alone: bool = False,
    ) -> list[ReplyT]:
        """Have every rank do one operation, under one seq, and return the replies in rank order.

        build: returns the request for epoch, link and seq; the request's class, or a partial of it.
        timeout_s: by default the limit of the table of operations. stands_alone: it closes gaps.
        """
        return self.ask_each(lambda _: build, timeout_s=timeout_s, stands_alone=stands_alone)

    def ask_each(
        self,
        build_for: Callable[[int], Callable[..., StepRequest[ReplyT]]],
        *,
        timeout_s: float | None = None,
        stands_alone: bool = False,
    ) -> list[ReplyT]:
        """Like ask, for a request that differs by rank: build_for(rank) returns `build`. Ranks may
        even do different operations; errors name that of the first rank."""
        self.check_usable()
        self.events.read()
        seq = self._seq + 1
        requests = {
            client: build_for(client.rank)(
                epoch=self.epoch, link=self.links.numbers[client.rank], seq=seq
            )
            for client in self.daemons.present
        }
        encoded = {client: encode_step(request) for client, request in requests.items()}
        self._seq = seq
        if stands_alone:
            self._resending.restart_from(seq)
        kinds = [type(request) for request in requests.values()]
        if timeout_s is None:
            timeout_s = max(map(self._timeout_s, kinds))
        gather = self._gather = Gathering(operation_name(kinds[0]), seq, len(requests))
        self._send_each(encoded)
        try:
            self._collect(gather, time.monotonic() + timeout_s, timeout_s)
        except (WorkerError, DeadlineExceeded) as error:
            if not isinstance(error, WireError) or error.is_reported:
                self._resending.forget()
                self.refresh_links()
            raise
        finally:
            self._gather = None
        self.daemons.watch.begin_steps()
        expected = {STEP_OPERATIONS[kind].reply for kind in kinds}
        if any(type(reply) not in expected for reply in gather.replies):
            name = kinds[0].__name__
            raise BadFrameError(f"{name} was answered with a reply of another operation")
        return cast("list[ReplyT]", sorted(gather.replies, key=lambda reply: reply.rank))

    def _timeout_s(self, kind: type[StepMessage]) -> float:
        """Return the limit for all ranks together. A row's deadline limits the silence of one rank,
        which its daemon then reports."""
        row = STEP_OPERATIONS[kind]
        if row.meets:
            return self.links.timeout_s + OPERATION_TIMEOUT_S + (row.deadline_s or 0.0)
        return OPERATION_TIMEOUT_S if row.deadline_s is None else LONG_TIMEOUT_S

    def _send_each(self, encoded: Mapping[WorkerClient, Sequence[Frame]]) -> None:
        try:
            for client, frames in encoded.items():
                client.send(frames)
        except _LOSSES as error:
            self.lose(error)
            raise

    def take_reply(self, deadline: float) -> bool:
        """Process one reply; return False if none came by the deadline."""
        resend_at = self._resending.due if self._outstanding else math.inf
        try:
            self.events.read()
            frames = self.daemons.results.receive(
                min(deadline, self._state.root_cause_deadline, resend_at)
            )
            if frames is None:
                self._steps.fail_by_upstream_timeout()
                self._send_overdue()
                return False
            replayed, own_frames = split_replayed(frames)
            reply = decode_step_reply(own_frames)
        except _LOSSES as error:
            self.lose(error)
            raise
        if reply.epoch == self.epoch:
            self._resending.restart()
            self._dispatch(reply, own_frames, replayed)
        return True

    @property
    def _outstanding(self) -> int:
        """First request without a known outcome; 0 if there is none. Attach does not count: a
        driver may attach again."""
        return self._steps.oldest_seq if self._gather is None else self._gather.seq

    def _send_overdue(self) -> None:
        """Send requests again that have had no reply for a while: they or their replies may be
        lost."""
        if time.monotonic() < self._resending.due or not self._outstanding:
            return
        self.events.read_now()
        is_step = self._gather is None
        self._resending.send_overdue(self._outstanding, self._answered, is_step=is_step)

    def _send_lost(self, rank: int) -> None:
        """Send again after a daemon's connection broke and came back: requests or replies may be
        lost."""
        if self._outstanding and rank not in self.daemons.absent and rank not in self._answered:
            with contextlib.suppress(WorkerDied):
                self._resending.send_lost(rank, self._outstanding, is_step=self._gather is None)

    @property
    def _answered(self) -> list[int]:
        """Ranks that have replied to the present operation."""
        return [] if self._gather is None else [reply.rank for reply in self._gather.replies]

    def _sent(self, rank: int, frames: Sequence[Frame]) -> None:
        self._resending.sent(rank, self._seq, frames)

    def _dispatch(self, reply: StepReplyMessage, frames: Sequence[bytes], replayed: bool) -> None:
        gather = self._gather
        if isinstance(reply, ErrorReply):
            if reply.code is ErrorCode.SHUTTING_DOWN and self._resending.knows_ranks:
                self.daemons.watch.shuts_down(self._rank_of(reply))
                self.check_deaths(0.0)
            if announces_end(reply):
                self._state.apply(Change.END_ANNOUNCED)
            if self._mends_gap(reply):
                return
            if reply.code is ErrorCode.DRAINING:
                self.abort_links("a rank drains")  # other ranks may wait for it in the same step
        if isinstance(reply, ErrorReply) and reply.seq == 0:
            if reply.code in _UNREAD:
                _LOG.warning("a rank could not read a message: %s", self._to_error(reply))
                return  # its step is unknown: a lost one is sent again
            # About this driver rather than a request: it applies to all that are outstanding.
            reply = msgspec.structs.replace(reply, seq=self._outstanding)
        if gather is not None and reply.seq == gather.seq:
            if self._resending.knows_ranks and gather.has_replied(reply.rank):
                return  # a repetition of the same reply
            gather.take(reply)
        elif isinstance(reply, ErrorReply):
            self._steps.take_error(reply, self._to_error(reply))
        else:
            self._lease_fence.wait()
            self._steps.take_outcome(reply, frames[1:], replayed=replayed)

    def _mends_gap(self, reply: ErrorReply) -> bool:
        """Send a rank the requests that it misses, if it refused one for a gap. Others may have
        answered that one already."""
        if reply.code is not ErrorCode.GAP or reply.seq <= self._state.last_given_up:
            return False
        return self._resending.mend_gap(reply.rank, reply.expected_seq)

    def _collect(
        self,
        gather: Gathering,
        deadline: float,
        timeout_s: float,
        can_miss: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait for all replies, or until can_miss() says that those that are missing may be."""
        while gather.num_missing and not can_miss():
            if gather.has_failed:
                raise self._root_cause(gather)
            now = time.monotonic()
            if now >= deadline:
                what = f"{gather.operation} ({gather.num_missing} ranks are missing)"
                raise DeadlineExceeded(what, timeout_s)
            self.take_reply(min(deadline, now + EVENTS_INTERVAL_S))
        self._gather = None

    def _root_cause(self, gather: Gathering) -> WorkerError:
        """Return the first failure. If it is a consequence of a peer's, return that one, should it
        come soon."""
        until = time.monotonic() + ROOT_CAUSE_WAIT_S
        while gather.may_learn_cause and time.monotonic() < until:
            self.take_reply(until)
        self._gather = None
        error = self._to_error(gather.cause)
        error.add_note(f"in {gather.operation}")
        return error

    def _to_error(self, reply: ErrorReply) -> WorkerError:
        rank = self._rank_of(reply)
        endpoint = self.daemons.client(rank).endpoint.control
        return remote_error(reply, rank=rank, endpoint=endpoint)

    def _rank_of(self, reply: ErrorReply) -> int:
        ranks = self.daemons.ranks
        return reply.rank if reply.rank in ranks else ranks[-1]

    def _listen(self) -> None:
        self.events.listen()

    def _activity(self) -> ChannelActivity:
        operation = None if self._gather is None else self._gather.operation
        return ChannelActivity(self.epoch, self._outstanding or self._seq + 1, operation)

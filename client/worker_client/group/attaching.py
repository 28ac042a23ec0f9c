"""Attaches to the daemons of one group, or of several that are replicas, and detaches from them:
compares versions, agrees on an epoch in two phases, and waits for an earlier driver's lease."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rpc_schema import lifecycle as lc
from rpc_schema.errors import (
    ErrorCode,
    FencedError,
    LeaseHeldError,
    WorkerDaemonError,
    error_of_rank,
)
from rpc_schema.lease import MAX_LEASE_TTL_MS
from worker_client.errors import ReplicasMissing, WorkerDied
from worker_client.group.failure_state import Change, FailureState, GroupRequest
from worker_client.group.group_channel import GroupChannel
from worker_client.group.group_daemons import obstacle_to
from worker_client.group.outcomes import DEFAULT_STEP_DEADLINE_S, StepsInFlight
from worker_client.group.together import results_of, run_together
from worker_client.wire.health_client import GREET_POLL_S
from worker_client.wire.lease import LeaseTerms, Patience
from worker_client.wire.worker_client import WorkerClient

ATTACH_TIMEOUT_S = 30.0
ATTACH_ATTEMPTS = 5
"""Number of attempts after which attach gives up, if other drivers that attach at the same time
win."""
LEASE_WAIT_S = MAX_LEASE_TTL_MS / 1000 + 5.0
"""Longest wait for a dead driver's lease: any lease has expired by then."""
ATTACH_SLACK_S = 15.0
"""Time beyond the step deadline in which daemons abandon a hung step and attach."""
LEAVE_TIMEOUT_S = 0.3
"""Limit on each daemon's reply to Detach; without it the lease expires."""


@dataclass(slots=True)
class Attachment:
    """A group's attachment to its daemons, over its channel. Belongs to the group's thread."""

    channel: GroupChannel
    steps: StepsInFlight
    state: FailureState
    terms: LeaseTerms
    is_attached: bool = False

    def attach(
        self,
        timeout_s: float | None,
        *,
        wait_for_lease_s: float,
        force: bool,
        keep_requests: bool,
        wait_s: float = 0.0,
    ) -> list[lc.Status]:
        """See WorkerGroup.attach."""
        statuses = attach_together(
            [self],
            timeout_s,
            wait_for_lease_s=wait_for_lease_s,
            force=force,
            keep_requests=keep_requests,
            wait_s=wait_s,
        )
        return statuses[0]

    def check_usable(self) -> None:
        """Raise the error with which the group refuses operations, if it does."""
        self.channel.check_usable()

    def greet(self, timeout_s: float, answer_by: float) -> None:
        """Wait for daemons that do not answer yet, or drain or shut down, until answer_by
        (time.monotonic) at most."""
        for client in self.channel.daemons.present:
            client.greet(timeout_s, answer_by)
            while obstacle_to(client) is not None and time.monotonic() < answer_by:
                time.sleep(GREET_POLL_S)

    def meet(self, deadline: float) -> None:
        """Exchange versions with the daemons, and learn how long a step of theirs may take."""
        statuses = self._hello(deadline)
        self.channel.links.step_deadline_s = max(map(_step_deadline_s, statuses))

    def commit(
        self,
        epoch: int,
        deadline: float | None,
        timeout_s: float | None,
        owner: threading.Thread,
        *,
        keep_requests: bool,
    ) -> list[lc.Status]:
        """Begin an epoch that all daemons have granted, and return their states. deadline: None for
        the time that daemons need to abandon a hanging step. owner: of the lease. After an error no
        reachable daemon is attached."""
        if deadline is None or timeout_s is None:
            timeout_s = self.channel.links.step_deadline_s + ATTACH_SLACK_S
            deadline = time.monotonic() + timeout_s
        return self._commit(epoch, deadline, timeout_s, owner, keep_requests=keep_requests)

    def attach_present(self) -> list[lc.Status]:
        """Attach to the daemons that are present, under a new epoch that fences the lost ones."""
        deadline = time.monotonic() + ATTACH_TIMEOUT_S
        self._hello(deadline)
        epoch = _agree_on_epoch(self.channel.daemons.present, deadline)
        agree_s = self.channel.links.step_deadline_s + ATTACH_SLACK_S
        owner = self.channel.lease.owner
        return self._commit(epoch, time.monotonic() + agree_s, agree_s, owner)

    def detach(self) -> None:
        """Give the lease back on all daemons at once, and wait for their replies. A daemon that
        fails does not keep the others from being asked."""
        self.channel.lease.stop()
        self.is_attached = False
        failure: WorkerDaemonError | None = None
        pending = []
        for client in self.channel.daemons.present:
            try:
                pending.append(client.begin(partial(lc.Detach, epoch=self.channel.epoch)))
            except WorkerDaemonError as error:
                failure = failure or error
        for call in pending:
            try:
                call.result()
            except WorkerDaemonError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def leave(self) -> None:
        """Give the lease back on all daemons that reply in time, if there is one."""
        channel = self.channel
        channel.lease.stop()
        if not self.is_attached or channel.lease.lost is not None:
            return
        self.is_attached = False
        pending = []
        for client in channel.daemons.present:
            with contextlib.suppress(WorkerDaemonError):
                pending.append(
                    client.begin(partial(lc.Detach, epoch=channel.epoch), LEAVE_TIMEOUT_S)
                )
        for call in pending:
            with contextlib.suppress(WorkerDaemonError):
                call.result()

    def _hello(self, deadline: float) -> list[lc.Status]:
        """Exchange versions with every daemon, then return their states."""
        channel = self.channel
        greetings = []
        for client in channel.daemons.present:
            greeting = client.hello(_remaining(deadline))
            channel.daemons.watch.met(client.rank, greeting.worker_uid)
            greetings.append((client, greeting.link_software))
        _check_alike(greetings)
        return [client.get_status(_remaining(deadline)) for client in channel.daemons.present]

    def _commit(
        self,
        epoch: int,
        deadline: float,
        timeout_s: float,
        owner: threading.Thread,
        *,
        keep_requests: bool = False,
    ) -> list[lc.Status]:
        """Begin an epoch and return the daemons' states. All requests are sent before any reply is
        waited for: gloo has no abort, so only its peers can release a rank that hangs in a step.
        After an error no reachable daemon is attached."""
        channel = self.channel
        channel.begin_epoch(epoch)
        self.is_attached = True

        def commit() -> list[lc.CommitAttachReply]:
            pending = [
                client.send_commit_attach(
                    epoch,
                    channel.daemons.results_route,
                    _remaining(deadline),
                    self.terms,
                    keep_requests=keep_requests,
                )
                for client in channel.daemons.present
            ]
            return [call.result() for call in pending]

        try:
            channel.lease.start(
                epoch,
                [(client.rank, client.endpoint) for client in channel.daemons.present],
                owner,
            )
            attached = channel.gather_attached(commit, deadline, timeout_s)
        except BaseException:
            self.leave()
            raise
        channel.lease.confirm()
        self.state.apply(Change.GROUP_ATTACHED)
        if _must_relink(attached):
            self.state.apply(Change.LINK_BROKEN)
        return channel.take_statuses([reply.status for reply in attached])


def attach_together(
    attachments: Sequence[Attachment],
    timeout_s: float | None,
    *,
    wait_for_lease_s: float,
    force: bool,
    keep_requests: bool,
    wait_s: float = 0.0,
) -> list[list[lc.Status]]:
    """Attach to the daemons of all these groups under one epoch, in two phases: no daemon of any
    group is attached before all of them have granted it. Return the states of each group's daemons.
    Options and errors are those of WorkerGroup.attach; the calling thread is the leases' owner."""
    for each in attachments:
        each.state.check(GroupRequest.ATTACH)
    agree_s = ATTACH_TIMEOUT_S if timeout_s is None else timeout_s
    if wait_s:
        answer_by = time.monotonic() + wait_s
        _with_each(attachments, lambda each: each.greet(agree_s, answer_by))
    deadline = time.monotonic() + agree_s
    _with_each(attachments, lambda each: each.meet(deadline))
    patience = Patience(wait_for_lease_s if timeout_s is None else min(wait_for_lease_s, agree_s))
    attempts_left = ATTACH_ATTEMPTS
    while True:
        attempts_left -= 1
        clients = [client for each in attachments for client in each.channel.daemons.present]
        epoch = _agree_patiently(clients, timeout_s, deadline, patience, force=force)
        for each in attachments:
            each.steps.abandon()
        commit_by = None if timeout_s is None else deadline
        try:
            return _commit_together(attachments, epoch, commit_by, timeout_s, keep_requests)
        except (FencedError, LeaseHeldError):  # another driver was faster
            if not attempts_left:
                raise


def _with_each(attachments: Sequence[Attachment], meet: Callable[[Attachment], None]) -> None:
    """Meet the daemons of each group. Raises WorkerDied: one is missing; of several replicas
    ReplicasMissing, which names all that lack one."""
    missing: dict[int, WorkerDied] = {}
    for dp_rank, each in enumerate(attachments):
        try:
            meet(each)
        except WorkerDied as error:
            missing[dp_rank] = error
    if missing:
        raise ReplicasMissing(missing) if len(attachments) > 1 else missing[0]


def _commit_together(
    attachments: Sequence[Attachment],
    epoch: int,
    deadline: float | None,
    timeout_s: float | None,
    keep_requests: bool,
) -> list[list[lc.Status]]:
    """Begin an epoch that all daemons have granted, everywhere at once: a replica that hangs in a
    step keeps no other one waiting. After an error no reachable daemon is attached."""
    owner = threading.current_thread()

    def commit(each: Attachment) -> list[lc.Status]:
        return each.commit(epoch, deadline, timeout_s, owner, keep_requests=keep_requests)

    if len(attachments) == 1:
        return [commit(attachments[0])]
    ended = run_together([partial(commit, each) for each in attachments])
    if any(call.exception() is not None for call in ended):
        for each in attachments:
            each.leave()
    return results_of(ended)


def _agree_patiently(
    clients: Sequence[WorkerClient],
    timeout_s: float | None,
    deadline: float,
    patience: Patience,
    *,
    force: bool,
) -> int:
    while True:
        try:
            return _agree_on_epoch(clients, deadline, force=force)
        except LeaseHeldError as refusal:
            patience.wait(refusal)
        if timeout_s is None:
            deadline = time.monotonic() + ATTACH_TIMEOUT_S


def _agree_on_epoch(
    clients: Sequence[WorkerClient], deadline: float, *, force: bool = False
) -> int:
    """Return an epoch that no daemon has seen, announced to all. Raises LeaseHeldError."""
    epoch, known = 1, [0] * len(clients)
    while True:
        # A daemon that is far behind the others catches up in several steps.
        asked = [min(epoch, last + lc.MAX_EPOCH_STEP) for last in known]
        replies = _prepare(clients, asked, deadline, force=force)
        known = [reply.last_epoch for reply in replies]
        if all(reply.granted for reply in replies) and set(asked) == {epoch}:
            return epoch
        epoch = max(epoch, *known) + 1


def _prepare(
    clients: Sequence[WorkerClient], epochs: Sequence[int], deadline: float, *, force: bool
) -> list[lc.PrepareAttachReply]:
    """Announce an epoch to each daemon. If one refuses, the others need not wait for us."""
    replies: list[lc.PrepareAttachReply] = []
    try:
        for client, epoch in zip(clients, epochs, strict=True):
            replies.append(client.prepare_attach(epoch, _remaining(deadline), force=force))
    except WorkerDaemonError:
        for client, epoch, reply in zip(clients, epochs, replies, strict=False):
            if reply.granted:
                with contextlib.suppress(WorkerDaemonError):
                    client.begin(partial(lc.Detach, epoch=epoch), LEAVE_TIMEOUT_S)
        raise
    return replies


def _check_alike(greetings: Sequence[tuple[WorkerClient, str]]) -> None:
    """Raise IncompatibleError for a daemon whose link software differs from the first one's."""
    known = [(client, software) for client, software in greetings if software]
    for client, software in known:
        first, expected = known[0]
        if software != expected:
            raise error_of_rank(
                ErrorCode.INCOMPATIBLE,
                f"the daemon has {software}, that of rank {first.rank} {expected}; fix: give all "
                "ranks of a group the same versions",
                rank=client.rank,
                endpoint=client.endpoint.control,
            )


def _remaining(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _step_deadline_s(status: lc.Status) -> float:
    if status.config is None:
        return DEFAULT_STEP_DEADLINE_S
    return status.config.scheduler.step_deadline_ms / 1000


def _must_relink(attached: Sequence[lc.CommitAttachReply]) -> bool:
    """Return False only if every rank is idle at the same step of the same link."""
    stand = {(r.previous_epoch, r.previous_seq, r.status.link) for r in attached}
    clean = all(r.previous_clean and r.status.link_state == "up" for r in attached)
    linked = any(r.status.link for r in attached)
    return len(attached) > 1 and linked and not (clean and len(stand) == 1)

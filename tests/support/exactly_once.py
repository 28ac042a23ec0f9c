"""A state machine for hypothesis that checks exactly-once execution: drivers that attach, step,
relink, are late and are killed; daemons that are killed and restart; leases that expire; a network
that loses, duplicates and reorders. The gate, the reply ring, the lease, the epoch file and the
driver's resending are real; there are no sockets, threads or computation.

Invariants are checked after each event, so that a failure shrinks to a short history:

- a rank applies each (epoch, seq) once, in order, with the bytes that its driver meant, and skips
  one only if a driver says that its step depends on no earlier one;
- it applies only steps of the epoch that it granted last, on the link that it stands in, while the
  lease is held; anything else that comes changes nothing;
- each answer to a seq has the same bytes as the first;
- a driver that still has all ranks eventually learns the outcome of each step.
"""

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from unittest import mock

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from rpc_schema import codec, step
from rpc_schema import lifecycle as lc
from rpc_schema.codec import StepMessage
from rpc_schema.config import Rendezvous
from rpc_schema.driver_digest import driver_digest
from rpc_schema.error_replies import ErrorReply
from rpc_schema.errors import ErrorCode, LeaseHeldError, ProtocolError
from worker_client.group.resending import Resending
from worker_daemon.server.sequence import REPLAYABLE, GateResult, StepGate
from worker_daemon.server.session.epochs import EpochFile
from worker_daemon.server.session.lease import DriverIdentity, Lease, LeaseRequest
from worker_daemon.server.wire.endpoints import IpcEndpoint
from worker_daemon.server.wire.replies import error_reply
from worker_daemon.server.wire.reply_channel import ReplyRing

RANKS = 2
CREDITS = 3
TERMS = LeaseRequest(3.0, 60.0)
MAX_DRIVERS = 4
"""Older drivers are forgotten, with their messages in flight."""
HEALING_ROUNDS = 40

T = TypeVar("T")
Frames = list[bytes]

UNSEATING = (ErrorCode.FENCED, ErrorCode.LEASE_EXPIRED, ErrorCode.NOT_ATTACHED)


class Clock:
    """A clock that the test sets; also replaces the time module."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@dataclass(frozen=True)
class Parts:
    """The components under test, replaceable to show that a broken one is detected."""

    gate: Callable[[], StepGate] = StepGate
    ring: Callable[[], ReplyRing] = ReplyRing
    lease: Callable[[Callable[[], float]], Lease] = Lease
    epochs: Callable[[Path, IpcEndpoint], EpochFile] = EpochFile
    resending: Callable[..., Resending] = Resending


@dataclass
class Counts:
    """Counts over all histories."""

    operations: int = 0
    applied: int = 0
    replayed: int = 0
    mended: int = 0
    attached: int = 0
    links: int = 0
    kills: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def __iadd__(self, other: "Counts") -> "Counts":
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


@dataclass
class Holding:
    """The model's state of a rank: who may step according to the rules."""

    epoch: int = 0
    """The last granted epoch."""
    link: int = 0
    until: float = 0.0
    """End of the lease, which renewals extend; 0 once released."""
    last_seq: int = 0


class Daemon:
    """One rank: the real components around a list of applied steps. start() recreates the state
    that a kill loses; the list and the model stay."""

    def __init__(self, rank: int, directory: Path, parts: Parts, clock: Clock) -> None:
        self.rank = rank
        self.worker_uid = bytes([rank]) * 16
        self._endpoint = IpcEndpoint.parse(f"ipc://{directory}/w{rank}")
        self._directory = directory
        self._parts = parts
        self._clock = clock
        self.applied: list[tuple[int, int]] = []
        self.granted: list[int] = []
        self.model = Holding()
        self.start()

    def start(self) -> None:
        self.lease = self._parts.lease(self._clock.monotonic)
        self.gate = self._parts.gate()
        self.ring = self._parts.ring()
        self.epochs = self._parts.epochs(self._directory, self._endpoint)
        self.prepared = (0, DriverIdentity("", b""))
        self.first_replies: dict[tuple[int, int], bytes] = {}
        self.model = Holding(epoch=self.model.epoch)

    def prepare(self, driver: DriverIdentity, epoch: int, *, force: bool) -> bool:
        """Prepare an epoch unless one at least as high was prepared; return True on success."""
        self.lease.check_free_for(driver, force=force)
        if epoch <= self.epochs.last:
            return False
        self.epochs.record(epoch)
        self.prepared = (epoch, driver)
        self.lease.claim(driver, epoch, force=force)
        return True

    def commit(self, driver: DriverIdentity, epoch: int) -> bool:
        """Grant it unless another driver has prepared since; return True on success."""
        if self.prepared != (epoch, driver) or epoch <= self.gate.epoch:
            return False
        try:
            self.lease.check_claim(driver, epoch)
        except LeaseHeldError:
            return False
        self.lease.grant(driver, epoch, TERMS)
        assert epoch > max(self.granted, default=0), "an epoch was granted twice"
        self.granted.append(epoch)
        self.gate.attach(epoch)
        self.ring = self._parts.ring()
        self.model = Holding(epoch, self.model.link, self._clock.now + TERMS.ttl_s)
        return True

    def look_at_lease(self) -> None:
        expired = self.lease.take_expiry()
        if expired:
            self.gate.expire(expired)

    def renew(self, driver: DriverIdentity, epoch: int) -> bool:
        try:
            if not self.lease.renew(driver, epoch):
                return False
        except ProtocolError:
            return False
        assert epoch == self.model.epoch and self._clock.now < self.model.until
        self.model.until = self._clock.now + TERMS.ttl_s
        return True

    def lose_holder(self, how: str) -> None:
        """Let the holder's connection end or come back, or its process end."""
        epoch = self.model.epoch
        if how == "cut":
            self.lease.contact_lost(epoch)
        elif how == "return":
            self.lease.contact_returned(epoch)
        else:
            self.lease.holder_ended(epoch)
            self.model.until = 0.0
        self.look_at_lease()

    def holds_against(self, driver: DriverIdentity) -> bool:
        """Return True if another driver has the lease, and a connection."""
        status = self.lease.status()
        return status.state == "held" and status.holder != driver_digest(driver.driver_id)

    def release(self, epoch: int) -> None:
        if self.lease.release(epoch):
            assert epoch == self.model.epoch
            self.gate.detach(epoch)
            self.model.until = 0.0

    def take(self, frames: Frames, sent: dict[tuple[int, int], Frames], counts: Counts) -> Frames:
        """Handle a request like the step thread; return the reply. sent: the drivers' frames by
        (epoch, seq)."""
        message = codec.decode_step(frames)
        before = self._state()
        result = self.gate.check(message)
        if result is GateResult.RUN:
            self._check_may_run(message)
            assert sent.get((message.epoch, message.seq)) == frames, "not what the driver meant"
            counts.applied += 1
            return self._run(message)
        if result is GateResult.REPLAY:
            kept = self.ring.get(message.seq)
            has_run = (message.epoch, message.seq) in self.first_replies
            assert (kept is not None) == has_run, "a reply was forgotten, or made up"
            if kept is not None:
                counts.replayed += 1
                assert self._state() == before, "a replay has changed something"
                return codec.mark_replayed(kept)
        counts.refused[result.value] += 1
        refusal = self.gate.refusal(result, message)
        assert self._state() == before, "a refused request has changed something"
        return codec.encode_step(
            error_reply(refusal, epoch=message.epoch, seq=message.seq, rank=self.rank)
        )

    def _check_may_run(self, message: StepMessage) -> None:
        model, seq = self.model, message.seq
        assert (message.epoch, seq) not in self.applied[-200:], "applied twice"
        assert message.epoch == model.epoch, "somebody else's step"
        assert self._clock.now < model.until, "the lease was not held"
        assert message.link == model.link or isinstance(message, lc.Relink), "another link's"
        assert seq > model.last_seq, "applied out of order"
        stands_alone = isinstance(message, lc.Relink) or message.resync is not None
        assert seq == model.last_seq + 1 or stands_alone, "one was left out"

    def _run(self, message: StepMessage) -> Frames:
        self.gate.accept(message)
        self.applied.append((message.epoch, message.seq))
        self.model.last_seq = message.seq
        ids = {"epoch": message.epoch, "seq": message.seq, "rank": self.rank}
        if isinstance(message, lc.Relink):
            self.gate.begin_link(message)
            self.model.link = message.rendezvous.link
            kept = codec.encode_step(step.Done(**ids))
        else:
            tokens = random.randbytes(8)  # each run of a step gives different bytes
            kept = codec.encode_step(step.ModelRunnerOutput(**ids, sampled_token_ids=tokens))
        self.ring.keep(message.seq, kept)
        return kept

    def _state(self) -> tuple[object, ...]:
        gate = self.gate
        fields = (gate.epoch, gate.link, gate.last_seq, gate.attached, gate.expired)
        return (*fields, self.lease.status(), self.ring.get(gate.last_seq), len(self.applied))

    def heartbeat(self) -> lc.Heartbeat:
        return lc.Heartbeat(
            worker_uid=self.worker_uid,
            rank=self.rank,
            serving="SERVING",
            load="READY",
            link_state="up",
            epoch=self.gate.epoch,
            link=self.gate.link,
            last_seq=self.gate.last_seq,
            phase="IDLE",
            phase_ms=0,
        )


class Wire:
    """The connection from one driver to one rank, in place of a WorkerClient."""

    def __init__(self, requests: list[tuple[int, Frames]], rank: int) -> None:
        self._requests = requests
        self._rank = rank

    def send_again(self, frames: Frames) -> None:
        self._requests.append((self._rank, frames))


class SimulatedDriver:
    """A driver's state around the real bookkeeping for resending."""

    def __init__(self, identity: DriverIdentity, parts: Parts) -> None:
        self.identity = identity
        self.epoch = 0
        self.link = 0
        self.seq = 0
        self.requests: list[tuple[int, Frames]] = []
        """In flight: (rank, frames)."""
        self.replies: list[Frames] = []
        wires = [Wire(self.requests, rank) for rank in range(RANKS)]
        self.resending = parts.resending(wires, [RANKS - 1])
        self.pending: dict[int, set[int]] = {}
        """Ranks whose answer is awaited, by seq."""
        self.outcomes: dict[tuple[int, int], bytes] = {}
        """Reply bytes by (rank, seq)."""
        self.last_given_up = 0
        self.link_seq = 0
        """seq of the last Relink."""
        self.must_resync = False
        self.unseated = True
        self.daemons: Sequence[Daemon] = ()
        """For checking refusals; the driver itself does not use it."""

    def begin(self, epoch: int, daemons: Sequence[Daemon]) -> None:
        self.epoch, self.seq, self.unseated = epoch, 0, False
        self.daemons = daemons
        self.link = max(daemon.gate.link for daemon in daemons)
        self.must_resync = False
        self.resending.begin_epoch()
        self.resending.meet(range(RANKS), daemons)  # other fields of a status are not read

    def send(self, message: StepMessage, awaited: set[int], sent: dict) -> None:
        frames = [bytes(frame) for frame in codec.encode_step(message)]
        sent[self.epoch, message.seq] = frames
        self.seq = message.seq
        self.pending[message.seq] = awaited
        for rank in range(RANKS):
            self.resending.sent(rank, message.seq, frames)
            self.requests.append((rank, frames))

    @property
    def oldest(self) -> int:
        """Return the first request without an outcome; 0 if none."""
        return min(self.pending, default=0)

    @property
    def links(self) -> bool:
        """Return True while it waits for a new link, before which it sends no step."""
        return self.link_seq in self.pending

    def give_up(self) -> None:
        """Fail all requests in flight: the next step does not depend on them."""
        self.last_given_up = max([self.last_given_up, *self.pending])
        self.pending.clear()
        self.must_resync = True

    def hear(self, frames: Frames, counts: Counts) -> None:
        """Process a reply."""
        _, own = codec.split_replayed(frames)
        reply = codec.decode_step_reply(own)
        if reply.epoch != self.epoch:
            return
        self.resending.restart()
        if isinstance(reply, ErrorReply):
            self._hear_refusal(reply, counts)
            return
        known = self.outcomes.setdefault((reply.rank, reply.seq), bytes(own[0]))
        assert known == own[0], "a replay differs"
        awaited = self.pending.get(reply.seq, set())
        awaited.discard(reply.rank)
        if reply.seq in self.pending and not awaited:
            del self.pending[reply.seq]

    def _hear_refusal(self, reply: ErrorReply, counts: Counts) -> None:
        if reply.code in UNSEATING:
            self.unseated = True
        elif reply.code is ErrorCode.GAP and reply.seq > self.last_given_up:
            if self.resending.mend_gap(reply.rank, reply.expected_seq):
                counts.mended += 1
            else:
                key = self.epoch, reply.expected_seq
                assert key not in self.daemons[reply.rank].applied[-200:], "a late refusal counts"
                self.give_up()
        elif reply.code is ErrorCode.STALE and reply.seq in self.pending:
            self.give_up()


class ExactlyOnce(RuleBasedStateMachine):
    """The state machine. Drawn indices are large and wrap around, because sizes change as a history
    shrinks."""

    parts = Parts()
    counts = Counts()

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        patched = {"time": self.clock, "MAX_MENDS": 10**6}
        self._patch = mock.patch.multiple("worker_client.group.resending", **patched)
        self._patch.start()
        self._directory = tempfile.TemporaryDirectory(prefix="eo-")
        path = Path(self._directory.name)
        self.daemons = [Daemon(n, path, self.parts, self.clock) for n in range(RANKS)]
        self.drivers: list[SimulatedDriver] = []
        self.sent: dict[tuple[int, int], Frames] = {}
        self.num_drivers = 0
        self._attach("try", set(range(RANKS)))

    def teardown(self) -> None:
        try:
            self.heal()
        finally:
            self._patch.stop()
            self._directory.cleanup()

    # ------------------------------------------------------------------ drivers

    @rule(
        kind=st.sampled_from(("attach", "attach in part", "kill", "expire", "detach")),
        which=st.integers(0, 99),
        rank=st.integers(0, RANKS - 1),
        how=st.sampled_from(("wait", "force", "try")),
    )
    def upheaval(self, kind: str, which: int, rank: int, how: str) -> None:
        """Apply an event that ends a driver. One rule for all of them, so that they are not too
        frequent."""
        self.counts.operations += 1
        if kind == "kill":
            self._kill(rank)
        elif kind == "expire":
            self._expire()
        elif kind == "detach":
            self._detach(self._driver(which))
        elif kind == "attach in part":  # the driver is killed between its commits
            self._attach(how, {rank})
        if kind == "attach" or how != "try":
            self._attach(how, set(range(RANKS)))

    def _attach(self, how: str, ranks: set[int]) -> None:
        """Attach a new driver, perhaps only in part."""
        self.num_drivers += 1
        identity = DriverIdentity("", self.num_drivers.to_bytes(16, "big"))
        driver = SimulatedDriver(identity, self.parts)
        if how == "wait":
            self._expire()
        is_held = any(daemon.holds_against(identity) for daemon in self.daemons)
        epoch = self._prepare(driver, force=how == "force")
        assert not (epoch and is_held and how != "force"), "a held lease was taken"
        if not epoch:
            return
        committed = [self.daemons[rank].commit(driver.identity, epoch) for rank in sorted(ranks)]
        if len(committed) == RANKS and all(committed):
            driver.begin(epoch, self.daemons)
            self.counts.attached += 1
            self.drivers.append(driver)
            del self.drivers[:-MAX_DRIVERS]

    def _prepare(self, driver: SimulatedDriver, *, force: bool) -> int:
        epoch = 1
        while True:
            try:
                granted = [d.prepare(driver.identity, epoch, force=force) for d in self.daemons]
            except LeaseHeldError:
                for daemon in self.daemons:
                    daemon.lease.give_up(epoch)
                return 0
            if all(granted):
                return epoch
            epoch = max(epoch, *(daemon.epochs.last for daemon in self.daemons)) + 1

    @rule(which=st.integers(0, 99), count=st.integers(1, 9), arrive=st.booleans())
    def step(self, which: int, count: int, arrive: bool) -> None:
        """Let a driver send its next steps, even if it has lost the daemons. arrive: they and their
        replies arrive in order. If the newest driver knows that it has lost the daemons, another
        attaches."""
        if self.drivers[-1].unseated:
            self._attach("wait", set(range(RANKS)))
        driver = self._driver(which)
        for _ in range(count):
            self.counts.operations += 1
            self._step(driver)
            if arrive:
                self._let_arrive(driver)

    def _step(self, driver: SimulatedDriver) -> None:
        if driver.unseated or driver.links or len(driver.pending) >= CREDITS:
            return
        resync = b"" if driver.must_resync else None
        if resync is not None:
            driver.resending.restart_from(driver.seq + 1)
            driver.must_resync = False
        message = step.ExecuteModel(
            epoch=driver.epoch,
            link=driver.link,
            seq=driver.seq + 1,
            total_num_scheduled_tokens=0,
            scheduled=random.randbytes(4),
            resync=resync,
        )
        driver.send(message, {RANKS - 1}, self.sent)

    @rule(which=st.integers(0, 99))
    def give_up(self, which: int) -> None:
        """Let a deadline pass: requests in flight fail."""
        self.counts.operations += 1
        self._driver(which).give_up()

    @rule(which=st.integers(0, 99))
    def relink(self, which: int) -> None:
        """Let a driver relink the ranks."""
        self.counts.operations += 1
        driver = self._driver(which)
        if driver.unseated:
            return
        self.counts.links += 1
        driver.give_up()
        link = max(daemon.gate.link for daemon in self.daemons) + 1
        driver.resending.restart_from(driver.seq + 1)
        place = Rendezvous(link=link, place=None, rank=0, local_world_size=1)
        ids = {"epoch": driver.epoch, "link": driver.link, "seq": driver.seq + 1}
        driver.send(lc.Relink(**ids, rendezvous=place), set(range(RANKS)), self.sent)
        driver.link, driver.link_seq = link, driver.seq

    @rule(which=st.integers(0, 99), seconds=st.sampled_from((0.05, 0.2, 0.9)))
    def resend(self, which: int, seconds: float) -> None:
        """Let a driver wait, and resend unanswered requests."""
        self.counts.operations += 1
        driver = self._driver(which)
        self._let_time_pass(seconds)
        self._send_overdue(driver)

    def _detach(self, driver: SimulatedDriver) -> None:
        """Let a driver release the lease, even if it has lost it; a confused one continues."""
        for daemon in self.daemons:
            daemon.release(driver.epoch)

    # ------------------------------------------------------------------ daemons and time

    def _kill(self, rank: int) -> None:
        """Kill a daemon; its successor has only the state on disk."""
        self.counts.kills += 1
        self.daemons[rank].start()

    @rule(rank=st.integers(0, RANKS - 1), which=st.integers(0, 99))
    def beat(self, rank: int, which: int) -> None:
        """Deliver a rank's heartbeat to a driver."""
        self.counts.operations += 1
        driver, beat = self._driver(which), self.daemons[rank].heartbeat()
        if beat.epoch == driver.epoch:
            driver.resending.heard(beat, driver.oldest or driver.seq + 1)

    @rule(seconds=st.sampled_from((0.1, 0.5, 0.9)), which=st.integers(0, 99))
    def renew(self, seconds: float, which: int) -> None:
        """Let time pass, and a driver renew its lease."""
        self.counts.operations += 1
        self._let_time_pass(seconds)
        driver = self._driver(which)
        for daemon in self.daemons:
            daemon.renew(driver.identity, driver.epoch)

    @rule(rank=st.integers(0, RANKS - 1), how=st.sampled_from(("cut", "cut", "return", "end")))
    def lose_holder(self, rank: int, how: str) -> None:
        """Cut a driver's connection to one rank, or to all as its process ends."""
        self.counts.operations += 1
        for each in range(RANKS) if how == "end" else (rank,):
            self.daemons[each].lose_holder(how)

    def _expire(self) -> None:
        """Let a lease expire."""
        for _ in range(4):
            self._let_time_pass(0.9)

    def _let_time_pass(self, seconds: float) -> None:
        self.clock.now += seconds
        for daemon in self.daemons:
            daemon.look_at_lease()

    # ------------------------------------------------------------------ the network

    @rule(which=st.integers(0, 99), index=st.integers(0, 7), count=st.integers(1, 9))
    def deliver_requests(self, which: int, index: int, count: int) -> None:
        """Deliver requests: the oldest, or one that overtakes."""
        driver = self._driver(which)
        for _ in range(count):
            self.counts.operations += 1
            self._deliver_request(driver, index)

    @rule(which=st.integers(0, 99), index=st.integers(0, 7), count=st.integers(1, 9))
    def deliver_replies(self, which: int, index: int, count: int) -> None:
        """Deliver replies: the oldest, or one that overtakes."""
        driver = self._driver(which)
        for _ in range(count):
            self.counts.operations += 1
            if driver.replies:
                driver.hear(_take(driver.replies, index), self.counts)

    @rule(which=st.integers(0, 99), index=st.integers(0, 7), reply=st.booleans())
    def drop(self, which: int, index: int, reply: bool) -> None:
        """Lose a message."""
        self.counts.operations += 1
        driver = self._driver(which)
        messages: list = driver.replies if reply else driver.requests
        if messages:
            _take(messages, index)

    @rule(which=st.integers(0, 99), index=st.integers(0, 7), reply=st.booleans())
    def duplicate(self, which: int, index: int, reply: bool) -> None:
        """Duplicate a message; the copy arrives after all others."""
        self.counts.operations += 1
        driver = self._driver(which)
        messages: list = driver.replies if reply else driver.requests
        if messages:
            messages.append(messages[index % len(messages)])

    @rule(
        rank=st.integers(0, RANKS - 1),
        epoch=st.integers(-2, 1),
        link=st.integers(-1, 1),
        seq=st.integers(-3, 3) | st.sampled_from((-REPLAYABLE, 1 - REPLAYABLE)),
        resync=st.booleans(),
    )
    def stranger(self, rank: int, epoch: int, link: int, seq: int, resync: bool) -> None:
        """Deliver a forged step, close to the expected one."""
        self.counts.operations += 1
        gate = self.daemons[rank].gate
        message = step.ExecuteModel(
            epoch=max(0, gate.epoch + epoch),
            link=max(0, gate.link + link),
            seq=max(0, gate.last_seq + seq),
            total_num_scheduled_tokens=0,
            resync=b"" if resync else None,
        )
        is_current = (message.epoch, message.link) == (gate.epoch, gate.link)
        if is_current and (seq == 1 or (resync and seq > 0)):
            return  # indistinguishable from its driver's
        frames = [bytes(frame) for frame in codec.encode_step(message)]
        self._take(self.daemons[rank], frames)

    # ------------------------------------------------------------------ the end

    @precondition(lambda self: self.drivers)
    @rule()
    def heal(self) -> None:
        """Heal the network: the newest driver gets every outcome or error."""
        self.counts.operations += 1
        driver = self.drivers[-1] if self.drivers else None
        if driver is None:
            return
        for _ in range(HEALING_ROUNDS):
            self._let_arrive(driver)
            if driver.unseated or not driver.pending:
                break
            self._let_time_pass(0.5)
            for daemon in self.daemons:
                daemon.renew(driver.identity, driver.epoch)
            self._send_overdue(driver)
        assert driver.unseated or not driver.pending, "a step was lost unnoticed"
        applied = [set(daemon.applied) for daemon in self.daemons]
        for rank, seq in driver.outcomes:
            assert (driver.epoch, seq) in applied[rank], "told, but not applied"

    # ------------------------------------------------------------------ inside

    def _driver(self, which: int) -> SimulatedDriver:
        """Return usually the newest driver, which shrinking prefers, or a replaced one."""
        newest_first = self.drivers[::-1]
        return newest_first[which % len(newest_first) if which % 3 == 0 else 0]

    def _let_arrive(self, driver: SimulatedDriver) -> None:
        """Deliver all messages in flight, in order, but not those sent during this."""
        for _ in range(len(driver.requests)):
            self._deliver_request(driver, 0)
        for _ in range(len(driver.replies)):
            driver.hear(driver.replies.pop(0), self.counts)

    def _deliver_request(self, driver: SimulatedDriver, index: int) -> None:
        if driver.requests:
            rank, frames = _take(driver.requests, index)
            reply = self._take(self.daemons[rank], frames)
            if reply is not None:
                driver.replies.append(reply)

    def _take(self, daemon: Daemon, frames: Frames) -> Frames:
        reply = [bytes(frame) for frame in daemon.take(frames, self.sent, self.counts)]
        _, own = codec.split_replayed(reply)
        decoded = codec.decode_step_reply(own)
        if not isinstance(decoded, ErrorReply):
            key = decoded.epoch, decoded.seq
            first = daemon.first_replies.setdefault(key, own[0])
            assert first == own[0], "a replay differs"
        return reply

    def _send_overdue(self, driver: SimulatedDriver) -> None:
        if driver.pending and self.clock.now >= driver.resending.due:
            awaited = driver.pending[driver.oldest]
            is_step = isinstance(
                codec.decode_step(self.sent[driver.epoch, driver.oldest]), step.ExecuteModel
            )
            answered = () if is_step else set(range(RANKS)) - awaited
            driver.resending.send_overdue(driver.oldest, answered, is_step=is_step)


def _take(messages: list[T], index: int) -> T:
    return messages.pop(index % len(messages))

"""Promises P5 and P6 under random faults: requests and replies that are dropped, doubled, delayed
and overtaken, drivers that come, go, stop and are repeated.

First on the pure parts, by the hundred thousand (FAULTS=100000, as `make faults` asks for); then
with a real driver over real sockets to daemons whose network is faulty, where a step that ran twice
or not at all shows as a wrong token.
"""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from client.driver import Driver
from client.requests import GenerationRequest
from client.scheduler import Scheduler, SchedulerLimits
from client.sent_steps import SentSteps
from client.worker_group import WorkerGroup
from rpc_schema import codec, step
from rpc_schema.config import ParallelConfig
from rpc_schema.errors import ErrorCode, ErrorReply
from tests.support.fake_daemon import FakeDaemon, reference_tokens
from tests.unit.client.conftest import directory, worker_config  # noqa: F401  # a fixture
from worker_daemon.errors import LeaseHeldError
from worker_daemon.server.lease import Lease, LeaseTerms
from worker_daemon.server.replies import error_reply
from worker_daemon.server.reply_channel import ReplyRing
from worker_daemon.server.sequence import StepGate, Verdict

NUM_OPERATIONS = int(os.environ.get("FAULTS", "30000"))
RANKS = 2
CREDITS = 3
TERMS = LeaseTerms(3.0, 60.0)


@dataclass
class Rank:
    """One daemon: the real gate, ring and lease around a list of what was applied."""

    number: int
    lease: Lease
    gate: StepGate = field(default_factory=StepGate)
    ring: ReplyRing = field(default_factory=ReplyRing)
    applied: list[tuple[int, int, bytes]] = field(default_factory=list)
    ids: set[tuple[int, int]] = field(default_factory=set)
    num_fenced: int = 0

    def take(self, frames: Sequence[bytes], randomness: random.Random) -> list[bytes] | None:
        """Do with a request what the step thread does; return the reply."""
        message = codec.decode_step(frames)
        assert isinstance(message, step.ExecuteModel)
        verdict = self.gate.judge(message)
        if verdict is Verdict.RUN:
            self._apply(message)
            reply = step.ModelRunnerOutput(
                epoch=message.epoch,
                seq=message.seq,
                rank=self.number,
                sampled_token_ids=randomness.randbytes(8),
            )
            kept = codec.encode_step(reply)
            self.ring.keep(message.seq, kept)
            return kept
        if verdict is Verdict.REPLAY:
            kept = self.ring.get(message.seq)
            assert kept is not None
            return codec.mark_replayed(kept)
        self.num_fenced += verdict is Verdict.FENCED
        refusal = self.gate.refusal(verdict, message)
        return codec.encode_step(
            error_reply(refusal, epoch=message.epoch, seq=message.seq, rank=self.number)
        )

    def _apply(self, message: step.ExecuteModel) -> None:
        epoch, seq = message.epoch, message.seq
        assert self.lease.status().epoch == epoch, "somebody else's lease"
        assert (epoch, seq) not in self.ids, "applied twice"
        last_epoch, last_seq, _ = self.applied[-1] if self.applied else (0, 0, b"")
        assert epoch >= last_epoch, "a fenced epoch stepped"
        assert seq == (last_seq + 1 if epoch == last_epoch else 1), "one was left out"
        self.gate.accept(message)
        self.ids.add((epoch, seq))
        self.applied.append((epoch, seq, message.scheduled))


@dataclass
class SimulatedDriver:
    """What a driver knows: the real bytes that it keeps, what it waits for, what it was told."""

    driver_id: bytes
    epoch: int
    sent: SentSteps = field(default_factory=lambda: SentSteps(RANKS))
    seq: int = 0
    payloads: dict[int, bytes] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    outcomes: dict[int, bytes] = field(default_factory=dict)
    unseated: bool = False
    num_replays: int = 0


class World:
    """Ranks, drivers, and the network between them."""

    def __init__(self, seed: int) -> None:
        self.randomness = random.Random(seed)
        self.now = 0.0
        self.ranks = [Rank(number, Lease(lambda: self.now)) for number in range(RANKS)]
        self.drivers: list[SimulatedDriver] = []
        self.requests: list[tuple[SimulatedDriver, int, list[bytes]]] = []
        self.replies: list[tuple[SimulatedDriver, list[bytes]]] = []
        self.epoch = 0

    def run(self, num_operations: int) -> None:
        operations = (
            (self.send_step, 6),
            (self.deliver_request, 14),
            (self.deliver_reply, 12),
            (self.drop, 2),
            (self.double, 2),
            (self.send_again, 3),
            (self.let_time_pass, 3),
            (self.attach, 0.4),
            (self.detach, 0.1),
        )
        kinds = [kind for kind, _ in operations]
        weights = [weight for _, weight in operations]
        self.attach()
        for kind in self.randomness.choices(kinds, weights, k=num_operations):
            kind()
        self.settle()

    def some_driver(self) -> SimulatedDriver:
        """Mostly the newest, often one that has been replaced and does not know it."""
        return self.randomness.choice(self.drivers[-3:] + self.drivers[-1:] * 3)

    def attach(self) -> None:
        driver_id = self.randomness.randbytes(16)
        force = self.randomness.random() < 0.3
        for rank in self.ranks:
            try:
                rank.lease.check_free_for(driver_id, force=force)
            except LeaseHeldError:
                return
        self.epoch += self.randomness.randint(1, 3)
        for rank in self.ranks:
            rank.lease.grant(driver_id, self.epoch, TERMS)
            rank.gate.attach(self.epoch)
            rank.ring = ReplyRing()
        self.drivers.append(SimulatedDriver(driver_id, self.epoch))

    def detach(self) -> None:
        driver = self.some_driver()
        for rank in self.ranks:
            if rank.lease.release(driver.epoch):
                assert driver is self.drivers[-1]
                rank.gate.detach(driver.epoch)

    def let_time_pass(self) -> None:
        self.now += self.randomness.choice((0.1, 0.25, 0.5))
        driver = self.drivers[-1]
        renews = self.randomness.random() < 0.8
        for rank in self.ranks:
            if renews and rank.lease.status().state == "held":
                rank.lease.renew(driver.driver_id, driver.epoch)
            expired = rank.lease.take_expiry()
            if expired:
                rank.gate.expire(expired)

    def send_step(self) -> None:
        driver = self.some_driver()
        if len(driver.pending) >= CREDITS or driver.unseated:
            return
        driver.seq += 1
        payload = self.randomness.randbytes(4)
        driver.payloads[driver.seq] = payload
        driver.pending.add(driver.seq)
        frames = codec.encode_step(
            step.ExecuteModel(
                epoch=driver.epoch,
                link=0,
                seq=driver.seq,
                total_num_scheduled_tokens=0,
                scheduled=payload,
            )
        )
        for rank in range(RANKS):
            driver.sent.keep(rank, driver.seq, frames)
            self.requests.append((driver, rank, frames))

    def send_again(self) -> None:
        driver, rank = self.some_driver(), self.randomness.randrange(RANKS)
        if driver.pending:
            self.resend(driver, rank, min(driver.pending))

    def resend(self, driver: SimulatedDriver, rank: int, seq: int) -> None:
        for kept in driver.sent.since(rank, seq):
            self.requests.append((driver, rank, kept.frames))

    def pick(self, messages: list) -> int:
        """Mostly the oldest; sometimes one overtakes."""
        if self.randomness.random() < 0.8:
            return 0
        return self.randomness.randrange(len(messages))

    def deliver_request(self) -> None:
        if self.requests:
            driver, number, frames = self.requests.pop(self.pick(self.requests))
            reply = self.ranks[number].take(frames, self.randomness)
            self.replies.append((driver, reply))

    def deliver_reply(self) -> None:
        if self.replies:
            self.hear(*self.replies.pop(self.pick(self.replies)))

    def drop(self) -> None:
        messages = self.randomness.choice((self.requests, self.replies))
        if messages:
            messages.pop(self.randomness.randrange(len(messages)))

    def double(self) -> None:
        messages = self.randomness.choice((self.requests, self.replies))
        if messages:
            messages.append(self.randomness.choice(messages))

    def hear(self, driver: SimulatedDriver, frames: list[bytes]) -> None:
        replayed, own = codec.split_replayed(frames)
        driver.num_replays += replayed
        reply = codec.decode_step_reply(own)
        assert reply.epoch == driver.epoch
        if isinstance(reply, ErrorReply):
            if reply.code is ErrorCode.GAP and not driver.unseated:
                self.resend(driver, reply.rank, reply.expected_seq)
            elif reply.code in (
                ErrorCode.FENCED,
                ErrorCode.LEASE_EXPIRED,
                ErrorCode.NOT_ATTACHED,
            ):
                driver.unseated = True
            return
        if reply.rank == RANKS - 1:
            known = driver.outcomes.setdefault(reply.seq, own[0])
            assert known == own[0], "a replay differs"
            driver.pending.discard(reply.seq)
        oldest = min(driver.pending, default=driver.seq + 1)
        driver.sent.heard(reply.rank, reply.seq, is_busy=False, outstanding=oldest)

    def settle(self) -> None:
        """The network heals: everybody hears of everything, or of why not."""
        for driver in self.drivers:
            for _ in range(100):
                while self.requests:
                    self.deliver_request()
                while self.replies:
                    self.deliver_reply()
                if not driver.pending or driver.unseated:
                    break
                for rank in range(RANKS):
                    self.resend(driver, rank, min(driver.pending))
            assert driver.unseated or not driver.pending, "a step was lost unnoticed"
        self.check()

    def check(self) -> None:
        by_epoch = {driver.epoch: driver for driver in self.drivers}
        for rank in self.ranks:
            for epoch, seq, payload in rank.applied:
                assert by_epoch[epoch].payloads[seq] == payload
        for driver in self.drivers:
            for seq in driver.outcomes:
                assert (driver.epoch, seq) in self.ranks[-1].ids, "told, but not applied"


@pytest.mark.parametrize("seed", range(3))
def test_pure_parts_under_random_faults(seed):
    world = World(seed)
    world.run(NUM_OPERATIONS // 3)
    assert len(world.drivers) > 3
    assert sum(driver.num_replays for driver in world.drivers) > 10
    assert sum(rank.num_fenced for rank in world.ranks) > 10
    assert min(len(rank.applied) for rank in world.ranks) > NUM_OPERATIONS // 200


def test_a_gate_that_forgets_is_found_out():
    """The model can fail: a daemon that takes a repeated step for a new one is caught."""
    world = World(1)
    for rank in world.ranks:
        rank.gate = ForgetfulGate()
    with pytest.raises(AssertionError, match=r"applied twice|left out"):
        world.run(2000)


class ForgetfulGate(StepGate):
    def judge(self, message):
        verdict = super().judge(message)
        return Verdict.RUN if verdict is Verdict.REPLAY else verdict


# A real driver over real sockets.


class FaultyNetworkDaemon(FakeDaemon):
    """A fake daemon to and from which messages get lost, are doubled, late, and overtake."""

    def __init__(self, endpoint: str, seed: int) -> None:
        super().__init__(endpoint)
        self.randomness = random.Random(seed)
        self.share = 0.0
        """Of the messages that something happens to."""
        self.num_faults = 0
        self._held: dict[str, list] = {"in": [], "out": []}

    def _arrive(self, frames):
        for passed in self._mangled("in", frames):
            super()._arrive(passed)

    def _depart(self, epoch, frames, delay_s=0.0):
        for passed_epoch, passed in self._mangled("out", (epoch, frames)):
            super()._depart(passed_epoch, passed, delay_s)

    def _mangled(self, way, message):
        """What passes now: a message that is held back comes behind the next one, if any."""
        late, self._held[way] = self._held[way], []
        if self.randomness.random() >= self.share:
            return [message, *late]
        self.num_faults += 1
        fault = self.randomness.choice(("drop", "double", "hold"))
        if fault == "hold":
            self._held[way] = [message]
        return [*([message] * 2 if fault == "double" else []), *late]


@pytest.fixture
def faulty(directory):  # noqa: F811
    daemons = [
        FaultyNetworkDaemon(f"ipc://{directory}/w{rank}", rank).start() for rank in range(RANKS)
    ]
    yield daemons
    for daemon in daemons:
        daemon.stop()


def test_generation_over_a_faulty_network_gives_the_right_tokens(faulty, monkeypatch):
    monkeypatch.setattr("client.resending.RESEND_AFTER_S", 0.01)
    monkeypatch.setattr("client.resending.MEND_AGAIN_S", 0.002)
    monkeypatch.setattr("client.resending.MAX_MENDS", 1000)
    randomness = random.Random(3)
    parallel = ParallelConfig(pipeline_parallel_size=RANKS)
    with WorkerGroup([daemon.endpoint for daemon in faulty], parallel) as group:
        group.attach()
        model = group.prepare(worker_config(RANKS, max_num_seqs=8))
        for daemon in faulty:
            daemon.share = 0.2
        limits = SchedulerLimits(
            8, 32, model.max_model_len, model.num_blocks, model.block_size, RANKS
        )
        driver = Driver(group, Scheduler(limits))
        prompts = {
            str(i): [randomness.randrange(1000) for _ in range(randomness.randint(1, 40))]
            for i in range(NUM_OPERATIONS // 600)
        }
        for name, prompt in prompts.items():
            driver.add_request(
                GenerationRequest(
                    id=name, prompt_token_ids=np.array(prompt, np.int32), max_tokens=40
                )
            )
        failures = []
        step_failed = driver.scheduler.step_failed
        driver.scheduler.step_failed = lambda *args: failures.append(args) or step_failed(*args)
        outputs = {output.req_id: output.token_ids for output in driver.run()}
        assert failures == []
        for name, prompt in prompts.items():
            assert outputs[name] == reference_tokens(prompt, 40, frozenset())
        for daemon in faulty:
            seqs = [execute.seq for execute in daemon.executes]
            assert len(seqs) == len(set(seqs))
        assert sum(daemon.num_faults for daemon in faulty) > len(prompts)

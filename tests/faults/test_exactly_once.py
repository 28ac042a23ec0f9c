"""Exactly-once execution under random faults: requests and replies that are dropped, doubled,
delayed and overtaken, drivers that come, go, stop and are repeated, daemons that are killed.

First on the pure parts, by the hundred thousand (FAULTS=100000, as `make faults` asks for), as a
state machine whose failures shrink, with broken parts to show that it finds them; then with a real
driver over real sockets to daemons whose network is faulty, where a step that ran twice or not at
all shows as a wrong token.
"""

import os
import random
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from rpc_schema.codec import Frame, StepMessage
from rpc_schema.config import ParallelConfig
from tests.support.driving import RecordingGroup
from tests.support.exactly_once import RANKS, Counts, ExactlyOnce, Parts
from tests.support.fake_daemon import FakeDaemon, reference_tokens
from tests.support.serving import LONG_LEASE
from tests.unit.client.conftest import directory, worker_config  # noqa: F401  # a fixture
from worker_client.driver import Driver
from worker_client.group.resending import Resending
from worker_client.requests import GenerationRequest
from worker_client.scheduler import Scheduler, SchedulerLimits
from worker_client.worker_group import WorkerGroup
from worker_daemon.server.sequence import GateResult, StepGate
from worker_daemon.server.session.epochs import EpochFile
from worker_daemon.server.session.lease import DriverIdentity, Lease
from worker_daemon.server.wire.reply_channel import ReplyRing

NUM_OPERATIONS = int(os.environ.get("FAULTS", "10000"))
RULES_A_HISTORY = 80
NUM_HISTORIES = 40
"""Histories of one round; rounds are repeated until there were enough operations."""
NUM_REQUESTS = 50
"""Over the faulty network."""
HISTORIES_TO_FIND = 300
"""Maximum number of operations until a broken component is found."""


def histories(parts: Parts, count: int, phases: Sequence[Phase]) -> Counts:
    """Run random histories on these parts; return what was done in them."""

    class Machine(ExactlyOnce):
        pass

    Machine.parts, Machine.counts = parts, Counts()
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=count,
            stateful_step_count=RULES_A_HISTORY,
            deadline=None,
            database=None,
            derandomize=False,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return Machine.counts


@pytest.mark.timeout(1800)
def test_random_histories_apply_each_step_once():
    total = Counts()
    while total.operations < NUM_OPERATIONS or not has_seen_all(total):
        total += histories(Parts(), NUM_HISTORIES, (Phase.generate, Phase.shrink))
        assert total.operations < 10 * NUM_OPERATIONS, f"these histories show little: {total}"
    print(total)
    assert total.applied > NUM_OPERATIONS / 50


def has_seen_all(counts: Counts) -> bool:
    """Check that every kind of event happened."""
    events = (counts.replayed, counts.mended, counts.attached, counts.links, counts.kills)
    refusals = {"stale", "gap", "fenced", "not attached", "expired"}
    return min(events) > 10 and counts.refused.keys() >= refusals


# Parts that are broken.


class RunsTwice(StepGate):
    """Takes a repeated step for a new one."""

    def check(self, message: StepMessage) -> GateResult:
        result = super().check(message)
        return GateResult.RUN if result is GateResult.REPLAY else result


class SkipsEpochs(StepGate):
    """Does not check the driver of a step."""

    def check(self, message: StepMessage) -> GateResult:
        return super().check(_with(message, epoch=self.epoch))


class SkipsLinks(StepGate):
    """Does not check the link of a step."""

    def check(self, message: StepMessage) -> GateResult:
        return super().check(_with(message, link=self.link))


class SkipsGaps(StepGate):
    """Runs a step although an earlier one is missing."""

    def check(self, message: StepMessage) -> GateResult:
        result = super().check(message)
        return GateResult.RUN if result is GateResult.GAP else result


class ForgetsExpiry(StepGate):
    def expire(self, epoch: int) -> None:
        pass


class ForgetsDetach(StepGate):
    def detach(self, epoch: int) -> None:
        pass


class AcceptsWhileChecking(StepGate):
    """A refused request uses its seq up."""

    def check(self, message: StepMessage) -> GateResult:
        result = super().check(message)
        if result is GateResult.GAP:
            self.last_seq = message.seq
        return result


RANK = 3
"""Its offset in a reply, after tag, epoch and seq."""


class OtherBytes(ReplyRing):
    """Encodes a replay again."""

    def get(self, seq: int) -> Sequence[Frame] | None:
        kept = super().get(seq)
        if kept is None:
            return None
        message = msgspec.msgpack.decode(kept[0])
        message[RANK] += 1
        return [msgspec.msgpack.encode(message), *kept[1:]]


class KeepsNothing(ReplyRing):
    def keep(self, seq: int, frames: Sequence[Frame]) -> None:
        pass


class NeverEnds(Lease):
    def take_expiry(self) -> int:
        return 0


class AnybodyRenews(Lease):
    """Renews the lease for any driver."""

    def renew(self, driver: DriverIdentity, epoch: int, *, yields: bool = False) -> bool:
        if self._holder is None:
            return super().renew(driver, epoch)
        return super().renew(self._holder.driver, self._holder.epoch)


class ForgetsEpochs(EpochFile):
    """Grants an epoch again after a restart."""

    def record(self, epoch: int) -> None:
        self.last = epoch


class NeverSendsAgain(Resending):
    def send_overdue(self, *_: object, **__: object) -> None:
        pass


class BelievesMended(Resending):
    """Reports a gap as closed, but sends nothing."""

    def mend_gap(self, rank: int, expected: int) -> bool:
        return True

    def send_overdue(self, *_: object, **__: object) -> None:
        pass


def _with(message: StepMessage, **fields: int) -> StepMessage:
    return msgspec.structs.replace(message, **fields)


BROKEN = {
    **{part.__name__: {"gate": part} for part in StepGate.__subclasses__()},
    **{part.__name__: {"ring": part} for part in ReplyRing.__subclasses__()},
    **{part.__name__: {"lease": part} for part in Lease.__subclasses__()},
    **{part.__name__: {"epochs": part} for part in EpochFile.__subclasses__()},
    **{part.__name__: {"resending": part} for part in Resending.__subclasses__()},
}


QUICKLY_FOUND = ("RunsTwice", "SkipsEpochs", "OtherBytes")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICKLY_FOUND else pytest.mark.exhaustive)
        for name in BROKEN
    ],
)
def test_broken_part_is_found(name):
    with pytest.raises(AssertionError) as found:
        histories(replace(Parts(), **BROKEN[name]), HISTORIES_TO_FIND, (Phase.generate,))
    print(f"{name}: {found.value}")


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
        """Return the messages that pass now: a held-back message follows the next one, if any."""
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
    monkeypatch.setattr("worker_client.group.resending.RESEND_AFTER_S", 0.01)
    monkeypatch.setattr("worker_client.group.resending.MEND_AGAIN_S", 0.002)
    monkeypatch.setattr("worker_client.group.resending.MAX_MENDS", 1000)
    randomness = random.Random(3)
    parallel = ParallelConfig(pipeline_parallel_size=RANKS)
    with WorkerGroup([daemon.endpoint for daemon in faulty], parallel, lease=LONG_LEASE) as group:
        group.attach()
        model = group.prepare(worker_config(RANKS, max_num_seqs=8))
        for daemon in faulty:
            daemon.share = 0.2
        limits = SchedulerLimits(
            8, 32, model.max_model_len, model.num_blocks, model.block_size, RANKS
        )
        recording = RecordingGroup(group)
        driver = Driver(recording, Scheduler(limits))
        prompts = {
            str(i): [randomness.randrange(1000) for _ in range(randomness.randint(1, 40))]
            for i in range(NUM_REQUESTS)
        }
        for name, prompt in prompts.items():
            driver.add_request(
                GenerationRequest(id=name, prompt=np.array(prompt, np.int32), max_tokens=40)
            )
        outputs = {output.req_id: output.token_ids for output in driver.run()}
        assert recording.failures == []
        for name, prompt in prompts.items():
            assert outputs[name] == reference_tokens(prompt, 40, frozenset())
        for daemon in faulty:
            seqs = [execute.seq for execute in daemon.executes]
            assert len(seqs) == len(set(seqs))
        assert sum(daemon.num_faults for daemon in faulty) > len(prompts)

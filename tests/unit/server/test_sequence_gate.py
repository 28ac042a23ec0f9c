"""The gate's verdicts, one by one. Under random requests: tests/faults/test_exactly_once.py."""

import pytest

from rpc_schema import lifecycle as lc
from rpc_schema import step
from rpc_schema.codec import StepMessage
from rpc_schema.errors import FencedError, GapError, LeaseExpiredError, NotAttachedError, StaleError
from tests.unit.server.driver import rendezvous
from worker_daemon.server.sequence import REPLAYABLE, GateResult, StepGate


def execute(epoch: int, link: int, seq: int, *, resync: bool = False) -> step.ExecuteModel:
    return step.ExecuteModel(
        epoch=epoch,
        link=link,
        seq=seq,
        total_num_scheduled_tokens=0,
        resync=b"" if resync else None,
    )


def relink(epoch: int, link: int, seq: int, new_link: int) -> lc.Relink:
    return lc.Relink(epoch=epoch, link=link, seq=seq, rendezvous=rendezvous(new_link))


def gate_at(epoch: int, link: int, seq: int) -> StepGate:
    gate = StepGate()
    gate.attach(epoch)
    gate.link, gate.last_seq = link, seq
    return gate


@pytest.mark.parametrize(
    ("message", "result"),
    [
        (execute(5, 2, 101), GateResult.RUN),
        (execute(5, 2, 100), GateResult.REPLAY),
        (execute(5, 1, 100), GateResult.REPLAY),
        (execute(5, 2, 100 - REPLAYABLE + 1), GateResult.REPLAY),
        (execute(5, 2, 100 - REPLAYABLE), GateResult.STALE),
        (execute(5, 2, 0), GateResult.STALE),
        (execute(5, 2, 102), GateResult.GAP),
        (execute(5, 2, 102, resync=True), GateResult.RUN),
        (execute(5, 2, 100, resync=True), GateResult.REPLAY),
        (execute(5, 1, 101), GateResult.FENCED),
        (execute(5, 3, 101), GateResult.FENCED),
        (execute(5, 1, 102), GateResult.FENCED),
        (execute(4, 2, 101), GateResult.FENCED),
        (execute(6, 2, 101), GateResult.NOT_ATTACHED),
        (relink(5, 2, 101, 3), GateResult.RUN),
        (relink(5, 2, 109, 3), GateResult.RUN),
        (relink(5, 1, 101, 3), GateResult.RUN),
        (relink(5, 2, 101, 2), GateResult.FENCED),
        (relink(5, 3, 101, 4), GateResult.FENCED),
        (lc.Reset(epoch=5, link=2, seq=105, to="CREATED"), GateResult.RUN),
        (lc.Reset(epoch=5, link=1, seq=105, to="CREATED"), GateResult.FENCED),
        (lc.GetKVCacheSpec(epoch=5, link=2, seq=102), GateResult.GAP),
    ],
)
def test_check(message: StepMessage, result: GateResult) -> None:
    assert gate_at(5, 2, 100).check(message) is result


def test_nothing_runs_before_the_first_attach() -> None:
    assert StepGate().check(execute(0, 0, 1)) is GateResult.NOT_ATTACHED


def test_fenced_driver_learns_who_has_taken_over() -> None:
    gate = gate_at(5, 2, 100)
    gate.attach(6, "host:7 (driver 0123abcd)")
    message = execute(5, 2, 101)
    refusal = gate.refusal(gate.check(message), message)
    assert "epoch 5 is fenced: host:7 (driver 0123abcd) has attached as epoch 6" in str(refusal)


def test_seq_zero_is_never_replayed() -> None:
    assert gate_at(5, 0, 3).check(execute(5, 0, 0)) is GateResult.STALE


def test_detach_ends_the_epoch_and_attach_begins_with_one() -> None:
    gate = gate_at(5, 2, 100)
    gate.detach(4)
    assert gate.check(execute(5, 2, 101)) is GateResult.RUN
    gate.detach(5)
    assert gate.check(execute(5, 2, 101)) is GateResult.NOT_ATTACHED
    gate.attach(9)
    assert gate.check(execute(5, 2, 101)) is GateResult.FENCED
    assert gate.check(execute(9, 2, 1)) is GateResult.RUN


def test_expired_epoch_runs_nothing_new_but_is_still_answered() -> None:
    gate = gate_at(5, 2, 100)
    gate.expire(4)
    assert gate.check(execute(5, 2, 101)) is GateResult.RUN
    gate.expire(5)
    new = (execute(5, 2, 101), execute(5, 2, 103, resync=True), relink(5, 2, 101, 3))
    for message in (*new, lc.Reset(epoch=5, link=2, seq=105, to="CREATED")):
        assert gate.check(message) is GateResult.EXPIRED
        refusal = gate.refusal(GateResult.EXPIRED, message)
        assert isinstance(refusal, LeaseExpiredError)
        assert "the lease of epoch 5 has expired" in str(refusal)
    assert gate.check(execute(5, 2, 100)) is GateResult.REPLAY
    assert gate.check(execute(4, 2, 101)) is GateResult.FENCED
    gate.attach(6)
    assert gate.check(execute(6, 2, 1)) is GateResult.RUN


def test_a_new_link_counts_from_its_attempt() -> None:
    gate = gate_at(5, 2, 100)
    message = relink(5, 2, 101, 7)
    gate.accept(message)
    gate.begin_link(message)
    assert gate.check(execute(5, 2, 102)) is GateResult.FENCED
    assert gate.check(execute(5, 7, 102)) is GateResult.RUN


@pytest.mark.parametrize(
    ("message", "error", "words"),
    [
        (execute(5, 2, 109), GapError, "step 101 is missing"),
        (
            execute(4, 2, 1),
            FencedError,
            "is fenced: another driver has attached as epoch 5",
        ),
        (execute(5, 1, 101), FencedError, "epoch 5 with link 2 holds"),
        (execute(8, 2, 1), NotAttachedError, "epoch 8 is not attached"),
        (execute(5, 2, 3), StaleError, "last accepted is 100"),
    ],
)
def test_refusals_say_why(message: StepMessage, error: type[Exception], words: str) -> None:
    gate = gate_at(5, 2, 100)
    refusal = gate.refusal(gate.check(message), message)
    assert isinstance(refusal, error)
    assert words in str(refusal)

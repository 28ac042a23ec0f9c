"""Errors to wire words, and the ring that makes replays identical."""

from collections.abc import Iterator

import pytest

from rpc_schema.codec import decode_control_reply, decode_step_reply, encode_control, encode_step
from rpc_schema.errors import (
    CheckpointError,
    ErrorCode,
    ErrorScope,
    GapError,
    InvalidStepError,
    StaleError,
    StateError,
    WorkerError,
)
from worker_daemon.server.sequence import REPLAYABLE
from worker_daemon.server.wire.replies import classify, control_error_reply, error_reply
from worker_daemon.server.wire.reply_channel import MAX_RING_BYTES, ReplyRing


def all_errors(root: type[WorkerError] = WorkerError) -> Iterator[type[WorkerError]]:
    yield root
    for child in root.__subclasses__():
        yield from all_errors(child)


@pytest.mark.parametrize("kind", sorted(set(all_errors()), key=lambda kind: kind.__name__))
def test_every_error_of_ours_has_wire_words(kind: type[WorkerError]) -> None:
    error = kind(3, 5) if kind is GapError else kind("x" * 100_000)
    assert classify(error) == (ErrorCode(kind.code), ErrorScope(kind.scope))
    reply = error_reply(error, epoch=1, seq=2, rank=3)
    assert decode_step_reply(encode_step(reply)) == reply


def test_every_code_is_that_of_some_error() -> None:
    assert set(ErrorCode) == {kind.code for kind in all_errors()}


def test_an_unforeseen_exception_costs_one_step_and_shows_its_traceback() -> None:
    try:
        [][1]
    except IndexError as error:
        reply = error_reply(error, epoch=1, seq=2, rank=3)
        control = control_error_reply(error, call=4)
    assert (reply.code, reply.scope) == (ErrorCode.INTERNAL, ErrorScope.STEP)
    assert "test_replies_and_ring.py" in reply.traceback
    assert "list index out of range" in reply.message
    assert decode_control_reply([encode_control(control)]) == control


@pytest.mark.parametrize("kind", [StaleError, StateError, CheckpointError, InvalidStepError])
def test_a_refusal_is_its_message_alone(kind: type[WorkerError]) -> None:
    try:
        raise kind("it cannot be")
    except WorkerError as error:
        reply = error_reply(error, epoch=1, seq=2, rank=3)
        control = control_error_reply(error, call=4)
    assert "it cannot be" in reply.message
    assert (reply.traceback, control.traceback) == ("", "")


def test_a_gap_names_the_missing_seq() -> None:
    assert error_reply(GapError(7, 9), epoch=1, seq=9, rank=0).expected_seq == 7


def test_ring_keeps_the_last_replies() -> None:
    ring = ReplyRing()
    for seq in range(1, REPLAYABLE + 11):
        ring.keep(seq, [str(seq).encode()])
    assert ring.get(10) is None
    assert ring.get(11) == [b"11"]
    assert ring.get(REPLAYABLE + 10) == [str(REPLAYABLE + 10).encode()]


def test_ring_is_bounded_in_bytes() -> None:
    ring = ReplyRing()
    quarter = bytes(MAX_RING_BYTES // 4)
    for seq in range(1, 5):
        ring.keep(seq, [quarter])
    assert ring.get(1) is not None
    ring.keep(5, [b"x"])
    assert ring.get(1) is None
    assert ring.get(2) is not None

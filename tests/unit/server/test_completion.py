"""Outcomes on their way to a driver: in order from either thread, immediately if no result is
awaited, and without loss."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import zmq

from rpc_schema import step
from rpc_schema.base import StepReply
from rpc_schema.codec import (
    MAX_STEP_BYTES,
    Frame,
    decode_step_reply,
    encode_step,
    split_replayed,
)
from rpc_schema.error_replies import ErrorReply
from rpc_schema.errors import CommError, ErrorCode
from rpc_schema.lifecycle import Attached
from tests.unit.server.driver import wait_for
from worker_daemon.server.completion import Completion
from worker_daemon.server.progress import Progress

EPOCH, RANK, LINK = 7, 3, 11


def output(seq: int) -> step.ModelRunnerOutput:
    return step.ModelRunnerOutput(
        epoch=EPOCH, seq=seq, rank=RANK, slots=b"\1", sampled_token_ids=os.urandom(4)
    )


@dataclass
class Result:
    """A PendingReply that notes which thread took it."""

    reply: step.ModelRunnerOutput
    is_ready: bool = True
    wait: Callable[[], object] = lambda: None
    error: Exception | None = None
    arrays: list[Frame] = field(default_factory=list)
    taken_by: threading.Thread | None = None

    def result(self) -> tuple[step.ModelRunnerOutput, list[Frame]]:
        self.taken_by = threading.current_thread()
        self.wait()
        if self.error is not None:
            raise self.error
        return self.reply, self.arrays


class Attachment:
    """A completion with the test as its step thread, and the driver at the other end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.failures: list[tuple[ErrorReply, int]] = []
        results = context.socket(zmq.ROUTER)
        results.setsockopt(zmq.ROUTER_MANDATORY, 1)
        results.bind("inproc://results")
        self.driver = context.socket(zmq.DEALER)
        self.driver.setsockopt(zmq.ROUTING_ID, b"d" * 16)
        self.completion = Completion(
            results, Progress("cpu"), lambda reply, link: self.failures.append((reply, link))
        )
        self.completion.thread.start()

    def attach(self) -> None:
        heard = threading.Event()
        greeting = Attached(epoch=EPOCH, seq=0, rank=RANK)
        self.completion.attached(b"d" * 16, greeting, heard.set)
        assert heard.wait(10)
        self.driver.connect("inproc://results")  # late, so that the greeting is tried again
        assert self.receive() == greeting
        self.settle()

    def greet(self) -> None:
        """Attach again, as the next driver of the same name."""
        greeting = Attached(epoch=EPOCH, seq=0, rank=RANK)
        self.completion.attached(b"d" * 16, greeting, lambda: None)
        assert self.receive() == greeting

    def settle(self) -> None:
        """Let the completion thread become idle: outcomes are sent from this thread again."""
        for seq in range(10_000, 20_000):
            probe = Result(output(seq))
            self.completion.pending(seq, probe, LINK)
            assert self.receive().seq == seq
            if probe.taken_by is threading.current_thread():
                return
            time.sleep(0.001)
        raise AssertionError("the completion thread never becomes idle")

    def frames(self) -> list[bytes]:
        assert self.driver.poll(10_000), "nothing came"
        return self.driver.recv_multipart()

    def receive(self) -> StepReply:
        return decode_step_reply(self.frames())

    def close(self) -> None:
        self.completion.stop()
        assert self.completion.thread.join_within(10)
        self.driver.close(0)


@pytest.fixture
def attached() -> Iterator[Attachment]:
    with zmq.Context() as context:
        attachment = Attachment(context)
        try:
            attachment.attach()
            yield attachment
        finally:
            attachment.close()


def test_delays_count_from_the_result_on_the_host(attached: Attachment) -> None:
    attached.greet()
    delays = attached.completion.channel.delays
    assert delays.summary().num_replies == 0  # those of the former driver are forgotten
    wait_s, take_s, came_ns = 0.4, 0.02, []

    def come() -> None:
        time.sleep(wait_s)
        came_ns.append(time.monotonic_ns())

    attached.completion.pending(1, Result(output(1), is_ready=False, wait=come), LINK)
    wait_for(lambda: delays.summary().num_replies == 1)
    since_s = (time.monotonic_ns() - came_ns[0]) / 1e9
    waited = delays.summary()
    assert 0 < waited.p50_us == waited.p99_us <= since_s * 1e6
    for seq in range(2, 5):
        there = Result(output(seq), wait=lambda: time.sleep(take_s))
        attached.completion.pending(seq, there, LINK)
    wait_for(lambda: delays.summary().num_replies == 4)
    assert delays.summary().p50_us >= take_s * 1e6


def test_only_results_that_come_have_a_delay(attached: Attachment) -> None:
    attached.greet()
    attached.completion.reply(output(1))
    attached.completion.pending(2, Result(output(2), error=CommError("lost")), LINK)
    attached.completion.nothing(3)
    attached.completion.pending(4, Result(output(4)), LINK)
    assert [attached.receive().seq for _ in range(3)] == [1, 2, 4]
    delays = attached.completion.channel.delays
    wait_for(lambda: delays.summary().num_replies > 0)
    assert delays.summary().num_replies == 1


def test_outcomes_leave_in_their_order_whichever_thread_sends_them(attached: Attachment) -> None:
    rng = np.random.default_rng()
    results: list[Result] = []
    expected: list[StepReply] = []
    seqs: list[int] = []
    for seq in range(1, 300):
        kind = rng.choice(["ready", "slow", "reply", "nothing", "failed", "refused"])
        reply = output(seq)
        if kind == "reply":
            attached.completion.reply(reply)
        elif kind == "nothing":
            attached.completion.nothing(seq)
        elif kind == "refused":
            refusal = ErrorReply(
                epoch=EPOCH, seq=seq, rank=RANK, code=ErrorCode.GAP, scope="step", message=""
            )
            attached.completion.refuse(b"d" * 16, refusal)
        else:
            pause = float(rng.uniform(0, 0.002)) if kind == "slow" else 0.0
            result = Result(
                reply,
                is_ready=kind != "slow",
                wait=lambda pause=pause: time.sleep(pause),
                error=CommError("lost") if kind == "failed" else None,
            )
            results.append(result)
            attached.completion.pending(seq, result, LINK)
        if kind != "nothing":
            expected.append(reply)
        if rng.random() < 0.1:
            seqs += [attached.receive().seq for _ in expected[len(seqs) :]]
            attached.settle()
    seqs += [attached.receive().seq for _ in expected[len(seqs) :]]
    assert seqs == [reply.seq for reply in expected]
    threads = {result.taken_by for result in results}
    assert len(threads) == 2
    assert threading.current_thread() in threads


def test_ready_result_waits_behind_one_that_is_not(attached: Attachment) -> None:
    released = threading.Event()
    slow = Result(output(1), is_ready=False, wait=lambda: released.wait(10))
    ready = Result(output(2))
    attached.completion.pending(1, slow, LINK)
    attached.completion.pending(2, ready, LINK)
    attached.completion.reply(output(3))
    assert not attached.driver.poll(50)
    assert ready.taken_by is None
    released.set()
    assert [attached.receive().seq for _ in range(3)] == [1, 2, 3]
    assert ready.taken_by is slow.taken_by is not threading.current_thread()


def test_ready_result_is_sent_before_the_call_returns(attached: Attachment) -> None:
    for seq in range(1, 50):
        result = Result(output(seq))
        attached.completion.pending(seq, result, LINK)
        assert result.taken_by is threading.current_thread()
        assert attached.receive() == result.reply


@pytest.mark.parametrize("is_ready", [True, False])
def test_failed_result_is_told_to_the_driver_and_to_the_daemon(
    attached: Attachment, is_ready: bool
) -> None:
    failing = Result(output(1), is_ready=is_ready, error=CommError("peer 2 is gone"))
    attached.completion.pending(1, failing, LINK)
    attached.completion.pending(2, Result(output(2)), LINK)
    reply = attached.receive()
    assert isinstance(reply, ErrorReply)
    assert (reply.epoch, reply.seq, reply.rank) == (EPOCH, 1, RANK)
    assert reply.code is ErrorCode.COMM
    assert attached.receive().seq == 2
    assert attached.failures == [(reply, LINK)]


def test_reply_that_cannot_be_encoded_becomes_a_failure_of_its_seq(attached: Attachment) -> None:
    too_large = Result(output(1), arrays=[bytes(MAX_STEP_BYTES)])
    attached.completion.pending(1, too_large, LINK)
    reply = attached.receive()
    assert isinstance(reply, ErrorReply)
    assert (reply.seq, reply.code) == (1, ErrorCode.TOO_LARGE)
    attached.completion.pending(2, Result(output(2)), LINK)
    assert attached.receive().seq == 2


def test_replay_of_what_either_thread_sent_is_identical(attached: Attachment) -> None:
    sent = {}
    for seq, is_ready in ((1, True), (2, False), (3, True)):
        reply, arrays = output(seq), [os.urandom(8), os.urandom(4)]
        attached.completion.pending(seq, Result(reply, is_ready=is_ready, arrays=arrays), LINK)
        sent[seq] = attached.frames()
        assert sent[seq] == encode_step(reply, arrays)
    attached.completion.nothing(4)
    for seq in (2, 4, 1, 3):
        attached.completion.replay(seq)
    replays = [split_replayed(attached.frames()) for _ in range(3)]
    assert replays == [(True, sent[seq]) for seq in (2, 1, 3)]


def test_driver_that_is_gone_costs_nothing(attached: Attachment) -> None:
    attached.driver.close(0)
    for seq in range(1, 20):
        attached.completion.pending(seq, Result(output(seq), is_ready=seq % 2 == 0), LINK)
    assert not attached.failures

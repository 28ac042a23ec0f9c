"""What a daemon process answers to an observer, beside a driver: recording between two steps, files
in pieces, questions to the driver, and everything that is refused."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpc_schema import lifecycle as lc
from rpc_schema import trace as tr
from rpc_schema.codec import ControlMessage, ControlReplyMessage, decode_event
from rpc_schema.error_replies import ControlErrorReply
from rpc_schema.errors import ErrorCode
from rpc_schema.step import ModelRunnerOutput
from tests.unit.server.driver import DaemonProcess, Driver, wait_for
from tests.unit.server.fake_worker import FakeTrace

NAME, OTHER = bytes(16), b"x" * 16


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One daemon for all tests."""
    directory = tmp_path_factory.mktemp("d")
    directory.chmod(0o700)
    daemon = DaemonProcess(directory)
    yield daemon
    assert daemon.process.poll() is None, daemon.stderr()
    daemon.stop()


@pytest.fixture
def driver(shared: DaemonProcess) -> Iterator[Driver]:
    """An attached driver, in READY."""
    driver = Driver(shared.endpoint)
    driver.attach()
    driver.make_ready()
    yield driver
    driver.close()


@pytest.fixture
def observer(shared: DaemonProcess) -> Iterator[Driver]:
    """Sockets that nobody attaches by."""
    observer = Driver(shared.endpoint)
    yield observer
    observer.close()


def refused(reply: ControlReplyMessage, code: ErrorCode, words: str = "") -> None:
    assert isinstance(reply, ControlErrorReply), reply
    assert reply.code is code
    assert words in reply.message


def start(observer: Driver, trace: bytes = NAME, max_ms: int = 60_000) -> ControlReplyMessage:
    return observer.call(tr.StartTrace, trace=trace, max_ms=max_ms)


def stop(observer: Driver, trace: bytes = NAME, keep: bool = False) -> ControlReplyMessage:
    return observer.call(tr.StopTrace, trace=trace, keep=keep)


def test_trace_is_read_in_pieces_and_steps_go_on(driver: Driver, observer: Driver) -> None:
    epoch = driver.status().epoch
    assert isinstance(start(observer), lc.Acknowledged)
    assert isinstance(driver.fault(), ModelRunnerOutput)
    refused(observer.call(tr.ReadTrace, trace=NAME, offset=0), ErrorCode.ILLEGAL_STATE)
    reply = stop(observer, keep=True)
    assert isinstance(reply, tr.StopTraceReply)
    assert reply.size_bytes == len(FakeTrace.CONTENT)
    pieces = []
    while True:
        piece = observer.call(tr.ReadTrace, trace=NAME, offset=sum(map(len, pieces)))
        assert isinstance(piece, tr.ReadTraceReply)
        if not piece.data:
            break
        pieces.append(piece.data)
    assert len(pieces) > 1
    assert b"".join(pieces) == FakeTrace.CONTENT
    refused(observer.call(tr.ReadTrace, trace=OTHER, offset=0), ErrorCode.ILLEGAL_STATE)
    assert isinstance(driver.fault(), ModelRunnerOutput)
    assert driver.status().epoch == epoch


def test_one_at_a_time_and_only_by_its_name(driver: Driver, observer: Driver) -> None:
    start(observer)
    refused(start(observer, OTHER), ErrorCode.ILLEGAL_STATE, "a trace runs already")
    refused(stop(observer, OTHER), ErrorCode.ILLEGAL_STATE, "no such trace")
    assert isinstance(stop(observer), tr.StopTraceReply)
    refused(stop(observer), ErrorCode.ILLEGAL_STATE, "no such trace")


def test_start_waits_for_the_step_that_runs_and_control_answers_meanwhile(
    driver: Driver, observer: Driver, tmp_path: Path
) -> None:
    driver.send_step_until(tmp_path / "over")
    observer.send_control(tr.StartTrace, trace=NAME, max_ms=60_000)
    assert driver.status().phase == "ExecuteModel"
    assert not observer.control.poll(100)
    (tmp_path / "over").touch()
    assert isinstance(driver.reply(), ModelRunnerOutput)
    assert isinstance(observer.control_reply(), lc.Acknowledged)
    stop(observer)


def test_what_the_worker_refuses_is_told_and_leaves_no_trace_running(
    driver: Driver, observer: Driver
) -> None:
    driver.run(lc.Reset, to="CREATED")
    refused(start(observer), ErrorCode.ILLEGAL_STATE, "no trace can run")
    driver.make_ready()
    assert isinstance(start(observer), lc.Acknowledged)
    stop(observer)


def test_trace_that_nobody_stops_ends_by_itself(driver: Driver, observer: Driver) -> None:
    start(observer, max_ms=50)

    def starts() -> bool:
        return isinstance(start(observer, OTHER), lc.Acknowledged)

    wait_for(starts)
    refused(stop(observer), ErrorCode.ILLEGAL_STATE, "no such trace")
    stop(observer, OTHER)


def test_clock_is_this_host_s(observer: Driver) -> None:
    before = time.monotonic_ns()
    reply = observer.call(tr.ReadClock)
    assert isinstance(reply, tr.ReadClockReply)
    assert before <= reply.monotonic_ns <= time.monotonic_ns()


def steps() -> tr.DriverSteps:
    columns = dict.fromkeys(("seqs", "began_ns", "sent_ns", "settled_ns"), bytes(8))
    counts = dict.fromkeys(("context_tokens", "generation_tokens"), bytes(4))
    clock = {"clock_offset_ns": -5, "clock_bound_ns": 3, "clock_at_ns": 9}
    return tr.DriverSteps(pid=os.getpid(), **clock, **columns, **counts)


def read_steps(observer: Driver, trace: bytes) -> tr.DriverSteps | None:
    reply = observer.call(tr.ReadDriverSteps, trace=trace)
    assert isinstance(reply, tr.ReadDriverStepsReply)
    return reply.steps


def test_driver_is_asked_by_an_event_and_alone_may_answer(driver: Driver, observer: Driver) -> None:
    driver.status()  # its subscription has reached the daemon by now
    window = {"begin_ns": 4, "end_ns": 7}
    wait_for(lambda: driver.events.poll(1000))
    observer.call(tr.AskDriver, trace=NAME, **window)
    events = []

    def asked() -> bool:
        events.append(decode_event(driver.events.recv_multipart()))
        return isinstance(events[-1], tr.DriverStepsWanted)

    wait_for(asked)
    event = events[-1]
    assert isinstance(event, tr.DriverStepsWanted)
    assert (event.trace, event.begin_ns, event.end_ns, event.rank) == (NAME, 4, 7, 0)
    assert read_steps(observer, NAME) is None

    def put(epoch: int, trace: bytes = NAME) -> ControlReplyMessage:
        message: type[ControlMessage] = tr.PutDriverSteps
        return observer.call(message, epoch=epoch, trace=trace, steps=steps())

    refused(put(driver.epoch + 1), ErrorCode.NOT_ATTACHED)
    refused(put(driver.epoch - 1), ErrorCode.FENCED)
    refused(put(driver.epoch, OTHER), ErrorCode.ILLEGAL_STATE, "not asked for")
    assert read_steps(observer, NAME) is None
    assert isinstance(put(driver.epoch), lc.Acknowledged)
    assert read_steps(observer, NAME) == steps()
    assert read_steps(observer, OTHER) is None
    observer.call(tr.AskDriver, trace=OTHER, **window)
    assert read_steps(observer, NAME) is None


def test_shutdown_while_it_records(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path / "d")
    driver = Driver(daemon.endpoint)
    driver.attach()
    driver.make_ready()
    start(driver)
    driver.call(lc.Shutdown)
    assert daemon.wait() == 0
    driver.close()

"""A whole daemon process around the fake worker: order, fencing, control, faults and ends."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from rpc_schema import lifecycle as lc
from rpc_schema import step
from rpc_schema.codec import MAX_FRAMES, decode_event, decode_step_reply, encode_step
from rpc_schema.error_replies import ControlErrorReply, ErrorReply
from rpc_schema.errors import ErrorCode, ErrorScope
from rpc_schema.health import CheckHealth, CheckHealthReply, Hello, HelloReply
from tests.unit.server.driver import DaemonProcess, Driver, rendezvous, wait_for

SHORT_DEADLINE_MS = 500


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One daemon for all tests that leave it serving."""
    daemon = DaemonProcess(private(tmp_path_factory.mktemp("d")))
    yield daemon
    assert daemon.process.poll() is None, daemon.stderr()
    daemon.stop()


@pytest.fixture
def driver(shared: DaemonProcess) -> Iterator[Driver]:
    """An attached driver of the shared daemon, in READY."""
    driver = Driver(shared.endpoint)
    driver.attach()
    driver.make_ready()
    yield driver
    driver.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Start daemons of one's own, all in one directory."""
    started: list[DaemonProcess] = []

    def start_one(*options: str, **keywords: object) -> DaemonProcess:
        started.append(DaemonProcess(tmp_path / "d", *options, **keywords))
        return started[-1]

    yield start_one
    for daemon in started:
        daemon.stop()


@pytest.fixture
def connect() -> Iterator[Callable[[DaemonProcess], Driver]]:
    """Connect drivers that are closed at the end."""
    drivers: list[Driver] = []

    def connect_one(daemon: DaemonProcess) -> Driver:
        drivers.append(Driver(daemon.endpoint))
        return drivers[-1]

    yield connect_one
    for driver in drivers:
        driver.close()


def private(directory: Path) -> Path:
    directory.chmod(0o700)
    return directory


def assert_error(reply: object, code: ErrorCode) -> ErrorReply:
    assert isinstance(reply, ErrorReply), reply
    assert reply.code is code, reply
    return reply


# Order of steps.


def test_replay_sends_the_same_bytes_and_runs_nothing_twice(driver: Driver) -> None:
    sent = driver.send_fault("none")
    first = driver.frames()
    driver.send_fault("none")
    second = driver.frames()
    driver.step.send_multipart(sent)
    assert driver.replay() == first
    assert first[0] != second[0]
    driver.send_fault("none")
    assert num_steps_run(driver.frames()) == num_steps_run(second) + 1


def num_steps_run(frames: list[bytes]) -> int:
    """What the fake worker puts into its token."""
    reply = decode_step_reply(frames)
    assert isinstance(reply, step.ModelRunnerOutput)
    return int.from_bytes(reply.sampled_token_ids, "little")


def test_failures_are_replayed_too(driver: Driver) -> None:
    sent = driver.send_fault("raise:INVALID_STEP")
    first = driver.frames()
    driver.step.send_multipart(sent)
    assert driver.replay() == first


def test_gap_is_refused_until_closed(driver: Driver) -> None:
    expected = driver.seq + 1
    driver.seq += 3
    gap = assert_error(driver.fault(), ErrorCode.GAP)
    assert gap.expected_seq == expected
    assert_error(driver.run(lc.GetKVCacheSpec), ErrorCode.GAP)
    assert isinstance(driver.fault(resync=b""), step.ModelRunnerOutput)
    assert isinstance(driver.fault(), step.ModelRunnerOutput)


def test_reply_that_is_no_longer_kept_is_stale(driver: Driver) -> None:
    sent = driver.send_fault("none")
    driver.reply()
    for _ in range(64):
        driver.fault()
    driver.step.send_multipart(sent)
    assert_error(driver.reply(), ErrorCode.STALE)


def test_step_that_owes_no_reply_is_silent_also_when_repeated(driver: Driver) -> None:
    sent = driver.send_fault("silent")
    driver.step.send_multipart(sent)
    assert isinstance(driver.run(lc.GetKVCacheSpec), lc.GetKVCacheSpecReply)


def test_second_driver_fences_the_first(
    driver: Driver, shared: DaemonProcess, connect: Callable[[DaemonProcess], Driver]
) -> None:
    second = connect(shared)
    before = driver.seq
    committed = second.attach()
    assert (committed.previous_epoch, committed.previous_seq) == (driver.epoch, before)
    assert committed.previous_clean
    assert committed.status.load == "READY"
    assert committed.status.config is not None
    assert_error(driver.fault(), ErrorCode.FENCED)
    assert isinstance(second.fault(), step.ModelRunnerOutput)
    reply = driver.call(lc.OpenRendezvous, epoch=driver.epoch, link=99, num_ranks=2)
    assert isinstance(reply, ControlErrorReply)
    assert reply.code is ErrorCode.FENCED


def test_lower_epoch_is_not_granted_and_commit_needs_prepare(driver: Driver) -> None:
    refused = driver.prepare(driver.epoch)
    assert (refused.granted, refused.last_epoch) == (False, driver.epoch)
    ids = {"driver_id": driver.driver_id, "results_route": driver.results_route}
    commit = driver.call(lc.CommitAttach, **ids, epoch=driver.epoch + 5)
    assert isinstance(commit, ControlErrorReply)
    assert commit.code is ErrorCode.NOT_ATTACHED


def test_repeated_commit_is_answered_as_the_first(driver: Driver) -> None:
    """Its first answer may have been lost with the connection; no driver attaches again."""
    epoch, before = driver.epoch, driver.seq
    driver.attach()
    assert driver.epoch == epoch + 1
    assert isinstance(driver.fault(), step.ModelRunnerOutput)
    ids = {"driver_id": driver.driver_id, "results_route": bytes(16), "epoch": driver.epoch}
    again = driver.call(lc.CommitAttach, **ids)
    assert isinstance(again, lc.CommitAttachReply)
    assert (again.previous_epoch, again.previous_seq) == (epoch, before)
    assert (again.status.epoch, again.status.last_seq) == (driver.epoch, 1)
    assert isinstance(driver.fault(), step.ModelRunnerOutput)
    ids["driver_id"] = bytes(reversed(driver.driver_id))
    refusal = driver.call(lc.CommitAttach, **ids)
    assert isinstance(refusal, ControlErrorReply)
    assert refusal.code is ErrorCode.NOT_ATTACHED


def test_detach_refuses_steps_and_keeps_the_model(driver: Driver) -> None:
    assert isinstance(driver.call(lc.Detach, epoch=driver.epoch), lc.Acknowledged)
    assert_error(driver.fault(), ErrorCode.NOT_ATTACHED)
    assert driver.attach().status.load == "READY"


# Failures inside requests.


@pytest.mark.parametrize("code", ["INVALID_STEP", "UPSTREAM_FAILED"])
@pytest.mark.parametrize("when", ["raise", "now", "late"])
def test_failed_step_leaves_the_daemon_serving(driver: Driver, when: str, code: str) -> None:
    assert_error(driver.fault(f"{when}:{code}"), ErrorCode(code))
    assert isinstance(driver.fault(), step.ModelRunnerOutput)


@pytest.mark.parametrize("when", ["raise", "now", "late"])
def test_unforeseen_exception_is_internal_with_its_traceback(driver: Driver, when: str) -> None:
    reply = assert_error(driver.fault(f"{when}:OTHER"), ErrorCode.INTERNAL)
    assert reply.scope is ErrorScope.STEP
    assert "fake_worker.py" in reply.traceback
    assert isinstance(driver.fault(), step.ModelRunnerOutput)


@pytest.mark.parametrize("when", ["raise", "now", "late"])
def test_lost_peer_breaks_the_link_until_relink(driver: Driver, when: str) -> None:
    assert_error(driver.fault(f"{when}:COMM"), ErrorCode.COMM)
    wait_for(lambda: driver.status().link_state == "broken")
    assert_error(driver.fault(), ErrorCode.ILLEGAL_STATE)
    assert_error(
        driver.run(lc.Relink, rendezvous=rendezvous(driver.link + 1, "nowhere")), ErrorCode.COMM
    )
    driver.link += 1
    new_link = driver.link + 1
    opened = driver.call(lc.OpenRendezvous, epoch=driver.epoch, link=new_link, num_ranks=2)
    assert isinstance(opened, lc.OpenRendezvousReply)
    assert isinstance(driver.run(lc.Relink, rendezvous=rendezvous(new_link)), step.Done)
    assert_error(driver.fault(), ErrorCode.FENCED)
    driver.link, driver.seq = new_link, driver.seq - 1
    assert isinstance(driver.fault(), step.ModelRunnerOutput)


def test_replies_keep_their_order_behind_a_slow_result(driver: Driver) -> None:
    first = driver.seq + 1
    for fault in ("none", "slow:0.2", "none", "raise:OTHER", "none", "slow:0.05", "none"):
        driver.send_fault(fault)
    replies = [driver.reply() for _ in range(driver.seq - first + 1)]
    assert [reply.seq for reply in replies] == list(range(first, driver.seq + 1))
    assert [isinstance(reply, ErrorReply) for reply in replies].index(True) == 3


def test_short_run_has_its_step_time_at_once(start, connect) -> None:
    """A run that is over before the guard thread looks a second time, and idle time around it."""
    driver = connect(start())
    driver.attach()
    driver.make_ready()
    assert driver.status().usual_step_us == 0
    num_steps, slow_us, began = 12, 5_000, time.monotonic()
    for _ in range(num_steps):
        driver.fault(f"slow:{slow_us / 1e6}")
    took_us = (time.monotonic() - began) * 1e6
    assert slow_us <= driver.status().usual_step_us <= took_us / num_steps


def test_illegal_request_names_the_state_and_changes_nothing(driver: Driver) -> None:
    before = driver.status()
    reply = assert_error(driver.load(), ErrorCode.ILLEGAL_STATE)
    assert "LoadModel is not legal in READY" in reply.message
    illegal = driver.init_device()
    assert_error(illegal, ErrorCode.ILLEGAL_STATE)
    driver.link = before.link
    assert driver.status().transitions == before.transitions
    assert isinstance(driver.fault(), step.ModelRunnerOutput)


def test_failed_load_leaves_the_state(driver: Driver) -> None:
    driver.run(lc.Reset, to="DEVICE_READY")
    assert_error(driver.load("/missing"), ErrorCode.CHECKPOINT)
    assert driver.status().load == "DEVICE_READY"
    assert isinstance(driver.load(), lc.LoadModelReply)


# Control while the step thread is busy.


def test_control_answers_during_a_step(driver: Driver, tmp_path: Path) -> None:
    began = time.monotonic()
    driver.send_step_until(tmp_path / "over")
    health = driver.call(CheckHealth)
    status = driver.status()
    assert isinstance(health, CheckHealthReply)
    assert health.healthy
    assert status.phase == "ExecuteModel"
    assert status.phase_ms <= (time.monotonic() - began) * 1000
    assert not driver.results.poll(0)
    (tmp_path / "over").touch()
    assert isinstance(driver.reply(), step.ModelRunnerOutput)
    wait_for(lambda: driver.status().phase == "IDLE")


def test_status_tells_the_delay_of_the_driver_s_results(driver: Driver) -> None:
    assert driver.status().reply_delay.num_replies == 0
    driver.fault()
    driver.fault()
    wait_for(lambda: driver.status().reply_delay.num_replies == 2)
    delay = driver.status().reply_delay
    assert 0 < delay.p50_us <= delay.p99_us


def test_attach_frees_a_step_that_hangs_on_its_peers(
    driver: Driver, shared: DaemonProcess, connect: Callable[[DaemonProcess], Driver]
) -> None:
    driver.send_fault("hang")
    wait_for(lambda: driver.status().phase == "ExecuteModel")
    committed = connect(shared).attach()
    assert committed.previous_seq == driver.seq
    assert not committed.previous_clean
    assert committed.status.link_state == "broken"
    assert_error(driver.reply(), ErrorCode.COMM)


def test_attach_that_waits_for_what_waits_for_no_peer_cuts_nothing_off(
    driver: Driver,
    shared: DaemonProcess,
    connect: Callable[[DaemonProcess], Driver],
    tmp_path: Path,
) -> None:
    driver.run(lc.Reset, to="DEVICE_READY")
    driver.send_load(f"held:{tmp_path / 'over'}")
    wait_for(lambda: driver.status().phase == "LoadModel")
    second = connect(shared)
    second.hello()
    prepared = second.prepare(driver.epoch + 1, force=True)
    second.send_control(
        lc.CommitAttach,
        driver_id=second.driver_id,
        epoch=prepared.last_epoch,
        results_route=second.results_route,
    )
    assert not second.control.poll(100)
    (tmp_path / "over").touch()
    committed = second.control_reply()
    assert isinstance(committed, lc.CommitAttachReply), committed
    assert committed.previous_seq == driver.seq
    assert committed.previous_clean
    assert (committed.status.load, committed.status.link_state) == ("MODEL_LOADED", "up")


def test_step_past_its_deadline_is_aborted_and_reported(driver: Driver) -> None:
    driver.make_ready(step_deadline_ms=SHORT_DEADLINE_MS)
    began = time.monotonic()
    driver.send_fault("hang")
    assert_error(driver.reply(), ErrorCode.COMM)
    assert time.monotonic() - began >= SHORT_DEADLINE_MS / 1000
    wait_for(lambda: driver.status().link_state == "broken")


def test_aborted_link_is_broken_whatever_came_of_the_step(driver: Driver) -> None:
    driver.make_ready(step_deadline_ms=SHORT_DEADLINE_MS)
    assert isinstance(driver.fault("freed"), step.ModelRunnerOutput)
    wait_for(lambda: driver.status().link_state == "broken")
    assert "past its deadline" in driver.status().transitions[-1]
    assert_error(driver.fault(), ErrorCode.ILLEGAL_STATE)


def test_failure_on_a_former_link_leaves_the_new_one_up(driver: Driver) -> None:
    driver.send_fault("later:COMM")
    new_link = driver.link + 1
    driver.send(lc.Relink, rendezvous=rendezvous(new_link))
    assert_error(driver.reply(), ErrorCode.COMM)
    assert isinstance(driver.reply(), step.Done)
    driver.link = new_link
    assert driver.status().link_state == "up"
    assert isinstance(driver.fault(), step.ModelRunnerOutput)
    assert driver.status().link_state == "up"


@pytest.mark.parametrize("when", ["raise", "now", "late"])
def test_broken_link_asks_the_device_nothing(driver: Driver, when: str) -> None:
    before = driver.status()
    assert_error(driver.fault(f"{when}:COMM"), ErrorCode.COMM)
    wait_for(lambda: driver.status().link_state == "broken")
    after = driver.status()
    assert after.memory_bytes == before.memory_bytes
    assert len(after.transitions) == min(20, len(before.transitions) + 1)
    driver.run(lc.Reset, to="MODEL_LOADED")
    assert driver.status().memory_bytes != before.memory_bytes


def test_worker_that_cannot_be_described_goes_on(driver: Driver) -> None:
    driver.run(lc.Reset, to="DEVICE_READY")
    before = driver.status()
    assert isinstance(driver.load("/mute"), lc.LoadModelReply)
    status = driver.status()
    assert (status.load, status.memory_bytes) == ("MODEL_LOADED", before.memory_bytes)
    assert isinstance(driver.load("/mute"), ErrorReply)
    driver.make_ready()
    assert isinstance(driver.fault(), step.ModelRunnerOutput)


def test_heartbeats_and_state_changes_are_published(driver: Driver) -> None:
    wait_for(lambda: driver.events.poll(1000))  # its subscription has reached the daemon
    driver.run(lc.Reset, to="MODEL_LOADED")
    seen: list[object] = []

    def all_seen() -> bool:
        while driver.events.poll(0):
            seen.append(decode_event([driver.events.recv()]))
        beats = [event for event in seen if isinstance(event, lc.Heartbeat)]
        return any(isinstance(event, lc.StateChanged) for event in seen) and any(
            (beat.load, beat.last_seq, beat.epoch) == ("MODEL_LOADED", driver.seq, driver.epoch)
            for beat in beats
        )

    wait_for(all_seen)


# Bad frames.


def test_bad_frames_are_answered_and_harm_nothing(driver: Driver) -> None:
    driver.step.send(b"\xc1 nonsense")
    reply = assert_error(driver.reply(), ErrorCode.BAD_FRAME)
    assert reply.seq == 0
    driver.step.send_multipart([b"x"] * (MAX_FRAMES + 1))
    assert_error(driver.reply(), ErrorCode.TOO_LARGE)
    driver.control.send(b"\xc1 nonsense")
    control = driver.control_reply()
    assert isinstance(control, ControlErrorReply)
    assert (control.call, control.code) == (0, ErrorCode.BAD_FRAME)
    assert isinstance(driver.fault(), step.ModelRunnerOutput)


def spoiled(driver: Driver, kind: type = step.ExecuteModel, **fields: object) -> list[bytes]:
    """A request with a seq that is due, and a field that no decoder takes."""
    frames = encode_step(driver.build(kind, **fields))
    return [frames[0].replace(b"\xce\x12\x34\x56\x78", b"\xa4text"), *frames[1:]]


SPOILED = 0x12345678
"""Becomes a text of as many bytes."""


def test_request_that_does_not_decode_is_an_outcome_of_its_seq(
    driver: Driver, shared: DaemonProcess
) -> None:
    before = driver.status().num_bad_frames
    for number in range(7):
        sent = spoiled(driver, total_num_scheduled_tokens=SPOILED)
        driver.step.send_multipart(sent)
        frames = driver.frames()
        refused = assert_error(decode_step_reply(frames), ErrorCode.INVALID_STEP)
        assert (refused.epoch, refused.seq) == (driver.epoch, driver.seq)
        assert "field total_num_scheduled_tokens = \"'text'\"" in refused.message
        driver.step.send_multipart(sent)
        assert driver.replay() == frames, f"number {number}"
    operation = spoiled(driver, lc.UpdateMaxModelLen, max_model_len=SPOILED)
    driver.step.send_multipart(operation)
    assert assert_error(driver.reply(), ErrorCode.BAD_FRAME).seq == driver.seq
    driver.step.send_multipart(
        [*encode_step(driver.build(step.ExecuteDummyBatch)), *[b"x"] * MAX_FRAMES]
    )
    assert assert_error(driver.reply(), ErrorCode.INVALID_STEP).seq == driver.seq
    driver.seq += 3
    driver.step.send_multipart(spoiled(driver, total_num_scheduled_tokens=SPOILED))
    driver.seq -= 4
    assert assert_error(driver.reply(), ErrorCode.GAP).expected_seq == driver.seq + 1
    assert isinstance(driver.fault(), step.ModelRunnerOutput)
    assert driver.status().num_bad_frames == before
    # Whoever else says the same is a stranger: counted, and not answered.
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(f"{shared.endpoint}.step")
        for _ in range(6):
            stranger.send_multipart(sent)
        wait_for(lambda: driver.status().num_bad_frames == before + 5)  # banned by then
        assert not stranger.poll(0)
    assert isinstance(driver.fault(), step.ModelRunnerOutput)


def test_hello_of_another_version_is_answered_with_ours(driver: Driver) -> None:
    reply = driver.call(Hello, protocol_version=999, driver_id=b"any length")
    assert isinstance(reply, HelloReply)
    assert reply.protocol_version != 999


def test_driver_of_another_version_is_not_attached(
    shared: DaemonProcess, connect: Callable[[DaemonProcess], Driver]
) -> None:
    driver = connect(shared)
    last = driver.status().epoch

    def refusal() -> str:
        reply = driver.call(lc.PrepareAttach, driver_id=driver.driver_id, epoch=last + 1)
        assert isinstance(reply, ControlErrorReply)
        assert reply.code is ErrorCode.INCOMPATIBLE
        return reply.message

    assert "has not said Hello" in refusal()
    ours = driver.hello(version=999).protocol_version
    message = refusal()
    assert "version 999" in message
    assert f"version {ours}" in message
    driver.attach(last + 1)
    assert driver.epoch == last + 1


def test_status_over_the_bound_is_told_without_what_is_loaded(
    driver: Driver, shared: DaemonProcess, connect: Callable[[DaemonProcess], Driver]
) -> None:
    driver.run(lc.Reset, to="DEVICE_READY")
    driver.load("/huge")
    second = connect(shared)
    second.hello()
    prepared = second.prepare(driver.epoch + 1, force=True)
    assert prepared.granted
    committed = second.call(
        lc.CommitAttach,
        driver_id=second.driver_id,
        results_route=second.results_route,
        epoch=prepared.last_epoch,
    )
    assert isinstance(committed, lc.CommitAttachReply), committed
    for status in (second.status(), committed.status):
        assert (status.config, status.kv_cache) == (None, None)
        assert "are left out: the whole status would have" in status.degraded
    assert isinstance(second.call(CheckHealth), CheckHealthReply)
    assert isinstance(second.reply(), lc.Attached)
    second.epoch, second.link = prepared.last_epoch, driver.link
    assert isinstance(second.run(lc.Reset, to="CREATED"), step.Done)
    assert second.status().load == "CREATED"


def test_random_frames_on_all_sockets_leave_the_daemon_serving(
    driver: Driver, shared: DaemonProcess
) -> None:
    randomness = random.Random(11)
    valid = encode_step(step.ExecuteDummyBatch(epoch=1, link=0, seq=1))[0]
    context = zmq.Context()
    sockets = []
    for suffix in ("", ".step", ".results"):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(shared.endpoint + suffix)
        sockets.append(socket)
    for number in range(20_000):
        frames = [mangle(randomness, bytes(valid)) for _ in range(randomness.choice((1, 1, 2, 8)))]
        socket = sockets[2] if number % 50 == 0 else sockets[number % 2]
        try:
            socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            time.sleep(0.001)
        if number % 2 == 0:
            while sockets[0].poll(0):
                sockets[0].recv_multipart()
    context.destroy(linger=0)
    reply = driver.fault()
    while reply.seq != driver.seq:  # one changed byte may name our epoch, and ask for a replay
        reply = driver.reply()
    assert isinstance(reply, step.ModelRunnerOutput)
    assert isinstance(driver.call(CheckHealth), CheckHealthReply)


def test_peer_that_fills_queues_and_dies_is_survived(driver: Driver, shared: DaemonProcess) -> None:
    """libzmq itself would end the process here if the daemon sent ZMTP heartbeats."""
    driver.send_fault("sleep:0.6")
    context = zmq.Context()
    sockets = [context.socket(zmq.DEALER) for _ in range(2)]
    for socket, suffix in zip(sockets, (".step", ".results"), strict=True):
        socket.connect(shared.endpoint + suffix)
        for _ in range(1000):
            try:
                socket.send(b"x", zmq.NOBLOCK)
            except zmq.Again:
                time.sleep(0.001)
    context.destroy(linger=0)
    time.sleep(1.0)
    assert shared.process.poll() is None, shared.stderr()
    assert isinstance(driver.reply(), step.ModelRunnerOutput)
    assert isinstance(driver.fault(), step.ModelRunnerOutput)


def mangle(randomness: random.Random, valid: bytes) -> bytes:
    kind = randomness.randrange(4)
    if kind == 0:
        return randomness.randbytes(randomness.randrange(64))
    if kind == 1:
        return b"\x91" * randomness.randrange(2000)
    if kind == 2:
        return b"\xdd\xff\xff\xff\xff" + randomness.randbytes(8)
    cut = bytearray(valid)
    cut[randomness.randrange(len(cut))] = randomness.randrange(256)
    return bytes(cut)


def test_dead_driver_blocks_nobody(
    shared: DaemonProcess, connect: Callable[[DaemonProcess], Driver]
) -> None:
    first = Driver(shared.endpoint)
    first.attach()
    first.make_ready()
    for _ in range(50):
        first.send_fault("none")
    first.close()
    second = connect(shared)
    second.attach()
    assert isinstance(second.fault(), step.ModelRunnerOutput)


# Start and end.


def test_shutdown_finishes_the_running_step_and_removes_the_files(
    start: Callable[..., DaemonProcess],
    connect: Callable[[DaemonProcess], Driver],
    tmp_path: Path,
) -> None:
    daemon = start("--state-dir", str(tmp_path / "state"))
    driver = connect(daemon)
    driver.attach()
    driver.make_ready()
    driver.send_step_until(tmp_path / "over")
    assert isinstance(driver.call(lc.Shutdown), lc.Acknowledged)
    assert driver.status().serving == "DRAINING"
    refused = driver.call(lc.PrepareAttach, driver_id=driver.driver_id, epoch=99)
    assert isinstance(refused, ControlErrorReply)
    assert not driver.results.poll(0)
    (tmp_path / "over").touch()
    assert isinstance(driver.reply(), step.ModelRunnerOutput)
    assert daemon.wait() == 0
    assert not (tmp_path / "d").exists()


def test_epochs_rise_over_a_restart(
    start: Callable[..., DaemonProcess], connect: Callable[[DaemonProcess], Driver]
) -> None:
    daemon = start()
    driver = connect(daemon)
    driver.attach(epoch=41)
    daemon.process.kill()
    daemon.wait()
    driver = connect(start())
    driver.hello()
    assert driver.prepare(41) == lc.PrepareAttachReply(
        call=driver.calls, granted=False, last_epoch=41
    )
    assert driver.attach().previous_epoch == 0
    assert driver.epoch == 42


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_an_idle_daemon(
    start: Callable[..., DaemonProcess],
    connect: Callable[[DaemonProcess], Driver],
    number: signal.Signals,
) -> None:
    daemon = start()
    connect(daemon).attach()
    daemon.process.send_signal(number)
    assert daemon.wait() == 0


def test_second_signal_ends_at_once(
    start: Callable[..., DaemonProcess],
    connect: Callable[[DaemonProcess], Driver],
    tmp_path: Path,
) -> None:
    daemon = start("--state-dir", str(tmp_path / "state"))
    driver = connect(daemon)
    driver.attach()
    driver.make_ready()
    driver.send_step_until(tmp_path / "never")
    daemon.process.send_signal(signal.SIGTERM)
    wait_for(lambda: driver.status().serving == "DRAINING")
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.wait() == 128 + signal.SIGTERM
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("busy", [False, True])
def test_parent_s_end_ends_the_daemon_and_its_directory(
    start: Callable[..., DaemonProcess],
    connect: Callable[[DaemonProcess], Driver],
    tmp_path: Path,
    busy: bool,
) -> None:
    read_end, write_end = os.pipe()
    state_dir = str(tmp_path / "d" / "state")
    daemon = start(
        "--exit-with-parent-fd", str(read_end), "--state-dir", state_dir, pass_fds=(read_end,)
    )
    os.close(read_end)
    driver = connect(daemon)
    driver.attach()
    if busy:
        driver.make_ready()
        driver.send_step_until(tmp_path / "never")
    os.close(write_end)
    assert daemon.wait() == 0
    assert not (tmp_path / "d").exists()


def test_endpoint_in_use_is_refused_with_the_holder_s_pid(
    start: Callable[..., DaemonProcess], connect: Callable[[DaemonProcess], Driver]
) -> None:
    first = start()
    driver = connect(first)
    driver.attach()
    second = start()
    assert second.wait() == 73
    assert f"pid {first.process.pid}" in second.stderr()
    assert driver.status().pid == first.process.pid


def test_lost_device_is_told_and_ends_the_process(
    start: Callable[..., DaemonProcess], connect: Callable[[DaemonProcess], Driver]
) -> None:
    for fault in ("raise:DEVICE", "now:DEVICE", "late:DEVICE"):
        daemon = start()
        driver = connect(daemon)
        driver.attach()
        driver.make_ready()
        assert_error(driver.fault(fault), ErrorCode.DEVICE)
        assert daemon.wait() == 86


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--endpoint", "tcp://127.0.0.1:5"], "tcp needs a key-file"),
        (["--device", "cuda:9"], "no such device"),
        (["--exit-with-parent-fd", "77"], "not an open file descriptor"),
        (["--model-root", "/nowhere"], "model-root"),
    ],
)
def test_wrong_setting_ends_with_78_and_says_why(
    start: Callable[..., DaemonProcess], options: list[str], words: str
) -> None:
    daemon = start(*options)
    assert daemon.wait() == 78
    assert words in daemon.stderr()


def test_server_needs_no_torch() -> None:
    code = "import sys, worker_daemon.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""Rows 1, 5, 25, 26 and 27 of the fault matrix: drivers that die, stop, attach twice, or are
replayed. On a real daemon process with the fake worker, which counts its steps."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from rpc_schema import lease as ls
from rpc_schema import lifecycle as lc
from rpc_schema import step
from rpc_schema.codec import (
    CONTROL_REQUESTS,
    STEP_REQUESTS,
    decode_step_reply,
    encode_control,
    encode_step,
    split_replayed,
)
from rpc_schema.config import ParallelConfig
from rpc_schema.driver_digest import driver_digest
from rpc_schema.error_replies import ControlErrorReply, ErrorReply
from rpc_schema.errors import ErrorCode, LeaseExpiredError, LeaseHeldError
from tests.contract.random_messages import fixed_example
from tests.support.leased_driver import admit, decode, living_driver, make_ready
from tests.support.stopping import stop_process
from tests.support.waiting import PATIENCE_S
from tests.unit.server.driver import DaemonProcess, Driver, wait_for
from worker_client.wire.lease import LeaseTerms
from worker_client.worker_group import WorkerGroup

TTL_S = 1.0
"""Of the drivers that are to lose it."""
ATTACH_S = 1.0
"""What an attach may take once the lease is over."""
LONG_TTL_S = 20.0
"""Of the others, however busy the tests' host is."""
PARALLEL = ParallelConfig()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One daemon for all tests; each driver that attaches makes it ready again."""
    process = DaemonProcess(tmp_path_factory.mktemp("leases") / "d", "--log-level", "info")
    yield process
    process.stop()


@pytest.fixture(autouse=True)
def free_at_the_end(daemon: DaemonProcess) -> Iterator[None]:
    """No test waits for the lease of the one before it."""
    yield
    last = Driver(daemon.endpoint)
    last.attach()
    last.call(lc.Detach, epoch=last.epoch)
    last.close()


@pytest.fixture
def connect(daemon: DaemonProcess) -> Iterator[Callable[[], Driver]]:
    drivers: list[Driver] = []

    def connect_one() -> Driver:
        drivers.append(Driver(daemon.endpoint))
        return drivers[-1]

    yield connect_one
    for driver in drivers:
        driver.close()


def group_on(daemon: DaemonProcess, ttl_s: float = LONG_TTL_S) -> WorkerGroup:
    return WorkerGroup([daemon.endpoint], PARALLEL, lease=LeaseTerms(ttl_s=ttl_s))


def settled(status: lc.Status) -> lc.Status:
    """Return a status without fields that change over time, such as averages over past steps."""
    lease = msgspec.structs.replace(
        status.lease, remaining_ms=0, orphan_kv_remaining_ms=0, silent_ms=0
    )
    reckoned = {"usual_step_us": 0, "reply_delay": None}
    return msgspec.structs.replace(status, phase_ms=0, lease=lease, **reckoned)


# Row 1.


def test_row_1_killed_driver_leaves_an_orphan_and_the_next_one_goes_on(
    daemon: DaemonProcess, connect: Callable[[], Driver], detection: Callable
) -> None:
    observer = connect()
    with living_driver(daemon.endpoint, TTL_S) as first:
        held = observer.status()
        assert held.lease.state == "held"
        first.kill()
        first.wait()
    killed = time.monotonic()
    wait_for(lambda: observer.status().lease.state == "orphan")
    detection(1, "killed driver: orphan", TTL_S, time.monotonic() - killed, "lease")
    wait_for(lambda: observer.status().transitions[-1].endswith("(the lease expired)"))
    orphan = observer.status()
    assert (orphan.load, orphan.epoch, orphan.config) == ("READY", held.epoch, held.config)
    assert orphan.lease.holder == held.lease.holder
    with group_on(daemon) as second:
        began = time.monotonic()
        second.attach()
        took_s = time.monotonic() - began
        detection(1, "orphan: next driver attached", ATTACH_S, took_s, "reply")
        assert admit(second) > 1
        assert observer.status().lease.holder == driver_digest(second.driver_id)
        assert observer.status().epoch == held.epoch + 1


def test_row_1_next_driver_waits_for_the_dead_one_s_lease_by_itself(
    daemon: DaemonProcess, detection: Callable
) -> None:
    with living_driver(daemon.endpoint, TTL_S) as first:
        first.kill()
        first.wait()
        with group_on(daemon) as second:
            began = time.monotonic()
            second.attach()
            took_s = time.monotonic() - began
            detection(1, "killed driver: next attached", TTL_S + ATTACH_S, took_s, "lease")
            admit(second)


# Row 5.


def test_row_5_stopped_driver_wakes_up_fenced_and_stops(
    daemon: DaemonProcess, detection: Callable
) -> None:
    with living_driver(daemon.endpoint, TTL_S) as first, group_on(daemon) as second:
        stop_process(first.pid)
        second.attach()
        before = admit(second)
        os.kill(first.pid, signal.SIGCONT)
        woken = time.monotonic()
        assert first.wait(PATIENCE_S) == 3
        detection(5, "stopped driver stops itself", TTL_S / 3, time.monotonic() - woken, "reply")
        assert first.stdout is not None
        assert first.stdout.read().split()[-1] == "FencedError"
        assert decode(second) == before + 1


def test_row_5_stopped_driver_wakes_up_expired_if_nobody_came(
    daemon: DaemonProcess, connect: Callable[[], Driver]
) -> None:
    observer = connect()
    with living_driver(daemon.endpoint, TTL_S) as first:
        stop_process(first.pid)
        wait_for(lambda: observer.status().lease.state == "orphan")
        wait_for(lambda: observer.status().transitions[-1].endswith("(the lease expired)"))
        last_seq = observer.status().last_seq
        os.kill(first.pid, signal.SIGCONT)
        assert first.wait(PATIENCE_S) == 3
        assert first.stdout is not None
        assert first.stdout.read().split()[-1] == "LeaseExpiredError"
    assert observer.status().last_seq <= last_seq
    assert observer.status().load == "READY"


def test_expired_driver_may_attach_again(daemon: DaemonProcess) -> None:
    with group_on(daemon, TTL_S) as group:
        group.attach()
        make_ready(group)
        before = admit(group)
        group._channel.lease.stop()
        wait_for(lambda: group.get_status()[0].lease.state == "orphan")
        wait_for(lambda: group.get_status()[0].transitions[-1].endswith("(the lease expired)"))
        with pytest.raises(LeaseExpiredError):
            decode(group)
        group.attach(wait_for_lease_s=0)
        assert admit(group) == before + 1


# Row 25, and fencing whatever the message.


def test_row_25_captured_frames_run_nothing(
    daemon: DaemonProcess, connect: Callable[[], Driver]
) -> None:
    victim = connect()
    victim.attach()
    victim.make_ready()
    captured = [victim.send_fault("none") for _ in range(5)]
    replies = [victim.frames() for _ in captured]
    victim.seq += 1
    fresh = step.ExecuteModel(epoch=victim.epoch, link=0, seq=1, total_num_scheduled_tokens=0)
    thief = connect()
    for frames in captured:
        thief.step.send_multipart(frames)
    assert [victim.replay() for _ in captured] == replies
    successor = connect()
    successor.attach()
    before = settled(successor.status())
    for frames in (*captured, encode_step(fresh)):
        thief.step.send_multipart(frames)
        refused = victim.reply()
        assert isinstance(refused, ErrorReply)
        assert refused.code is ErrorCode.FENCED
    assert settled(successor.status()) == before
    victim.seq, victim.epoch, victim.link = 0, successor.epoch, successor.link
    count = int.from_bytes(decoded(replies[-1]).sampled_token_ids, "little")
    ran = successor.fault()
    assert int.from_bytes(ran.sampled_token_ids, "little") == count + 1


def decoded(frames: list[bytes]) -> step.ModelRunnerOutput:
    reply = decode_step_reply(split_replayed(frames)[1])
    assert isinstance(reply, step.ModelRunnerOutput)
    return reply


def with_ids(kind: type, **ids: int) -> msgspec.Struct:
    """A valid message of a type, under these ids."""
    fields = {name: value for name, value in ids.items() if name in kind.__struct_fields__}
    return msgspec.structs.replace(fixed_example(kind), **fields)


@pytest.mark.parametrize("how", ["fenced", "expired", "detached"])
def test_messages_of_an_unseated_driver_change_nothing(
    daemon: DaemonProcess, connect: Callable[[], Driver], how: str
) -> None:
    """Every step request, and every control request that names an epoch."""
    old, new = connect(), connect()
    old.attach()
    old.make_ready()
    before_count = old.fault()
    if how == "fenced":
        new.attach()
    elif how == "expired":
        old.attach(lease_ttl_ms=1000)
        wait_for(lambda: new.status().lease.state == "orphan")
        wait_for(lambda: new.status().transitions[-1].endswith("(the lease expired)"))
    else:
        assert isinstance(old.call(lc.Detach, epoch=old.epoch), lc.Acknowledged)
        wait_for(lambda: new.status().transitions[-1].endswith("(detached)"))
    code = {
        "fenced": ErrorCode.FENCED,
        "expired": ErrorCode.LEASE_EXPIRED,
        "detached": ErrorCode.NOT_ATTACHED,
    }[how]
    before = settled(new.status())
    for kind in STEP_REQUESTS:
        message = with_ids(kind, epoch=old.epoch, link=old.link, seq=old.seq + 1)
        old.step.send_multipart(encode_step(message))
        reply = old.reply()
        assert isinstance(reply, ErrorReply), kind
        assert (reply.code, reply.seq) == (code, old.seq + 1), kind
        assert settled(new.status()) == before, kind
    kinds = [kind for kind in CONTROL_REQUESTS if "epoch" in kind.__struct_fields__]
    assert {ls.RenewLease, lc.Detach, lc.OpenRendezvous, lc.CommitAttach} < set(kinds)
    for kind in kinds:
        if (kind, how) == (lc.Detach, "expired"):
            continue  # a late goodbye is taken
        old.calls += 1
        ids = {"call": old.calls, "epoch": old.epoch, "driver_id": old.driver_id}
        message = msgspec.structs.replace(with_ids(kind, **ids), **known(kind, ids))
        old.control.send(encode_control(message))
        reply = old.control_reply()
        granted = isinstance(reply, lc.PrepareAttachReply) and reply.granted
        assert isinstance(reply, ControlErrorReply) or not granted, kind
        assert settled(new.status()) == before, kind
    seat = new if how == "fenced" else old
    if how != "fenced":
        seat.attach()
    ran = seat.fault()
    first = int.from_bytes(before_count.sampled_token_ids, "little")
    assert int.from_bytes(ran.sampled_token_ids, "little") == first + 1


def known(kind: type, ids: dict) -> dict:
    fields = {name: value for name, value in ids.items() if name in kind.__struct_fields__}
    return {**fields, "force": False} if kind is lc.PrepareAttach else fields


# Rows 26 and 27.


def test_row_26_polite_second_driver_is_refused_and_disturbs_nobody(
    daemon: DaemonProcess, detection: Callable
) -> None:
    with group_on(daemon) as first, group_on(daemon) as second:
        first.attach()
        make_ready(first)
        before = admit(first)
        epoch = first.get_status()[0].epoch
        began = time.monotonic()
        with pytest.raises(LeaseHeldError, match=f"holds the lease of epoch {epoch}, for another"):
            second.attach(wait_for_lease_s=0)
        detection(26, "polite driver refused", 0.1, time.monotonic() - began, "reply")
        assert decode(first) == before + 1
        assert first.get_status()[0].epoch == epoch


def test_row_27_forced_second_driver_fences_the_first_which_stops(
    daemon: DaemonProcess, detection: Callable
) -> None:
    with living_driver(daemon.endpoint, LONG_TTL_S) as first, group_on(daemon) as second:
        began = time.monotonic()
        second.attach(force=True)
        assert first.wait(PATIENCE_S) == 3
        detection(27, "fenced driver stops itself", 1.0, time.monotonic() - began, "reply")
        assert first.stdout is not None
        assert first.stdout.read().split()[-1] == "FencedError"
        admit(second)


def test_terms_out_of_bounds_are_refused_and_nothing_is_attached(
    daemon: DaemonProcess, connect: Callable[[], Driver]
) -> None:
    driver = connect()
    driver.hello()
    epoch = driver.status().epoch + 3
    assert driver.prepare(epoch).granted
    before = settled(driver.status())
    for ttl_ms in (0, 999, 60_001, 2**40):
        reply = driver.call(
            lc.CommitAttach,
            driver_id=driver.driver_id,
            results_route=driver.results_route,
            epoch=epoch,
            lease_ttl_ms=ttl_ms,
        )
        assert isinstance(reply, ControlErrorReply)
        assert reply.code is ErrorCode.CONFIG
        assert f"lease_ttl_ms = {ttl_ms}" in reply.message
    assert settled(driver.status()) == before
    driver.attach(epoch + 1, force=False, lease_ttl_ms=1000)


def test_requests_of_an_orphan_are_dropped_in_their_time(
    daemon: DaemonProcess, connect: Callable[[], Driver]
) -> None:
    driver = connect()
    driver.hello()
    epoch = driver.status().epoch + 1
    assert driver.prepare(epoch).granted
    ids = {"driver_id": driver.driver_id, "epoch": epoch}
    route = driver.results_route
    driver.call(
        lc.CommitAttach, **ids, results_route=route, lease_ttl_ms=1000, orphan_kv_ttl_ms=2500
    )
    leases = [driver.status().lease]
    while leases[-1].state == "held":
        leases.append(driver.status().lease)
    assert leases[-1].state == "orphan"
    assert 0 < leases[-1].orphan_kv_remaining_ms <= 2500
    dropped = f"no driver adopted the requests of epoch {epoch}: dropped"
    wait_for(lambda: dropped in daemon.stderr())
    assert driver.status().lease.orphan_kv_remaining_ms == 0


def test_random_contention_leaves_one_holder(
    daemon: DaemonProcess, connect: Callable[[], Driver]
) -> None:
    """Three drivers prepare and commit in random order: whoever commits last is the one."""
    randomness = random.Random(5)
    drivers = [connect() for _ in range(3)]
    for driver in drivers:
        driver.hello()
    prepared = dict.fromkeys(range(3), 0)
    claims: list[int] = []
    """Drivers that have prepared since the last commit; the last one's claim counts."""
    for _ in range(60):
        index = randomness.randrange(3)
        driver = drivers[index]
        if randomness.random() < 0.5:
            epoch = driver.status().epoch + randomness.randint(1, 5)
            force = randomness.random() < 0.5
            held = driver.status().lease
            reply = driver.call(
                lc.PrepareAttach, driver_id=driver.driver_id, epoch=epoch, force=force
            )
            others = held.state == "held" and held.holder != driver_digest(driver.driver_id)
            is_refused = isinstance(reply, ControlErrorReply)
            if claims and claims[-1] != index and not force:  # unless the claim was overdue
                assert is_refused or not others
            else:
                assert is_refused == (others and not force)
            if isinstance(reply, lc.PrepareAttachReply) and reply.granted:
                prepared[index] = epoch
                claims.append(index)
        else:
            reply = driver.call(
                lc.CommitAttach,
                driver_id=driver.driver_id,
                results_route=driver.results_route,
                epoch=max(1, prepared[index]),
                lease_ttl_ms=60_000,
            )
            status = driver.status()
            if isinstance(reply, lc.CommitAttachReply):
                claims.clear()
                assert prepared[index] == max(prepared.values())
                assert status.lease.holder == driver_digest(driver.driver_id)
                assert status.epoch == prepared[index]

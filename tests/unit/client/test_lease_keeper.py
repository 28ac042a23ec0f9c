"""The lease from the driver's side, on fake daemons with the real lease: waiting, refusal,
detection of a loss, and resending."""

import contextlib
import gc
import os
import resource
import threading
import time
from functools import partial

import psutil
import pytest

from rpc_schema import codec
from rpc_schema.config import ParallelConfig
from rpc_schema.driver_digest import driver_digest
from rpc_schema.errors import FencedError, LeaseExpiredError, LeaseHeldError, NotAttachedError
from rpc_schema.step import ModelRunnerOutput
from tests.support.fake_daemon import FakeDaemon, Fault, next_token
from tests.support.waiting import PATIENCE_S, wait_until
from tests.unit.client.conftest import worker_config
from tests.unit.client.test_worker_group import admit, ready, serve
from worker_client.errors import (
    ClientConfigError,
    DeadlineExceeded,
    LeaseNotRenewed,
    OutOfDescriptors,
    OutOfThreads,
)
from worker_client.wire.lease import LeaseTerms, holder_name
from worker_client.worker_group import WorkerGroup
from worker_daemon.server.session.lease import DriverIdentity

SHORT = LeaseTerms(ttl_s=1.0)
"""For a lease that is to expire."""
LASTING = LeaseTerms(ttl_s=4.0)
"""Outlasts a pause of a busy host."""
NUM_RENEWALS = 16
"""In its time: every quarter of a second, as those of the shortest lease."""


@pytest.fixture
def drivers(fakes, monkeypatch):
    """drivers(terms) -> another group on the same two fake daemons."""
    monkeypatch.setattr("worker_client.wire.lease.RENEWALS_PER_TTL", NUM_RENEWALS)
    daemons = fakes(2)
    groups = []

    def make(terms: LeaseTerms = LASTING) -> WorkerGroup:
        parallel = ParallelConfig(pipeline_parallel_size=2)
        groups.append(WorkerGroup(daemons.endpoints, parallel, lease=terms))
        return groups[-1]

    make.daemons = daemons.daemons
    yield make
    for group in groups:
        group.close()


def state_of(daemon) -> str:
    return daemon.lease.status().state


def test_polite_driver_is_refused_while_the_holder_lives(drivers):
    first, second = drivers(), drivers()
    first.attach()
    model = first.prepare(worker_config(2))
    with pytest.raises(LeaseHeldError, match=rf"{holder_name()} \(driver \w+\) holds") as caught:
        second.attach(wait_for_lease_s=0)
    assert (caught.value.rank, caught.value.holder) == (0, driver_digest(first.driver_id))
    assert 0 < caught.value.remaining_s <= LASTING.ttl_s
    assert "Traceback" not in str(caught.value)
    with pytest.raises(LeaseHeldError):
        second.attach()
    serve(first, model, pp=2)
    assert [daemon.epoch for daemon in drivers.daemons] == [1, 1]


def test_next_driver_need_not_wait_for_one_that_left_in_order(drivers, monkeypatch):
    # However busy the host is.
    monkeypatch.setattr("worker_client.group.attaching.LEAVE_TIMEOUT_S", 20.0)
    for _ in range(3):
        with WorkerGroup(
            [daemon.endpoint for daemon in drivers.daemons],
            ParallelConfig(pipeline_parallel_size=2),
            lease=LeaseTerms(ttl_s=60),
        ) as group:
            group.attach(wait_for_lease_s=0)
            assert [state_of(daemon) for daemon in drivers.daemons] == ["held", "held"]
        assert [state_of(daemon) for daemon in drivers.daemons] == ["free", "free"]


def test_dead_driver_is_waited_for_and_no_longer(drivers):
    first, second = drivers(SHORT), drivers()
    first.attach()
    first._channel.lease.stop()  # as a killed process stops
    second.attach()
    holder = driver_digest(second.driver_id)
    assert [daemon.lease.status().holder for daemon in drivers.daemons] == [holder] * 2
    with pytest.raises(FencedError):
        first.get_status() and first.execute_dummy_batch().result()


def test_lease_is_renewed_while_nothing_else_happens(drivers):
    group = drivers()
    group.attach()
    for daemon in drivers.daemons:
        is_outlasted = partial(has_renewed, daemon, NUM_RENEWALS + 1)
        wait_until(is_outlasted, "renewals for longer than the lease lasts", 30.0)
    assert [state_of(daemon) for daemon in drivers.daemons] == ["held", "held"]
    group.detach()
    assert [state_of(daemon) for daemon in drivers.daemons] == ["free", "free"]
    with pytest.raises(NotAttachedError):
        group.execute_dummy_batch().result()


def test_rank_that_does_not_answer_delays_no_renewal(drivers, directory):
    """The other rank is renewed about as often as the only rank of another group."""
    group = drivers()
    group.attach()
    silent, other = drivers.daemons
    only = FakeDaemon(f"ipc://{directory}/only").start()
    try:
        with WorkerGroup([only.endpoint], ParallelConfig(), lease=LASTING) as healthy:
            healthy.attach()
            silent.mute = True
            before = num_renewals(other)
            is_renewed = partial(has_renewed, only, num_renewals(only) + 8)
            wait_until(is_renewed, "renewals for two seconds", 60.0)
            assert num_renewals(other) - before >= 6
    finally:
        only.stop()


def num_renewals(daemon) -> int:
    return daemon.operations.count("RenewLease")


def has_renewed(daemon, count: int) -> bool:
    return num_renewals(daemon) >= count


NUM_DESCRIPTORS = 16
"""Fewer than a process of the tests has open all the time, and as many as a poll may need."""


@contextlib.contextmanager
def no_file_descriptors():
    """None is left for this process. Those that ZeroMQ's threads still close, or that come back
    from objects that nobody holds any more, are above the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gc.collect()
    with contextlib.ExitStack() as taken:
        while (descriptor := os.dup(0)) < NUM_DESCRIPTORS:
            taken.callback(os.close, descriptor)
        os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_DESCRIPTORS, hard))
        taken.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        yield


def test_lease_that_cannot_be_renewed_for_want_of_descriptors_is_not_taken(drivers):
    group = drivers()
    group.attach()
    group.detach()  # the connections stay: only the lease needs new ones
    with no_file_descriptors(), pytest.raises(OutOfDescriptors, match="ulimit -n"):
        group.attach()
    assert [state_of(daemon) for daemon in drivers.daemons] == ["free", "free"]
    group.attach()
    serve(group, group.prepare(worker_config(2)), pp=2)


NUM_ATTEMPTS = 10
"""Each opens two sockets, of two descriptors and more."""


@contextlib.contextmanager
def no_threads():
    """None can be started: no memory holds its stack."""
    size = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(size)


def test_lease_that_no_thread_can_renew_is_not_taken_and_leaks_nothing(drivers):
    group = drivers()
    group.attach()
    group.detach()
    num_open = psutil.Process().num_fds()
    for _ in range(NUM_ATTEMPTS):
        with no_threads(), pytest.raises(OutOfThreads, match="TasksMax"):
            group.attach()
    # One more or less for each connection of the group: a busy host cuts them now and then.
    is_closed = lambda: psutil.Process().num_fds() < num_open + NUM_ATTEMPTS  # noqa: E731
    wait_until(is_closed, "its sockets are closed")
    assert [state_of(daemon) for daemon in drivers.daemons] == ["free", "free"]
    group.attach()
    serve(group, group.prepare(worker_config(2)), pp=2)


def test_thread_that_fails_says_so_to_the_driver(drivers, monkeypatch):
    group = drivers()
    group.attach()
    group.prepare(worker_config(2))

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(group._channel.lease, "_renew", fail)
        wait_until(lambda: not group._channel.lease._thread.is_alive(), "the thread has ended")
        with pytest.raises(LeaseNotRenewed, match="none left"):
            group.execute_model(admit("a"))
    group.attach()
    serve(group, group.prepare(worker_config(2)), pp=2)


@contextlib.contextmanager
def beating(group):
    """The application's loop runs, on another thread."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.05):
            group.lease.heartbeat()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_loop_that_gives_no_heartbeat_lets_others_attach_until_it_beats_again(drivers):
    terms = LeaseTerms(ttl_s=20.0, heartbeat_timeout_s=0.5)
    first, second = drivers(terms), drivers()
    first.attach()
    is_claimable = lambda: {state_of(daemon) for daemon in drivers.daemons} == {"claimable"}  # noqa: E731
    wait_until(is_claimable, "the application does not beat")
    with beating(first):
        is_held = lambda: {state_of(daemon) for daemon in drivers.daemons} == {"held"}  # noqa: E731
        wait_until(is_held, "it beats again")
        with pytest.raises(LeaseHeldError):
            second.attach(wait_for_lease_s=0)
    wait_until(is_claimable, "the application does not beat")
    second.attach(wait_for_lease_s=0)
    with pytest.raises(FencedError):
        first.execute_dummy_batch().result()


def test_loop_that_gives_no_heartbeat_loses_its_lease_and_may_attach_again(drivers):
    terms = LeaseTerms(ttl_s=2.0, heartbeat_timeout_s=1.0)
    group = drivers(terms)
    group.attach()
    with beating(group):
        time.sleep(terms.ttl_s + terms.heartbeat_timeout_s + 0.3)
        # On a busy host a heartbeat may be late. A lease that has expired is held by nobody again.
        wait_until(lambda: state_of(drivers.daemons[0]) == "held", "it is held")
    for daemon in drivers.daemons:
        wait_until(lambda daemon=daemon: state_of(daemon) == "orphan", "the lease expires")
    with pytest.raises(LeaseExpiredError):
        group.execute_dummy_batch().result()
    with pytest.raises(LeaseExpiredError):
        group.execute_dummy_batch()
    with beating(group):
        group.attach()
        serve(group, group.prepare(worker_config(2)), pp=2)


def test_lease_is_open_to_others_once_the_thread_that_attached_has_ended(drivers):
    group, other = drivers(LeaseTerms(ttl_s=60.0)), drivers()
    thread = threading.Thread(target=group.attach)
    thread.start()
    thread.join()
    wait_until(lambda: state_of(drivers.daemons[1]) == "claimable", "the lease is claimable")
    other.attach(wait_for_lease_s=0)


def test_lease_expires_some_time_after_the_thread_that_attached_has_ended(drivers):
    group = drivers(SHORT)
    thread = threading.Thread(target=group.attach)
    thread.start()
    thread.join()
    wait_until(lambda: state_of(drivers.daemons[1]) == "orphan", "the lease expires")


def test_driver_that_loses_a_race_is_told_who_attaches(drivers):
    first, second = drivers(), drivers()
    for daemon in drivers.daemons:
        daemon.lease.claim(DriverIdentity("", second.driver_id), 5, force=False)
    digest = driver_digest(second.driver_id)
    with pytest.raises(LeaseHeldError, match=f"driver {digest.hex()[:8]} is attaching") as caught:
        first.attach(wait_for_lease_s=0)
    assert caught.value.holder == digest
    first.attach()  # the other one gives up
    assert state_of(drivers.daemons[0]) == "held"


def test_refusal_of_one_rank_leaves_no_claim_on_the_others(drivers):
    first, second = drivers(), drivers()
    first.attach()
    drivers.daemons[0].lease.contact_lost(1)
    with pytest.raises(LeaseHeldError) as caught:
        second.attach(wait_for_lease_s=0)
    assert caught.value.rank == 1
    assert drivers.daemons[0].lease.contact_returned(1)  # nobody claims it
    serve(first, first.prepare(worker_config(2)), pp=2)


def test_detach_asks_all_ranks_although_one_does_not_answer(drivers):
    group = drivers()
    group.attach()
    silent, other = drivers.daemons
    silent.mute = True
    with pytest.raises(DeadlineExceeded):
        group.detach()
    assert state_of(other) == "free"


def test_group_that_nobody_refers_to_renews_no_more(fakes):
    daemons = fakes(1)
    group = WorkerGroup(daemons.endpoints, ParallelConfig(), lease=SHORT)
    group.attach()
    thread, context = group._channel.lease._thread, group._channel.daemons.context
    group._channel.daemons.results.close()
    group._channel.daemons.events.close()
    for client in group.clients:
        client.close()
    del group, client
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    context.term()


def test_fenced_driver_hears_of_it_while_it_waits(drivers):
    first, second = drivers(), drivers()
    first.attach()
    first.prepare(worker_config(2, step_deadline_ms=60_000))
    for daemon in drivers.daemons:
        daemon.faults = [Fault(0, "hang")]
    future = first.execute_model(admit("a"))
    second.attach(force=True)
    with pytest.raises(FencedError):
        future.result()
    with pytest.raises(FencedError):
        first.execute_model(admit("b"))
    serve(second, second.prepare(worker_config(2, step_deadline_ms=60_000)), pp=2)


@pytest.mark.parametrize(
    "terms", [{"ttl_s": 0.9}, {"ttl_s": 61}, {"orphan_kv_ttl_s": -1}, {"heartbeat_timeout_s": -1}]
)
def test_terms_out_of_bounds_are_refused(terms):
    (field,) = terms
    with pytest.raises(ClientConfigError, match=f"field {field} = "):
        LeaseTerms(**terms)


# What gets lost.


def test_lost_reply_is_asked_for_again_and_nothing_runs_twice(fakes, connect):
    daemons, group, _ = ready(fakes, connect)
    daemon = daemons.daemons[0]
    depart, lost = daemon._depart, []

    def lose_first(epoch, frames, delay_s=0.0):
        own = codec.split_replayed(frames)[1]
        if not lost and isinstance(codec.decode_step_reply(own), ModelRunnerOutput):
            lost.append(own)
        else:
            depart(epoch, frames, delay_s)

    daemon._depart = lose_first
    future = group.execute_model(admit("a"))
    assert future.result().sampled == {"a": next_token(range(3))}
    assert future.replayed
    assert len(daemon.executes) == len(lost) == 1
    daemon._depart = depart
    second = group.execute_model(admit("b", first_block=2))
    assert second.result().sampled == {"b": next_token(range(3))}
    assert not second.replayed


@pytest.mark.parametrize("way", ["request", "reply"])
@pytest.mark.parametrize("rank", [0, 1])
def test_operation_that_gets_lost_is_sent_again_and_runs_once(fakes, connect, way, rank):
    daemons, group, _ = ready(fakes, connect, 2)
    daemon = daemons.daemons[rank]
    name = "_arrive" if way == "request" else "_depart"
    passes, lost = getattr(daemon, name), []

    def lose_first(*args):
        if lost:
            passes(*args)
        lost.append(args)

    setattr(daemon, name, lose_first)
    before = [each.operations.count("GetSupportedTasks") for each in daemons.daemons]
    replies = group.load_chain.get_supported_tasks()
    assert [reply.rank for reply in replies] == [0, 1]
    after = [each.operations.count("GetSupportedTasks") for each in daemons.daemons]
    assert after == [count + 1 for count in before]
    assert lost

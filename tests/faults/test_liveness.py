"""Daemons that live but do not answer, hang, or are slow: what the driver learns, how soon, and
that every request ends with the tokens of an undisturbed run."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zmq

from tests.support.driving import Cases, random_cases
from tests.support.faulty_daemon import Fault, FaultyDaemons
from tests.support.serving import connect, generate, scheduler_limits, worker_config
from tests.support.stopping import stop_process
from tests.support.waiting import wait_until
from worker_client.driver import Driver, Recover, give_up
from worker_client.scheduler import Scheduler
from worker_client.wire.endpoint import new_driver_id, parse_endpoint
from worker_client.wire.liveness import FENCE_AFTER_S, LivenessEvent
from worker_client.wire.worker_client import WorkerClient
from worker_client.worker_group import WorkerGroup
from worker_daemon.server.health.guard import SLOW_AT_LEAST_S, SLOW_FACTOR

STEPS_BEFORE = 8


@pytest.fixture(scope="module")
def faulty(model_root, tmp_path_factory):
    """Two daemons that fail on demand."""
    with FaultyDaemons(2, model_root, tmp_path_factory.mktemp("faults")) as daemons:
        yield daemons


@pytest.fixture(scope="module")
def cases(checkpoint):
    return random_cases(checkpoint(), seed=60, count=6, max_tokens=32)


@pytest.fixture
def serving(faulty, checkpoint):
    """serving(step_deadline_ms): a pipeline of the two daemons."""

    def open_group(step_deadline_ms: int):
        config = worker_config(checkpoint().path, 2, step_deadline_ms=step_deadline_ms)
        return connect(faulty.endpoints, config)

    return open_group


def disturbed(
    group: WorkerGroup, loaded, cases: Cases, act: Callable[[], None], recover: Recover = give_up
) -> dict[str, list[int]]:
    """Serve the cases, and act once STEPS_BEFORE steps are over."""
    acted = []

    def count(_) -> None:
        if len(driver.records) >= STEPS_BEFORE and not acted:
            acted.append(True)
            act()

    driver = Driver(group, Scheduler(scheduler_limits(group, loaded)), count, recover=recover)
    for request in cases.requests:
        driver.add_request(request)
    outputs = {output.req_id: output.token_ids for output in driver.run()}
    assert acted
    return outputs


def first(group: WorkerGroup, kind: str, rank: int, since: float) -> LivenessEvent:
    """The first event of a kind about a rank."""
    events = group.watch.events
    found = [e for e in events if (e.kind, e.rank) == (kind, rank) and e.at >= since]
    assert found, events
    return found[0]


def are_alive(group: WorkerGroup) -> bool:
    """After the news that are here."""
    group.look()
    return group.watch.liveness == ["alive", "alive"]


class Stopper:
    """SIGSTOP now, SIGCONT later."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.at = 0.0

    def __call__(self) -> None:
        self.at = time.monotonic()
        stop_process(self.pid)

    def go_on_later(self, seconds: float) -> None:
        self.timer = threading.Timer(seconds, os.kill, (self.pid, signal.SIGCONT))
        self.timer.start()


def test_stopped_rank_is_suspect_and_comes_back(faulty, serving, cases, detection):
    """Nothing fails: steps in flight are sent again, and run once."""
    stopper, suspected = Stopper(faulty.pids[1]), []

    def go_on_soon(event: LivenessEvent) -> None:
        if (event.kind, event.rank) == ("suspect", 1) and stopper.at and not suspected:
            suspected.append(event)
            stopper.go_on_later(1.0)

    with serving(20_000) as (group, loaded):
        group.watch.on_event = go_on_soon
        tokens = disturbed(group, loaded, cases, stopper)
        (suspect,) = suspected
        wait_until(lambda: are_alive(group), "the news of its return", 20.0)
        assert first(group, "back", 1, suspect.at)
    stopper.timer.join()
    assert tokens == cases.expected
    detection(4, "SIGSTOP: suspect", 1.0, suspect.at - stopper.at, suspect.signal)


def test_stopped_rank_is_fenced_and_rejoins_warm(faulty, serving, cases, detection):
    stopper = Stopper(faulty.pids[1])
    replaced, epochs = [], []

    def recover(died) -> None:
        survivor = group.clients[0]
        stopper.go_on_later(1.0)
        replaced.append(group.replace(died.rank))
        epochs.append(survivor.get_status().epoch)
        stopper.timer.join()

    with serving(2000) as (group, loaded):
        before = group.get_status()
        tokens = disturbed(group, loaded, cases, stopper, recover)
        after = group.get_status()
        dead = first(group, "dead", 1, stopper.at)
        assert generate(group, loaded, cases.requests).tokens == cases.expected
    assert tokens == cases.expected
    detection(4, "SIGSTOP: fenced", FENCE_AFTER_S, dead.at - stopper.at, dead.signal)
    assert (replaced[0].ranks, replaced[0].loaded_ranks) == ((1,), ())
    assert epochs[0] >= before[0].epoch + 2  # once without the stopped rank, and once with it
    assert [s.worker_uid for s in after] == [s.worker_uid for s in before]


class Interrupted(Exception):
    """Ends a driver that waits for a step."""


def test_rank_that_stops_after_its_greeting_keeps_no_driver_out(faulty, checkpoint, cases):
    """While another rank is still in a step of the former driver, nobody reads the greeting; it is
    lost with the connection."""
    config = worker_config(checkpoint().path, 2, step_deadline_ms=20_000)
    with connect(faulty.endpoints, config) as (group, loaded):
        faulty.faults[1].put(Fault("forward", "hang", seconds=0.0, is_ended_by_test=True))
        scheduler = Scheduler(scheduler_limits(group, loaded))
        scheduler.add_request(cases.requests[0])
        group.execute_model(scheduler.schedule())
        wait_until(lambda: not faulty.faults[1].armed, "rank 1 hangs")

    def stop_rank_0() -> None:
        with zmq.Context() as context:
            endpoint = parse_endpoint(faulty.endpoints[0])
            with closing(WorkerClient(context, endpoint, 0, new_driver_id())) as client:
                wait_until(lambda: client.get_status().lease.state == "held", "it has greeted")
        stopper = Stopper(faulty.pids[0])
        stopper()
        stopper.go_on_later(2.0)
        stopper.timer.join()
        faulty.faults[1].end_hang()

    thread = threading.Thread(target=stop_rank_0)
    thread.start()
    with connect(faulty.endpoints, config, reload=False) as (group, loaded):
        thread.join()
        assert generate(group, loaded, cases.requests).tokens == cases.expected


def test_survivor_is_not_lost_while_its_neighbour_is_replaced(faulty, serving, cases, monkeypatch):
    """It hangs in a step, so its reply to the attach takes longer than the silence limit; its
    control thread keeps sending heartbeats."""
    monkeypatch.setattr("worker_client.wire.liveness.SILENCE_LIMIT_S", 3.0)
    monkeypatch.setattr("worker_client.group.replacement.REPLACE_ATTEMPTS", 1)
    stopper = Stopper(faulty.pids[1])
    interrupted = []

    def stop_once_it_hangs() -> None:
        wait_until(lambda: not faulty.faults[0].armed, "a step in which rank 0 hangs")
        stopper()

    def act() -> None:
        faulty.faults[0].put(Fault("forward", "hang", seconds=0.0, is_ended_by_test=True))
        threading.Thread(target=stop_once_it_hangs).start()

    def interrupt(event: LivenessEvent) -> None:
        if (event.kind, event.rank) == ("suspect", 1) and not interrupted:
            interrupted.append(event)  # it may be suspect once more, while it is replaced
            raise Interrupted

    with serving(7_000) as (group, loaded):
        group.watch.on_event = interrupt
        with pytest.raises(Interrupted):
            disturbed(group, loaded, cases, act)
        stopper.go_on_later(3.0)
        end_of_hang = threading.Timer(4.5, faulty.faults[0].end_hang)
        end_of_hang.start()
        replaced = group.replace(1)
        stopper.timer.join()
        end_of_hang.join()
        assert replaced.ranks == (1,)
        assert replaced.seconds["fence"] > 3.0
        assert [e.rank for e in group.watch.events if e.kind == "dead"] == [1]
        assert generate(group, loaded, cases.requests).tokens == cases.expected


def test_held_interpreter_lock(faulty, serving, cases, detection):
    """Its connection answers pings; only its silence tells."""
    held = []

    def act() -> None:
        faulty.faults[1].put(Fault("forward", "hold"))
        held.append(time.monotonic())

    def recover(died) -> None:
        # Its own limit passes at about the time at which the driver gives it up.
        wait_until(lambda: "Timeout" in stacks_of(faulty, 1).read_text(), "the stacks")
        faulty.faults[1].end_hold()
        group.replace(died.rank)

    with serving(30_000) as (group, loaded):
        time.sleep(1.0)  # the warm-up had announced a long silence
        tokens = disturbed(group, loaded, cases, act, recover)
        suspect, dead = (first(group, kind, 1, held[0]) for kind in ("suspect", "dead"))
    assert tokens == cases.expected
    assert (suspect.signal, dead.signal) == ("progress", "progress")
    detection(6, "the lock held: suspect", 1.0, suspect.at - held[0], "progress")
    detection(6, "the lock held: given up", 10.0, dead.at - held[0], "progress")
    assert "in strike" in stacks_of(faulty, 1).read_text()


def stacks_of(faulty: FaultyDaemons, rank: int) -> Path:
    (path,) = faulty.directory.glob(f"w{rank}-*.stacks")
    return path


@contextmanager
def asking_for_health(endpoint: str, on_sick: Callable[[], None]):
    """Ask one daemon for its health all the time; yields the list of (seconds, reply). on_sick is
    called after the first reply of a sick one."""
    answers, over = [], threading.Event()

    def ask() -> None:
        with zmq.Context() as context:
            client = WorkerClient(context, parse_endpoint(endpoint), 0, new_driver_id())
            with closing(client):
                while not over.wait(0.02):
                    began = time.monotonic()
                    reply = client.check_health()
                    answers.append((time.monotonic() - began, reply))
                    if [sick for _, sick in answers if not sick.healthy] == [reply]:
                        on_sick()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        over.set()
        thread.join()


def test_hang_is_reported_with_stacks(faulty, serving, cases, detection):
    deadline_s = 1.0
    hung_at = []

    def act() -> None:
        faulty.faults[0].put(Fault("forward", "hang", seconds=3.5, is_ended_by_test=True))
        hung_at.append(time.monotonic())

    with (
        serving(int(deadline_s * 1000)) as (group, loaded),
        asking_for_health(faulty.endpoints[0], faulty.faults[0].end_hang) as answers,
    ):
        tokens = disturbed(group, loaded, cases, act)
        wait_until(lambda: answers[-1][1].healthy, "it says that it is well again")
        hung = first(group, "hung", 0, hung_at[0])
    assert tokens == cases.expected
    path = stacks_of(faulty, 0)
    assert str(path) in hung.detail and "ExecuteModel" in hung.detail
    assert "hung" in path.read_text() and "in strike" in path.read_text()
    sick = [reply for _, reply in answers if not reply.healthy]
    assert sick and "past its deadline" in sick[0].detail
    assert answers[-1][1].healthy and str(path) in answers[-1][1].detail
    detection(18, "hang, peers alive: reported", deadline_s + 1.0, hung.at - hung_at[0], "progress")
    slowest = max(seconds for seconds, _ in answers)
    detection(18, "control answers during the hang", 0.05, slowest, "control")


def test_slow_rank_is_named_and_serves_on(faulty, serving, cases, detection):
    slow_at = []

    def act() -> None:
        faulty.faults[0].put(Fault("forward", "hang", seconds=3.5))
        slow_at.append(time.monotonic())

    def is_pace_known() -> bool:
        """Whether steps have made up for the loading before them, which took far longer."""
        assert generate(group, loaded, cases.requests).tokens == cases.expected
        return 0 < group.get_status()[0].usual_step_us * SLOW_FACTOR < 1e6 * SLOW_AT_LEAST_S

    with serving(20_000) as (group, loaded):
        wait_until(is_pace_known, "steps are known to be fast", 60.0)
        tokens = disturbed(group, loaded, cases, act)
        slow = first(group, "slow", 0, slow_at[0])
        assert not [event for event in group.watch.events if event.kind == "dead"]
    assert tokens == cases.expected
    detection(10, "a step takes 8x its usual time", 1.25, slow.at - slow_at[0], "progress")


def test_throttled_device_is_told_and_serves_on(faulty, serving, cases, detection):
    hot, capped = 0x40, 0x04
    faults = faulty.faults[0]
    with serving(20_000) as (group, loaded):
        faults.put_throttle(hot | capped)
        throttled_at = time.monotonic()
        wait_until(lambda: group.get_status()[0].degraded, "it is degraded", 30.0)
        noticed_s = time.monotonic() - throttled_at
        status = group.get_status()[0]
        assert status.degraded == "the device is throttled: it is too hot (hardware)"
        assert status.serving == "SERVING"
        assert generate(group, loaded, cases.requests[:2]).tokens.keys() <= cases.expected.keys()
        faults.put_throttle(capped)
        wait_until(lambda: not group.get_status()[0].degraded, "the cap alone is usual", 30.0)
        faults.throttle.unlink()
    detection(40, "the device is throttled", 5.0, noticed_s, "NVML", injected=True)


def test_lost_nvml_degrades_and_serves_on(faulty, serving, cases, detection):
    with serving(20_000) as (group, loaded):
        assert group.get_status()[1].degraded == ""
        lost = faulty.faults[1].nvml_lost
        lost.touch()
        lost_at = time.monotonic()
        wait_until(lambda: group.get_status()[1].degraded, "it is degraded", 30.0)
        noticed_s = time.monotonic() - lost_at
        status = group.get_status()[1]
        assert "NVML is lost" in status.degraded and status.serving == "SERVING"
        assert generate(group, loaded, cases.requests).tokens == cases.expected
        lost.unlink()
        wait_until(lambda: not group.get_status()[1].degraded, "NVML is back", 30.0)
    detection(17, "NVML lost, the device computes", 10.0, noticed_s, "NVML", injected=True)

"""Liveness of a group's daemons, with fake signals and time; and the two facts about processes that
it reads from the system."""

import socket
import subprocess
import sys
import time

import pytest

from rpc_schema.lifecycle import Heartbeat, Hung, Slow
from worker_client.errors import WorkerDied
from worker_client.wire import liveness
from worker_client.wire.liveness import FENCE_AFTER_S, SILENCE_LIMIT_S, SUSPECT_AFTER_S, Watch
from worker_client.wire.processes import PeerProcesses, Process

UIDS = (b"a" * 16, b"b" * 16)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Group:
    """Two daemons, a clock, and whether anybody listens at their addresses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.gone = {"r0": False, "r1": False}
        monkeypatch.setattr(liveness, "nobody_listens", self.gone.__getitem__)
        self.process: Process = Process()
        """Behind every address."""
        self.watch = Watch(["r0", "r1"], ["c0", "c1"], self.clock, lambda _: self.process)
        for rank, uid in enumerate(UIDS):
            self.watch.met(rank, uid)
            self.beat(rank)

    def beat(self, rank: int, *, operating: bool = False, phase_limit_ms: int = 0) -> None:
        self.watch.heard(heartbeat(UIDS[rank], phase_limit_ms), operating=operating)

    def live(self, seconds: float, *ranks: int) -> None:
        """Let time pass, with looks and with heartbeats of these ranks."""
        until = self.clock.now + seconds
        while self.clock.now < until - 1e-9:
            self.clock.now = min(until, self.clock.now + 0.25)
            for rank in ranks:
                self.beat(rank)
            self.watch.listened()
            self.watch.look()

    def kinds(self, rank: int) -> list[str]:
        return [event.kind for event in self.watch.events if event.rank == rank]


def heartbeat(uid: bytes, phase_limit_ms: int = 0) -> Heartbeat:
    return Heartbeat(
        worker_uid=uid,
        rank=0,  # what it says before it has a rank
        serving="SERVING",
        load="READY",
        link_state="up",
        epoch=1,
        link=1,
        last_seq=1,
        phase="LOADING" if phase_limit_ms else "IDLE",
        phase_ms=0,
        phase_limit_ms=phase_limit_ms,
    )


@pytest.fixture
def group(monkeypatch):
    return Group(monkeypatch)


def test_ended_connection_with_nobody_behind_is_a_death(group):
    group.gone["r1"] = True
    group.watch.disconnected(1)
    with pytest.raises(WorkerDied, match=r"rank 1 at c1.*transport"):
        group.watch.look()
    assert group.watch.liveness == ["alive", "dead"]
    with pytest.raises(WorkerDied):
        group.watch.look()


def test_ended_connection_of_a_live_process_is_fenced_after_a_while(group):
    group.clock.now += SUSPECT_AFTER_S
    group.beat(0)
    group.watch.disconnected(1)
    assert group.watch.liveness == ["alive", "suspect"]
    group.live(FENCE_AFTER_S - SUSPECT_AFTER_S - 0.25, 0)
    with pytest.raises(WorkerDied, match="fenced"):
        group.live(0.5, 0)
    assert group.kinds(1) == ["suspect", "dead"] and not group.kinds(0)


def test_suspect_that_answers_again_is_told_once_and_forgiven(group):
    group.watch.disconnected(1)
    group.live(2.0, 0)
    group.watch.connected(1)
    group.beat(1)
    group.live(FENCE_AFTER_S * 2, 0, 1)
    assert group.kinds(1) == ["suspect", "back"]
    assert group.watch.returned == {1}


def test_refused_reconnection_ends_the_doubt(group):
    group.watch.refused(0)  # of a connection that is fine: some other attempt's
    group.watch.disconnected(1)
    group.gone["r1"] = group.gone["r0"] = True
    group.watch.refused(1)
    with pytest.raises(WorkerDied, match="rank 1"):
        group.watch.look()
    assert group.watch.liveness == ["alive", "dead"]


def test_silence_on_a_live_connection(group):
    group.live(SUSPECT_AFTER_S + 0.25, 0)
    assert group.watch.liveness == ["alive", "suspect"]
    group.live(SILENCE_LIMIT_S - SUSPECT_AFTER_S - 0.5, 0)
    with pytest.raises(WorkerDied, match="progress"):
        group.live(0.5, 0)


def test_silence_that_was_announced_is_legal_while_the_operation_lasts(group):
    for rank in (0, 1):
        group.beat(rank, operating=True, phase_limit_ms=3600_000)
    group.live(60.0)
    group.watch.begin_steps()
    group.beat(0)
    group.watch.heard(heartbeat(UIDS[1], 3600_000), operating=False)  # it was on its way
    with pytest.raises(WorkerDied, match="rank 1"):
        group.live(SILENCE_LIMIT_S + 0.5, 0)


def test_silence_is_not_judged_before_events_are_read(group):
    """However often somebody looks: heartbeats may wait to be read."""
    for _ in range(60):
        group.clock.now += 0.25
        group.watch.look()
    group.watch.listened()
    assert group.watch.liveness == ["alive", "alive"] and not group.watch.events


def test_ended_process_is_a_death(group):
    class Ended(Process):
        def __init__(self) -> None:
            super().__init__()
            self.pid = 77

        def close(self) -> None:
            pass

        def cause_of_end(self) -> str:
            return ""

        def has_ended(self) -> bool:
            return True

    group.process = Ended()
    group.watch.met(0, b"c" * 16)
    with pytest.raises(WorkerDied, match=r"process 77 has ended \(signal: process\)"):
        group.watch.look()


def test_successor_starts_with_a_clean_record(group):
    group.gone["r1"] = True
    group.watch.disconnected(1)
    group.watch.expect(1, "r0", "elsewhere")
    group.watch.look()
    assert group.watch.liveness == ["alive", "alive"]
    group.live(60.0, 0)  # it has not been heard of yet: nothing is held against it


def test_what_daemons_say_of_themselves_names_the_rank_that_we_know(group):
    heard = []
    group.watch.on_event = heard.append
    said = {"rank": 0, "phase": "ExecuteModel", "phase_ms": 9}
    group.watch.report(Hung(worker_uid=UIDS[1], stacks="/s/w.stacks", **said))
    group.watch.report(Slow(worker_uid=UIDS[1], usual_ms=1, **said))
    group.watch.report(Slow(worker_uid=b"?" * 16, usual_ms=1, **said))
    assert [(event.kind, event.rank) for event in heard] == [("hung", 1), ("slow", 1)]
    assert "/s/w.stacks" in heard[0].detail


LISTENER = "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); \
s.listen(); print(flush=True); time.sleep(60)"


def test_process_behind_a_socket_is_found_and_its_end_seen(directory):
    path = directory / "s"
    assert liveness.nobody_listens(f"ipc://{path}")
    assert liveness.find_process(f"ipc://{path}").pid == 0
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER, path], stdout=subprocess.PIPE
    ) as listener:
        listener.stdout.readline()
        process = liveness.find_process(f"ipc://{path}")
        assert process.pid == listener.pid
        assert not process.has_ended() and not liveness.nobody_listens(f"ipc://{path}")
        listener.kill()
        listener.wait()
        deadline = time.monotonic() + 10.0
        while not process.has_ended():
            assert time.monotonic() < deadline
        process.close()
    assert path.exists() and liveness.nobody_listens(f"ipc://{path}")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_port_of_nobody_refuses_and_that_of_a_stopped_process_does_not(host):
    family = socket.AF_INET6 if "[" in host else socket.AF_INET
    with socket.create_server((host.strip("[]"), 0), family=family) as listener:
        address = f"tcp://{host}:{listener.getsockname()[1]}"
        assert not liveness.nobody_listens(address)  # nobody accepts
    assert liveness.nobody_listens(address)


def test_connection_to_another_host_tells_nothing_by_its_end(monkeypatch):
    """A partition ends it too: only a refusal tells of a death."""
    gone = []
    monkeypatch.setattr(liveness, "nobody_listens", gone.__contains__)
    addresses = ["tcp://10.0.0.1:5555", "tcp://10.0.0.2:5555"]
    watch = liveness.Watch(addresses, ["c0", "c1"], find=lambda _: Process())
    gone.append(addresses[1])
    for rank in (0, 1):
        watch.met(rank, UIDS[rank])
        watch.disconnected(rank)
    assert watch.liveness == ["suspect", "suspect"]
    watch.refused(0)
    watch.refused(1)
    assert watch.liveness == ["suspect", "dead"]


def test_process_is_that_of_the_very_connection(directory):
    path = directory / "s"
    processes = PeerProcesses()
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER, path], stdout=subprocess.PIPE
    ) as listener:
        listener.stdout.readline()
        with socket.socket(socket.AF_UNIX) as ours, socket.socket() as other:
            ours.connect(str(path))
            for address, descriptor in (
                (f"ipc://{path}x", ours.fileno()),  # the number is another connection's by now
                ("tcp://127.0.0.1:1", other.fileno()),
                (f"ipc://{path}", 10_000),  # it is nobody's
            ):
                processes.connected(address, descriptor)
                assert processes.find(address).pid == 0
            processes.connected(f"ipc://{path}", ours.fileno())
            assert ours.fileno() >= 0 and ours.getpeername() == str(path)
        process = processes.find(f"ipc://{path}")
        processes.close()
        assert process.pid == listener.pid and not process.has_ended()
        listener.kill()
        listener.wait()
        assert process.has_ended()
        process.close()

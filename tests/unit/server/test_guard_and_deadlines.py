"""Deadlines of silence, and the guard's action when they pass."""

import math
import threading
import time
from collections.abc import Iterator

import pytest

from rpc_schema import lifecycle as lc
from rpc_schema import step
from tests.unit.server.driver import wait_for
from worker_daemon.server.dispatch import legal_silence_s
from worker_daemon.server.health.guard import TICK_S, Guard, HangHistory
from worker_daemon.server.health.hang_reports import HangReports
from worker_daemon.server.progress import Progress, Stamp


def hung(phase: str) -> Stamp:
    now = time.monotonic()
    return Stamp(phase, now - 2.0, now - 1.0, True)


class Aborts:
    """A worker that records what a guard did."""

    def __init__(self, *, had_link: bool) -> None:
        self.had_link = had_link
        self.freed_peers: list[bool] = []
        self.told: list[tuple[int, str]] = []

    @property
    def count(self) -> int:
        return len(self.freed_peers)

    def abort_link(self, *, frees_peers: bool) -> bool:
        self.freed_peers.append(frees_peers)
        return self.had_link

    def dump_link(self) -> bytes:
        return b""

    def check_device(self) -> str:
        return ""

    def tell(self, link: int, cause: str) -> None:
        self.told.append((link, cause))


class SlowAborts(Aborts):
    """Aborts that last until they may end."""

    def __init__(self, may_end: threading.Event) -> None:
        super().__init__(had_link=True)
        self._may_end = may_end

    def abort_link(self, *, frees_peers: bool) -> bool:
        return super().abort_link(frees_peers=frees_peers) and self._may_end.wait(10.0)


class Listener:
    """Hears of relapses."""

    def __init__(self) -> None:
        self.causes: list[str] = []

    def hung(self, phase: str, phase_ms: int, stacks: str) -> None:
        return None

    def slow(self, phase: str, phase_ms: int, usual_ms: int) -> None:
        return None

    def relapsed(self, cause: str) -> None:
        self.causes.append(cause)


@pytest.fixture
def reports(tmp_path) -> Iterator[HangReports]:
    made = HangReports(tmp_path / "w.stacks")
    yield made
    made.close()


def guard_of(progress: Progress, aborts: Aborts, reports: HangReports) -> Guard:
    guard = Guard(progress, aborts.tell, reports, Listener())
    guard.watch(aborts)
    guard.thread.start()
    return guard


def test_phase_and_result_that_hang_together_are_each_reported_once(reports) -> None:
    progress, aborts = Progress("cpu"), Aborts(had_link=True)
    progress.link = 7
    progress.stamp, progress.result = hung("ExecuteModel"), hung("RESULT 3")
    guard = guard_of(progress, aborts, reports)
    wait_for(lambda: aborts.count >= 2)
    time.sleep(4 * TICK_S)
    guard.stop()
    assert guard.thread.join_within(5.0)
    assert aborts.told == [
        (7, "ExecuteModel is past its deadline"),
        (7, "RESULT 3 is past its deadline"),
    ]
    assert (guard.num_hangs, guard.num_aborts) == (2, 2)
    assert aborts.freed_peers == [False, False], "peers that hang too report that themselves"


def test_abort_without_a_link_is_told_to_nobody(reports) -> None:
    aborts = Aborts(had_link=False)
    guard = guard_of(Progress("cpu"), aborts, reports)
    guard.request_abort("a test asks")
    wait_for(lambda: aborts.count == 1)
    guard.stop()
    assert guard.thread.join_within(5.0)
    assert aborts.told == []
    assert guard.num_aborts == 0


def test_an_abort_that_was_asked_for_an_older_link_leaves_the_new_one_alone(reports) -> None:
    progress, may_end = Progress("cpu"), threading.Event()
    aborts = SlowAborts(may_end)
    progress.link = 3
    guard = Guard(progress, aborts.tell, reports, Listener())
    guard.watch(aborts)
    guard.thread.start()
    for cause in ("the first", "while that one lasts"):
        guard.request_abort(cause)
    wait_for(lambda: aborts.count == 1)
    progress.link = 4
    may_end.set()
    guard.request_abort("the new link's")
    wait_for(lambda: len(aborts.told) == 2)
    guard.stop()
    assert guard.thread.join_within(5.0)
    assert [cause for _, cause in aborts.told] == ["the first", "the new link's"]
    assert aborts.freed_peers == [True, True]


def hang_on(guard: Guard, progress: Progress, aborts: Aborts, *links: int) -> None:
    """Let a phase and its result hang on each link."""
    for link in links:
        progress.link = link
        before = aborts.count
        progress.stamp, progress.result = hung("ExecuteModel"), hung("RESULT 3")
        wait_for(lambda before=before: aborts.count >= before + 2)
        guard.request_abort("what it made of the second one is done by then")
        wait_for(lambda before=before: aborts.count >= before + 3)


def test_link_that_hangs_soon_after_the_one_before_it_is_a_relapse(reports) -> None:
    progress, aborts, listener = Progress("cpu"), Aborts(had_link=True), Listener()
    guard = Guard(progress, aborts.tell, reports, listener)
    guard.watch(aborts)
    guard.thread.start()
    hang_on(guard, progress, aborts, 3)
    assert not listener.causes, "two waits of one link"
    guard.hangs.forgive()
    hang_on(guard, progress, aborts, 4)
    assert not listener.causes, "a peer was lost in between"
    hang_on(guard, progress, aborts, 5)
    guard.stop()
    assert guard.thread.join_within(5.0)
    assert listener.causes[0].startswith("ExecuteModel hangs on link 5")


def test_hangs_far_apart_are_no_relapse() -> None:
    history = HangHistory()
    outcomes = [history.is_relapse(link, now) for link, now in ((1, 0.0), (2, 60.0), (3, 119.0))]
    assert outcomes == [False, False, True]


@pytest.mark.parametrize("deadline_s", [0.5, 60.0, 900.0])
@pytest.mark.parametrize("kind", [lc.InitDevice, lc.Relink, lc.Reset])
def test_silence_covers_a_meeting_with_peers(kind: type, deadline_s: float) -> None:
    assert legal_silence_s(kind, deadline_s) > 2 * (deadline_s + 1) + 5


def test_steps_have_the_driver_s_deadline() -> None:
    assert legal_silence_s(step.ExecuteModel, 4.5) == 4.5
    assert math.isfinite(legal_silence_s(lc.LoadModel, 4.5))

"""Messages to a service manager, hang reports, and slow steps."""

import socket

import pytest

from rpc_schema.errors import ConfigError
from worker_daemon.server.health.guard import SLOW_AT_LEAST_S, SLOW_FACTOR, Pace
from worker_daemon.server.health.hang_reports import MAX_STACKS_BYTES, HangReports
from worker_daemon.server.health.systemd import ServiceManager
from worker_daemon.server.progress import MAX_STEPS, NO_RESULT, Stamp, StepTimes


@pytest.mark.parametrize("abstract", [False, True])
def test_service_manager_gets_each_message_as_a_datagram(tmp_path, abstract) -> None:
    name = str(tmp_path / "notify")[-90:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name if abstract else name)
        notifier = ServiceManager("@" + name if abstract else name)
        notifier.notify("READY=1")
        notifier.notify("STATUS=serving")
        assert [manager.recv(64), manager.recv(64)] == [b"READY=1", b"STATUS=serving"]
    notifier.notify("WATCHDOG=1")  # nobody is there any more


def test_without_a_service_manager_nobody_is_told() -> None:
    ServiceManager("").notify("READY=1")


def test_reports_hold_headings_stacks_and_what_communicators_did(tmp_path) -> None:
    reports = HangReports(tmp_path / "w.stacks")
    path = reports.report("a step hangs", lambda: b'{"entries": []}')
    reports.report("another one", lambda: b"")
    text = (tmp_path / "w.stacks").read_text()
    assert path == str(tmp_path / "w.stacks")
    assert text.index("a step hangs") < text.index("another one")
    assert text.count("in test_reports_hold_headings") == 2
    assert (tmp_path / "w.flight.json").read_text() == '{"entries": []}'
    reports.close()
    assert (tmp_path / "w.stacks").exists()


def test_report_survives_a_record_that_cannot_be_had(tmp_path) -> None:
    def fail() -> bytes:
        raise RuntimeError("no record")

    reports = HangReports(tmp_path / "w.stacks")
    reports.report("a step hangs", fail)
    reports.close()
    assert "a step hangs" in (tmp_path / "w.stacks").read_text()


def test_reports_do_not_grow_for_ever(tmp_path) -> None:
    path = tmp_path / "w.stacks"
    path.write_bytes(b"x" * (MAX_STACKS_BYTES + 1))
    reports = HangReports(path)
    reports.report("anew", lambda: b"")
    reports.close()
    assert path.stat().st_size < MAX_STACKS_BYTES


def test_nothing_written_leaves_nothing_behind(tmp_path) -> None:
    reports = HangReports(tmp_path / "w.stacks")
    reports.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="state-dir"):
        HangReports(tmp_path / "missing" / "w.stacks")


def paced(interval_s: float) -> tuple[Pace, StepTimes, float]:
    """A pace after two seconds of steps, their times, and the time."""
    times, now = StepTimes(), 10.0
    for _ in range(int(2.0 / interval_s)):
        times.add(now, now + interval_s)
        now += interval_s
    return Pace(times), times, now


@pytest.mark.parametrize("interval_s", [0.005, 0.25])
def test_step_far_slower_than_others_is_told_once(interval_s) -> None:
    pace, times, now = paced(interval_s)
    assert times.usual_s == pytest.approx(interval_s)
    stamp = Stamp("ExecuteModel", now, now + 60, True)
    limit_s = max(SLOW_AT_LEAST_S, SLOW_FACTOR * times.usual_s)
    assert not pace.is_slow(stamp, now + limit_s - 0.01)
    assert pace.is_slow(stamp, now + limit_s + 0.01)
    assert not pace.is_slow(stamp, now + limit_s + 5.0)


def test_nobody_is_slow_before_the_first_step_or_while_idle() -> None:
    pace, _, now = paced(0.01)
    assert not pace.is_slow(NO_RESULT, now + 3600)
    first = Pace(StepTimes())
    assert not first.is_slow(Stamp("ExecuteModel", now, now + 60, True), now + 59)


def test_idle_time_is_no_step_s() -> None:
    _, times, now = paced(0.01)
    for _ in range(40):
        now += 30.0
        times.add(now, now + 0.01)
    assert times.usual_s == pytest.approx(0.01)


def test_steps_that_overlap_count_from_the_end_of_the_one_before() -> None:
    """Four in flight, each known to be over 10 ms after the one before."""
    times = StepTimes()
    for number in range(4, 40):
        times.add(0.01 * (number - 3), 0.01 * (number + 1))
    assert times.usual_s == pytest.approx((0.04 + 35 * 0.01) / 36)


def test_step_times_follow_a_change() -> None:
    """What was usual is forgotten in a few hundred steps, and one slow step does not become it."""
    _, times, now = paced(0.01)
    times.add(now, now + 3.0)
    assert times.usual_s < 0.1
    for _ in range(5 * MAX_STEPS):
        times.add(now + 3.0, now + 3.1)
        now += 0.1
    assert times.usual_s == pytest.approx(0.1, rel=0.05)

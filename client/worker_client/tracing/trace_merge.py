"""Merges several ranks' traces and the driver's steps into one Chrome trace on one clock (the
"Trace Event Format", which Perfetto reads). Pure.

A rank's own timestamps are the profiler's. Marks in its trace relate them to its daemon's monotonic
clock, and round trips relate that clock to ours.
"""

import gzip
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final, TypeAlias

import msgspec
import numpy as np

from rpc_schema.trace import DriverSteps
from worker_client.errors import TraceError
from worker_client.tracing.clocks import ClockMap, Offset

Event: TypeAlias = dict[str, Any]
_Ids: TypeAlias = dict[tuple[int, str, str], int]
"""New id of each rank, category and old id."""

DRIVER_PID: Final = 1
_PIDS_OF_A_RANK: Final = 1000
"""Rank r has the numbers from (r + 1) times this on; its host process has the first."""
_SEND_THREAD: Final = 1
_FLIGHT_THREAD: Final = 2
_MARK: Final = re.compile(r"clock_(\d+)")
_STEP: Final = re.compile(r"step_context_(\d+)\((\d+)\)_generation_(\d+)\((\d+)\)_seq_(\d+)")
_LINKED: Final = frozenset("stfbenNODP")
"""Phases of events that are linked by an id."""
_GZIP_LEVEL: Final = 3
_JSON = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class RankTrace:
    """Trace of one daemon."""

    rank: int
    place: str
    """Its stage and shard, for display."""
    pid: int
    packed: bytes
    """Chrome trace JSON, compressed by gzip."""
    clock: ClockMap
    """From the daemon's monotonic clock to ours."""


@dataclass(frozen=True, slots=True)
class DriverTrace:
    """Steps of a driver, or of one replica's."""

    steps: DriverSteps | None
    """None: the driver did not answer."""
    daemon_clock: ClockMap
    """From the clock of the daemon that holds the steps to ours."""
    name: str = "driver"
    """For display; each has another."""


@dataclass(slots=True)
class RankSummary:
    """Summary of a rank's trace."""

    rank: int
    num_steps: int = 0
    num_events: int = 0
    clock_bound_ns: int = 0
    """Bound on the error of this rank's times, from its marks and the round trips."""


@dataclass(slots=True)
class DriverSummary:
    """Summary of a driver's steps."""

    name: str
    num_steps: int = 0
    clock_bound_ns: int | None = None
    """None: the driver did not answer."""


@dataclass(slots=True)
class Summary:
    """Summary of a merge."""

    ranks: list[RankSummary] = field(default_factory=list)
    drivers: list[DriverSummary] = field(default_factory=list)


def merge_traces(
    ranks: Sequence[RankTrace], drivers: Sequence[DriverTrace], origin_ns: int, target: BinaryIO
) -> Summary:
    """Write the merged trace, compressed by gzip. One rank is in memory at a time.

    origin_ns: time 0 of the result, of our monotonic clock.

    Raises:
        TraceError: a rank's trace cannot be read, or has no clock marks. OSError as target does.
    """
    summary = Summary()
    with gzip.GzipFile(fileobj=target, mode="wb", compresslevel=_GZIP_LEVEL, mtime=0) as sink:
        sink.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        written = False
        for pid, driver in enumerate(drivers, DRIVER_PID):
            own = DriverSummary(driver.name)
            summary.drivers.append(own)
            events = _driver_events(driver, pid, origin_ns, own)
            written = _write_events(sink, events, first=not written) or written
        ids: _Ids = {}
        for rank in ranks:
            entry = RankSummary(rank.rank)
            summary.ranks.append(entry)
            events = _rank_events(rank, origin_ns, entry, ids)
            written = _write_events(sink, events, first=not written) or written
        sink.write(b'],"otherData":' + _JSON.encode(_other_data(summary)) + b"}")
    return summary


def _write_events(sink: gzip.GzipFile, events: Iterable[Event], *, first: bool) -> bool:
    """Write events; return True if there was one."""
    any_event = False
    for event in events:
        sink.write((b"\n" if first and not any_event else b",\n") + _JSON.encode(event))
        any_event = True
    return any_event


def _other_data(summary: Summary) -> dict[str, object]:
    clocks = {f"rank {entry.rank}": entry.clock_bound_ns for entry in summary.ranks}
    for driver in summary.drivers:
        if driver.clock_bound_ns is not None:
            clocks[driver.name] = driver.clock_bound_ns
    return {"clock_bound_ns": clocks}


# The driver.


def _driver_events(
    driver: DriverTrace, pid: int, origin_ns: int, summary: DriverSummary
) -> Iterator[Event]:
    steps = driver.steps
    if steps is None:
        return
    # To the daemon's clock at the time of that measurement, then to ours.
    own = Offset(steps.clock_at_ns, steps.clock_offset_ns, steps.clock_bound_ns)
    summary.clock_bound_ns = own.bound_ns + driver.daemon_clock.bound_ns
    yield from _names(pid, f"{driver.name} (pid {steps.pid})", pid - DRIVER_PID)
    yield _thread_name(pid, _SEND_THREAD, "send")
    yield _thread_name(pid, _FLIGHT_THREAD, "in flight")

    def moment(ns: int) -> float:
        return (driver.daemon_clock.to_ours(ns + own.ahead_ns) - origin_ns) / 1000

    columns = (
        *_columns("<i8", steps.seqs, steps.began_ns, steps.sent_ns, steps.settled_ns),
        *_columns("<i4", steps.context_tokens, steps.generation_tokens),
    )
    if len({len(column) for column in columns}) != 1:
        raise TraceError(f"the columns of the {driver.name} differ in length")
    summary.num_steps = len(columns[0])
    for seq, began, sent, settled, context, generation in zip(*columns, strict=True):
        arguments = {"seq": seq, "context_tokens": context, "generation_tokens": generation}
        at = {"pid": pid, "cat": "driver_step", "args": arguments}
        start, end = moment(began), moment(sent)
        yield {**at, "ph": "X", "name": f"send {seq}", "ts": start, "dur": end - start} | {
            "tid": _SEND_THREAD
        }
        if settled:
            flight = {**at, "name": f"step {seq}", "id": f"{driver.name}-{seq}"}
            flight["tid"] = _FLIGHT_THREAD
            yield {**flight, "ph": "b", "ts": end}
            yield {**flight, "ph": "e", "ts": moment(settled)}


def _columns(dtype: str, *columns: bytes) -> list[list[int]]:
    return [np.frombuffer(column, dtype).tolist() for column in columns]


# A rank.


class _Pids:
    """New numbers for a rank's processes: its daemon's, and its devices'."""

    def __init__(self, rank: RankTrace) -> None:
        self._rank = rank
        self._numbers: dict[int, int] = {rank.pid: _PIDS_OF_A_RANK * (rank.rank + 1)}

    def number(self, old: int) -> int:
        first = self._numbers[self._rank.pid]
        return self._numbers.setdefault(old, first + len(self._numbers))

    def names(self) -> Iterator[Event]:
        for old, number in self._numbers.items():
            what = f"host (pid {old})" if old == self._rank.pid else f"device {old}"
            yield from _names(number, f"rank {self._rank.rank}{self._rank.place}: {what}", number)


def _rank_events(
    rank: RankTrace, origin_ns: int, summary: RankSummary, ids: _Ids
) -> Iterator[Event]:
    trace = _read(rank)
    base_ns = int(trace.get("baseTimeNanoseconds", 0))
    events = trace["traceEvents"]
    profiler_clock = _profiler_clock(rank, events, base_ns)
    summary.clock_bound_ns = profiler_clock.bound_ns + rank.clock.bound_ns

    def moment(microseconds: float) -> float:
        own_ns = base_ns + round(microseconds * 1000)
        return (rank.clock.to_ours(profiler_clock.to_ours(own_ns)) - origin_ns) / 1000

    pids = _Pids(rank)
    described = [event for event in events if event.get("ph") == "M"]
    recorded = [event for event in events if _is_recorded(event)]
    for event in sorted(recorded, key=lambda event: float(event["ts"])):
        summary.num_events += 1
        moved = {**event, "pid": pids.number(event["pid"])}
        moved["ts"] = start = moment(event["ts"])
        if "dur" in event:
            moved["dur"] = moment(event["ts"] + event["dur"]) - start
        if "id" in event and event["ph"] in _LINKED:
            key = (rank.rank, str(event.get("cat")), str(event["id"]))
            moved["id"] = ids.setdefault(key, len(ids) + 1)
        step = _STEP.fullmatch(str(event.get("name")))
        if step is not None:
            summary.num_steps += event.get("cat") == "user_annotation"
            moved["args"] = {**event.get("args", {}), **_step_arguments(step)}
        yield moved
    yield from pids.names()
    known = pids._numbers
    for event in described:
        if event.get("name") == "thread_name" and event.get("pid") in known:
            yield {**event, "pid": known[event["pid"]], "ts": 0}


def _step_arguments(step: re.Match[str]) -> dict[str, int]:
    names = ("context_requests", "context_tokens", "generation_requests", "generation_tokens")
    return dict(zip((*names, "seq"), map(int, step.groups()), strict=True))


def _read(rank: RankTrace) -> dict[str, Any]:
    try:
        trace = msgspec.json.decode(gzip.decompress(rank.packed))
        if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
            raise ValueError("it has no list of events")
    except (OSError, EOFError, ValueError, msgspec.DecodeError) as error:
        raise TraceError(f"the trace of rank {rank.rank} cannot be read: {error}") from error
    return trace


def _is_recorded(event: Event) -> bool:
    """Return True for work of a process or a device: not for the profiler's own framing, nor for
    marks."""
    pid = event.get("pid")
    if not isinstance(pid, int) or pid < 0 or event.get("ph") == "M" or "ts" not in event:
        return False
    return _MARK.fullmatch(str(event.get("name"))) is None


def _profiler_clock(rank: RankTrace, events: Iterable[Event], base_ns: int) -> ClockMap:
    """Return the profiler's clock, from the marks at the trace's begin and at its end.

    A mark begins after the time in its name was read, and ends before that of the next one was. So
    the profiler's clock is ahead by at most (its begin - its time), and by at least (its end - the
    time of the next).
    """
    marks = sorted(
        (int(match[1]), base_ns + _ns(event["ts"]), base_ns + _ns(event["ts"] + event["dur"]))
        for event in events
        if event.get("ph") == "X"
        and event.get("cat") == "user_annotation"
        and (match := _MARK.fullmatch(str(event.get("name"))))
    )
    half = len(marks) // 2
    if half < 2:
        raise TraceError(f"the trace of rank {rank.rank} has no clock marks")
    return ClockMap(_offset(marks[:half]), _offset(marks[half:]))


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def _offset(marks: Sequence[tuple[int, int, int]]) -> Offset:
    """Return the offset of the profiler's clock. marks: (time, begin, end), in order; the latter
    two by the profiler's clock."""
    most = min(begin - time for time, begin, _ in marks)
    least = max(end - later for (_, _, end), (later, _, _) in itertools.pairwise(marks))
    # The bounds cross if the clock's resolution, about a microsecond, is coarser than the bounds.
    return Offset(marks[0][1], (most + least) // 2, abs(most - least) // 2 + 1)


# The interval that all marks allow.


def _names(pid: int, name: str, order: int) -> Iterator[Event]:
    at = {"ph": "M", "pid": pid, "tid": 0, "ts": 0}
    yield {**at, "name": "process_name", "args": {"name": name}}
    yield {**at, "name": "process_sort_index", "args": {"sort_index": order}}


def _thread_name(pid: int, tid: int, name: str) -> Event:
    at = {"ph": "M", "pid": pid, "tid": tid, "ts": 0}
    return {**at, "name": "thread_name", "args": {"name": name}}

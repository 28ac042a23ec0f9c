"""Merged traces of simulated ranks with different clocks: every event has its true time."""

import gzip
import io
import json
from dataclasses import replace

import numpy as np
import pytest

from rpc_schema.trace import DriverSteps
from worker_client.errors import TraceError
from worker_client.tracing.clocks import ClockMap, Offset
from worker_client.tracing.trace_merge import DriverSummary, DriverTrace, RankTrace, merge_traces

ORIGIN = 7 * 10**12
PID = 4321


class Rank:
    """Its daemon's clock is ahead of ours, its profiler's ahead of that, by other rates."""

    def __init__(self, rank: int, rng: np.random.Generator) -> None:
        self.rank = rank
        self._ahead = int(rng.integers(-(10**12), 10**15))
        self._drift = rng.uniform(-1e-4, 1e-4)
        self._profiler_ahead = int(rng.integers(10**15, 10**16))
        self._profiler_drift = rng.uniform(-1e-4, 1e-4)
        self._base = int(rng.integers(0, 10**15))
        self._rng = rng
        self.events = []
        self.mark(ORIGIN - 10**7)

    def daemon(self, ours: int) -> int:
        return ours + self._ahead + round((ours - ORIGIN) * self._drift)

    def microseconds(self, ours: int) -> float:
        theirs = self.daemon(ours)
        drifted = round((ours - ORIGIN) * self._profiler_drift)
        return (theirs + self._profiler_ahead + drifted - self._base) / 1000

    def mark(self, ours: int) -> None:
        """As the daemon does: the time is read, then a range begins and ends."""
        for _ in range(16):
            name = f"clock_{self.daemon(ours)}"
            begin = ours + int(self._rng.integers(100, 9000))
            end = begin + int(self._rng.integers(100, 9000))
            self.add(name, begin, end)
            ours = end + int(self._rng.integers(100, 9000))

    def add(self, name: str, begin: int, end: int, **fields: object) -> None:
        start = self.microseconds(begin)
        event = {"ph": "X", "cat": "user_annotation", "name": name, "pid": PID, "tid": PID}
        duration = self.microseconds(end) - start
        self.events.append({**event, "ts": start, "dur": duration, **fields})

    def trace(self, end: int, **changes: object) -> RankTrace:
        self.mark(end)
        framing = [
            {"ph": "M", "name": "process_name", "pid": PID, "tid": 0, "ts": 0.0, "args": {}},
            {"ph": "M", "name": "thread_name", "pid": PID, "tid": PID, "ts": 0.0, "args": {}},
            {"ph": "M", "name": "thread_name", "pid": 5, "tid": 7, "ts": 0.0, "args": {}},
            {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 1.0},
        ]
        document = {"traceEvents": self.events + framing, "baseTimeNanoseconds": self._base}
        clocks = [Offset(self.daemon(at), self.daemon(at) - at, 50) for at in (ORIGIN, end)]
        fields = {
            "rank": self.rank,
            "place": f" (pp{self.rank} tp0)",
            "pid": PID,
            "packed": gzip.compress(json.dumps(document).encode()),
            "clock": ClockMap(*clocks),
        }
        return RankTrace(**{**fields, **changes})


def merged(ranks, *drivers):
    target = io.BytesIO()
    summary = merge_traces(ranks, drivers, ORIGIN, target)
    return summary, json.loads(gzip.decompress(target.getvalue()))


def find(trace, name):
    return [event for event in trace["traceEvents"] if event["name"] == name]


@pytest.mark.parametrize("seed", range(4))
def test_every_event_lies_where_it_happened(seed):
    rng = np.random.default_rng(seed)
    ranks = [Rank(index, rng) for index in range(3)]
    end = ORIGIN + 5 * 10**9
    moments = {}
    for rank in ranks:
        for seq in range(1, 40):
            begin = int(rng.integers(ORIGIN, end))
            moments[rank.rank, seq] = begin, begin + int(rng.integers(1, 10**7))
            label = f"step_context_1({seq})_generation_0(0)_seq_{seq}"
            rank.add(label, *moments[rank.rank, seq])
    summary, trace = merged([rank.trace(end) for rank in ranks])
    names = {
        e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"
    }
    assert sorted(names.values()) == [f"rank {r} (pp{r} tp0): host (pid {PID})" for r in range(3)]
    assert [entry.num_steps for entry in summary.ranks] == [39] * 3
    bounds = {entry.rank: entry.clock_bound_ns / 1000 for entry in summary.ranks}
    assert all(bound < 10 for bound in bounds.values())
    seen = set()
    for event in trace["traceEvents"]:
        if event["ph"] != "X":
            continue
        rank, seq = int(names[event["pid"]].split()[1]), event["args"]["seq"]
        begin, finish = ((ns - ORIGIN) / 1000 for ns in moments[rank, seq])
        assert abs(event["ts"] - begin) <= 2 * bounds[rank]
        assert abs(event["ts"] + event["dur"] - finish) <= 2 * bounds[rank]
        assert event["args"]["context_tokens"] == seq
        seen.add((rank, seq))
    assert seen == moments.keys()
    assert not find(trace, "Record Window End")


def test_numbers_of_different_ranks_are_kept_apart():
    rng = np.random.default_rng(5)
    ranks = [Rank(index, rng) for index in range(2)]
    for rank in ranks:
        at = {"cat": "ac2g", "id": 9, "bp": "e"}
        rank.add("launch", ORIGIN, ORIGIN + 9)
        rank.add("arrow", ORIGIN, ORIGIN, **at, ph="s")
        rank.add("kernel", ORIGIN + 5, ORIGIN + 7, pid=0, tid=7, cat="kernel")
        rank.add("arrow", ORIGIN + 5, ORIGIN + 5, **at, ph="f", pid=0, tid=7)
        rank.add("arrow", ORIGIN, ORIGIN, cat="other", id=9, ph="s")
    _, trace = merged([rank.trace(ORIGIN + 10**9) for rank in ranks])
    arrows = find(trace, "arrow")
    assert len({(e["pid"], e["cat"], e["id"]) for e in arrows}) == 6
    assert len({e["id"] for e in arrows}) == 4
    assert len({e["pid"] for e in find(trace, "kernel") + find(trace, "launch")}) == 4
    names = {e["args"]["name"] for e in find(trace, "process_name")}
    assert {"rank 0 (pp0 tp0): device 0", "rank 1 (pp1 tp0): device 0"} < names
    # Threads are named where their process is there, each once.
    assert len(find(trace, "thread_name")) == 2


def driver_trace(ahead=10**9, **changes):
    begin = ORIGIN + ahead // 2  # the driver's clock is half as far ahead as the daemon's
    times = np.array([begin, begin + 5000], "<i8")
    columns = {
        "seqs": np.array([3, 4], "<i8"),
        "began_ns": times,
        "sent_ns": times + 2000,
        "settled_ns": np.array([begin + 9000, 0], "<i8"),
        "context_tokens": np.array([5, 0], "<i4"),
        "generation_tokens": np.array([0, 2], "<i4"),
    }
    raw = {name: column.tobytes() for name, column in columns.items()}
    steps = DriverSteps(
        **{
            "pid": 77,
            "clock_offset_ns": ahead // 2,
            "clock_bound_ns": 30,
            "clock_at_ns": ORIGIN + ahead,
            **raw,
            **changes,
        }
    )
    return DriverTrace(steps, ClockMap(Offset(ORIGIN + ahead, ahead, 20)))


def test_driver_s_steps_by_way_of_a_daemon_s_clock():
    summary, trace = merged([], driver_trace())
    assert summary.drivers == [DriverSummary("driver", 2, 50)]
    sends = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"]) for e in sends] == [("send 3", 0, 2), ("send 4", 5, 2)]
    flights = [e for e in trace["traceEvents"] if e["ph"] in "be"]
    assert [(e["ph"], e["name"], e["ts"]) for e in flights] == [
        ("b", "step 3", 2),
        ("e", "step 3", 9),
    ]
    assert sends[1]["args"] == {"seq": 4, "context_tokens": 0, "generation_tokens": 2}
    assert trace["otherData"]["clock_bound_ns"] == {"driver": 50}


def test_steps_of_each_replica_s_driver_are_apart():
    drivers = [
        replace(driver_trace(pid=70 + dp_rank), name=f"driver of replica {dp_rank}")
        for dp_rank in range(3)
    ]
    silent = replace(drivers[1], steps=None)
    rank = Rank(0, np.random.default_rng(1)).trace(ORIGIN + 10**9)
    summary, trace = merged([rank], drivers[0], silent, drivers[2])
    bounds = [(own.name[-1], own.num_steps, own.clock_bound_ns) for own in summary.drivers]
    assert bounds == [("0", 2, 50), ("1", 0, None), ("2", 2, 50)]
    names = {e["pid"]: e["args"]["name"] for e in find(trace, "process_name")}
    assert [name for name in names.values() if "driver" in name] == [
        "driver of replica 0 (pid 70)",
        "driver of replica 2 (pid 72)",
    ]
    sends = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == "send 3"]
    assert len({e["pid"] for e in sends}) == len(sends) == 2
    assert len({e["id"] for e in trace["traceEvents"] if e["ph"] == "b"}) == 2


def test_columns_of_different_length_are_refused():
    with pytest.raises(TraceError, match="differ in length"):
        merged([], driver_trace(seqs=b""))


@pytest.mark.parametrize(
    "packed",
    [b"", b"no gzip", gzip.compress(b"{"), gzip.compress(b"[]"), gzip.compress(b"{}")],
    ids=["nothing", "no gzip", "no JSON", "a list", "no events"],  # gzip's bytes hold the time
)
def test_trace_that_is_none_is_named(packed):
    rank = Rank(3, np.random.default_rng(1)).trace(ORIGIN + 10**9, packed=packed)
    with pytest.raises(TraceError, match="rank 3 cannot be read"):
        merged([rank])


def test_trace_without_marks_is_refused():
    empty = gzip.compress(b'{"traceEvents": []}')
    rank = Rank(2, np.random.default_rng(1)).trace(ORIGIN + 10**9, packed=empty)
    with pytest.raises(TraceError, match="rank 2 has no clock marks"):
        merged([rank])

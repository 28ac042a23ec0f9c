"""Tracing of a running group without driving it: every rank records for a while, then its trace is
read back, with clock offsets from before and after, and with its drivers' own steps. Uses control
sockets only, without epoch, lease and seq."""

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rpc_schema import lifecycle as lc
from rpc_schema.errors import WorkerDaemonError
from rpc_schema.trace import (
    MAX_TRACE_MS,
    AskDriver,
    DriverSteps,
    ReadDriverSteps,
    ReadTrace,
    StartTrace,
    StopTrace,
    StopTraceReply,
)
from worker_client.errors import config_error
from worker_client.tracing.clocks import ClockMap, measure
from worker_client.tracing.trace_merge import DriverTrace, RankTrace
from worker_client.wire.control_channel import PendingCall
from worker_client.wire.worker_client import AskingClient

START_TIMEOUT_S = 90.0
"""The first trace of a process on a GPU loads the profiler's library."""
STOP_TIMEOUT_S = 1800.0
GIVE_UP_TIMEOUT_S = 10.0
DRIVER_TIMEOUT_S = 3.0
"""A driver checks for requests once a second, while it waits for steps."""
DRIVER_POLL_S = 0.05
MARGIN_S = 120.0
"""Time after its expected end at which a daemon drops a trace that was not stopped."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A group's traces of one period."""

    ranks: list[RankTrace]
    """In rank order."""
    drivers: list[DriverTrace]
    """That of the group, or of each replica with steps of its own."""
    begin_ns: int
    """Start, by our monotonic clock."""


def record(
    clients: Sequence[AskingClient],
    seconds: float,
    wait: Callable[[float], None] = time.sleep,
    driver_timeout_s: float = DRIVER_TIMEOUT_S,
) -> Recorded:
    """Trace a group's daemons, given in any order, while wait(seconds) runs.

    Raises:
        ClientConfigError: the duration is out of bounds, or the daemons are not the ranks of one
            group.
        StateError: a daemon's profile runs already, or it has no device yet.
        ConfigError: a daemon has no directory for traces, or cannot use it.
        CapacityError: its disk is full. After an error no daemon records.
    """
    max_ms = _checked_ms(seconds)
    statuses = _group_of(clients)
    trace = secrets.token_bytes(16)
    start = partial(StartTrace, trace=trace, max_ms=max_ms)
    try:
        pending = [client.begin(start, START_TIMEOUT_S) for client in clients]
        _await_all(pending)
        before = [measure(client.read_clock) for client in clients]
        begin_ns = time.monotonic_ns()
        wait(seconds)
        end_ns = time.monotonic_ns()
    except BaseException:
        for call in _stop(clients, trace, keep=False, timeout_s=GIVE_UP_TIMEOUT_S):
            with contextlib.suppress(WorkerDaemonError):  # not all have started
                call.result()
        raise
    _await_all(_stop(clients, trace, keep=True, timeout_s=STOP_TIMEOUT_S))
    after = [measure(client.read_clock) for client in clients]
    maps = [ClockMap(*pair) for pair in zip(before, after, strict=True)]
    askers = _askers(statuses)
    for index in askers:
        begin, end = (moment + before[index].ahead_ns for moment in (begin_ns, end_ns))
        clients[index].ask(partial(AskDriver, trace=trace, begin_ns=begin, end_ns=end))
    until = time.monotonic() + driver_timeout_s
    drivers = [
        DriverTrace(_driver_steps(clients[index], trace, until), maps[index], name)
        for index, name in askers.items()
    ]
    ranks = [
        RankTrace(status.rank, _place(status), status.pid, _read(client, trace), clock)
        for client, status, clock in zip(clients, statuses, maps, strict=True)
    ]
    return Recorded(sorted(ranks, key=lambda rank: rank.rank), drivers, begin_ns)


def _checked_ms(seconds: float) -> int:
    longest_s = MAX_TRACE_MS / 1000 - MARGIN_S
    if not 0 < seconds <= longest_s:
        fix = f"use more than 0, at most {longest_s:g}; traces grow by the second"
        raise config_error("seconds", seconds, "out of bounds", fix)
    return round((seconds + MARGIN_S) * 1000)


def _group_of(clients: Sequence[AskingClient]) -> list[lc.Status]:
    for client in clients:
        client.hello()
    statuses = [client.get_status() for client in clients]
    ranks = sorted(status.rank for status in statuses)
    if ranks != list(range(len(clients))):
        fix = "name each daemon of one group once, ranks 0 to N - 1"
        raise config_error("endpoints", ranks, "they are not the ranks of one group", fix)
    return statuses


def _askers(statuses: Sequence[lc.Status]) -> dict[int, str]:
    """Return the daemons, by their place among statuses, that ask a driver for its steps, with its
    name: the first rank of each sequence of steps, in order."""
    places = {status.rank: place for place, status in enumerate(statuses)}
    config = statuses[places[0]].config
    size = len(statuses) if config is None else config.parallel.group_size
    if size >= len(statuses):
        return {places[0]: "driver"}
    firsts = range(0, len(statuses), size)
    return {places[rank]: f"driver of replica {dp_rank}" for dp_rank, rank in enumerate(firsts)}


def _place(status: lc.Status) -> str:
    if status.config is None:
        return ""
    parallel = status.config.parallel
    stage, shard = divmod(status.rank % parallel.world_size, parallel.tensor_parallel_size)
    return f" (pp{stage} tp{shard})"


def _await_all(
    pending: Sequence[PendingCall[lc.Acknowledged] | PendingCall[StopTraceReply]],
) -> None:
    """Wait for all, then raise the first error."""
    errors = []
    for call in pending:
        try:
            call.result()
        except WorkerDaemonError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _stop(
    clients: Sequence[AskingClient], trace: bytes, *, keep: bool, timeout_s: float
) -> list[PendingCall[StopTraceReply]]:
    pending = []
    for client in clients:
        with contextlib.suppress(WorkerDaemonError) if not keep else contextlib.nullcontext():
            pending.append(client.begin(partial(StopTrace, trace=trace, keep=keep), timeout_s))
    return pending


def _driver_steps(client: AskingClient, trace: bytes, until: float) -> DriverSteps | None:
    """Return the driver's steps; None if it does not answer; an idle driver does not."""
    request = partial(ReadDriverSteps, trace=trace)
    while (steps := client.ask(request).steps) is None and time.monotonic() < until:
        time.sleep(DRIVER_POLL_S)
    return steps


def _read(client: AskingClient, trace: bytes) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while piece := client.ask(partial(ReadTrace, trace=trace, offset=size)).data:
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces)

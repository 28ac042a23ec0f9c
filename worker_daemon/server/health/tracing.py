"""Handles control requests for an observer's traces. Owns the running trace, the file of the last
one and the driver's report of its steps. Runs on the event loop; the step thread starts and stops
recording between requests, and another thread compresses."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from rpc_schema import lifecycle as lc
from rpc_schema import trace as tr
from rpc_schema.codec import ControlMessage, ControlReplyMessage
from rpc_schema.errors import StateError
from worker_daemon.server.dispatch import PlainTraceLike, WorkerLike
from worker_daemon.server.step_thread import OutOfBandTask

START_LIMIT_S: Final = 60.0
"""Limit on the wait for the step thread, which finishes its running step first."""
WRITE_LIMIT_S: Final = 1800.0

_T = TypeVar("_T")
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Running:
    """A trace that is recorded, or about to be."""

    trace: bytes
    expiry: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class Tracing:
    """Answers everything of rpc_schema/trace.py. One trace runs at a time, and one can be read."""

    _post: Callable[[OutOfBandTask], None]
    """Sends to the step thread."""
    _need_attached: Callable[[int], None]
    """Raises unless the epoch is the attached driver's."""
    _publish_question: Callable[[bytes, int, int], None]
    """Publishes DriverStepsWanted: trace, begin_ns, end_ns."""
    _running: _Running | None = field(default=None, init=False)
    _file: Path | None = field(default=None, init=False)
    _readable: bytes = field(default=b"", init=False)
    _asked: bytes = field(default=b"", init=False)
    _driver_steps: tr.DriverSteps | None = field(default=None, init=False)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    @property
    def handlers(self) -> Mapping[type[ControlMessage], Callable[..., ControlReplyMessage]]:
        """Return the methods of requests that are answered at once."""
        return {
            tr.ReadClock: self._read_clock,
            tr.ReadTrace: self._read_trace,
            tr.AskDriver: self._ask_driver,
            tr.PutDriverSteps: self._put_driver_steps,
            tr.ReadDriverSteps: self._read_driver_steps,
        }

    async def start(self, message: tr.StartTrace) -> ControlReplyMessage:
        """Make the step thread record.

        Raises:
            StateError: a trace or a profile runs, there is no device yet, or the step thread is
                busy for longer than START_LIMIT_S.
            ConfigError: there is no directory for traces, or it cannot be used.
        """
        if self._running is not None:
            raise StateError("a trace runs already", fix="start again once that has ended")
        running = self._running = _Running(message.trace)
        due = time.monotonic() + START_LIMIT_S
        try:
            await self._on_step_thread("STARTING TRACE", partial(_start, due), START_LIMIT_S)
            running.expiry = asyncio.get_running_loop().call_later(
                message.max_ms / 1000, self._expire, running
            )
        except TimeoutError:
            self._post(OutOfBandTask("STARTING TRACE", START_LIMIT_S, _drop))
            problem = "the step thread is busy with something else"
            raise StateError(problem, fix="try again when its current operation is over") from None
        finally:
            if running.expiry is None:
                self._running = None
        return lc.Acknowledged(call=message.call)

    async def stop(self, message: tr.StopTrace) -> ControlReplyMessage:
        """Make the step thread stop, then compress the trace.

        Raises:
            StateError: no such trace runs.
            CapacityError: the disk is full.
            ConfigError: the file cannot be written. After either of the last two, the trace is
                lost.
        """
        running = self._running
        if running is None or running.trace != message.trace or running.expiry is None:
            logger.warning("no such trace runs: there is nothing to stop")
            problem = "no such trace runs"
            raise StateError(problem, fix="start one; it ends by itself after its max_ms")
        running.expiry.cancel()
        running.expiry = None
        try:
            plain = await self._on_step_thread(
                "WRITING TRACE", partial(_stop, message.keep), WRITE_LIMIT_S
            )
            if plain is None:
                return tr.StopTraceReply(call=message.call, size_bytes=0)
            self._readable = b""
            self._file = await _on_a_thread(plain.pack)
        finally:
            self._running = None
        self._readable = message.trace
        return tr.StopTraceReply(call=message.call, size_bytes=self._file.stat().st_size)

    def close(self) -> None:
        """Stop waiting; a running trace ends with the worker."""
        if self._running is not None and self._running.expiry is not None:
            self._running.expiry.cancel()
        for task in self._tasks:
            task.cancel()

    def _read_clock(self, message: tr.ReadClock) -> ControlReplyMessage:
        return tr.ReadClockReply(call=message.call, monotonic_ns=time.monotonic_ns())

    def _read_trace(self, message: tr.ReadTrace) -> ControlReplyMessage:
        if self._file is None or message.trace != self._readable:
            raise StateError("no such trace was kept", fix="stop it first, and keep it")
        try:
            with self._file.open("rb") as file:
                file.seek(message.offset)
                return tr.ReadTraceReply(call=message.call, data=file.read(tr.TRACE_CHUNK_BYTES))
        except OSError as error:
            problem = f"the trace's file cannot be read: {error.strerror}"
            raise StateError(problem, fix="start a new trace") from error

    def _ask_driver(self, message: tr.AskDriver) -> ControlReplyMessage:
        self._asked, self._driver_steps = message.trace, None
        self._publish_question(message.trace, message.begin_ns, message.end_ns)
        return lc.Acknowledged(call=message.call)

    def _put_driver_steps(self, message: tr.PutDriverSteps) -> ControlReplyMessage:
        self._need_attached(message.epoch)
        if message.trace != self._asked:
            raise StateError("these steps were not asked for", fix="answer the last question only")
        self._driver_steps = message.steps
        return lc.Acknowledged(call=message.call)

    def _read_driver_steps(self, message: tr.ReadDriverSteps) -> ControlReplyMessage:
        steps = self._driver_steps if message.trace == self._asked else None
        return tr.ReadDriverStepsReply(call=message.call, steps=steps)

    def _expire(self, running: _Running) -> None:
        """Drop a trace that its observer has not stopped in time."""
        if self._running is running:
            logger.warning("a trace was not stopped in time and is dropped")
            stop = tr.StopTrace(call=0, trace=running.trace, keep=False)
            task = asyncio.ensure_future(self._discard(stop))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _discard(self, stop: tr.StopTrace) -> None:
        try:
            await self.stop(stop)
        except Exception as error:  # no observer waits any more
            logger.warning("a trace did not end cleanly: %s", error)

    async def _on_step_thread(
        self, phase: str, work: Callable[[WorkerLike], _T], limit_s: float
    ) -> _T:
        """Run `work` on the step thread; return its result or raise its error, or TimeoutError
        after the limit."""
        future: Future[_T] = Future()
        self._post(
            OutOfBandTask(phase, limit_s, lambda worker: _settle(future, partial(work, worker)))
        )
        return await asyncio.wait_for(asyncio.wrap_future(future), limit_s)


async def _on_a_thread(work: Callable[[], _T]) -> _T:
    """Run `work` on a new thread, because process exit would wait for an executor's thread."""
    future: Future[_T] = Future()
    threading.Thread(target=_settle, args=(future, work), name="trace", daemon=True).start()
    return await asyncio.wrap_future(future)


def _settle(future: Future[_T], work: Callable[[], _T]) -> None:
    """Run `work` on this thread, and settle the future with its result or exception."""
    with contextlib.suppress(InvalidStateError):  # the waiter is gone
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)


def _start(due: float, worker: WorkerLike) -> None:
    if time.monotonic() < due:  # otherwise the waiter is gone
        worker.start_trace()


def _drop(worker: WorkerLike) -> None:
    with contextlib.suppress(Exception):  # no trace runs, as intended
        worker.stop_trace(keep=False)


def _stop(keep: bool, worker: WorkerLike) -> PlainTraceLike | None:
    return worker.stop_trace(keep=keep)

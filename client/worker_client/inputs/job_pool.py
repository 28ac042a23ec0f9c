"""Runs jobs of unknown cost in processes that are killed when a job exceeds its bounds, for callers
on any thread. They wait with the GIL released."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from worker_client.inputs.child_process import ChildEnded, ChildProcess, run_jobs, wait_readable

NICENESS: Final = 5
"""During jobs, the processes yield to the driver, and to daemons that run on the CPU."""
WALL_FACTOR: Final = 10.0
"""Jobs are bounded by processor time, so that a busy host refuses none. By the clock they may take
this much more."""
_EXCEEDED: Final = (-signal.SIGPROF, -signal.SIGALRM)
"""Exit statuses of a process that a timer of the kernel has ended, by processor time or by the
clock."""


class JobExceeded(Exception):
    """A job was ended: it took too much processor time, or no answer came."""


class JobFailed(Exception):
    """A job cannot run: no process can be started, each ended by itself, or the pool is closed."""


class JobBounds(NamedTuple):
    """Bounds on what jobs take."""

    setup_s: float
    """Processor seconds in which a process makes itself ready."""
    job_s: float
    """Processor seconds of the longest job. A job may set itself a shorter bound."""
    memory_bytes: int
    """Address space that setup and jobs may take."""


class JobPool:
    """Processes that run a module, which calls `serve_jobs`. A crash costs no job: it runs once
    more. While one is slow, another one is ready. Threads may share it."""

    def __init__(
        self,
        module: str,
        setup: bytes,
        bounds: JobBounds,
        *,
        max_processes: int,
        keeps_spare: bool = True,
    ) -> None:
        """setup: the first message to each process. keeps_spare: start another process when the
        last idle one gets a job, not only when the next job needs it. None is started yet."""
        self._module = module
        self._setup = setup
        self._bounds = bounds
        self._max = max_processes
        self._keeps_spare = keeps_spare
        self._changed = threading.Condition()
        self._idle: list[ChildProcess] = []
        self._busy: set[ChildProcess] = set()
        self._num_starting = 0
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that are ready or run a job."""
        with self._changed:
            return [child.pid for child in (*self._idle, *self._busy)]

    def open(self) -> bytes:
        """Start a process; return its answer to the setup. Raises JobExceeded, JobFailed."""
        with self._changed:
            self._num_starting += 1
        return self._start()

    def run(self, job: bytes, job_s: float | None = None) -> bytes:
        """Return the answer to a job; waits while all processes are busy. job_s: processor seconds
        that it allows itself, if less than the bound.

        Raises:
            JobExceeded: it was ended.
            JobFailed: its process ended by itself, twice, or there is none.
        """
        limit_s = self._bounds.job_s if job_s is None else job_s
        with contextlib.suppress(ChildEnded):
            return self._try(job, limit_s)
        try:
            return self._try(job, limit_s)
        except ChildEnded:
            raise JobFailed("it ended its process twice") from None

    def close(self) -> None:
        """Kill all processes. Jobs that run or wait raise JobFailed."""
        with self._changed:
            self._is_closed = True
            for child in self._busy:  # its job's thread closes it
                child.kill()
            for child in self._idle:
                child.close()
            self._idle.clear()
            self._changed.notify_all()

    def _try(self, job: bytes, job_s: float) -> bytes:
        child = self._take()
        answer = None
        try:
            answer = _ask(child, job, job_s)
        finally:
            self._put_back(child, is_alive=answer is not None)
        return answer

    def _take(self) -> ChildProcess:
        """Return a process that is ready; start another if that was the last."""
        with self._changed:
            while True:
                self._check_open()
                child = self._pop_idle()
                if child is not None:
                    self._busy.add(child)
                    self._start_spare()
                    return child
                if not self._num_starting and len(self._busy) < self._max:
                    self._num_starting += 1
                    break
                self._changed.wait()
        self._start()
        return self._take()

    def _check_open(self) -> None:
        if self._is_closed:
            raise JobFailed("it was closed")

    def _pop_idle(self) -> ChildProcess | None:
        while self._idle:
            child = self._idle.pop()
            if not wait_readable([child], 0.0):
                return child
            child.close()  # it was killed meanwhile
        return None

    def _start_spare(self) -> None:
        is_full = len(self._busy) >= self._max
        if not self._keeps_spare or self._idle or self._num_starting or is_full:
            return
        self._num_starting += 1
        with contextlib.suppress(RuntimeError):  # no thread can be started
            threading.Thread(target=self._try_start, name="job-spare", daemon=True).start()
            return
        self._num_starting -= 1

    def _try_start(self) -> None:
        with contextlib.suppress(JobExceeded, JobFailed):  # who needs it starts it, and is told
            self._start()

    def _start(self) -> bytes:
        """Add a process; it was counted as starting."""
        child = None
        try:
            child, answer = self._started()
            return answer
        finally:
            with self._changed:
                self._num_starting -= 1
                if child is not None:
                    self._idle.append(child)
                if self._is_closed:
                    for each in self._idle:
                        each.close()
                    self._idle.clear()
                self._changed.notify_all()

    def _started(self) -> tuple[ChildProcess, bytes]:
        try:
            child = ChildProcess(self._module, *map(str, self._bounds))
        except OSError as error:
            raise JobFailed(f"no process can be started: {error}") from None
        try:
            return child, _ask(child, self._setup, self._bounds.setup_s)
        except ChildEnded:
            raise JobFailed(f"its process ended, with status {child.close()}") from None
        except JobExceeded:
            child.close()
            raise

    def _put_back(self, child: ChildProcess, *, is_alive: bool) -> None:
        with self._changed:
            self._busy.discard(child)
            if is_alive and not self._is_closed:
                self._idle.append(child)
            else:
                child.close()
            self._changed.notify_all()


def _ask(child: ChildProcess, message: bytes, job_s: float) -> bytes:
    """Return the answer to a message. The child must be closed after an error. Raises ChildEnded,
    JobExceeded."""
    deadline = time.monotonic() + WALL_FACTOR * job_s
    try:
        child.messages.send(message, deadline)
        answer = child.messages.receive(deadline)
    except TimeoutError:
        answer = None
    except ChildEnded:
        if child.close() in _EXCEEDED:
            raise JobExceeded from None
        raise
    if answer is None:
        raise JobExceeded
    return answer


def serve_jobs(set_up: Callable[[bytes], bytes], handle: Callable[[bytes], bytes]) -> None:
    """Run the process of a JobPool: answer its setup by `set_up`, and its jobs by `handle`."""
    setup_s, job_s, memory_bytes = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGALRM})
    is_set_up = False

    def bounded(message: bytes) -> bytes:
        nonlocal is_set_up
        limit_processor_time(job_s if is_set_up else setup_s)
        answer = handle(message) if is_set_up else set_up(message)
        limit_processor_time(0.0)
        if not is_set_up:
            os.nice(NICENESS)
            is_set_up = True
        return answer

    longest_s = WALL_FACTOR * max(setup_s, job_s)
    run_jobs(bounded, job_s=longest_s, memory_bytes=memory_bytes)


def limit_processor_time(seconds: float) -> None:
    """End this process once it has used so much processor time from now on; 0: no bound. Works
    where Python does not run; the parent raises JobExceeded."""
    signal.setitimer(signal.ITIMER_PROF, seconds)

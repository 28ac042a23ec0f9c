"""Order of copies between a device and the host, beside the device's steps. Two staging buffers lie
between: blocks are gathered into one and leave from there, and arrive in the other, from which they
are scattered. Gathering and scattering are in the order of the steps; copies to the host and from
there have a stream each."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch


@dataclass(slots=True)
class CopyTimes:
    """Seconds of all copies so far: those of the last steps may lack. Holds no memory; any thread
    may read it."""

    out_s: float = 0.0
    in_s: float = 0.0


class TransferOrder:
    """For the CPU: whatever is called is done when the call returns."""

    def __init__(self) -> None:
        self.times = CopyTimes()

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Fill the outgoing buffer in the block, after the steps launched so far, and once what was
        in it has left."""
        yield

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Copy from the outgoing buffer to the host in the block, after gathering."""
        began = time.perf_counter()
        yield
        self.times.out_s += time.perf_counter() - began

    def mark_departure(self) -> Callable[[], None]:
        """Return a function that waits, on any thread, until what left so far is on the host. Call
        it while leaving."""
        return _no_wait

    def have_left(self) -> bool:
        """Return True if what has been gathered so far is on the host. Any thread may ask."""
        return True

    def begin_arrivals(self) -> None:
        """Let arrivals from now on see what has left so far: call it before this step's
        gathering."""

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Copy from the host to the incoming buffer in the block, once what was in it is scattered.
        Does not wait for steps."""
        began = time.perf_counter()
        yield
        self.times.in_s += time.perf_counter() - began

    @contextmanager
    def scattering(self) -> Iterator[None]:
        """Empty the incoming buffer in the block, after arriving and after the steps launched so
        far, and before those launched later."""
        yield

    def mark_arrival(self) -> Callable[[], bool] | None:
        """Return a function that tells if what arrived so far is on the host too; None: it is."""
        return None

    def settle(self) -> None:
        """Wait for all copies."""


_Timed: TypeAlias = tuple[torch.cuda.Event, torch.cuda.Event]
"""Before a copy and after it."""


class CudaTransferOrder(TransferOrder):
    """For CUDA. Used on the step thread, whose current stream runs the steps."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._outgoing = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._incoming = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._left = _event()
        """The outgoing buffer is empty."""
        self._scattered = _event()
        """The incoming buffer is empty."""
        self._timed_out: deque[_Timed] = deque()
        self._timed_in: deque[_Timed] = deque()

    @contextmanager
    def gathering(self) -> Iterator[None]:
        steps = torch.cuda.current_stream(self._device)
        steps.wait_event(self._left)
        yield
        self._outgoing.wait_stream(steps)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        self.times.out_s += _take_times(self._timed_out)
        began = _timing_event()
        began.record(self._outgoing)
        with torch.cuda.stream(self._outgoing):
            yield
        self._left = _timing_event()
        self._left.record(self._outgoing)
        self._timed_out.append((began, self._left))

    def mark_departure(self) -> Callable[[], None]:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._outgoing)
        return event.synchronize

    def have_left(self) -> bool:
        left: Callable[[], bool] = self._left.query
        return left()

    def begin_arrivals(self) -> None:
        self._incoming.wait_event(self._left)

    @contextmanager
    def arriving(self) -> Iterator[None]:
        self.times.in_s += _take_times(self._timed_in)
        self._incoming.wait_event(self._scattered)
        began = _timing_event()
        began.record(self._incoming)
        with torch.cuda.stream(self._incoming):
            yield
        ended = _timing_event()
        ended.record(self._incoming)
        self._timed_in.append((began, ended))

    @contextmanager
    def scattering(self) -> Iterator[None]:
        steps = torch.cuda.current_stream(self._device)
        steps.wait_stream(self._incoming)
        yield
        self._scattered = _event()
        self._scattered.record(steps)

    def mark_arrival(self) -> Callable[[], bool] | None:
        event = _event()
        event.record(self._incoming)
        return event.query

    def settle(self) -> None:
        self._outgoing.synchronize()
        self._incoming.synchronize()


def transfer_order(device: torch.device) -> TransferOrder:
    """Return the order of copies of a device."""
    return CudaTransferOrder(device) if device.type == "cuda" else TransferOrder()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _take_times(timed: deque[_Timed]) -> float:
    """Return the seconds of the copies that have ended since the last call."""
    seconds = 0.0
    while timed:
        began, ended = timed[0]
        if not ended.query():  # type: ignore[no-untyped-call]
            break
        timed.popleft()
        seconds += began.elapsed_time(ended) / 1000
    return seconds


def _no_wait() -> None:
    """It is there."""

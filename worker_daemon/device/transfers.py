"""Order of copies between a device and the host, beside the device's steps. Staging buffers lie
between: blocks are gathered into them and leave from there, or arrive there and are scattered.

Gathering is in the order of the steps, on their stream. All else has streams of its own: one for
copies to the host, and for each lane of arrivals one for the copies and one for what empties the
buffers. Each direction has DEPTH buffers, so that a copy runs while the one before is scattered.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

DEPTH: Final = 2
"""Buffers of a direction."""


@dataclass(slots=True)
class CopyTimes:
    """Seconds of all copies so far, those between two copies of a load included; those of the last
    steps may lack. Holds no memory; any thread may read it."""

    out_s: float = 0.0
    in_s: float = 0.0


class LoadEnd:
    """The end of a load. For the CPU: it has come."""

    @property
    def is_there(self) -> bool:
        """True once all blocks are. Any thread may ask."""
        return True

    def await_in_steps(self) -> None:
        """Let the steps launched from now on see it. Used on the step thread."""


class StoreLane:
    """The way out. For the CPU: whatever is called is done when the call returns."""

    def __init__(self, times: CopyTimes) -> None:
        self._times = times
        self.num_leaving = 0
        """Number of parts that have begun to leave so far, the one that leaves now included."""

    @contextmanager
    def gathering(self, buffer: int) -> Iterator[None]:
        """Fill a buffer in the block, after the steps launched so far, and once what was in it has
        left."""
        yield

    @contextmanager
    def leaving(self, buffer: int) -> Iterator[None]:
        """Copy from a buffer to the host in the block, after gathering."""
        self.num_leaving += 1
        began = time.perf_counter()
        yield
        self._times.out_s += time.perf_counter() - began

    def mark(self) -> Callable[[], None]:
        """Return a function that waits, on any thread, until what left so far is on the host. Call
        it while leaving."""
        return _no_wait

    def num_left(self) -> int:
        """Return the number of parts that are where they go. Any thread may ask."""
        return self.num_leaving

    def settle(self) -> None:
        """Wait for all copies."""


class LoadLane:
    """A lane of the way in: its loads follow each other. For the CPU: as StoreLane."""

    def __init__(self, times: CopyTimes) -> None:
        self._times = times

    def see_stores(self) -> None:
        """Let loads from now on see what has left so far."""

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Load in the block: what it runs comes after the steps launched so far, beside what is
        launched later."""
        yield

    @contextmanager
    def copying(self, buffer: int) -> Iterator[None]:
        """Copy from the host to a buffer in the block, once what was in it is scattered. Does not
        wait for steps. What a load runs later comes after the copy."""
        began = time.perf_counter()
        yield
        self._times.in_s += time.perf_counter() - began

    def emptied(self, buffer: int) -> None:
        """Note that what was in a buffer is scattered by what the load has run so far."""

    def end(self) -> LoadEnd:
        """End a load, and return what it brings."""
        return LoadEnd()

    def settle(self) -> None:
        """Wait for all loads."""


_Timed: TypeAlias = tuple[torch.cuda.Event, torch.cuda.Event]
"""Before a copy and after it."""


class CudaStoreLane(StoreLane):
    """For CUDA. Used on the step thread, whose current stream runs the steps."""

    def __init__(self, times: CopyTimes, device: torch.device) -> None:
        super().__init__(times)
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._left = [_timing_event() for _ in range(DEPTH)]
        """By buffer: it is empty."""
        self._last = self._left[0]
        self._on_the_way: deque[tuple[int, torch.cuda.Event]] = deque()
        """Parts by their numbers, and their ends."""
        self._num_left = 0
        self._looking = threading.Lock()
        self._timed: deque[_Timed] = deque()

    @contextmanager
    def gathering(self, buffer: int) -> Iterator[None]:
        steps = torch.cuda.current_stream(self._device)
        steps.wait_event(self._left[buffer])
        yield
        self._stream.wait_stream(steps)

    @contextmanager
    def leaving(self, buffer: int) -> Iterator[None]:
        self._times.out_s += _take_times(self._timed)
        self.num_leaving += 1
        began, left = _timing_event(), _timing_event()
        began.record(self._stream)
        with torch.cuda.stream(self._stream):
            yield
        left.record(self._stream)
        self._left[buffer] = self._last = left
        self._timed.append((began, left))
        self._on_the_way.append((self.num_leaving, left))
        self.num_left()  # lets go of the events of those that have left

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event.synchronize

    def num_left(self) -> int:
        with self._looking:
            while self._on_the_way and self._on_the_way[0][1].query():  # type: ignore[no-untyped-call]
                self._num_left, _ = self._on_the_way.popleft()
            return self._num_left

    def hold_back(self, stream: torch.cuda.Stream) -> None:
        """Let a stream see what has left so far."""
        stream.wait_event(self._last)

    def settle(self) -> None:
        self._stream.synchronize()


class CudaLoadLane(LoadLane):
    """For CUDA. Used on the step thread, whose current stream runs the steps.

    What empties the buffers has priority over steps: it is short, and the bus waits for it.
    """

    def __init__(self, times: CopyTimes, device: torch.device, stores: CudaStoreLane) -> None:
        super().__init__(times)
        self._device = device
        self._stores = stores
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._work = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._copied = [_event() for _ in range(DEPTH)]
        """By buffer: it has what was copied last."""
        self._emptied = [_event() for _ in range(DEPTH)]
        """By buffer: it is empty."""
        self._timed: deque[_Timed] = deque()

    def see_stores(self) -> None:
        self._stores.hold_back(self._copies)

    @contextmanager
    def loading(self) -> Iterator[None]:
        self._times.in_s += _take_times(self._timed)
        self._work.wait_stream(torch.cuda.current_stream(self._device))
        began, ended = _timing_event(), _timing_event()
        began.record(self._copies)
        with torch.cuda.stream(self._work):
            yield
        ended.record(self._copies)
        self._timed.append((began, ended))

    @contextmanager
    def copying(self, buffer: int) -> Iterator[None]:
        self._copies.wait_event(self._emptied[buffer])
        with torch.cuda.stream(self._copies):
            yield
        self._copied[buffer].record(self._copies)
        self._work.wait_event(self._copied[buffer])

    def emptied(self, buffer: int) -> None:
        self._emptied[buffer].record(self._work)

    def end(self) -> LoadEnd:
        event = _event()
        event.record(self._work)
        return _CudaLoadEnd(event, self._device)

    def settle(self) -> None:
        self._copies.synchronize()
        self._work.synchronize()


class _CudaLoadEnd(LoadEnd):
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    @property
    def is_there(self) -> bool:
        is_there: bool = self._event.query()  # type: ignore[no-untyped-call]
        return is_there

    def await_in_steps(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class TransferOrder:
    """The ways of a device."""

    def __init__(self, device: torch.device) -> None:
        self.times = CopyTimes()
        self.stores: StoreLane
        self.loads: LoadLane
        """Loads that steps wait for."""
        self.loads_beside: LoadLane
        """Loads that run beside steps."""
        if device.type == "cuda":
            stores = CudaStoreLane(self.times, device)
            self.stores = stores
            self.loads = CudaLoadLane(self.times, device, stores)
            self.loads_beside = CudaLoadLane(self.times, device, stores)
        else:
            self.stores = StoreLane(self.times)
            self.loads = self.loads_beside = LoadLane(self.times)

    def settle(self) -> None:
        """Wait for all copies."""
        self.stores.settle()
        self.loads.settle()
        self.loads_beside.settle()


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

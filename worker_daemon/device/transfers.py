"""Order of copies between a device and the host, beside the device's steps. Staging buffers lie
between: blocks are gathered into them and leave from there, or arrive there and are scattered.

Gathering is in the order of the steps, on their stream. All else has streams of its own: one for
copies to the host, and for each lane of arrivals one for each buffer, so that a copy runs while
what came before it is scattered.
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
"""Buffers of copies to the host, and of a lane that steps wait for."""
BESIDE_DEPTH: Final = 4
"""Buffers of the lane beside steps: so many are filled before the steps end that were launched
before a load, and what they hold can be scattered."""


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

    @property
    def age_s(self) -> float:
        """Seconds since all blocks are there, about, once they are; 0 if nobody knows. Any thread
        may ask."""
        return 0.0

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
    """A lane of the way in: its loads follow each other. For the CPU: as StoreLane.

    A load is launched so: beginning(), then through() for each buffer, then ending().
    """

    def __init__(self, times: CopyTimes) -> None:
        self._times = times

    def see_stores(self) -> None:
        """Let loads from now on see what has left so far."""

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Begin a load in the block: what it runs waits for no step. All else comes after it."""
        yield

    @contextmanager
    def through(self, buffer: int) -> Iterator[None]:
        """Let parts of a load come through a buffer in the block, one after the other, each copied
        from the host and then scattered; what they run on others' buffers is beside it."""
        began = time.perf_counter()
        yield
        self._times.in_s += time.perf_counter() - began

    def await_steps(self, buffer: int) -> None:
        """Let what a load runs through a buffer from now on come after the steps that were launched
        before the load. Steps that are launched later are beside it. Call it after the first
        copy."""

    @contextmanager
    def ending(self) -> Iterator[None]:
        """End a load in the block: what it runs comes after all else of the load."""
        yield

    def end(self) -> LoadEnd:
        """Return what the load brings that has ended last."""
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

    A buffer's stream has priority over steps: what empties it is short, and the bus waits for it.
    Within it, copies and what empties the buffer are in order without events, which cost the step
    thread more than the launches do.
    """

    def __init__(
        self, times: CopyTimes, device: torch.device, stores: CudaStoreLane, depth: int
    ) -> None:
        """depth: number of its buffers."""
        super().__init__(times)
        self._device = device
        self._stores = stores
        self._streams = [
            torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            for _ in range(depth)
        ]
        """By buffer. Loads begin and end on the first one."""
        self._steps_end = _event()
        """The steps that were launched before the last load."""
        self._began = self._ended = _timing_event()
        """Of the last load."""
        self._launched: float | None = None
        """The moment at which the last load began, if it did so when it was launched."""
        self._is_held_back = False
        self._last: LoadEnd = LoadEnd()
        self._timed: deque[_Timed] = deque()

    def see_stores(self) -> None:
        self._stores.hold_back(self._streams[0])
        self._is_held_back = True

    @contextmanager
    def beginning(self) -> Iterator[None]:
        self._times.in_s += _take_times(self._timed)
        begins_now = self._last.is_there and not self._is_held_back
        self._launched, self._is_held_back = time.monotonic() if begins_now else None, False
        self._steps_end.record(torch.cuda.current_stream(self._device))
        first, *others = self._streams
        with torch.cuda.stream(first):
            yield
        self._began = _timing_event()
        self._began.record(first)
        for stream in others:
            stream.wait_stream(first)

    @contextmanager
    def through(self, buffer: int) -> Iterator[None]:
        with torch.cuda.stream(self._streams[buffer]):
            yield

    def await_steps(self, buffer: int) -> None:
        self._streams[buffer].wait_event(self._steps_end)

    @contextmanager
    def ending(self) -> Iterator[None]:
        first, *others = self._streams
        for stream in others:
            first.wait_stream(stream)
        self._ended = _timing_event()
        self._ended.record(first)
        self._timed.append((self._began, self._ended))
        with torch.cuda.stream(first):
            yield

    def end(self) -> LoadEnd:
        event = _event()
        event.record(self._streams[0])
        self._last = _CudaLoadEnd(event, self._device, self._launched, (self._began, self._ended))
        return self._last

    def settle(self) -> None:
        for stream in self._streams:
            stream.synchronize()


class _CudaLoadEnd(LoadEnd):
    def __init__(
        self, event: torch.cuda.Event, device: torch.device, launched: float | None, timed: _Timed
    ) -> None:
        """launched: the moment of the first event; None: it came later than it was launched."""
        self._event = event
        self._device = device
        self._launched = launched
        self._timed = timed

    @property
    def is_there(self) -> bool:
        is_there: bool = self._event.query()  # type: ignore[no-untyped-call]
        return is_there

    @property
    def age_s(self) -> float:
        if self._launched is None:
            return 0.0
        began, ended = self._timed
        seconds: float = began.elapsed_time(ended) / 1000
        return max(0.0, time.monotonic() - self._launched - seconds)

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
            self.loads = CudaLoadLane(self.times, device, stores, DEPTH)
            self.loads_beside = CudaLoadLane(self.times, device, stores, BESIDE_DEPTH)
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

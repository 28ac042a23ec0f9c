"""Samples bubbles: the share of its time that a stage waits for its input.

Measures every n-th step, from before its wait to before the next step's wait: on a device by events
on the waiting stream, on the CPU by the clock. Measuring never blocks.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

_EVERY = 32
_SAMPLES = 64

T = TypeVar("T")


class Bubbles(NamedTuple):
    """A measurement."""

    waiting_share: float
    """Share of the sampled time, from 0 to 1; 0 without samples."""
    num_samples: int
    """Number of samples that count: at most the last 64."""


class InputWaits(Protocol):
    """Measures a stage's waits. Used on the step thread; `bubbles` may be read by any."""

    @property
    def bubbles(self) -> Bubbles:
        """Result of the newest samples."""

    def waiting(self) -> AbstractContextManager[None]:
        """Enter around a step's wait for its input, once per step."""


class _Clock(Protocol[T]):
    """Marks points in a sequence of work."""

    def mark(self) -> T:
        """Return a mark of the present point."""

    def seconds(self, first: T, last: T) -> float | None:
        """Return the seconds between two marks; None until the last one is reached."""


class _HostClock:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    def mark(self) -> float:
        return self._now()

    def seconds(self, first: float, last: float) -> float | None:
        return last - first


class _StreamClock:
    """Marks the current CUDA stream."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float | None:
        if not last.query():  # type: ignore[no-untyped-call]
            return None
        return float(first.elapsed_time(last)) / 1000


class _Sample(NamedTuple):
    waited_s: float
    whole_s: float


class SampledWaits(Generic[T]):
    """Measures every n-th step's wait."""

    def __init__(self, clock: _Clock[T], every: int) -> None:
        self._clock = clock
        self._every = every
        self._steps = 0
        self._open: tuple[T, T] | None = None
        """Marks around the previous step's wait, if that step is sampled."""
        self._unread: deque[tuple[T, T, T]] = deque()
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES)
        self._bubbles = Bubbles(0.0, 0)

    @property
    def bubbles(self) -> Bubbles:
        """Result of the newest samples."""
        return self._bubbles

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Enter around a step's wait for its input, once per step."""
        self._close_sample()
        is_sample = self._steps % self._every == 0
        self._steps += 1
        if not is_sample:
            yield
            return
        began = self._clock.mark()
        yield
        self._open = (began, self._clock.mark())

    def _close_sample(self) -> None:
        if self._open is None:
            return
        self._unread.append((*self._open, self._clock.mark()))
        self._open = None
        while self._unread and self._read(*self._unread[0]):
            self._unread.popleft()

    def _read(self, began: T, arrived: T, next_began: T) -> bool:
        whole_s = self._clock.seconds(began, next_began)
        if whole_s is None:
            return False
        self._samples.append(_Sample(self._clock.seconds(began, arrived) or 0.0, whole_s))
        whole = sum(sample.whole_s for sample in self._samples)
        waited = sum(sample.waited_s for sample in self._samples)
        self._bubbles = Bubbles(waited / whole if whole else 0.0, len(self._samples))
        return True


def input_waits(
    device: torch.device, *, every: int = _EVERY, now: Callable[[], float] = time.perf_counter
) -> InputWaits:
    """Return the measuring object for a stage on this device; now: a clock in seconds, used on the
    CPU."""
    if device.type == "cuda":
        return SampledWaits(_StreamClock(), every)
    return SampledWaits(_HostClock(now), every)

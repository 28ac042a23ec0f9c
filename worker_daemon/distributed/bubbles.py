"""Samples bubbles: the share of time in which a stage waits for its input.

Measures every n-th step, from before its wait to before the next step's wait: on a device by events
on the waiting stream, on the CPU by the clock. Measuring never blocks.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_EVERY = 32
_SAMPLES = 64


class Bubbles(NamedTuple):
    """A measurement."""

    waiting_share: float
    """Share of the sampled time, from 0 to 1; 0 without samples."""
    num_samples: int
    """Number of samples that count: at most the last 64."""


class _Clock:
    """Marks points in the host's work by the clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now

    def mark(self) -> Any:
        """Return a mark for this point."""
        return self._now()

    def seconds(self, first: Any, last: Any) -> float | None:
        """Return the time between two marks; None until the last has been reached."""
        return float(last - first)


class _StreamClock(_Clock):
    """Marks the current CUDA stream, by events."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, first: Any, last: Any) -> float | None:
        if not last.query():
            return None
        return float(first.elapsed_time(last)) / 1000


class _Sample(NamedTuple):
    waited_s: float
    whole_s: float


class InputWaits:
    """Measures every n-th step's wait. Used on the step thread; `bubbles` may be read by any."""

    def __init__(self, clock: _Clock, every: int) -> None:
        self._clock = clock
        self._every = every
        self._steps = 0
        self._open: tuple[Any, Any] | None = None
        """Marks around the previous step's wait, if that step is a sample."""
        self._unread: deque[tuple[Any, Any, Any]] = deque()
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES)
        self.bubbles = Bubbles(0.0, 0)
        """Result of the latest samples."""

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

    def _read(self, began: Any, arrived: Any, next_began: Any) -> bool:
        whole_s = self._clock.seconds(began, next_began)
        if whole_s is None:
            return False
        self._samples.append(_Sample(self._clock.seconds(began, arrived) or 0.0, whole_s))
        whole = sum(sample.whole_s for sample in self._samples)
        waited = sum(sample.waited_s for sample in self._samples)
        self.bubbles = Bubbles(waited / whole if whole else 0.0, len(self._samples))
        return True


def input_waits(
    device: torch.device, *, every: int = _EVERY, now: Callable[[], float] = time.perf_counter
) -> InputWaits:
    """Return the meter for a stage's waits on this device. now: the clock for the CPU, in
    seconds."""
    return InputWaits((_StreamClock if device.type == "cuda" else _Clock)(now), every)

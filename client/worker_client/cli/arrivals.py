"""Requests that arrive over time, while a driver runs."""

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from worker_client.cli.input_request import InputRequest
from worker_client.errors import config_error
from worker_client.requests import parent_id

_LONGEST_WAIT_S = 0.1
"""Time after which a run without work looks whether it was ended."""


def check_request_rate(rate: float) -> None:
    """Raise ClientConfigError if requests cannot arrive at this rate, in 1/s; inf: all at once."""
    if not rate > 0:
        fix = "give requests per second, or inf for all at once"
        raise config_error("request_rate", rate, "it is not positive", fix)


def with_arrivals(inputs: Sequence[InputRequest], rate: float, seed: int) -> list[InputRequest]:
    """Return requests that arrive by a Poisson process, in order, `rate` a second on average, the
    first one at once. The samples of a prompt arrive together. rate: inf for all at once. seed: the
    same one gives the same times."""
    if math.isinf(rate):
        return list(inputs)
    names = dict.fromkeys(parent_id(entry.id) or entry.id for entry in inputs)
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(names))
    times = dict(zip(names, (np.cumsum(gaps) - gaps[:1]).tolist(), strict=True))
    return [replace(entry, arrival_s=times[parent_id(entry.id) or entry.id]) for entry in inputs]


class Arrivals:
    """The requests of a run that have not arrived yet. Belongs to the driver's thread."""

    def __init__(self, inputs: Sequence[InputRequest], began: float) -> None:
        """began: time.monotonic() at the start of the run."""
        self._left = deque(sorted(inputs, key=lambda entry: entry.arrival_s))
        self._began = began

    @property
    def has_more(self) -> bool:
        """True until all have arrived."""
        return bool(self._left)

    def take_due(self) -> list[InputRequest]:
        """Return those that have arrived since the last call, the earliest first."""
        elapsed = time.monotonic() - self._began
        due = []
        while self._left and self._left[0].arrival_s <= elapsed:
            due.append(self._left.popleft())
        return due

    def add(self, inputs: Sequence[InputRequest]) -> None:
        """Add requests of the same run, some of which may have arrived."""
        if inputs:
            self._left = deque(sorted([*self._left, *inputs], key=lambda entry: entry.arrival_s))

    def take_all(self) -> list[InputRequest]:
        """Return all that are left."""
        left, self._left = [*self._left], deque()
        return left

    def wait(self) -> None:
        """Wait for the next one, or for a moment."""
        left_s = self._began + self._left[0].arrival_s - time.monotonic()
        time.sleep(min(max(0.0, left_s), _LONGEST_WAIT_S))

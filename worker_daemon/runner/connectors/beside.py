"""Loads that run beside steps: which blocks they fill, and when those are there."""

import threading
from collections import deque

import numpy as np

from worker_daemon.contracts.arrays import Int32s
from worker_daemon.runner.connectors.interface import Loaded


class LoadsBeside:
    """Owned by a connector. Used on the step thread, but for take_known(). Loads end in the order
    in which they began."""

    def __init__(self) -> None:
        self._in_flight: deque[Loaded] = deque()
        self._taking = threading.Lock()

    @property
    def is_loading(self) -> bool:
        """True from a load's beginning until it was taken."""
        return bool(self._in_flight)

    def add(self, loaded: Loaded) -> None:
        """Take note of a load that has begun."""
        self._in_flight.append(loaded)

    def await_blocks(self, block_ids: Int32s) -> None:
        """Let the steps launched from now on see these blocks as the loads so far leave them."""
        for loaded in list(self._in_flight):
            if np.isin(block_ids, loaded.block_ids).any():
                loaded.end.await_in_steps()

    def take_known(self) -> list[Loaded]:
        """Return each load once, after its blocks are there. Any thread may call it."""
        with self._taking:
            known = list[Loaded]()
            while self._in_flight and self._in_flight[0].is_known:
                known.append(self._in_flight.popleft())
            return known

"""Limits the control requests of each observer's key, so that a flood from one costs only that key,
over however many connections it comes."""

import logging
import time
from collections.abc import Callable
from typing import Final

from worker_daemon.server.auth.bad_peers import Peer, shown

RATE_PER_S: Final = 400
"""Requests of one key in the long run: a hundred times what `top` sends."""
BURST: Final = 200
"""Requests that a key may send at once without waiting."""
MAX_WAIT_S: Final = 0.25
"""A request that would have to wait for longer is dropped."""

logger = logging.getLogger(__name__)


class RequestRate:
    """Counts requests by key; main thread only. At most as many keys as are authorized."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_dropped = 0
        """Requests of all keys."""
        self._clock = clock
        self._due: dict[Peer, float] = {}
        """The clock's time until which the key's requests so far take at RATE_PER_S."""

    def wait_s(self, key: Peer) -> float | None:
        """Count a request; return for how long it must wait, None if it must be dropped."""
        now = self._clock()
        due = max(now, self._due.get(key, now)) + 1 / RATE_PER_S
        wait_s = due - now - BURST / RATE_PER_S
        if wait_s > MAX_WAIT_S:
            self._drop(key)
            return None
        self._due[key] = due
        return max(0.0, wait_s)

    def _drop(self, key: Peer) -> None:
        self.num_dropped += 1
        if self.num_dropped.bit_count() == 1:
            logger.warning(
                "%d control requests dropped, the last of %s, which sends more than %d a second",
                self.num_dropped,
                shown(key),
                RATE_PER_S,
            )

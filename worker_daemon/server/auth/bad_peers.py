"""Bans peers that send frames that do not decode."""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, TypeAlias

from worker_host.key_files import fingerprint

Peer: TypeAlias = str | tuple[str, bytes, str]
"""A public key or, without keys, a socket, the peer's routing id on it and its user."""

MAX_BAD_FRAMES: Final = 5
WINDOW_S: Final = 10.0
BAN_S: Final = 30.0
MAX_REMEMBERED: Final = 1024
"""Without keys, every new connection has a new routing id, so the oldest are forgotten."""

_LOG = logging.getLogger(__name__)


class BadPeers:
    """Counts bad frames; any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_bad_frames = 0
        """Bad frames of all peers since the start."""
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: OrderedDict[Peer, deque[float]] = OrderedDict()
        self._banned: OrderedDict[Peer, float] = OrderedDict()
        """The time.monotonic at which each ban ends."""

    def __contains__(self, peer: object) -> bool:
        """Return True if messages of the peer are dropped now."""
        if not self._banned:  # the usual case: this runs once per step
            return False
        with self._lock:
            until = self._banned.get(peer)  # type: ignore[call-overload]  # any object may be asked for
            if until is None:
                return False
            if self._clock() < until:
                return True
            del self._banned[peer]  # type: ignore[arg-type]  # it was found
            return False

    def note(self, peer: Peer, socket: str, error: Exception) -> None:
        """Count a bad frame. Log each ban, and the first, second, fourth bad frame and so on."""
        banned, num = self.count(peer), self.num_bad_frames
        if num.bit_count() == 1 or banned:
            _LOG.warning("%d bad frames, the last at the %s socket: %s", num, socket, error)
        if banned:
            _LOG.warning("%s is banned for %.0f s", shown(peer), BAN_S)

    def count(self, peer: Peer) -> bool:
        """Count a bad frame; return True if its sender is banned from now on."""
        now = self._clock()
        with self._lock:
            self.num_bad_frames += 1
            times = self._seen.setdefault(peer, deque(maxlen=MAX_BAD_FRAMES))
            self._seen.move_to_end(peer)
            times.append(now)
            banned = len(times) == MAX_BAD_FRAMES and now - times[0] <= WINDOW_S
            if banned:
                del self._seen[peer]
                self._shut_out(peer, now)
            if len(self._seen) > MAX_REMEMBERED:
                self._seen.popitem(last=False)
        return banned

    def ban(self, peer: Peer) -> None:
        """Ban a peer for something worse than a bad frame, and log it."""
        with self._lock:
            self._shut_out(peer, self._clock())
        _LOG.warning("%s is banned for %.0f s", shown(peer), BAN_S)

    def _shut_out(self, peer: Peer, now: float) -> None:
        self._banned[peer] = now + BAN_S
        self._banned.move_to_end(peer)
        if len(self._banned) > MAX_REMEMBERED:
            self._banned.popitem(last=False)


def shown(peer: Peer) -> str:
    """Return the peer's name for a log line."""
    if isinstance(peer, str):
        return f"the key {fingerprint(peer)}"
    return f"the peer {peer[1].hex()} of the {peer[0]} socket"

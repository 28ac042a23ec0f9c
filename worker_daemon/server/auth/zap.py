"""The ZAP thread: authenticates keys (ZAP, ZeroMQ RFC 27), logs refused peers, limits the rate of
unknown addresses (connection_limit.py) and shuts down handshakes that are too long (handshakes.py).
Owns the ZAP socket and the monitors of the four sockets; never waits for another thread, so that
handshakes end while the main thread is busy.

libzmq calls ZAP only for peers that have proved their key. It refuses peers without a key, or with
another daemon's public key, itself, and reports them to the monitors; none of their bytes go
further.
"""

import errno
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from rendezvous.borrowed_sockets import borrowed
from worker_daemon.server.auth.access import SOCKET_ROLES, place_of
from worker_daemon.server.auth.bad_peers import BadPeers
from worker_daemon.server.auth.connection_limit import ConnectionLimit, TrustedAddresses
from worker_daemon.server.auth.handshakes import Handshakes, PeerName
from worker_daemon.server.auth.keys import AuthorizedKeys
from worker_host.key_files import fingerprint

ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
_BELL: Final = "inproc://zap-wakeup"
_REQUEST_FRAMES: Final = 7
"""version, request id, domain, address, routing id, mechanism, the client's public key."""
_WATCHED: Final = (
    zmq.EVENT_LISTENING
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_MONITOR_STOPPED
)
_WATCH: Final = b"watch"
_STOP: Final = b"stop"
MAX_ADDRESSES: Final = 4096
_SHUT_POLL_MS: Final = 100
_MAX_EVENTS: Final = 32

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class AuditLog:
    """Writes at most `burst` lines in `window_s` seconds; the next line reports the number of
    omitted ones."""

    write: Callable[[str], None]
    burst: int = 10
    window_s: float = 10.0
    clock: Callable[[], float] = time.monotonic
    num_refused: int = field(default=0, init=False)
    """Refusals since the start."""
    _window_ends: float = field(default=0.0, init=False)
    _in_window: int = field(default=0, init=False)
    _withheld: int = field(default=0, init=False)

    def refused(self, where: str, who: str, why: str) -> None:
        """Record that a peer was refused."""
        self.num_refused += 1
        now = self.clock()
        if now >= self._window_ends:
            self._window_ends, self._in_window = now + self.window_s, 0
        self._in_window += 1
        if self._in_window > self.burst:
            self._withheld += 1
            return
        others = f" ({self._withheld} such lines were left out)" if self._withheld else ""
        self._withheld = 0
        self.write(f"refused at the {where} socket: {who}: {why}{others}")


class ZapHandler:
    """Owns and runs the ZAP thread. Made and started by the main thread before the sockets that it
    protects are bound."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", roles: AuthorizedKeys, bad_peers: BadPeers
    ) -> None:
        self._context = context
        self._roles = roles
        self._bad_peers = bad_peers
        self._audit = AuditLog(logger.warning)
        self._floods = AuditLog(logger.warning, burst=4)
        self._trusted = TrustedAddresses()
        self._zap = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(ZAP_ADDRESS)
        self._wakeup = context.socket(zmq.PAIR)
        self._wakeup.bind(_BELL)
        self._bell = context.socket(zmq.PAIR)
        self._bell.connect(_BELL)
        self._to_watch: queue.SimpleQueue[tuple[zmq.Socket[bytes], _Watch]] = queue.SimpleQueue()
        self._num_watched = 0
        self._ended: Callable[[str], None] = lambda name: None
        self._monitors: dict[zmq.Socket[bytes], _Watch] = {}
        """Used only by the ZAP thread."""
        self._thread = threading.Thread(target=self._run, name="zap", daemon=True)

    @property
    def num_refused(self) -> int:
        """Handshakes that were refused since the start; any thread may read it."""
        return self._audit.num_refused

    def watch(self, name: str, watched: "zmq.Socket[bytes] | zmq.asyncio.Socket") -> None:
        """Watch a socket until it is closed; called by its owner before it is bound."""
        self._num_watched += 1
        address = f"inproc://monitor-{self._num_watched}"
        watched.monitor(address, _WATCHED)
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.connect(address)
        watch = _Watch(name, self._audit, self._floods, self._trusted, self._bad_peers)
        self._to_watch.put((monitor, watch))
        if self._thread.ident is not None:
            self._bell.send(_WATCH)

    def report_ends(self, ended: Callable[[str], None]) -> None:
        """Call `ended` on the ZAP thread with the name of a socket whenever one of its connections
        has ended, from now on."""
        self._ended = ended

    def start(self) -> None:
        """Start the thread: no peer can connect before."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End the thread; return True if it ended in time. No peer can connect any more."""
        if self._thread.ident is None:
            self._close()
        else:
            self._bell.send(_STOP)
            self._thread.join(timeout_s)
        self._bell.close(linger=0)
        return not self._thread.is_alive()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._wakeup, zmq.POLLIN)
        self._watch_more(poller)
        try:
            while True:
                ready = dict(poller.poll(self._patience_ms()))
                if self._wakeup in ready:
                    if self._wakeup.recv() == _STOP:
                        return
                    self._watch_more(poller)
                # Events first: a connection is recorded before its handshake is authenticated.
                for monitor in ready.keys() & self._monitors.keys():
                    self._take_events(monitor, poller)
                if self._zap in ready:
                    self._zap.send_multipart(self._answer(self._zap.recv_multipart()))
        except Exception:
            logger.exception("the ZAP thread has failed: no peer can connect any more")
        finally:
            self._close()

    def _patience_ms(self) -> int | None:
        """Check all sockets; return the milliseconds until the next check, None for no limit."""
        patience = [watch.look() for watch in self._monitors.values()]
        return min((each for each in patience if each is not None), default=None)

    def _watch_more(self, poller: zmq.Poller) -> None:
        while not self._to_watch.empty():
            monitor, watch = self._to_watch.get()
            self._monitors[monitor] = watch
            poller.register(monitor, zmq.POLLIN)

    def _take_events(self, monitor: "zmq.Socket[bytes]", poller: zmq.Poller) -> None:
        """Handle the events of one socket, up to a limit, so that other sockets need not wait."""
        for _ in range(_MAX_EVENTS):
            if not monitor.poll(0):
                return
            event = recv_monitor_message(monitor)
            if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                del self._monitors[monitor]
                poller.unregister(monitor)
                monitor.close()
                return
            watch = self._monitors[monitor]
            watch.take(int(event["event"]), int(event["value"]))
            if event["event"] == zmq.EVENT_DISCONNECTED:
                self._ended(watch.name)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, number = [*request, b"", b""][:2]
        try:
            why = self._refusal(request)
        except Exception as error:  # not a request of libzmq
            logger.exception("a handshake could not be checked")
            why = repr(error)
        if why:
            return [version, number, b"400", why.encode(), b"", b""]
        return [version, number, b"200", b"", z85.encode(request[6]), b""]

    def _refusal(self, request: list[bytes]) -> str:
        """Return the reason to refuse a peer; empty if it may connect."""
        if len(request) != _REQUEST_FRAMES or request[5] != b"CURVE":
            self._audit.refused("?", "?", "no key")
            return "a key is needed"
        domain, address = request[2].decode(), place_of(request[3].decode(errors="replace"))
        key = z85.encode(request[6]).decode()
        role, needed = self._roles.role(key), SOCKET_ROLES[domain]
        if role is None:
            why = "the key is not authorized"
        elif not role.covers(needed):
            why = f"the key has the role {role}, the {domain} socket needs {needed}"
        elif key in self._bad_peers:
            why = "the key is banned for a while"
        else:
            self._came_in(domain, request[3].decode(errors="replace"), key)
            return ""
        self._audit.refused(domain, f"{address}, key {fingerprint(key)}", why)
        return why

    def _came_in(self, domain: str, address: str, key: str) -> None:
        """Record that an authorized key connected from this address."""
        for watch in self._monitors.values():
            watch.came_in(domain, address, key)
        if address not in self._trusted:
            self._trusted.add(address)
            for watch in self._monitors.values():
                watch.renew()

    def _close(self) -> None:
        for each in (self._zap, self._wakeup, *self._monitors):
            each.close(linger=0)


class _Watch:
    """The events of one socket. A monitor reports the address of a failed handshake only when its
    connection ends, which follows."""

    def __init__(
        self,
        name: str,
        audit: AuditLog,
        floods: AuditLog,
        trusted: TrustedAddresses,
        bad_peers: BadPeers,
    ) -> None:
        self.name = name
        self._audit = audit
        self._floods = floods
        self._trusted = trusted
        self._handshakes = Handshakes(
            listens=name == "events", is_trusted=trusted.__contains__, ban=bad_peers.ban
        )
        self._limit: ConnectionLimit | None = None
        self._addresses: dict[int, str] = {}
        """Addresses of connections, by file descriptor. A descriptor that was closed and reused
        before we looked gives the wrong address: good enough for a log line."""
        self._failed = ""

    def take(self, kind: int, value: int) -> None:
        """Handle one event."""
        if kind == zmq.EVENT_LISTENING:
            self._limit = ConnectionLimit(value, self._trusted)
        elif kind == zmq.EVENT_ACCEPTED:
            self._accepted(value)
        elif kind == zmq.EVENT_DISCONNECTED:
            address = self._addresses.pop(value, "unknown address")
            why = self._handshakes.ended(value) or self._failed
            if why:
                self._audit.refused(self.name, address, why)
            self._failed = ""
        else:
            self._failed = _why(kind, value)

    def _accepted(self, descriptor: int) -> None:
        address, name = _address(descriptor)
        if len(self._addresses) < MAX_ADDRESSES:
            self._addresses[descriptor] = address
        if self._limit is None:
            return
        if name is not None:
            self._handshakes.began(descriptor, name)
        # A peer that has left already counts as unknown: otherwise a flood of short connections,
        # which makes this thread late, would never be limited.
        if self._limit.entered(address if name is None else name[0]):
            self._floods.refused(
                self.name, "unknown addresses", "too many connections: all must wait"
            )

    def look(self) -> int | None:
        """Detach the connection limit's filter if it is time, and check handshakes; return the
        milliseconds until the next check, None if none is needed."""
        if self._limit is None:
            return None
        self._limit.look()
        self._handshakes.look()
        patience = self._handshakes.patience_ms
        if not self._limit.is_shut:
            return patience
        return _SHUT_POLL_MS if patience is None else min(patience, _SHUT_POLL_MS)

    def came_in(self, domain: str, address: str, key: str) -> None:
        """Record that an authorized key connected to the socket of this domain."""
        if domain == self.name:
            self._handshakes.came_in(address, key)

    def renew(self) -> None:
        """Renew the connection limit's filter, for a new trusted address."""
        if self._limit is not None:
            self._limit.renew()


def _why(kind: int, value: int) -> str:
    if kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return f"it left during the handshake, or has no key ({errno.errorcode.get(value, value)})"
    if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "it has no key"
    if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "it looks for a daemon with another key"
    return f"it does not speak ZMTP (protocol error {value:#x})"


def _address(descriptor: int) -> tuple[str, PeerName | None]:
    """Return the name of a connection's peer for a log line, and its address and port if it has
    one."""
    try:
        with borrowed(descriptor) as copy:
            if copy.family == socket.AF_UNIX:
                data = copy.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                pid, uid = (int.from_bytes(data[at : at + 4], "little") for at in (0, 4))
                return f"pid {pid} of user {uid}", None
            host, port = copy.getpeername()[:2]
            return f"{host}:{port}", (host, port)
    except (OSError, ValueError):
        return "unknown address", None

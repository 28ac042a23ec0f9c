"""The protection of the daemon's sockets: only by their directory, or by keys. Chosen once, on the
main thread."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import Final, TypeAlias

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from rpc_schema.codec import CURVE_BYTES
from worker_daemon.server.auth.access import Access, KeyedAccess
from worker_daemon.server.auth.bad_peers import BadPeers
from worker_daemon.server.auth.keys import AuthorizedKeys, Identity, read_identity
from worker_daemon.server.auth.zap import ZapHandler
from worker_daemon.settings import ProcessSettings

HANDSHAKE_MS: Final = 1000
"""Limit of a handshake with keys; handshakes.py has the other limits. Must exceed the driver's
limit in client/worker_client/wire/keys.py."""
LOCAL_HANDSHAKE_MS: Final = 3000
"""Limit of a handshake if only this user can connect."""
SLOW_CIPHER_MB_S: Final = 300
_TEST_BYTES: Final = 1 << 20
_TEST_ROUNDS: Final = 2
_TEST_LIMIT_MS: Final = 2000

AnySocket: TypeAlias = "zmq.Socket[bytes] | zmq.asyncio.Socket"

logger = logging.getLogger(__name__)


class Security:
    """Protects the sockets of an ipc endpoint without keys, by a directory closed to other users.
    KeySecurity protects by keys. Owned by the main thread; any thread may use `access` and
    `bad_peers`."""

    frame_bytes = 0
    """Bytes that the protection adds to a frame."""

    def __init__(self, access: Access | None = None) -> None:
        self.access = access or Access()
        self.bad_peers = BadPeers()
        self._monitor: zmq.Socket[bytes] | None = None

    @property
    def num_refused(self) -> int:
        """Handshakes that were refused since the start; any thread may read it."""
        return 0

    def protect(self, socket: AnySocket, name: str) -> None:
        """Set the socket options of the protection; called before the socket is bound."""
        socket.setsockopt(zmq.HANDSHAKE_IVL, LOCAL_HANDSHAKE_MS)

    def watch_ends(self, results: "zmq.Socket[bytes]") -> None:
        """Record the ends of connections of the results socket; called before it is bound."""
        self._monitor = results.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def start(self) -> None:
        """Let peers connect; called after protect() and before the sockets are bound."""

    def report_ends(self, loop: asyncio.AbstractEventLoop, ended: Callable[[], None]) -> None:
        """Call `ended` on the loop each time that connections of the results socket end."""
        monitor = self._monitor
        assert monitor is not None

        def take() -> None:
            any_ended = False
            while monitor.poll(0):
                any_ended |= recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
            if any_ended:
                ended()

        loop.add_reader(monitor.FD, take)
        loop.call_soon(take)  # events before the reader was there do not make it run

    def reload(self) -> bool:
        """Read the authorized keys again; return True if a key lost rights."""
        return False

    def stop(self, timeout_s: float) -> bool:
        """Stop accepting peers; return True if that ended in time."""
        if self._monitor is not None:
            self._monitor.close(linger=0)
        return True


class KeySecurity(Security):
    """CURVE on all four sockets: a peer proves an authorized key before any of its data is read,
    and the daemon proves its own."""

    frame_bytes = CURVE_BYTES

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        identity: Identity,
        authorized: AuthorizedKeys,
    ) -> None:
        super().__init__(KeyedAccess(authorized))
        self._identity = identity
        self._authorized = authorized
        self._zap = ZapHandler(context, authorized, self.bad_peers)

    @property
    def num_refused(self) -> int:
        """See Security."""
        return self._zap.num_refused

    def protect(self, socket: AnySocket, name: str) -> None:
        """See Security. Without a reply from the ZAP handler libzmq lets no peer connect."""
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._identity.secret_key)
        socket.setsockopt(zmq.ZAP_DOMAIN, name.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._zap.watch(name, socket)

    def watch_ends(self, results: "zmq.Socket[bytes]") -> None:
        """See Security. The ZAP handler watches the socket already."""

    def start(self) -> None:
        """See Security."""
        self._zap.start()

    def report_ends(self, loop: asyncio.AbstractEventLoop, ended: Callable[[], None]) -> None:
        """See Security."""

        def report(name: str) -> None:
            if name == "results":
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(ended)

        self._zap.report_ends(report)

    def reload(self) -> bool:
        """See Security."""
        return self._authorized.reload()

    def stop(self, timeout_s: float) -> bool:
        """See Security."""
        return self._zap.stop(timeout_s)


def open_security(context: "zmq.Context[zmq.Socket[bytes]]", settings: ProcessSettings) -> Security:
    """Read the keys, if there are any.

    Raises:
        ConfigError: a key file cannot be used.
    """
    if settings.key_file is None or settings.authorized_keys is None:
        return Security()
    identity = read_identity(settings.key_file, is_credential=settings.key_is_credential)
    authorized = AuthorizedKeys(settings.authorized_keys)
    _report_cipher()
    return KeySecurity(context, identity, authorized)


def _report_cipher() -> None:
    speed = cipher_mb_s()
    if speed is None:
        logger.warning("the cipher's speed could not be measured")
    elif speed < SLOW_CIPHER_MB_S:
        logger.warning(
            "the cipher encrypts %.0f MB/s, less than %d: messages of 4 KiB take %.0f us longer on "
            "their way; build pyzmq against the system's libzmq and libsodium (docs/security.md)",
            speed,
            SLOW_CIPHER_MB_S,
            2 * 4096 / speed,
        )
    else:
        logger.info("the cipher encrypts %.0f MB/s", speed)


def cipher_mb_s() -> float | None:
    """Return the speed of encryption (and decryption) in 10^6 bytes per second, measured by sending
    ourselves a large message under fresh keys. None if it did not arrive."""
    public, secret = zmq.curve_keypair()
    address = f"ipc://@worker-daemon-{os.getpid()}-{os.urandom(8).hex()}"
    message = bytes(_TEST_BYTES)
    with (
        zmq.Context() as context,
        context.socket(zmq.PULL) as pull,
        context.socket(zmq.PUSH) as push,
    ):
        for socket in (pull, push):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        pull.setsockopt(zmq.CURVE_SERVER, 1)
        push.setsockopt(zmq.CURVE_PUBLICKEY, public)
        push.setsockopt(zmq.CURVE_SERVERKEY, public)
        pull.bind(address)
        push.connect(address)
        best_s = float("inf")
        for content in (b"", *[message] * _TEST_ROUNDS):  # the first: handshake
            began = time.perf_counter()
            push.send(content)
            if not pull.poll(_TEST_LIMIT_MS):
                return None
            pull.recv()
            if content:
                best_s = min(best_s, time.perf_counter() - began)
    return 2 * _TEST_BYTES / best_s / 1e6

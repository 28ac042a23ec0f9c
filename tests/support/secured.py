"""Keys, and daemons that require them: around the fake worker, or real ones."""

import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import zmq

from rpc_schema.errors import WorkerDaemonError
from tests.support.command_line import environment
from tests.support.counted_serve import decoder_calls
from tests.support.forked_processes import ForkedPopen
from tests.support.waiting import PATIENCE_S, wait_until
from worker_client.wire.endpoint import new_driver_id, parse_endpoint
from worker_client.wire.keys import NO_KEYS, Keys, read_keys
from worker_client.wire.worker_client import AskingClient, WorkerClient
from worker_daemon.server.auth.keygen import make_key_files
from worker_host.key_files import SecretKey, read_secret_key

ROLES = ("driver", "observer", "admin")
FIRST_PORT = 10_000
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""First and last of the ports that the kernel chooses from."""


def free_port(count: int = 4) -> int:
    """Return the first of `count` consecutive ports for a daemon that is about to start.

    Nobody takes them until then: the kernel gives them to no connection and to no listener without
    a number of its own, and other processes of tests find them reserved.
    """
    first_of_kernel = int(EPHEMERAL_PORTS.read_text().split()[0])
    end = first_of_kernel if first_of_kernel > 2 * FIRST_PORT else 1 << 16
    while True:
        first = random.SystemRandom().randrange(FIRST_PORT, end - count)
        if all(map(_reserve, range(first, first + count))):
            return first


def _reserve(port: int) -> bool:
    """Reserve a port for the life of this process, by a name that no two processes can have; return
    False if it is reserved, or if somebody listens there."""
    with socket.socket(socket.AF_UNIX) as name:
        try:
            name.bind(f"\0tests-of-worker-daemon-port-{port}")
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            return False
        name.detach()
    return True


class KeyRing:
    """A directory of keys: `daemon`, one for each role, `spare`, a second observer, and `stranger`,
    which is never authorized."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        names = ("daemon", *ROLES, "spare", "stranger")
        self.public = {name: make_key_files(directory / name).public_key for name in names}
        self.authorized = directory / "authorized.json"
        self.known = directory / "known.json"
        self.authorize(*ROLES)
        self.trust({})

    def authorize(self, *roles: str) -> None:
        """Authorize the keys of these roles, and the spare one."""
        entries = [{"key": self.public[role], "role": role, "name": role} for role in roles]
        entries.append({"key": self.public["spare"], "role": "observer", "name": "spare"})
        self.authorized.write_text(json.dumps(entries))

    def trust(self, known: dict[str, str]) -> None:
        """Write the driver's file: public keys by endpoint."""
        self.known.write_text(json.dumps(known))

    def keys(self, name: str) -> Keys:
        """Return a driver's keys, with this key pair."""
        return read_keys(str(self.directory / f"{name}.key"), self.known)

    def secret(self, name: str) -> SecretKey:
        """Return a key pair."""
        return read_secret_key(self.directory / f"{name}.key", "test")

    def options(self, name: str) -> tuple[str, ...]:
        """Return the key options of a client's command line."""
        key_file = str(self.directory / f"{name}.key")
        return "--key-file", key_file, "--known-daemons", str(self.known)

    def serve_options(self) -> tuple[str, ...]:
        """Return the key options of a daemon's command line."""
        own, allowed = self.directory / "daemon.key", self.authorized
        return "--key-file", str(own), "--authorized-keys", str(allowed)


class SecuredDaemon:
    """A daemon process around the fake worker, whose decoders are counted."""

    def __init__(
        self,
        directory: Path,
        endpoint: str,
        *options: str,
        bans: str = "on",
        interpreter: tuple[str, ...] = (),
        keys: Keys = NO_KEYS,
    ) -> None:
        """keys: a client's, to check that it is up."""
        self.endpoint = endpoint
        self.log = directory / f"{free_port(1)}.log"
        self._counters = self.log.with_suffix(".counters")
        self._counters.write_bytes(bytes(16))
        serve = (sys.executable, *interpreter, "-m", "tests.support.counted_serve")
        words = ("serve", "--device", "cpu", "--endpoint", endpoint, "--state-dir", str(directory))
        with self.log.open("wb") as log:
            self.process = ForkedPopen(
                [*serve, str(self._counters), bans, *words, *options],
                stdout=log,
                stderr=log,
            )
        wait_until(
            lambda: answers(endpoint, keys) or self.process.poll() is not None,
            "it answers or has ended",
            60.0,
        )
        assert self.process.poll() is None, self.log.read_text()

    @property
    def decoded(self) -> tuple[int, int]:
        """Return the decoder calls of the control and the step socket."""
        return decoder_calls(self._counters)

    @property
    def rss_bytes(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)


class RealDaemons:
    """Real daemons on tcp with keys, each under an audit hook that records unpickling."""

    def __init__(
        self, directory: Path, ring: KeyRing, devices: Sequence[str], model_root: Path
    ) -> None:
        self.endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in devices]
        self.unpickled = [directory / f"unpickled{index}" for index in range(len(devices))]
        self.log = directory / "real.log"
        ring.trust(dict.fromkeys(self.endpoints, ring.public["daemon"]))
        self._directory = directory
        self._devices = devices
        tcp = ("--model-root", str(model_root), "--data-interface", "lo")
        self._options = ("--state-dir", str(directory / "state"), *tcp, *ring.serve_options())
        self.processes = [self._start(rank) for rank in range(len(devices))]
        for endpoint in self.endpoints:
            wait_until(
                lambda endpoint=endpoint: answers(endpoint, ring.keys("observer")), "it answers", 90
            )

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        own = ("--endpoint", self.endpoints[rank], "--device", self._devices[rank])
        serve = (sys.executable, "-m", "tests.support.audited_serve", self.unpickled[rank], "serve")
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*serve, *own, *self._options],
                stdout=log,
                stderr=log,
                env=environment(self._directory),
            )

    def kill(self, rank: int) -> None:
        """End a daemon as a crash would."""
        self.processes[rank].kill()
        self.processes[rank].wait(PATIENCE_S)

    def restart(self, rank: int) -> None:
        """Restart an ended daemon, as a supervisor would."""
        self.processes[rank] = self._start(rank)

    def listening(self, rank: int) -> tuple[set[str], set[int]]:
        """Return the addresses and ports at which a daemon listens, except its four ports."""
        first = int(self.endpoints[rank].rsplit(":")[-1])
        process = psutil.Process(self.processes[rank].pid)
        found = [entry for entry in process.net_connections("inet") if entry.status == "LISTEN"]
        ports = {entry.laddr.port for entry in found}
        assert ports >= set(range(first, first + 4))
        return {entry.laddr.ip for entry in found}, ports - set(range(first, first + 4))

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(PATIENCE_S)


def answers(endpoint: str, keys: Keys) -> bool:
    """Return True if a daemon answers there."""
    try:
        return ask(endpoint, keys, lambda client: bool(client.hello(0.5)))
    except WorkerDaemonError:
        return False


def ask(endpoint: str, keys: Keys, question: Callable[[WorkerClient], object]) -> object:
    """Send a request to a daemon over a new connection."""
    with zmq.Context() as context:
        client = AskingClient(context, parse_endpoint(endpoint, keys), 0, new_driver_id())
        try:
            return question(client)
        finally:
            client.close()


def dealer(
    context: zmq.Context,
    address: str,
    ring: KeyRing | None,
    name: str,
    kind: int = zmq.DEALER,
    routing_id: bytes = b"",
) -> zmq.Socket:
    """Return a connected bare socket with a key of the ring, or without one."""
    made = unconnected(context, ring, name, kind, routing_id)
    made.connect(address)
    return made


def unconnected(
    context: zmq.Context,
    ring: KeyRing | None,
    name: str,
    kind: int = zmq.DEALER,
    routing_id: bytes = b"",
) -> zmq.Socket:
    """Return such a socket before it connects."""
    made = context.socket(kind)
    made.setsockopt(zmq.LINGER, 0)
    if kind == zmq.SUB:
        made.subscribe(b"")
    else:
        made.setsockopt(zmq.ROUTING_ID, routing_id or b"\x01" + os.urandom(15))
    if ring is not None:
        own = ring.secret(name)
        made.setsockopt(zmq.CURVE_PUBLICKEY, own.public_key.encode())
        made.setsockopt(zmq.CURVE_SECRETKEY, own.secret_key.encode())
        made.setsockopt(zmq.CURVE_SERVERKEY, ring.public["daemon"].encode())
    return made


class BareSockets:
    """Sockets of one test, closed together."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._made: list[zmq.Socket] = []

    def open(
        self, address: str, ring: KeyRing | None, name: str, kind: int = zmq.DEALER
    ) -> zmq.Socket:
        """See dealer()."""
        self._made.append(dealer(self._context, address, ring, name, kind))
        return self._made[-1]

    def unconnected(self, ring: KeyRing | None, name: str, kind: int = zmq.DEALER) -> zmq.Socket:
        """See unconnected()."""
        self._made.append(unconnected(self._context, ring, name, kind))
        return self._made[-1]

    def close(self) -> None:
        self._context.destroy(linger=0)  # also monitors of a failed test

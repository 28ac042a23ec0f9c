"""`python -m tests.support.fuzz` runs every fuzzer of TARGETS, or --only some, and prints the
results. This module has that of the sockets: random and structured frames for a daemon with keys
and one without."""

import argparse
import contextlib
import json
import random
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec
import zmq

from rpc_schema.codec import encode_control
from rpc_schema.lifecycle import Shutdown
from tests.contract.random_messages import fixed_example, messages
from tests.support import fuzz_grammars, fuzz_kv, fuzz_patterns, fuzz_requests, fuzz_templates
from tests.support.secured import BareSockets, KeyRing, SecuredDaemon, answers, ask
from tests.support.waiting import PATIENCE_S, wait_until
from worker_client.wire.endpoint import Endpoint, parse_endpoint
from worker_client.wire.keys import NO_KEYS

MAX_GROWTH_BYTES = 64 << 20
QUIET_S = 0.3
ENOUGH = 200
"""Frames, answers and decoder calls at least, whatever the time limit: a busy host may not run the
daemon in that time."""
LATEST_S = PATIENCE_S
"""Time after a time limit in which there must be enough."""
BURST = 200
"""Frames between two checks of the replies."""
SHUTDOWN = encode_control(Shutdown(call=1))[:2]
"""Shutdown request, which is never sent: without keys, it would end the daemon."""


def valid_messages() -> list[bytes]:
    """Return one encoded message of every request."""
    kinds = [kind for name in ("control", "step") for kind in messages(name)]
    return [msgspec.msgpack.encode(fixed_example(kind)) for kind in kinds]


def hostile_messages(seed: int) -> Iterator[list[bytes]]:
    """Yield an endless sequence of hostile messages."""
    source = random.Random(seed)
    valid = valid_messages()
    while True:
        frames = [_frame(source, valid) for _ in range(source.choice((1, 1, 1, 1, 2, 3, 6, 7, 20)))]
        if not frames[0].startswith(SHUTDOWN):
            yield frames


def _frame(source: random.Random, valid: list[bytes]) -> bytes:
    kind = source.randrange(8)
    if kind == 0:
        return source.randbytes(source.randrange(200))
    if kind == 1:
        return source.choice((b"\x91", b"\x81", b"\x92\x01")) * source.randrange(3000)
    if kind == 2:
        header = source.choice(
            (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff")
        )
        return source.choice((b"", b"\x93\x01")) + header + source.randbytes(8)
    message = bytearray(source.choice(valid))
    if kind == 3:
        return bytes(message[: source.randrange(len(message) + 1)])
    if kind == 4:
        at = source.randrange(len(message))
        return bytes(message[:at] + message[at // 2 :])
    for _ in range(source.choice((0, 1, 1, 2, 4))):
        message[source.randrange(len(message))] = source.randrange(256)
    return bytes(message)


class Sent:
    """Counts of a fuzzer."""

    frames = 0
    answers = 0


def fuzz(
    addresses: Endpoint,
    ring: KeyRing | None,
    num_frames: int,
    seconds: float,
    seed: int,
    is_enough: Callable[[Sent], bool] = lambda _: True,
) -> Sent:
    """Send messages to all four sockets until one of the limits. ring: the driver's key is used.
    is_enough: a time limit waits for it."""
    sockets, sent = BareSockets(), Sent()
    own = [
        sockets.open(address, ring, "driver", zmq.XSUB if name == "events" else zmq.DEALER)
        for name, address in zip(Endpoint._fields[:4], addresses[:4], strict=True)
    ]
    ends = time.monotonic() + seconds
    for number, frames in enumerate(hostile_messages(seed)):
        chosen = own[0 if number % 2 else number // 2 % 4]
        try:
            chosen.send_multipart(frames, zmq.NOBLOCK)
            sent.frames += len(frames)
        except zmq.Again:
            time.sleep(0.0005)
        if number % BURST == 0:
            for each in own:
                while each.poll(0):
                    each.recv_multipart()
                    sent.answers += 1
            late_s = time.monotonic() - ends
            if sent.frames >= num_frames or late_s > (0.0 if is_enough(sent) else LATEST_S):
                break
    sockets.close()
    return sent


GREETINGS = [
    b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)
    for mechanism in (b"NULL", b"PLAIN", b"CURVE")
]
READY = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\0\0\0\0"
HELLO = b"\x04\xc8\x05HELLO\x01\x00"


def fuzz_as_stranger(addresses: Endpoint, num_frames: int, seconds: float, seed: int) -> Sent:
    """Send bytes to all four sockets of an ipc endpoint without a key and without waiting for the
    handshake: messages after greetings of every kind, and random bytes."""
    sent, source, ends = Sent(), random.Random(seed), time.monotonic() + seconds
    for number, frames in enumerate(hostile_messages(seed)):
        greeting = source.choice((*GREETINGS, b"", source.randbytes(64)))
        opening = source.choice((READY, HELLO + source.randbytes(193), b"", source.randbytes(9)))
        body = b"".join(b"\x02" + len(f).to_bytes(8, "big") + f for f in frames)
        with socket.socket(socket.AF_UNIX) as made, contextlib.suppress(OSError):
            made.connect(addresses[number % 4].removeprefix("ipc://"))
            made.settimeout(1.0)
            made.sendall(greeting + opening + body)
            sent.frames += len(frames)
            if source.randrange(4) == 0:
                sent.answers += bool(made.recv(64))
        is_over = time.monotonic() > ends and sent.frames > ENOUGH
        if sent.frames >= num_frames or is_over:
            return sent
    raise AssertionError("hostile messages do not end")


def settled(daemon: SecuredDaemon) -> tuple[int, int]:
    """Return the decoder counts once everything sent has been processed: for a while they stay the
    same, and no thread wants to run."""
    seen, since = daemon.decoded, time.monotonic()
    while time.monotonic() - since < QUIET_S:
        time.sleep(QUIET_S / 10)
        if daemon.decoded != seen or not all_sleep(daemon.process.pid):
            seen, since = daemon.decoded, time.monotonic()
    return seen


def all_sleep(pid: int) -> bool:
    """Return True if no thread of a process runs or wants to: each waits, or was stopped."""
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # one of them has just ended
        return False
    return all(stat.rpartition(")")[2].split()[0] in "ST" for stat in stats)


def fuzz_daemon(
    directory: Path, with_keys: bool, num_frames: int, seconds: float, seed: int
) -> dict[str, object]:
    """Start a daemon that bans no peer, fuzz it, and return the results.

    Raises AssertionError if it died, does not answer, grew too much, or decoded a stranger's
    message."""
    ring = KeyRing(directory / f"keys-{with_keys}")
    endpoint = f"ipc://{directory}/f{int(with_keys)}/w0"
    ring.trust({endpoint: ring.public["daemon"]})
    keys = ring.keys("driver") if with_keys else NO_KEYS
    options = ring.serve_options() if with_keys else ()
    daemon = SecuredDaemon(
        directory, endpoint, *options, "--log-level", "error", bans="off", keys=keys
    )
    try:
        addresses, used = parse_endpoint(endpoint, keys), ring if with_keys else None
        fuzz(addresses, used, 5000, seconds, seed + 1)  # caches and allocators fill once
        decoded = settled(daemon)
        before = daemon.rss_bytes
        strange = Sent()
        if with_keys:
            strange = fuzz_as_stranger(addresses, num_frames, seconds, seed + 2)
            assert settled(daemon) == decoded, "something of a stranger's was decoded"
        began = time.monotonic()

        def is_enough(sent: Sent) -> bool:
            calls = (now - then for now, then in zip(daemon.decoded, decoded, strict=True))
            return min(sent.answers, *calls) > ENOUGH

        sent = fuzz(addresses, used, num_frames, seconds, seed, is_enough)
        wait_until(lambda: answers(endpoint, keys), "it answers", 60)
        assert daemon.process.poll() is None, daemon.log.read_text()[-2000:]
        health = ask(endpoint, keys, lambda client: client.check_health())
        assert health.healthy
        growth = daemon.rss_bytes - before
        assert growth < MAX_GROWTH_BYTES, f"it grew by {growth >> 20} MiB"
        return {
            "keys": with_keys,
            "frames": sent.frames,
            "answers": sent.answers,
            "frames_of_strangers": strange.frames,
            "decoded": [now - then for now, then in zip(daemon.decoded, decoded, strict=True)],
            "growth_mib": round(growth / (1 << 20), 1),
            "seconds": round(time.monotonic() - began, 1),
        }
    finally:
        daemon.stop()


def fuzz_sockets(num_frames: int, seconds: float, seed: int) -> dict[str, object]:
    """Fuzz a daemon without keys and one with."""
    directory = Path(tempfile.mkdtemp(prefix="fz-"))
    try:
        return {
            name: fuzz_daemon(directory, with_keys, num_frames, seconds, seed)
            for name, with_keys in (("without keys", False), ("with keys", True))
        }
    finally:
        shutil.rmtree(directory)


TARGETS: Mapping[str, Callable[[float, int], dict[str, object]]] = MappingProxyType(
    {
        "grammars": fuzz_grammars.fuzz,
        "kv": fuzz_kv.fuzz,
        "patterns": fuzz_patterns.fuzz,
        "requests": fuzz_requests.fuzz,
        "templates": fuzz_templates.fuzz,
    }
)
"""Fuzzers besides that of the sockets: each is called with seconds and a seed, returns a summary,
and raises AssertionError."""
SOCKETS = "sockets"


def main() -> None:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[SOCKETS, *TARGETS], action="append")
    parser.add_argument("--frames", type=int, default=1_000_000, help="for each socket")
    parser.add_argument("--seconds", type=float, help="600, and for the sockets 3600")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    given = parser.parse_args()
    print(f"seed {given.seed}")
    for name in given.only or [SOCKETS, *TARGETS]:
        if name == SOCKETS:
            found = fuzz_sockets(given.frames, given.seconds or 3600.0, given.seed)
        else:
            found = TARGETS[name](given.seconds or 600.0, given.seed)
        print(name, json.dumps(found))
        sys.stdout.flush()


if __name__ == "__main__":
    main()

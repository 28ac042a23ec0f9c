"""`python -m tests.support.counted_serve FILE BANS ARGS`: the daemon's real command line around the
fake worker, which counts in FILE the calls of its decoders: two numbers of 8 bytes, for the control
and the step socket. BANS: `on`, or `off` for a daemon that must read everything that a fuzzer
sends."""

import mmap
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.server.fake_serve import FakeRendezvous
from tests.unit.server.fake_worker import make_fake_worker
from worker_daemon.cli import app
from worker_daemon.server import assembly, control, step_thread
from worker_daemon.server.auth import bad_peers

CONTROL, STEP = range(2)


def decoder_calls(file: Path) -> tuple[int, int]:
    """Return the calls so far, of the control and of the step socket."""
    return struct.unpack("<2q", file.read_bytes())


def counting(decode: Callable, counters: mmap.mmap, index: int) -> Callable:
    """Return a counting decoder; each counter has one thread."""

    def counted(frames):
        (calls,) = struct.unpack_from("<q", counters, 8 * index)
        struct.pack_into("<q", counters, 8 * index, calls + 1)
        return decode(frames)

    return counted


def main() -> None:
    """Serve."""
    name, bans = sys.argv[1:3]
    del sys.argv[1:3]
    with open(name, "r+b") as file, pytest.MonkeyPatch.context() as patch:  # noqa: PTH123
        counters = mmap.mmap(file.fileno(), 16)
        patch.setattr(control, "decode_control", counting(control.decode_control, counters, 0))
        patch.setattr(step_thread, "decode_step", counting(step_thread.decode_step, counters, 1))
        patch.setattr(assembly, "make_worker", make_fake_worker)
        patch.setattr(assembly, "open_rendezvous", FakeRendezvous)
        if bans == "off":
            patch.setattr(bad_peers, "BAN_S", 0.0)
        app()


if __name__ == "__main__":
    main()

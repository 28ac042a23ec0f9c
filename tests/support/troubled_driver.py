"""`python -m tests.support.troubled_driver TTL_S ENDPOINT [KEY_FILE KNOWN_DAEMONS]`: a driver of
one daemon with the fake worker, in a process of its own, that gets into trouble on command. It
steps all the time and writes the daemon's count of steps for each; a line on stdin is a command:

- `hold S`: send a step, write `holding SEQ`, and keep every thread from running Python for S
  seconds; then go on.
- `fork`: fork a child that holds the sockets open; writes `child PID`.

At its end it writes the name of the error that ended it."""

import ctypes
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rpc_schema.config import ParallelConfig
from rpc_schema.errors import WorkerDaemonError
from tests.support.forked_processes import ForkedPopen
from tests.support.leased_driver import admit, decode, make_ready
from worker_client.scheduler_output import SchedulerOutput
from worker_client.wire.keys import NO_KEYS, read_keys
from worker_client.wire.lease import LeaseTerms
from worker_client.worker_group import WorkerGroup


def hold(seconds: float) -> None:
    """Sleep in C without releasing the GIL."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def run(group: WorkerGroup, command: str) -> None:
    word, *args = command.split()
    if word == "hold":
        future = group.execute_model(SchedulerOutput({"none": 1}))
        print("holding", future.seq, flush=True)
        hold(float(args[0]))
        print(future.result().sampled["none"], flush=True)
    elif word == "fork":
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        print("child", child, flush=True)


def main(ttl_s: float, endpoint: str, *key_files: str) -> None:
    keys = read_keys(key_files[0], Path(key_files[1])) if key_files else NO_KEYS
    terms = LeaseTerms(ttl_s=ttl_s)
    try:
        with WorkerGroup([endpoint], ParallelConfig(), keys, lease=terms) as group:
            group.attach()
            make_ready(group)
            print(admit(group), flush=True)
            while True:
                print(decode(group), flush=True)
                time.sleep(0.005)
                if select.select([sys.stdin], [], [], 0)[0]:
                    run(group, sys.stdin.readline())
    except WorkerDaemonError as error:
        print(type(error).__name__, flush=True)
        raise SystemExit(3) from None


class TroubledDriver:
    """The process, from a test's side."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.pid = process.pid

    def line(self) -> str:
        """Return its next line; empty at its end."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def step(self) -> int:
        """Return its next count of steps."""
        return int(self.line())

    def rest(self) -> list[str]:
        """Return its other lines, once it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.read().split()

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def await_line(self, start: str) -> str:
        """Return its next line that begins so."""
        while not (line := self.line()).startswith(start):
            assert line, "it has ended"
        return line

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


@contextmanager
def troubled_driver(
    endpoint: str, *key_files: str, ttl_s: float = 30.0, prefix: tuple[str, ...] = ()
) -> Iterator[TroubledDriver]:
    """Start a driver, wait for its first step, and end it on exit. prefix: of its command."""
    words = [*prefix, sys.executable, "-m", "tests.support.troubled_driver", str(ttl_s), endpoint]
    pipe = subprocess.PIPE
    with ForkedPopen([*words, *key_files], stdin=pipe, stdout=pipe, text=True) as process:
        try:
            driver = TroubledDriver(process)
            assert driver.line().isdecimal()
            yield driver
        finally:
            process.kill()


if __name__ == "__main__":
    main(float(sys.argv[1]), *sys.argv[2:])

"""Daemons that leave KV blocks to their successors, and what happens to files of blocks."""

import random
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.forked_daemons import ForkedDaemons
from tests.support.serving import kill_and_wait
from worker_client.launcher import serve_command

READY_TIMEOUT_S = 60.0
HEADER_BYTES = 128
"""Of a file, before its block."""


class FilingDaemons(ForkedDaemons):
    """Local daemons with a directory each, given by an option."""

    def __init__(
        self,
        num_daemons: int,
        model_root: Path,
        directory: Path,
        *options: str,
        option: str = "--kv-file-dir",
        host_directory: Path | None = None,
    ) -> None:
        """host_directory: on a tmpfs, for their host memory too."""
        self.directories = [directory / str(rank) for rank in range(num_daemons)]

        def command(endpoint: str, device: str, pipe: int) -> Sequence[str]:
            rank = endpoint.rpartition("/w")[2]
            own = str(self.directories[int(rank)])
            root = ("--model-root", str(model_root), "--lora-root", str(model_root))
            kept = () if host_directory is None else ("--kv-host-dir", str(host_directory / rank))
            build = serve_command(*root, option, own, *kept, *options)
            return build(endpoint, device, pipe)

        super().__init__(["cpu"] * num_daemons, model_root, command=command)

    def kill(self) -> None:
        """Kill -9 all of them, start successors, and return once these answer."""
        for pid in self.pids:
            kill_and_wait(pid)
        self.restart()

    def restart(self) -> None:
        """Start successors of those that were killed, and return once these answer."""
        self.restart_dead()
        self._wait_until_ready(time.monotonic() + READY_TIMEOUT_S, READY_TIMEOUT_S)

    @property
    def files(self) -> list[Path]:
        """Files with blocks, of all ranks."""
        found = (each for own in self.directories for each in sorted(own.glob("*/*/*")))
        return [each for each in found if each.suffix != ".tmp"]


def settled(group):
    """The status of each rank's files, once nothing is being written."""
    before, now = None, [status.kv_files for status in group.get_status()]
    while before != now:
        time.sleep(0.1)
        before, now = now, [status.kv_files for status in group.get_status()]
    return now


def damage(rng: random.Random, path: Path) -> None:
    """Change a file in one of the ways in which a disk or an administrator may, unless it was cut
    before."""
    raw = bytearray(path.read_bytes())
    if len(raw) <= HEADER_BYTES:
        return
    kind = rng.choice(["cut", "header", "block", "swapped", "directory", "link"])
    if kind == "cut":
        path.write_bytes(raw[: rng.randrange(len(raw))])
    elif kind in ("header", "block"):
        first = 0 if kind == "header" else HEADER_BYTES
        last = HEADER_BYTES if kind == "header" else len(raw)
        raw[rng.randrange(first, last)] ^= 1 << rng.randrange(8)
        path.write_bytes(raw)
    elif kind == "swapped":
        found = (each for each in path.parent.parent.glob("*/*") if each.is_file())
        other = rng.choice(sorted(found))
        other_raw = other.read_bytes()
        other.write_bytes(raw)
        path.write_bytes(other_raw)
    elif kind == "directory":
        path.unlink()
        path.mkdir()
    else:
        target = path.with_name("elsewhere")
        path.rename(target)
        path.symlink_to(target)

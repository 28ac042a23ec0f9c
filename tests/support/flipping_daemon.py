"""`python -m tests.support.flipping_daemon FLIPS_FILE serve ...`: the real daemon, whose host
memory changes a bit of some blocks just before they are loaded, or on their way to another group,
as a file says: of one of so many, and a seed. It writes beside it how many it has changed."""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.forked_daemons import ForkedDaemons
from worker_daemon.__main__ import main as run_command_line
from worker_daemon.server import assembly


class FlipsFile:
    """The mailbox between a test and one daemon."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._done = path.with_suffix(".done")

    def put(self, one_of: int, seed: int, where: str = "host") -> None:
        """Change a bit of one of so many blocks, at random, from now on; 0: of none. where: in host
        memory before a load, or in "transit" to another group."""
        draft = self._path.with_suffix(".draft")
        draft.write_text(json.dumps([one_of, seed, where]))
        draft.rename(self._path)

    def get(self, where: str) -> tuple[int, int]:
        """What was put last."""
        if not self._path.exists():
            return 0, 0
        one_of, seed, place = json.loads(self._path.read_text())
        return (one_of, seed) if place == where else (0, 0)

    @property
    def num_done(self) -> int:
        """Number of blocks that were changed."""
        return int(self._done.read_text()) if self._done.exists() else 0

    def add_done(self) -> None:
        """Count a changed block."""
        self._done.write_text(str(self.num_done + 1))


class FlippingDaemons(ForkedDaemons):
    """Local daemons with a file each."""

    def __init__(
        self, num_daemons: int, model_root: Path, directory: Path, python: str = sys.executable
    ) -> None:
        """python: the interpreter of the daemons' environment."""
        self.flips = [FlipsFile(directory / f"{rank}.flips") for rank in range(num_daemons)]

        def command(endpoint: str, device: str, pipe: int) -> Sequence[str]:
            path = directory / f"{int(endpoint.rpartition('/w')[2])}.flips"
            entry = (python, "-m", "tests.support.flipping_daemon", str(path))
            options = ("serve", "--endpoint", endpoint, "--device", device)
            roots = ("--model-root", str(model_root), "--exit-with-parent-fd", str(pipe))
            return (*entry, *options, *roots)

        super().__init__(["cpu"] * num_daemons, model_root, command=command)


def main(patch: pytest.MonkeyPatch) -> None:
    """Run the daemon's own command line with a host tier that changes bits."""
    flips = FlipsFile(Path(sys.argv.pop(1)))
    make_worker = assembly.make_worker

    def make_flipping(*args: object, **options: object) -> object:
        worker = make_worker(*args, **options)
        from worker_daemon.device.host_rows import HostRows  # torch is loaded here, not before
        from worker_daemon.runner.connectors.host_tier import HostTier, Moves
        from worker_daemon.runner.connectors.peers import _PeerLink

        opened: list[HostRows] = []
        open_rows, load_beside, rng = HostRows.__init__, HostTier.load_beside, random.Random()

        def note(self: HostRows, *args: object) -> None:
            open_rows(self, *args)
            opened[:] = [self]

        def flip(self: HostTier, step: object) -> object:
            one_of, seed = flips.get("host")
            rng.seed(f"{seed}-{step.seq}")
            for _, moves in step.step_values.data:
                for slot in moves.load_slots.tolist() if isinstance(moves, Moves) else ():
                    if one_of and not rng.randrange(one_of):
                        row = opened[0].rows[slot]
                        row[rng.randrange(len(row))] ^= 1 << rng.randrange(8)
                        flips.add_done()
            return load_beside(self, step)

        def flip_sent(self: _PeerLink, routes: object, contents: object) -> object:
            one_of, seed = flips.get("transit")
            words = packed(self, routes, contents)
            rng.seed(f"{seed}-{contents.slots.tolist()}")
            for row, name in zip(words.numpy().view(np.uint8), contents.names, strict=True):
                if one_of and not rng.randrange(one_of):
                    row[rng.randrange(len(row))] ^= 1 << rng.randrange(8)
                    if name.tobytes() not in changed:  # it comes in several pieces
                        flips.add_done()
                    changed.add(name.tobytes())
            return words

        packed, changed = _PeerLink._packed, set[bytes]()
        patch.setattr(_PeerLink, "_packed", flip_sent)
        patch.setattr(HostRows, "__init__", note)
        patch.setattr(HostTier, "load_beside", flip)  # which comes before load
        return worker

    patch.setattr(assembly, "make_worker", make_flipping)
    run_command_line()


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as monkeypatch:
        main(monkeypatch)

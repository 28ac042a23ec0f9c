"""Daemons that may save weights."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.forked_daemons import ForkedDaemons
from worker_client.launcher import LocalDaemons


@contextmanager
def saving_daemons(model_root: Path, *save_roots: Path | None) -> Iterator[LocalDaemons]:
    """A daemon for each save root; None gives it none."""
    roots = iter(save_roots)

    def command(endpoint: str, device: str, pipe: int) -> list[str]:
        options = {
            "--endpoint": endpoint,
            "--device": device,
            "--model-root": str(model_root),
            "--exit-with-parent-fd": str(pipe),
        }
        root = next(roots)
        options |= {"--save-root": str(root)} if root is not None else {}
        words = [word for option in options.items() for word in option]
        return [sys.executable, "-m", "worker_daemon", "serve", *words]

    with ForkedDaemons(["cpu"] * len(save_roots), model_root, command=command) as daemons:
        yield daemons

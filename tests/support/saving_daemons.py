"""Daemons that may save weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

from tests.support.forked_daemons import ForkedDaemons
from worker_client.launcher import LocalDaemons, serve_command


@contextmanager
def saving_daemons(model_root: Path, *save_roots: Path | None) -> Iterator[LocalDaemons]:
    """A daemon for each save root; None gives it none. A daemon that is restarted has that of the
    first."""
    roots = cycle(save_roots)

    def command(endpoint: str, device: str, pipe: int) -> Sequence[str]:
        root = next(roots)
        saves = () if root is None else ("--save-root", str(root))
        return serve_command("--model-root", str(model_root), *saves)(endpoint, device, pipe)

    with ForkedDaemons(["cpu"] * len(save_roots), model_root, command=command) as daemons:
        yield daemons

"""The daemons that a benchmark starts, and the group that drives them."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rpc_schema.config import ModelConfig, ParallelConfig
from worker_client.launcher import Command, LocalDaemons
from worker_client.worker_group import WorkerGroup


def devices_of(kind: str, count: int = 1) -> list[str]:
    """Return a device for each of `count` ranks: the CPU ("cpu"), or the first GPUs ("cuda")."""
    return ["cpu" if kind == "cpu" else f"cuda:{index}" for index in range(count)]


def dummy_model(path: Path, device: str, max_model_len: int) -> ModelConfig:
    """Return a model with weights of no meaning, in the type that benchmarks on a kind of device
    use. path: of its config.json."""
    return ModelConfig(
        model=str(path.resolve()),
        dtype="float32" if device == "cpu" else "bfloat16",
        load_format="dummy",
        max_model_len=max_model_len,
    )


class LocalGroup(NamedTuple):
    """A group and its daemons, from local_group's entry to its exit."""

    group: WorkerGroup
    """Attached, with nothing loaded."""
    daemons: LocalDaemons


@contextmanager
def local_group(
    devices: Sequence[str],
    model_root: Path,
    parallel: ParallelConfig | None = None,
    command: Command | None = None,
) -> Iterator[LocalGroup]:
    """Start a daemon for each device and attach to all; stop them at the end. If the block fails,
    the ends of their logs go to standard error.

    model_root: the directory that they may read models under. parallel: None is a single rank.
    command: the daemons' command lines, if they need further options (serve_command).

    Raises:
        LaunchError: a daemon did not start; none is left behind.
    """
    with (
        LocalDaemons(devices, model_root, command=command) as daemons,
        WorkerGroup(daemons.endpoints, parallel or ParallelConfig()) as group,
    ):
        try:
            group.attach()
            yield LocalGroup(group, daemons)
        except BaseException:
            for rank in range(len(devices)):
                print(f"# log of rank {rank}\n{daemons.log_tail(rank)}", file=sys.stderr)
            raise

"""`worker-client trace`: one trace of all ranks and the driver of a running group."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from client.cli.control import Endpoints, named_daemons
from client.cli.daemons import connect
from client.cli.options import KeyFile, KnownDaemons
from client.errors import ClientConfigError
from client.keys import read_keys
from client.observer import Recorded, record
from client.trace_merge import Summary, merge_traces

Seconds = Annotated[float, typer.Option(help="How long the steps are recorded.")]
Out = Annotated[Path, typer.Option(help="Where the trace goes; a file there is replaced.")]


def trace(
    endpoints: Endpoints,
    seconds: Seconds = 5.0,
    out: Out = Path("trace.json.gz"),
    key_file: KeyFile = "",
    known_daemons: KnownDaemons = None,
) -> None:
    """Trace a running group, whoever drives it, for Perfetto (ui.perfetto.dev). Needs the role
    admin, where there are keys."""
    keys = read_keys(key_file, known_daemons)
    if not out.parent.is_dir() or out.is_dir():
        raise ClientConfigError(
            "no file can be there", field="out", value=str(out), fix="name a file in a directory"
        )
    with connect(named_daemons(endpoints), keys) as clients:
        recorded = record(clients, seconds)
    summary = _write(recorded, out)
    console = Console()
    for line in _lines(summary):
        console.print(line, markup=False, highlight=False)
    console.print(f"wrote {out}", markup=False, highlight=False, soft_wrap=True)


def _write(recorded: Recorded, out: Path) -> Summary:
    """The whole file or none."""
    try:
        number, name = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
        try:
            with os.fdopen(number, "wb") as file:
                summary = merge_traces(recorded.ranks, recorded.driver, recorded.begin_ns, file)
            Path(name).replace(out)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as error:
        raise ClientConfigError(
            f"it cannot be written: {error.strerror}",
            field="out",
            value=str(out),
            fix="name a file in a directory that you may write, on a disk with space",
        ) from error
    return summary


def _lines(summary: Summary) -> list[str]:
    lines = [
        f"rank {entry.rank}: {entry.num_steps} steps, {entry.num_events} events, "
        f"times within {entry.clock_bound_ns / 1000:.0f} us"
        for entry in summary.ranks
    ]
    if summary.driver_clock_bound_ns is None:
        return [*lines, "driver: it did not answer (it answers while it waits for steps)"]
    bound_us = summary.driver_clock_bound_ns / 1000
    return [*lines, f"driver: {summary.num_driver_steps} steps, times within {bound_us:.0f} us"]

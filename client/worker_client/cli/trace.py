"""`worker-client trace`: one trace of all ranks and the driver of a running group."""

from pathlib import Path
from typing import Annotated

import typer

from worker_client.cli.daemons import RunningDaemons
from worker_client.cli.options import takes_groups
from worker_client.cli.output_file import check_writable, print_text, replacement
from worker_client.tracing.observer import Recorded, record
from worker_client.tracing.trace_merge import Summary, merge_traces

Seconds = Annotated[float, typer.Option(help="Seconds to record.")]
Out = Annotated[Path, typer.Option(help="File for the trace; replaced if it exists.")]


@takes_groups
def trace(
    daemons: RunningDaemons, seconds: Seconds = 5.0, out: Out = Path("trace.json.gz")
) -> None:
    """Trace a running group with any driver, for Perfetto (ui.perfetto.dev). Needs the role admin,
    if there are keys."""
    check_writable(out, "out")
    with daemons.connect() as clients:
        recorded = record(clients, seconds)
    summary = _write(recorded, out)
    print_text("".join(f"{line}\n" for line in [*_lines(summary), f"wrote {out}"]))


def _write(recorded: Recorded, out: Path) -> Summary:
    """Write or replace the file atomically. Raises OutputError."""
    with replacement(out, "out") as file:
        return merge_traces(recorded.ranks, recorded.drivers, recorded.begin_ns, file)


def _lines(summary: Summary) -> list[str]:
    lines = [
        f"rank {entry.rank}: {entry.num_steps} steps, {entry.num_events} events, "
        f"times within {entry.clock_bound_ns / 1000:.0f} us"
        for entry in summary.ranks
    ]
    for driver in summary.drivers:
        if driver.clock_bound_ns is None:
            problem = "it did not answer (it answers while it waits for steps)"
            lines.append(f"{driver.name}: {problem}")
        else:
            bound_us = driver.clock_bound_ns / 1000
            lines.append(f"{driver.name}: {driver.num_steps} steps, times within {bound_us:.0f} us")
    return lines

"""`worker-client status`, `drain` and `shutdown`: control requests to daemons, without
attaching."""

import json
from functools import partial
from typing import Annotated

import msgspec
import numpy as np
import typer

from rpc_schema.expert_placement import RankPlacement
from rpc_schema.kv_files import KVFilesStatus
from rpc_schema.lease import LeaseStatus
from rpc_schema.lifecycle import Drain, KVCacheAdvice, ReplyDelay, Status
from worker_client.cli.daemons import RunningDaemons
from worker_client.cli.options import takes_groups
from worker_client.cli.output_file import print_text
from worker_client.cli.probe import Probe, run_probe
from worker_client.cli.top_frame import held_blocks, host_tier_text, leased, rate_text
from worker_client.errors import config_error
from worker_client.group.expert_loads import imbalance, loads_by_layer
from worker_host.plain_text import printable

AsJson = Annotated[bool, typer.Option("--json", help="One JSON array on standard output.")]
MIB = 1 << 20
DRAIN_WITHIN_S = 90.0
"""More than the default step deadline."""


@takes_groups
def status(
    daemons: RunningDaemons,
    as_json: AsJson = False,
    probe: Annotated[
        Probe | None, typer.Option(help="Print nothing: exit with 1 if a daemon fails the probe.")
    ] = None,
) -> None:
    """Show the state of each daemon."""
    if as_json and probe is not None:
        raise config_error("probe", probe.value, "a probe prints no status", "leave out --json")
    if probe is not None:
        raise typer.Exit(run_probe(daemons.names, probe, daemons.keys(), daemons.wait))
    with daemons.connect() as clients:
        for client in clients:
            client.hello()
        statuses = [client.get_status() for client in clients]
    if as_json:
        print_text(json.dumps([_named(s) for s in statuses]) + "\n")
    else:
        print_text("\n".join(map(_block, statuses)))


@takes_groups
def drain(
    daemons: RunningDaemons,
    undo: Annotated[bool, typer.Option("--undo", help="Take steps and drivers again.")] = False,
    within: Annotated[
        float, typer.Option(help="Seconds for the running steps to end.", min=0.0)
    ] = DRAIN_WITHIN_S,
) -> None:
    """Make daemons refuse new steps and new drivers; they keep everything loaded. Waits for the
    running steps. Needs the role admin, if there are keys."""
    with daemons.connect() as clients:
        for client in clients:
            client.hello()
        for call in [client.begin(partial(Drain, undo=undo), within) for client in clients]:
            call.result()
        for status in [client.get_status() for client in clients]:
            print_text(f"{status.endpoint}: {status.serving}, {_holder(status.lease)}\n")


@takes_groups
def shutdown(daemons: RunningDaemons) -> None:
    """Stop daemons; a running step is finished first. Needs the role admin, if there are keys."""
    with daemons.connect() as clients:
        for client in clients:  # all of them, before one ends
            client.hello()
        for client in clients:
            client.shutdown()


def _named(status: Status) -> dict[str, object]:
    config, kv_cache = status.config, status.kv_cache
    loads = loads_by_layer([status]).items()
    own = {
        "expert_loads": [{"layer": layer, "counts": counts.tolist()} for layer, counts in loads],
        "expert_placements": [_placement(entry) for entry in status.expert_placements],
        "config": None if config is None else config.fingerprint(),
        "model": None if config is None else config.model.model,
        "num_blocks": None if kv_cache is None else kv_cache.num_blocks,
    }
    fields = msgspec.structs.asdict(status)
    del fields["kv_cache"]
    return {name: _object(value) for name, value in fields.items() if name not in own} | own


def _placement(entry: RankPlacement) -> dict[str, object]:
    experts, moved = (np.frombuffer(each, "<u2").tolist() for each in (entry.experts, entry.moved))
    return {"layer": entry.layer, "experts": experts, "moved": moved}


def _object(value: object) -> object:
    """Return a field's value for JSON: a struct by the names of its fields, bytes as hex."""
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.asdict(value)
        return {name: _object(field) for name, field in fields.items()}
    return value.hex() if isinstance(value, bytes) else value


def _memory(status: Status) -> str:
    uses = status.memory_bytes.items()
    return ", ".join(f"{use} {num_bytes // MIB} MiB" for use, num_bytes in uses)


def _advice(advice: KVCacheAdvice) -> str:
    return (
        f"--kv-cache-memory-bytes {advice.request_bytes} would fit the request, "
        f"{advice.card_bytes} would fill the card"
    )


def _kv_files(files: KVFilesStatus) -> str:
    return (
        f"{files.num_files} files, {files.size_bytes // MIB} of {files.most_bytes // MIB} MiB; "
        f"{files.num_stored} blocks stored{rate_text(files.written)}, {files.num_dropped} dropped, "
        f"{files.num_failed} failed; {files.num_loaded} loaded{rate_text(files.read)}, "
        f"{files.num_invalid} of these invalid; "
        f"{files.num_bad_files} bad files"
    )


def _delays(delay: ReplyDelay) -> str:
    return (
        f"the last {delay.num_replies} results were sent within {delay.p50_us:.0f} us (p50), "
        f"{delay.p99_us:.0f} us (p99) of being on the host"
    )


def _imbalances(status: Status) -> str:
    """Return the imbalance of each layer with experts as text; empty for a model without any."""
    loads = loads_by_layer([status]).items()
    ratios = ", ".join(f"{layer}: {imbalance(counts):.2f}" for layer, counts in loads)
    return f"busiest over mean by layer: {ratios}" if ratios else ""


def _holder(lease: LeaseStatus) -> str:
    return f"its driver: {leased(lease)}" if lease.state in ("held", "claimable") else "no driver"


def _block(status: Status) -> str:
    """Return a daemon's status as text, a line for each non-empty entry."""
    asleep = [f"{tag} {held}" for tag, held in status.memory_tags.items() if held != "awake"]
    lines = {
        "daemon": f"{status.endpoint}, pid {status.pid}, {status.device}, rank {status.rank}",
        "state": f"{status.serving}, {status.load}, link {status.link_state}",
        "driver": f"{leased(status.lease)}; epoch {status.epoch}, step {status.last_seq}",
        "model": "none" if status.config is None else status.config.model.model,
        "providers": ", ".join(f"{part} {name}" for part, name in status.providers.items()),
        "memory": _memory(status),
        "kv cache": "" if status.kv_cache is None else held_blocks(status),
        "host tier": "" if status.host_tier is None else host_tier_text(status.host_tier),
        "kv files": "" if status.kv_files is None else _kv_files(status.kv_files),
        "advice": "" if status.kv_cache_advice is None else _advice(status.kv_cache_advice),
        "experts": _imbalances(status),
        "asleep": ", ".join(asleep),
        "replies": _delays(status.reply_delay) if status.reply_delay.num_replies else "",
        "last event": status.transitions[-1] if status.transitions else "",
        "degraded": status.degraded,
        "failure": status.failure,
    }
    return "".join(f"{name:<10} {printable(line)}\n" for name, line in lines.items() if line)

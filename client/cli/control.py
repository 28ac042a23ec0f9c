"""`worker-client status` and `worker-client shutdown`: they talk to daemons without attaching."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
import typer
import zmq
from rich.console import Console
from rich.table import Table

from client.cli.options import split_endpoints
from client.errors import ClientConfigError
from client.transport import new_driver_id, parse_endpoint
from client.worker_client import WorkerClient
from rpc_schema.lifecycle import Status

Endpoints = Annotated[
    str, typer.Option(envvar="WORKER_CLIENT_ENDPOINTS", help="Running daemons: EP,EP,...")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON array on standard output.")]
MIB = 1 << 20


def status(endpoints: Endpoints, as_json: AsJson = False) -> None:
    """Show what each daemon is and does."""
    with _connect(endpoints) as clients:
        for client in clients:
            client.hello()
        statuses = [client.get_status() for client in clients]
    if as_json:
        sys.stdout.write(json.dumps(msgspec.to_builtins([_named(s) for s in statuses])) + "\n")
    else:
        console = Console()
        console.print(_table(statuses))
        for entry in statuses:
            served_by = ", ".join(f"{part} {name}" for part, name in entry.providers.items())
            console.print(f"rank {entry.rank}: {served_by or 'no model'}")


def shutdown(endpoints: Endpoints) -> None:
    """End daemons; a running step is finished first."""
    with _connect(endpoints) as clients:
        for client in clients:
            client.shutdown()


@contextmanager
def _connect(endpoints: str) -> Iterator[list[WorkerClient]]:
    names = split_endpoints(endpoints)
    if not names:
        raise ClientConfigError(
            "no daemon is named", field="endpoints", value=endpoints, fix="give EP,EP,..."
        )
    parsed = [parse_endpoint(name) for name in names]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    driver_id = new_driver_id()
    clients = [
        WorkerClient(context, endpoint, rank, driver_id) for rank, endpoint in enumerate(parsed)
    ]
    try:
        yield clients
    finally:
        for client in clients:
            client.close()
        context.term()


def _named(status: Status) -> dict[str, object]:
    fields: dict[str, object] = {
        name: value
        for name, value in zip(
            status.__struct_fields__, msgspec.structs.astuple(status), strict=True
        )
        if name not in ("worker_uid", "config", "kv_cache")
    }
    fields["worker_uid"] = status.worker_uid.hex()
    fields["config"] = None if status.config is None else status.config.fingerprint()
    fields["model"] = None if status.config is None else status.config.model.model
    fields["num_blocks"] = None if status.kv_cache is None else status.kv_cache.num_blocks
    return fields


def _table(statuses: list[Status]) -> Table:
    table = Table("endpoint", "pid", "device", "rank", "state", "model", "epoch, step", "memory")
    for entry in statuses:
        model = "-" if entry.config is None else entry.config.model.model
        memory = ", ".join(f"{k} {v // MIB} MiB" for k, v in entry.memory_bytes.items())
        state = f"{entry.serving}, {entry.load}, link {entry.link_state}"
        ids = f"{entry.epoch}, {entry.last_seq}"
        table.add_row(
            entry.endpoint, str(entry.pid), entry.device, str(entry.rank), state, model, ids, memory
        )
    return table

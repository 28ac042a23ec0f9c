"""`worker-client lora`: the LoRA adapters of a running group, between its drivers."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from worker_client.cli.control import Endpoints
from worker_client.cli.daemons import connect
from worker_client.cli.downloads import shown_downloads
from worker_client.cli.options import KeyFile, KnownDaemons, Wait
from worker_client.cli.output_file import print_text
from worker_client.errors import ClientConfigError
from worker_client.inputs.model_source import find_adapter
from worker_client.wire.endpoint import named_daemons
from worker_client.wire.keys import read_keys
from worker_client.worker_group import WorkerGroup
from worker_host.plain_text import printable

lora = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(help="Adapter below the --lora-root, or ORG/NAME@REVISION.")]
Id = Annotated[int, typer.Argument(min=1, help="Id of the adapter, as listed.")]


@lora.command("add", short_help="Put an adapter into host memory.")
def add_lora(
    name: Name,
    endpoints: Endpoints,
    lora_id: Annotated[int | None, typer.Option("--id", min=1, help="Default: a free one.")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Read it again if it is there already.")
    ] = False,
    key_file: KeyFile = None,
    known_daemons: KnownDaemons = None,
    wait: Wait = 0.0,
) -> None:
    """Put an adapter into the host memory of a group that no driver holds."""
    with _group(endpoints, key_file, known_daemons, wait) as group:
        with shown_downloads() as show:
            source = find_adapter(name, None, are_local=False, show=show)
        adapter = group.loras.add(source.sent_as, lora_id, load_inplace=replace)
        print_text(f"{printable(adapter.name)}: id {adapter.lora_id}\n")


@lora.command("remove", short_help="Remove an adapter from host memory.")
def remove_lora(
    lora_id: Id,
    endpoints: Endpoints,
    key_file: KeyFile = None,
    known_daemons: KnownDaemons = None,
    wait: Wait = 0.0,
) -> None:
    """Remove an adapter from the host memory of a group that no driver holds."""
    with _group(endpoints, key_file, known_daemons, wait) as group:
        if not group.loras.remove(lora_id):
            print_text(f"no adapter has id {lora_id}\n")


@lora.command("list", short_help="List the adapters in host memory.")
def list_loras(
    endpoints: Endpoints,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON array on standard output.")
    ] = False,
    key_file: KeyFile = None,
    known_daemons: KnownDaemons = None,
    wait: Wait = 0.0,
) -> None:
    """List the adapters in the host memory of a group that no driver holds, least recently used
    first."""
    with _group(endpoints, key_file, known_daemons, wait) as group:
        adapters = group.loras.list_by_rank()[0].adapters
    if as_json:
        fields = ("name", "lora_id", "rank", "is_pinned", "size_bytes", "weights_version")
        shown = [{field: getattr(each, field) for field in fields} for each in adapters]
        print_text(json.dumps(shown) + "\n")
        return
    for each in adapters:
        pinned = ", pinned" if each.is_pinned else ""
        print_text(
            f"{printable(each.name)}: id {each.lora_id}, rank {each.rank}, "
            f"{each.size_bytes} bytes on rank 0{pinned}\n"
        )


@lora.command("pin", short_help="Never evict an adapter.")
def pin_lora(
    lora_id: Id,
    endpoints: Endpoints,
    key_file: KeyFile = None,
    known_daemons: KnownDaemons = None,
    wait: Wait = 0.0,
) -> None:
    """Pin an adapter in the host memory of a group that no driver holds: it is never evicted."""
    with _group(endpoints, key_file, known_daemons, wait) as group:
        group.loras.pin(lora_id)


@contextlib.contextmanager
def _group(
    endpoints: str, key_file: str | None, known_daemons: Path | None, wait: float
) -> Iterator[WorkerGroup]:
    """Attach to a loaded group; it keeps its requests."""
    keys, names = read_keys(key_file, known_daemons), named_daemons(endpoints)
    with connect(names, keys, wait) as clients:
        for client in clients:
            client.hello()
        config = clients[0].get_status().config
    if config is None:
        raise ClientConfigError(
            "no model is loaded", field="endpoints", value=endpoints, fix="load one first"
        )
    with WorkerGroup(names, config.parallel, keys) as group:
        group.attach(keep_requests=True)
        group.prepare(config)
        yield group
        group.detach()

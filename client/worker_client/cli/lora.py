"""`worker-client lora`: the LoRA adapters of a running group, between its drivers."""

import contextlib
import json
from collections.abc import Iterator
from typing import Annotated

import typer

from worker_client.cli.daemons import RunningDaemons, connect
from worker_client.cli.downloads import shown_downloads
from worker_client.cli.options import takes_groups
from worker_client.cli.output_file import print_text
from worker_client.errors import ClientConfigError
from worker_client.inputs.model_source import find_adapter
from worker_client.worker_group import WorkerGroup
from worker_host.plain_text import printable

lora = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[str, typer.Argument(help="Adapter below the --lora-root, or ORG/NAME@REVISION.")]
Id = Annotated[int, typer.Argument(min=1, help="Id of the adapter, as listed.")]


@lora.command("add", short_help="Put an adapter into host memory.")
@takes_groups
def add_lora(
    name: Name,
    daemons: RunningDaemons,
    lora_id: Annotated[int | None, typer.Option("--id", min=1, help="Default: a free one.")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Read it again if it is there already.")
    ] = False,
) -> None:
    """Put an adapter into the host memory of a group that no driver holds."""
    with _group(daemons) as group:
        with shown_downloads() as show:
            source = find_adapter(name, None, are_local=False, show=show)
        adapter = group.loras.add(source.sent_as, lora_id, load_inplace=replace)
        print_text(f"{printable(adapter.name)}: id {adapter.lora_id}\n")


@lora.command("remove", short_help="Remove an adapter from host memory.")
@takes_groups
def remove_lora(
    lora_id: Id,
    daemons: RunningDaemons,
) -> None:
    """Remove an adapter from the host memory of a group that no driver holds."""
    with _group(daemons) as group:
        if not group.loras.remove(lora_id):
            print_text(f"no adapter has id {lora_id}\n")


@lora.command("list", short_help="List the adapters in host memory.")
@takes_groups
def list_loras(
    daemons: RunningDaemons,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON array on standard output.")
    ] = False,
) -> None:
    """List the adapters in the host memory of a group that no driver holds, least recently used
    first."""
    with _group(daemons) as group:
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
@takes_groups
def pin_lora(
    lora_id: Id,
    daemons: RunningDaemons,
) -> None:
    """Pin an adapter in the host memory of a group that no driver holds: it is never evicted."""
    with _group(daemons) as group:
        group.loras.pin(lora_id)


@contextlib.contextmanager
def _group(daemons: RunningDaemons) -> Iterator[WorkerGroup]:
    """Attach to a loaded group; it keeps its requests."""
    keys, names = daemons.keys(), daemons.names
    with connect(names, keys, daemons.wait) as clients:
        for client in clients:
            client.hello()
        config = clients[0].get_status().config
    if config is None:
        raise ClientConfigError(
            "no model is loaded", field="endpoints", value=daemons.endpoints, fix="load one first"
        )
    with WorkerGroup(names, config.parallel, keys) as group:
        group.attach(keep_requests=True)
        group.prepare(config)
        yield group
        group.detach()

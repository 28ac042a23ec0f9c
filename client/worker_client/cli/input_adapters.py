"""Finds the LoRA adapters that an input names, and adds them to the group before its requests are
served."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rpc_schema.config import LoraConfig
from rpc_schema.errors import (
    WorkerError,
)
from worker_client.cli.downloads import shown_downloads
from worker_client.cli.input_request import InputRequest
from worker_client.cli.run_options import RunOptions
from worker_client.errors import (
    ClientConfigError,
    ContentMismatchError,
)
from worker_client.group.loras import GroupAdapter
from worker_client.inputs.model_source import AdapterSource, find_adapter
from worker_client.requests import with_adapter
from worker_client.worker_group import WorkerGroup


def with_hub_adapters(
    run: RunOptions, inputs: Sequence[InputRequest]
) -> tuple[RunOptions, list[InputRequest]]:
    """Download the adapters that an input names by their repositories. Return the requests with
    those under the names that daemons know, and the options with the cache that has them. A request
    whose adapter cannot be had becomes an error."""
    if not run.config.lora.max_loras:
        return run, list(inputs)  # with_adapters refuses them
    wanted = (entry.request.lora for entry in inputs if entry.request is not None)
    names = dict.fromkeys(name for name in wanted if name is not None)
    found: dict[str, AdapterSource | str] = {}
    with shown_downloads() as show:
        for name in names:
            try:
                found[name] = find_adapter(
                    name, run.lora_root, are_local=not run.endpoints, show=show
                )
            except ClientConfigError as error:
                found[name] = f"adapter {name!r}: {error}"
    caches = [each.cache for each in found.values() if isinstance(each, AdapterSource)]
    cache = next((each for each in caches if each is not None), None)
    return replace(run, adapter_cache=cache), [_renamed(entry, found) for entry in inputs]


def _renamed(entry: InputRequest, found: Mapping[str, AdapterSource | str]) -> InputRequest:
    request = entry.request
    if request is None or request.lora is None:
        return entry
    adapter = found[request.lora]
    if isinstance(adapter, str):
        return replace(entry, request=None, error=adapter)
    return replace(entry, request=replace(request, lora=adapter.sent_as))


def with_adapters(
    group: WorkerGroup, config: LoraConfig, inputs: Sequence[InputRequest]
) -> list[InputRequest]:
    """Add the adapters to the group; return the requests with them. A request whose adapter cannot
    be added becomes an error."""
    wanted = (entry.request.lora for entry in inputs if entry.request is not None)
    names = list(dict.fromkeys(name for name in wanted if name is not None))
    found = {name: _add(group, config, name, names) for name in names}
    return [_resolved(entry, found) for entry in inputs]


def _add(
    group: WorkerGroup, config: LoraConfig, name: str, names: Sequence[str]
) -> GroupAdapter | str:
    if not config.max_loras:
        return f"adapter {name!r}: the model is loaded without adapters; fix: give --max-loras"
    if len(names) > config.num_cpu_loras:
        return (
            f"the input names {len(names)} adapters, and host memory has room for "
            f"{config.num_cpu_loras}; fix: give --max-cpu-loras {len(names)}, or several inputs"
        )
    try:
        return group.loras.add(name)
    except (WorkerError, ContentMismatchError) as error:
        return f"adapter {name!r}: {error.message}"


def _resolved(entry: InputRequest, found: Mapping[str, GroupAdapter | str]) -> InputRequest:
    request = entry.request
    if request is None or request.lora is None:
        return entry
    adapter = found[request.lora]
    if isinstance(adapter, str):
        return replace(entry, request=None, error=adapter)
    return replace(entry, request=with_adapter(request, adapter.extension))

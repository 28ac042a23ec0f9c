"""Finds the LoRA adapters that an input names, and adds them to the group before its requests are
served."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from rpc_schema.config import LoraConfig
from rpc_schema.errors import WorkerError
from worker_client.cli.downloads import shown_downloads
from worker_client.cli.input_request import InputRequest
from worker_client.cli.run_options import RunOptions
from worker_client.errors import ClientConfigError, ContentMismatchError
from worker_client.group.loras import GroupAdapter
from worker_client.inputs.model_source import AdapterSource, find_adapter
from worker_client.requests import GenerationRequest, with_adapter
from worker_client.worker_group import WorkerGroup

_Adapter = TypeVar("_Adapter")


def with_hub_adapters(
    run: RunOptions, inputs: Sequence[InputRequest]
) -> tuple[RunOptions, list[InputRequest]]:
    """Download the adapters that an input names by their repositories. Return the requests with
    those under the names that daemons know, and the options with the cache that has them. A request
    whose adapter cannot be had becomes an error."""
    if not run.plan.config.lora.max_loras:
        return run, list(inputs)  # with_adapters refuses them
    found: dict[str, AdapterSource | str] = {}
    with shown_downloads() as show:
        for name in _named(inputs):
            try:
                found[name] = find_adapter(
                    name, run.plan.lora_root, are_local=not run.plan.endpoints, show=show
                )
            except ClientConfigError as error:
                found[name] = f"adapter {name!r}: {error}"
    caches = [each.cache for each in found.values() if isinstance(each, AdapterSource)]
    cache = next((each for each in caches if each is not None), None)
    return replace(run, plan=replace(run.plan, adapter_cache=cache)), [
        _with_found(entry, found, lambda request, own: replace(request, lora=own.sent_as))
        for entry in inputs
    ]


def _named(inputs: Sequence[InputRequest]) -> list[str]:
    """Return the adapters that requests name, each once."""
    wanted = (entry.request.lora for entry in inputs if entry.request is not None)
    return list(dict.fromkeys(name for name in wanted if name is not None))


def _with_found(
    entry: InputRequest,
    found: Mapping[str, _Adapter | str],
    apply: Callable[[GenerationRequest, _Adapter], GenerationRequest],
) -> InputRequest:
    """Return a line whose request has its adapter applied, or the reason why there is none."""
    request = entry.request
    if request is None or request.lora is None:
        return entry
    adapter = found[request.lora]
    if isinstance(adapter, str):
        return replace(entry, request=None, error=adapter)
    return replace(entry, request=apply(request, adapter))


def with_adapters(
    group: WorkerGroup, config: LoraConfig, inputs: Sequence[InputRequest]
) -> list[InputRequest]:
    """Add the adapters to the group; return the requests with them. A request whose adapter cannot
    be added becomes an error."""
    names = _named(inputs)
    found = {name: _add(group, config, name, names) for name in names}
    return [
        _with_found(entry, found, lambda request, own: with_adapter(request, own.extension))
        for entry in inputs
    ]


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

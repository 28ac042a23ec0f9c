"""An update of an adapter's weights. It fills a copy of this rank's shard, which takes the place of
the adapter as a whole at the end: until then, and if it fails, steps use the adapter as it was."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rpc_schema.errors import StateError
from worker_daemon.contracts.source_identity import SourceIdentity
from worker_daemon.errors import config_error
from worker_daemon.layers.adapters import AdapterLayout, MatrixShard
from worker_daemon.layers.parameter import Parameter, TensorSpec
from worker_daemon.lora.adapter_config import ModuleScale, read_adapter_config, tensor_name
from worker_daemon.lora.device_slots import DeviceSlots
from worker_daemon.lora.host_store import HostAdapter, HostStore
from worker_daemon.models.weight_place import WeightPlace
from worker_daemon.models.weight_places import Places


class AdapterUpdate:
    """One update of one adapter. Belongs to the open update; used on the step thread."""

    def __init__(
        self,
        layout: AdapterLayout,
        shapes: Mapping[str, tuple[int, int]],
        store: HostStore,
        slots: DeviceSlots,
        adapter: HostAdapter,
    ) -> None:
        """shapes: (output, input features) of every module of the whole model. Copies the
        adapter's shard: a partial update changes some of it."""
        self.adapter = adapter
        self._store = store
        self._slots = slots
        self._weights = torch.empty_like(
            adapter.weights, pin_memory=adapter.weights.is_pinned()
        ).copy_(adapter.weights)
        self.places = adapter_places(layout, shapes, adapter, self._weights)

    def check_directory(self, directory: Path) -> None:
        """Check that files of the adapter are of the same ranks and scales. Raises ConfigError, and
        CheckpointError if they have no configuration."""
        config, modules = read_adapter_config(directory), self.adapter.modules
        theirs = config.scales_of(modules)
        other = next((each for each in modules if theirs[each] != modules[each]), None)
        if other is not None:
            mine, its = modules[other], theirs[other]
            raise config_error(
                "adapter",
                str(directory),
                f"{other} has rank {its.rank} and scale {its.scale:g} there, and rank {mine.rank} "
                f"and scale {mine.scale:g} in adapter {self.adapter.name!r}",
                "add the adapter again with load_inplace=True",
            )

    def finish(self, identity: SourceIdentity, version: int) -> None:
        """Put the new weights in the adapter's place, also for the rows that use it: later steps
        read them. Raises StateError, with nothing changed, if the adapter is there no more."""
        adapter = self.adapter
        if self._store.get(adapter.lora_id) is not adapter:
            raise StateError(
                f"adapter {adapter.name!r} was removed or replaced while its update was open",
                fix="add it again, and start another update",
            )
        adapter.weights = self._weights
        adapter.identity, adapter.weights_version = identity, version
        self._slots.refresh(adapter)


class _Matrix(Parameter):
    """Part of a shard that one matrix of an adapter fills, times a factor."""

    def __init__(self, name: str, part: Tensor, scale: float) -> None:
        """part: [rows, columns], a view of the shard."""
        super().__init__((0,), (), name=name, dtype=part.dtype, device=part.device)
        self.data = part
        self._scale = scale

    def store(self, region: tuple[slice, ...], values: Tensor) -> None:
        super().store(region, self._scaled(values))

    def put(self, coordinates: Sequence[Tensor], values: Tensor) -> None:
        super().put(coordinates, self._scaled(values))

    def _scaled(self, values: Tensor) -> Tensor:
        """Return values as an adapter that was read from files has them, to the same bits."""
        return values if self._scale == 1.0 else values.to(torch.float32) * self._scale


class _Place(NamedTuple):
    name: str
    place: WeightPlace


def adapter_places(
    layout: AdapterLayout,
    shapes: Mapping[str, tuple[int, int]],
    adapter: HostAdapter,
    weights: Tensor,
) -> Places:
    """Return the places of an adapter's tensors in a shard of it. weights: [slot_size]."""
    specs: dict[str, TensorSpec] = {}
    for module, own in adapter.modules.items():
        num_outputs, num_inputs = shapes[module]
        specs[tensor_name(module, "A")] = TensorSpec((own.rank, num_inputs))
        specs[tensor_name(module, "B")] = TensorSpec((num_outputs, own.rank))
    places: dict[str, list[WeightPlace]] = {}
    for name, place in _places(layout, adapter.modules, weights):
        places.setdefault(name, []).append(place)
    return Places(
        places=places,
        tensors={name: (name,) for name in places},
        specs=specs,
        dtypes={},
        required=[(name,) for name in specs],
        scales={},
        aliases={},
        quantized=(),
        owner=f"adapter {adapter.name!r}",
    )


def _places(
    layout: AdapterLayout, modules: Mapping[str, ModuleScale], weights: Tensor
) -> Iterator[_Place]:
    slots = weights.unsqueeze(0)
    for merged in layout.merged:
        a, b = merged.a_of(slots)[0], merged.b_of(slots)[0]
        for index, shard in enumerate(merged.shards):
            own = modules.get(shard.module)
            if own is not None:
                first = index * layout.max_rank
                yield _place_of_a(shard, own, a[first : first + own.rank])
                yield from _places_of_b(shard, own, b[shard.target, : own.rank])


def _place_of_a(shard: MatrixShard, own: ModuleScale, part: Tensor) -> _Place:
    name = tensor_name(shard.module, "A")
    source = (slice(0, own.rank), shard.columns)
    return _Place(name, WeightPlace(_Matrix(name, part, 1.0), source, _whole(part)))


def _places_of_b(shard: MatrixShard, own: ModuleScale, part: Tensor) -> Iterator[_Place]:
    name = tensor_name(shard.module, "B")
    first = 0
    for rows in shard.rows:
        held = part[first : first + rows.stop - rows.start]
        first += len(held)
        source = (rows, slice(0, own.rank))
        yield _Place(name, WeightPlace(_Matrix(name, held, own.scale), source, _whole(held)))


def _whole(part: Tensor) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in part.shape)

"""Where incoming tensors belong in a stage's parameters, by the checkpoint's names or by our own.
Knows neither wire nor file nor sender.

What a model takes as a whole is the same on every rank, so that all ranks refuse the same tensors.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker_daemon.distributed.tp import tensor_parallel
from worker_daemon.errors import ConfigError
from worker_daemon.layers.parameter import Parameter, Piece
from worker_daemon.models.decoder import DecoderStage, checkpoint_shapes, whole_model
from worker_daemon.models.description import DecoderConfig

_MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class Manifest:
    """What comes, in order; all of equal length."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _WeightPlace:
    """A region of one parameter, and what of the incoming tensor fills it."""

    parameter: Parameter
    source: tuple[slice, ...]
    target: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Places:
    """The places of one rank, and what the whole group expects."""

    places: Mapping[str, Sequence[_WeightPlace]]
    """By incoming name; a name that other ranks take has none."""
    tensors: Mapping[str, tuple[str, ...]]
    """Incoming name -> checkpoint names of what it fills on this rank."""
    shapes: Mapping[str, tuple[int, ...]]
    """Every incoming name that the group knows."""
    dtype: torch.dtype | None
    """The one that must come; None: any, converted."""
    required: Sequence[tuple[str, ...]]
    """Of each of these, one name at least must come for the model to be complete."""

    def check(self, manifest: Manifest) -> None:
        """Check what is to come, before a byte of it does; alike on every rank.

        Raises:
            ConfigError: a name is unknown or comes twice, or a shape or dtype is another one.
        """
        if len(set(manifest.names)) != len(manifest.names):
            twice = next(n for n in manifest.names if manifest.names.count(n) > 1)
            raise ConfigError("a tensor is named twice", field="names", value=twice, fix="once")
        columns = zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True)
        for name, dtype, shape in columns:
            expected = self.shapes.get(name)
            if expected is None:
                raise ConfigError(
                    "the model has no such tensor",
                    field="names",
                    value=name,
                    fix=self._suggestion(name),
                )
            if shape != expected:
                raise ConfigError(
                    f"{name} comes in another shape",
                    field="shapes",
                    value=list(shape),
                    fix=f"send it as {list(expected)}",
                )
            if self.dtype not in (None, dtype):
                raise ConfigError(
                    f"{name} comes in another dtype, and kernel names are copied as they are",
                    field="dtypes",
                    value=str(dtype),
                    fix=f"send it as {self.dtype}",
                )

    def check_complete(self, received: Collection[str]) -> None:
        """Check that all that the model needs has come; alike on every rank.

        Raises:
            ConfigError: it has not; names the first that are missing.
        """
        missing = [names[0] for names in self.required if not set(names) & set(received)]
        if missing:
            raise ConfigError(
                f"{len(missing)} tensors have not come",
                field="names",
                value=sorted(missing)[:_MAX_NAMED],
                fix="send them with update_weights, or start a partial update",
            )

    def fill(self, name: str, first_row: int, values: Tensor) -> None:
        """Copy rows of an incoming tensor, first_row and on, into what this rank holds of them.
        values: [rows, ...] of any floating-point dtype, on any device."""
        for place in self.places.get(name, ()):
            rows = place.source[0]
            start = max(rows.start, first_row)
            stop = min(rows.stop, first_row + values.shape[0])
            if start < stop:
                target = place.target[0].start + start - rows.start
                into = (slice(target, target + stop - start), *place.target[1:])
                of = (slice(start - first_row, stop - first_row), *place.source[1:])
                # What is in host memory may change once this returns; a device keeps the order.
                on_device = values.device.type == "cuda"
                place.parameter.data[into].copy_(values[of], non_blocking=on_device)

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return the checkpoint names that an incoming tensor fills here; none where it is not this
        rank's."""
        return self.tensors.get(name, ())

    def _suggestion(self, name: str) -> str:
        if name == "lm_head.weight":
            return "leave it out: the model shares the embedding"
        return f"names like {min(self.shapes)}"


def checkpoint_places(stage: DecoderStage, config: DecoderConfig) -> Places:
    """Places by the checkpoint's names: whole tensors come, and each rank takes its part."""
    shapes = checkpoint_shapes(config)
    places: dict[str, list[_WeightPlace]] = {}
    for parameter in stage.parameters():
        for piece in parameter.pieces:
            places.setdefault(piece.name, []).append(_of_piece(parameter, piece))
    return Places(
        places=places,
        tensors={name: (name,) for name in places},
        shapes=shapes,
        dtype=None,
        required=[(name,) for name in shapes],
    )


def kernel_places(
    stage: DecoderStage, config: DecoderConfig, tp_rank: int, tp_size: int, dtype: torch.dtype
) -> Places:
    """Places by our parameters' own names. NAME is for every rank that has such a parameter,
    NAME@tpN for tensor-parallel rank N alone."""
    places: dict[str, list[_WeightPlace]] = {}
    tensors: dict[str, tuple[str, ...]] = {}
    for parameter in stage.parameters():
        for name in (parameter.name, f"{parameter.name}@tp{tp_rank}"):
            places[name] = [_of_parameter(parameter)]
            tensors[name] = tuple(piece.name for piece in parameter.pieces)
    shapes: dict[str, tuple[int, ...]] = {}
    required: dict[str, tuple[str, ...]] = {}
    for rank in range(tp_size):
        # Ranks differ in which biases they hold: rank 0 has them all.
        for parameter in _parameters(config, rank, tp_size, dtype):
            ranked = f"{parameter.name}@tp{rank}"
            shapes[parameter.name] = shapes[ranked] = tuple(parameter.data.shape)
            required[ranked] = (parameter.name, ranked)
    return Places(places, tensors, shapes, dtype, list(required.values()))


def _parameters(
    config: DecoderConfig, rank: int, size: int, dtype: torch.dtype
) -> Iterable[Parameter]:
    return whole_model(config, tensor_parallel(rank, size), dtype).parameters()


def _of_piece(parameter: Parameter, piece: Piece) -> _WeightPlace:
    return _WeightPlace(parameter, piece.source, piece.target)


def _of_parameter(parameter: Parameter) -> _WeightPlace:
    whole = tuple(slice(0, size) for size in parameter.data.shape)
    return _WeightPlace(parameter, whole, whole)

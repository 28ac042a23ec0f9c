"""Maps incoming tensors to their places in a stage's parameters, by the checkpoint's names or by
the parameters' own.

All ranks expect the same tensors of the whole model, so they refuse the same ones.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from worker_daemon.contracts.fp8 import FP8
from worker_daemon.distributed.tp import SingleRank, tensor_parallel
from worker_daemon.errors import config_error
from worker_daemon.layers.int4_formats import module_of
from worker_daemon.layers.parameter import Kind, Parameter, TensorSpec
from worker_daemon.models.decoder import (
    LM_HEAD,
    DecoderStage,
    head_aliases,
    whole_model,
)
from worker_daemon.models.description import DecoderConfig
from worker_daemon.models.expert_tensors import StackedPart, stacked_part
from worker_daemon.models.sparse_delta import (
    DeltaPart,
    Incoming,
    Part,
    check_delta,
    delta_part,
    in_order,
)
from worker_daemon.models.update_coverage import Box
from worker_daemon.models.weight_place import WeightPlace

_MAX_NAMED = 8
_PACKED = ("_blocks", "_scales")
"""Ends of the names of tensors in MXFP4."""
_INPUT_SCALE = ".input_scale"
_IN_4_BITS: Final = ("int4", "int4_zero", "int4_scale")
_SINGLE_VALUES: Final = ("matrix", "norm", "bias", "routed_embedding")
"""Kinds of tensors whose elements are independent of each other."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The incoming tensors, in order; all lists have equal length."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    origins: tuple[tuple[int, ...], ...] = ()
    """Places of pieces in their tensors, empty for a whole tensor; none at all if all are whole."""

    def origin(self, tensor: int) -> tuple[int, ...]:
        """Return the place of a piece; empty for a whole tensor."""
        return self.origins[tensor] if self.origins else ()

    @property
    def pieces(self) -> dict[str, list[Box]]:
        """The boxes of tensors that come in pieces."""
        found: defaultdict[str, list[Box]] = defaultdict(list)
        for name, shape, origin in zip(self.names, self.shapes, self.origins, strict=False):
            if origin:
                found[name].append(Box.at(origin, shape))
        return found


@dataclass(frozen=True, slots=True)
class Places:
    """The places of one rank, and the tensors that the whole group expects."""

    places: Mapping[str, Sequence[WeightPlace]]
    """Places by incoming name; names that only other ranks use are absent."""
    tensors: Mapping[str, tuple[str, ...]]
    """Incoming name -> checkpoint names of the tensors that it fills on this rank."""
    specs: Mapping[str, TensorSpec]
    """Required form of each incoming tensor; its keys are all names that the group accepts."""
    dtypes: Mapping[str, torch.dtype]
    """Required dtypes; a name that is absent takes what its form takes, converted."""
    required: Sequence[tuple[str, ...]]
    """Alternatives: the model is complete once at least one name of each has arrived."""
    scales: Mapping[str, tuple[str, ...]]
    """Names of the scales of each matrix that is quantized if it comes in another dtype than FP8,
    or of the tensors that a checkpoint has in its place. Such a matrix fills its scales too, or
    leaves those of its inputs as they are."""
    aliases: Mapping[str, str]
    """Other names of tensors that the model has once, and their own: an update has one of both."""
    quantized: Collection[str]
    """Incoming names of tensors that are quantized, or a part of a quantized one, in the checkpoint
    or here."""
    owner: str = "the model"
    """Owner of these tensors, for errors."""

    def check(
        self, manifest: Manifest, received: Collection[str] = (), *, partial: bool = False
    ) -> None:
        """Check the incoming tensors before any byte arrives; the same on every rank. received:
        names of the update's earlier ones. partial: tensors that are not sent stay, so that sparse
        deltas may come.

        Raises:
            ConfigError: a name is unknown or occurs twice, a shape or dtype is wrong, or a scale
                comes with a matrix that is to be quantized; or a tensor comes under both of its
                names; or a sparse delta is incomplete, or not for this tensor or update.
        """
        changed = {self._changed(name) for name in (*manifest.names, *received)}
        for alias, name in self.aliases.items():
            if {alias, name} <= changed:
                problem = f"the loaded model has one tensor for {alias} and {name}"
                fix = f"leave out {alias}; if they differ, reset and load that checkpoint"
                raise config_error("names", alias, problem, fix)
        self._check_named_once(manifest)
        named = set(manifest.names)
        deltas: defaultdict[str, dict[Part, Incoming]] = defaultdict(dict)
        columns = zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True)
        for number, (name, dtype, shape) in enumerate(columns):
            delta, origin = self.delta_part(name), manifest.origin(number)
            if delta is None:
                self._check_tensor(name, dtype, shape, origin)
                self._check_scales(name, dtype, named)
            elif origin:
                problem = "half of a sparse delta comes as a piece"
                raise config_error("origins", list(origin), f"{name}: {problem}", "leave it out")
            else:
                deltas[delta.name][delta.part] = Incoming(dtype, shape)
        for name, parts in deltas.items():
            self._check_delta(name, parts, named, partial=partial)
        self._check_order(manifest.names)

    def _changed(self, name: str) -> str:
        """Return the name of the tensor that an incoming one changes."""
        delta = self.delta_part(name)
        return name if delta is None else delta.name

    def _check_named_once(self, manifest: Manifest) -> None:
        pieces: set[str] = set()
        whole: list[str] = []
        for number, name in enumerate(manifest.names):
            if manifest.origin(number):
                pieces.add(name)
            else:
                whole.append(name)
        counts = Counter([*whole, *pieces])
        twice = next((name for name, count in counts.items() if count > 1), None)
        if twice is not None:
            fix = "once, or all of it in pieces" if twice in pieces else "once"
            raise config_error("names", twice, "a tensor is named twice", fix)

    def _check_tensor(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], origin: tuple[int, ...]
    ) -> None:
        spec = self.specs.get(name)
        if spec is None:
            fix = self._suggestion(name)
            raise config_error("names", name, f"{self.owner} has no such tensor", fix)
        if origin:
            self._check_piece(name, dtype, shape, origin)
        elif not spec.fits(shape):
            fix = f"send it as {list(spec.shape)}"
            raise config_error("shapes", list(shape), f"{name} has another shape", fix)
        self._check_dtype(name, dtype)

    def _check_piece(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], origin: tuple[int, ...]
    ) -> None:
        full = self.specs[name].shape
        if not len(origin) == len(shape) == len(full):
            problem = f"a piece of {name} has another number of dimensions"
            raise config_error("origins", list(origin), problem, f"{len(full)} of {list(full)}")
        box = Box.at(origin, shape)
        if any(stop > size for stop, size in zip(box.stop, full, strict=True)):
            problem = f"a piece of {name} is outside it"
            raise config_error("origins", str(box), problem, f"within {list(full)}")
        if name in self.quantized and dtype != FP8 and shape[1:] != full[1:] and box.size:
            problem = f"{name} is quantized here, by whole rows"
            fix = f"cut it along its first dimension alone: [n, {str(list(full[1:]))[1:]}"
            raise config_error("shapes", list(shape), problem, fix)

    def _check_scales(self, name: str, dtype: torch.dtype, named: Collection[str]) -> None:
        computed = () if dtype == FP8 else self.scales.get(name, ())
        sent = next((s for s in computed if s in named and not s.endswith(_INPUT_SCALE)), None)
        if sent is not None:
            problem = f"{name} is not in FP8, so its scale is computed here"
            fix = "leave the scale out, or send both as the checkpoint has them"
            raise config_error("names", sent, problem, fix)

    def _check_dtype(self, name: str, dtype: torch.dtype) -> None:
        spec, required = self.specs[name], self.dtypes.get(name, dtype)
        if dtype != required:
            problem = f"{name} has another dtype; tensors under kernel names are not converted"
            raise config_error("dtypes", str(dtype), problem, f"send it as {required}")
        is_quantized_here = name in self.scales and dtype.is_floating_point
        if not spec.takes(dtype) and not is_quantized_here:
            fix = "float8_e4m3fn, with its weight_scale" if spec.kind == "fp8" else "bfloat16"
            problem = f"{name} is in another format in the model"
            raise config_error("dtypes", str(dtype), problem, f"send it as {fix}")

    def _check_delta(
        self, name: str, parts: Mapping[Part, Incoming], named: Collection[str], *, partial: bool
    ) -> None:
        if not partial:
            problem = f"a sparse delta of {name} leaves most of it as it is"
            raise config_error("partial", False, problem, "start a partial update")
        if name in named:
            problem = "it comes whole and as a sparse delta in one request"
            raise config_error("names", name, problem, "send one of both")
        if name in self.quantized:
            problem = "it is quantized: single elements share their scales with others"
            raise config_error("names", name, problem, "send the whole tensor")
        check_delta(name, parts, math.prod(self.specs[name].shape))
        self._check_dtype(name, parts["values"].dtype)

    def _check_order(self, names: Sequence[str]) -> None:
        """Check that all indices come first: they are checked before any value is written."""
        for name, wanted in zip(names, in_order(names, self.specs), strict=True):
            if name != wanted:
                problem = (
                    f"indices of sparse deltas come before all other tensors, not after {name}"
                )
                raise config_error("names", wanted, problem, "send all indices first")

    def check_complete(self, received: Collection[str]) -> None:
        """Check that every tensor that the model needs has arrived; the same on every rank.

        Raises:
            ConfigError: some are missing; names the first of them.
        """
        missing = [names[0] for names in self.required if not set(names) & set(received)]
        if missing:
            problem = f"{len(missing)} tensors are missing"
            fix = "send them with update_weights, or start a partial update"
            raise config_error("names", sorted(missing)[:_MAX_NAMED], problem, fix)

    def fill(self, name: str, first_row: int, values: Tensor, origin: Sequence[int] = ()) -> None:
        """Copy rows of an incoming tensor, from first_row on, into this rank's parameters.
        values: [rows, ...] of any floating-point dtype, on any device. origin: the place of the
        tensor in that of which it is a piece."""
        if not values.numel():
            return
        for place in self.places.get(name, ()):
            first, *others = origin or (0 for _ in place.source)
            place.fill((first + first_row, *others), values)

    def scatter(self, name: str, indices: Tensor, values: Tensor) -> None:
        """Set single elements of a tensor, as far as this rank has them.

        name: the tensor's. indices: int64 [n], row-major in the incoming tensor, increasing and
        within its bounds; values: [n], on the same device.
        """
        places, shape = self.places.get(name, ()), self.specs[name].shape
        spans = torch.tensor([place.span(shape) for place in places], dtype=torch.int64)
        cuts = torch.searchsorted(indices, spans.to(indices.device)).tolist()
        for place, (start, stop) in zip(places, cuts, strict=True):
            if start < stop:
                place.scatter(indices[start:stop], values[start:stop], shape)

    def elsewhere(self) -> "Places":
        """Return what a rank expects that has no part of these tensors."""
        return replace(self, places={}, tensors={})

    def delta_part(self, name: str) -> DeltaPart | None:
        """Return what an incoming tensor is of a sparse delta; None if it is none of one."""
        return delta_part(name, self.specs)

    def names_of(self, name: str, dtype: torch.dtype) -> tuple[str, ...]:
        """Return the checkpoint names that an incoming tensor fills on this rank; none if it is for
        other ranks."""
        names = self.tensors.get(name, ())
        return (*names, *self._implied(name, dtype)) if names else ()

    def received(self, manifest: Manifest, incomplete: Collection[str] = ()) -> Iterator[str]:
        """Yield the names of all incoming tensors, and of those that they make unnecessary.
        incomplete: names of tensors of which pieces are missing, and which are left out."""
        for name, dtype in zip(manifest.names, manifest.dtypes, strict=True):
            if name not in incomplete:
                yield name
                yield from self._implied(name, dtype)

    def _implied(self, name: str, dtype: torch.dtype) -> tuple[str, ...]:
        return () if dtype == FP8 else self.scales.get(name, ())

    def _suggestion(self, name: str) -> str:
        if name == LM_HEAD:
            return "leave it out: the model has no separate LM head"
        matrix = next((known for known, parts in self.scales.items() if name in parts), None)
        if matrix is not None:
            return f"send {matrix} unquantized; it is quantized here"
        stack = packed_tensor(name)
        if stack in self.specs:
            return f"send {stack} as {list(self.specs[stack].shape)}, in bfloat16"
        return f"use names like {min(self.specs)}"


def packed_tensor(name: str) -> str:
    """Return the name of the tensor that a checkpoint has packed in this one; "" if it has none."""
    return next((name.removesuffix(end) for end in _PACKED if name.endswith(end)), "")


def checkpoint_places(stage: DecoderStage, config: DecoderConfig) -> Places:
    """Return places by the checkpoint's names: complete tensors arrive, and each rank takes its
    part."""
    specs: dict[str, TensorSpec] = {}
    quantized: set[str] = set()
    scales: dict[str, tuple[str, ...]] = {}
    for parameter in whole_model(config, SingleRank(), torch.float32).parameters():
        for piece in parameter.sent_pieces:
            specs[piece.name] = piece.spec
            if parameter.stored_kind(piece) not in _SINGLE_VALUES:
                quantized.add(piece.name)
        for piece in parameter.loaded_pieces:
            if piece.kind in _IN_4_BITS:
                matrix = f"{module_of(piece)}.weight"
                scales[matrix] = (*scales.get(matrix, ()), piece.name)
    places: dict[str, list[WeightPlace]] = {}
    for parameter in stage.parameters():
        quantizer = parameter.quantizer()
        for piece in parameter.sent_pieces:
            place = WeightPlace.of_piece(parameter, piece, quantizer)
            places.setdefault(piece.name, []).append(place)
    tensors = {name: (name,) for name in places}
    required: dict[str, tuple[str, ...]] = {name: (name,) for name in specs}
    aliases = head_aliases(config)
    for alias, name in aliases.items():
        specs[alias] = specs[name]
        required[name] = (name, alias)
        if name in places:
            places[alias], tensors[alias] = places[name], (name,)
    made = Places(
        places=places,
        tensors=tensors,
        specs=specs,
        dtypes={},
        required=list(required.values()),
        scales=scales | _fp8_scales(specs),
        aliases=aliases,
        quantized=quantized,
    )
    return _with_stacked(made) if any(config.layer_experts) else made


def _with_stacked(separate: Places) -> Places:
    """Return the places with further names, for experts' matrices that come stacked; without
    those of single experts, if they never come alone."""
    places = dict(separate.places)
    tensors, specs = dict(separate.tensors), dict(separate.specs)
    scales = dict(separate.scales)
    quantized = set(separate.quantized)
    required: dict[tuple[str, ...], None] = {}
    for names in separate.required:
        name = names[0]
        spec, part = separate.specs[name], stacked_part(name)
        if part is None:
            required[names] = None
            continue
        required[(part.name,) if part.is_always_stacked else (name, part.name)] = None
        rows, columns = spec.shape
        shape = (part.expert + 1, part.halves * rows, columns)  # the last expert comes last
        specs[part.name] = TensorSpec(shape, spec.kind)
        if name in separate.quantized:
            quantized.add(part.name)
        if name in separate.scales:
            scales[part.name] = (*scales.get(part.name, ()), *separate.scales[name])
        if name in separate.places:
            tensors[part.name] = (*tensors.get(part.name, ()), name)
            moved = [_stacked_place(place, part, rows) for place in separate.places[name]]
            places[part.name] = [*places.get(part.name, ()), *moved]
        if part.is_always_stacked:
            for known in (places, tensors, specs, scales):
                known.pop(name, None)
    return Places(
        places,
        tensors,
        specs,
        separate.dtypes,
        list(required),
        scales,
        separate.aliases,
        quantized,
    )


def _stacked_place(place: WeightPlace, part: StackedPart, num_rows: int) -> WeightPlace:
    rows, columns = place.source
    first = part.half * num_rows
    expert = slice(part.expert, part.expert + 1)
    source = (expert, slice(first + rows.start, first + rows.stop), columns)
    return replace(place, source=source, is_stacked=True)


def _fp8_scales(specs: Mapping[str, TensorSpec]) -> dict[str, tuple[str, ...]]:
    """Return the scales of each matrix in FP8."""
    found: dict[str, tuple[str, ...]] = {}
    for name, spec in specs.items():
        module = name.removesuffix(".weight")
        scales = (f"{module}.weight_scale", f"{module}.input_scale")
        if spec.kind == "fp8":
            found[name] = tuple(scale for scale in scales if scale in specs)
    return found


def kernel_places(
    stage: DecoderStage, config: DecoderConfig, tp_rank: int, tp_size: int, dtype: torch.dtype
) -> Places:
    """Return places by the parameters' own names. NAME is for every rank that has the parameter,
    unless their shapes differ, NAME@tpN only for tensor-parallel rank N."""
    places: dict[str, list[WeightPlace]] = {}
    tensors: dict[str, tuple[str, ...]] = {}
    for parameter in stage.parameters():
        for name in (parameter.name, f"{parameter.name}@tp{tp_rank}"):
            places[name] = [WeightPlace.of_parameter(parameter)]
            tensors[name] = tuple(piece.name for piece in parameter.held_pieces)
    specs: dict[str, TensorSpec] = {}
    dtypes: dict[str, torch.dtype] = {}
    required: dict[str, tuple[str, ...]] = {}
    uneven: set[str] = set()
    for rank in range(tp_size):
        # Biases differ between ranks: only rank 0 has all of them.
        for parameter in _parameters(config, rank, tp_size, dtype):
            ranked, spec = f"{parameter.name}@tp{rank}", _parameter_spec(parameter)
            if specs.get(parameter.name, spec) != spec:
                uneven.add(parameter.name)
            for name in (parameter.name, ranked):
                specs[name] = spec
                dtypes[name] = parameter.data.dtype
            required[ranked] = (parameter.name, ranked)
    for name in uneven:  # one rank has more experts than another
        for known in (places, tensors, specs, dtypes):
            known.pop(name, None)
    quantized = [name for name, spec in specs.items() if spec.kind not in _SINGLE_VALUES]
    return Places(places, tensors, specs, dtypes, list(required.values()), {}, {}, quantized)


def _parameters(
    config: DecoderConfig, rank: int, size: int, dtype: torch.dtype
) -> Iterable[Parameter]:
    return whole_model(config, tensor_parallel(rank, size), dtype).parameters()


def _parameter_spec(parameter: Parameter) -> TensorSpec:
    kinds: dict[torch.dtype, Kind] = {FP8: "fp8", torch.int32: "int4_stored"}
    return TensorSpec(tuple(parameter.data.shape), kinds.get(parameter.data.dtype, "matrix"))

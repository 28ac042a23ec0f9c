"""A weight of one rank, and the checkpoint tensors that fill it."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from worker_daemon.contracts.fp8 import FP8
from worker_daemon.layers.requantize import RowQuantizer

Kind = Literal[
    "matrix",
    "norm",
    "bias",
    "routed_embedding",
    "fp8",
    "scale",
    "input_scale",
    "computed_scale",
    "int4",
    "int4_zero",
    "int4_scale",
    "int4_stored",
    "int4_order",
    "mxfp4",
    "mxfp4_scale",
]
"""The role of a tensor. routed_embedding: the embedding table of a model with experts, unless the
LM head shares it (models/dummy.py fills it differently). fp8: a matrix in float8_e4m3fn; scale: the
float32 factors of its values; input_scale: the factor of a product's inputs; computed_scale: a
scale that no checkpoint has, since this rank computes it. int4, int4_zero, int4_scale: values, zero
points and scales of a 4-bit matrix, in the layout of the checkpoint, which is converted as they
arrive; int4_stored: values as a parameter has them; int4_order: the order of columns that is
computed from a checkpoint. mxfp4, mxfp4_scale: values and scales of a matrix in MXFP4, which is
dequantized as they arrive."""
_SCALES: Final = ("scale", "input_scale", "computed_scale")
_KEPT: Final = (*_SCALES, "int4_order")
_COMPUTED: Final = ("computed_scale", "int4_order")
_DTYPES: Final[Mapping[Kind, torch.dtype]] = MappingProxyType(
    {
        "fp8": FP8,
        "int4": torch.int32,
        "int4_zero": torch.int32,
        "int4_stored": torch.int32,
        "int4_order": torch.int32,
        "mxfp4": torch.uint8,
        "mxfp4_scale": torch.uint8,
    }
)
"""Dtypes of tensors by kind; others are of any unquantized dtype."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The form that a tensor must have in a checkpoint or an update."""

    shape: tuple[int, ...]
    kind: Kind = "matrix"

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True for this shape. A vector of scales may have further dimensions of size 1, and
        a single scale none at all."""
        if self.kind in _SCALES and len(self.shape) == 1:
            return shape in (self.shape, (*self.shape, 1), () if self.shape == (1,) else None)
        return shape == self.shape

    def takes(self, dtype: torch.dtype) -> bool:
        """Return True if values of a dtype are stored, or converted."""
        required = _DTYPES.get(self.kind)
        if required is not None:
            return dtype == required
        return dtype.is_floating_point and dtype not in _DTYPES.values()


class Arrangement(NamedTuple):
    """Another order of a region's values."""

    apply: Callable[[Tensor], Tensor]
    """Returns values of the source region as those of the target."""
    locate: Callable[[Sequence[Tensor], tuple[int, ...]], tuple[Tensor, ...]]
    """Returns the place in the target, a coordinate [n] for each dimension, of n values of the
    source, from their coordinates and the source's shape."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A region of one checkpoint tensor and its place in a parameter, with equal shapes unless the
    parameter converts it; or a single value, which is repeated in its place.

    A rank may hold several regions of one tensor: those of a tensor that the checkpoint has merged.
    They fill adjacent places of one parameter, in order.
    """

    name: str
    """Name of the tensor in the checkpoint."""
    full_shape: tuple[int, ...]
    """Shape that the checkpoint tensor must have."""
    source: tuple[slice, ...]
    """The region to read; one slice with explicit bounds per dimension."""
    target: tuple[slice, ...]
    """Its place in the parameter; one slice with explicit bounds per dimension."""
    kind: Kind = "matrix"
    """The tensor's role, which determines its dtypes, and its values in dummy weights."""
    arrange: Arrangement | None = None
    """None: values of the target are in the order of the source."""
    packed: "PackedTensors | None" = None
    """The tensors that a checkpoint has instead of this one."""
    alias: str | None = None
    """The name that the tensor has in a checkpoint that lacks this name."""

    @property
    def spec(self) -> TensorSpec:
        """Form of the checkpoint tensor."""
        return TensorSpec(self.full_shape, self.kind)

    @property
    def is_repeated(self) -> bool:
        """True if one value fills the place."""
        return len(self.source) == 1 and _length(self.source[0]) < _length(self.target[0])

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Shape of the region to read."""
        return tuple(map(_length, self.source))

    @property
    def file_pieces(self) -> "tuple[Piece, ...]":
        """The pieces to read from files: this one, or those of its packed form."""
        return (self,) if self.packed is None else self.packed.pieces

    def name_among(self, names: Container[str]) -> str:
        """Return the tensor's name in a checkpoint with tensors of these names."""
        has_alias = self.alias is not None and self.name not in names and self.alias in names
        return self.alias if self.alias is not None and has_alias else self.name

    def arranged(self, values: Tensor) -> Tensor:
        """Return values of the region as those of the place."""
        return values if self.arrange is None else self.arrange.apply(values)

    def from_files(self, values: Sequence[Tensor]) -> Tensor:
        """Return the values of the place, from those of file_pieces."""
        return self.arranged(values[0]) if self.packed is None else self.packed.unpack(*values)


@dataclass(frozen=True, slots=True)
class PackedTensors:
    """The checkpoint tensors that hold one piece in packed form, such as blocks and scales."""

    pieces: tuple[Piece, ...]
    """Their source regions. All have the target of the unpacked piece."""
    unpack: Callable[..., Tensor]
    """Returns the values of the place, float32, from those of the pieces, in their order."""


class Parameter:
    """Owns `data`, the local shard. It is zero until loaded; rows that no piece covers (padding)
    stay zero.

    Built and loaded on the step thread; lives in weight memory as long as its stage. On the meta
    device it has no memory until `data` is replaced (worker_daemon/worker/sleep_memory.py).
    """

    name: str
    """Its name; that of the checkpoint tensor if one tensor fills it."""
    data: Tensor
    pieces: tuple[Piece, ...]

    def __init__(
        self,
        shape: tuple[int, ...],
        pieces: Iterable[Piece],
        *,
        name: str,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name = name
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.pieces = tuple(pieces)

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    @property
    def is_kept(self) -> bool:
        """True for the scales and the order of columns of a quantized matrix, which a loss of the
        weights leaves: an update may bring none."""
        return all(piece.kind in _KEPT for piece in self.pieces)

    @property
    def loaded_pieces(self) -> Iterator[Piece]:
        """Yield the pieces that a checkpoint has."""
        return (piece for piece in self.pieces if piece.kind not in _COMPUTED)

    @property
    def sent_pieces(self) -> Iterator[Piece]:
        """Yield the pieces of the tensors that a weight update brings."""
        return self.loaded_pieces

    def quantizer(self) -> RowQuantizer | None:
        """Return what quantizes the rows of an update; None if write() takes them."""
        return None

    @property
    def held_pieces(self) -> Iterator[Piece]:
        """Yield one piece for each tensor: this rank's part of it as a whole tensor, in the form
        that the parameter has it in."""
        regions: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            regions.setdefault(piece.name, []).append(piece)
        for name, pieces in regions.items():
            target = _joined([piece.target for piece in pieces])
            shape = tuple(self.data[target].shape)
            whole = tuple(slice(0, size) for size in shape)
            yield Piece(name, shape, whole, target, self.stored_kind(pieces[0]))

    def converts(self, piece: Piece) -> bool:
        """Return True if the values of a piece must pass through write()."""
        return piece.arrange is not None or self._quantizes(piece)

    def stored_kind(self, piece: Piece) -> Kind:
        """Return the kind of a piece's values as the parameter has them."""
        return "fp8" if self._quantizes(piece) else piece.kind

    def arrival_dtype(self, piece: Piece) -> torch.dtype:
        """Return the dtype in which write() takes the values of a piece. float32 holds those of all
        unquantized checkpoints, so a load and an update give the same bits."""
        return _DTYPES.get(piece.kind, torch.float32)

    def _quantizes(self, piece: Piece) -> bool:
        return piece.kind == "matrix" and self.data.dtype == FP8

    def write(self, region: tuple[slice, ...], values: Tensor) -> None:
        """Copy values of a checkpoint, on any device, to a region of the parameter, converted. From
        a GPU, this does not wait for it."""
        self.store(region, values)

    def store(self, region: tuple[slice, ...], values: Tensor) -> None:
        """Like write(), for values as the parameter has them."""
        self.data[region].copy_(values, non_blocking=values.device.type == "cuda")

    def put(self, coordinates: Sequence[Tensor], values: Tensor) -> None:
        """Store single values, converted. coordinates: int64 [n] for each dimension; values: [n] of
        an unquantized dtype, on any device."""
        device, dtype = self.data.device, self.data.dtype
        places = tuple(each.to(device) for each in coordinates)
        self.data.index_put_(places, values.to(device, dtype))

    def memory_for(self, piece: Piece) -> Tensor:
        """Return the memory that the values of a piece are read into, a view; repeat() must
        follow."""
        return self.data[piece.target][:1] if piece.is_repeated else self.data[piece.target]

    def repeat(self, piece: Piece) -> None:
        """Complete a piece after its values were read: copy a repeated one to all its rows."""
        if piece.is_repeated:
            rows = self.data[piece.target]
            rows[1:] = rows[:1]


def whole_vector(name: str, size: int, kind: Kind) -> Piece:
    """Return the piece for a vector [size] that every rank holds completely."""
    return Piece(name, (size,), (slice(0, size),), (slice(0, size),), kind)


def _joined(regions: Sequence[tuple[slice, ...]]) -> tuple[slice, ...]:
    """Return the region that these cover together; each equals the one before it or follows it in
    one dimension."""
    for one, after in pairwise(regions):
        parts = [(a, b) for a, b in zip(one, after, strict=True) if a != b]
        assert len(parts) <= 1, "a rank's regions of a tensor fill adjacent places"
        assert all(a.stop == b.start for a, b in parts), "regions come in the order of their places"
    return tuple(slice(parts[0].start, parts[-1].stop) for parts in zip(*regions, strict=True))


def _length(part: slice) -> int:
    return int(part.stop - part.start)

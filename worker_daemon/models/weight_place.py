"""The place of an incoming tensor's region in a parameter of this rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker_daemon.contracts.fp8 import FP8
from worker_daemon.layers.parameter import Arrangement, Parameter, Piece
from worker_daemon.layers.requantize import RowQuantizer


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """A region of one parameter, and the region of the incoming tensor that fills it."""

    parameter: Parameter
    source: tuple[slice, ...]
    """One slice with explicit bounds for each dimension of the incoming tensor, except those of
    scales, which may have further dimensions of size 1, or none."""
    target: tuple[slice, ...]
    """One slice for each dimension of the parameter."""
    arrange: Arrangement | None = None
    is_stored: bool = False
    """Values come as the parameter has them."""
    quantizer: RowQuantizer | None = None
    """Takes values that are not in FP8; None: the parameter does."""
    is_repeated: bool = False
    """One value fills the whole target."""
    is_stacked: bool = False
    """The first dimension of the source is one expert of a stack, and the target lacks it."""

    @classmethod
    def of_piece(
        cls, parameter: Parameter, piece: Piece, quantizer: RowQuantizer | None = None
    ) -> "WeightPlace":
        """Return the place of a checkpoint tensor's region."""
        return cls(
            parameter,
            piece.source,
            piece.target,
            arrange=piece.arrange,
            is_repeated=piece.is_repeated,
            quantizer=quantizer,
        )

    @classmethod
    def of_parameter(cls, parameter: Parameter) -> "WeightPlace":
        """Return the place of values that a parameter stores as they come."""
        whole = tuple(slice(0, size) for size in parameter.data.shape)
        return cls(parameter, whole, whole, is_stored=True)

    def fill(self, origin: Sequence[int], values: Tensor) -> None:
        """Copy what lies in the source of a box of the incoming tensor.

        origin: index of the box's first value in each dimension. values: the box, of any
        floating-point dtype, on any device. A parameter that quantizes gets complete rows of its
        target.
        """
        if self.is_repeated:
            self._write(self.target, values.reshape(-1))
            return
        if len(self.source) == 1:
            values = values.reshape(-1)
        cut = [
            slice(max(part.start, first), min(part.stop, first + size))
            for part, first, size in zip(self.source, origin, values.shape, strict=False)
        ]
        if any(part.start >= part.stop for part in cut):
            return
        taken = values[_moved(cut, origin, -1)]
        source = self.source
        if self.is_stacked:
            taken, cut, source = taken[0], cut[1:], source[1:]
        starts = [part.start for part in source]
        if self.arrange is None:
            local = _moved(cut, starts, -1)
            self._write(_moved(local, [part.start for part in self.target], 1), taken)
        elif tuple(cut) == source:
            self._write(self.target, self.arrange.apply(taken))
        else:
            ranges = [torch.arange(part.start, part.stop) for part in _moved(cut, starts, -1)]
            grid = torch.meshgrid(*ranges, indexing="ij")
            self._put([each.reshape(-1) for each in grid], taken.reshape(-1))

    def span(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return bounds (first, stop) of the row-major indices of the source in an incoming tensor
        of a shape; both 0 if the source is empty."""
        if any(part.start >= part.stop for part in self.source):
            return 0, 0
        first = last = 0
        for part, size in zip(self.source, shape, strict=True):
            first, last = first * size + part.start, last * size + part.stop - 1
        return first, last + 1

    def scatter(self, indices: Tensor, values: Tensor, shape: Sequence[int]) -> None:
        """Store single values where the source has them.

        indices: int64 [n], row-major in an incoming tensor of a shape, on any device; values: [n],
        on the same one.
        """
        coordinates = torch.unravel_index(indices, tuple(shape))
        inside = [
            (each >= part.start) & (each < part.stop)
            for each, part, size in zip(coordinates, self.source, shape, strict=True)
            if part != slice(0, size)
        ]
        if inside:
            chosen = torch.stack(inside).all(0)
            coordinates = tuple(each[chosen] for each in coordinates)
            values = values[chosen]
        local = [each - part.start for each, part in zip(coordinates, self.source, strict=True)]
        self._put(local[1:] if self.is_stacked else local, values)

    def _put(self, local: Sequence[Tensor], values: Tensor) -> None:
        """Store single values. local: their coordinates, counted from the start of the source."""
        if self.arrange is not None:
            source = self.source[1:] if self.is_stacked else self.source
            local = self.arrange.locate(local, tuple(part.stop - part.start for part in source))
        places = [each + part.start for each, part in zip(local, self.target, strict=True)]
        self.parameter.put(places, values)

    def _write(self, region: tuple[slice, ...], values: Tensor) -> None:
        # The caller may change host memory afterwards, so wait; on a device the stream keeps the
        # order.
        if self.quantizer is not None and values.dtype != FP8:
            self.quantizer.write(region, values)
        elif self.is_stored:
            self.parameter.store(region, values)
        else:
            self.parameter.write(region, values)


def _moved(region: Sequence[slice], by: Sequence[int], sign: int) -> tuple[slice, ...]:
    return tuple(
        slice(part.start + sign * step, part.stop + sign * step)
        for part, step in zip(region, by, strict=False)
    )

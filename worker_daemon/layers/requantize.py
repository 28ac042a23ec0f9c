"""Quantizes the rows of unquantized matrices that a weight update brings, in place, where a row
alone does not determine its scales or where the parameter has another layout than the checkpoint.

A quantizer belongs to one update. Shapes: M rows, K columns of a rank's matrix, G groups of a row.
"""

from typing import Final, Protocol

import torch
from torch import Tensor

from worker_daemon.contracts.fp8 import FP8_BLOCK, FP8_LEAST_SCALE, FP8_MAX, to_fp8
from worker_daemon.contracts.int4 import INT4_MIDDLE, pack

_CHUNK_ELEMENTS: Final = 1 << 22
"""Values that are quantized at a time: their float32 copies take 16 MiB each."""
_INT4_MAX: Final = 15


class RowQuantizer(Protocol):
    """Quantizes rows of one parameter as they arrive, in any order and number, each once."""

    def write(self, region: tuple[slice, ...], values: Tensor) -> None:
        """Quantize rows. region: their place in [M, K], all columns; values: of any unquantized
        dtype, on any device."""


class Fp8Blocks:
    """Quantizes to FP8 with a scale for each block of 128 x 128: its largest absolute value
    becomes 448 (DeepSeek-V3, arXiv 2412.19437, section 3.3). Rows wait until those of their block
    are complete."""

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        """weight: float8_e4m3fn [M, K]; scale: float32 [ceil(M / 128), ceil(K / 128)]."""
        self._weight = weight
        self._scale = scale
        self._waiting: dict[int, tuple[Tensor, Tensor]] = {}
        """Number of a block of rows -> float32 [rows, K], and which have arrived, bool [rows]."""

    def write(self, region: tuple[slice, ...], values: Tensor) -> None:
        """See RowQuantizer."""
        rows, num_rows = region[0], self._weight.shape[0]
        for block in range(rows.start // FP8_BLOCK, -(-rows.stop // FP8_BLOCK)):
            first = block * FP8_BLOCK
            size = min(FP8_BLOCK, num_rows - first)
            start, stop = max(rows.start, first), min(rows.stop, first + size)
            part = values[start - rows.start : stop - rows.start].to(self._weight.device).float()
            if stop - start == size:
                self._quantize(block, part)
            else:
                self._wait(block, size, slice(start - first, stop - first), part)

    def _wait(self, block: int, size: int, rows: slice, part: Tensor) -> None:
        if block not in self._waiting:
            arrived = torch.zeros(size, dtype=torch.bool)
            self._waiting[block] = part.new_empty(size, part.shape[1]), arrived
        memory, arrived = self._waiting[block]
        memory[rows] = part
        arrived[rows] = True
        if arrived.all():
            self._quantize(block, self._waiting.pop(block)[0])

    def _quantize(self, block: int, values: Tensor) -> None:
        num_rows, num_columns = values.shape
        padding = -num_columns % FP8_BLOCK
        blocks = torch.nn.functional.pad(values.abs(), (0, padding))
        largest = blocks.view(num_rows, -1, FP8_BLOCK).amax((0, 2))
        scale = (largest / FP8_MAX).clamp_(min=FP8_LEAST_SCALE)
        self._scale[block] = scale
        spread = scale.repeat_interleave(FP8_BLOCK)[:num_columns]
        first = block * FP8_BLOCK
        self._weight[first : first + num_rows] = to_fp8(values, spread)


class Int4Rows:
    """Quantizes to 4 bits by the least and largest value of each group and 0, as GPTQ, AWQ and
    compressed-tensors do without calibration. Columns keep their order."""

    def __init__(
        self,
        values: Tensor,
        groups: Tensor,
        order: Tensor | None,
        *,
        has_zeros: bool,
        is_symmetric: bool,
    ) -> None:
        """Take the fields of an Int4Matrix. is_symmetric: zero points are 8, and the largest
        absolute value of a group becomes 7.5."""
        self._values = values
        self._groups = groups
        self._order = order
        self._has_zeros = has_zeros
        self._is_symmetric = is_symmetric

    def write(self, region: tuple[slice, ...], values: Tensor) -> None:
        """See RowQuantizer."""
        first, step = region[0].start, max(1, _CHUNK_ELEMENTS // max(1, values.shape[1]))
        for start in range(0, values.shape[0], step):
            part = values[start : start + step].to(self._values.device).float()
            if self._order is not None:
                part = part[:, self._order]
            self._quantize(first + start, part)

    def _quantize(self, first: int, values: Tensor) -> None:
        rows = slice(first, first + values.shape[0])
        grouped = values.view(values.shape[0], self._groups.shape[0], -1)
        low, high = grouped.amin(2).clamp_(max=0), grouped.amax(2).clamp_(min=0)
        if self._is_symmetric:
            scale = torch.maximum(high, -low) / (_INT4_MAX / 2)
            zero = torch.full_like(scale, INT4_MIDDLE)
        else:
            scale = (high - low) / _INT4_MAX
            zero = (-low / scale).nan_to_num_().round_().clamp_(0, _INT4_MAX)  # of zeros: NaN
        scale = scale.to(self._groups.dtype)
        scale.masked_fill_(scale == 0, 1)
        self._groups[:, rows, 0] = scale.t()
        if self._has_zeros:
            self._groups[:, rows, 1] = zero.t().to(self._groups.dtype)
        whole = (grouped / scale.float().unsqueeze(2) + zero.unsqueeze(2)).round_()
        whole = whole.clamp_(0, _INT4_MAX).view_as(values)
        self._values[rows] = pack(whole.to(torch.uint8))

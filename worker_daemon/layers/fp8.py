"""The parameters of matrices in FP8: values and scales.

A merged matrix keeps the scales of its checkpoint tensors: a scale of a whole tensor is repeated
for each of its rows. So merging needs no requantization, and tensors and channels have one layout.

Shapes: K input features, M output features of this rank, G matrices merged into one.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from worker_daemon.contracts.fp8 import FP8, FP8_BLOCK, FP8_LEAST_SCALE, FP8_MAX, to_fp8
from worker_daemon.contracts.layer_ops import Fp8Matrix
from worker_daemon.errors import config_error
from worker_daemon.layers.parameter import Parameter, Piece
from worker_daemon.layers.quantization import Activations, Quantization, WeightQuantization
from worker_daemon.layers.requantize import Fp8Blocks, RowQuantizer

_WEIGHT = ".weight"
_CHUNK_ELEMENTS = 1 << 22
"""Values that are quantized at a time: their float32 copies take 16 MiB each."""


class Fp8Parameters(NamedTuple):
    """StoredMatrix in FP8."""

    weight: Parameter
    """float8_e4m3fn [M, K]"""
    scale: Parameter
    """float32 [M], or [ceil(M / 128), ceil(K / 128)] for blocks"""
    input_scale: Parameter | None
    """float32 [G]; None without static scales of inputs"""
    activations: Activations

    @property
    def matrix(self) -> Fp8Matrix:
        """See StoredMatrix."""
        weight, scale, input_scale, activations = self
        given = None if input_scale is None else input_scale.data
        return Fp8Matrix(weight.data, scale.data, given, activations)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """See StoredMatrix."""
        required = self.weight, self.scale
        return required if self.input_scale is None else (*required, self.input_scale)


class ScaledParameter(Parameter):
    """A matrix in FP8 whose scales are computed with it from values in other dtypes."""

    def __init__(
        self,
        shape: tuple[int, int],
        pieces: Sequence[Piece],
        scale: Parameter,
        *,
        name: str,
        device: torch.device,
    ) -> None:
        """scale: float32, in the shape that the subclass says."""
        super().__init__(shape, pieces, name=name, dtype=FP8, device=device)
        self._scale = scale


class QuantizingParameter(ScaledParameter):
    """A matrix in FP8 that quantizes values in other dtypes, of an unquantized checkpoint or an
    update: each row by its largest value, so that rows can arrive in any order and number. write()
    fills the scale too, float32 [M]."""

    def write(self, region: tuple[slice, ...], values: Tensor) -> None:
        """Copy values in FP8; quantize others, which must be complete rows of this rank: region
        covers all columns."""
        if values.dtype == FP8:
            self.store(region, values)
            return
        assert region[1] == slice(0, self.data.shape[1])
        target, scale = self.data[region], self._scale.data[region[0]]
        step = max(1, _CHUNK_ELEMENTS // max(1, target.shape[1]))
        for start in range(0, target.shape[0], step):
            rows = slice(start, start + step)
            quantize_rows(values[rows].to(target.device), target[rows], scale[rows])


class BlockParameter(ScaledParameter):
    """A matrix in FP8 with a scale for each block of 128 x 128 values: float32 [ceil(M / 128),
    ceil(K / 128)]."""

    def quantizer(self) -> RowQuantizer:
        """See Parameter."""
        return Fp8Blocks(self.data, self._scale.data)


def quantize_rows(values: Tensor, into: Tensor, scale: Tensor) -> None:
    """Store values [m, K] in into, float8_e4m3fn [m, K], and their scales, float32 [m]: each row's
    largest absolute value becomes 448. A row with a NaN becomes NaN."""
    scale.copy_((values.float().abs().amax(1) / FP8_MAX).clamp_(min=FP8_LEAST_SCALE))
    into.copy_(to_fp8(values, scale.unsqueeze(1)))


def is_quantized(quantization: Quantization, pieces: Sequence[Piece]) -> bool:
    """Return True if the quantization covers a matrix that is merged from these tensors.

    Raises:
        ConfigError: it covers some of them only.
    """
    modules = list(dict.fromkeys(map(_module, pieces)))
    ignored = [module for module in modules if not quantization.covers(module)]
    if ignored and len(ignored) < len(modules):
        raise config_error(
            "quantization_config",
            ignored,
            f"{', '.join(modules)} are one product, but not all of them are quantized",
            "use a checkpoint that quantizes or ignores all of them",
        )
    return not ignored


def make_fp8_parameters(
    prefix: str,
    shape: tuple[int, int],
    pieces: Sequence[Piece],
    quantization: WeightQuantization,
    device: torch.device,
) -> Fp8Parameters:
    """Return zeroed parameters of a matrix [M, K]. prefix: its name without .weight; pieces: those
    of an unquantized matrix.

    Raises:
        ConfigError: blocks of the checkpoint do not fit this rank's part.
    """

    def parameter(
        suffix: str, shape: tuple[int, ...], of: Sequence[Piece], dtype: torch.dtype
    ) -> Parameter:
        return Parameter(shape, of, name=f"{prefix}.{suffix}", dtype=dtype, device=device)

    if quantization.is_online:
        computed = [_computed_scale(piece) for piece in pieces]
        scale = parameter("weight_scale", shape[:1], computed, torch.float32)
        name = f"{prefix}.weight"
        matrix = QuantizingParameter(shape, pieces, scale, name=name, device=device)
        return Fp8Parameters(matrix, scale, None, quantization.activations)
    values = [replace(piece, kind="fp8") for piece in pieces]
    if quantization.scales == "block":
        scales = [_block_scale(piece) for piece in pieces]
        scale_shape = (_num_blocks(shape[0]), _num_blocks(shape[1]))
        scale = parameter("weight_scale", scale_shape, scales, torch.float32)
        weight: Parameter = BlockParameter(
            shape, values, scale, name=f"{prefix}.weight", device=device
        )
    else:
        make = _tensor_scale if quantization.scales == "tensor" else _channel_scale
        scale = parameter("weight_scale", shape[:1], [make(p) for p in pieces], torch.float32)
        name = f"{prefix}.weight"
        weight = QuantizingParameter(shape, values, scale, name=name, device=device)
    input_scale = None
    if quantization.activations == "static":
        modules = dict.fromkeys(map(_module, pieces))
        inputs = [_input_scale(module, index) for index, module in enumerate(modules)]
        input_scale = parameter("input_scale", (len(inputs),), inputs, torch.float32)
    return Fp8Parameters(weight, scale, input_scale, quantization.activations)


def _tensor_scale(piece: Piece) -> Piece:
    one = (slice(0, 1),)
    return Piece(_scale_name(piece), (1,), one, piece.target[:1], "scale")


def _channel_scale(piece: Piece) -> Piece:
    rows = piece.full_shape[:1]
    return Piece(_scale_name(piece), rows, piece.source[:1], piece.target[:1], "scale")


def _computed_scale(piece: Piece) -> Piece:
    target = piece.target[:1]
    num_rows = target[0].stop - target[0].start
    own = (slice(0, num_rows),)
    return Piece(_scale_name(piece), (num_rows,), own, target, "computed_scale")


def _block_scale(piece: Piece) -> Piece:
    for part, size in zip(piece.source, piece.full_shape, strict=True):
        if part.start % FP8_BLOCK or (part.stop % FP8_BLOCK and part.stop != size):
            problem = f"a rank's part of {piece.name}, {part.start}:{part.stop}, cuts a block"
            fix = f"a tensor_parallel_size that splits it at multiples of {FP8_BLOCK}"
            raise config_error("quantization_config.weight_block_size", FP8_BLOCK, problem, fix)
    if piece.target[0].start % FP8_BLOCK:
        problem = f"{piece.name} is merged with a matrix whose rows end within a block"
        fix = "use the unquantized checkpoint"
        raise config_error("quantization_config.weight_block_size", FP8_BLOCK, problem, fix)
    shape = tuple(map(_num_blocks, piece.full_shape))
    source, target = (
        tuple(slice(part.start // FP8_BLOCK, _num_blocks(part.stop)) for part in region)
        for region in (piece.source, piece.target)
    )
    return Piece(_scale_name(piece), shape, source, target, "scale")


def _input_scale(module: str, index: int) -> Piece:
    one = (slice(0, 1),)
    return Piece(f"{module}.input_scale", (1,), one, (slice(index, index + 1),), "input_scale")


def _scale_name(piece: Piece) -> str:
    return f"{_module(piece)}.weight_scale"


def _module(piece: Piece) -> str:
    return piece.name.removesuffix(_WEIGHT)


def _num_blocks(size: int) -> int:
    return -(-size // FP8_BLOCK)

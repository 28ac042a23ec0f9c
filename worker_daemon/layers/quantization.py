"""The quantization of a model's matrices, and which of them it covers. models/quantization.py reads
it from config.json."""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Literal, TypeAlias

WeightScales: TypeAlias = Literal["tensor", "channel", "block"]
"""One scale for a matrix, for each of its rows, or for each block of 128 x 128 values."""
Activations: TypeAlias = Literal["none", "dynamic", "static"]
"""Inputs of a product are not quantized, or quantized by scales computed for each token, or by one
scale from the checkpoint."""


@dataclass(frozen=True)
class IgnoredModules:
    """The matrices that a checkpoint leaves unquantized."""

    names: frozenset[str] = frozenset()
    """Complete names, without .weight."""
    patterns: tuple[str, ...] = ()
    """Regular expressions that match the beginning of a name."""
    matched: frozenset[str] = frozenset()
    """The names of the model's modules that they match."""
    paths: tuple[str, ...] = ()
    """Each matches a name that is equal to it, begins with it and a dot, or ends with it:
    transformers' modules_to_not_convert."""

    def has(self, module: str) -> bool:
        """Return True if a matrix is not quantized. module: its name without .weight."""
        return (
            module in self.names
            or module in self.matched
            or module.endswith(self.paths)
            or not self._beginnings.isdisjoint(accumulate(module.split("."), "{}.{}".format))
        )

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(self.paths)


@dataclass(frozen=True, slots=True)
class WeightQuantization:
    """Matrices of layers in FP8 (float8_e4m3fn). Embeddings, LM head and other heads are not
    quantized."""

    scales: WeightScales
    activations: Activations
    ignored: IgnoredModules = field(default_factory=IgnoredModules)
    is_online: bool = False
    """True if the checkpoint is not quantized: each rank quantizes the rows that it holds, as they
    arrive. Scales are then those of channels."""

    def covers(self, module: str) -> bool:
        """Return True if a layer's matrix is quantized. module: its checkpoint name without
        .weight."""
        return not self.ignored.has(module)


Int4Format: TypeAlias = Literal["gptq", "awq", "compressed-tensors"]
"""The packing of 4-bit values in a checkpoint, by its quant_method (layers/int4_formats.py)."""


@dataclass(frozen=True, slots=True)
class Int4Quantization:
    """Matrices of layers in 4 bits, with a scale for each group of a row's values. Embeddings, LM
    head and other heads are not quantized, nor are the inputs of products."""

    form: Int4Format
    group_size: int | None
    """Consecutive values of a row with one scale; None: all of them."""
    has_zeros: bool
    """Each group has a zero point. Otherwise the zero point is 8."""
    zero_offset: int = 0
    """Added to the zero points of the checkpoint."""
    has_order: bool = False
    """Groups are not consecutive columns: the checkpoint lists the group of each (g_idx)."""
    is_symmetric: bool = field(default=False, compare=False)
    """True if an update makes all zero points 8."""
    ignored: IgnoredModules = field(default_factory=IgnoredModules)

    def covers(self, module: str) -> bool:
        """See WeightQuantization."""
        return not self.ignored.has(module)


Quantization: TypeAlias = WeightQuantization | Int4Quantization

ONLINE = WeightQuantization("channel", "dynamic", is_online=True)
"""The quantization of an unquantized checkpoint while it is loaded."""

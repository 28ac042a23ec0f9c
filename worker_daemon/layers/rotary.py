"""Rotary position embedding (Su et al., 2021): the frequencies of each variant, the cos/sin table,
the rotation.

Frequencies are computed on the CPU in float32 by the formulas of transformers' modeling_rope_utils,
so that they are equal on every device. models/config_fields.py builds these values from
config.json.

A rotation turns the first rotary_dim elements of a head. It pairs element i with i + rotary_dim / 2
(the form of the Llama family) or, if interleaved, 2 i with 2 i + 1 (that of Su et al. and of GLM).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

MAX_TABLE_BYTES = 4 << 30
"""Eight million positions if 128 elements of each head are rotated."""


@dataclass(frozen=True, slots=True)
class DefaultRope:
    """f_i = theta^(-2i/d), i < d/2."""

    rotary_dim: int
    theta: float
    interleaved: bool = False
    attention_scaling: ClassVar[float] = 1.0
    """Factor on cos and sin."""

    def inv_freq(self) -> Tensor:
        """float32 [rotary_dim / 2] on the CPU."""
        return 1.0 / _wavelengths(self.theta, self.rotary_dim)


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Position interpolation (Chen et al., 2023): divides every frequency by `factor`."""

    rotary_dim: int
    theta: float
    factor: float
    interleaved: bool = False
    attention_scaling: ClassVar[float] = 1.0

    def inv_freq(self) -> Tensor:
        return 1.0 / _wavelengths(self.theta, self.rotary_dim) / self.factor


@dataclass(frozen=True, slots=True)
class DynamicRope:
    """NTK scaling by sequence length, without effect up to max_position_embeddings.

    Beyond that, each token would change the rotation of every cached key. Such lengths are refused
    when the configuration is resolved (`DecoderConfig.max_supported_len`), so `factor` never takes
    effect.
    """

    rotary_dim: int
    theta: float
    factor: float
    interleaved: bool = False
    attention_scaling: ClassVar[float] = 1.0

    def inv_freq(self) -> Tensor:
        return 1.0 / _wavelengths(self.theta, self.rotary_dim)


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1: divides low frequencies by `factor`, keeps high ones, and interpolates in
    between."""

    rotary_dim: int
    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    interleaved: bool = False
    attention_scaling: ClassVar[float] = 1.0

    def inv_freq(self) -> Tensor:
        inv_freq = 1.0 / _wavelengths(self.theta, self.rotary_dim)
        wavelength = 2 * math.pi / inv_freq
        context = self.original_max_position_embeddings
        smooth = (context / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - smooth) * inv_freq / self.factor + smooth * inv_freq
        is_long = wavelength > context / self.low_freq_factor
        is_short = wavelength < context / self.high_freq_factor
        return torch.where(
            is_long, inv_freq / self.factor, torch.where(is_short, inv_freq, blended)
        )


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (Peng et al., 2023): a ramp over the dimensions between interpolation and extrapolation.

    If attention_factor is None, it is computed from factor, mscale and mscale_all_dim. truncate
    rounds the ramp's ends outward to whole dimensions.
    """

    rotary_dim: int
    theta: float
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    interleaved: bool = False

    @property
    def attention_scaling(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._scale(self.mscale) / self._scale(self.mscale_all_dim)
        return self._scale(1.0)

    def inv_freq(self) -> Tensor:
        wavelengths = _wavelengths(self.theta, self.rotary_dim)
        interpolated = 1.0 / (self.factor * wavelengths)
        extrapolated = 1.0 / wavelengths
        share = 1 - self._ramp()
        return interpolated * (1 - share) + extrapolated * share

    def _scale(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def _ramp(self) -> Tensor:
        low, high = self._turning_dim(self.beta_fast), self._turning_dim(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        if low == high:
            high += 0.001
        steps = torch.arange(self.rotary_dim // 2, dtype=torch.float32)
        return ((steps - low) / (high - low)).clamp(0, 1)

    def _turning_dim(self, num_rotations: float) -> float:
        """Return the dimension that rotates num_rotations times over the original context."""
        turns = self.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return self.rotary_dim * math.log(turns) / (2 * math.log(self.theta))


@dataclass(frozen=True, slots=True)
class FactorRope:
    """Divides each frequency by a separate factor."""

    rotary_dim: int
    theta: float
    factors: tuple[float, ...]
    """rotary_dim / 2 of them."""
    attention_scaling: float
    interleaved: bool = False

    def inv_freq(self) -> Tensor:
        factors = torch.tensor(self.factors, dtype=torch.float32)
        return 1.0 / (factors * _wavelengths(self.theta, self.rotary_dim))


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE (Ding et al., 2024): two lists of factors for the frequencies, for contexts up to
    the original length and for longer ones.

    The list is chosen once, when the model is loaded, as in vLLM: the long factors if max_model_len
    exceeds the original length. transformers chooses by the current length of each sequence, which
    would change the rotation of cached keys as a sequence grows. So with the long factors, results
    are those of transformers for sequences beyond the original length.
    """

    rotary_dim: int
    theta: float
    short_factors: tuple[float, ...]
    """rotary_dim / 2 of them, like long_factors."""
    long_factors: tuple[float, ...]
    factor: float
    """Extension of the context, of which the attention factor is computed if it is None."""
    original_max_position_embeddings: int
    attention_factor: float | None = None
    interleaved: bool = False

    @property
    def attention_scaling(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        extension = math.log(self.factor) / math.log(self.original_max_position_embeddings)
        return math.sqrt(1 + extension)

    @property
    def short(self) -> FactorRope:
        """The rotation by the short factors."""
        return self._with(self.short_factors)

    @property
    def long(self) -> FactorRope:
        """The rotation by the long factors."""
        return self._with(self.long_factors)

    def for_length(self, max_model_len: int) -> FactorRope:
        """Return the rotation of a model that is loaded for contexts up to max_model_len tokens."""
        return self.long if max_model_len > self.original_max_position_embeddings else self.short

    def _with(self, factors: tuple[float, ...]) -> FactorRope:
        scaling = self.attention_scaling
        return FactorRope(self.rotary_dim, self.theta, factors, scaling, self.interleaved)


_FixedRope = DefaultRope | LinearRope | DynamicRope | Llama3Rope | YarnRope | FactorRope
Rope = DefaultRope | LinearRope | DynamicRope | Llama3Rope | YarnRope | LongRope


def table_bytes(ropes: Iterable[Rope], length: int) -> int:
    """Return the memory of these rotations' tables, each of `length` positions."""
    return length * sum(rope.rotary_dim for rope in ropes) * torch.float32.itemsize


def max_table_length(ropes: Iterable[Rope]) -> int:
    """Return the largest number of positions of these rotations' tables, which are stored in
    full."""
    return MAX_TABLE_BYTES // max(1, table_bytes(ropes, 1))


def is_finite(rope: Rope, length: int) -> bool:
    """Return True if a table of that many positions has only finite values."""
    try:
        if isinstance(rope, LongRope):
            return _is_finite(rope.short, length) and _is_finite(rope.long, length)
        return _is_finite(rope, length)
    except (ArithmeticError, ValueError):  # factors beyond the range of a float
        return False


def _is_finite(rope: _FixedRope, length: int) -> bool:
    fastest = float(rope.inv_freq().abs().max())  # NaN if any element is
    largest = max(fastest, fastest * length, abs(rope.attention_scaling))
    return math.isfinite(fastest) and largest <= torch.finfo(torch.float32).max


def rotary_table(rope: Rope, max_model_len: int, device: torch.device) -> Tensor:
    """Return float32 [max_model_len, 2, rotary_dim / 2]: cos and sin of every position's angles."""
    fixed = rope.for_length(max_model_len) if isinstance(rope, LongRope) else rope
    inv_freq = fixed.inv_freq()
    if (
        device.type == "meta"
    ):  # arithmetic on the meta device imports torch's compiler, which takes seconds
        return torch.empty((max_model_len, 2, inv_freq.numel()), device=device)
    positions = torch.arange(max_model_len, dtype=torch.float32, device=device)
    angles = positions.unsqueeze(-1) * inv_freq.to(device)
    scaling = fixed.attention_scaling
    return torch.stack((angles.cos() * scaling, angles.sin() * scaling), dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first R elements of x [N, heads, D] by cos and sin, float32 [N, 1, R / 2]; the
    others stay. Pairs element i with i + R / 2 or, if interleaved, 2 i with 2 i + 1. Rounds
    once."""
    rotary_dim = 2 * cos.shape[-1]
    turning, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        first, second = turning.view(*x.shape[:-1], rotary_dim // 2, 2).unbind(-1)
    else:
        first, second = turning.chunk(2, dim=-1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    turned = turned.to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def _wavelengths(theta: float, rotary_dim: int) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rotary_dim
    return torch.pow(theta, exponents)

"""Dummy weights: a pure function of (tensor name, full shape, index, seed), so the same for every
split and device.

Every element is an integer hash of its own row and column. There is no sequential generator, so
each rank makes only its shard. The hash is the two-round 32-bit mix "lowbias32" of Wellons (2018),
in wrapping int32 arithmetic.
"""

import hashlib
import math
from types import MappingProxyType

import torch
from torch import Tensor

from worker_daemon.contracts.fp8 import FP8_MAX
from worker_daemon.layers.parameter import Piece

_STD = 0.02
# The sum of two independent uniform 16-bit integers: mean 65535, variance (2^32 - 1) / 6.
_HASH_MEAN = 65535
_HASH_STD = math.sqrt((2**32 - 1) / 6)
_SCALES = MappingProxyType(
    {
        "scale": _STD * _HASH_MEAN / _HASH_STD / FP8_MAX,
        "input_scale": 1 / 16,
        "int4_scale": _STD / math.sqrt((16**2 - 1) / 12),
        "int4_zero": 0x77777777,
    }
)
"""Constants by kind: the largest value becomes the largest of FP8; inputs may be up to 28; 4-bit
values are uniform, and their zero points are 7, or 8 where a format adds 1."""
_MIX_1 = 0x7FEB352D
_MIX_2 = 0x846CA68B - 2**32
_COLUMN_STEP = 0x9E3779B1 - 2**32
_CHUNK_ELEMENTS = {"cpu": 1 << 17}
_CHUNK_ELEMENTS_DEVICE = 1 << 26


def fill_dummy(target: Tensor, piece: Piece, seed: int) -> None:
    """Overwrite target, the region of a parameter that piece describes (1 or 2 dimensions).

    Values have a triangular distribution with standard deviation 0.02 around 0, or around 1 for
    norms. Routed embeddings have standard deviation 1: attention adds nearly the same vector to all
    tokens, which would otherwise dominate the residual stream and send most of them to the same
    experts. A matrix in FP8 has the values of an unquantized one, rounded. All scales are equal,
    since a rank may not hold whole rows. 4-bit values are uniform.
    """
    if piece.kind in _SCALES:
        target.fill_(_SCALES[piece.kind])
        return
    device = target.device
    rows, columns = (slice(0, 1), *piece.source) if target.dim() == 1 else piece.source
    matrix = target.unsqueeze(0) if target.dim() == 1 else target
    key_row, key_column = _keys(piece, seed)
    column_part = _range(columns, device).mul_(_COLUMN_STEP).add_(key_column)
    row_part = _mix(_range(rows, device).add_(key_row)).unsqueeze(1)
    mean = 1.0 if piece.kind == "norm" else 0.0
    limit = _CHUNK_ELEMENTS.get(device.type, _CHUNK_ELEMENTS_DEVICE)
    step = max(1, limit // max(1, matrix.shape[1]))
    for start in range(0, matrix.shape[0], step):
        chunk = slice(start, start + step)
        counters = row_part[chunk] + column_part
        if piece.kind == "int4":
            matrix[chunk].copy_(_mix(counters))
            continue
        values = _values(counters).add_(mean)
        if piece.kind == "routed_embedding":
            values.mul_(1 / _STD)
        if piece.kind == "fp8":
            values.div_(_SCALES["scale"]).clamp_(-FP8_MAX, FP8_MAX)
        matrix[chunk].copy_(values)


def _values(counters: Tensor) -> Tensor:
    """int32 -> float32; exact steps and one rounded product, so equal on all devices."""
    mixed = _mix(counters)
    low = mixed & 0xFFFF
    high = mixed.bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    return low.add_(high).sub_(_HASH_MEAN).to(torch.float32).mul_(_STD / _HASH_STD)


def _mix(x: Tensor) -> Tensor:
    """Hash int32 in place; the masks turn torch's arithmetic shifts into logical ones."""
    x ^= (x >> 16) & 0xFFFF
    x *= _MIX_1
    x ^= (x >> 15) & 0x1FFFF
    x *= _MIX_2
    x ^= (x >> 16) & 0xFFFF
    return x


def _keys(piece: Piece, seed: int) -> tuple[int, int]:
    """Return two signed 32-bit keys."""
    text = f"{piece.name}\0{piece.full_shape}\0{seed}".encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    return (
        int.from_bytes(digest[:4], "little", signed=True),
        int.from_bytes(digest[4:], "little", signed=True),
    )


def _range(region: slice, device: torch.device) -> Tensor:
    return torch.arange(region.start, region.stop, dtype=torch.int32, device=device)

"""Dummy weights: a pure function of (tensor name, full shape, index, seed), so the same for every
split and device.

Every element is an integer hash of its own row and column. There is no sequential generator, so
each rank makes only its shard. The hash is the two-round 32-bit mix "lowbias32" of Wellons (2018),
in wrapping int32 arithmetic.
"""

import hashlib
import math
from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from worker_daemon.contracts.fp8 import FP8_MAX
from worker_daemon.layers.parameter import Kind, Piece

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


def max_chunk_elements(device: torch.device) -> int:
    """Return the most elements that fill_dummy computes at once, which bounds its memory."""
    return _CHUNK_ELEMENTS.get(device.type, _CHUNK_ELEMENTS_DEVICE)


def fill_dummy(targets: Sequence[Tensor], pieces: Sequence[Piece], seed: int) -> None:
    """Overwrite the targets, the regions of parameters that pieces describe (1 or 2 dimensions, all
    of one shape, kind and device). On a GPU, one call for many small matrices (experts) is faster
    than a call for each.

    Values have a triangular distribution with standard deviation 0.02 around 0, or around 1 for
    norms. Routed embeddings have standard deviation 1: attention adds nearly the same vector to all
    tokens, which would otherwise dominate the residual stream and send most of them to the same
    experts. A matrix in FP8 has the values of an unquantized one, rounded. All scales are equal,
    since a rank may not hold whole rows. 4-bit values are uniform.
    """
    kind, device = pieces[0].kind, targets[0].device
    if kind in _SCALES:
        for target in targets:
            target.fill_(_SCALES[kind])
        return
    matrices = [target.unsqueeze(0) if target.dim() == 1 else target for target in targets]
    num_rows, num_columns = matrices[0].shape
    row_part, column_part = _hash_inputs(pieces, num_rows, num_columns, seed, device)
    step = max(1, max_chunk_elements(device) // max(1, len(pieces) * num_columns))
    for start in range(0, num_rows, step):
        chunk = slice(start, start + step)
        values = _values_of_kind(kind, row_part[:, chunk, None] + column_part[:, None])
        for matrix, own in zip(matrices, values, strict=True):
            matrix[chunk].copy_(own)


def _hash_inputs(
    pieces: Sequence[Piece], num_rows: int, num_columns: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return what each row and each column adds to the hash's input, int32 [P, R] and [P, C], for P
    pieces of R rows and C columns."""
    sources = [
        piece.source if len(piece.source) > 1 else (slice(0, 1), *piece.source) for piece in pieces
    ]
    firsts = torch.tensor(
        [[part.start for part in source] for source in sources], dtype=torch.int32
    )
    keys = torch.tensor([_keys(piece, seed) for piece in pieces], dtype=torch.int32)
    first_row, first_column, row_key, column_key = (
        torch.hstack([firsts, keys]).to(device)[..., None].unbind(1)
    )
    row = torch.arange(num_rows, dtype=torch.int32, device=device)
    column = torch.arange(num_columns, dtype=torch.int32, device=device)
    columns = (column + first_column).mul_(_COLUMN_STEP).add_(column_key)
    return _mix((row + first_row).add_(row_key)), columns


def _values_of_kind(kind: Kind, counters: Tensor) -> Tensor:
    """Return a tensor's values (int32 for 4 bits, otherwise float32) from the hash's input, int32
    of any shape, which is overwritten."""
    if kind == "int4":
        return _mix(counters)
    values = _values(counters).add_(1.0 if kind == "norm" else 0.0)
    if kind == "routed_embedding":
        values.mul_(1 / _STD)
    if kind == "fp8":
        values.div_(_SCALES["scale"]).clamp_(-FP8_MAX, FP8_MAX)
    return values


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

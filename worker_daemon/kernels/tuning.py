"""Kernels and tiles of skinny GEMMs, read from files that ship with the package.

One file per chip, written by `python -m benchmarks.linear_kernels --tune`, so that nothing is
tuned when a daemon starts.

Letters: y[M, O] = x[M, I] W[O, I]^T.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files

ROW_BUCKETS = (1, 16, 32, 64)
"""Values of M that have tiles; a product uses the smallest bucket that is at least its M."""

_SAME_CHIP = re.compile(r"^nvidia_(h100_80gb_hbm3|gh200_\d+gb|gh200_144g_hbm3e|h200_nvl)")
_TUNED_CHIP = "nvidia_h200"
"""Devices with the chip (GH100, 132 SMs) of this one: they use its tiles, if they have no file."""


@dataclass(frozen=True, slots=True)
class VectorTile:
    """One program's share of a GEMV: block_o rows of W, block_i columns at a time.

    Both are powers of two.
    """

    block_o: int
    block_i: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class MatrixTile:
    """One program's share of a skinny GEMM: block_o rows of W, all rows of x.

    It takes block_i columns at a time; both are powers of two >= 16. The columns are divided among
    num_splits programs. num_stages is the depth of the software pipeline. prefetch is the number of
    columns of its rows of W that each program prefetches before x is ready.
    """

    block_o: int
    block_i: int
    num_splits: int
    num_warps: int
    num_stages: int
    prefetch: int


Tile = VectorTile | MatrixTile


def default_vector_tile(num_inputs: int) -> VectorTile:
    """The tile for one row of a shape without an entry: 64 weights per thread.

    On an H200 it is the best tile for products fused with a norm, which lose most with a bad tile.
    """
    block_i = min(4096, max(16, 1 << (num_inputs - 1).bit_length()))
    if block_i <= 1024:
        return VectorTile(block_o=8, block_i=block_i, num_warps=4)
    return VectorTile(block_o=4, block_i=block_i, num_warps=8)


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tiles of one device, by (O, I, bucket of M); None if torch is faster.

    torch also computes buckets without an entry, unless M = 1.
    """

    tiles: Mapping[tuple[int, int, int], Tile | None]

    def tile(self, num_rows: int, num_outputs: int, num_inputs: int) -> Tile | None:
        """Return the tile of a product of M x O x I, M >= 1, or None for torch."""
        bucket = row_bucket(num_rows)
        if bucket is None:
            return None
        key = (num_outputs, num_inputs, bucket)
        if bucket == 1 and key not in self.tiles:
            return default_vector_tile(num_inputs)
        return self.tiles.get(key)


def row_bucket(num_rows: int) -> int | None:
    """Return the bucket of M, or None beyond the largest."""
    return next((bucket for bucket in ROW_BUCKETS if num_rows <= bucket), None)


def load_tuning(device_name: str) -> Tuning:
    """Return the tiles shipped for a device, by the name that the GPU driver reports, or those of a
    device with the same chip; none if unknown."""
    own = file_name(device_name)
    for name in (own, _SAME_CHIP.sub(_TUNED_CHIP, own)):
        resource = files(__package__) / "tuned" / name
        if resource.is_file():
            return parse_tuning(resource.read_text())
    return Tuning({})


def file_name(device_name: str) -> str:
    """Return a device's file name: NVIDIA H200 -> nvidia_h200.json"""
    return re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_") + ".json"


def parse_tuning(text: str) -> Tuning:
    """Parse the output of format_tuning; raise ValueError, KeyError or TypeError for other text."""
    return Tuning(
        {
            _parse_shape(shape, bucket): _parse_tile(tile)
            for shape, buckets in json.loads(text).items()
            for bucket, tile in buckets.items()
        }
    )


def format_tuning(tuning: Tuning) -> str:
    """Return JSON with a line per shape and bucket: {"OxI": {"bucket": {...}}}."""
    shapes: dict[str, list[str]] = {}
    for (num_outputs, num_inputs, bucket), tile in sorted(tuning.tiles.items()):
        fields = "null" if tile is None else json.dumps(asdict(tile))
        shapes.setdefault(f"{num_outputs}x{num_inputs}", []).append(f'    "{bucket}": {fields}')
    blocks = [f'  "{shape}": {{\n' + ",\n".join(rows) + "\n  }" for shape, rows in shapes.items()]
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def _parse_shape(shape: str, bucket: str) -> tuple[int, int, int]:
    num_outputs, num_inputs = shape.split("x")
    return int(num_outputs), int(num_inputs), int(bucket)


def _parse_tile(fields: dict[str, int] | None) -> Tile | None:
    if fields is None:
        return None
    return MatrixTile(**fields) if "num_splits" in fields else VectorTile(**fields)

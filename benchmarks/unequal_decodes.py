"""Times attention over sequences of unequal lengths: `python -m benchmarks.unequal_decodes`.

Compares each sequence cut into as many splits, blocks of a prompt uncut, and decodes beside it by
its kernel ("fixed"), with the device's schedule ("cut"), as a layer would launch them: in a CUDA
graph of 32 layers, which share one schedule, with dependent launch. They take turns at caches that
together exceed the L2 cache. Times are medians over replays, divided by the layers. --pieces times
other bounds of a piece's keys.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import torch
import triton.testing

from benchmarks.kernels import DTYPE, HBM_BYTES_PER_S, LLAMA_8B, MAX_ERROR, conclude, graph_ms
from benchmarks.paged_reference import PagedBatch, make_batch, relative_error
from worker_daemon.contracts.attention import AttentionMetadata, AttentionStep
from worker_daemon.contracts.fp8 import FP8
from worker_daemon.kernels.launch import has_dependent_launch
from worker_daemon.kernels.paged_attention import paged_attention
from worker_daemon.kernels.paged_decode import rotate_and_attend
from worker_daemon.kernels.tiles import (
    MIN_BLOCK_PIECE_KEYS,
    MIN_PIECE_KEYS,
    DeviceLimits,
    run_at_once,
)

FIXED = 2**30
"""A bound that no sequence reaches: none is cut."""

NUM_LAYERS = 32
"""Layers of Llama 8B."""

CACHE_BYTES = 400e6
"""Layers have caches of their own up to this many bytes, eight times the L2 cache; two at least."""

Lengths = list[tuple[int, int]]


@dataclass(frozen=True)
class Case:
    """A step; lengths are (query_len, seq_len). longest: the bound of its graph, 0 = exact."""

    name: str
    lengths: Lengths
    longest: int = 0

    @property
    def is_decode(self) -> bool:
        return all(query_len == 1 for query_len, _ in self.lengths)

    def bytes_read(self, itemsize: int) -> int:
        """Bytes with each key and value read once, each query read and output written once."""
        keys = sum(seq_len for _, seq_len in self.lengths) * LLAMA_8B.num_kv_heads
        queries = sum(query_len for query_len, _ in self.lengths) * LLAMA_8B.num_q_heads
        return 2 * LLAMA_8B.head_dim * (keys * itemsize + queries * DTYPE.itemsize)


def spread(count: int) -> Lengths:
    """Return decodes of 150 to 2,000 keys, evenly spread."""
    return [(1, 150 + 1850 * place // max(1, count - 1)) for place in range(count)]


CASES = (
    Case("1x32768+512", [(1, 32768), (512, 512)]),
    Case("64x160+512", [(1, 160)] * 64 + [(512, 512)], 8192),
    Case("64x1000+16@9984", [(1, 1000)] * 64 + [(16, 10000)]),
    Case("32x1000+64@99936", [(1, 1000)] * 32 + [(64, 100000)]),
    Case("900+64@99936", [(900, 900), (64, 100000)]),
    Case("1x32768+511x128", [(1, 32768)] + [(1, 128)] * 511),
    Case("1x131072+31x4096", [(1, 131072)] + [(1, 4096)] * 31),
    Case("4x30000", [(1, 30000)] * 4),
    Case("32x8000", [(1, 8000)] * 32),
    Case("29x150..2000", spread(29)),
    Case("82x150..2000", spread(82)),
    Case("256x150..2000", spread(256)),
    *(Case(f"{count}x1024", [(1, 1024)] * count) for count in (1, 16, 64, 256)),
    *(Case(f"{count}x1024 of 4096", [(1, 1024)] * count, 4096) for count in (16, 64, 256)),
)


@dataclass(frozen=True)
class Ones:
    """KVScales of 1."""

    values: torch.Tensor


@dataclass(frozen=True)
class Timing:
    """Microseconds of a layer, and the error relative to the case's first timing."""

    case: str
    min_piece: int
    us: float
    megabytes: float
    floor_us: float
    error: float

    @property
    def ratio(self) -> float:
        return self.us / self.floor_us


class Layers:
    """The layers of a case's step, over caches of their own."""

    def __init__(self, case: Case, has_fp8_cache: bool) -> None:
        batch = make_batch(LLAMA_8B, case.lengths, dtype=DTYPE, device="cuda", seed=1)
        batch.store()
        # As the runner does: the longest first.
        order = batch.seq_lens.argsort(descending=True, stable=True).int()
        cache = batch.kv_cache.nan_to_num().to(FP8) if has_fp8_cache else batch.kv_cache
        itemsize = cache.element_size()
        self.num_bytes = case.bytes_read(itemsize)
        count = max(2, min(NUM_LAYERS, round(CACHE_BYTES / self.num_bytes)))
        self.caches = [cache, *(cache.clone() for _ in range(count - 1))]
        longest = case.longest or batch.max_seq_len
        self._batch: PagedBatch = replace(
            batch, history=[], kv_cache=cache, seq_order=order, max_seq_len=longest
        )
        self._lens = batch.metadata.query_lens_np, batch.metadata.seq_lens_np
        limits = DeviceLimits.of(torch.device("cuda"))
        num_programs = batch.num_seqs * LLAMA_8B.num_kv_heads
        self._is_fused = case.is_decode and run_at_once(num_programs, limits)
        self._qkv = torch.cat((batch.q, batch.k, batch.v), dim=1).flatten(1)
        half = torch.zeros(batch.max_seq_len, LLAMA_8B.head_dim // 2, device="cuda")
        self._table = torch.stack((half.cos(), half.sin()), dim=1)
        self._positions = (batch.seq_lens - 1).int()
        self._scales = Ones(torch.ones(2, LLAMA_8B.num_kv_heads, device="cuda"))
        self._has_scales = has_fp8_cache
        self._pdl = has_dependent_launch(torch.device("cuda"))

    def run(self, min_piece: int) -> torch.Tensor:
        """Launch the layers of one step. Returns the first one's output."""
        metadata = AttentionMetadata(
            self._batch.query_start_loc, self._batch.seq_lens, self._batch.seq_order,
            self._batch.block_table, self._batch.seq_rows, self._batch.slot_mapping,
            self._batch.num_seqs, self._batch.max_query_len, self._batch.max_seq_len,
            *self._lens,
        )  # fmt: skip
        caches = cycle(self.caches)
        outs = [self._attend(next(caches), metadata, min_piece) for _ in range(NUM_LAYERS)]
        return outs[0]

    def _attend(
        self, cache: torch.Tensor, metadata: AttentionMetadata, min_piece: int
    ) -> torch.Tensor:
        scales = self._scales if self._has_scales else None
        if self._is_fused:
            step = AttentionStep(self._positions, self._table, metadata)
            return rotate_and_attend(
                self._qkv, cache, step, None, scale=LLAMA_8B.scale, window=None, kv_scales=scales,
                min_piece=min_piece, pdl=self._pdl,
            )  # fmt: skip
        return paged_attention(
            self._batch.q, cache, metadata, scale=LLAMA_8B.scale, window=None, kv_scales=scales,
            min_piece=min_piece, min_block_piece=self._least(min_piece), pdl=self._pdl,
        )  # fmt: skip

    @staticmethod
    def _least(min_piece: int) -> int:
        """Return the bound of a block's pieces."""
        return FIXED if min_piece == FIXED else MIN_BLOCK_PIECE_KEYS


def run_case(case: Case, pieces: Sequence[int], has_fp8_cache: bool) -> list[Timing]:
    """Time each bound of a piece, the first without any."""
    layers = Layers(case, has_fp8_cache)
    expected, timings = layers.run(FIXED), []
    floor_us = layers.num_bytes / HBM_BYTES_PER_S * 1e6
    for min_piece in (FIXED, *pieces):
        error = relative_error(layers.run(min_piece), expected.double())

        def launch(bound: int = min_piece) -> None:
            layers.run(bound)

        us = graph_ms(launch) * 1e3 / NUM_LAYERS
        timings.append(
            Timing(case.name, min_piece, us, layers.num_bytes / 1e6, floor_us, float(error))
        )
    return timings


HEADER = f"{'step':<22}{'MB':>9}{'floor us':>10}{'cut':>7}{'us':>10}{'ratio':>8}{'error':>10}"


def line(timing: Timing) -> str:
    cut = "fixed" if timing.min_piece == FIXED else str(timing.min_piece)
    return (
        f"{timing.case:<22}{timing.megabytes:>9.1f}{timing.floor_us:>10.1f}{cut:>7}"
        f"{timing.us:>10.1f}{timing.ratio:>8.2f}{timing.error:>10.1e}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fp8", action="store_true", help="over a cache in FP8")
    parser.add_argument("--only", help="steps whose name has this")
    parser.add_argument(
        "--pieces", type=int, nargs="+", default=[MIN_PIECE_KEYS], help="keys of a piece, at least"
    )
    parser.add_argument("--out", type=Path, help="where to write every measurement as JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA device", file=sys.stderr)
        return 2
    print(torch.cuda.get_device_name(), f"torch {torch.__version__} triton {triton.__version__}")
    print(HEADER)
    timings = []
    for case in CASES:
        if arguments.only is None or arguments.only in case.name:
            for timing in run_case(case, arguments.pieces, arguments.fp8):
                timings.append(timing)
                print(line(timing), flush=True)
            torch.cuda.empty_cache()
    return conclude(timings, line, MAX_ERROR, arguments.out)


if __name__ == "__main__":
    sys.exit(main())

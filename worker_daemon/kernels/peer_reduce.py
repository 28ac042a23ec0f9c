"""All-reduce of short messages over memory that the ranks of a group write to each other directly,
alone or fused with the residual addition and the norms that follow: see peer_words.py.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_daemon.contracts.layer_ops import NormedSum
from worker_daemon.contracts.window import Window
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import await_previous, launch_options, row_warps, start_next
from worker_daemon.kernels.norm import offset_gain
from worker_daemon.kernels.peer_words import (
    POLLS_PER_STOP,
    PROGRAMS,
    WORD_BYTES,
    WORD_DTYPES,
    addresses_of,
    begin_turn,
    end_turn,
    high_half,
    low_half,
    pack_halves,
    region_words,
    take_words,
    unique_block,
    window_at,
    words_of,
)

_DTYPES = (torch.bfloat16, torch.float16)
_LIMITS_BYTES = {("NVIDIA H200", 2): 4 << 20}
"""(device, ranks): bytes up to which a one-shot reduction was measured to be faster than NCCL."""
_UNMEASURED_LIMIT_BYTES = 256 << 10
"""Limit for other devices, with two ranks; a rank sends more with more ranks."""


class PeerReduce:
    """The reductions over one window. Owns a little device memory; step thread only.

    Every rank makes the same calls in the same order, on one stream, in CUDA graphs or outside.
    """

    def __init__(
        self,
        window: Window,
        device: torch.device,
        *,
        pdl: bool,
        limit_bytes: int | None = None,
        max_programs: int = PROGRAMS,
        polls_per_stop: int = POLLS_PER_STOP,
    ) -> None:
        """window: new, all words blank on all ranks. pdl: see launch.py. limit_bytes overrides the
        measured limit. max_programs: programs of one launch, which must all fit on the device at
        once. Both must be equal on all ranks. polls_per_stop: polls of a missing word between two
        checks of the stop flag."""
        self._rank = window.rank
        self._size = len(window.addresses)
        self._blank = window.blank
        self._addresses = addresses_of(window, device)
        self._turns = torch.zeros(max_programs, dtype=torch.int32, device=device)
        self._region_words = region_words(window, max_programs)
        self._pdl = pdl
        self._max_programs = max_programs
        self._polls_per_stop = polls_per_stop
        most = max_programs * self._region_words * WORD_BYTES
        measured = _limit_bytes(device, self._size) if limit_bytes is None else limit_bytes
        self.limit_bytes = min(most, measured)
        """Largest message for which this is worthwhile."""

    def takes(self, x: Tensor) -> bool:
        """Return True if x [..., H] can be reduced here and is short enough to be worthwhile."""
        row_words = x.shape[-1] * x.element_size() // WORD_BYTES
        return (
            x.dtype in _DTYPES
            and x.shape[-1] % 2 == 0
            and 0 < x.numel() * x.element_size() <= self.limit_bytes
            and self._rows_per_program(x.numel() // x.shape[-1]) * row_words <= self._region_words
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x [..., H] over the ranks, in float32 in the order of the ranks,
        rounded once: the same bits on every rank. A new tensor; x must be contiguous, and
        `takes(x)`."""
        total = torch.empty_like(x)
        self._launch(total, total, x, None)
        return total

    def all_reduce_and_norm(self, source: NormedSum) -> tuple[Tensor, Tensor]:
        """Return the norm and the sum of source, [N, H], whose part is first summed over the ranks;
        each is rounded to their dtype. Two new tensors."""
        part = source.part
        assert part is not None
        normed, total = torch.empty_like(part), torch.empty_like(part)
        self._launch(normed, total, part, source)
        return normed, total

    def _launch(
        self,
        normed: Tensor,
        total: Tensor,
        x: Tensor,
        fused: NormedSum | None,
    ) -> None:
        assert x.is_contiguous()
        residual, norm, x_norm = (None, None, None) if fused is None else fused[1:]
        assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
        size = x.shape[-1] // 2
        num_rows = x.numel() // x.shape[-1]
        num_warps = row_warps(triton.next_power_of_2(size))
        source = words_of(x)
        _peer_reduce_kernel[(min(num_rows, self._max_programs),)](
            words_of(normed),
            words_of(total),
            source,
            source if residual is None else words_of(residual),
            source if norm is None else words_of(norm.weight),
            0.0 if norm is None else norm.eps,
            None if x_norm is None else words_of(x_norm.weight),
            None if x_norm is None else x_norm.eps,
            self._addresses,
            self._turns,
            num_rows,
            RANK=self._rank,
            RANKS=self._size,
            BLANK=self._blank,
            REGION=self._region_words,
            ROWS=self._rows_per_program(num_rows),
            SIZE=size,
            BLOCK=unique_block(size, num_warps),
            DTYPE=WORD_DTYPES[x.dtype],
            POLLS=self._polls_per_stop,
            FUSED=fused is not None,
            WEIGHT_OFFSET=0.0 if norm is None else norm.weight_offset,
            X_WEIGHT_OFFSET=0.0 if x_norm is None else x_norm.weight_offset,
            PDL=self._pdl,
            num_warps=num_warps,
            enable_fp_fusion=True,
            **launch_options(self._pdl),
        )

    def _rows_per_program(self, num_rows: int) -> int:
        """Return the rows of a program, a power of two so that few variants are compiled."""
        return int(triton.next_power_of_2(-(-num_rows // self._max_programs)))


def _limit_bytes(device: torch.device, size: int) -> int:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return _LIMITS_BYTES.get((name, size), _UNMEASURED_LIMIT_BYTES // max(size - 1, 1))


@triton.jit
def _load_gain(weight, word, SIZE: tl.constexpr):
    """Return the words of a norm's weight; 0 if there is no norm."""
    if weight is None:
        gain = tl.zeros_like(word)
    else:
        gain = tl.load(weight + word, mask=word < SIZE, other=0)
    return gain


@triton.jit
def _normed(
    low, high, gain, eps, SIZE: tl.constexpr, WEIGHT_OFFSET: tl.constexpr, DTYPE: tl.constexpr
):
    """Return the norm of a row of SIZE words, rounded to DTYPE before it but not after it."""
    low = low.to(DTYPE).to(tl.float32)
    high = high.to(DTYPE).to(tl.float32)
    scale = tl.rsqrt(tl.sum(low * low + high * high) / (2 * SIZE) + eps)
    low = low * scale * offset_gain(low_half(gain, DTYPE), WEIGHT_OFFSET)
    high = high * scale * offset_gain(high_half(gain, DTYPE), WEIGHT_OFFSET)
    return low, high


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _peer_reduce_kernel(
    normed,
    total,
    x,
    residual,
    weight,
    eps,
    x_weight,
    x_eps,
    addresses,
    turns,
    num_rows,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLANK: tl.constexpr,
    REGION: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    POLLS: tl.constexpr,
    FUSED: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    X_WEIGHT_OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    """weight: of the norm of the result, if FUSED. x_weight: of a norm of the sum over the ranks,
    before it is added; None: no such norm."""
    start_next(PDL)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    word = tl.arange(0, BLOCK)
    stop = tl.load(addresses + RANKS).to(tl.pointer_type(tl.int32))
    window = window_at(addresses + RANK)
    if FUSED:
        gain = _load_gain(weight, word, SIZE)
    x_gain = _load_gain(x_weight, word, SIZE)
    await_previous(PDL)
    turn, is_stopped, slot = begin_turn(turns, RANKS, REGION)

    for index in range(ROWS):
        row = program + index * programs
        inside = word < tl.where(row < num_rows, SIZE, 0)
        own = tl.load(x + row.to(tl.int64) * SIZE + word, mask=inside, other=0)
        own = tl.where(own == BLANK, 0, own)
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                inbox = window_at(addresses + peer) + slot + RANK * REGION + index * SIZE
                tl.store(inbox + word, own, mask=inside)

    for index in range(ROWS):
        row = program + index * programs
        inside = word < tl.where(row < num_rows, SIZE, 0)
        element = row.to(tl.int64) * SIZE + word
        # Before the wait, so that these loads are complete when it ends.
        own = tl.load(x + element, mask=inside, other=0)
        own = tl.where(own == BLANK, 0, own)
        if FUSED:
            before = tl.load(residual + element, mask=inside, other=0)
        low = tl.zeros((BLOCK,), tl.float32)
        high = tl.zeros((BLOCK,), tl.float32)
        for source in tl.static_range(RANKS):
            if source == RANK:
                words = own
            else:
                inbox = window + slot + source * REGION + index * SIZE + word
                words, is_stopped = take_words(inbox, inside, stop, is_stopped, BLANK, POLLS)
            low += low_half(words, DTYPE)
            high += high_half(words, DTYPE)
        if x_weight is not None:
            low, high = _normed(low, high, x_gain, x_eps, SIZE, X_WEIGHT_OFFSET, DTYPE)
        if FUSED:
            low = low_half(before, DTYPE) + low.to(DTYPE).to(tl.float32)
            high = high_half(before, DTYPE) + high.to(DTYPE).to(tl.float32)
            tl.store(total + element, pack_halves(low, high, DTYPE), mask=inside)
            low, high = _normed(low, high, gain, eps, SIZE, WEIGHT_OFFSET, DTYPE)
            tl.store(normed + element, pack_halves(low, high, DTYPE), mask=inside)
        else:
            tl.store(total + element, pack_halves(low, high, DTYPE), mask=inside)
    end_turn(turns, turn, is_stopped)

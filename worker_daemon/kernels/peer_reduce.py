"""All-reduce of short messages over memory that the ranks of a group write to each other directly,
alone or fused with the residual addition and the norms that follow.

Each program stores its rows into every peer's window and then polls its own window, whose words are
`blank` until they arrive. This needs no flag and no fence, since each word is its own flag
(Lamport's one-word channel, as in NCCL's and TensorRT-LLM's low-latency protocols). Words are reset
to blank after they are read. Two slots per program suffice: a peer stores into a slot again two
calls later. By then it has received this rank's next call, so the call that reset the slot has
ended.
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

PROGRAMS = 128
"""Maximum number of programs: all of them fit on the device at one time, together with other
kernels."""
SLOTS = 2

_STOPPED = tl.constexpr(-1)
_TURN_MASK = tl.constexpr(0x7FFFFFFF)

_DTYPES = (torch.bfloat16, torch.float16)
_WORD_BYTES = 4
_ALIGNED = 4
"""Words of the widest access."""
_LIMITS_BYTES = {("NVIDIA H200", 2): 4 << 20}
"""(device, ranks): bytes up to which a one-shot reduction was measured to be faster than NCCL."""
_UNMEASURED_LIMIT_BYTES = 256 << 10
"""Limit for other devices, with two ranks; a rank sends more with more ranks."""
_POLLS_PER_STOP = 1 << 14
"""Polls between two checks of the stop flag, about 10 ms. Host memory is slow: a check by a
thousand warps takes half a millisecond. With more frequent checks, a late rank and the ranks that
wait for it would slow each other."""


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
        polls_per_stop: int = _POLLS_PER_STOP,
    ) -> None:
        """window: new, all words blank on all ranks. pdl: see launch.py. limit_bytes overrides the
        measured limit. max_programs: programs of one launch, which must all fit on the device at
        once. Both must be equal on all ranks. polls_per_stop: polls of a missing word between two
        checks of the stop flag."""
        self._rank = window.rank
        self._size = len(window.addresses)
        self._blank = window.blank
        self._addresses = torch.tensor(
            [*window.addresses, window.stop_address], dtype=torch.int64, device=device
        )
        self._turns = torch.zeros(max_programs, dtype=torch.int32, device=device)
        regions = max_programs * SLOTS * self._size
        self._region_words = window.num_bytes // (regions * _WORD_BYTES) // _ALIGNED * _ALIGNED
        self._pdl = pdl
        self._max_programs = max_programs
        self._polls_per_stop = polls_per_stop
        most = max_programs * self._region_words * _WORD_BYTES
        measured = _limit_bytes(device, self._size) if limit_bytes is None else limit_bytes
        self.limit_bytes = min(most, measured)
        """Largest message for which this is worthwhile."""

    def takes(self, x: Tensor) -> bool:
        """Return True if x [..., H] can be reduced here and is short enough to be worthwhile."""
        row_words = x.shape[-1] * x.element_size() // _WORD_BYTES
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
        block = triton.next_power_of_2(size)
        source = _words(x)
        _peer_reduce_kernel[(min(num_rows, self._max_programs),)](
            _words(normed),
            _words(total),
            source,
            source if residual is None else _words(residual),
            source if norm is None else _words(norm.weight),
            0.0 if norm is None else norm.eps,
            None if x_norm is None else _words(x_norm.weight),
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
            BLOCK=block,
            DTYPE=_TRITON_DTYPES[x.dtype],
            POLLS=self._polls_per_stop,
            FUSED=fused is not None,
            WEIGHT_OFFSET=0.0 if norm is None else norm.weight_offset,
            X_WEIGHT_OFFSET=0.0 if x_norm is None else x_norm.weight_offset,
            PDL=self._pdl,
            num_warps=row_warps(block),
            enable_fp_fusion=True,
            **launch_options(self._pdl),
        )

    def _rows_per_program(self, num_rows: int) -> int:
        """Return the rows of a program, a power of two so that few variants are compiled."""
        return int(triton.next_power_of_2(-(-num_rows // self._max_programs)))


_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def _limit_bytes(device: torch.device, size: int) -> int:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return _LIMITS_BYTES.get((name, size), _UNMEASURED_LIMIT_BYTES // max(size - 1, 1))


def _words(x: Tensor) -> Tensor:
    return x.view(torch.int32)


@triton.jit
def _low(words, DTYPE: tl.constexpr):
    """Return the elements with even indices, as float32."""
    return (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _high(words, DTYPE: tl.constexpr):
    """Return the elements with odd indices, as float32."""
    return ((words >> 16) & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _pack(low, high, DTYPE: tl.constexpr):
    """Pack two float32, rounded to DTYPE, into one word."""
    first = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return first | (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


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
    low = low * scale * offset_gain(_low(gain, DTYPE), WEIGHT_OFFSET)
    high = high * scale * offset_gain(_high(gain, DTYPE), WEIGHT_OFFSET)
    return low, high


@triton.jit
def _window(address):
    """Return the int32 words at an address that is stored as a number."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _await_words(address, inside, stop, is_stopped, BLANK: tl.constexpr, POLLS: tl.constexpr):
    """Return the words at address once none of them is blank, or immediately if stopped; and the
    stopped state."""
    words = tl.load(address, mask=inside, other=0, volatile=True)
    missing = tl.max((words == BLANK).to(tl.int32), axis=0)
    polls = 0
    while (missing != 0) & (is_stopped == 0):
        words = tl.load(address, mask=inside, other=0, volatile=True)
        missing = tl.max((words == BLANK).to(tl.int32), axis=0)
        polls += 1
        if polls % POLLS == 0:
            is_stopped = (tl.load(stop, volatile=True) != 0).to(tl.int32)
    return words, is_stopped


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
    window = _window(addresses + RANK)
    if FUSED:
        gain = _load_gain(weight, word, SIZE)
    x_gain = _load_gain(x_weight, word, SIZE)
    await_previous(PDL)
    turn = tl.load(turns + program)
    is_stopped = (turn == _STOPPED).to(tl.int32)
    slot = (program * 2 + (turn & 1)) * RANKS * REGION

    for index in range(ROWS):
        row = program + index * programs
        inside = word < tl.where(row < num_rows, SIZE, 0)
        own = tl.load(x + row.to(tl.int64) * SIZE + word, mask=inside, other=0)
        own = tl.where(own == BLANK, 0, own)
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                inbox = _window(addresses + peer) + slot + RANK * REGION + index * SIZE
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
                words, is_stopped = _await_words(inbox, inside, stop, is_stopped, BLANK, POLLS)
                tl.store(inbox, tl.full((BLOCK,), BLANK, tl.int32), mask=inside)
            low += _low(words, DTYPE)
            high += _high(words, DTYPE)
        if x_weight is not None:
            low, high = _normed(low, high, x_gain, x_eps, SIZE, X_WEIGHT_OFFSET, DTYPE)
        if FUSED:
            low = _low(before, DTYPE) + low.to(DTYPE).to(tl.float32)
            high = _high(before, DTYPE) + high.to(DTYPE).to(tl.float32)
            tl.store(total + element, _pack(low, high, DTYPE), mask=inside)
            low, high = _normed(low, high, gain, eps, SIZE, WEIGHT_OFFSET, DTYPE)
            tl.store(normed + element, _pack(low, high, DTYPE), mask=inside)
        else:
            tl.store(total + element, _pack(low, high, DTYPE), mask=inside)
    # Once a program has seen the stop flag, later ones do not check again.
    tl.store(turns + program, tl.where(is_stopped != 0, _STOPPED, (turn + 1) & _TURN_MASK))

"""Words that the ranks of a group write into each other's windows.

A program stores its words into its peers' windows, then polls its own, whose words are `blank`
until they arrive. This needs no flag and no fence, since each word is its own flag (Lamport's
one-word channel, as in NCCL's and TensorRT-LLM's low-latency protocols). Words are reset to blank
after they are read. Two slots per program suffice: a peer stores into a slot again two calls later.
By then it has received this rank's next call, so the call that reset the slot has ended.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_daemon.contracts.window import Window

PROGRAMS = 128
"""Maximum number of programs: all of them fit on the device at one time, together with other
kernels."""
SLOTS = 2
POLLS_PER_STOP = 1 << 14
"""Polls between two checks of the stop flag, about 10 ms. Host memory is slow: a check by a
thousand warps takes half a millisecond. With more frequent checks, a late rank and the ranks that
wait for it would slow each other."""
WORD_BYTES = 4
WORD_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
STOPPED = tl.constexpr(-1)
"""A program's turn once it has seen the stop flag."""
TURN_MASK = tl.constexpr(0x7FFFFFFF)

_ALIGNED = 4
"""Words of the widest access."""


def addresses_of(window: Window, device: torch.device) -> Tensor:
    """Return the addresses of all windows, then that of the stop flag, int64 on the device."""
    addresses = [*window.addresses, window.stop_address]
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def region_words(window: Window, num_programs: int) -> int:
    """Return the words of a window for one program, slot and sender."""
    regions = num_programs * SLOTS * len(window.addresses)
    return window.num_bytes // (regions * WORD_BYTES) // _ALIGNED * _ALIGNED


def unique_block(size: int, num_warps: int) -> int:
    """Return the length of a vector for so many words, with at least one for each thread. Otherwise
    several warps would poll the same word, and the first one to see it would reset it."""
    return int(max(triton.next_power_of_2(size), 32 * num_warps))


def words_of(x: Tensor) -> Tensor:
    """Return x [..., n] as int32 words."""
    return x.view(torch.int32)


@triton.jit
def low_half(words, DTYPE: tl.constexpr):
    """Return the elements with even indices, as float32."""
    return (words & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def high_half(words, DTYPE: tl.constexpr):
    """Return the elements with odd indices, as float32."""
    return ((words >> 16) & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def pack_halves(low, high, DTYPE: tl.constexpr):
    """Pack two float32, rounded to DTYPE, into one word."""
    first = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return first | (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def window_at(address):
    """Return the int32 words at an address that is stored as a number."""
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def begin_turn(turns, RANKS: tl.constexpr, REGION: tl.constexpr):
    """Return a program's turn, its stopped state, and the first word of the turn's slot in each
    window."""
    program = tl.program_id(0)
    turn = tl.load(turns + program)
    is_stopped = (turn == STOPPED).to(tl.int32)
    return turn, is_stopped, (program * 2 + (turn & 1)) * RANKS * REGION


@triton.jit
def end_turn(turns, turn, is_stopped):
    """Store a program's next turn. Once it has seen the stop flag, later ones do not check
    again."""
    after = tl.where(is_stopped != 0, STOPPED, (turn + 1) & TURN_MASK)
    tl.store(turns + tl.program_id(0), after)


@triton.jit
def take_words(address, inside, stop, is_stopped, BLANK: tl.constexpr, POLLS: tl.constexpr):
    """Return the words at address once none of them is blank, or immediately if stopped, and leave
    blank words there; and the stopped state."""
    words = tl.load(address, mask=inside, other=0, volatile=True)
    missing = tl.max((words == BLANK).to(tl.int32), axis=0)
    polls = 0
    while (missing != 0) & (is_stopped == 0):
        words = tl.load(address, mask=inside, other=0, volatile=True)
        missing = tl.max((words == BLANK).to(tl.int32), axis=0)
        polls += 1
        if polls % POLLS == 0:
            is_stopped = (tl.load(stop, volatile=True) != 0).to(tl.int32)
    tl.store(address, tl.full(words.shape, BLANK, tl.int32), mask=inside)
    return words, is_stopped

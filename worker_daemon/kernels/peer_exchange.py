"""The exchange of tokens between ranks that share experts, over memory that they write to each
other directly (peer_words.py): dispatch to all of them, and the return of the sums.

Shapes: R ranks, n rows of each rank in an exchange, N <= n tokens of this rank, H hidden size, K
experts of a token.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker_daemon.contracts.experts import RoutedTokens
from worker_daemon.contracts.window import Window
from worker_daemon.kernels.compile_ahead import launched
from worker_daemon.kernels.launch import await_previous, launch_options, row_warps, start_next
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

_ALIGNED = 4
"""Words to a multiple of which a row is padded in a window."""


class PeerExchange:
    """The exchanges over one window. Owns a little device memory; step thread only.

    Every rank makes the same calls with as many rows in the same order, on one stream, in CUDA
    graphs or outside: what one rank replays, another may launch.
    """

    def __init__(
        self,
        window: Window,
        device: torch.device,
        *,
        pdl: bool,
        max_programs: int = PROGRAMS,
        polls_per_stop: int = POLLS_PER_STOP,
    ) -> None:
        """window: new, all words blank on all ranks. See PeerReduce for the others."""
        self._rank = window.rank
        self._size = len(window.addresses)
        self._blank = window.blank
        self._addresses = addresses_of(window, device)
        self._turns = torch.zeros(max_programs, dtype=torch.int32, device=device)
        self._region_words = region_words(window, max_programs)
        self._pdl = pdl
        self._max_programs = max_programs
        self._polls_per_stop = polls_per_stop

    def most_rows(self, hidden_size: int, top_k: int, dtype: torch.dtype) -> int:
        """Return the most rows of a rank that fit; 0 if tokens have no whole words."""
        if dtype not in WORD_DTYPES or hidden_size * dtype.itemsize % WORD_BYTES:
            return 0
        row = _row_words(hidden_size * dtype.itemsize // WORD_BYTES, top_k)
        return self._max_programs * (self._region_words // row)

    def gather(self, x: Tensor, routed: RoutedTokens, num_rows: int) -> tuple[Tensor, RoutedTokens]:
        """Return all ranks' rows, [R n, H] and [R n, K], of x [N, H] and routed [N, K]; those of
        padding have no experts. num_rows: n, at most most_rows()."""
        num_tokens, hidden_size = x.shape
        total, top_k = self._size * num_rows, routed.experts.shape[1]
        tokens = x.new_empty((total, hidden_size))
        experts = routed.experts.new_empty((total, top_k))
        weights = routed.weights.new_empty((total, top_k))
        size = hidden_size * x.element_size() // WORD_BYTES
        num_warps = row_warps(triton.next_power_of_2(size))
        _peer_gather_kernel[(min(num_rows, self._max_programs),)](
            words_of(tokens),
            experts,
            words_of(weights),
            words_of(x.contiguous()),
            routed.experts.contiguous(),
            words_of(routed.weights.contiguous()),
            self._addresses,
            self._turns,
            num_rows,
            num_tokens,
            RANK=self._rank,
            RANKS=self._size,
            BLANK=self._blank,
            REGION=self._region_words,
            ROW=_row_words(size, top_k),
            SIZE=size,
            BLOCK=unique_block(size, num_warps),
            TOP_K=top_k,
            TAIL=unique_block(2 * top_k, num_warps),
            POLLS=self._polls_per_stop,
            PDL=self._pdl,
            num_warps=num_warps,
            **launch_options(self._pdl),
        )
        return tokens, RoutedTokens(experts, weights)

    def sum_rows(self, total: Tensor) -> Tensor:
        """Return this rank's rows [n, H] of the sum of every rank's total [R n, H], added in
        float32 in the order of the ranks and rounded once."""
        num_rows, hidden_size = total.shape[0] // self._size, total.shape[1]
        own = total.new_empty((num_rows, hidden_size))
        size = hidden_size * total.element_size() // WORD_BYTES
        num_warps = row_warps(triton.next_power_of_2(size))
        _peer_sum_kernel[(min(num_rows, self._max_programs),)](
            words_of(own),
            words_of(total.contiguous()),
            self._addresses,
            self._turns,
            num_rows,
            RANK=self._rank,
            RANKS=self._size,
            BLANK=self._blank,
            REGION=self._region_words,
            SIZE=size,
            BLOCK=unique_block(size, num_warps),
            DTYPE=WORD_DTYPES[total.dtype],
            IS_FLOAT32=total.dtype == torch.float32,
            POLLS=self._polls_per_stop,
            PDL=self._pdl,
            num_warps=num_warps,
            **launch_options(self._pdl),
        )
        return own


def _row_words(size: int, top_k: int) -> int:
    """Return the words of a token, its experts and their weights in a window."""
    return -(-(size + 2 * top_k) // _ALIGNED) * _ALIGNED


@triton.jit
def _send(addresses, place, words, inside, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Store words into the window of every peer, at a number of words from its start."""
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            tl.store(window_at(addresses + peer) + place, words, mask=inside)


@triton.jit
def _store_routed(experts, weights, row, routed, tail, TOP_K: tl.constexpr):
    """Store TOP_K experts and as many weights of a row."""
    tl.store(experts + row * TOP_K + tail, routed, mask=tail < TOP_K)
    is_weight = (tail >= TOP_K) & (tail < 2 * TOP_K)
    tl.store(weights + row * TOP_K + tail - TOP_K, routed, mask=is_weight)


@launched
@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _peer_gather_kernel(
    tokens,
    experts,
    weights,
    x,
    own_experts,
    own_weights,
    addresses,
    turns,
    num_rows,
    num_tokens,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLANK: tl.constexpr,
    REGION: tl.constexpr,
    ROW: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    TAIL: tl.constexpr,
    POLLS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row of a region: SIZE words of a token, TOP_K experts, TOP_K weights."""
    start_next(PDL)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    word = tl.arange(0, BLOCK)
    tail = tl.arange(0, TAIL)
    stop = tl.load(addresses + RANKS).to(tl.pointer_type(tl.int32))
    window = window_at(addresses + RANK)
    await_previous(PDL)
    turn, is_stopped, slot = begin_turn(turns, RANKS, REGION)
    num_own = (num_rows - program + programs - 1) // programs

    for index in range(num_own):
        row = program + index * programs
        to = RANK * num_rows + row
        place = slot + RANK * REGION + index * ROW
        inside = word < tl.where(row < num_tokens, SIZE, 0)
        own = tl.load(x + row.to(tl.int64) * SIZE + word, mask=inside, other=0)
        own = tl.where(own == BLANK, 0, own)
        _send(addresses, place + word, own, word < SIZE, RANK, RANKS)
        tl.store(tokens + to.to(tl.int64) * SIZE + word, own, mask=word < SIZE)
        given = tl.where(row < num_tokens, TOP_K, 0)
        chosen = tl.load(own_experts + row * TOP_K + tail, mask=tail < given, other=-1)
        weighed = (tail >= TOP_K) & (tail < TOP_K + given)
        weight = tl.load(own_weights + row * TOP_K + tail - TOP_K, mask=weighed, other=0)
        routed = tl.where(tail < TOP_K, chosen, tl.where(weight == BLANK, 0, weight))
        _send(addresses, place + SIZE + tail, routed, tail < 2 * TOP_K, RANK, RANKS)
        _store_routed(experts, weights, to, routed, tail, TOP_K)

    for index in range(num_own):
        row = program + index * programs
        for source in tl.static_range(RANKS):
            if source != RANK:
                to = source * num_rows + row
                place = window + slot + source * REGION + index * ROW
                inbox, inside = place + word, word < SIZE
                words, is_stopped = take_words(inbox, inside, stop, is_stopped, BLANK, POLLS)
                tl.store(tokens + to.to(tl.int64) * SIZE + word, words, mask=inside)
                last, is_routed = place + SIZE + tail, tail < 2 * TOP_K
                routed, is_stopped = take_words(last, is_routed, stop, is_stopped, BLANK, POLLS)
                routed = tl.where(routed == BLANK, -1, routed)  # those of a peer that is gone
                _store_routed(experts, weights, to, routed, tail, TOP_K)
    end_turn(turns, turn, is_stopped)


@launched
@triton.jit(do_not_specialize=["num_rows"])
def _peer_sum_kernel(
    out,
    total,
    addresses,
    turns,
    num_rows,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLANK: tl.constexpr,
    REGION: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_FLOAT32: tl.constexpr,
    POLLS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row of a region: SIZE words of the sender's part of a row of this rank."""
    start_next(PDL)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    word = tl.arange(0, BLOCK)
    inside = word < SIZE
    stop = tl.load(addresses + RANKS).to(tl.pointer_type(tl.int32))
    window = window_at(addresses + RANK)
    await_previous(PDL)
    turn, is_stopped, slot = begin_turn(turns, RANKS, REGION)
    num_own = (num_rows - program + programs - 1) // programs

    for index in range(num_own):
        row = program + index * programs
        for peer in tl.static_range(RANKS):
            if peer != RANK:
                part = total + (peer * num_rows + row).to(tl.int64) * SIZE + word
                words = tl.load(part, mask=inside, other=0)
                words = tl.where(words == BLANK, 0, words)
                inbox = window_at(addresses + peer) + slot + RANK * REGION + index * SIZE
                tl.store(inbox + word, words, mask=inside)

    for index in range(num_own):
        row = program + index * programs
        # Before the wait, so that this load is complete when it ends.
        part = total + (RANK * num_rows + row).to(tl.int64) * SIZE + word
        own = tl.load(part, mask=inside, other=0)
        low = tl.zeros((BLOCK,), tl.float32)
        high = tl.zeros((BLOCK,), tl.float32)
        for source in tl.static_range(RANKS):
            if source == RANK:
                words = own
            else:
                inbox = window + slot + source * REGION + index * SIZE + word
                words, is_stopped = take_words(inbox, inside, stop, is_stopped, BLANK, POLLS)
            if IS_FLOAT32:
                low += words.to(tl.float32, bitcast=True)
            else:
                low += low_half(words, DTYPE)
                high += high_half(words, DTYPE)
        sums = low.to(tl.int32, bitcast=True) if IS_FLOAT32 else pack_halves(low, high, DTYPE)
        tl.store(out + row.to(tl.int64) * SIZE + word, sums, mask=inside)
    end_turn(turns, turn, is_stopped)

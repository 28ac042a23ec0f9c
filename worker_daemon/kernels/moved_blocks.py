"""Blocks on their way between a KV cache and rows of memory, and the sums of their words.

Each kernel reads and writes a word once, so it is bound by memory: 32 MiB take some 20 us on an
H200, where the bus to the host needs 600.
"""

# Parameters of a Triton kernel are pointers and scalars that Python's types cannot name:
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from worker_daemon.contracts.block_kernels import PageShape
from worker_daemon.kernels.compile_ahead import launched

_WORDS = 2048
"""Words that a program holds at once."""


class TritonBlockKernels:
    """One launch per method; stateless. BlockKernels (contracts/block_kernels.py) defines shapes
    and meaning."""

    def gather(self, pages: torch.Tensor, block_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """See BlockKernels."""
        _copy(pages, block_ids, rows, to_rows=True)

    def scatter(self, rows: torch.Tensor, block_ids: torch.Tensor, pages: torch.Tensor) -> None:
        """See BlockKernels."""
        _copy(pages, block_ids, rows, to_rows=False)

    def fill(
        self, pages: torch.Tensor, block_ids: torch.Tensor, are_meant: torch.Tensor, word: int
    ) -> None:
        """See BlockKernels."""
        num_pages, num_words = pages.shape[1:]
        _fill_kernel[(block_ids.shape[0], num_pages)](
            pages,
            block_ids,
            are_meant,
            pages.stride(0),
            pages.stride(1),
            num_words,
            word,
            BLOCK=_WORDS,
        )

    def sum_parts(
        self,
        rows: torch.Tensor,
        keys: torch.Tensor,
        shape: PageShape,
        sums: torch.Tensor,
        stored: torch.Tensor | None = None,
    ) -> None:
        """See BlockKernels."""
        _sum_parts(rows, keys, shape, sums, stored)

    def deliver(
        self,
        rows: torch.Tensor,
        block_ids: torch.Tensor,
        pages: torch.Tensor,
        keys: torch.Tensor,
        shape: PageShape,
        sums: torch.Tensor,
        stored: torch.Tensor | None = None,
    ) -> None:
        """See BlockKernels."""
        _sum_parts(rows, keys, shape, sums, stored, block_ids, pages)


def _sum_parts(
    rows: torch.Tensor,
    keys: torch.Tensor,
    shape: PageShape,
    sums: torch.Tensor,
    stored: torch.Tensor | None,
    block_ids: torch.Tensor | None = None,
    pages: torch.Tensor | None = None,
) -> None:
    """block_ids, pages: where rows are copied to; None: nowhere."""
    columns = min(triton.next_power_of_2(shape.words), _WORDS)
    _sum_parts_kernel[(rows.shape[0], sums.shape[1])](
        rows,
        keys,
        sums,
        rows if stored is None else stored,
        rows if block_ids is None else block_ids,
        rows if pages is None else pages,
        rows.stride(0),
        sums.stride(0),
        0 if stored is None else stored.stride(0),
        0 if pages is None else pages.stride(0),
        0 if pages is None else pages.stride(1),
        shape.rows,
        shape.num_parts,
        shape.words,
        HAS_STORED=stored is not None,
        COPIES=pages is not None,
        ROWS=_WORDS // columns,
        COLUMNS=columns,
    )


def _copy(
    pages: torch.Tensor, block_ids: torch.Tensor, rows: torch.Tensor, *, to_rows: bool
) -> None:
    num_pages, num_words = pages.shape[1:]
    _copy_kernel[(block_ids.shape[0], num_pages)](
        pages,
        block_ids,
        rows,
        pages.stride(0),
        pages.stride(1),
        rows.stride(0),
        num_words,
        TO_ROWS=to_rows,
        BLOCK=_WORDS,
    )


@launched
@triton.jit
def _copy_kernel(
    pages,
    block_ids,
    rows,
    block_stride,
    page_stride,
    row_stride,
    num_words,
    TO_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program copies a page of a block."""
    row, page = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    block = tl.load(block_ids + row).to(tl.int64)
    of_cache = pages + block * block_stride + page * page_stride
    of_row = rows + row * row_stride + page * num_words
    for start in range(0, num_words, BLOCK):
        here = start + tl.arange(0, BLOCK)
        inside = here < num_words
        if TO_ROWS:
            tl.store(of_row + here, tl.load(of_cache + here, mask=inside, other=0), mask=inside)
        else:
            tl.store(of_cache + here, tl.load(of_row + here, mask=inside, other=0), mask=inside)


@launched
@triton.jit(do_not_specialize=["word"])
def _fill_kernel(
    pages,
    block_ids,
    are_meant,
    block_stride,
    page_stride,
    num_words,
    word,
    BLOCK: tl.constexpr,
):
    """A program fills a page of a block, which is seldom asked for."""
    row, page = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(are_meant + row):
        block = tl.load(block_ids + row).to(tl.int64)
        target = pages + block * block_stride + page * page_stride
        for start in range(0, num_words, BLOCK):
            here = start + tl.arange(0, BLOCK)
            tl.store(target + here, word, mask=here < num_words)


@launched
@triton.jit
def _sum_parts_kernel(
    rows,
    keys,
    sums,
    stored,
    block_ids,
    pages,
    row_stride,
    sums_stride,
    stored_stride,
    block_stride,
    page_stride,
    num_rows,
    num_parts,
    num_words,
    HAS_STORED: tl.constexpr,
    COPIES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A program sums up a part of a page, and copies it to the page of a block."""
    block, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    page, part = number // num_parts, number % num_parts
    words_per_row = num_parts * num_words
    first = rows + block * row_stride + page.to(tl.int64) * num_rows * words_per_row
    target = pages
    if COPIES:
        target += tl.load(block_ids + block).to(tl.int64) * block_stride
        target += page.to(tl.int64) * page_stride
    total = tl.zeros((ROWS, COLUMNS), tl.int64)
    for top in range(0, num_rows, ROWS):
        row = top + tl.arange(0, ROWS)
        for left in range(0, num_words, COLUMNS):
            column = left + tl.arange(0, COLUMNS)
            inside = (row < num_rows)[:, None] & (column < num_words)[None, :]
            here = row[:, None] * words_per_row + part * num_words + column[None, :]
            words = tl.load(first + here, mask=inside, other=0)
            if COPIES:
                tl.store(target + here, words, mask=inside)
            total += words.to(tl.int64) * tl.load(keys + here, mask=inside, other=0)
    result = tl.sum(tl.sum(total, 1), 0)
    if HAS_STORED:  # as two words: it may not be aligned to 8 bytes
        low = tl.load(stored + block * stored_stride + 2 * number).to(tl.uint32, bitcast=True)
        high = tl.load(stored + block * stored_stride + 2 * number + 1).to(tl.int64)
        result -= (high << 32) + low.to(tl.int64)
    tl.store(sums + block * sums_stride + number, result)

"""Kernels that move blocks between a KV cache and rows of memory, and sum up their words: one
launch for many blocks. They never wait for the device.

Letters: B blocks of the cache, T pages of each, W int32 words of a page, n blocks that move, H
parts of a page.
"""

from typing import NamedTuple, Protocol

from torch import Tensor


class PageShape(NamedTuple):
    """A page as its parts have it: `rows` rows, each with `words` words of every part in turn."""

    rows: int
    num_parts: int
    """H"""
    words: int

    @property
    def num_words(self) -> int:
        """W."""
        return self.rows * self.num_parts * self.words


class BlockKernels(Protocol):
    """Stateless; for any thread."""

    def gather(self, pages: Tensor, block_ids: Tensor, rows: Tensor) -> None:
        """Copy pages [B, T, W] of blocks int32 [n] to rows [n, T * W], of any stride between
        rows."""

    def scatter(self, rows: Tensor, block_ids: Tensor, pages: Tensor) -> None:
        """Copy rows [n, T * W] to pages [B, T, W] of blocks int32 [n], no two of them the same."""

    def fill(self, pages: Tensor, block_ids: Tensor, are_meant: Tensor, word: int) -> None:
        """Set all words of the pages [B, T, W] of blocks int32 [n], where are_meant bool [n]."""

    def sum_parts(
        self,
        rows: Tensor,
        keys: Tensor,
        shape: PageShape,
        sums: Tensor,
        stored: Tensor | None = None,
    ) -> None:
        """Sum up each part of the pages in rows [n, T * W], every word times its key, modulo 2^64:
        keys int64 [W] for the words of a page, sums int64 [n, T * H]. stored: sums, as int32
        [n, 2 * T * H], to be subtracted. Rows have any stride."""

    def deliver(
        self,
        rows: Tensor,
        block_ids: Tensor,
        pages: Tensor,
        keys: Tensor,
        shape: PageShape,
        sums: Tensor,
        stored: Tensor | None = None,
    ) -> None:
        """Do scatter() and sum_parts() together. Pages have no words but those of their parts."""

"""Checksums of blocks, or of their parts, by which a changed bit or a mistaken part is found.

Shapes: n blocks, W int32 words of a block on this rank, U parts.
"""

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_daemon.contracts.arrays import Int64s
from worker_daemon.contracts.block_kernels import BlockKernels, PageShape
from worker_daemon.runner.kv_cache import BlockPages

WORD_BYTES: Final = 4
CHECKSUM_WORDS: Final = 2
"""Words of a checksum, an int64."""

_Hashes: TypeAlias = npt.NDArray[np.uint8]
_Factors: TypeAlias = npt.NDArray[np.uint64]


class PageSection(NamedTuple):
    """Pages of a block that are divided alike. A part is what a page has of a KV head, or all of
    it."""

    num_pages: int
    first_head: int
    """Number of this rank's first KV head among those of the model."""
    num_heads: int
    """Parts of a page."""
    rows: int
    """Rows of a page, each with words of all heads in turn: 2 * block_size for keys and values."""
    words: int
    """Words of a head in a row."""

    @property
    def page_shape(self) -> PageShape:
        """A page of it."""
        return PageShape(self.rows, self.num_heads, self.words)

    @property
    def page_words(self) -> int:
        """Words of a page."""
        return self.rows * self.num_heads * self.words

    @property
    def num_words(self) -> int:
        """Words of all pages."""
        return self.num_pages * self.page_words

    @property
    def num_parts(self) -> int:
        """Parts of all pages."""
        return self.num_pages * self.num_heads

    def keys(self) -> Int64s:
        """Return a random odd key for each word of a page, which depends on the head's number and
        the word's place in the part alone."""
        size = self.rows * self.words
        heads = range(self.first_head, self.first_head + self.num_heads)
        keys = np.array([named_keys(f"head {head}", size) for head in heads], np.int64)
        return keys.reshape(-1, self.rows, self.words).transpose(1, 0, 2).ravel()


class BlockParts(NamedTuple):
    """The parts into which a block's words are divided. Ranks of any shape that have the same layer
    and head have the same part."""

    sections: tuple[PageSection, ...]
    """In the order of their words: first the layers' pages."""

    @property
    def num_words(self) -> int:
        """W."""
        return sum(section.num_words for section in self.sections)

    @property
    def num_parts(self) -> int:
        """U."""
        return sum(section.num_parts for section in self.sections)

    @property
    def checksum_words(self) -> int:
        """Words of a block's checksums."""
        return CHECKSUM_WORDS * self.num_parts

    def divided(self, counts: Sequence[int]) -> "BlockParts":
        """Return the same parts in sections of so many pages each, all those of a block. The pages
        of each section are alike."""
        alike = [each for each in self.sections for _ in range(each.num_pages)]
        assert sum(counts) == len(alike), "parts of other pages"
        ends = accumulate(counts)
        sections = (
            alike[end - count]._replace(num_pages=count)
            for count, end in zip(counts, ends, strict=True)
        )
        return BlockParts(tuple(sections))

    def by_page(self, rows: Tensor) -> list[Tensor]:
        """View rows [n, W or more] as [n, pages, words of a page], by section."""
        sizes = [section.num_words for section in self.sections]
        own = torch.split(rows[:, : self.num_words], sizes, dim=1)
        return [
            pages.view(rows.shape[0], section.num_pages, section.page_words)
            for section, pages in zip(self.sections, own, strict=True)
        ]

    def by_head(self, rows: Tensor) -> list[Tensor]:
        """View rows [n, W or more] as [n, pages, rows, heads, words], by section."""
        return [
            pages.view(*pages.shape[:2], section.rows, section.num_heads, section.words)
            for section, pages in zip(self.sections, self.by_page(rows), strict=True)
        ]

    def by_part(self, checksums: Tensor) -> list[Tensor]:
        """View a value of each part, or several, [n, U * values], as [n, pages, heads, values], by
        section."""
        num_values = checksums.shape[1] // self.num_parts
        sizes = [num_values * section.num_parts for section in self.sections]
        return [
            own.view(-1, section.num_pages, section.num_heads, num_values)
            for section, own in zip(
                self.sections, torch.split(checksums, sizes, dim=1), strict=True
            )
        ]

    def page_numbers(self) -> list[Int64s]:
        """Return a random number of each page's place, by section."""
        counts = [section.num_pages for section in self.sections]
        drawn = named_keys("pages", sum(counts))
        return np.split(drawn, np.cumsum(counts)[:-1])


class BlockChecksums:
    """Multilinear hashing of 32-bit words modulo 2^64 (Lemire and Kaser, "Strongly universal string
    hashing is fast", 2014): the sum of w_i * x_i with random odd 64-bit keys w_i.

    Any change of a single word is found, since w_i is odd; a change of several is missed with a
    probability of about 2^-32. The keys follow from a seed: checksums of other objects with it, in
    other processes too, can be compared.
    """

    count: Final = 1

    def __init__(
        self, num_words: int, seed: int, kernels: BlockKernels, device: torch.device
    ) -> None:
        """num_words: of a row."""
        # NumPy promises the same stream in all versions, which torch does not.
        keys = np.random.Philox(key=seed).random_raw(num_words).astype(np.uint64) | np.uint64(1)
        self._keys = torch.from_numpy(keys.view(np.int64)).to(device)
        self._shape = PageShape(1, 1, num_words)
        self._kernels = kernels

    def of(self, rows: Tensor, sums: Tensor) -> None:
        """Write those of rows, int32 [n, num_words], to sums, int64 [n, 1]. Never waits for the
        device."""
        self._kernels.sum_parts(rows, self._keys, self._shape, sums)

    def deliver(self, rows: Tensor, block_ids: Tensor, pages: BlockPages, sums: Tensor) -> None:
        """See Checksums."""
        self.of(rows, sums)
        pages.scatter(rows, block_ids)


class _KeyedSection(NamedTuple):
    """A section, and its place among others."""

    shape: PageShape
    keys: Tensor
    """int64 [words of a page]"""
    words: slice
    parts: slice
    stored: slice
    """Words of the parts' checksums, behind the words of a block."""


class PartChecksums:
    """A checksum of each part of a block, as BlockChecksums makes one of a row, plus the number of
    its page. Keys are drawn from names, so all daemons have the same, and another head or page is
    found too."""

    def __init__(self, parts: BlockParts, kernels: BlockKernels, device: torch.device) -> None:
        self.count = parts.num_parts
        """U."""
        self.kernels = kernels
        self._num_words = parts.num_words
        self._sections = [
            _KeyedSection(
                section.page_shape,
                torch.from_numpy(section.keys()).to(device),
                slice(word - section.num_words, word),
                slice(part - section.num_parts, part),
                slice(CHECKSUM_WORDS * (part - section.num_parts), CHECKSUM_WORDS * part),
            )
            for section, word, part in zip(
                parts.sections,
                accumulate(section.num_words for section in parts.sections),
                accumulate(section.num_parts for section in parts.sections),
                strict=True,
            )
        ]
        numbers = [
            np.repeat(own, section.num_heads)
            for section, own in zip(parts.sections, parts.page_numbers(), strict=True)
        ]
        self._numbers = torch.from_numpy(np.concatenate(numbers)).to(device)
        """[U]"""

    def of(self, rows: Tensor, sums: Tensor) -> None:
        """Write those of rows, int32 [n, W], to sums, int64 [n, U], without the numbers of pages.
        Never waits for the device."""
        for shape, keys, words, parts, _ in self._sections:
            self.kernels.sum_parts(rows[:, words], keys, shape, sums[:, parts])

    def of_pages(self, section: int, rows: Tensor, sums: Tensor) -> None:
        """Write those of some pages of a section, int32 [n, words], to sums, int64 [n, parts], as
        of()."""
        own = self._sections[section]
        self.kernels.sum_parts(rows, own.keys, own.shape, sums)

    def deliver(self, rows: Tensor, block_ids: Tensor, pages: BlockPages, sums: Tensor) -> None:
        """See Checksums. From the sums, the checksums behind the words of rows are subtracted."""
        stored = rows[:, self._num_words :]
        for (shape, keys, words, parts, before), (target, _) in zip(
            self._sections, pages.sections, strict=True
        ):
            own, found = rows[:, words], sums[:, parts]
            self.kernels.deliver(own, block_ids, target, keys, shape, found, stored[:, before])

    @property
    def page_numbers(self) -> Tensor:
        """int64 [U], to be added to the sums."""
        return self._numbers


def numbers_of(hashes: _Hashes) -> Int64s:
    """Return an int64 for each hash, uint8 [n, bytes of a hash]."""
    num, width = hashes.shape
    whole = np.zeros((num, -(-width // 8) * 8), np.uint8)
    whole[:, :width] = hashes
    words = whole.view(np.uint64)
    numbers: Int64s = (
        (words * _hash_factors(words.shape[1])).sum(axis=1, dtype=np.uint64).view(np.int64)
    )
    return numbers


@cache
def _hash_factors(count: int) -> _Factors:
    return named_keys("hash", count).view(np.uint64)


def digest(*fields: bytes | Sequence[bytes]) -> bytes:
    """Return 32 bytes that name these fields."""
    flat = [each for one in fields for each in ((one,) if isinstance(one, bytes) else one)]
    framed = b"".join(len(each).to_bytes(8, "little") + each for each in flat)
    return blake2b(framed, digest_size=32).digest()


def named_keys(name: str, count: int) -> Int64s:
    """Draw odd keys from a name: the same in every process, since Philox's raw numbers are
    fixed."""
    seed = int.from_bytes(blake2b(name.encode(), digest_size=16).digest(), "little")
    drawn = np.random.Philox(key=seed).random_raw(count)
    keys: Int64s = (drawn | np.uint64(1)).view(np.int64)
    return keys

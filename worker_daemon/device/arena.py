"""Arenas: fixed ranges of addresses, whose memory is mapped and unmapped in chunks. The tensors of
an arena are adjacent and keep their addresses while the memory is unmapped.

The memory comes from a `Pages`: the device's (cuda_pages.py) or the host's (host_pages.py). Used on
the step thread only.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from worker_daemon.device.cuda_pages import CudaPages
from worker_daemon.device.host_pages import HostPages

ALIGNMENT_BYTES = 512
"""Alignment of every tensor, as in torch's own allocator."""


Pages: TypeAlias = CudaPages | HostPages
"""A reserved range of addresses, parts of which are mapped: see HostPages."""


class Span(NamedTuple):
    """A chunk of an arena: [start, stop) in bytes."""

    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


class Arena:
    """Owns the range and its memory; between operations all of it is mapped, or nothing."""

    def __init__(self, pages: Pages, chunk_bytes: int) -> None:
        """Map everything and zero it; chunk_bytes is rounded up to whole pages.

        Raises:
            CapacityError: it does not fit on the device; nothing stays allocated.
        """
        chunk = _round_up(chunk_bytes, pages.granularity)
        self._pages = pages
        self.spans = tuple(
            Span(start, min(start + chunk, pages.size_bytes))
            for start in range(0, pages.size_bytes, chunk)
        )
        self._mapped: list[Span] = []
        """Adjacent and in order: chunks are mapped from the first on, and unmapped in that order or
        all at once."""
        self._taken = 0
        try:
            self.map_all()
            self._base = pages.tensor()
            self.zero()
        except BaseException:
            pages.close()
            raise

    @property
    def is_mapped(self) -> bool:
        return bool(self._mapped)

    @property
    def mapped_bytes(self) -> int:
        """Device memory held now."""
        return sum(span.num_bytes for span in self._mapped)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the next tensor, a view of the arena; it is zero until written.

        Raises:
            ValueError: the arena is too small.
        """
        start = _round_up(self._taken, ALIGNMENT_BYTES)
        stop = start + math.prod(shape) * dtype.itemsize
        if stop > self._pages.size_bytes:
            raise ValueError(f"{stop} bytes of an arena of {self._pages.size_bytes}")
        self._taken = stop
        return self._base[start:stop].view(dtype).view(shape)

    def bytes_of(self, span: Span) -> Tensor:
        """Return a chunk as uint8 [span.num_bytes]."""
        return self._base[span.start : span.stop]

    def map_all(self) -> None:
        """Map every chunk.

        Raises:
            CapacityError: memory has run out; the chunks before it stay mapped until unmap_all.
        """
        assert not self._mapped, "mapped already"
        for span in self.spans:
            self._pages.map(span.start, span.num_bytes)
            self._mapped.append(span)

    def unmap_first(self) -> None:
        """Unmap the first chunk that is mapped; its content is lost."""
        span = self._mapped.pop(0)
        self._pages.unmap(span.start, span.num_bytes)

    def unmap_all(self) -> None:
        """Unmap everything in one call. Idempotent."""
        if self._mapped:
            start, stop = self._mapped[0].start, self._mapped[-1].stop
            self._pages.unmap(start, stop - start)
            self._mapped.clear()

    def zero(self) -> None:
        """Set all of it to zero, in stream order."""
        self._pages.zero(self._base)

    def close(self) -> None:
        """Unmap everything for good: its tensors must not be used any more. Idempotent."""
        self._mapped.clear()
        self._pages.close()


def arena_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes of an arena for tensors of these sizes, in any order."""
    return sum(_round_up(size, ALIGNMENT_BYTES) for size in sizes)


def open_arena(num_bytes: int, chunk_bytes: int, device: torch.device) -> Arena:
    """Return an arena on a device, zeroed.

    Raises:
        CapacityError: it does not fit.
        ConfigError: the device's driver does not support this.
    """
    pages: Pages = CudaPages(num_bytes, device) if device.type == "cuda" else HostPages(num_bytes)
    return Arena(pages, chunk_bytes)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

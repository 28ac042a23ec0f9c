"""Pieces of a block, in which it leaves while the layers of one step are computed: the last piece
is of one layer, and each before it of half the layers that are left. So there are few of them, and
little is left to do when the last layer is written.

The rule is a function of a block's parts, so all ranks know the pieces of all others.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from worker_daemon.runner.connectors.checksums import BlockParts

AT_END: Final = 1 << 30
"""Takes the place of a layer: only the end of the step has written a piece."""


class PieceSection(NamedTuple):
    """Share of a piece in a section of a block (BlockParts)."""

    section: int
    """Number of the section."""
    pages: slice
    """Pages of the section."""
    words: slice
    """Place of their words in a block."""
    parts: slice
    """Place of their parts in a block."""


class BlockPiece(NamedTuple):
    """Pages of a block that leave together: neighbors."""

    words: slice
    """Place of its words in a block."""
    parts: slice
    """Place of its parts in a block."""
    sections: tuple[PieceSection, ...]

    @property
    def num_words(self) -> int:
        """Words of the piece."""
        return self.words.stop - self.words.start  # type: ignore[no-any-return]

    @property
    def num_parts(self) -> int:
        """Parts of the piece."""
        return self.parts.stop - self.parts.start  # type: ignore[no-any-return]

    def columns(self, own: PieceSection) -> tuple[slice, slice]:
        """Return where a section's words and parts are among those of the piece."""
        words, parts = self.words.start, self.parts.start
        return (
            slice(own.words.start - words, own.words.stop - words),
            slice(own.parts.start - parts, own.parts.stop - parts),
        )


def page_ends(num_pages: int) -> list[int]:
    """Return, for each piece, the number of the layers' pages that it and those before it have.
    num_pages: of the layers, in a block."""
    ends, first = [], 0
    while first < num_pages:
        first += -(-(num_pages - first) // 2)
        ends.append(first)
    return ends or [0]


def pieces_of(parts: BlockParts) -> list[BlockPiece]:
    """Return the pieces of a block, in order. Pages that are not those of layers, as those of a
    draft model, are all in the last one."""
    first, *further = parts.sections
    found = []
    for start, end in pairwise([0, *page_ends(first.num_pages)]):
        sections = [
            PieceSection(
                0,
                slice(start, end),
                slice(start * first.page_words, end * first.page_words),
                slice(start * first.num_heads, end * first.num_heads),
            )
        ]
        if end == first.num_pages:
            words = [*accumulate((each.num_words for each in further), initial=first.num_words)]
            counts = [*accumulate((each.num_parts for each in further), initial=first.num_parts)]
            sections += [
                PieceSection(
                    number + 1,
                    slice(0, each.num_pages),
                    slice(words[number], words[number + 1]),
                    slice(counts[number], counts[number + 1]),
                )
                for number, each in enumerate(further)
            ]
        last = sections[-1]
        found.append(
            BlockPiece(
                slice(sections[0].words.start, last.words.stop),
                slice(sections[0].parts.start, last.parts.stop),
                tuple(sections),
            )
        )
    return found


def last_layers(layers: Sequence[Sequence[int]], num_pages: int) -> list[int]:
    """Return, for each piece, the layer after which all is written that it and those before it
    have; AT_END: none. layers: by KV group, the number of the layer that has each page. num_pages:
    of the layers, in a block."""
    return [
        max((layer for own in layers for layer in own[:end]), default=AT_END)
        for end in page_ends(num_pages)
    ]

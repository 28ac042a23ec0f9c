"""The pieces of a block: together they are the block, and the last one is short."""

import random

import pytest

from tests.support.exhaustive import seeds
from worker_daemon.runner.connectors.checksums import BlockParts, PageSection
from worker_daemon.runner.connectors.pieces import AT_END, last_layers, page_ends, pieces_of


@pytest.mark.parametrize("seed", seeds(3, of=100))
def test_pieces_are_neighbors_and_together_the_block(seed):
    rng = random.Random(seed)
    sections = tuple(
        PageSection(rng.randint(1, 80 if number == 0 else 3), 0, rng.randint(1, 8), 2, 4)
        for number in range(rng.randint(1, 3))
    )
    parts = BlockParts(sections)
    pieces, num_layers = pieces_of(parts), sections[0].num_pages
    words = parts_end = 0
    for piece in pieces:
        assert (piece.words.start, piece.parts.start) == (words, parts_end)
        for own in piece.sections:
            section, count = sections[own.section], own.pages.stop - own.pages.start
            columns = piece.columns(own)
            assert [each.stop - each.start for each in columns] == [
                count * section.page_words,
                count * section.num_heads,
            ]
            assert (own.words.start, own.parts.start) == (words, parts_end)
            words, parts_end = own.words.stop, own.parts.stop
        assert (piece.words.stop, piece.parts.stop) == (words, parts_end)
    assert (words, parts_end) == (parts.num_words, parts.num_parts)
    last = pieces[-1].sections[0].pages
    assert last == slice(num_layers - 1, num_layers)
    assert len(pieces) <= num_layers.bit_length() + 1


def test_a_piece_waits_for_the_last_of_its_layers():
    """Of any KV group, and of those of the pieces before it."""
    assert page_ends(4) == [2, 3, 4]
    assert last_layers([[0, 6, 1, 2], [3, 4, 7]], 4) == [6, 7, 7]
    assert last_layers([], 4) == [AT_END] * 3

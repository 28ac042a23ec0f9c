"""The host tier of a rank: every block is what a model of it says, changed bits are found, and a
step that names what there is not is refused."""

import random

import numpy as np
import pytest
import torch

from rpc_schema.errors import InvalidStepError
from tests.support.exhaustive import seeds
from tests.support.host_moves import (
    HASH_BYTES,
    NUM_BLOCKS,
    NUM_SLOTS,
    ModelledTier,
    moves_of,
)
from worker_daemon.runner.connectors import staging
from worker_daemon.runner.connectors.checksums import (
    BlockParts,
    PageSection,
    PartChecksums,
    numbers_of,
)
from worker_daemon.runner.connectors.pieces import pieces_of
from worker_daemon.runner.torch_blocks import TorchBlockKernels

CPU = torch.device("cpu")
HASH = b"h" * HASH_BYTES


@pytest.mark.parametrize("seed", seeds(3, of=40))
def test_blocks_are_what_a_model_of_them_says(seed, monkeypatch):
    rng = random.Random(seed)
    # Blocks of 88 bytes: one, two, or all of a step's at once.
    monkeypatch.setattr(staging, "STAGING_BYTES", rng.choice([1, 176, 1 << 20]))
    memory = ("host", "device")[seed % 2]
    tier, num_invalid = ModelledTier(rng, "cpu", memory=memory), 0
    for _ in range(120):
        tier.compute()
        if tier.slots and rng.random() < 0.2:
            tier.flip()
        loaded, invalid = tier.random_step()
        found = () if loaded is None else loaded.invalid_blocks.tolist()
        assert sorted(found) == sorted(invalid), seed
        num_invalid += len(invalid)
        tier.check()
    tier.step((), ())  # counts what came before
    tier.arrive()
    status = tier.tier.counts.status()
    assert not tier.beside
    assert status.num_invalid == num_invalid + tier.num_invalid_beside > num_invalid > 0, seed
    assert status.num_held == len(tier.slots)


def checksums_of(num_pages, first_head, num_heads, words, further=()):
    """A function that returns the checksums of a row, with one row of each head in a page."""
    sections = (PageSection(num_pages, first_head, num_heads, 1, words), *further)
    checksums = PartChecksums(BlockParts(sections), TorchBlockKernels(), CPU)

    def of(row, name=HASH):
        numbers = torch.from_numpy(numbers_of(np.frombuffer(name, np.uint8)[None]))
        sums = torch.empty((1, checksums.count), dtype=torch.int64)
        checksums.of(row, sums)
        return (sums + numbers + checksums.page_numbers)[0].tolist()

    return of


def random_row(num_words):
    return torch.randint(-(2**31), 2**31, (1, num_words), dtype=torch.int64).int()


def test_every_bit_counts():
    rows = random_row(5)
    sums_of = checksums_of(1, 0, 1, 5)
    before = sums_of(rows)
    for word in range(5):
        for bit in range(32):
            changed = rows.clone()
            changed.view(torch.uint8)[0, 4 * word + bit // 8] ^= 1 << bit % 8
            assert sums_of(changed) != before, (word, bit)


def test_words_that_change_places_and_top_bits_that_change_together_are_found():
    rows = random_row(64)
    sums_of = checksums_of(1, 0, 1, 64)
    before = sums_of(rows)
    for first in range(63):
        swapped, flipped = rows.clone(), rows.clone()
        swapped[0, [first, first + 1]] = rows[0, [first + 1, first]]
        flipped[0, first : first + 2] ^= -(2**31)
        assert sums_of(swapped) != before
        assert sums_of(flipped) != before


def test_a_part_has_the_same_checksum_on_any_rank_and_no_other_part_has_it():
    """Two pages of four heads and one of two on one rank; one head of each page on another."""
    whole = checksums_of(2, 0, 4, 3, (PageSection(1, 0, 2, 1, 3),))
    row = random_row(30)
    sums = whole(row)
    assert len({*sums}) == 10
    equal = row.clone()
    equal[0, 12:24] = equal[0, :12]
    assert len({*whole(equal)[:8]}) == 8
    pages = row[:, :24].view(2, 4, 3)
    for head in range(4):
        part = checksums_of(2, head, 1, 3, (PageSection(1, 0, 1, 1, 3),))
        words = torch.cat([*pages[:, head], row[0, 24:27]])[None]
        assert part(words)[:2] == [sums[head], sums[4 + head]]
        assert not {*part(words, b"i" * HASH_BYTES)} & {*part(words)}
        other = checksums_of(2, (head + 1) % 4, 1, 3, (PageSection(1, 0, 1, 1, 3),))
        assert not {*other(words)[:2]} & {*part(words)}


def test_what_a_failed_step_has_stored_is_not_kept():
    tier = ModelledTier(random.Random(1), "cpu")
    tier.step([(1, 0, HASH)], ())
    tier.step([(2, 1, HASH)], ())
    tier.state.mark_failed(tier.seq)
    tier.step([(3, 2, HASH)], ())
    tier.state.mark_failed(tier.seq)
    loaded = tier.step((), [(4, 0, HASH), (5, 1, HASH), (6, 2, HASH)])
    assert loaded.invalid_blocks.tolist() == [5, 6]


def test_a_step_that_fails_while_it_fills_blocks_leaves_none_of_them():
    for seed in range(8):
        tier = ModelledTier(random.Random(seed), "cpu", memory=("host", "device")[seed % 2])
        tier.step([(1, 0, HASH)], ())
        filled = [(2, 1, HASH), (3, 2, HASH)]
        tier.step((), (), 0, filled, fails=True)
        loaded = tier.step((), [(4, 0, HASH), (5, 1, HASH), (6, 2, HASH)])
        assert loaded.invalid_blocks.tolist() == [5, 6], seed
        tier.step((), (), 0, filled)
        assert not tier.step((), [(5, 1, HASH), (6, 2, HASH)]).invalid_blocks.size, seed


def test_pieces_can_be_seen_while_their_step_runs():
    """Of blocks that are stored before a step, all can be seen at once."""
    tier = ModelledTier(random.Random(3), "cpu")
    num_pieces, own = len(pieces_of(tier.parts)), np.array([2, 3], np.int32)
    assert num_pieces > 1
    tier.step([(1, 0, HASH)], ())
    assert tier.tier.pieces_left(np.array([0], np.int32)) == num_pieces
    seen = []
    tier.on_layer = lambda: seen.append(tier.tier.pieces_left(own))
    tier.step((), (), 0, [(1, 2, HASH), (2, 3, HASH)])
    assert sorted({*seen}) == [0, *range(1, num_pieces)], seen
    assert seen == sorted(seen) and seen[0] == 0
    assert tier.tier.pieces_left(own) == num_pieces


def test_other_weights_find_nothing():
    tier = ModelledTier(random.Random(1), "cpu")
    tier.step([(1, 0, HASH)], ())
    tier.weights.version = 2
    assert tier.step((), [(4, 0, HASH)]).invalid_blocks.tolist() == [4]


def test_drivers_after_this_one_get_what_is_confirmed():
    tier = ModelledTier(random.Random(1), "cpu")
    contents = tier.state.host_contents
    tier.step([(1, 0, HASH)], ())
    tier.step([(2, 1, HASH)], ())
    contents.end_epoch(tier.seq - 1)
    tag = (1).to_bytes(8, "little") + b"tag"
    assert contents.noted(tag, 0, NUM_SLOTS, 1 << 40).block_ids.tolist() == [0]


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        (moves_of([(0, 0, HASH)]), "store_blocks = 0"),
        (moves_of([(NUM_BLOCKS, 0, HASH)]), f"store_blocks = {NUM_BLOCKS}"),
        (moves_of((), [(1, NUM_SLOTS, HASH)]), f"load_slots = {NUM_SLOTS}"),
        (moves_of((), [(1, -1, HASH)]), "load_slots = -1"),
        (moves_of([(1, 0, HASH)], num_filled=2), "num_filled = 2"),
        (moves_of([(1, 0, HASH)], filled=[(2, 0, HASH)]), "store_slots = 0"),
        (moves_of(filled=[(1, 0, HASH), (1, 1, HASH)]), "store_blocks = 1"),
        (moves_of((), [(2, 0, HASH)], [(1, 0, HASH)]), "load_slots = 0"),
        (moves_of([(1, 0, HASH), (1, 1, HASH)]), "store_blocks = 1"),
        (moves_of([(1, 0, HASH), (2, 0, HASH)]), "store_slots = 0"),
        (moves_of((), [(3, 0, HASH), (3, 1, HASH)]), "load_blocks = 3"),
        (moves_of([(1, 4, HASH)], [(2, 4, HASH)]), "load_slots = 4"),
        (moves_of([(1, 4, HASH[1:])]), "store_hashes = '16 bytes'"),
        (moves_of([(1, 4, HASH)], store_slots=b""), "store_slots = '0 slots'"),
        (moves_of(load_blocks=b"abc"), "load_blocks = '3 bytes'"),
    ],
)
def test_moves_that_cannot_be(moves, message):
    tier = ModelledTier(random.Random(1), "cpu")
    parts, limits = tier.state.parts, tier.state.limits
    with pytest.raises(InvalidStepError, match=message):
        parts.check_step((moves,), (), limits)


def test_a_sampling_moves_nothing():
    tier = ModelledTier(random.Random(1), "cpu")
    with pytest.raises(InvalidStepError, match="send it with the step"):
        tier.state.parts.check_later((moves_of(),), (), tier.state.limits)


def test_a_step_that_moves_blocks_is_otherwise_as_any():
    tier = ModelledTier(random.Random(1), "cpu")
    values = tier.state.parts.check_step((moves_of([(1, 0, HASH)]),), (), tier.state.limits)
    assert values.used == 0
    assert np.array_equal(values.data[0][1].store_blocks, [1])

"""A host tier that outlives its daemon: the next one takes over what is right, and nothing else."""

import random
from dataclasses import replace

import numpy as np
import pytest

from tests.support.exhaustive import seeds
from tests.support.host_moves import FROM_FILES, HASH_BYTES, NUM_SLOTS, KeptTier, ModelledTier
from tests.support.tmpfs import tmpfs_directory
from worker_daemon.runner.connectors import staging

ENTRY_BYTES = 168


@pytest.fixture
def place():
    """A directory on a tmpfs that does not exist yet."""
    with tmpfs_directory() as parent:
        yield parent / "kept"


@pytest.fixture
def begin(place):
    """Begins a daemon's tier after the end of the one before."""
    kept = []

    def begin_one(rng, **fields):
        end()
        kept.append(KeptTier(place, **fields))
        return ModelledTier(rng, "cpu", leaves=kept[-1]), kept[-1]

    def end():
        for each in kept:
            each.die()
        kept.clear()

    yield begin_one
    end()


def filled(begin, rng, **fields):
    """A tier with contents in all slots: (block, slot, hash) each."""
    tier, kept = begin(rng, **fields)
    stores = [(slot + 1, slot, rng.randbytes(HASH_BYTES)) for slot in range(NUM_SLOTS)]
    tier.step(stores, ())
    for block, slot, name in stores:
        tier.slots[slot] = (name, tier.blocks[block])
    kept.settle()
    return tier, kept, stores


def take_over(tier, before):
    """Load every slot that a former tier is known to have held; return those that the new one
    holds. Blocks are what the former tier has stored, or NaN."""
    names = {slot: name for slot, (name, _) in before.slots.items()}
    bad = set(tier.step((), [(slot + 1, slot, names[slot]) for slot in names]).invalid_blocks)
    for slot, (_, content) in before.slots.items():
        tier.blocks[slot + 1] = None if slot + 1 in bad else content
    tier.check()
    return {slot for slot in names if slot + 1 not in bad}


@pytest.mark.parametrize("seed", seeds(3, of=100))
def test_a_successor_has_what_a_killed_one_has_left(begin, seed, monkeypatch):
    """Killed anywhere: what the device has not told to have succeeded is not taken over."""
    rng = random.Random(seed)
    monkeypatch.setattr(staging, "STAGING_BYTES", rng.choice([1, 176, 1 << 20]))
    tier, kept = begin(rng)
    for _ in range(rng.randrange(1, 40)):
        tier.compute()
        tier.random_step()
    kept.settle()
    known = dict(tier.slots)
    kept.last_good = tier.seq
    for _ in range(rng.randrange(3)):
        tier.random_step()
    same = {slot for slot, held in known.items() if tier.slots[slot] == held}
    successor, _ = begin(rng)
    counts = successor.tier.counts.status()
    assert (counts.num_restored, counts.num_rejected) == (len(same), 0)
    assert counts.num_held == len(same)
    assert counts.file_bytes > counts.size_bytes
    assert take_over(successor, tier) == same


@pytest.mark.parametrize("seed", seeds(20, of=2000))
def test_whatever_becomes_of_the_file_costs_blocks_and_nothing_else(begin, place, seed):
    rng = random.Random(seed)
    tier, _, _ = filled(begin, rng)
    begin(rng)[1].index.close()  # nothing is written any more
    path = place / "blocks"
    raw = bytearray(path.read_bytes())
    row_bytes = tier.rows.rows.shape[1]
    touched = set()
    for _ in range(rng.randrange(1, 4)):
        slot, kind = rng.randrange(NUM_SLOTS), rng.choice(["entry", "row", "swap", "cut", "zeros"])
        other = rng.randrange(NUM_SLOTS)
        first = 4096 + slot * row_bytes
        if kind == "entry":
            raw[slot * ENTRY_BYTES + rng.randrange(ENTRY_BYTES - 6)] ^= 1 << rng.randrange(8)
        elif kind == "row":
            raw[first + rng.randrange(row_bytes)] ^= 1 << rng.randrange(8)
        elif kind == "swap" and other != slot:
            entries = [slice(s * ENTRY_BYTES, (s + 1) * ENTRY_BYTES) for s in (slot, other)]
            raw[entries[0]], raw[entries[1]] = raw[entries[1]], raw[entries[0]]
            touched.add(other)
        elif kind == "cut":
            del raw[first + rng.randrange(row_bytes) :]
            raw += bytes(4096 + NUM_SLOTS * row_bytes - len(raw))
            touched.update(range(slot, NUM_SLOTS))
        elif kind == "zeros":
            raw[first : first + row_bytes] = bytes(row_bytes)
        touched.add(slot)
    path.write_bytes(raw.rstrip(b"\0"))  # a file that ends early is one that ends in zeros
    successor, _ = begin(rng)
    assert take_over(successor, tier) >= {*range(NUM_SLOTS)} - touched


def test_an_entry_that_was_written_in_part_is_found(begin, place):
    """Whatever part of it, over an entry of other contents or over none."""
    rng = random.Random(random.randrange(1 << 30))
    tier, kept, _ = filled(begin, rng)
    path = place / "blocks"
    old = path.read_bytes()[:ENTRY_BYTES]
    name = rng.randbytes(HASH_BYTES)
    tier.step([(NUM_SLOTS + 1, 0, name)], ())
    tier.slots[0] = (name, tier.blocks[NUM_SLOTS + 1])
    kept.settle()
    whole = path.read_bytes()
    new = whole[:ENTRY_BYTES]
    for cut in (0, *sorted(rng.sample(range(1, ENTRY_BYTES), 12)), ENTRY_BYTES):
        begin(rng)[1].index.close()
        for before in (old, bytes(ENTRY_BYTES)):
            entry = new[:cut] + before[cut:]
            path.write_bytes(entry + whole[ENTRY_BYTES:])
            successor, _ = begin(rng)
            found = successor.tier.counts.status().num_restored
            assert found == NUM_SLOTS - (entry != new), cut
            assert take_over(successor, tier) >= {*range(1, NUM_SLOTS)}


def test_what_is_given_up_is_not_left_to_a_successor(begin):
    rng = random.Random(0)
    tier, kept, _ = filled(begin, rng)
    kept.last_good = tier.seq
    tier.step([(1, 0, b"a" * HASH_BYTES)], ())
    tier.step([(2, 1, b"b" * HASH_BYTES)], ())
    tier.state.mark_failed(tier.seq)
    kept.last_good = tier.seq
    kept.settle()
    successor, kept = begin(rng)
    # That of slot 0 has been stored by a step that succeeded, as is now known.
    assert successor.tier.counts.status().num_restored == NUM_SLOTS - 1
    successor.state.host_contents.forget()
    successor, _ = begin(rng)
    counts = successor.tier.counts.status()
    assert (counts.num_restored, counts.num_rejected) == (0, 0)


def test_a_slot_that_is_given_away_meanwhile_gets_no_entry(begin):
    """While the daemon waits for the slot's block, or writes another entry."""
    _, kept, _ = filled(begin, random.Random(0))
    slots, hashes = np.array([3], np.int32), np.zeros((1, HASH_BYTES), np.uint8)
    kept.index.replace(slots)
    kept.index.add(b"tag", slots, hashes, lambda: kept.index.replace(slots), lambda: True)
    kept.settle()
    successor, _ = begin(random.Random(0))
    assert successor.tier.counts.status().num_restored == NUM_SLOTS - 1
    assert successor.tier.counts.status().num_rejected == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"source": replace(FROM_FILES, content=b"others")},
        {"source": replace(FROM_FILES, stamps=b"later")},
        {"layout": b"other"},
    ],
    ids=["weights", "files", "layout"],
)
def test_blocks_of_others_never_match_and_are_given_up(begin, fields):
    rng = random.Random(0)
    tier, _, _ = filled(begin, rng)
    successor, _ = begin(rng, **fields)
    counts = successor.tier.counts.status()
    assert (counts.num_restored, counts.num_rejected) == (0, NUM_SLOTS)
    assert not take_over(successor, tier)
    again, _ = begin(rng)
    assert again.tier.counts.status().num_rejected == 0


def test_weights_that_were_sent_are_those_of_one_daemon(begin):
    rng, sent = random.Random(0), replace(FROM_FILES, stamps=b"")
    filled(begin, rng, source=sent)
    successor, _ = begin(rng, source=sent)
    assert successor.tier.counts.status().num_rejected == NUM_SLOTS


def test_entries_count_only_with_the_bytes_that_they_are_of(begin, place):
    """The same hashes, of other weights: what the slots' own checksums cannot tell."""
    rng = random.Random(random.randrange(1 << 30))
    stores = filled(begin, rng)[2]
    begin(rng)[1].index.close()
    path = place / "blocks"
    own = path.read_bytes()
    tier, kept = begin(rng, source=replace(FROM_FILES, content=b"others"))
    tier.compute()
    tier.step(stores, ())
    kept.settle()
    begin(rng, source=replace(FROM_FILES, content=b"others"))[1].index.close()
    path.write_bytes(own[:4096] + path.read_bytes()[4096:])
    successor, _ = begin(rng)
    assert successor.tier.counts.status().num_rejected == NUM_SLOTS

"""What vLLM's side notes of its prefix cache, and when."""

from types import SimpleNamespace

import pytest

from worker_client.errors import ClientError
from worker_client.steps.cached_blocks import CachedBlocks
from worker_client.vllm.prefix_notes import SWEEP_STEPS, SWEPT_AT_ONCE, PrefixNotes, tag_of

NUM_BLOCKS = SWEPT_AT_ONCE + 8


class Block:
    def __init__(self):
        self.block_hash = None

    def set_block_hash(self, value):
        assert self.block_hash is None
        self.block_hash = value


class Group:
    """Notes what it is given, as a group of daemons does."""

    def __init__(self, **known):
        self.known = {int(key[1:]): value for key, value in known.items()}
        self.notes, self.is_busy = [], False
        self.prefixes = self

    def note(self, tag, blocks, after, *, distrusted=()):
        if not self.is_busy:
            self.notes.append((blocks.block_ids.tolist(), after, list(distrusted)))
        return not self.is_busy

    def get(self, tag):
        return CachedBlocks.of(list(self.known), list(self.known.values()))


def step(value=None):
    return SimpleNamespace(value=value)


@pytest.fixture
def bench():
    """A pool of blocks, what notes it, and the group."""
    group, pool = Group(), SimpleNamespace(blocks=[Block() for _ in range(NUM_BLOCKS)])
    pool.cached_block_hash_to_block = SimpleNamespace(insert=lambda *_: None)
    notes = PrefixNotes(group, tag_of("a"))
    notes.restore(pool)
    return pool.blocks, notes, group


def go_round(notes, newest):
    for _ in range(SWEEP_STEPS * -(-NUM_BLOCKS // SWEPT_AT_ONCE)):
        notes.proceed(newest)
    notes.settle()


def test_earlier_servers_blocks_are_found_by_their_hashes():
    found = {}
    pool = SimpleNamespace(blocks=[Block() for _ in range(4)])
    pool.cached_block_hash_to_block = SimpleNamespace(insert=found.__setitem__)
    notes = PrefixNotes(Group(_1=b"x", _3=b"y"), b"t")
    assert notes.restore(pool) == 2
    assert found == {b"x": pool.blocks[1], b"y": pool.blocks[3]}
    assert [each.block_hash for each in pool.blocks] == [None, b"x", None, b"y"]


def test_cache_begins_empty_where_the_daemons_cannot_tell():
    def refuse(tag):
        raise ClientError("no")

    notes = PrefixNotes(SimpleNamespace(prefixes=SimpleNamespace(get=refuse)), b"t")
    assert notes.restore(SimpleNamespace(blocks=[Block()])) == 0


def test_blocks_are_noted_once_their_step_has_succeeded(bench):
    blocks, notes, group = bench
    blocks[3].block_hash, blocks[NUM_BLOCKS - 1].block_hash = b"a", b"b"
    newest = step()
    go_round(notes, newest)
    assert not group.notes
    newest.value = object()
    notes.settle()
    assert group.notes == [([3, NUM_BLOCKS - 1], newest, [])]
    go_round(notes, step(object()))
    assert len(group.notes) == 1  # nothing has changed


def test_block_that_has_lost_its_hash_is_noted_with_the_same_one_again(bench):
    blocks, notes, group = bench
    for block_hash in (b"a", None, b"a"):
        blocks[1].block_hash = block_hash
        go_round(notes, step(object()))
    assert [note[0] for note in group.notes] == [[1], [1]]


def test_idle_server_notes_all_at_once(bench):
    blocks, notes, group = bench
    blocks[NUM_BLOCKS - 1].block_hash = b"b"
    notes.finish_round()
    assert not group.notes  # no step was sent
    notes.proceed(step(object()))
    notes.finish_round()
    assert [note[0] for note in group.notes] == [[NUM_BLOCKS - 1]]


def test_busy_daemons_are_told_later(bench):
    blocks, notes, group = bench
    group.is_busy, blocks[1].block_hash = True, b"a"
    go_round(notes, step(object()))
    group.is_busy = False
    notes.settle()
    assert [note[0] for note in group.notes] == [[1]]


def test_what_a_lost_step_was_to_fill_is_not_noted(bench):
    blocks, notes, group = bench
    lost = step()
    blocks[1].block_hash = b"a"
    go_round(notes, lost)
    notes.forget()
    blocks[1].block_hash = None
    lost.value = object()
    notes.finish_round()
    go_round(notes, step(object()))
    assert not group.notes


def test_distrusted_blocks_are_not_noted_and_lose_their_notes(bench):
    blocks, notes, group = bench
    blocks[1].block_hash, blocks[2].block_hash = b"a", b"b"
    newest = step()
    go_round(notes, newest)
    notes.distrust([1])
    blocks[1].block_hash = None
    newest.value = object()
    notes.settle()
    go_round(notes, step(object()))
    assert [(ids, distrusted) for ids, _, distrusted in group.notes] == [([2], []), ([], [1])]

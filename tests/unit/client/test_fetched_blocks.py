"""The scheduler's view of blocks in files: what is loaded was fetched, once; what is stored is what
its block still holds."""

import random

import pytest

from rpc_schema.moved_blocks import MAX_MOVED_BLOCKS
from tests.support.exhaustive import seeds
from worker_client.scheduler import filed_blocks
from worker_client.scheduler.filed_blocks import FetchedBlocks
from worker_client.scheduler_output import SchedulerOutput
from worker_client.steps.block_moves import HashedBlocks, KVFileMoves

TAG = b"tag"
NUM_BLOCKS = 12


@pytest.mark.parametrize("seed", seeds(3, of=40))
def test_loads_and_stores_are_of_what_is_there(seed):
    rng, files = random.Random(seed), FetchedBlocks()
    in_files, in_memory, blocks, num_loaded = set(), set(), {}, 0
    for number in range(300):
        for block, key in rng.sample(sorted(blocks.items()), min(2, len(blocks))):
            files.offer(key, block)
        if in_files and rng.random() < 0.5:
            fetched = rng.sample(sorted(in_files), min(3, len(in_files)))
            files.fetched(fetched)
            in_memory.update(fetched)
        taken = rng.sample(range(NUM_BLOCKS), rng.randint(0, 3))
        for block in taken:
            if block in blocks:
                files.evict({block: blocks[block]})
            there = [key for key in sorted(in_memory) if key in files]
            if there and rng.random() < 0.5:
                key = rng.choice(there)
                files.keep([key])
                files.load({block: key})
                assert key not in files
                num_loaded += 1
        moves = files.take_moves(TAG)
        if rng.random() < 0.1:
            files.fail([SchedulerOutput(extensions=moves)])
            files.blocks_lost()
            blocks.clear()
            in_memory.clear()
            files.forget_all()
            continue
        for each in moves:
            assert len({*each.stored.block_ids}) == len(each.stored.block_ids)
            for block, key in zip(*each.stored, strict=True):
                assert blocks[block] == key
                in_files.add(key)
            for block in taken:
                blocks.pop(block, None)
            for block, key in zip(*each.loaded, strict=True):
                in_memory.remove(key)
                blocks[block] = key
        for block in taken:
            blocks.setdefault(block, b"%d" % (1000 * number + block))
    assert num_loaded > 20, seed


def test_what_was_offered_is_not_stored_once_it_is_lost():
    files = FetchedBlocks()
    files.offer(b"a", 1)
    files.offer(b"b", 2)
    files.forget([b"a"])
    assert files.take_moves(TAG) == (KVFileMoves(TAG, HashedBlocks((2,), (b"b",))),)
    files.offer(b"a", 1)
    files.fetched([b"c"])
    files.blocks_lost()
    assert files.take_moves(TAG) == ()
    assert b"c" in files
    files.forget([b"c"])
    assert b"c" not in files


def test_a_step_moves_no_more_than_a_message_holds(monkeypatch):
    assert FetchedBlocks().room == MAX_MOVED_BLOCKS
    monkeypatch.setattr(filed_blocks, "MAX_MOVED_BLOCKS", 2)
    files = FetchedBlocks()
    for number in range(3):
        files.offer(b"%d" % number, number)
    (moves,) = files.take_moves(TAG)
    assert len(moves.stored.block_ids) == 2
    files.fetched([b"x"])
    files.load({1: b"x"})
    assert files.room == 1

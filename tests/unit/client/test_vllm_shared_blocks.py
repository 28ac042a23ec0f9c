"""vLLM's scheduler lets a request begin with blocks that another fills in the same step. The steps
that are sent fill them first: a real SlotTable, which knows the blocks, takes each."""

import random

from tests.support.vllm_steps import PlannedSteps
from tests.support.vllm_steps import new_request as new

BLOCK_SIZE = 4


def test_readers_of_a_prompt_come_after_it():
    steps = PlannedSteps(BLOCK_SIZE).write(
        [new("b", 10, [1, 2, 4], 8), new("a", 10, [1, 2, 3]), new("c", 6, [5, 6])],
        {"a": 10, "b": 2, "c": 6},
    )
    assert steps == [{"a", "c"}, {"b"}]


def test_reader_of_a_reader_comes_last():
    steps = PlannedSteps(BLOCK_SIZE).write(
        [new("a", 5, [1, 2]), new("b", 9, [1, 3, 4], 4), new("c", 13, [1, 3, 5, 6], 8)],
        {"a": 5, "b": 5, "c": 5},
    )
    assert steps == [{"a"}, {"b"}, {"c"}]


def test_reader_of_what_a_running_request_gets():
    planned = PlannedSteps(BLOCK_SIZE)
    planned.write([new("a", 16, [1])], {"a": 4})
    steps = planned.write([new("b", 9, [1, 2, 3], 8)], {"a": 6, "b": 1}, (["a"], [4], [([2, 4],)]))
    assert steps == [{"a"}, {"b"}]


def test_blocks_of_earlier_steps_need_no_turn():
    planned = PlannedSteps(BLOCK_SIZE)
    planned.write([new("a", 9, [1, 2, 3])], {"a": 9})
    steps = planned.write([new("b", 12, [1, 2, 4], 8), new("c", 5, [5, 6])], {"b": 4, "c": 5})
    assert steps == [{"b", "c"}]


def test_random_prefixes_are_taken():
    """Each request begins with full blocks of any earlier one of its step."""
    source = random.Random(7)
    for _ in range(200):
        chains, requests, counts, block = [[]], [], {}, 1
        for number in range(source.randrange(2, 9)):
            shared = source.choice(chains)
            shared = shared[: source.randrange(len(shared) + 1)]
            own = [*range(block, block + source.randrange(1, 4))]
            block += len(own)
            blocks, computed = [*shared, *own], len(shared) * BLOCK_SIZE
            num_tokens = len(blocks) * BLOCK_SIZE - source.randrange(BLOCK_SIZE)
            chains.append(blocks[: num_tokens // BLOCK_SIZE])
            counts[f"r{number}"] = num_tokens - computed
            requests.append(new(f"r{number}", num_tokens, blocks, computed))
        source.shuffle(requests)
        steps = PlannedSteps(BLOCK_SIZE).write(requests, counts)
        assert sorted(req_id for own in steps for req_id in own) == sorted(counts)

"""What a driver has the workers recompute: of any shared blocks, each position once, and before
another row reads it."""

import random

import numpy as np

from rpc_schema.adoption import RequestRow
from rpc_schema.kv_cache import BlockGroup
from worker_client.group.adoption import RankRow
from worker_client.group.recomputing import MAX_RECOMPUTED_BYTES, is_in_place, plan_rows, split_rows

GROUPS = (BlockGroup(block_size=4), BlockGroup(block_size=8, window=20))


def row(slot, num_prompt, tokens, num_computed, *by_group):
    blocks = [np.array(own, np.int32) for own in by_group]
    wire = RequestRow(
        slot=slot,
        req_id=f"r{slot}",
        num_prompt_tokens=num_prompt,
        num_tokens=len(tokens),
        num_computed_tokens=num_computed,
        num_blocks=blocks[0].size,
        num_more_blocks=tuple(own.size for own in blocks[1:]),
        extensions=(),
        note=b"",
        weights_version=1,
    )
    return RankRow(0, wire, np.array(tokens, np.int32), np.concatenate(blocks))


def test_shared_blocks_are_computed_once_and_first():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for _ in range(100):
        rows, free = [], iter(range(1, 10_000))
        for slot in range(int(rng.integers(1, 7))):
            end, by_group = int(rng.integers(1, 60)), []
            other = rows[int(rng.integers(len(rows)))] if rows and rng.random() < 0.7 else None
            most = 0 if other is None else min(end, other.row.num_computed_tokens)
            shared = int(rng.integers(0, most // 8 + 1)) * 8  # whole blocks of both groups
            for number, group in enumerate(GROUPS):
                before = [] if other is None else other.blocks_by_group[number].tolist()
                own = before[: shared // group.block_size]
                own += [next(free) for _ in range(-(-end // group.block_size) - len(own))]
                by_group.append(own)
            num_prompt = int(rng.integers(1, end + 2))
            rows.append(row(slot, num_prompt, [7] * (end + 1), end, *by_group))
        written = [{} for _ in GROUPS]
        found = {columns[0]: (columns, given) for columns, given in plan_rows(rows, GROUPS)}
        for each in rows:
            end = each.row.num_computed_tokens
            slot, first, last, num_given = (
                found[each.row.slot][0] if each.row.slot in found else (each.row.slot, end, end, 0)
            )
            assert last == end
            if first < last:
                assert num_given == max(0, end - each.row.num_prompt_tokens)
                assert len(found[slot][1]) == 4 * num_given
            for own, group, there in zip(each.blocks_by_group, GROUPS, written, strict=True):
                for place in range(end):
                    key = int(own[place // group.block_size]), place % group.block_size
                    there[key] = there.get(key, 0) + (place >= first)
                    assert there[key] == 1


def test_rows_without_a_block_for_each_token_are_not_in_place():
    blocks = [[1, 2, 3], [4, 5]]
    assert is_in_place(row(0, 9, [7] * 10, 9, *blocks), GROUPS, awaits_sampling=False)
    for other in (
        row(0, 9, [7] * 10, 9, [1, 2, 3], [0, 5]),  # a window has passed it
        row(0, 9, [7] * 10, 9, [1, 2], [4, 5]),
        row(0, 9, [7] * 10, 0, [], []),
    ):
        assert not is_in_place(other, GROUPS, awaits_sampling=False)
    # Counts may be bounds. Of a row that waits to be sampled, these are drafts without an outcome.
    bound = row(0, 9, [7] * 10, 12, *blocks)
    assert is_in_place(bound, GROUPS, awaits_sampling=False)
    assert not is_in_place(bound, GROUPS, awaits_sampling=True)
    assert next(plan_rows([bound], GROUPS))[0] == (0, 0, 10, 1)
    failed = row(0, 9, [*[7] * 9, -1], 12, *blocks)
    assert next(plan_rows([failed], GROUPS))[0] == (0, 0, 9, 0)


def test_tokens_are_spread_over_messages():
    big = bytes(MAX_RECOMPUTED_BYTES // 2)
    rows = [((slot, 0, 1, 0), big) for slot in range(5)]
    assert [[each[0] for each in message.rows] for message in split_rows(iter(rows))] == [
        [0, 1],
        [2, 3],
        [4],
    ]
    assert list(split_rows(iter(()))) == []

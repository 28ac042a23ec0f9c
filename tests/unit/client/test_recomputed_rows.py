"""What a driver has the workers recompute: of any shared blocks, each position once, and before
another row reads it, in messages of any size, whichever requests end between them."""

import random

import numpy as np

from rpc_schema.adoption import RequestRow
from rpc_schema.kv_cache import BlockGroup
from worker_client.group.adoption import RankRow
from worker_client.group.recompute_plan import MAX_RECOMPUTED_BYTES, RowsPlan, is_in_place

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


def random_rows(rng):
    """Rows, some of which begin with whole blocks of others."""
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
    return rows


def messages_of(plan, waiting, most):
    while (message := plan.take(waiting, most)).rows or message.req_ids:
        yield message


def test_shared_blocks_are_computed_once_and_first():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for round_ in range(300):
        rows = random_rows(rng)
        waiting = {each.row.req_id for each in rows}
        by_slot = {each.row.slot: each for each in rows}
        most = int(rng.integers(1, 40)) if round_ % 2 else 1 << 30
        written = [{} for _ in GROUPS]
        begun, gone, plan, done = {}, set(), RowsPlan(reversed(rows), GROUPS), []
        for message in messages_of(plan, waiting, most):
            assert message.num_tokens == sum(end - first for _, first, end, _ in message.rows)
            assert message.num_tokens <= most
            columns = np.array(message.rows, int).reshape(-1, 4)
            assert (np.diff(columns[:, 0]) > 0).all()
            if len(columns) > 1 and columns[0][0] in begun:
                assert columns[0][2] - columns[0][1] > 1, "an end before rows of one token"
            for (slot, first, last, num_given), given in zip(
                message.rows, message.token_ids, strict=True
            ):
                each = by_slot[slot]
                assert begun.get(slot, first) == first
                begun[slot] = last
                assert num_given == max(0, last - each.row.num_prompt_tokens)
                assert len(given) == 4 * num_given
                is_cut = message.is_cut and slot == columns[-1][0]
                assert (last < each.row.num_computed_tokens) == is_cut
                assert (each.row.req_id in message.req_ids) != is_cut
                for own, group, there in zip(each.blocks_by_group, GROUPS, written, strict=True):
                    for place in range(last):  # it reads all before, and writes the rest
                        key = int(own[place // group.block_size]), place % group.block_size
                        if place < first:
                            assert key in there
                        elif key in there:
                            # By a row that has ended before its block was full.
                            assert gone, (key, slot)
                        there[key] = True
            done += message.req_ids
            waiting -= {*message.req_ids}
            if waiting and round_ % 4 == 3 and rng.random() < 0.2:
                gone.add(rng.choice(sorted(waiting)))
                waiting -= gone
        assert not waiting and len({*done}) == len(done)
        assert {*done} | gone == {each.row.req_id for each in rows}


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
    assert RowsPlan([bound], GROUPS).take({"r0"}, 99).rows == [(0, 0, 10, 1)]
    failed = row(0, 9, [*[7] * 9, -1], 12, *blocks)
    assert RowsPlan([failed], GROUPS).take({"r0"}, 99).rows == [(0, 0, 9, 0)]


def test_tokens_are_spread_over_messages():
    num_given = MAX_RECOMPUTED_BYTES // 8
    blocks = [range(1, num_given // size + 2) for size in (4, 8)]
    rows = [row(slot, 1, [7] * (num_given + 1), num_given + 1, *blocks) for slot in range(5)]
    for place, each in enumerate(rows):  # the last token is in a block of its own
        for own in each.blocks_by_group:
            own[-1] = 10**7 + place
    waiting = {each.row.req_id for each in rows}
    found = list(messages_of(RowsPlan(rows, GROUPS), waiting, 1 << 30))
    assert [[each[0] for each in message.rows] for message in found] == [[0, 1], [2, 3], [4]]
    assert not list(messages_of(RowsPlan([], GROUPS), waiting, 5))

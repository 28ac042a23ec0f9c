"""Forward passes that recompute rows, against the rows' tokens one by one; and what is refused."""

import random
from itertools import chain

import numpy as np
import pytest
from msgspec.structs import replace
from row_steps import request_state

from rpc_schema.errors import InvalidStepError
from rpc_schema.step import ExecuteModel, NewRequestData
from rpc_schema.weight_transfer import RecomputeRequests
from worker_daemon.runner.recompute import (
    RecomputedRows,
    plan_passes,
    read_replicas,
    read_rows,
)
from worker_daemon.runner.replica_counts import ReplicaCounts
from worker_daemon.runner.scheduled_step import StepLimits

LIMITS = StepLimits(4, 16, 64, 100, 4, 32)
IDS = {"epoch": 1, "link": 0}


def int32s(*values):
    return np.array(values, "<i4").tobytes()


def test_passes_take_all_tokens_in_order_and_are_full():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for _ in range(200):
        count, most = int(rng.integers(1, 9)), int(rng.integers(1, 8))
        slots = np.sort(rng.choice(50, count, replace=False)).astype(np.int32)
        firsts = rng.integers(0, 20, count).astype(np.int32)
        ends = (firsts + rng.integers(1, 6, count)).astype(np.int32)
        passes = list(plan_passes(7, RecomputedRows(slots, firsts, ends, {}), most))
        expected = [
            (slot, place)
            for slot, first, end in zip(slots, firsts, ends, strict=True)
            for place in range(first, end)
        ]
        found = [
            [
                (slot, place)
                for slot, start, end in zip(each.slots, each.starts, each.ends, strict=True)
                for place in range(start, end)
            ]
            for each in passes
        ]
        assert [*chain(*found)] == expected
        for each, own, following in zip(passes, found, [*found[1:], []], strict=True):
            begins_alone = each.starts[0] == firsts[np.searchsorted(slots, each.slots[0])]
            if len(own) < most and following:
                assert len(own) == 1 and not begins_alone, "an end before rows of one token"
                following = following[: most - 1]
                assert len({slot for slot, _ in following}) == len(following)
            elif len(own) == len(each.slots) > 1:
                assert begins_alone
        for each, own in zip(passes, found, strict=True):
            assert (np.diff(each.slots) > 0).all() and (each.num_tokens > 0).all()
            assert (each.total_num_tokens, each.longest) == (len(own), each.ends.max())
            assert each.seq == 7 and not each.num_samples.any()


@pytest.fixture
def state():
    """Slot 1 with a prompt of 6 tokens, 5 of them computed; slot 3 with 3, and one sampled."""
    state = request_state(LIMITS)
    new = [
        NewRequestData(
            slot=slot, req_id=f"r{slot}", num_tokens=n, num_prompt_tokens=n, num_computed_tokens=0
        )
        for slot, n in ((1, 6), (3, 3))
    ]
    state.apply(
        ExecuteModel(
            **IDS,
            seq=1,
            total_num_scheduled_tokens=8,
            scheduled=bytes([0b1010]),
            num_scheduled_tokens=int32s(1, 5, 3, 3),
            new_block_slots=np.array([1, 1, 3], "<u2").tobytes(),
            new_block_ids=int32s(1, 2, 3),
            scheduled_new_reqs=tuple(new),
            resync=b"",
        ),
        [int32s(10, 11, 12, 13, 14, 15, 20, 21, 22)],
    )
    state.apply(
        ExecuteModel(**IDS, seq=2, total_num_scheduled_tokens=1, scheduled=bytes([0b1000])), []
    )
    return state


GOOD = RecomputeRequests(
    **IDS,
    seq=3,
    rows=int32s(1, 0, 5, 0, 3, 2, 4, 1),
    token_ids=int32s(30),
    max_num_tokens=16,
)


def test_each_replica_knows_the_passes_of_all():
    """From the counts of rows alone; one without a pass left has no tokens in it."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for _ in range(50):
        most, num_replicas = int(rng.integers(1, 8)), int(rng.integers(2, 5))
        rows = [
            rng.integers(1, 9, rng.integers(0, 5)).astype(np.int32) for _ in range(num_replicas)
        ]
        state = request_state(StepLimits(5, 16, 64, 100, 4, 32), ReplicaCounts(0, num_replicas))
        message = RecomputeRequests(
            **IDS,
            seq=3,
            rows=b"",
            max_num_tokens=most,
            tokens_by_replica=tuple(own.tobytes() for own in rows),
        )
        found = read_replicas(message, state)
        assert not any(each.are_decodes for each in found)
        by_replica = zip(*(each.counts for each in found), strict=True)
        for own, counts in zip(rows, by_replica, strict=False):
            slots, zeros = np.arange(own.size, dtype=np.int32), np.zeros_like(own)
            passes = plan_passes(3, RecomputedRows(slots, zeros, own, {}), most)
            expected = [each.total_num_tokens for each in passes]
            assert [*counts] == expected + [0] * (len(found) - len(expected))
        assert all(any(each.counts) for each in found)


def test_rows_have_their_prompt_and_what_follows_it(state):
    rows = read_rows(GOOD, state)
    assert {slot: own.tolist() for slot, own in rows.tokens.items()} == {
        1: [10, 11, 12, 13, 14, 15],
        3: [20, 21, 22, 30],
    }
    with state.knowing(rows.tokens):
        assert state.num_known_tokens[[1, 3]].tolist() == [6, 4]
    assert state.num_known_tokens[[1, 3]].tolist() == [6, 3]


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("max_num_tokens", {"max_num_tokens": 17}),
        ("rows", {"rows": int32s(1, 0, 5)}),
        ("rows", {"token_ids": b"abc"}),
        ("rows", {"rows": int32s(3, 0, 4, 1, 1, 0, 5, 0)}),
        ("rows", {"rows": int32s(2, 0, 1, 1)}),
        ("rows", {"rows": int32s(-1, 0, 1, 1)}),
        ("rows", {"rows": int32s(4, 0, 1, 1)}),
        ("rows[1]", {"rows": int32s(1, 0, 6, 1)}),
        ("rows[1]", {"rows": int32s(1, 5, 5, 1)}),
        ("rows[1]", {"rows": int32s(1, -1, 5, 1)}),
        ("rows[1]", {"rows": int32s(1, 0, 5, -1, 3, 0, 4, 2)}),
        ("rows[3]", {"rows": int32s(3, 0, 4, 0), "token_ids": b""}),
        ("token_ids", {"token_ids": int32s(30, 31)}),
        ("token_ids", {"token_ids": int32s(100)}),
        ("token_ids", {"token_ids": int32s(-1)}),
    ],
)
def test_what_does_not_fit_the_rows_is_refused(state, field, fields):
    with pytest.raises(InvalidStepError) as refused:
        read_rows(replace(GOOD, **fields), state)
    assert refused.value.field == field
    assert not state.has_failed

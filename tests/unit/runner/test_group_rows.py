"""Rows of several KV groups: which blocks a step may name, where they go on the device, and what a
rank reports once steps are taken back."""

import numpy as np
import pytest
import torch
from row_steps import request_state

from rpc_schema.errors import InvalidStepError
from rpc_schema.kv_cache import BlockGroup
from rpc_schema.step import ExecuteModel, NewRequestData
from worker_daemon.runner.adoption import describe_requests
from worker_daemon.runner.input_batch import InputBuilder
from worker_daemon.runner.row_tables import RowTables, TorchRowKernels
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.runner.staging import HostStaging
from worker_daemon.runner.step_layout import ExactShapes, StepLadder, decode_sizes, mixed_plans
from worker_daemon.runner.token_history import TokenHistory
from worker_daemon.runner.token_versions import TokenVersions

CPU = torch.device("cpu")
GROUPS = (BlockGroup(4), BlockGroup(4, 6), BlockGroup(8, 6))
LIMITS = StepLimits(3, 64, 40, 50, 4, 30, GROUPS)


def column(values, dtype):
    return np.array(values, dtype).tobytes()


def step(seq, counts, new=(), blocks=(), resync=None, **fields):
    """counts: of each slot; blocks: (slot, group, id) in order; new: (slot, tokens, computed)."""
    bits = np.zeros(LIMITS.max_num_seqs, np.bool_)
    bits[list(counts)] = True
    slots, groups, ids = zip(*blocks, strict=True) if blocks else ((), (), ())
    pairs = [(slot, count) for slot, count in sorted(counts.items()) if count != 1]
    columns = {
        "new_block_slots": column(slots, "<u2"),
        "new_block_groups": column(groups, "u1"),
        "new_block_ids": column(ids, "<i4"),
    }
    requests = tuple(
        NewRequestData(
            slot=slot,
            req_id=f"r{slot}",
            num_tokens=tokens,
            num_prompt_tokens=tokens,
            num_computed_tokens=computed,
        )
        for slot, tokens, computed in new
    )
    message = ExecuteModel(
        epoch=1,
        link=1,
        seq=seq,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled=np.packbits(bits, bitorder="little").tobytes(),
        num_scheduled_tokens=column(pairs, "<i4"),
        scheduled_new_reqs=requests,
        resync=None if resync is None else column(resync, "<i4"),
        **columns | fields,
    )
    tokens = np.arange(sum(tokens for _, tokens, _ in new)) % 50
    return message, [tokens.astype("<i4").tobytes()] if new else []


PREFIX = [(0, 0, i) for i in (1, 2, 3, 4)] + [(0, 1, i) for i in (0, 5, 6, 7)]
PREFIX += [(0, 2, i) for i in (8, 9)]
"""Of 13 tokens, of which 11 are computed: the window from 6 on."""


class Rows:
    def __init__(self):
        self.state = request_state(LIMITS)
        self.tables = RowTables(LIMITS, CPU, TorchRowKernels())
        self.inputs = InputBuilder(self.state, self.tables, HostStaging(), ExactShapes())

    def run(self, *args, **fields):
        scheduled = self.state.apply(*step(*args, **fields))
        inputs = self.inputs.build(scheduled)
        self.tables.update(inputs.columns)
        return inputs.attention(self.tables.gather(inputs.columns), self.tables)

    def refused(self, field, match, *args, **fields):
        before = [part.copy() for part in (self.state.counts.num_blocks, self.state.counts.live)]
        with pytest.raises(InvalidStepError, match=match) as caught:
            self.state.apply(*step(*args, **fields))
        assert caught.value.field == field
        after = self.state.counts.num_blocks, self.state.counts.live
        assert all((a == b).all() for a, b in zip(before, after, strict=True))
        self.state.drop_all()


def test_each_group_has_its_table_and_its_slots():
    rows = Rows()
    metadata = rows.run(1, {0: 2}, new=[(0, 13, 11)], blocks=PREFIX)
    assert [m.block_table[0, :4].tolist() for m in metadata] == [
        [1, 2, 3, 4],
        [0, 5, 6, 7],
        [8, 9, 0, 0],
    ]
    slots = [m.slot_mapping.tolist() for m in metadata]
    assert slots == [[3 * 4 + 3, 4 * 4], [6 * 4 + 3, 7 * 4], [9 * 8 + 3, 9 * 8 + 4]]
    assert rows.state.num_held_blocks() == 4 + 2 + 1, "two places are behind, one with a block"
    metadata = rows.run(2, {0: 1})
    metadata = rows.run(3, {0: 1})
    rows.run(4, {0: 1})
    blocks = [(0, 0, 10), (0, 1, 11), (0, 2, 12)]
    metadata = rows.run(5, {0: 1}, blocks=blocks)
    assert [m.slot_mapping.tolist() for m in metadata] == [[40], [44], [96]]
    assert [m.block_table[0, 4].item() for m in metadata[:2]] == [10, 11]
    assert not any(m.block_table[3].any() for m in metadata), "the spare row"


def test_decodes_run_as_long_as_every_group_has_room():
    rows = Rows()
    rows.run(
        1,
        {0: 13},
        new=[(0, 13, 0)],
        blocks=[(0, g, 1 + i) for g in (0, 1) for i in range(4)] + [(0, 2, 9), (0, 2, 10)],
    )
    for seq in (2, 3, 4):
        rows.run(seq, {0: 1})
    for missing in range(3):
        given = [(0, group, 20 + group) for group in range(3) if group != missing]
        again = Rows()
        again.run(
            1,
            {0: 16},
            new=[(0, 16, 0)],
            blocks=[(0, g, 1 + i) for g in (0, 1) for i in range(4)] + [(0, 2, 9), (0, 2, 10)],
        )
        again.refused("num_scheduled_tokens", "blocks for 16", 2, {0: 1}, blocks=given)


@pytest.mark.parametrize(
    ("field", "match", "blocks"),
    [
        ("new_block_ids", "or 0 for blocks", [*PREFIX[:4], (0, 1, 0), (0, 1, 0), *PREFIX[6:]]),
        ("new_block_ids", "from 1 to 29", [(0, 0, 0), *PREFIX[1:]]),
        ("new_block_ids", "from 1 to 29", [*PREFIX[:4], (0, 1, -1), *PREFIX[5:]]),
        ("new_block_ids", "from 1 to 29", [*PREFIX[:4], (0, 1, 30), *PREFIX[5:]]),
        ("new_block_groups", "from 0 to 2", [*PREFIX, (0, 3, 10)]),
        ("new_block_slots", "from 0 to 2", [*PREFIX, (3, 0, 10)]),
        ("new_block_slots", "from 0 to 2", [*PREFIX, (4, 0, 10)]),
        ("new_block_slots", "admit a request", [*PREFIX, (1, 1, 10)]),
        ("new_block_slots", "at most 10", PREFIX + [(0, 1, 10)] * 7),
        ("num_scheduled_tokens", "blocks for 8", PREFIX[:-1]),
        ("num_scheduled_tokens", "blocks for 12", PREFIX[:7] + PREFIX[8:]),
    ],
)
def test_wrong_blocks_are_refused(field, match, blocks):
    Rows().refused(field, match, 1, {0: 2}, new=[(0, 13, 11)], blocks=blocks)


def test_columns_of_other_lengths_and_wrong_counts_are_refused():
    rows = Rows()
    new = {"new": [(0, 13, 11)], "blocks": PREFIX}
    rows.refused("new_block_groups", "one for each", 1, {0: 2}, **new, new_block_groups=b"\0")
    rows.refused("new_block_groups", "one for each", 1, {}, new_block_groups=b"\0")
    rows.run(2, {0: 2}, **new)
    for wrong in ([0, 13, 14, 4], [0, 13, 14, 4, 4, 1], [0, 13, 14, 4, 3, 2], [0, 13, 14, 0, 0, 0]):
        rows.refused("resync", "rows of 6|this rank has", 3, {}, resync=wrong)
        rows.run(2, {0: 2}, **new)
    rows.run(4, {0: 1}, resync=[0, 13, 14, 4, 4, 2])


@pytest.mark.parametrize(("chunk", "is_kept"), [(1, True), (8, False)])
def test_rows_that_see_blocks_again_which_others_may_have_are_not_vouched_for(chunk, is_kept):
    """Behind two steps that are taken back: what the second one's scheduler let go of is lost."""
    rows = Rows()
    blocks = [(0, g, 1 + 8 * g + i) for g in (0, 1) for i in range(8)]
    blocks += [(0, 2, 20 + i) for i in range(4)]
    rows.run(1, {0: 13}, new=[(0, 32, 0)], blocks=blocks)
    rows.run(2, {0: chunk})
    rows.run(3, {0: 1})
    rows.state.take_back(lambda epoch, seq: seq == 1)
    (row,) = describe_requests(
        rows.state, rows.inputs, TokenHistory(), 0, 0, TokenVersions(), {}
    ).rows
    if not is_kept:
        assert (row.num_computed_tokens, row.num_blocks, row.num_more_blocks) == (0, 0, (0, 0))
        return
    assert (row.num_computed_tokens, row.num_blocks, row.num_more_blocks) == (13, 8, (8, 4))
    page = describe_requests(rows.state, rows.inputs, TokenHistory(), 0, 0, TokenVersions(), {})
    told = np.frombuffer(page.block_ids, "<i4").tolist()
    assert told == [*range(1, 9), 0, 0, *range(11, 17), 0, *range(21, 24)]


def test_the_ladder_has_room_for_a_block_of_every_group():
    ladder = StepLadder(decode_sizes(8), lambda size: [40], mixed_plans(8, 64, 40, 3), 3)
    assert {plan.shape.num_updates // plan.shape.num_tokens for plan in ladder.plans} == {3}

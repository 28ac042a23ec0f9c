"""Steps that a scheduler must not send: one field of a valid step is given a hostile value. Each is
refused by name without side effects: running requests continue with the right tokens."""

import math
import sys
import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rpc_schema.sampling import (
    MAX_STOP_TOKEN_IDS,
    GrammarMasks,
    LogprobsWanted,
    RandomSampling,
    StopTokens,
)
from tests.support.fake_daemon import VOCAB_SIZE, next_token
from tests.unit.client.conftest import worker_config
from worker_client.errors import InvalidSchedulerOutput, RequestError
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, SchedulerLimits
from worker_client.scheduler_output import NewRequest, SchedulerOutput
from worker_client.steps.masks import StepMasks
from worker_client.steps.slots import SlotTable
from worker_client.steps.step_checks import GroupLimits

SURROGATE = "\ud800"
ENDLESS = []
ENDLESS.append(ENDLESS)
ENDLESS_AT = 4
"""Its place among hostile extensions."""
PROMPT = (5, 6, 7)
HOSTILE = {
    "req_id": ["", "x" * 257, SURROGATE, None, 7, b"x", "runs"],
    "token_ids": [
        np.array([1, 2, 2**32 + 3], np.int64),
        np.array([1, 2, -1], np.int64),
        np.array([1, 2, 3.7]),
        np.array([1, 2, VOCAB_SIZE], np.int32),
        np.array([[1], [2], [3]], np.int32),
        np.array([True, False, True]),
        [1, 2, 2**70],
        [1, 2, None],
        ["1", "2", "3"],
        np.zeros(0, np.int32),
        np.zeros(513, np.int32),
        None,
        7,
    ],
    "num_prompt_tokens": [0, -1, 4, 2**70, 1.5, None, "3", np.int64(3)],
    "num_computed_tokens": [-1, 3, 2**70, 0.5, None],
    "block_ids": [
        [2**31],
        [2**70],
        [-5],
        [0],
        [8192],
        [1.5],
        [None],
        None,
        5,
        "12",
        [[9]],
        [9, 9],
        [1],
        np.array([9.0]),
        np.array(9),
        np.array([[9]]),
        b"\x09",
        {9},
        {9: 1},
    ],
    "note": [b"x" * ((1 << 16) + 1), "text", None],
    "extensions": [
        None,
        [],
        np.zeros(0),
        np.zeros(3),
        (StopTokens(token_ids=ENDLESS),),
        (LogprobsWanted(count=1), LogprobsWanted(count=2)),
        (GrammarMasks(slots=b"", indices=b""),),
        {"temperature": 0.0},
        ({"temperature": 0.0},),
        (b"x",),
    ],
    "temperature": [-1.0, math.nan, math.inf, 1e7, 1e-9, "hot", None, np.float32(1.0)],
    "top_k": [-1, 2**31, 1.5, None],
    "top_p": [0.0, 7.0, math.nan, -1.0],
    "min_p": [-0.1, 1.1, math.nan],
    "seed": [-1, 2**63, 2**64, 1.5, None, True],
    "min_tokens": [-1, 2**31],
    "logprobs": [-1, 21, 500, 1.5],
    "stop_token_ids": [
        (-1,),
        (VOCAB_SIZE,),
        (2**31,),
        (1.0,),
        (None,),
        tuple(range(MAX_STOP_TOKEN_IDS + 1)),
        None,
        "12",
    ],
    "count": [0, -1, 4, 1.5, 2**70, None, "1", True],
}
CASES = [(field, value) for field, values in HOSTILE.items() for value in values]
WHOLE = [
    {"num_scheduled_tokens": {"nobody": 1}},
    {"num_scheduled_tokens": {7: 1}},
    {"num_scheduled_tokens": [("runs", 1)]},
    {"decode_req_ids": ("runs", "runs")},
    {"decode_req_ids": (["runs"],)},
    {"decode_req_ids": ["runs"]},
    {"finished_req_ids": "runs"},
    {"finished_req_ids": [["runs"]]},
    {"finished_req_ids": 3},
    {"finished_req_ids": ["runs"], "decode_req_ids": ("runs",)},
    {"new_block_ids": {"nobody": [9]}},
    {"new_block_ids": {"runs": [2]}, "decode_req_ids": ("runs",)},
    {"new_block_ids": {"runs": [9.5]}, "decode_req_ids": ("runs",)},
    {"new_block_ids": [9], "decode_req_ids": ("runs",)},
    {"new_block_ids": {"runs": [9, 9]}, "decode_req_ids": ("runs",)},
    {"new_block_ids": {"runs": [2**31]}, "decode_req_ids": ("runs",)},
    {"num_samples": {"nobody": 1}, "decode_req_ids": ("runs",)},
    {"num_samples": {"runs": 2}, "decode_req_ids": ("runs",)},
    {"num_samples": {"runs": None}, "num_scheduled_tokens": {"runs": 1}},
    {"num_samples": {"runs": True}, "decode_req_ids": ("runs",)},
    {"num_samples": [("runs", 1)], "decode_req_ids": ("runs",)},
    {"num_samples": {"runs": 1}},
    {"scheduled_new_reqs": ["runs"]},
    {"scheduled_new_reqs": None},
    {"extensions": (StepMasks(deferred="runs"),), "decode_req_ids": ("runs",)},
    {"extensions": (StepMasks(deferred=1),), "decode_req_ids": ("runs",)},
    {"extensions": (StepMasks(["runs"]),), "decode_req_ids": ("runs",)},
    {"extensions": (StepMasks({"runs": [1]}),), "decode_req_ids": ("runs",)},
    {"extensions": {"runs": 1}, "decode_req_ids": ("runs",)},
    {"extensions": ("runs",), "decode_req_ids": ("runs",)},
    {"extensions": [StepMasks()], "decode_req_ids": ("runs",)},
    {"extensions": (StepMasks(), StepMasks()), "decode_req_ids": ("runs",)},
]


SAMPLING = (RandomSampling(temperature=0.5, seed=3),)

NAMES = {
    "temperature": "RandomSampling.temperature",
    "top_k": "RandomSampling.top_k",
    "top_p": "RandomSampling.top_p",
    "min_p": "RandomSampling.min_p",
    "seed": "RandomSampling.seed",
    "min_tokens": "StopTokens.min_tokens",
    "stop_token_ids": "StopTokens.token_ids",
    "logprobs": "LogprobsWanted.count",
}
"""What the options of sampling are called in their extensions."""
OF_SAMPLING = {kind.__name__: kind for kind in (RandomSampling, StopTokens, LogprobsWanted)}


def new_request(req_id="new", block_ids=(9,), **fields):
    tokens = np.array(PROMPT, np.int32)
    made = NewRequest(req_id, tokens, len(tokens), 0, list(block_ids), SAMPLING)
    return replace(made, **fields)


def hostile(field, value):
    """A step in which the request "new" has that value."""
    request, count = new_request(), len(PROMPT)
    if field == "count":
        count = value
    elif field in NAMES:
        kind, _, name = NAMES[field].partition(".")
        request = replace(request, extensions=(OF_SAMPLING[kind](**{name: value}),))
    else:
        request = replace(request, **{field: value})
    return SchedulerOutput({request.req_id: count}, scheduled_new_reqs=[request])


class Running:
    """A group with a request that decodes for ever."""

    def __init__(self, group):
        self.group = group
        self.tokens = list(PROMPT)
        self.blocks = 1
        self.req_ids = ("runs",)
        request = new_request("runs", [1], extensions=())
        step = SchedulerOutput({"runs": len(PROMPT)}, scheduled_new_reqs=[request])
        group.execute_model(step).result()
        self.tokens.append(next_token(self.tokens))

    def go_on(self):
        """One more token, which is the right one."""
        more = {}
        if len(self.tokens) > 4 * self.blocks:
            self.blocks += 1
            more = {"runs": [99 + self.blocks]}
        step = SchedulerOutput(decode_req_ids=self.req_ids, new_block_ids=more)
        self.tokens.append(next_token(self.tokens))
        assert self.group.execute_model(step).result().sampled == {"runs": self.tokens[-1]}


def test_a_request_with_a_state_begins_at_its_first_token():
    table = SlotTable(2, GroupLimits(keeps_state=True))
    new = NewRequest("a", np.array(PROMPT, np.int32), 3, 1, [1])
    with pytest.raises(InvalidSchedulerOutput, match="state per request") as refused:
        table.encode(SchedulerOutput({"a": 2}, scheduled_new_reqs=[new]), epoch=1, link=1, seq=1)
    assert refused.value.field == "num_computed_tokens"
    assert "a" not in table


BORDERS = GroupLimits(
    keeps_state=True, checkpoint_blocks=2, block_size=4, num_blocks=20, max_model_len=99
)


@pytest.mark.parametrize(
    ("computed", "blocks", "count", "field", "fix"),
    [
        (0, [5, 2, 7], 9, "num_scheduled_tokens", "at most 8"),
        (8, [5, 2, 7, 4, 9], 9, "num_scheduled_tokens", "at most 8"),
        (4, [5, 2], 1, "num_computed_tokens", "a multiple of 8"),
        (8, [2, 5, 7], 1, "block", "a multiple of 2"),
    ],
)
def test_a_request_with_checkpoints_keeps_to_its_borders(computed, blocks, count, field, fix):
    table = SlotTable(2, BORDERS)
    before = NewRequest("before", np.arange(8, dtype=np.int32), 8, 0, blocks[:2])
    step = SchedulerOutput({"before": 8}, scheduled_new_reqs=[before])
    table.encode(step, epoch=1, link=1, seq=1)
    own = blocks if computed else [3, 6, 8]
    new = NewRequest("a", np.arange(40, dtype=np.int32), 40, computed, own)
    step = SchedulerOutput({"a": count}, finished_req_ids=["before"], scheduled_new_reqs=[new])
    with pytest.raises(InvalidSchedulerOutput) as refused:
        table.encode(step, epoch=1, link=1, seq=2)
    assert refused.value.req_id == "a"
    assert field in refused.value.field and fix in refused.value.fix
    assert "a" not in table and "before" in table
    # Up to a border, from a block that has a checkpoint.
    good = NewRequest("a", np.arange(40, dtype=np.int32), 40, 8, [5, 2, 7, 9])
    if blocks[1] == 2:
        step = SchedulerOutput({"a": 8}, scheduled_new_reqs=[good])
        table.encode(step, epoch=1, link=1, seq=2)
        assert "a" in table


@pytest.fixture
def running(fakes, connect):
    group = connect(fakes(1))
    group.attach()
    group.prepare(worker_config(max_num_seqs=4))
    request = new_request("other", [2, 3], extensions=())
    group.execute_model(SchedulerOutput({"other": 1}, scheduled_new_reqs=[request])).result()
    return Running(group)


def test_hostile_value_is_refused_by_name_and_costs_nobody_anything(running):
    for field, value in CASES:
        with pytest.raises(InvalidSchedulerOutput) as refused:
            running.group.execute_model(hostile(field, value))
        wanted = value if field == "req_id" else "new"
        assert refused.value.req_id == wanted, (field, value)
        whose = "num_scheduled_tokens" if field == "count" else NAMES.get(field, field)
        if field == "extensions" and value is HOSTILE["extensions"][ENDLESS_AT]:
            whose = NAMES["stop_token_ids"]
        assert whose in refused.value.field or refused.value.field == "scheduled_new_reqs"
        assert refused.value.fix in str(refused.value)
        str(refused.value).encode()
        assert set(running.group.slots.req_ids) == {"other", "runs"}
    running.go_on()
    for fields in WHOLE:
        with pytest.raises(InvalidSchedulerOutput) as refused:
            running.group.execute_model(SchedulerOutput(**fields))
        assert refused.value.field
        assert refused.value.fix
    for _ in range(6):
        running.go_on()


KINDS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.one_of(st.none(), st.floats(), st.integers(-(2**40), 2**40)), max_size=3),
)


@settings(max_examples=100, deadline=None, database=None)
@given(field=st.sampled_from(sorted(HOSTILE)), value=KINDS)
@example(field="block_ids", value=[2])
def test_any_value_is_taken_or_refused_with_nothing_changed(field, value):
    table = SlotTable(4, GroupLimits(64, 512, VOCAB_SIZE, 64, 4))
    request = new_request("runs", [1])
    table.encode(SchedulerOutput({"runs": 3}, scheduled_new_reqs=[request]), epoch=1, link=1, seq=1)
    before = table_state(table)
    try:
        step = hostile(field, value)
    except TypeError:  # no such value can even be put into a request
        return
    try:
        table.encode(step, epoch=1, link=1, seq=2)
    except InvalidSchedulerOutput as refused:
        str(refused).encode()
        assert table_state(table) == before
    good = SchedulerOutput(
        decode_req_ids=("runs",),
        new_block_ids={"runs": [2]},
        finished_req_ids=["new"],  # which may have been given block 2
    )
    table.encode(good, epoch=1, link=1, seq=3)


@pytest.mark.parametrize(
    ("blocks", "req_id"),
    [
        (np.array([1, 2]), None),
        (np.zeros(0), None),
        ([9], None),
        ({"runs": np.array(9)}, "runs"),
        ({"runs": b"\x09"}, "runs"),
        ({"runs": {9}}, "runs"),
        ({"runs": np.array([9.0])}, "runs"),
    ],
)
def test_blocks_of_another_kind_are_refused_while_the_same_requests_decode(blocks, req_id):
    table, pair = limited(), ("runs", "other")
    admit(table, "runs", [1, 2])
    admit(table, "other", [3, 4])
    table.encode(SchedulerOutput(decode_req_ids=pair), epoch=1, link=1, seq=2)
    before = table_state(table)
    with pytest.raises(InvalidSchedulerOutput, match="fix: give") as refused:
        step = SchedulerOutput(decode_req_ids=pair, new_block_ids=blocks)
        table.encode(step, epoch=1, link=1, seq=3)
    assert (refused.value.req_id or None) == req_id
    assert table_state(table) == before
    good = SchedulerOutput(decode_req_ids=pair, new_block_ids={"runs": np.array([9]), "other": [7]})
    table.encode(good, epoch=1, link=1, seq=3)


def test_request_that_ends_begins_and_decodes_in_one_step_is_named():
    table, pair = limited(), ("runs", "other")
    admit(table, "other", [3, 4])
    admit(table, "runs", [1, 2])
    again = SchedulerOutput(
        decode_req_ids=pair,
        scheduled_new_reqs=[new_request("runs", [5])],
        finished_req_ids=["runs"],
    )
    with pytest.raises(InvalidSchedulerOutput, match="scheduled in the same step") as refused:
        table.encode(again, epoch=1, link=1, seq=3)
    assert refused.value.req_id == "runs"


def table_state(table):
    """All state that later steps are validated against."""
    names = sorted(table.req_ids)
    return names, [table.slot_of(name) for name in names], table._resync_rows(())


def limited(num_blocks=64, block_size=4):
    return SlotTable(8, GroupLimits(256, 512, VOCAB_SIZE, num_blocks, block_size))


def admit(table, req_id, block_ids, num_computed=0, num_tokens=6, seq=1, **fields):
    request = NewRequest(
        req_id,
        np.arange(num_tokens, dtype=np.int32),
        num_tokens,
        num_computed,
        block_ids,
    )
    output = SchedulerOutput(
        {req_id: num_tokens - num_computed}, scheduled_new_reqs=[request], **fields
    )
    return table.encode(output, epoch=1, link=1, seq=seq)


def test_two_requests_never_write_to_one_block():
    table = limited()
    admit(table, "a", [1, 2])
    with pytest.raises(InvalidSchedulerOutput, match="request 'a' writes to it") as refused:
        admit(table, "b", [3, 2])
    assert (refused.value.req_id, refused.value.value) == ("b", 2)
    admit(table, "b", [3, 4])
    pair = ("a", "b")
    for blocks in ({"a": [4]}, {"a": [5], "b": [5]}, {"a": [1]}):
        with pytest.raises(InvalidSchedulerOutput, match="writes to it"):
            table.encode(SchedulerOutput({}, pair, (), blocks), epoch=1, link=1, seq=2)
    table.encode(SchedulerOutput({}, pair, (), {"a": [5], "b": [6]}), epoch=1, link=1, seq=2)
    # In the step in which its owner finishes a block may go to another.
    admit(table, "c", [5, 1], finished_req_ids=["a"])
    with pytest.raises(InvalidSchedulerOutput, match="request 'c' writes to it"):
        admit(table, "d", [7, 5])
    admit(table, "d", [7, 2])


def test_blocks_that_others_read_are_not_written_to():
    table = limited()
    admit(table, "a", [1, 2])
    admit(table, "b", [1, 3], num_computed=4)  # shares the full block 1
    table.encode(SchedulerOutput(finished_req_ids=["a"]), epoch=1, link=1, seq=3)
    with pytest.raises(InvalidSchedulerOutput, match="another request reads it") as refused:
        admit(table, "c", [1, 4])
    assert refused.value.value == 1
    admit(table, "c", [1, 4], num_computed=4)
    table.encode(SchedulerOutput(finished_req_ids=["b"]), epoch=1, link=1, seq=4)
    with pytest.raises(InvalidSchedulerOutput, match="another request reads it"):
        admit(table, "d", [1, 5])
    admit(table, "d", [1, 5], finished_req_ids=["c"])
    with pytest.raises(InvalidSchedulerOutput, match="each block once"):
        admit(table, "e", [7, 7, 8], num_computed=8, num_tokens=9)
    # The block that is being filled in this step is read by nobody in it.
    twice = [
        NewRequest("e", np.arange(6, dtype=np.int32), 6, 0, [9, 10]),
        NewRequest("f", np.arange(6, dtype=np.int32), 6, 4, [9, 11]),
    ]
    step = SchedulerOutput({"e": 6, "f": 2}, scheduled_new_reqs=twice)
    with pytest.raises(InvalidSchedulerOutput, match="this step is the one that fills it"):
        table.encode(step, epoch=1, link=1, seq=5)


def behind_a_prefix(prefix, count=1024, own=64):
    """A step that admits requests which begin with these blocks, and write to others."""
    num_computed = 4 * len(prefix)
    new, first = [], 100
    for index in range(count):
        blocks = [*prefix, *range(first, first + own)]
        tokens = np.zeros(num_computed + 1, np.int32)
        new.append(NewRequest(f"n{index}", tokens, len(tokens), num_computed, blocks))
        first += own
    return SchedulerOutput({request.req_id: 1 for request in new}, scheduled_new_reqs=new)


def test_check_of_shared_blocks_does_not_grow_with_the_requests_that_share_them():
    """It took more than 100 times as long where each is compared with every block of the step."""
    steps = [behind_a_prefix([]), behind_a_prefix(list(range(1, 61)))]
    seconds = [[], []]
    for _ in range(3):
        for step, durations in zip(steps, seconds, strict=True):
            table = SlotTable(1024, GroupLimits(num_blocks=1 << 17, block_size=4))
            began = time.thread_time()
            table.encode(step, epoch=1, link=1, seq=1)
            durations.append(time.thread_time() - began)
    assert min(seconds[1]) < 8 * min(seconds[0])


def test_blocks_are_free_again_after_a_failure_and_after_many_admissions():
    table = limited(num_blocks=8)
    admit(table, "stays", [1, 2])
    for number in range(40):
        admit(table, "reader", [1, 3], num_computed=4)
        with pytest.raises(InvalidSchedulerOutput, match="request 'stays' writes to it"):
            admit(table, f"n{number}", [2, 4])
        admit(table, f"n{number}", [4, 5])
        with pytest.raises(InvalidSchedulerOutput, match=f"request 'n{number}' writes to it"):
            admit(table, "more", [6, 5])
        gone = SchedulerOutput(finished_req_ids=["reader", f"n{number}"])
        if number % 2:
            table.fail([SchedulerOutput({f"n{number}": 1, "reader": 1})])
        else:
            table.encode(gone, epoch=1, link=1, seq=2)
    table.drop_all()
    admit(table, "last", [1, 2])


class BlocksAsSets:
    """Who has which block, by the rule alone: nobody may write to one that a running request writes
    to or reads."""

    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.written, self.read = {}, {}

    def may_write(self, ended, blocks):
        living = [name for name in self.written if name not in ended]
        taken = {block for name in living for block in self.written[name] | self.read[name]}
        inside = all(1 <= block < self.num_blocks for block in blocks)
        return inside and len(set(blocks)) == len(blocks) and taken.isdisjoint(blocks)

    def end(self, names):
        for name in names:
            del self.written[name], self.read[name]


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_blocks_belong_to_whom_a_plain_account_gives_them(random):
    table, account, names = limited(num_blocks=24), BlocksAsSets(24), ()
    for number in range(40):
        count = random.choice((1, 1, 1, 2))
        blocks = [
            random.choice((random.randint(1, 23), random.randint(-2, 25))) for _ in range(count)
        ]
        ended = random.sample(names, random.randint(0, 1)) if names else []
        accepted = account.may_write(ended, blocks)
        if len(names) - len(ended) < 6 and random.random() < 0.4:
            kept = [block for own in account.written.values() for block in own]
            prefix = random.sample(sorted(kept), 1) if kept and random.random() < 0.5 else []
            accepted = accepted and not set(prefix) & set(blocks)
            name, fields = f"r{number}", {"finished_req_ids": ended}

            def encode(name=name, prefix=prefix, fields=fields, blocks=blocks):
                admit(
                    table, name, [*prefix, *blocks], 4 * len(prefix), 4 * len(prefix) + 1, **fields
                )

            added = {name: (set(blocks), set(prefix))}
        elif names:
            receivers = random.sample(names, min(len(blocks), len(names)))
            given = {name: [block] for name, block in zip(receivers, blocks, strict=False)}
            given[receivers[-1]] += blocks[len(receivers) :]
            accepted = accepted and not set(receivers) & set(ended)
            output = SchedulerOutput(new_block_ids=given, finished_req_ids=ended)
            if not ended:
                output = SchedulerOutput(decode_req_ids=names, new_block_ids=given)

            def encode(output=output):
                table.encode(output, epoch=1, link=1, seq=1)

            added = {
                name: (account.written[name] | set(own), account.read[name])
                for name, own in given.items()
            }
        else:
            continue
        if not accepted:
            with pytest.raises(InvalidSchedulerOutput):
                encode()
            continue
        encode()
        account.end(ended)
        for name, (written, read) in added.items():
            account.written[name], account.read[name] = written, read
        if set(account.written) != set(names):
            names = tuple(account.written)


def stopping(req_id, num_stop_ids, num_tokens=3):
    stop_ids = tuple(range(2**30, 2**30 + num_stop_ids))
    prompt = np.arange(num_tokens, dtype=np.int32)
    return GenerationRequest(req_id, prompt, 4, sampling=SamplingParams(stop_token_ids=stop_ids))


def test_admissions_that_outgrow_a_message_are_split_over_steps():
    size = SchedulerLimits(8, 1 << 21, 600_000, 1 << 22, 1, enable_prefix_caching=False)
    scheduler = Scheduler(size)
    for name in "abcd":
        scheduler.add_request(stopping(name, MAX_STOP_TOKEN_IDS, num_tokens=500_000))
    table = SlotTable(8, GroupLimits(1 << 21, 600_000, 2**31, 1 << 22, 1))
    for seq, name in enumerate("abcd"):
        step = scheduler.schedule()
        assert [request.req_id for request in step.scheduled_new_reqs] == [name]
        table.encode(step, epoch=1, link=1, seq=1 + seq)


def test_request_that_fits_into_no_step_is_refused_alone():
    scheduler = Scheduler(SchedulerLimits(8, 1 << 20, 4_000_000, 1 << 22, 1))
    scheduler.add_request(stopping("good", MAX_STOP_TOKEN_IDS))
    with pytest.raises(RequestError) as refused:
        scheduler.add_request(stopping("many", MAX_STOP_TOKEN_IDS + 1))
    assert refused.value.field == "sampling.stop_token_ids"
    with pytest.raises(RequestError) as refused:
        scheduler.add_request(stopping("long", 1, num_tokens=1_000_000))
    assert refused.value.field == "prompt"
    table = SlotTable(8)
    table.encode(scheduler.schedule(), epoch=1, link=1, seq=1)
    assert table.req_ids == ["good"]


MANY = 10**6
HUGE = {
    "num_scheduled_tokens": lambda ids: {"num_scheduled_tokens": dict.fromkeys(ids, 1)},
    "decode_req_ids": lambda ids: {"decode_req_ids": tuple(ids)},
    "num_samples": lambda ids: {"num_samples": dict.fromkeys(ids, 1)},
    "scheduled_new_reqs": lambda ids: {
        "scheduled_new_reqs": [NewRequest(name, np.zeros(3, np.int32), 3, 0, [1]) for name in ids]
    },
    "new_block_ids": lambda ids: {"new_block_ids": dict.fromkeys(ids, (1,))},
    "more_new_block_ids": lambda ids: {"more_new_block_ids": ({},) * len(ids)},
    "finished_req_ids": lambda ids: {"finished_req_ids": ids * 2},
    "deferred": lambda ids: {"extensions": (StepMasks(deferred=ids),)},
    "masks": lambda ids: {"extensions": (StepMasks(dict.fromkeys(ids, np.zeros(1, np.int32))),)},
}


@pytest.mark.parametrize("field", HUGE)
def test_a_huge_step_is_refused_before_work_that_grows_with_it(field):
    """Counted in Python's calls: a check of each entry would make a million of them."""
    table, names = limited(), [f"n{number}" for number in range(MANY)]
    admit(table, "runs", [1, 2])
    step = SchedulerOutput(**HUGE[field](names))
    events = 0

    def count(frame, event, arg):
        nonlocal events
        events += 1

    sys.setprofile(count)
    try:
        with pytest.raises(InvalidSchedulerOutput) as refused:
            table.encode(step, epoch=1, link=1, seq=2)
    finally:
        sys.setprofile(None)
    assert refused.value.field == field and refused.value.fix
    assert events < 2000
    table.encode(SchedulerOutput(decode_req_ids=("runs",)), epoch=1, link=1, seq=2)

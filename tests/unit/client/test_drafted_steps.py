"""A driver's side of drafts in a step: what it sends, what it refuses, how it reads the reply, and
which counts it calls exact again."""

import random
import sys
from collections import deque

import msgspec
import numpy as np
import pytest

from rpc_schema import codec, step
from rpc_schema.errors import BadFrameError
from rpc_schema.pooling import PoolingParams
from rpc_schema.sampling import TokenLogprobs
from tests.support.drafting_daemon import DraftingDaemon
from tests.support.exhaustive import seeds
from tests.support.fake_daemon import bitmap, named_slots, next_token
from worker_client.errors import InvalidSchedulerOutput
from worker_client.requests import SamplingParams
from worker_client.scheduler_output import (
    DraftOutcome,
    LockstepOutput,
    NewRequest,
    SchedulerOutput,
    StepResult,
)
from worker_client.steps.encoded_step import decode_reply
from worker_client.steps.lockstep import LockstepSlots
from worker_client.steps.masks import StepMasks
from worker_client.steps.slots import SlotTable
from worker_client.steps.step_checks import GroupLimits

IDS = {"epoch": 3, "link": 2}
LIMITS = GroupLimits(64, 24, 1000, 40, 4, num_speculative_tokens=4)
LENGTHS = {"a": 5, "b": 3, "c": 6, "d": 2}


def new_request(name, length, blocks, **sampling):
    return NewRequest(
        req_id=name,
        token_ids=np.arange(length, dtype=np.int32),
        num_prompt_tokens=length,
        num_computed_tokens=0,
        block_ids=blocks,
        extensions=SamplingParams(**sampling).extensions(),
    )


def begun(limits=LIMITS, of_requests=None, **fields):
    """A table whose first step begins four requests with five blocks each."""
    table = SlotTable(6, limits)
    new = [
        new_request(
            name, length, [*range(1 + 5 * at, 6 + 5 * at)], **(of_requests or {}).get(name, {})
        )
        for at, (name, length) in enumerate(LENGTHS.items())
    ]
    output = SchedulerOutput(dict(LENGTHS), scheduled_new_reqs=new, **fields)
    return table, table.encode(output, **IDS, seq=1)


def message_of(encoded):
    return codec.decode_step(encoded.frames)


def pairs(raw):
    return np.frombuffer(raw, "<i4").reshape(-1, 2).tolist()


def reply_to(encoded, slots, tokens, counts=(), extensions=()):
    return step.ModelRunnerOutput(
        epoch=3,
        seq=encoded.seq,
        rank=0,
        slots=bitmap(slots),
        sampled_token_ids=np.array(tokens, "<i4").tobytes(),
        extensions=extensions,
        num_sampled=bytes(counts),
    )


def drafted(seq=2, table=None, **fields):
    """A second step: a and c have drafts, b decodes."""
    table = begun()[0] if table is None else table
    fields = {"num_drafts": {"c": 4, "a": 2}, **fields}
    counts = {"c": 5, "a": 3}
    return table, table.encode(SchedulerOutput(counts, ("b",), **fields), **IDS, seq=seq)


def test_a_step_says_which_tokens_are_drafts():
    _, second = drafted()
    message = message_of(second)
    assert pairs(message.num_scheduled_tokens) == [[0, 3], [2, 5]]
    assert pairs(message.num_drafts) == [[0, 2], [2, 4]]
    assert (message.draft_token_ids, message.settled, message.num_samples) == (b"", b"", b"")
    assert message.total_num_scheduled_tokens == 9
    _, second = drafted(draft_token_ids={"c": [9, 8, 7, 6]})
    column = np.frombuffer(message_of(second).draft_token_ids, "<i4").tolist()
    assert column == [-1, -1, 9, 8, 7, 6]
    _, second = drafted(draft_token_ids={"a": np.array([1, 2])})
    assert np.frombuffer(message_of(second).draft_token_ids, "<i4").tolist()[:2] == [1, 2]


def test_a_request_gains_the_tokens_up_to_the_first_refused_draft():
    _, second = drafted()
    reply = reply_to(second, [0, 1, 2], [10, 11, 12, 20, 30, 31], [3, 1, 2])
    result = decode_reply(second, reply, [])
    assert (list(result.req_ids), list(result.token_ids)) == ([*"aaabcc"], [10, 11, 12, 20, 30, 31])
    assert result.refused == {"c": 3}
    assert result.drafts == {"a": DraftOutcome(2, 2), "c": DraftOutcome(4, 1)}
    assert result.sampled == {"a": 12, "b": 20, "c": 31}
    none = decode_reply(second, reply_to(second, [0, 1, 2], [10, 20, 30]), [])
    assert (list(none.req_ids), none.refused) == ([*"abc"], {"a": 2, "c": 4})


@pytest.mark.parametrize(
    ("slots", "tokens", "counts"),
    [
        ([0, 1, 2], range(9), [4, 1, 4]),  # a has two drafts
        ([0, 1, 2], range(4), [0, 1, 3]),
        ([0, 1, 2], range(5), [1, 2, 2]),
        ([0, 1, 2], range(4), [1, 1, 1]),
        ([0, 1, 2], range(4), []),
        ([0, 1, 2], range(3), [2, 1]),
        ([0, 1], range(3), [2, 1]),
        ([0, 1, 3], range(3), [1, 1, 1]),
    ],
)
def test_replies_with_other_counts_are_refused(slots, tokens, counts):
    _, second = drafted()
    with pytest.raises(BadFrameError, match="columns differ"):
        decode_reply(second, reply_to(second, slots, [*tokens], counts), [])


def test_each_gained_token_has_its_report():
    wanted = {"a": {"logprobs": 1}, "b": {"logprobs": 0}}
    table, _ = begun(of_requests=wanted)
    table, second = drafted(table=table)
    tokens, rows = [10, 11, 20, 30, 31], np.arange(5)
    frames = [
        np.stack([tokens, rows + 50], axis=1).astype("<i4").tobytes(),
        np.stack([-rows, -rows - 1], axis=1).astype("<f4").tobytes(),
        (rows + 1).astype("<i4").tobytes(),
    ]
    reply = reply_to(second, [0, 1, 2], tokens, [2, 1, 2], (TokenLogprobs(width=1),))
    result = decode_reply(second, reply, frames)
    assert {name: own.rank for name, own in result.logprobs.items()} == {"a": 2, "b": 3}
    assert [each.token_id for each in result.gained["a"]] == [10, 11]
    assert [each.reports[TokenLogprobs].rank for each in result.gained["a"]] == [1, 2]
    assert result.gained.keys() == {"a"}
    joined = decode_reply(second, reply, frames).joined(result)
    assert (joined.gained, joined.drafts) == (result.gained, result.drafts)
    with pytest.raises(BadFrameError):
        decode_reply(second, msgspec.structs.replace(reply, num_sampled=bytes([2, 1, 1])), frames)


def test_counts_are_bounds_until_outcomes_are_known_and_settled():
    """The row of c has its drafts refused, that of a has all accepted. A row that has new drafts is
    settled after those; one that is not scheduled keeps its bounds."""
    table, second = drafted()
    ids = ("a", "b", "c")
    third = table.encode(SchedulerOutput(decode_req_ids=ids), **IDS, seq=3)
    message = message_of(third)
    assert (message.corrections, message.settled) == (b"", b"")
    gained = reply_to(second, [0, 1, 2], [10, 11, 12, 20, 30], [3, 1, 1])
    table.take_outcome(second.seq, decode_reply(second, gained, []))
    fourth = table.encode(SchedulerOutput(decode_req_ids=("a", "b")), **IDS, seq=4)
    message = message_of(fourth)
    assert (message.corrections, named_slots(message.settled)) == (b"", [0])
    counts = {"c": 3}
    fifth = table.encode(SchedulerOutput(counts, ids[:2], num_drafts={"c": 2}), **IDS, seq=5)
    message = message_of(fifth)
    assert (pairs(message.corrections), message.settled) == ([[2, 4]], b"")
    table.require_resync()
    sixth = table.encode(SchedulerOutput(decode_req_ids=ids), **IDS, seq=6)
    rows = np.frombuffer(message_of(sixth).resync, "<i4").reshape(-1, 4)[:, :3].tolist()
    # computed: a 5 + 3 + 3 steps, b 3 + 4 steps, c 6 + 5 + 1 - 4 refused + 3
    assert rows == [[0, 11, 12], [1, 7, 8], [2, 11, 12], [3, 2, 3]]
    table.take_outcome(
        fifth.seq, decode_reply(fifth, reply_to(fifth, [0, 1, 2], [1, 2, 3, 4, 5], [1, 1, 3]), [])
    )
    seventh = table.encode(SchedulerOutput(decode_req_ids=ids), **IDS, seq=7)
    assert named_slots(message_of(seventh).settled) == [2]
    same = SchedulerOutput(decode_req_ids=ids)
    steady = [table.encode(same, **IDS, seq=seq) for seq in (8, 9)]
    assert [message_of(each).settled for each in steady] == [b"", b""]
    assert steady[0].steady is steady[1].steady is not None


def test_corrections_wait_for_the_step_that_schedules_their_row():
    """If a step that does not schedule a row fails, the row is kept, and the workers may not have
    seen the step."""
    table, second = drafted()
    one = decode_reply(second, reply_to(second, [0, 1, 2], [10, 20, 30]), [])
    table.take_outcome(second.seq, one)
    third = SchedulerOutput(
        {"a": 1}, finished_req_ids=["c"], scheduled_new_reqs=[new_request("e", 2, [31])]
    )
    third.num_scheduled_tokens = {"a": 1, "e": 2}
    message = message_of(table.encode(third, **IDS, seq=3))
    # e has the slot of c, whose refusals end with it
    assert (pairs(message.corrections), named_slots(message.settled)) == ([[0, 2]], [0])
    assert message.scheduled_new_reqs[0].slot == 2


@pytest.mark.parametrize(
    ("counts", "fields", "field", "fix"),
    [
        ({"a": 6}, {"num_drafts": {"a": 5}}, "num_drafts", "0 to 4, num_speculative_tokens"),
        ({"a": 2}, {"num_drafts": {"a": 2}}, "num_drafts", "at most 1: the drafts are the last"),
        ({"a": 2}, {"num_drafts": {"a": 1.0}}, "num_drafts", "0 to 4"),
        ({"a": 2}, {"num_drafts": {"a": True}}, "num_drafts", "0 to 4"),
        ({"a": 2}, {"num_drafts": {"a": -1}}, "num_drafts", "0 to 4"),
        ({"a": 3}, {"num_drafts": {"a": 1}}, "num_scheduled_tokens", "give 1 to 2"),
        ({"a": 1}, {"num_drafts": {"e": 1}}, "num_drafts", "requests of num_scheduled_tokens"),
        ({"a": 2}, {"num_drafts": 7}, "num_drafts", "give a mapping"),
        ({"a": 2}, {"num_drafts": {"a": 1}, "num_samples": {"a": 1}}, "num_samples", "give one of"),
        ({"a": 2}, {"num_drafts": {"a": 1}, "draft_token_ids": [1]}, "draft_token_ids", "mapping"),
        (
            {"a": 3},
            {"num_drafts": {"a": 2}, "draft_token_ids": {"a": [1]}},
            "draft_token_ids",
            "give 2",
        ),
        (
            {"a": 3},
            {"num_drafts": {"a": 2}, "draft_token_ids": {"a": 1}},
            "draft_token_ids",
            "give 2",
        ),
        (
            {"a": 2},
            {"num_drafts": {"a": 1}, "draft_token_ids": {"a": [1000]}},
            "draft_token_ids",
            "0 to 999",
        ),
        (
            {"a": 2},
            {"num_drafts": {"a": 1}, "draft_token_ids": {"a": [-1]}},
            "draft_token_ids",
            "0 to 999",
        ),
        (
            {"a": 2},
            {"num_drafts": {"a": 1}, "draft_token_ids": {"b": [1]}},
            "draft_token_ids",
            "give 0",
        ),
        (
            {"a": 2},
            {"num_drafts": {"a": 1}, "draft_token_ids": {"a": "x"}},
            "draft_token_ids",
            "give 1",
        ),
    ],
)
def test_drafts_that_a_step_cannot_have_are_refused(counts, fields, field, fix):
    table, _ = begun()
    with pytest.raises(InvalidSchedulerOutput) as refused:
        table.encode(SchedulerOutput(counts, ("b",), **fields), **IDS, seq=2)
    assert refused.value.field == field and fix in refused.value.fix
    drafted(table=table)  # nothing has changed


def test_drafts_of_a_part_of_a_prompt_are_refused():
    table = SlotTable(6, LIMITS)
    new = [new_request("a", 6, [1, 2, 3])]
    output = SchedulerOutput({"a": 5}, scheduled_new_reqs=new, num_drafts={"a": 2})
    with pytest.raises(InvalidSchedulerOutput, match="give 8: all tokens that are left"):
        table.encode(output, **IDS, seq=1)
    output.num_scheduled_tokens = {"a": 8}
    assert pairs(message_of(table.encode(output, **IDS, seq=1)).num_drafts) == [[0, 2]]


def test_drafts_beyond_max_model_len_are_refused_by_the_corrected_count():
    table, _ = begun(GroupLimits(64, 12, 1000, 40, 4, num_speculative_tokens=4))
    _, second = drafted(table=table)
    counts = {"c": 2}
    with pytest.raises(InvalidSchedulerOutput, match="would end at 13"):
        table.encode(SchedulerOutput(counts, num_drafts={"c": 1}), **IDS, seq=3)
    table.take_outcome(second.seq, decode_reply(second, reply_to(second, [0, 1, 2], [1, 2, 3]), []))
    third = table.encode(SchedulerOutput(counts, num_drafts={"c": 1}), **IDS, seq=3)
    assert pairs(message_of(third).corrections) == [[2, 4]]


@pytest.mark.parametrize(
    ("limits", "fix"),
    [
        ({"num_speculative_tokens": 0}, "load with a speculative.method"),
        ({"keeps_state": True}, "keep a state per request"),
    ],
)
def test_groups_without_drafts_refuse_them(limits, fix):
    fields = {"num_speculative_tokens": 4, **limits}
    table, _ = begun(GroupLimits(64, 64, 1000, 40, 4, **fields))
    with pytest.raises(InvalidSchedulerOutput) as refused:
        drafted(table=table)
    assert refused.value.field == "num_drafts" and fix in refused.value.fix


def test_requests_that_pool_have_no_drafts():
    table = SlotTable(6, LIMITS)
    pools = (PoolingParams(task="embed"),)
    new = msgspec.structs.replace(new_request("a", 3, [1, 2]), extensions=pools)
    output = SchedulerOutput({"a": 4}, scheduled_new_reqs=[new], num_drafts={"a": 1})
    with pytest.raises(InvalidSchedulerOutput, match="requests that pool"):
        table.encode(output, **IDS, seq=1)


class Bounds:
    """A request as a scheduler sees it: its counts are bounds, lowered by results."""

    def __init__(self, prompt, blocks):
        self.num_computed, self.num_tokens, self.known = 0, len(prompt), [*prompt]
        self.blocks = blocks


def random_fields(rng, requests, begun):
    """Counts, decodes and drafts of a random step. begun: its new requests."""
    counts, decodes, drafts = {}, [], {}
    for name, own in requests.items():
        left, choice = own.num_tokens - own.num_computed, rng.random()
        if choice < 0.2 and name not in begun:
            continue
        if choice < 0.6 and not (name in begun and choice < 0.4):
            drafts[name] = rng.randrange(1, 6)
            counts[name] = left + drafts[name]
        elif left == 1 and name not in begun and rng.random() < 0.7:
            decodes.append(name)
        else:
            counts[name] = rng.randrange(1, left + 1)
    return counts, decodes, drafts


@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("seed", seeds(2, of=10))
def test_random_steps_with_drafts_mean_the_same_to_a_daemon(seed, accuracy):
    """Steps are sent before the outcomes of up to three others are known, some are sent in full,
    and many go on as the step before. Tokens are those without drafts."""
    rng = random.Random(seed)
    table = SlotTable(8, GroupLimits(10_000, 512, 1000, 4096, 4, num_speculative_tokens=5))
    daemon = DraftingDaemon(rng, accuracy, 5)
    requests: dict[str, Bounds] = {}
    in_flight: deque = deque()
    prompts, num_done, num_repeated = {}, 0, 0
    last: tuple[dict, list, dict] | None = None

    def take_oldest():
        encoded, frames = in_flight.popleft()
        result = decode_reply(encoded, *daemon.apply(frames))
        table.take_outcome(encoded.seq, result)
        for name, token in zip(result.req_ids, result.token_ids, strict=True):
            if name in requests:
                requests[name].known.append(token)
        for name, count in result.refused.items():
            if name in requests:
                requests[name].num_computed -= count
                requests[name].num_tokens -= count

    for seq in range(1, 150):
        new, finished = [], []
        for name in [name for name, own in requests.items() if len(own.known) > 60]:
            finished.append(name)
            own, prompt = requests.pop(name), prompts[name]
            tokens = [*prompt]
            while len(tokens) < len(own.known):
                tokens.append(next_token(tokens))
            assert own.known == tokens
            num_done += 1
        if len(requests) < 6 and rng.random() < 0.4:
            name = f"q{seq}"
            prompts[name] = [rng.randrange(1000) for _ in range(rng.randrange(1, 9))]
            blocks = [*range(1 + 25 * seq, 26 + 25 * seq)]
            requests[name] = Bounds(prompts[name], blocks)
            tokens = np.array(prompts[name], np.int32)
            new.append(NewRequest(name, tokens, len(tokens), 0, blocks))
        goes_on = bool(last) and not (new or finished) and rng.random() < 0.7
        fields = last if goes_on else random_fields(rng, requests, {each.req_id for each in new})
        counts, decodes, drafts = fields
        for name in [*counts, *decodes]:
            own, count = requests[name], counts.get(name, 1)
            own.num_computed += count
            if own.num_computed == own.num_tokens + drafts.get(name, 0):
                own.num_tokens += drafts.get(name, 0) + 1
        given = {
            name: [rng.randrange(1000) for _ in range(count)]
            for name, count in drafts.items()
            if rng.random() < 0.3
        }
        if rng.random() < 0.1:
            table.require_resync()
        output = SchedulerOutput(
            counts,
            tuple(decodes),
            new,
            finished_req_ids=finished,
            num_drafts=drafts,
            draft_token_ids=given,
        )
        encoded = table.encode(output, **IDS, seq=seq)
        num_repeated += goes_on and encoded.steady_drafts is not None
        only_decodes = drafts and counts == {name: 1 + count for name, count in drafts.items()}
        last = (counts, decodes, drafts) if only_decodes and not (new or finished) else None
        in_flight.append((encoded, encoded.frames))
        while len(in_flight) > rng.randrange(4):
            take_oldest()
    assert num_done > 3 and daemon.num_settled > 5 and num_repeated > 5
    assert (daemon.num_accepted > 20) == (accuracy > 0)


def many(count, limits, length=3):
    """A table whose requests decode; of the first, all but one request in four have drafts."""
    table, names = SlotTable(count, limits), [f"r{at}" for at in range(count)]
    new = [new_request(name, length, [1 + at]) for at, name in enumerate(names)]
    counts = dict.fromkeys(names, length)
    table.encode(SchedulerOutput(counts, scheduled_new_reqs=new), **IDS, seq=1)
    drafts = dict.fromkeys(names[: -count // 4], 4)
    return table, drafts, tuple(names[-count // 4 :])


def going_on(drafts, decoding, **fields):
    """A step of mappings that were made for it."""
    counts = {name: 1 + count for name, count in drafts.items()}
    return SchedulerOutput(counts, decoding, num_drafts={**drafts}, **fields)


def python_calls(function):
    calls = []
    sys.setprofile(lambda frame, event, _: event == "call" and calls.append(frame.f_code.co_name))
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def test_a_step_that_goes_on_with_drafts_makes_as_many_calls_for_any_number_of_requests():
    """Its columns are those of the step before, but for blocks and corrections; so is its reply
    read, and what the requests have gained noted."""
    made, read = [], []
    for count in (4, 200):
        limits = GroupLimits(4096, 600, 1000, 4000, 16, num_speculative_tokens=4)
        table, drafts, decoding = many(count, limits)
        encoded = [table.encode(going_on(drafts, decoding), **IDS, seq=seq) for seq in (2, 3)]
        slots = range(count)
        counts = [1 + at % 5 if at < len(drafts) else 1 for at in slots]
        reply = reply_to(encoded[0], slots, range(sum(counts)), counts)

        def take(table=table, step=encoded[0], reply=reply):
            table.take_outcome(step.seq, decode_reply(step, reply, []))

        read.append(python_calls(take))
        blocks = {name: [1000 + at] for at, name in enumerate([*drafts, *decoding])}
        fields = {"new_block_ids": blocks, "skip_drafts": True}
        step = going_on(drafts, decoding, **fields)
        made.append(python_calls(lambda: encoded.append(table.encode(step, **IDS, seq=4))))  # noqa: B023  # called at once
        first, second, third = map(message_of, encoded)
        assert msgspec.structs.replace(second, seq=2) == first
        lacking = [[at, 4 - at % 5] for at in range(len(drafts)) if at % 5 < 4]
        assert pairs(third.corrections) == lacking and third.skip_drafts
        assert np.frombuffer(third.new_block_ids, "<i4").tolist() == [1000 + at for at in slots]
        plain = {"corrections": b"", "new_block_ids": b"", "new_block_slots": b""}
        assert msgspec.structs.replace(third, seq=2, skip_drafts=False, **plain) == first
    assert len(made[0]) == len(made[1]) <= 28, made[0]
    assert len(read[0]) == len(read[1]) <= 32, read[0]


@pytest.mark.parametrize(
    ("fields", "field", "fix"),
    [
        ({"draft_token_ids": {"r0": [1, 2, 3, 1000]}}, "draft_token_ids", "0 to 999"),
        ({"draft_token_ids": {"r0": [1]}}, "draft_token_ids", "give 4"),
        ({"draft_token_ids": [1]}, "draft_token_ids", "mapping"),
        ({"new_block_ids": {"r0": [50, 2]}}, "block_ids", "no other request uses"),
        ({"new_block_ids": {"r0": [99]}}, "block_ids", "1 to 98"),
        ({"new_block_ids": {"x": [50]}}, "block_ids", ""),
        ({"skip_drafts": 1}, "skip_drafts", "True or False"),
        ({"num_samples": {"r0": 1}}, "num_samples", "give one of"),
        ({"finished_req_ids": ["r1"]}, "finished_req_ids", ""),
    ],
)
def test_a_step_that_goes_on_with_drafts_is_checked_as_any_other(fields, field, fix):
    limits = GroupLimits(64, 64, 1000, 99, 16, num_speculative_tokens=4)
    table, drafts, decoding = many(8, limits)
    for seq in (2, 3):
        table.encode(going_on(drafts, decoding), **IDS, seq=seq)
    with pytest.raises(InvalidSchedulerOutput) as refused:
        table.encode(going_on(drafts, decoding, **fields), **IDS, seq=4)
    assert field in refused.value.field and fix in refused.value.fix
    brought = {"draft_token_ids": {"r1": [4, 3, 2, 1]}, "new_block_ids": {"r0": [50, 51]}}
    last = table.encode(going_on(drafts, decoding, **brought), **IDS, seq=4)
    column = np.frombuffer(message_of(last).draft_token_ids, "<i4").tolist()
    assert column[:9] == [-1, -1, -1, -1, 4, 3, 2, 1, -1] and len(column) == 24


def test_a_step_that_goes_on_with_drafts_ends_within_max_model_len():
    """By the corrected count, also behind steps without drafts."""
    limits = GroupLimits(64, 24, 1000, 99, 16, num_speculative_tokens=4)
    table, drafts, decoding = many(4, limits)
    plain, drafted = (
        SchedulerOutput(decode_req_ids=(*drafts, *decoding)),
        going_on(drafts, decoding),
    )
    outputs = (drafted, plain, plain, drafted, drafted)
    steps = [table.encode(output, **IDS, seq=seq) for seq, output in enumerate(outputs, 2)]
    with pytest.raises(
        InvalidSchedulerOutput, match="would end at 25"
    ):  # 3 + 5 + 1 + 1 + 5 + 5 + 5
        table.encode(drafted, **IDS, seq=7)
    reply = reply_to(steps[0], range(4), range(4), [1] * 4)
    table.take_outcome(2, decode_reply(steps[0], reply, []))
    last = message_of(table.encode(drafted, **IDS, seq=7))
    assert pairs(last.corrections) == [[0, 4], [1, 4], [2, 4]]


def test_replicas_in_lockstep_have_drafts_beside_masks():
    slots = LockstepSlots(6, LIMITS, 2)
    first = SchedulerOutput({"a": 5}, scheduled_new_reqs=[new_request("a", 5, [1, 2, 3])])
    slots.encode(LockstepOutput.of([SchedulerOutput(), first]), **IDS, seq=1)
    drafted = SchedulerOutput({"a": 3}, num_drafts={"a": 2}, draft_token_ids={"a": [8, 9]})
    output = LockstepOutput.of([SchedulerOutput(), drafted])
    output.extensions = (StepMasks({"a": np.full((3, 32), -1, np.int32)}),)
    message = message_of(slots.encode(output, **IDS, seq=2).parts[1])
    assert pairs(message.num_drafts) == [[0, 2]]
    assert np.frombuffer(message.draft_token_ids, "<i4").tolist() == [8, 9]
    assert np.frombuffer(message.extensions[0].slots, "<u2").tolist() == [0, 0, 0]


def test_replicas_in_lockstep_settle_drafts_that_are_sampled_later():
    """Their outcome is that of the step which had them, not of the message that samples them."""
    slots = LockstepSlots(6, LIMITS, 2)
    first = SchedulerOutput({"a": 5}, scheduled_new_reqs=[new_request("a", 5, [1, 2, 3])])
    slots.encode(LockstepOutput.of([SchedulerOutput(), first]), **IDS, seq=1)
    drafted = SchedulerOutput({"a": 3}, num_drafts={"a": 2}, draft_token_ids={"a": [8, 9]})
    output = LockstepOutput.of([SchedulerOutput(), drafted])
    output.extensions = (StepMasks(deferred=("a",)),)
    step = slots.encode(output, **IDS, seq=2)
    masks = StepMasks({"a": np.full((3, 32), -1, np.int32)})
    later = slots.encode_sampling(step, (masks,), None, **IDS, seq=3)
    outcome = {"a": DraftOutcome(2, 1)}
    result = StepResult(["a", "a"], [8, 5], refused={"a": 1}, drafts=outcome)
    slots.take_outcome(later.seq, result)
    decode = LockstepOutput.of([SchedulerOutput(), SchedulerOutput(decode_req_ids=("a",))])
    message = message_of(slots.encode(decode, **IDS, seq=4).parts[1])
    assert pairs(message.corrections) == [[0, 1]]
    assert message.settled == b"\1"

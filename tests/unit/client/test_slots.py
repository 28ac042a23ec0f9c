"""SlotTable against a naive model that reads the encoded bytes as a worker would; and sizes."""

import ast
import random
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

import worker_client
from rpc_schema import codec, step
from rpc_schema.errors import BadFrameError
from rpc_schema.sampling import TokenLogprobs
from tests.support.exhaustive import seeds
from tests.support.fake_daemon import bitmap
from worker_client.errors import InvalidSchedulerOutput
from worker_client.requests import SamplingParams
from worker_client.scheduler_output import NewRequest, SchedulerOutput, StepResult
from worker_client.steps.encoded_step import decode_reply
from worker_client.steps.masks import StepMasks
from worker_client.steps.slots import SlotTable
from worker_client.steps.step_checks import MAX_ADMITTED_TOKENS, GroupLimits

IDS = {"epoch": 3, "link": 2}


def deferring(req_ids):
    """The extension that lets a step defer these requests."""
    return (StepMasks(deferred=tuple(req_ids)),)


def new_request(req_id: str, num_tokens: int, num_computed: int = 0, blocks=(1,), **sampling):
    return NewRequest(
        req_id=req_id,
        token_ids=np.arange(num_tokens, dtype=np.int32),
        num_prompt_tokens=num_tokens,
        num_computed_tokens=num_computed,
        block_ids=list(blocks),
        extensions=SamplingParams(**sampling).extensions(),
    )


class NaiveWorker:
    """Applies messages to plain lists, by the rules of rpc_schema/step.py."""

    def __init__(self) -> None:
        self.rows: dict[int, list] = {}  # slot -> [req_id, computed, tokens, num_blocks]

    def apply(self, frames) -> tuple[step.ExecuteModel, list[int]]:
        message = codec.decode_step(frames)
        for slot in np.frombuffer(message.finished, "<u2").tolist():
            del self.rows[slot]
        if message.resync is not None:
            rows = np.frombuffer(message.resync, "<i4").reshape(-1, 4).tolist()
            assert [r[0] for r in rows] == sorted(r[0] for r in rows)
            for slot, *counts in rows:
                assert self.rows[slot][1:] == counts
            kept = {row[0] for row in rows}
            self.rows = {slot: row for slot, row in self.rows.items() if slot in kept}
        for new in message.scheduled_new_reqs:
            free = min(set(range(len(self.rows) + 1)) - self.rows.keys())
            assert new.slot == free
            self.rows[new.slot] = [new.req_id, new.num_computed_tokens, new.num_tokens, 0]
        for slot in np.frombuffer(message.new_block_slots, "<u2").tolist():
            self.rows[slot][3] += 1
        bits = np.unpackbits(np.frombuffer(message.scheduled, np.uint8), bitorder="little")
        counts = dict.fromkeys(np.flatnonzero(bits).tolist(), 1)
        pairs = np.frombuffer(message.num_scheduled_tokens, "<i4").reshape(-1, 2).tolist()
        assert [slot for slot, _ in pairs] == sorted(slot for slot, _ in pairs)
        counts.update(pairs)
        assert sum(counts.values()) == message.total_num_scheduled_tokens
        sampled = []
        for slot, count in counts.items():
            row = self.rows[slot]
            row[1] += count
            assert row[1] <= row[2]
            if row[1] == row[2]:
                row[2] += 1
                sampled.append(slot)
        return message, sampled


def random_output(rng: random.Random, state: dict, counter: list[int], free: int):
    """A random legal step over `state` (req_id -> [computed, tokens]), and what it does to it."""
    finished = [r for r in state if rng.random() < 0.1]
    alive = [r for r in state if r not in finished]
    new = []
    for _ in range(rng.randrange(3)):
        if len(new) < free + len(finished):
            counter[0] += 1
            num = rng.randrange(1, 12)
            new.append(new_request(f"q{counter[0]}", num, rng.randrange(num), [5, 6]))
    counts, decodes = {}, []
    for req_id in alive:
        computed, tokens = state[req_id]
        if rng.random() < 0.7:
            if tokens - computed == 1 and rng.random() < 0.7:
                decodes.append(req_id)
            else:
                counts[req_id] = rng.randrange(1, tokens - computed + 1)
    for request in new:
        if rng.random() < 0.8:
            left = len(request.token_ids) - request.num_computed_tokens
            counts[request.req_id] = rng.randrange(1, left + 1)
    blocks = {
        r: [rng.randrange(1, 9) for _ in range(rng.randrange(1, 4))]
        for r in alive
        if rng.random() < 0.3
    }
    return SchedulerOutput(
        num_scheduled_tokens=counts,
        decode_req_ids=tuple(decodes),
        scheduled_new_reqs=new,
        new_block_ids=blocks,
        finished_req_ids=finished,
    )


def apply_naively(state: dict, output: SchedulerOutput) -> list[str]:
    for req_id in output.finished_req_ids:
        del state[req_id]
    for new in output.scheduled_new_reqs:
        state[new.req_id] = [new.num_computed_tokens, len(new.token_ids)]
    sampled = []
    for req_id, count in {
        **dict.fromkeys(output.decode_req_ids, 1),
        **output.num_scheduled_tokens,
    }.items():
        state[req_id][0] += count
        if state[req_id][0] == state[req_id][1]:
            state[req_id][1] += 1
            sampled.append(req_id)
    return sampled


@pytest.mark.parametrize("seed", seeds(4, of=10))
def test_random_steps_mean_the_same_to_a_worker(seed):
    rng = random.Random(seed)
    capacity = rng.choice([3, 8, 40])
    table, worker, state, counter = SlotTable(capacity), NaiveWorker(), {}, [0]
    repeated = None
    for seq in range(1, 200):
        output = random_output(rng, state, counter, capacity - len(state))
        if (
            repeated
            and rng.random() < 0.6
            and all(r in state and state[r][1] - state[r][0] == 1 for r in repeated)
        ):
            output = SchedulerOutput(decode_req_ids=repeated)
        elif output.decode_req_ids:
            repeated = output.decode_req_ids
        if rng.random() < 0.05:
            table.require_resync()
        encoded = table.encode(output, **IDS, seq=seq)
        expected = apply_naively(state, output)
        message, sampled = worker.apply(encoded.frames)
        assert (message.epoch, message.link, message.seq) == (3, 2, seq)
        names = {slot: row[0] for slot, row in worker.rows.items()}
        assert sorted(names[slot] for slot in sampled) == sorted(expected)
        assert {row[0]: row[1:3] for row in worker.rows.values()} == state
        reply = step.ModelRunnerOutput(
            epoch=3,
            seq=seq,
            rank=0,
            slots=bitmap(sampled),
            sampled_token_ids=np.array([100 + s for s in sampled], "<i4").tobytes(),
        )
        result = decode_reply(encoded, reply, [])
        assert result.sampled == {names[slot]: 100 + slot for slot in sampled}


def test_failed_steps_are_undone_and_the_next_is_full():
    table, worker = SlotTable(8), NaiveWorker()
    start = SchedulerOutput(
        dict.fromkeys("abc", 4), scheduled_new_reqs=[new_request(r, 4) for r in "abc"]
    )
    worker.apply(table.encode(start, **IDS, seq=1).frames)
    failed = SchedulerOutput({"a": 1}, finished_req_ids=["b"])
    table.encode(failed, **IDS, seq=2)
    assert table.fail([failed]) == {"a"}
    again = SchedulerOutput({"a": 5, "c": 1}, scheduled_new_reqs=[new_request("a", 5)])
    message, sampled = worker.apply(table.encode(again, **IDS, seq=3).frames)
    assert np.frombuffer(message.resync, "<i4").tolist() == [2, 4, 5, 1]
    assert message.finished == b""
    assert sorted(worker.rows[slot][0] for slot in sampled) == ["a", "c"]
    message, _ = worker.apply(table.encode(SchedulerOutput({"c": 1}), **IDS, seq=4).frames)
    assert message.resync is None


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (SchedulerOutput({"x": 1}), "no slot"),
        (SchedulerOutput({"a": 0}), "tokens left"),
        (SchedulerOutput({"a": 2}), "tokens left"),
        (SchedulerOutput({"a": 1}, ("a",)), "decode_req_ids"),
        (SchedulerOutput({}, ("a", "a")), "twice"),
        (SchedulerOutput({}, ("long", "long")), "twice"),
        (SchedulerOutput({"a": 1}, finished_req_ids=["a"]), "finished and scheduled"),
        (SchedulerOutput(new_block_ids={"x": [1]}), "new_block_ids"),
        (SchedulerOutput(scheduled_new_reqs=[new_request("a", 3)]), "has a slot"),
        (SchedulerOutput(scheduled_new_reqs=[new_request("n", 3, 3)]), "one token must be left"),
        (SchedulerOutput(scheduled_new_reqs=[new_request("n", 3)] * 2), "twice"),
        (SchedulerOutput({"n": 4}, scheduled_new_reqs=[new_request("n", 3)]), "tokens left"),
        (SchedulerOutput(scheduled_new_reqs=[new_request(c, 3) for c in "mnopq"]), "max_num_seqs"),
        (
            SchedulerOutput(scheduled_new_reqs=[new_request("n", MAX_ADMITTED_TOKENS + 1)]),
            "admit some later",
        ),
    ],
)
def test_broken_rules_change_nothing(output, message):
    table, worker = SlotTable(4), NaiveWorker()
    start = SchedulerOutput(
        {"a": 4, "long": 1}, scheduled_new_reqs=[new_request("a", 4), new_request("long", 9)]
    )
    worker.apply(table.encode(start, **IDS, seq=1).frames)
    with pytest.raises(InvalidSchedulerOutput, match=message):
        table.encode(output, **IDS, seq=2)
    table.require_resync()
    good = SchedulerOutput({"a": 1, "long": 8})
    _, sampled = worker.apply(table.encode(good, **IDS, seq=2).frames)
    assert sampled == [0, 1]


def test_sizes():
    table, worker, num, block_size = SlotTable(1024), NaiveWorker(), 1024, 16
    names = [f"request-{i:032d}" for i in range(num)]
    lengths = [512 + i % block_size for i in range(num)]
    start = SchedulerOutput(
        dict(zip(names, lengths, strict=True)),
        scheduled_new_reqs=[new_request(n, k) for n, k in zip(names, lengths, strict=True)],
    )
    frames = table.encode(start, **IDS, seq=1).frames
    worker.apply(frames)
    assert sum(map(len, frames)) <= 4.3 * sum(lengths)
    decodes, total = tuple(names), 0
    for seq in range(2, 2 + block_size):
        blocks = {
            n: [seq * num]
            for n, k in zip(names, lengths, strict=True)
            if (k + seq) % block_size == 0
        }
        output = SchedulerOutput(decode_req_ids=decodes, new_block_ids=blocks)
        encoded = table.encode(output, **IDS, seq=seq)
        worker.apply(encoded.frames)
        total += sum(map(len, encoded.frames))
    assert total / block_size <= 1024
    table.require_resync()
    frames = table.encode(SchedulerOutput(decode_req_ids=decodes), **IDS, seq=99).frames
    worker.apply(frames)
    assert sum(map(len, frames)) <= 20 * num


def test_a_decode_of_requests_with_rules_has_as_many_bytes_as_any():
    sizes = []
    for rules in (
        {},
        {"presence_penalty": 1.0, "logit_bias": {5: 1.0}, "allowed_token_ids": (5,)},
        {"bad_words": ((1, 2),) * 9, "repetition_penalty": 1.2, "logprobs": 3},
    ):
        table = SlotTable(8)
        new = [new_request(f"r{i}", 3, blocks=[i + 1], **rules) for i in range(4)]
        counts = {request.req_id: 3 for request in new}
        first = SchedulerOutput(num_scheduled_tokens=counts, scheduled_new_reqs=new)
        decode = SchedulerOutput(decode_req_ids=tuple(counts))
        steps = [table.encode(output, seq=n, **IDS) for n, output in enumerate((first, decode), 1)]
        sizes.append([sum(map(len, step.frames)) for step in steps])
    assert len({decode for _, decode in sizes}) == 1
    assert len({admission for admission, _ in sizes}) == 3


def test_logprobs_are_cut_to_what_each_request_asked_for():
    table = SlotTable(4)
    start = SchedulerOutput(
        {"a": 1, "b": 1, "c": 1},
        scheduled_new_reqs=[
            new_request("a", 1, logprobs=2),
            new_request("b", 1),
            new_request("c", 1, logprobs=0),
        ],
    )
    encoded = table.encode(start, **IDS, seq=1)
    table.encode(SchedulerOutput(finished_req_ids=["a"]), **IDS, seq=2)
    ids, logprobs = np.arange(9, dtype="<i4").reshape(3, 3), np.ones((3, 3), "<f4")
    reply = step.ModelRunnerOutput(
        epoch=3,
        seq=1,
        rank=0,
        extensions=(TokenLogprobs(width=2),),
        slots=bitmap(range(3)),
        sampled_token_ids=np.array([0, 3, 6], "<i4").tobytes(),
    )
    arrays = [ids.tobytes(), logprobs.tobytes(), np.array([1, 1, 5], "<i4").tobytes()]
    result = decode_reply(encoded, reply, arrays)
    assert {k: v.token_ids.tolist() for k, v in result.logprobs.items()} == {
        "a": [0, 1, 2],
        "c": [6],
    }
    assert result.logprobs["c"].rank == 5
    with pytest.raises(BadFrameError):
        decode_reply(encoded, reply, arrays[:2])


@pytest.mark.parametrize("uncounted", [0, 1 << 16, 1 << 30])
def test_a_step_that_no_message_can_carry_changes_nothing(monkeypatch, uncounted):
    monkeypatch.setattr("worker_client.steps.block_tables.MAX_UNCOUNTED_BYTES", uncounted)
    table, worker = SlotTable(4), NaiveWorker()
    start = SchedulerOutput(
        {"a": 4, "b": 4}, scheduled_new_reqs=[new_request("a", 4), new_request("b", 4)]
    )
    worker.apply(table.encode(start, **IDS, seq=1).frames)
    pair = ("a", "b")
    worker.apply(table.encode(SchedulerOutput(decode_req_ids=pair), **IDS, seq=2).frames)
    many = [1] * (codec.MAX_STEP_BYTES // 4)
    for output in (
        SchedulerOutput(decode_req_ids=pair, new_block_ids={"a": many}),
        SchedulerOutput({"n": 2}, pair, [new_request("n", 2, blocks=many)]),
        SchedulerOutput({"b": 1}, new_block_ids={"b": many}, finished_req_ids=["a"]),
    ):
        with pytest.raises(InvalidSchedulerOutput, match="does not fit into a message"):
            table.encode(output, **IDS, seq=3)
        assert sorted(table.req_ids) == ["a", "b"]
    table.require_resync()
    good = SchedulerOutput({"n": 2}, pair, [new_request("n", 2)], {"a": [2]})
    message, sampled = worker.apply(table.encode(good, **IDS, seq=3).frames)
    assert np.frombuffer(message.resync, "<i4").tolist() == [0, 5, 6, 1, 1, 5, 6, 1]
    assert sorted(worker.rows[slot][0] for slot in sampled) == ["a", "b", "n"]


def test_only_a_deferred_step_may_be_answered_in_part():
    def reply(seq, *slots):
        return step.ModelRunnerOutput(
            epoch=3,
            seq=seq,
            rank=0,
            slots=bitmap(slots),
            sampled_token_ids=np.array(slots, "<i4").tobytes(),
        )

    table = SlotTable(4)
    start = SchedulerOutput(
        dict.fromkeys("abc", 2), scheduled_new_reqs=[new_request(r, 2) for r in "abc"]
    )
    whole = table.encode(start, **IDS, seq=1)
    with pytest.raises(BadFrameError):
        decode_reply(whole, reply(1, 0, 2), [])
    step_2 = table.encode(
        SchedulerOutput(dict.fromkeys("abc", 1), extensions=deferring("abc")), **IDS, seq=2
    )
    with pytest.raises(BadFrameError):
        decode_reply(step_2, reply(2, 0, 2), [])
    assert decode_reply(step_2, reply(2), []).sampled == {}
    deferred = step_2.later(step_2.left, [])
    assert decode_reply(deferred, reply(2, 0, 2), []).sampled == {"a": 0, "c": 2}
    short = msgspec.structs.replace(reply(2, 0, 2), slots=bitmap((0, 1, 2)))
    padded = msgspec.structs.replace(reply(2, 0, 2), slots=bitmap((0, 2)) + b"\0")
    for wrong in (reply(2, 0, 3), reply(2, 0, 65534), short, padded):
        with pytest.raises(BadFrameError):
            decode_reply(deferred, wrong, [])


def test_new_requests_may_come_from_a_generator():
    table, worker = SlotTable(4, GroupLimits(64, 64, 1000, 8, 4)), NaiveWorker()
    new = [new_request("a", 3, blocks=[1]), new_request("b", 2, blocks=[2])]
    counts = {"a": 3, "b": 2}
    given = SchedulerOutput(counts, scheduled_new_reqs=(request for request in new))
    worker.apply(table.encode(given, **IDS, seq=1).frames)
    other = SchedulerOutput({"c": 1}, scheduled_new_reqs=[new_request("c", 1, blocks=[2])])
    with pytest.raises(InvalidSchedulerOutput, match="'b'"):
        table.encode(other, **IDS, seq=2)


def test_refused_tokens_lower_the_bounds_of_the_request_that_refused_them():
    table, ids = SlotTable(4), ("a", "b")
    new = [new_request("a", 3), new_request("b", 3, blocks=(2,))]
    first = table.encode(SchedulerOutput({"a": 3, "b": 3}, scheduled_new_reqs=new), **IDS, seq=1)
    second = table.encode(SchedulerOutput(decode_req_ids=ids), **IDS, seq=2)
    reply = step.ModelRunnerOutput(
        epoch=3,
        seq=1,
        rank=0,
        slots=bitmap([0, 1]),
        sampled_token_ids=np.array([7], "<i4").tobytes(),
        num_sampled=bytes([0, 1]),
    )
    result = decode_reply(first, reply, [])
    assert (list(result.req_ids), list(result.token_ids)) == (["b"], [7])
    assert result.refused == {"a": 1}
    table.take_outcome(first.seq, result)
    third = table.encode(SchedulerOutput(decode_req_ids=ids), **IDS, seq=3)
    assert np.frombuffer(read(third).corrections, "<i4").tolist() == [0, 1]
    fourth = table.encode(SchedulerOutput(decode_req_ids=ids), **IDS, seq=4)
    assert read(fourth).corrections == b""
    table.take_outcome(second.seq, StepResult((), (), refused={"a": 1, "b": 1}))
    again = SchedulerOutput(
        {"a": 2, "b": 1},
        finished_req_ids=["a"],
        scheduled_new_reqs=[new_request("a", 2, blocks=(3,))],
    )
    fifth = table.encode(again, **IDS, seq=5)
    assert np.frombuffer(read(fifth).corrections, "<i4").tolist() == [1, 1]
    # Of the request that had the slot before.
    table.take_outcome(third.seq, StepResult((), (), refused={"a": 1}))
    table.require_resync()
    sixth = table.encode(SchedulerOutput(decode_req_ids=ids), **IDS, seq=6)
    assert read(sixth).corrections == b""
    rows = np.frombuffer(read(sixth).resync, "<i4").reshape(-1, 4).tolist()
    assert rows == [[0, 2, 3, 1], [1, 6, 7, 1]]
    for broken in (bytes([0]), bytes([0, 2]), bytes([0, 0])):
        with pytest.raises(BadFrameError):
            decode_reply(first, msgspec.structs.replace(reply, num_sampled=broken), [])


def test_deferred_requests_are_no_more_than_slots_even_if_they_have_ended():
    """Workers have memory for the logits of as many."""
    table = SlotTable(3)
    new = [new_request(name, 3, blocks=(1 + at,)) for at, name in enumerate("abc")]
    first = SchedulerOutput(
        dict.fromkeys("abc", 3), scheduled_new_reqs=new, extensions=deferring("ac")
    )
    first = table.encode(first, **IDS, seq=1)
    another = SchedulerOutput(
        {"d": 3, "b": 1},
        finished_req_ids=["a"],
        scheduled_new_reqs=[new_request("d", 3, blocks=(4,))],
        extensions=deferring("d"),
    )
    for _ in range(2):
        with pytest.raises(InvalidSchedulerOutput, match="2 requests sample") as refused:
            table.encode(another, **IDS, seq=2)
        assert (refused.value.field, refused.value.value) == ("deferred", "2 requests")
        assert "for step 1 first" in refused.value.fix
    table.encode_sampling(first, (), ["a"], **IDS, seq=2)
    second = table.encode(another, **IDS, seq=2)
    table.encode_sampling(second, (), None, **IDS, seq=3)
    once_more = SchedulerOutput({"b": 1, "d": 1}, extensions=deferring("db"))
    third = table.encode(once_more, **IDS, seq=3)
    assert read(third).deferred == b"\3"
    table.encode_sampling(first, (), None, **IDS, seq=4)
    rest = SchedulerOutput({"c": 1}, finished_req_ids=["b"], extensions=deferring("c"))
    table.encode(rest, **IDS, seq=4)
    table.drop_all()  # the workers free their copies with the next step
    afresh = [new_request(name, 3, blocks=(1 + at,)) for at, name in enumerate("efg")]
    counts = dict.fromkeys("efg", 3)
    afresh = SchedulerOutput(counts, scheduled_new_reqs=afresh, extensions=deferring("efg"))
    assert read(table.encode(afresh, **IDS, seq=5)).deferred == b"\7"
    with pytest.raises(InvalidSchedulerOutput, match="wait for their sampling"):
        ended = SchedulerOutput(
            {"h": 3},
            finished_req_ids=["e"],
            scheduled_new_reqs=[new_request("h", 3, blocks=(1,))],
            extensions=deferring("h"),
        )
        table.encode(ended, **IDS, seq=6)


def read(encoded):
    """The message of an encoded step."""
    return codec.decode_step(encoded.frames)


def test_steady_step_takes_few_calls():
    """A greedy group of four rows; whatever a step's requests cost is in other steps."""
    table, ids = SlotTable(8), ("a", "b", "c", "d")
    counts = dict.fromkeys(ids, 3)
    new = [new_request(name, 3, blocks=(number,)) for number, name in enumerate(ids)]
    table.encode(SchedulerOutput(counts, scheduled_new_reqs=new), seq=1, **IDS)
    table.encode(SchedulerOutput(decode_req_ids=ids), seq=2, **IDS)
    calls = []
    output = SchedulerOutput(decode_req_ids=ids)
    sys.setprofile(lambda frame, event, _: event == "call" and calls.append(frame.f_code.co_name))
    try:
        table.encode(output, seq=3, **IDS)
    finally:
        sys.setprofile(None)
    assert calls[0] == "encode"
    assert len(calls) <= 12


def test_checks_return_faults_and_one_function_raises_them():
    library = Path(worker_client.__file__).parent
    calls = {
        f"{path.name}:{function.name}"
        for path in library.rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "InvalidSchedulerOutput"
    }
    assert calls == {"step_fault.py:refuse"}

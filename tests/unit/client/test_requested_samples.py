"""A driver's side of requests that sample several tokens in a step: what it sends, what it refuses,
and how it reads the reply."""

import msgspec
import numpy as np
import pytest

from rpc_schema import codec, step
from rpc_schema.errors import BadFrameError
from rpc_schema.sampling import GivenLogprobs, PromptLogprobs, TokenLogprobs
from tests.support.fake_daemon import bitmap
from worker_client.errors import InvalidSchedulerOutput
from worker_client.requests import SamplingParams
from worker_client.scheduler_output import NewRequest, SchedulerOutput
from worker_client.steps.encoded_step import decode_reply
from worker_client.steps.masks import StepMasks
from worker_client.steps.slots import SlotTable
from worker_client.steps.step_checks import GroupLimits

IDS = {"epoch": 3, "link": 2}
LIMITS = GroupLimits(64, 64, 1000, 20, 4, max_samples_per_seq=4)
LENGTHS = {"a": 5, "b": 3, "c": 6, "d": 2}


def begin(seq=1, counts=LENGTHS, extensions=(), of_requests=None, **num_samples):
    """A table, and a step that begins four requests."""
    table = SlotTable(6, LIMITS)
    new = [
        NewRequest(
            req_id=name,
            token_ids=np.arange(length, dtype=np.int32),
            num_prompt_tokens=length,
            num_computed_tokens=0,
            block_ids=[1 + 2 * at, 2 + 2 * at],
            extensions=(of_requests or {}).get(name, SamplingParams()).extensions(),
        )
        for at, (name, length) in enumerate(LENGTHS.items())
    ]
    output = SchedulerOutput(
        counts, scheduled_new_reqs=new, extensions=extensions, num_samples=num_samples
    )
    return table, table.encode(output, **IDS, seq=seq)


def message_of(encoded):
    return codec.decode_step(encoded.frames)


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


def test_a_step_says_which_requests_sample_several_tokens():
    table, first = begin(a=3, c=1, d=2)
    pairs = np.frombuffer(message_of(first).num_samples, "<i4").reshape(-1, 2)
    assert pairs.tolist() == [[0, 3], [3, 2]]
    result = decode_reply(
        first, reply_to(first, range(4), [10, 11, 12, 20, 30, 40, 41], [3, 1, 1, 2]), []
    )
    assert (list(result.req_ids), list(result.token_ids)) == ([*"abcd"], [12, 20, 30, 41])
    samples = {name: [own.token_id for own in given] for name, given in result.samples.items()}
    assert samples == {"a": [10, 11, 12], "d": [40, 41]}
    ids = tuple(LENGTHS)
    again = table.encode(SchedulerOutput(decode_req_ids=ids, num_samples={"b": 1}), **IDS, seq=2)
    assert message_of(again).num_samples == b""
    table.require_resync()
    third = table.encode(SchedulerOutput(decode_req_ids=ids), **IDS, seq=3)
    rows = np.frombuffer(message_of(third).resync, "<i4").reshape(-1, 4)
    assert (rows[:, 2] - rows[:, 1]).tolist() == [1] * 4  # each has gained one token a step
    assert rows[:, 1].tolist() == [1 + length for length in LENGTHS.values()]
    assert not decode_reply(third, reply_to(third, range(4), [1, 2, 3, 4]), []).samples


@pytest.mark.parametrize(
    ("counts", "asked", "req_id", "fix"),
    [
        (LENGTHS, {"a": 5}, "a", "give 1 to 4: 5 of its tokens .* max_samples_per_seq"),
        (LENGTHS, {"a": 2, "d": 3}, "d", "give 1 to 2: 2 of its tokens"),
        (LENGTHS, {"a": 0}, "a", "give 1 to 4"),
        (LENGTHS, {"a": 1.5}, "a", "give 1 to 4"),
        (LENGTHS, {"a": True}, "a", "give 1 to 4"),
        (LENGTHS, {"e": 1}, "e", "last known token"),
        (LENGTHS | {"a": 4}, {"a": 1}, "a", "last known token"),
    ],
)
def test_samples_that_a_request_cannot_take_are_refused(counts, asked, req_id, fix):
    with pytest.raises(InvalidSchedulerOutput, match=fix) as refused:
        begin(counts=counts, **asked)
    assert (refused.value.field, refused.value.req_id) == ("num_samples", req_id)
    assert refused.value.value == asked[req_id]


def test_a_decode_samples_one_token():
    table, _ = begin()
    ids = tuple(LENGTHS)
    table.encode(SchedulerOutput(decode_req_ids=ids), **IDS, seq=2)
    with pytest.raises(InvalidSchedulerOutput, match="give 1 to 1: 1 of its tokens"):
        table.encode(SchedulerOutput(decode_req_ids=ids, num_samples={"b": 2}), **IDS, seq=3)
    assert table.encode(SchedulerOutput(decode_req_ids=ids), **IDS, seq=3).steady is not None


@pytest.mark.parametrize(
    ("tokens", "counts"),
    [
        ([1, 2, 3, 4], [1, 1, 1, 1]),  # a has at least two of its three samples
        ([1, 2, 3, 4], []),
        ([1, 2, 3, 4, 5, 6], [3, 1, 1]),
        ([1, 2, 3, 4, 5, 6, 7], [4, 1, 1, 1]),
        ([1, 2, 3, 4, 5, 6, 7], [3, 2, 1, 1]),
        ([1, 2, 3, 4, 5], [3, 1, 1, 1]),
    ],
)
def test_replies_with_other_counts_are_refused(tokens, counts):
    _, first = begin(a=3)
    with pytest.raises(BadFrameError, match="columns differ"):
        decode_reply(first, reply_to(first, range(4), tokens, counts), [])


def test_a_refused_token_leaves_the_samples_before_it():
    _, first = begin(a=3, c=2)
    result = decode_reply(
        first, reply_to(first, range(4), [10, 11, 20, 30, 31, 40], [2, 1, 2, 1]), []
    )
    assert (list(result.req_ids), list(result.token_ids)) == ([*"bcd"], [20, 31, 40])
    assert result.refused == {"a": 1}
    assert [own.token_id for own in result.samples["a"]] == [10, 11]


def test_samples_come_with_the_deferred_sampling_of_their_step():
    table, first = begin(extensions=(StepMasks(deferred=("a", "b")),), a=3, c=2)
    now = decode_reply(first, reply_to(first, [2, 3], [30, 31, 40], [2, 1]), [])
    assert list(now.samples) == ["c"]
    later = table.encode_sampling(first, (), ["a"], **IDS, seq=2)
    result = decode_reply(later, reply_to(first, [0], [10, 11, 12], [3]), [])
    assert (list(result.req_ids), list(result.token_ids)) == (["a"], [12])
    assert [own.token_id for own in now.joined(result).samples["a"]] == [10, 11, 12]
    assert [own.token_id for own in now.joined(result).samples["c"]] == [30, 31]
    later = table.encode_sampling(first, (), None, **IDS, seq=3)
    result = decode_reply(later, reply_to(first, [1], [20]), [])
    assert (dict(result.samples), result.sampled) == ({}, {"b": 20})


def test_each_sample_has_its_reports():
    """But reports on the prompt are the step's alone."""
    wanted = {
        "a": SamplingParams(logprobs=1, prompt_logprobs=0),
        "b": SamplingParams(logprobs=0, logprob_token_ids=(8,)),
        "c": SamplingParams(logprob_token_ids=(7, 9)),
    }
    _, first = begin(of_requests=wanted, a=3, c=2)
    tokens, rows = [10, 11, 12, 20, 30, 31, 40], np.arange(7)
    ids = np.stack([tokens, rows + 50], axis=1).astype("<i4")
    logprobs, named = np.stack([-rows, -rows - 1], axis=1), np.stack([rows, rows + 100], axis=1)
    spans = np.array([1, 2], "<i4").tobytes()
    prompt = PromptLogprobs(width=0, req_ids=("a",), spans=spans)
    frames = [
        ids.tobytes(),
        logprobs.astype("<f4").tobytes(),
        (rows + 1).astype("<i4").tobytes(),
        named.astype("<f4").tobytes(),
        np.array([1, 2], "<i4").tobytes(),
        np.array([-1, -2], "<f4").tobytes(),
        np.array([1, 1], "<i4").tobytes(),
    ]
    extensions = (TokenLogprobs(width=1), GivenLogprobs(width=2), prompt)
    reply = reply_to(first, range(4), tokens, [3, 1, 2, 1], extensions)
    result = decode_reply(first, reply, frames)
    assert {name: own.rank for name, own in result.logprobs.items()} == {"a": 3, "b": 4}
    assert result.reports[PromptLogprobs]["a"].first == 1
    assert [own.reports[TokenLogprobs].rank for own in result.samples["a"]] == [1, 2, 3]
    assert [own.reports[TokenLogprobs].token_ids[1] for own in result.samples["a"]] == [50, 51, 52]
    assert [own.reports.keys() for own in result.samples["a"]] == [{TokenLogprobs}] * 3
    given = [own.reports[GivenLogprobs].tolist() for own in result.samples["c"]]
    assert given == [[4, 104], [5, 105]]
    assert result.reports[GivenLogprobs]["c"].tolist() == [5, 105]
    assert result.reports[GivenLogprobs]["b"].tolist() == [3]
    short = msgspec.structs.replace(reply, num_sampled=bytes([2, 1, 2, 1]))
    with pytest.raises(BadFrameError):
        decode_reply(first, short, frames)


def test_masks_of_several_samples_are_sent_in_order():
    one, two = np.array([1, 2], np.int32), np.array([3, 4], np.int32)
    values = StepMasks({"a": np.stack([one, two, one]), "b": two})
    extension, (frame,) = values.encode({"a": 4, "b": 2})
    words = np.frombuffer(frame, "<i4").reshape(-1, 2)
    sent = words[np.frombuffer(extension.indices, "<u2")]
    assert np.frombuffer(extension.slots, "<u2").tolist() == [4, 4, 4, 2]
    assert sent.tolist() == [[1, 2], [3, 4], [1, 2], [3, 4]] and len(words) == 2
    fault = StepMasks({"a": np.zeros((1, 1, 2), np.int32)}).encode({"a": 4})
    assert fault.field == "masks"

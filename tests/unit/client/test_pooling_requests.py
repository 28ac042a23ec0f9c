"""The driver's side of pooling: steps that a scheduler may not make, replies that do not fit."""

import msgspec
import numpy as np
import pytest

from rpc_schema import step
from rpc_schema.errors import BadFrameError
from rpc_schema.pooling import (
    MAX_POOLED_BYTES,
    PooledOutputs,
    PooledTask,
    PoolingParams,
    PoolingSupport,
)
from rpc_schema.sampling import RandomSampling
from rpc_schema.structured import StructuredOutput
from tests.support.flat_requests import flat_request, path_of
from worker_client.errors import InvalidSchedulerOutput, RequestError
from worker_client.inputs.request_checks import validated
from worker_client.inputs.request_parser import RequestParser
from worker_client.requests import GenerationRequest
from worker_client.scheduler_output import NewRequest, SchedulerOutput
from worker_client.steps.encoded_step import decode_reply
from worker_client.steps.slots import SlotTable
from worker_client.steps.step_checks import GroupLimits

IDS = {"epoch": 3, "link": 2}
TASKS = (
    PooledTask(task="embed", width=8, states="mean"),
    PooledTask(task="token_embed", width=8, states="each"),
)


def new(req_id, num_tokens, *extensions, num_computed=0, blocks=(1,)):
    return NewRequest(
        req_id=req_id,
        token_ids=np.zeros(num_tokens, np.int32),
        num_prompt_tokens=num_tokens,
        num_computed_tokens=num_computed,
        block_ids=list(blocks),
        extensions=extensions,
    )


def table(**support):
    return SlotTable(4, GroupLimits(pooling=PoolingSupport(tasks=TASKS, **support)))


def admit(slots, *requests, seq=1, counts=None, **fields):
    counts = counts or {request.req_id: len(request.token_ids) for request in requests}
    output = SchedulerOutput(counts, scheduled_new_reqs=list(requests), **fields)
    return slots.encode(output, **IDS, seq=seq)


def reply(seq, pooled, sizes, values, **fields):
    extension = PooledOutputs(
        slots=np.array(pooled, "<u2").tobytes(), sizes=np.array(sizes, "<i4").tobytes()
    )
    message = step.ModelRunnerOutput(epoch=3, seq=seq, rank=0, extensions=(extension,), **fields)
    return message, [np.asarray(values, "<f4").tobytes()]


def test_outputs_are_read_in_the_order_of_the_reply():
    slots, embed = table(), PoolingParams(task="embed")
    sent = admit(slots, new("a", 2, embed), new("b", 3), new("c", 1, embed))
    tokens = {"slots": b"\x02", "sampled_token_ids": np.array([7], "<i4").tobytes()}
    message, frames = reply(1, [2, 0], [(1, 2), (1, 3)], range(5), **tokens)
    result = decode_reply(sent, message, frames)
    assert result.sampled == {"b": 7}
    assert {r: v.tolist() for r, v in result.pooled.items()} == {"c": [[0, 1]], "a": [[2, 3, 4]]}


@pytest.mark.parametrize(
    ("slots", "sizes", "count"),
    [
        ([0], [(1, 8)], 8),
        ([0, 1, 1], [(1, 1)] * 3, 3),
        ([0, 3], [(1, 1)] * 2, 2),
        ([0, 1], [(1, 1), (1, 2)], 4),
        ([0, 1], [(1, 1), (-1, -1)], 2),
        ([0, 1], [(1, 1)], 1),
    ],
)
def test_a_reply_that_does_not_fit_is_refused(slots, sizes, count):
    rows, embed = table(), PoolingParams(task="embed")
    sent = admit(rows, new("a", 2, embed), new("b", 3, embed))
    with pytest.raises(BadFrameError):
        decode_reply(sent, *reply(1, slots, sizes, range(count)))
    with pytest.raises(BadFrameError):
        decode_reply(sent, step.ModelRunnerOutput(epoch=3, seq=1, rank=0), [])


def test_a_request_that_pools_may_be_named_among_those_that_decode():
    slots = table()
    requests = [new("a", 3, PoolingParams(task="embed")), new("b", 3)]
    admit(slots, *requests, counts={"a": 2, "b": 2})
    for req_ids in (("a", "b"), ("b",)):
        sent = slots.encode(SchedulerOutput(decode_req_ids=req_ids), **IDS, seq=2)
        assert sent.pooled == ({0: "a"} if "a" in req_ids else {})
        assert sent.sampled()[1] in (["b"], ("b",))


def test_a_request_that_has_pooled_is_not_scheduled_again():
    slots = table()
    admit(slots, new("a", 3, PoolingParams(task="embed")), counts={"a": 2})
    ending = slots.encode(SchedulerOutput({"a": 1}), **IDS, seq=2)
    assert ending.pooled == {0: "a"}
    with pytest.raises(InvalidSchedulerOutput):
        slots.encode(SchedulerOutput(decode_req_ids=("a",)), **IDS, seq=3)


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (new("a", 5, PoolingParams(task="classify")), "embed, token_embed"),
        (new("a", 5, PoolingParams(task="embed", dimensions=9)), "at most 8"),
        (new("a", 5, PoolingParams(task="embed", dimensions="x")), "dimensions"),
        (new("a", 5, PoolingParams(task=[]), RandomSampling()), "task"),
        (new("a", 5, PoolingParams(task="embed"), RandomSampling()), "RandomSampling"),
        (new("a", 5, PoolingParams(task="embed"), num_computed=4), "num_computed_tokens"),
    ],
)
def test_what_daemons_would_refuse_is_not_sent(request_, named):
    slots = table()
    count = len(request_.token_ids) - request_.num_computed_tokens
    with pytest.raises(InvalidSchedulerOutput, match=named):
        admit(slots, request_, counts={"a": count})
    assert not len(slots)
    admit(slots, new("b", 3, PoolingParams(task="embed")))


def test_whole_prompts_and_full_replies():
    slots, embed = table(whole_prompts=True), PoolingParams(task="embed")
    with pytest.raises(InvalidSchedulerOutput, match="in one step"):
        admit(slots, new("a", 5, embed), counts={"a": 4})
    num_tokens = MAX_POOLED_BYTES // 32 // 2 + 1
    each = PoolingParams(task="token_embed")
    with pytest.raises(InvalidSchedulerOutput, match="outputs of the prompts"):
        admit(table(), new("a", num_tokens, each), new("b", num_tokens, each))


def test_requests_with_pooling_are_checked():
    prompt = np.array([1, 2], np.int32)
    good = GenerationRequest("a", prompt, pooling=PoolingParams(task="embed"))
    assert validated(good).extensions((5,)) == (good.pooling,)
    for fields in (
        {"temperature": 0.5},
        {"logprobs": 2},
        {"stop_token_ids": (1,)},
        {"frequency_penalty": 0.5},
        {"logit_bias": {1: 2.0}},
        {"bad_words": ((1,),)},
        {"prompt_logprobs": 0},
        {"logits_processors": ("even",)},
        {"structured_outputs": StructuredOutput(kind="regex", text="a")},
        {"n": 2},
        {"stop": ("a",)},
    ):
        with pytest.raises(RequestError) as caught:
            validated(flat_request("a", prompt, pooling=good.pooling, **fields))
        assert caught.value.field == path_of(next(iter(fields)))
    with pytest.raises(RequestError, match="no id yet"):
        validated(GenerationRequest("a", prompt, pooling=good.pooling, lora="b")).extensions(())
    parse = RequestParser(None).parse
    line = '{"prompt_token_ids": [1], "pooling": %s}'
    parsed = parse(line % '{"task": "classify", "use_activation": false}', 0)
    assert parsed.pooling == PoolingParams(task="classify", use_activation=False)
    for wrong in ("{}", '{"task": "x"}', '{"task": "embed", "size": 1}', '{"task": 3}', "[]"):
        with pytest.raises(RequestError, match="pooling"):
            parse(line % wrong, 0)
    assert msgspec.msgpack.decode(
        msgspec.msgpack.encode(good.pooling), type=PoolingParams
    ) == PoolingParams(task="embed")

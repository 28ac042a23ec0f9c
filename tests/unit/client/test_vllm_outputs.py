"""Results of steps as vLLM's columns."""

import numpy as np
import pytest

from rpc_schema.pooling import PooledOutputs, PooledTask, PoolingSupport
from rpc_schema.sampling import GivenLogprobs, PromptLogprobs, TokenLogprobs
from rpc_schema.step import NO_TOKEN
from tests.support import vllm_shapes as vllm
from worker_client.parts.interface import ModelBounds
from worker_client.scheduler_output import Logprobs, PromptChunk, SampledToken, StepResult
from worker_client.vllm.batches import MAX_KEPT, RequestBatch, RequestBatches
from worker_client.vllm.outputs import OutputReader, ResultColumns
from worker_client.vllm.requests import Requests, wire_id

LONG = "x" * 300
TASKS = ("embed", "token_embed")
BOUNDS = ModelBounds(
    1000,
    pooling=PoolingSupport(tasks=tuple(PooledTask(task=t, width=2, states="last") for t in TASKS)),
)


def read(reader: OutputReader, req_ids: list[str], result: StepResult) -> ResultColumns:
    """Read the result of a step of these requests."""
    return reader.read(RequestBatch(req_ids), result)


def entry(*token_ids: int, rank: int = 1) -> Logprobs:
    """Return an entry whose log probabilities are the negative token ids."""
    tokens = np.array(token_ids, np.int32)
    return Logprobs(tokens, -tokens.astype(np.float32), rank)


@pytest.fixture
def requests():
    return Requests(BOUNDS, lambda adapter: None)


@pytest.fixture
def reader(requests):
    return OutputReader(requests)


@pytest.fixture
def know(requests):
    """know(id, **fields of SamplingParams): make a request known."""

    def make(*req_ids, **fields):
        params = vllm.SamplingParams(**{"temperature": 0.0, **fields})
        for req_id in req_ids:
            assert requests.find_refusal(vllm.Request(req_id, params)) == ""

    return make


def test_each_request_of_the_step_has_a_row_in_its_order(reader, know):
    know("a", "b", "c", LONG)
    result = StepResult([wire_id(LONG), "a"], [7, 5])
    columns = read(reader, ["b", "a", "c", LONG], result)
    assert columns.req_ids == ["b", "a", "c", LONG]
    assert columns.sampled == [[], [5], [], [7]]
    assert (columns.logprobs, columns.pooled, columns.failed) == (None, None, ())
    assert columns.prompt_logprobs == {}


def test_batch_that_goes_on_has_its_tokens_in_vllms_order(reader, know):
    """Workers answer by ascending slot, which is another order."""
    names = [f"r{i}" for i in range(9)] + [LONG]
    know(*names)
    order = np.random.default_rng().permutation(len(names))
    batch, wire = RequestBatch(names), tuple(wire_id(names[i]) for i in order)
    for _ in range(3):
        tokens = np.random.default_rng().integers(1, 1000, len(names)).tolist()
        columns = reader.read(batch, StepResult(wire, [tokens[i] for i in order]))
        assert columns.sampled == [[token] for token in tokens]
        assert columns.row_of == {name: row for row, name in enumerate(names)}
        failed = int(order[0])
        tokens[failed] = NO_TOKEN
        columns = reader.read(batch, StepResult(wire, [tokens[i] for i in order]))
        assert columns.sampled == [[] if t == NO_TOKEN else [t] for t in tokens]
        assert columns.failed == (names[failed],)
    fewer = StepResult(wire[1:], [1] * (len(wire) - 1))
    assert reader.read(batch, fewer).sampled[failed] == []
    others = StepResult((*wire[1:], "other"), [1] * len(wire))
    assert reader.read(batch, others).sampled[failed] == []


def test_batches_of_micro_batches_are_kept():
    batches = RequestBatches()
    first, second = batches.find(["a", "b"]), batches.find(["b", "a"])
    assert (first.req_ids, second.req_ids) == (("a", "b"), ("b", "a"))
    for _ in range(3):
        assert batches.find(["a", "b"]) is first and batches.find(["b", "a"]) is second
    for i in range(MAX_KEPT):
        batches.find([str(i)])
    again = batches.find(["a", "b"])
    assert again is not first and again.wire_ids == first.wire_ids


def test_token_zero_is_a_token(reader, know):
    know("a")
    assert read(reader, ["a"], StepResult(["a"], [0])).sampled == [[0]]


def test_accepted_drafts_are_tokens_of_their_requests(reader, know):
    know("a", "b", LONG)
    gained = StepResult([wire_id(LONG), wire_id(LONG), "a", "a", "a"], [4, 5, 1, 2, 3])
    columns = read(reader, ["a", "b", LONG], gained)
    assert (columns.sampled, columns.failed) == ([[1, 2, 3], [], [4, 5]], ())
    fails = StepResult(["a", "a", "b"], [1, NO_TOKEN, 7])
    columns = read(reader, ["a", "b"], fails)
    assert (columns.sampled, columns.failed) == ([[], [7]], ("a",))


def test_each_accepted_draft_has_a_row_of_logprobs(reader, know):
    know("a", "b", "c", "d", logprobs=1)
    know("named", logprob_token_ids=[8])
    last, named = entry(3, 9, rank=2), entry(6)
    reports = {
        TokenLogprobs: {"a": last, "c": entry(4, 5), "d": entry(0), "named": named},
        GivenLogprobs: {"named": np.array([-8], np.float32)},
    }
    gained = {
        "a": [SampledToken(2, {TokenLogprobs: entry(2, 7)}), SampledToken(3, {TokenLogprobs: last})]
    }
    result = StepResult(
        ["a", "a", "c", "d", "named"], [2, 3, 4, NO_TOKEN, 6], reports, gained=gained
    )
    columns = read(reader, ["d", "named", "a", "b", "c"], result)
    assert columns.sampled == [[], [6], [2, 3], [], [4]]
    assert columns.first_rows == [0, 0, 1, 3, 3, 4]
    rows = columns.logprobs
    assert rows is not None
    assert rows.token_ids.tolist() == [[6, 8], [2, 7], [3, 9], [4, 5]]
    assert rows.logprobs.tolist() == [[-6, -8], [-2, -7], [-3, -9], [-4, -5]]
    assert rows.ranks.tolist() == [1, 1, 2, 1]


def test_request_without_a_token_fails_alone(reader, know):
    know("a", LONG, "c")
    columns = read(
        reader, ["a", LONG, "c"], StepResult(["a", wire_id(LONG), "c"], [1, NO_TOKEN, 3])
    )
    assert columns.sampled == [[1], [], [3]]
    assert columns.failed == (LONG,)


def test_step_without_requests_is_empty(reader):
    columns = read(reader, [], StepResult((), ()))
    assert (columns.req_ids, columns.sampled) == ([], [])


def test_logprobs_have_equal_widths(reader, know):
    know("a", "b", "c", logprobs=2)
    reports = {TokenLogprobs: {"a": entry(3, 4, 5, rank=2), "c": entry(6)}}
    columns = read(reader, ["a", "b", "c"], StepResult(["a", "c"], [3, 6], reports))
    rows = columns.logprobs
    assert rows is not None
    assert rows.token_ids.tolist() == [[3, 4, 5], [0, 0, 0], [6, 0, 0]]
    none = -np.inf
    assert rows.logprobs.tolist() == [[-3, -4, -5], [none] * 3, [-6, none, none]]
    assert rows.ranks.tolist() == [2, 1, 1]
    assert [each.dtype for each in rows] == [np.int32, np.float32, np.int32]


def test_named_tokens_follow_the_sampled_one(reader, know):
    know("a", logprob_token_ids=[40, 50])
    know("b", logprobs=1)
    reports = {
        TokenLogprobs: {"a": entry(3, 9, rank=4), "b": entry(6, 7)},
        GivenLogprobs: {"a": np.array([-0.5, -2.0], np.float32)},
    }
    rows = read(reader, ["a", "b"], StepResult(["a", "b"], [3, 6], reports)).logprobs
    assert rows.token_ids.tolist() == [[3, 40, 50], [6, 7, 0]]
    assert rows.logprobs.tolist() == [[-3.0, -0.5, -2.0], [-6, -7, -np.inf]]
    assert rows.ranks.tolist() == [4, 1]


def chunks(**by_request):
    """Return the reports of prompt chunks: name=(first, entries...)."""
    return {
        PromptLogprobs: {
            name: PromptChunk(first, entries) for name, (first, *entries) in by_request.items()
        }
    }


def test_prompt_logprobs_are_whole_with_the_first_token(reader, know):
    know("a", "b", prompt_logprobs=1)
    first = chunks(a=(1, entry(1, 2), entry(2, 3, rank=5)), b=(1, entry(9, 8)))
    assert read(reader, ["a", "b"], StepResult((), (), first)).prompt_logprobs == {}
    result = StepResult(["a"], [50], chunks(a=(3, entry(4, 5))))
    rows = read(reader, ["a", "b"], result).prompt_logprobs
    assert list(rows) == ["a"]
    assert rows["a"].token_ids.tolist() == [[1, 2], [2, 3], [4, 5]]
    assert rows["a"].logprobs.tolist() == [[-1, -2], [-2, -3], [-4, -5]]
    assert rows["a"].ranks.tolist() == [1, 5, 1]
    assert read(reader, ["a"], StepResult(["a"], [51])).prompt_logprobs == {}


def test_prompt_whose_last_token_is_computed_alone(reader, know):
    """A chunk of one token has the first one of the output, and nothing of the prompt."""
    know("a", prompt_logprobs=0)
    read(reader, ["a"], StepResult((), (), chunks(a=(1, entry(1), entry(2)))))
    rows = read(reader, ["a"], StepResult(["a"], [50])).prompt_logprobs["a"]
    assert rows.token_ids.tolist() == [[1], [2]]
    assert read(reader, ["a"], StepResult(["a"], [51])).prompt_logprobs == {}


def test_prompt_that_begins_again_counts_once(reader, know):
    know("a", prompt_logprobs=0)
    read(reader, ["a"], StepResult((), (), chunks(a=(1, entry(1), entry(2), entry(3)))))
    reader.forget(["a"])
    read(reader, ["a"], StepResult((), (), chunks(a=(1, entry(5)))))
    result = StepResult(["a"], [50], chunks(a=(2, entry(6))))
    rows = read(reader, ["a"], result).prompt_logprobs["a"]
    assert rows.token_ids.tolist() == [[5], [6]]


def test_prompt_that_begins_again_unannounced_counts_once(reader, know):
    """Preempted by the scheduler, which tells the workers, not the reader."""
    know("a", prompt_logprobs=0)
    read(reader, ["a"], StepResult((), (), chunks(a=(1, entry(1), entry(2), entry(3)))))
    result = StepResult(["a"], [50], chunks(a=(1, entry(5))))
    assert read(reader, ["a"], result).prompt_logprobs["a"].token_ids.tolist() == [[5]]


def test_request_that_ended_while_its_step_was_in_flight_is_dropped(reader, know, requests):
    know("a", "b", logprob_token_ids=[4], prompt_logprobs=0)
    requests.forget(["a"])
    reports = {
        TokenLogprobs: {"a": entry(3), "b": entry(5)},
        GivenLogprobs: {name: np.array([-1.0], np.float32) for name in "ab"},
        **chunks(a=(1, entry(1)), b=(1, entry(2))),
    }
    columns = read(reader, ["a", "b"], StepResult(["a", "b"], [3, 5], reports))
    assert columns.logprobs.token_ids.tolist()[1] == [5, 4]
    assert list(columns.prompt_logprobs) == ["b"]


def test_prompt_of_a_request_that_ended_is_not_that_of_its_successor(reader, know, requests):
    know("a", prompt_logprobs=0)
    read(reader, ["a"], StepResult((), (), chunks(a=(1, entry(1), entry(2), entry(3)))))
    requests.forget(["a"])
    reader.forget(["a"])
    know("a", logprobs=0)
    result = StepResult(["a"], [5], {TokenLogprobs: {"a": entry(5)}})
    assert read(reader, ["a"], result).prompt_logprobs == {}


def test_outputs_of_pooling_have_vllms_shapes(reader, requests):
    for req_id, task in (("a", "embed"), ("b", "token_embed"), ("c", "embed"), (LONG, "embed")):
        params = vllm.PoolingParams(task=task)
        assert requests.find_refusal(vllm.Request(req_id, pooling_params=params)) == ""
    vectors = np.arange(8, dtype=np.float32).reshape(4, 2)
    pooled = {"a": vectors[:1], "b": vectors[1:3], wire_id(LONG): vectors[3:], "gone": vectors}
    result = StepResult((), (), {PooledOutputs: pooled})
    rows = read(reader, ["c", "a", "b", LONG], result).pooled
    assert rows[0] is None
    assert [each.tolist() for each in rows[1:]] == [[0, 1], [[2, 3], [4, 5]], [6, 7]]
    requests.forget(["a"])
    assert read(reader, ["a"], result).pooled == [None]


def test_output_that_is_not_finite_fails_alone(reader, requests):
    for req_id in ("a", LONG):
        params = vllm.PoolingParams(task="token_embed")
        assert requests.find_refusal(vllm.Request(req_id, pooling_params=params)) == ""
    good = np.ones((2, 2), np.float32)
    bad = np.array([[1, 2], [3, np.inf]], np.float32)
    result = StepResult((), (), {PooledOutputs: {wire_id(LONG): bad, "a": good}})
    columns = read(reader, [LONG, "a"], result)
    assert columns.pooled[0] is None
    assert columns.pooled[1] is good
    assert columns.failed == (LONG,)

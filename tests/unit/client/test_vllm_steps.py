"""vLLM's steps as ours. A real SlotTable, which knows the blocks, takes each step that is
written."""

from types import SimpleNamespace

import numpy as np
import pytest

from rpc_schema.kv_cache import BlockGroup
from rpc_schema.pooling import MAX_POOLED_BYTES, PooledTask, PoolingSupport
from rpc_schema.sampling import PromptLogprobsWanted
from tests.support import vllm_shapes as vllm
from worker_client.parts.interface import ModelBounds
from worker_client.steps.slots import SlotTable
from worker_client.steps.step_checks import MAX_ADMITTED_TOKENS, GroupLimits
from worker_client.vllm.grammar_masks import placed_masks, read_masks
from worker_client.vllm.requests import Requests, wire_id
from worker_client.vllm.steps import StepWriter, split_by_outputs

LONG = "x" * 300
NEW = vllm.NewRequestData


class Bench:
    """A writer before a table of slots, and the requests that vLLM's scheduler has accepted."""

    def __init__(self, groups=((4, None),), num_blocks=1 << 20, capacity=8, pooling=None) -> None:
        groups = tuple(BlockGroup(*each) for each in groups)
        self.pools = pooling is not None
        self.requests = Requests(ModelBounds(1000, pooling=pooling), lambda adapter: None)
        limits = GroupLimits(
            num_blocks=num_blocks,
            block_size=4,
            groups=groups,
            vocab_size=1000,
            pooling=pooling,
            num_speculative_tokens=3,
        )
        self.table = SlotTable(capacity, limits)
        sizes = [group.block_size for group in groups]
        self.adapters = []
        self.writer = StepWriter(
            self.requests, self.adapter_of, lambda req_id: req_id in self.table, sizes, 6
        )
        self._seq = 0

    def adapter_of(self, lora_id):
        self.adapters.append(lora_id)
        return PromptLogprobsWanted(count=lora_id)  # any extension

    def accept(self, *req_ids, lora_id=0, **fields) -> None:
        params = vllm.SamplingParams(**{"temperature": 0.0, **fields})
        adapter = SimpleNamespace(lora_int_id=lora_id) if lora_id else None
        for req_id in req_ids:
            assert (
                self.requests.find_refusal(vllm.Request(req_id, params, lora_request=adapter)) == ""
            )

    def accept_pooling(self, req_id, num_prompt_tokens) -> None:
        params = vllm.PoolingParams(task="token_embed")
        request = vllm.Request(req_id, None, params, num_prompt_tokens)
        assert self.requests.find_refusal(request) == ""

    def take(self, step) -> None:
        self._seq += 1
        self.table.encode(step, epoch=1, link=1, seq=self._seq)

    def write(self, new=(), cached=None, **fields):
        """Write a step; the table takes all that it becomes."""
        output = vllm.SchedulerOutput(
            scheduled_new_reqs=list(new),
            scheduled_cached_reqs=cached or vllm.CachedRequestData(),
            **fields,
        )
        steps = self.writer.write(output)
        if self.pools:
            steps = [part for step in steps for part in split_by_outputs(step, self.requests)]
        for step in steps:
            self.take(step)
            deferred = self.table._deferred.slots  # what waits for its masks is sampled at once
            deferred.clear()
        return steps

    def begin(self, *req_ids, num_tokens=4, first_block=1) -> None:
        """Admit requests with prompts of some tokens, computed at once."""
        new, block = [], first_block
        for req_id in req_ids:
            num_blocks = -(-num_tokens // 4)
            new.append(NEW(req_id, range(num_tokens), ([*range(block, block + num_blocks)],)))
            block += num_blocks
        (_,) = self.write(new, num_scheduled_tokens=dict.fromkeys(req_ids, num_tokens))


def running(*rows):
    """Return what requests that run get: (id, computed tokens, new blocks or None)."""
    ids, counts, blocks = zip(*rows, strict=True)
    return vllm.CachedRequestData(list(ids), list(blocks), list(counts))


@pytest.fixture
def bench():
    return Bench()


def test_new_requests_are_admitted_with_what_they_have(bench):
    bench.accept("a", LONG, logprobs=2)
    (step,) = bench.write(
        [NEW("a", [5, 6, 7], ([1],)), NEW(LONG, range(9), ([2, 3, 4],), num_computed_tokens=4)],
        num_scheduled_tokens={"a": 3, LONG: 2},
    )
    first, second = step.scheduled_new_reqs
    assert (first.req_id, first.num_prompt_tokens, first.num_computed_tokens) == ("a", 3, 0)
    assert first.token_ids.tolist() == [5, 6, 7]
    assert first.token_ids.dtype == np.int32
    assert first.extensions == bench.requests["a"].extensions
    assert (second.req_id, list(second.block_ids)) == (wire_id(LONG), [2, 3, 4])
    assert step.num_scheduled_tokens == {"a": 3, wire_id(LONG): 2}
    assert step.decode_req_ids == ()


def test_resumed_request_has_its_output_too(bench):
    bench.accept("a", prompt_logprobs=1)
    bench.begin("a")
    steps = bench.write(
        [NEW("a", range(4), ([7, 8],), prefill_token_ids=[0, 1, 2, 3, 9])],
        num_scheduled_tokens={"a": 5},
        preempted_req_ids={"a"},
    )
    (again,) = steps[0].scheduled_new_reqs
    assert (again.token_ids.tolist(), again.num_prompt_tokens) == ([0, 1, 2, 3, 9], 4)
    assert again.extensions == ()  # the scheduler has its prompt's log probabilities


def test_resumed_request_without_output_asks_for_its_prompt_again(bench):
    bench.accept("a", prompt_logprobs=1)
    bench.begin("a")
    bench.write(preempted_req_ids={"a"})
    steps = bench.write(
        [NEW("a", range(4), ([7],), prefill_token_ids=[0, 1, 2, 3])], num_scheduled_tokens={"a": 4}
    )
    assert steps[0].scheduled_new_reqs[0].extensions == (PromptLogprobsWanted(count=1),)


def test_request_that_vllm_never_ended_is_ended_before_it_is_admitted_again(bench):
    """A streaming session, and a reset that resumes in the same step."""
    bench.accept("a")
    bench.begin("a")
    (step,) = bench.write([NEW("a", range(6), ([5, 6],))], num_scheduled_tokens={"a": 6})
    assert list(step.finished_req_ids) == ["a"]


def test_decodes_keep_their_tuple_while_they_go_on(bench):
    bench.accept("a", "b", "c")
    bench.begin("a", "b", "c")
    (first,) = bench.write(
        cached=running(("a", 4, ([11],)), ("b", 4, ([12],)), ("c", 4, ([13],))),
        num_scheduled_tokens={"a": 1, "b": 1, "c": 1},
    )
    assert first.decode_req_ids == ("a", "b", "c")
    assert not first.num_scheduled_tokens
    assert first.new_block_ids == {"a": [11], "b": [12], "c": [13]}
    (second,) = bench.write(
        cached=running(("a", 5, None), ("b", 5, None), ("c", 5, None)),
        num_scheduled_tokens={"a": 1, "b": 1, "c": 1},
    )
    assert second.decode_req_ids is first.decode_req_ids
    assert not second.new_block_ids
    (third,) = bench.write(
        cached=running(("a", 6, None), ("c", 6, None)),
        num_scheduled_tokens={"a": 1, "c": 1},
        finished_req_ids={"b"},
    )
    assert third.decode_req_ids == ("a", "c")


def test_decodes_and_chunks_are_apart(bench):
    bench.accept("a", "b", "c")
    bench.begin("a")
    bench.write([NEW("b", range(9), ([5, 6, 7],))], num_scheduled_tokens={"b": 3})
    (step,) = bench.write(
        [NEW("c", range(1), ([8],))],
        running(("a", 4, ([9],)), ("b", 3, None)),
        num_scheduled_tokens={"a": 1, "b": 6, "c": 1},
    )
    assert step.decode_req_ids == ("a",)
    assert step.num_scheduled_tokens == {"b": 6, "c": 1}


def test_last_chunk_of_one_token_is_a_decode(bench):
    bench.accept("a")
    bench.write([NEW("a", range(5), ([1, 2],))], num_scheduled_tokens={"a": 3})
    (step,) = bench.write(cached=running(("a", 3, None)), num_scheduled_tokens={"a": 1})
    assert step.decode_req_ids == ("a",)
    (step,) = bench.write(cached=running(("a", 4, None)), num_scheduled_tokens={"a": 1})
    assert step.decode_req_ids == ("a",)


def test_ends_of_a_step_without_tokens_wait_for_the_next(bench):
    bench.accept("a", "b", "c", LONG)
    bench.begin("a", "b", "c", LONG)
    bench.writer.end_of(vllm.SchedulerOutput(finished_req_ids={"b", LONG}))
    bench.writer.end_of(vllm.SchedulerOutput(preempted_req_ids={"c"}))
    (step,) = bench.write(
        cached=running(("a", 4, ([20],))),
        num_scheduled_tokens={"a": 1},
        finished_req_ids={"b"},
        preempted_req_ids={"c"},
    )
    assert list(step.finished_req_ids) == ["b", wire_id(LONG), "c"]
    assert list(step.preempted_req_ids) == []
    assert bench.table.req_ids == ["a"]
    assert bench.writer.take_ended() is None


def test_ends_are_taken_by_what_drops_all_rows(bench):
    bench.accept("a", "b")
    bench.begin("a", "b")
    bench.writer.end_of(vllm.SchedulerOutput(finished_req_ids={"a"}))
    step = bench.writer.take_ended()
    bench.take(step)
    assert bench.table.req_ids == ["b"]
    assert bench.writer.take_ended() is None


def test_rows_that_a_lost_step_left_end_with_the_next(bench):
    bench.accept("a", "b")
    bench.begin("a", "b")
    bench.writer.end(bench.table.req_ids)
    (step,) = bench.write(
        [NEW("b", range(4), ([9],))], num_scheduled_tokens={"b": 4}, finished_req_ids={"a"}
    )
    assert sorted(step.finished_req_ids) == ["a", "b"]
    assert bench.table.req_ids == ["b"]


def test_finished_request_is_forgotten(bench):
    bench.accept("a", "b")
    bench.begin("a", "b")
    bench.write(
        cached=running(("b", 4, ([9],))), num_scheduled_tokens={"b": 1}, finished_req_ids={"a"}
    )
    assert bench.requests.find("a") is None
    bench.writer.end_of(vllm.SchedulerOutput(finished_req_ids={"b"}))
    assert bench.requests.find("b") is None


def test_requests_with_a_grammar_are_deferred(bench):
    bench.accept("a", LONG, structured_outputs=object())
    bench.accept("b")
    bench.begin("a", "b", LONG)
    (step,) = bench.write(
        cached=running(("a", 4, ([11],)), ("b", 4, ([12],)), (LONG, 4, ([13],))),
        num_scheduled_tokens={"a": 1, "b": 1, LONG: 1},
        has_structured_output_requests=True,
    )
    assert list(step.deferred_req_ids) == ["a", wire_id(LONG)]
    (step,) = bench.write(cached=running(("b", 5, None)), num_scheduled_tokens={"b": 1})
    assert not step.deferred_req_ids


def test_adapter_is_that_of_the_moment(bench):
    bench.accept("a", lora_id=7)
    (step,) = bench.write([NEW("a", range(3), ([1],))], num_scheduled_tokens={"a": 3})
    assert step.scheduled_new_reqs[0].extensions == (PromptLogprobsWanted(count=7),)
    assert bench.adapters == [7]


def test_blocks_of_several_groups():
    bench = Bench(groups=((4, None), (4, 6)))
    bench.accept("a", "b")
    (step,) = bench.write(
        [NEW("a", range(16), ([1, 2, 3, 4], [0, 10, 5, 6]), num_computed_tokens=12)],
        num_scheduled_tokens={"a": 4},
    )
    (new,) = step.scheduled_new_reqs
    assert list(new.block_ids) == [1, 2, 3, 4]
    assert [list(own) for own in new.more_block_ids] == [[0, 10, 5, 6]]
    (step,) = bench.write(cached=running(("a", 16, ([7], [8]))), num_scheduled_tokens={"a": 1})
    assert (step.new_block_ids, list(step.more_new_block_ids)) == ({"a": [7]}, [{"a": [8]}])
    (step,) = bench.write(cached=running(("a", 17, ([], [9]))), num_scheduled_tokens={"a": 1})
    assert (step.new_block_ids, list(step.more_new_block_ids)) == ({}, [{"a": [9]}])
    (step,) = bench.write(cached=running(("a", 18, None)), num_scheduled_tokens={"a": 1})
    assert not any((step.new_block_ids, *step.more_new_block_ids))


# ------------------------------------------------------------------ more than fits


@pytest.mark.parametrize(
    "sizes",
    [
        [MAX_ADMITTED_TOKENS - 5, 9],
        [9, MAX_ADMITTED_TOKENS - 5],
        [MAX_ADMITTED_TOKENS // 2] * 4,
        [MAX_ADMITTED_TOKENS, 1, MAX_ADMITTED_TOKENS, 1],
        [MAX_ADMITTED_TOKENS],
        [MAX_ADMITTED_TOKENS // 3] * 7,
        [5, 5, 5],
    ],
)
def test_admissions_are_split_at_the_bound_of_a_message(sizes):
    """Prompts that vLLM's prefix cache has nearly whole."""
    bench = Bench(groups=((1024, None),))
    names = [f"r{index}" for index in range(len(sizes))]
    bench.accept("old", *names)
    bench.begin("old", first_block=1 << 19)
    new, first_block = [], 1
    for name, size in zip(names, sizes, strict=True):
        num_blocks = -(-size // 1024)
        blocks = [*range(first_block, first_block + num_blocks)]
        new.append(
            NEW(name, np.zeros(size, np.int32), (blocks,), num_computed_tokens=max(size - 2, 0))
        )
        first_block += num_blocks
    steps = bench.write(
        new,
        num_scheduled_tokens={name: min(2, size) for name, size in zip(names, sizes, strict=True)},
        finished_req_ids={"old"},
    )
    admitted = [each.req_id for step in steps for each in step.scheduled_new_reqs]
    assert admitted == names
    assert all(step.total_num_scheduled_tokens == 0 for step in steps[:-1])
    assert [bool(step.finished_req_ids) for step in steps] == [True] + [False] * (len(steps) - 1)
    assert sum(step.total_num_scheduled_tokens for step in steps) == sum(min(2, s) for s in sizes)
    assert len(steps) == 1 or sum(sizes) > MAX_ADMITTED_TOKENS // 2


# ------------------------------------------------------------------ rule 4


def test_reader_of_a_block_that_the_step_fills_comes_after_it(bench):
    bench.accept("a", "b")
    bench.begin("a", num_tokens=7)  # blocks 1 and 2
    first, second = bench.write(
        [NEW("b", range(9), ([1, 2, 9],), num_computed_tokens=8)],
        running(("a", 7, None)),
        num_scheduled_tokens={"a": 1, "b": 1},
    )
    assert (first.decode_req_ids, dict(first.num_scheduled_tokens)) == (("a",), {})
    assert (second.decode_req_ids, second.num_scheduled_tokens) == ((), {"b": 1})
    assert [each.req_id for each in second.scheduled_new_reqs] == ["b"]


def test_what_a_reader_defers_goes_with_it(bench):
    bench.accept("a", "b", structured_outputs=object())
    bench.begin("a", num_tokens=7)
    first, second = bench.write(
        [NEW("b", range(9), ([1, 2, 9],), num_computed_tokens=8)],
        running(("a", 7, None)),
        num_scheduled_tokens={"a": 1, "b": 1},
        has_structured_output_requests=True,
    )
    assert (list(first.deferred_req_ids), list(second.deferred_req_ids)) == (["a"], ["b"])


@pytest.mark.parametrize(
    ("computed", "hit", "count"),
    [
        (6, 4, 1),  # the step fills no block
        (7, 0, 1),  # the new request begins with no block
        (7, 4, 1),  # the new request begins with another block than the one that is filled
        (5, 4, 2),
    ],
)
def test_steps_that_no_row_can_read_too_early_stay_whole(bench, computed, hit, count):
    bench.accept("a", "b")
    bench.begin("a", num_tokens=computed)
    blocks = [*[1, 2, 9][: hit // 4], 20, 21, 22]
    prompt = range(hit + count)
    (step,) = bench.write(
        [NEW("b", prompt, (blocks,), num_computed_tokens=hit)],
        running(("a", computed, None)),
        num_scheduled_tokens={"a": 1, "b": count},
    )
    assert step.total_num_scheduled_tokens == 1 + count


def test_drafts_are_counted_and_stay_on_the_devices(bench):
    bench.accept("a", LONG, "c")
    bench.begin("a", LONG, "c", num_tokens=3)
    (step,) = bench.write(
        cached=running(("a", 3, None), (LONG, 3, ([9],)), ("c", 3, None)),
        num_scheduled_tokens={"a": 1, LONG: 4, "c": 1},
        scheduled_spec_decode_tokens={LONG: [-1, -1, -1]},
    )
    assert sorted(step.decode_req_ids) == ["a", "c"]
    assert dict(step.num_scheduled_tokens) == {wire_id(LONG): 4}
    assert dict(step.num_drafts) == {wire_id(LONG): 3}
    assert dict(step.draft_token_ids) == {}


def test_new_requests_get_no_drafts(bench):
    """Nobody has any. Those with a grammar have theirs, which are asked for before the masks."""
    bench.accept("a", "c")
    bench.accept("b", structured_outputs=object())
    bench.begin("a", "b", num_tokens=3)
    (step,) = bench.write(
        [NEW("c", range(5), ([30, 7],), num_computed_tokens=4)],
        running(("a", 3, ([8],)), ("b", 3, ([9],))),
        num_scheduled_tokens={"a": 3, "b": 4, "c": 4},
        scheduled_spec_decode_tokens={"a": [-1] * 2, "b": [-1] * 3, "c": [-1] * 3},
        has_structured_output_requests=True,
    )
    assert dict(step.num_drafts) == {"a": 2, "b": 3}
    assert dict(step.num_scheduled_tokens) == {"a": 3, "b": 4, "c": 1}
    assert (step.decode_req_ids, list(step.deferred_req_ids)) == ((), ["b"])


def test_reader_of_a_block_to_which_refused_drafts_have_led_back(bench):
    """Drafts got blocks beyond the one that the request still fills."""
    bench.accept("a", "b")
    bench.begin("a", num_tokens=6)
    (_,) = bench.write(
        cached=running(("a", 6, ([3],))),
        num_scheduled_tokens={"a": 4},
        scheduled_spec_decode_tokens={"a": [-1] * 3},
    )
    first, second = bench.write(
        [NEW("b", range(9), ([1, 2, 9],), num_computed_tokens=8)],
        running(("a", 7, None)),
        num_scheduled_tokens={"a": 1, "b": 1},
    )
    assert first.decode_req_ids == ("a",)
    assert dict(second.num_scheduled_tokens) == {"b": 1}


def test_new_requests_that_fill_blocks_of_one_token_come_one_by_one():
    bench = Bench(groups=((1, None),))
    bench.accept("a", "b", "c")
    bench.write([NEW("a", range(3), ([1, 2, 3],))], num_scheduled_tokens={"a": 3})
    steps = bench.write(
        [
            NEW("b", range(5), ([1, 2, 3, 4, 5],), num_computed_tokens=4),
            NEW("c", range(6), ([1, 2, 3, 4, 5, 6],), num_computed_tokens=5),
        ],
        running(("a", 3, ([4],))),
        num_scheduled_tokens={"a": 1, "b": 1, "c": 1},
    )
    assert [step.decode_req_ids or tuple(step.num_scheduled_tokens) for step in steps] == [
        ("a",),
        ("b",),
        ("c",),
    ]


def test_new_requests_that_share_a_prefix_come_one_after_the_other(bench):
    """vLLM takes a block for cached as soon as the step that fills it is planned."""
    bench.accept("a", "b", "c", "d", structured_outputs=object())
    first, second, third = bench.write(
        [
            NEW("a", range(9), ([1, 2, 3],)),
            NEW("b", range(14), ([1, 2, 4, 5],), num_computed_tokens=8),
            NEW("c", range(14), ([1, 2, 4, 6],), num_computed_tokens=12),
            NEW("d", range(5), ([7, 8],)),
        ],
        num_scheduled_tokens={"a": 9, "b": 6, "c": 2, "d": 5},
        has_structured_output_requests=True,
    )
    assert first.num_scheduled_tokens == {"a": 9, "d": 5}
    assert second.num_scheduled_tokens == {"b": 6}
    assert third.num_scheduled_tokens == {"c": 2}
    assert [list(each.deferred_req_ids) for each in (first, second, third)] == [
        ["a", "d"],
        ["b"],
        ["c"],
    ]


def test_prefix_that_a_running_request_gets_in_the_same_step(bench):
    bench.accept("a", "b")
    bench.write([NEW("a", range(12), ([1],))], num_scheduled_tokens={"a": 4})
    first, second = bench.write(
        [NEW("b", range(14), ([1, 2, 3, 4],), num_computed_tokens=12)],
        running(("a", 4, ([2, 3],))),
        num_scheduled_tokens={"a": 8, "b": 2},
    )
    assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == ({"a": 8}, {"b": 2})


def test_only_readers_of_what_is_filled_come_later(bench):
    bench.accept("a", "b", "c", "d")
    bench.begin("a", num_tokens=7)  # blocks 1 and 2
    steps = bench.write(
        [
            NEW("b", range(9), ([1, 2, 9],), num_computed_tokens=8),
            NEW("c", range(5), ([1, 10],), num_computed_tokens=4),
            NEW("d", range(14), ([1, 2, 9, 11],), num_computed_tokens=12),
        ],
        running(("a", 7, None)),
        num_scheduled_tokens={"a": 1, "b": 1, "c": 1, "d": 2},
    )
    assert [dict(each.num_scheduled_tokens) for each in steps] == [{"c": 1}, {"b": 1}, {"d": 2}]
    assert steps[0].decode_req_ids == ("a",)


@pytest.mark.parametrize("chunk", [1, 2, 6])
def test_reader_of_a_block_that_a_chunk_completes_comes_after_it(bench, chunk):
    """The block was given to the running request before this step, and has room left."""
    bench.accept("a", "b", "e")
    bench.write([NEW("a", range(16), ([1, 2],))], num_scheduled_tokens={"a": 7})
    first, second = bench.write(
        [
            NEW("b", range(9), ([1, 2, 9],), num_computed_tokens=8),
            NEW("e", range(6), ([20, 21],)),
        ],
        running(("a", 7, ([3, 4],) if chunk == 6 else None)),
        num_scheduled_tokens={"a": chunk, "b": 1, "e": 6},
    )
    assert (first.total_num_scheduled_tokens, second.num_scheduled_tokens) == (chunk + 6, {"b": 1})


def test_last_block_follows_what_a_request_gets():
    bench = Bench(groups=((4, None), (2, None)))
    bench.accept("a", "b", "c")
    bench.write([NEW("a", range(16), ([1], [2, 3]))], num_scheduled_tokens={"a": 3})
    bench.write(
        cached=running(("a", 3, ([4], [5]))), num_scheduled_tokens={"a": 2}
    )  # 5 of blocks 4 and 5
    steps = bench.write(
        [
            NEW("b", range(5), ([1, 8], [2, 3, 9]), num_computed_tokens=4),
            NEW("c", range(7), ([1, 10], [2, 3, 5, 11]), num_computed_tokens=6),
        ],
        running(("a", 5, None)),
        num_scheduled_tokens={"a": 1, "b": 1, "c": 1},
    )
    assert [dict(each.num_scheduled_tokens) for each in steps] == [{"b": 1}, {"c": 1}]


# ------------------------------------------------------------------ masks


def grammar_output(bitmask, num_drafts):
    """Return vLLM's masks int32 [requests, places, words], and how many drafts they allow."""
    return SimpleNamespace(
        structured_output_request_ids=["a", "b", "c"][: len(bitmask)],
        grammar_bitmask=bitmask.reshape(-1, bitmask.shape[-1]),
        num_acceptable_drafts=num_drafts,
    )


@pytest.mark.parametrize("num_words", [3, 5, 8])
def test_masks_get_the_models_width(num_words):
    mask = np.array([[[1, -2, 3, 4, 5]]], np.int32)
    (fitted,) = read_masks(grammar_output(mask, [0]), num_words)["a"]
    assert fitted.dtype == np.int32
    assert fitted.tolist() == ([1, -2, 3, 4, 5] + [0] * 3)[:num_words]
    assert read_masks(None, num_words) == {}


def test_no_token_may_follow_a_draft_that_a_grammar_does_not_allow():
    """vLLM's masks behind it allow all tokens. A request whose step has fewer drafts than vLLM
    planned samples at the first places only."""
    bitmask = np.random.default_rng(7).integers(1, 1 << 30, (3, 4, 2), np.int32)
    masks = read_masks(grammar_output(bitmask, [3, 1, 0]), 2)
    assert [len(own) for own in masks.values()] == [4, 2, 1]
    assert np.array_equal(placed_masks(masks["a"], 3), bitmask[0])
    assert np.array_equal(placed_masks(masks["b"], 3), [*bitmask[1, :2], [0, 0], [0, 0]])
    assert np.array_equal(placed_masks(masks["c"], 0), bitmask[2, :1])
    assert np.array_equal(placed_masks(masks["b"], 0), bitmask[1, :1])


# ---------------------------------------------------------------- outputs of pooling

WIDTH = MAX_POOLED_BYTES // 4 // 10
"""Ten tokens fill a reply."""
TOKENS = PoolingSupport(tasks=(PooledTask(task="token_embed", width=WIDTH, states="each"),))


@pytest.fixture
def pooling():
    """A writer whose requests' outputs are large, before a table that checks replies' sizes."""
    return Bench(pooling=TOKENS)


def test_step_whose_outputs_no_reply_holds_becomes_several(pooling):
    names = ["a", "b", "c", "d"]
    for name, size in zip(names, (4, 6, 8, 1), strict=True):
        pooling.accept_pooling(name, size)
    new = [
        NEW("a", range(4), ([1],)),
        NEW("b", range(6), ([2, 3],)),
        NEW("c", range(8), ([4, 5],)),
        NEW("d", range(1), ([6],)),
    ]
    counts = dict(zip(names, (4, 6, 8, 1), strict=True))
    steps = pooling.write(new, num_scheduled_tokens=counts, finished_req_ids={"gone"})
    assert [list(each.num_scheduled_tokens) for each in steps] == [["a", "b"], ["c", "d"]]
    assert [[r.req_id for r in each.scheduled_new_reqs] for each in steps] == [
        ["a", "b"],
        ["c", "d"],
    ]
    assert [each.finished_req_ids for each in steps] == [["gone"], ()]


def test_rows_that_go_on_come_before_new_ones(pooling):
    """Each with its blocks; the new ones may read what the others write."""
    for name, size in (("a", 9), ("b", 9), ("c", 9)):
        pooling.accept_pooling(name, size)
    first = [NEW("a", range(9), ([1, 2],)), NEW("b", range(9), ([3, 4],))]
    (_,) = pooling.write(first[:1], num_scheduled_tokens={"a": 8})
    (_,) = pooling.write(first[1:], num_scheduled_tokens={"b": 7})
    cached = running(("a", 8, ([5],)), ("b", 7, ([6],)))
    new = [NEW("c", range(9), ([7, 8, 9],))]
    steps = pooling.write(new, cached, num_scheduled_tokens={"a": 1, "b": 2, "c": 9})
    assert [each.decode_req_ids for each in steps] == [("a",), (), ()]
    assert [dict(each.num_scheduled_tokens) for each in steps] == [{}, {"b": 2}, {"c": 9}]
    assert [dict(each.new_block_ids) for each in steps] == [{"a": [5]}, {"b": [6]}, {}]
    assert [len(each.scheduled_new_reqs) for each in steps] == [0, 0, 1]


def test_step_with_small_outputs_stays_one(pooling):
    pooling.accept_pooling("a", 4)
    steps = pooling.write([NEW("a", range(4), ([1],))], num_scheduled_tokens={"a": 4})
    assert len(steps) == 1

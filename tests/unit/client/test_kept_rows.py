"""Rows that are kept while the weights change: who may begin with their blocks, and what the next
driver learns of them."""

import random

import msgspec
import numpy as np
import pytest

from rpc_schema.adoption import RequestRow, VersionSpan
from rpc_schema.identity import ContentIdentity
from rpc_schema.kv_cache import BlockGroup
from tests.unit.client.test_scheduler import make_limits
from worker_client.errors import InvalidSchedulerOutput
from worker_client.group.adoption import AdoptedRequest, RankRow, merge
from worker_client.group.weights_state import WeightsVersion
from worker_client.requests import GenerationRequest, VersionRun
from worker_client.scheduler import Scheduler
from worker_client.scheduler.admissions import MAX_NOTED_RUNS, admit, most_admission_bytes
from worker_client.scheduler.new_requests import new_request
from worker_client.scheduler_output import NewRequest, SchedulerOutput, StepResult
from worker_client.steps.slots import SlotTable
from worker_client.steps.step_checks import MAX_NOTE_BYTES, GroupLimits

IDS = {"epoch": 1, "link": 1}
LIMITS = GroupLimits(64, 64, 1000, 16, 4)


def new(req_id, num_tokens, blocks, num_computed=0):
    tokens = np.arange(num_tokens, dtype=np.int32)
    return NewRequest(req_id, tokens, num_tokens, num_computed, list(blocks))


class Table:
    def __init__(self):
        self.table, self.seq = SlotTable(4, LIMITS), 0

    def send(self, counts, *admitted, blocks=(), **fields):
        self.seq += 1
        output = SchedulerOutput(
            num_scheduled_tokens=counts,
            scheduled_new_reqs=list(admitted),
            new_block_ids=dict(blocks),
            **fields,
        )
        self.table.encode(output, seq=self.seq, **IDS)

    def refuses(self, request):
        with pytest.raises(InvalidSchedulerOutput, match="lost its contents"):
            self.send({request.req_id: 1}, request)


def test_blocks_of_kept_rows_are_their_own_whatever_fills_them():
    table = Table()
    table.send({"a": 8}, new("a", 8, [1, 2]))
    table.table.leave_weights(None)
    table.refuses(new("b", 5, [1, 3], num_computed=4))
    # Blocks that it fills with the new weights depend on the old ones.
    for number in range(5):
        table.send({"a": 1}, blocks={"a": [3 + number // 4]} if number % 4 == 0 else {})
    table.refuses(new("b", 13, [1, 2, 3, 5], num_computed=12))
    # It may itself begin again with its blocks, as a request that jumps forward does.
    again = new("a", 14, [1, 2, 3, 4], num_computed=13)
    table.send({"a": 1}, again, preempted_req_ids=["a"])
    table.refuses(new("b", 13, [1, 2, 3, 5], num_computed=12))
    # Once it has ended, its blocks are as good as any that are filled anew.
    table.send({"b": 8}, new("b", 8, [1, 2]), finished_req_ids=["a"])
    table.send({"c": 1}, new("c", 5, [1, 3], num_computed=4))
    table.refuses(new("d", 9, [4, 5, 6], num_computed=8))


def test_planned_step_begins_with_the_blocks_that_it_was_planned_with():
    table = Table()
    table.send({"a": 8}, new("a", 8, [1, 2]))
    planned = SchedulerOutput(
        num_scheduled_tokens={"b": 1}, scheduled_new_reqs=[new("b", 5, [1, 3], num_computed=4)]
    )
    table.table.leave_weights(planned)
    table.seq += 1
    table.table.encode(planned, seq=table.seq, **IDS)
    table.refuses(new("c", 8, [1, 4], num_computed=4))


def version(number):
    return WeightsVersion(number, ContentIdentity(content=bytes(32)))


def run(scheduler, count, weights):
    """Take steps whose tokens are all 5."""
    for _ in range(count):
        output = scheduler.schedule()
        req_ids = [*output.decode_req_ids, *output.num_scheduled_tokens]
        result = StepResult(req_ids, [5] * len(req_ids), weights_version=weights)
        yield output, scheduler.update_from_output(output, result)


def test_scheduler_shares_no_block_of_a_request_that_runs_on():
    prompt = list(range(10, 22))
    limits = make_limits(eos_token_ids=(), max_num_batched_tokens=64)
    scheduler = Scheduler(limits)
    scheduler.use_weights(version(1))
    scheduler.add_request(GenerationRequest("a", prompt, max_tokens=40))
    list(run(scheduler, 2, 1))
    scheduler.use_weights(version(2))
    outputs = [output for output, _ in run(scheduler, 10, 2)]
    assert [each for output in outputs for each in output.scheduled_new_reqs] == []
    # The same prompt, and all that "a" has by now, are computed once more.
    known = [*prompt, *[5] * 12]
    for name, text in (("b", prompt), ("c", known)):
        scheduler.add_request(GenerationRequest(name, text, max_tokens=1))
        (admitted,) = next(run(scheduler, 1, 2))[0].scheduled_new_reqs
        of_b = len(prompt) // limits.block_size * limits.block_size
        assert admitted.num_computed_tokens == (0 if name == "b" else of_b)
    list(run(scheduler, 1, 2))
    # Preempted, it is computed anew, as far as c does not have it; then it is shared like others.
    scheduler.pause_request("a")
    scheduler.release_request("a")
    (admitted,) = next(run(scheduler, 1, 2))[0].scheduled_new_reqs
    assert admitted.num_computed_tokens == len(known) // limits.block_size * limits.block_size
    note = msgspec.msgpack.decode(admitted.note)
    assert note[10] is False, "is_mixed"


def adopted(entry, tokens, **fields):
    computed = len(tokens) - 1
    blocks = tuple(range(1, 1 + -(-computed // 4)))
    return AdoptedRequest(
        entry.req_id,
        np.array(tokens, np.int32),
        entry.num_prompt_tokens,
        computed,
        blocks,
        entry.extensions,
        entry.note,
        0,
        **fields,
    )


def spans(*ends):
    return tuple(VersionSpan(version=number, end=end) for number, end in ends)


def test_next_drivers_know_the_versions_of_tokens_and_share_nothing():
    prompt, limits = list(range(10, 22)), make_limits(eos_token_ids=(), block_size=4)
    first = Scheduler(limits)
    first.use_weights(version(1))
    first.add_request(GenerationRequest("a", prompt, max_tokens=30))
    ((output, _),) = run(first, 1, 1)
    (entry,) = output.scheduled_new_reqs
    tokens = [*prompt, *[5] * 9]
    for earlier in range(2):
        second = Scheduler(limits)
        second.use_weights(version(3))
        known = spans((1, 15), (2, 19)) if not earlier else ()
        left = adopted(entry, tokens, weights_version=3, earlier_versions=known)
        assert second.adopt_requests([left]) == []
        second.add_request(GenerationRequest("b", prompt, max_tokens=1))
        ((output, _),) = run(second, 1, 3)
        entry, other = output.scheduled_new_reqs
        assert entry.num_computed_tokens == len(tokens) - 1
        assert other.num_computed_tokens == 0
        assert second.take_cached_changes().distrusted == []
        tokens.append(5)
    (done,) = [each for _, ended in run(second, 20, 3) for each in ended if each.req_id == "a"]
    runs = [(run.version, run.num_tokens) for run in done.weights_versions]
    assert runs == [(1, 3), (2, 4), (3, 23)]


def test_no_version_is_forgotten_over_many_drivers_and_updates():
    prompt, limits, count = list(range(10, 22)), make_limits(eos_token_ids=(), block_size=4), 40
    request = GenerationRequest("a", prompt, max_tokens=count + 3)
    scheduler, tokens = Scheduler(limits), [*prompt, 5]
    scheduler.use_weights(version(1))
    scheduler.add_request(request)
    for number in range(2, 2 + count):
        ((output, _),) = run(scheduler, 1, number - 1)
        (entry,) = output.scheduled_new_reqs
        scheduler = Scheduler(limits)
        scheduler.use_weights(version(number))
        known = spans((number - 1, len(tokens)))
        left = adopted(entry, tokens, weights_version=number, earlier_versions=known)
        assert scheduler.adopt_requests([left]) == []
        tokens.append(5)
    (done,) = [each for _, ended in run(scheduler, 3, number) for each in ended]
    runs = [(run.version, run.num_tokens) for run in done.weights_versions]
    assert runs == [*((each, 1) for each in range(1, number)), (number, 3)]


def test_tokens_of_an_admission_that_was_sent_after_an_update_keep_their_version():
    prompt, limits = list(range(10, 22)), make_limits(eos_token_ids=(), block_size=4)
    first = Scheduler(limits)
    first.use_weights(version(1))
    first.add_request(GenerationRequest("a", prompt, max_tokens=30))
    list(run(first, 3, 1))
    planned = first.schedule()
    first.step_failed([planned], frozenset("a"))
    (entry,) = first.schedule().scheduled_new_reqs  # it is sent when version 2 is there
    tokens = [*entry.token_ids.tolist(), 5, 5]
    left = adopted(entry, tokens, weights_version=2)
    second = Scheduler(limits)
    second.use_weights(version(2))
    assert second.adopt_requests([left]) == []
    (done,) = [each for _, ended in run(second, 25, 2) for each in ended]
    assert [(run.version, run.num_tokens) for run in done.weights_versions] == [(1, 3), (2, 27)]


def test_admissions_count_their_notes_in_full():
    runs = tuple(VersionRun((1 << 63) - 1 - i, 1 << 24, 1 << 62) for i in range(MAX_NOTED_RUNS + 9))
    request = new_request(GenerationRequest("a" * 256, [1, 2, 3], 9), make_limits())
    request.priority, request.deadline, request.weights.runs = -(2**31), 1e12, runs
    request.arrival = request.blocks.num_cached_tokens = request.limit = 1 << 40
    request.blocks.num_preemptions = 1 << 40
    request.blocks.by_group = ([],)
    made = admit(request, 1, (1 << 63) - 1)
    counted = most_admission_bytes(request, 0, ()) - 4 * 256
    assert 0.8 * counted < len(made.note) < counted
    assert len(made.note) <= MAX_NOTE_BYTES


def test_ranks_may_have_a_kept_row_before_and_after_the_next_driver_admits_it():
    row = RequestRow(
        slot=0,
        req_id="a",
        num_prompt_tokens=4,
        num_tokens=8,
        num_computed_tokens=7,
        num_blocks=2,
        extensions=(),
        note=b"old",
        weights_version=2,
        earlier_versions=spans((1, 6)),
    )
    again = msgspec.structs.replace(row, note=b"new", earlier_versions=())
    tokens, blocks = np.arange(8, dtype=np.int32), np.array([1, 2], np.int32)
    ranks = [RankRow(0, row, tokens, blocks), RankRow(1, again, tokens, blocks)]
    random.shuffle(ranks)
    group = [BlockGroup(4)]
    (found,) = merge([[each] for each in ranks], 0, group)
    assert found.num_computed_tokens == 7
    assert (found.note, bool(found.earlier_versions)) in [(b"old", True), (b"new", False)]

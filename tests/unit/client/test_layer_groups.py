"""KV groups in the driver, with random models and requests: the planned groups, the blocks that
requests hold, and which blocks they may take."""

import random
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from rpc_schema import kv_cache
from rpc_schema.codec import decode_step
from rpc_schema.kv_cache import (
    NULL_BLOCK,
    BlockGroup,
    blocks_behind,
    blocks_for,
    plan_groups,
    request_blocks,
)
from tests.support.exhaustive import seeds
from worker_client.errors import InvalidSchedulerOutput, KVPlanError, RequestError
from worker_client.group.adoption import AdoptedRequest
from worker_client.group.kv_planning import choose_groups, fit_max_model_len
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, SchedulerLimits
from worker_client.scheduler_output import NewRequest, SchedulerOutput, StepResult
from worker_client.steps.slots import SlotTable
from worker_client.steps.step_checks import GroupLimits

FULL_AND_SLIDING = (BlockGroup(4), BlockGroup(4, 9), BlockGroup(4, 9))


def layer(name, window, bytes_per_token=64, heads=2):
    return kv_cache.KVPages(
        layer_name=name,
        num_kv_heads=heads,
        head_size=8,
        dtype="float32",
        bytes_per_token=bytes_per_token,
        sliding_window=window,
    )


def random_ranks(rng):
    kinds = rng.sample([None, 24, 100], rng.randint(1, 3))
    return [
        [layer(f"{rank}.{index}", rng.choice(kinds)) for index in range(rng.randint(1, 12))]
        for rank in range(rng.randint(1, 4))
    ]


def keeps(group, layer_window):
    return group.window is None or (layer_window is not None and layer_window <= group.window)


def test_a_draft_model_adds_pages_and_no_groups():
    """Under the first group's block table, which then has no window."""
    full, sliding = layer("a", None), layer("b", 9)
    draft = msgspec.structs.replace(layer("draft_model.a", None, 24), is_draft=True)
    for target in ([full, full], [full, sliding, sliding], [sliding, sliding]):
        own = [msgspec.structs.replace(each, layer_name=f"{i}") for i, each in enumerate(target)]
        ranks = [own, [*own, draft, msgspec.structs.replace(draft, layer_name="draft_model.b")]]
        groups = plan_groups(ranks, 4, 64, 16)
        first = groups[0]
        assert first.blocks.window is None
        assert first.drafts == (((), 0), (("draft_model.a", "draft_model.b"), 48))
        first_rank, second_rank = (kv_cache.bytes_per_block(groups, rank) for rank in (0, 1))
        assert second_rank == first_rank + first.blocks.block_size * 48
        plan = kv_cache.build_kv_cache_config(groups, 1, 7)
        assert plan.draft_layers == ("draft_model.a", "draft_model.b")
        assert plan.draft_bytes + plan.size_bytes == 7 * second_rank
        if target[0] is full:
            undrafted = plan_groups([own, own], 4, 64, 16)
            assert [g.blocks for g in groups] == [g.blocks for g in undrafted]
        assert kv_cache.build_kv_cache_config(groups, 0, 7).draft_bytes == 0


@pytest.mark.parametrize("seed", seeds(20, of=100))
def test_every_layer_is_in_one_group_that_keeps_what_it_sees(seed):
    rng = random.Random(seed)
    ranks = random_ranks(rng)
    size, length, step = 2 ** rng.randint(0, 5), rng.randint(1, 400), rng.randint(1, 64)
    groups = plan_groups(ranks, size, length, step)
    for rank, layers in enumerate(ranks):
        placed = [name for group in groups for name in group.layer_names[rank]]
        assert sorted(placed) == sorted(spec.layer_name for spec in layers)
        for group in groups:
            assert group.blocks.block_size == size
            for spec in layers:
                if spec.layer_name in group.layer_names[rank]:
                    assert (
                        keeps(group.blocks, spec.sliding_window)
                        or length <= 24
                        or (spec.sliding_window is not None and spec.sliding_window >= length)
                    )
    blocks = [group.blocks for group in groups]
    assert len(groups) <= kv_cache.MAX_GROUPS
    windows = {spec.sliding_window for layers in ranks for spec in layers}
    if len(windows) == 1:
        assert len(groups) == 1
    taken = max(kv_cache.bytes_per_block(groups, rank) for rank in range(len(ranks)))
    whole = max(sum(spec.bytes_per_token for spec in layers) for layers in ranks) * size
    least = whole * blocks_for(length, size)
    assert taken * request_blocks(length, blocks, step) <= least, "no worse than one group"
    for rank in range(len(ranks)):
        plan = kv_cache.build_kv_cache_config(groups, rank, 5)
        assert plan.size_bytes == 5 * kv_cache.bytes_per_block(groups, rank)
        assert kv_cache.groups_of(plan) == tuple(blocks)


def test_one_full_layer_in_four_takes_a_quarter_and_three_windows():
    layers = [layer(str(i), None if i % 4 == 3 else 4096) for i in range(32)]
    groups = plan_groups([layers], 16, 32768, 2048)
    assert [len(group.layer_names[0]) for group in groups] == [8] * 4
    assert [group.blocks.window for group in groups] == [None, 4096, 4096, 4096]
    blocks = [group.blocks for group in groups]
    window = -(-(4096 - 1 + 2048) // 16) + 1
    assert request_blocks(32768, blocks, 2048) == 2048 + 3 * window


def test_stages_of_different_kinds_are_one_group_where_that_takes_less():
    first = [layer(f"a{i}", None) for i in range(4)]
    second = [layer(f"b{i}", 50) for i in range(4)]
    (group,) = plan_groups([first, second], 4, 100, 50)
    assert group.blocks == BlockGroup(4)


def test_pages_are_equal_where_layers_keep_different_amounts():
    groups = plan_groups([[layer("a", None, 64), layer("b", None, 32, heads=1)]], 4, 100, 50)
    assert [group.blocks.block_size for group in groups] in ([4, 8], [8, 4])
    with pytest.raises(KVPlanError) as caught:
        choose_groups([[layer("a", None, 64), layer("b", None, 48, heads=1)]], _config(4), 100)
    assert (caught.value.field, caught.value.value) == ("cache.block_size", 4)


def _config(block_size):
    from tests.support.serving import worker_config

    return worker_config("model", block_size=block_size)


@pytest.mark.parametrize("seed", seeds(6, of=20))
def test_the_longest_length_is_the_last_that_fits(seed):
    rng = random.Random(seed)
    groups = [BlockGroup(4, rng.choice([None, 7, 30])) for _ in range(rng.randint(1, 4))]
    usable, step, most = rng.randint(1, 60), rng.randint(1, 20), rng.randint(1, 300)
    fitting = [n for n in range(1, most + 1) if request_blocks(n, groups, step) <= usable]
    if fitting:
        lowered = fit_max_model_len(usable + 1, groups, most, step, may_lower=True)
        assert lowered == fitting[-1]
    else:
        with pytest.raises(KVPlanError):
            fit_max_model_len(usable + 1, groups, most, step, may_lower=True)


# The reference scheduler.


@dataclass
class Workers:
    """Workers that know tokens alone: what each block holds, as (group, positions and tokens), and
    whether a request reads what it should. A SlotTable judges every step."""

    limits: SchedulerLimits
    table: SlotTable
    held: dict[int, dict[int, tuple]] = field(default_factory=dict)
    rows: dict[str, list] = field(default_factory=dict)

    def run(self, output: SchedulerOutput, seq: int) -> StepResult:
        frames = self.table.encode(output, epoch=1, link=1, seq=seq).frames
        message = decode_step(frames)
        assert len(message.new_block_groups) in (0, len(message.new_block_ids) // 4)
        for req_id in (*output.finished_req_ids, *output.preempted_req_ids):
            self.rows.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            blocks = [list(own) for own in new.blocks_by_group]
            self.rows[new.req_id] = [new.token_ids.tolist(), new.num_computed_tokens, blocks]
        for group, given in enumerate((output.new_block_ids, *output.more_new_block_ids)):
            for req_id, block_ids in given.items():
                self.rows[req_id][2][group] += block_ids
        counts = {**dict.fromkeys(output.decode_req_ids, 1), **output.num_scheduled_tokens}
        for req_id, count in counts.items():
            self.write(req_id, count)
        sampled = {}
        for req_id, count in counts.items():
            tokens, computed, _ = row = self.rows[req_id]
            self.check_reads(req_id, computed, count)
            row[1] = computed + count
            if row[1] == len(tokens):
                token = (31 * sum(tokens) + len(tokens)) % 97
                tokens.append(token)
                sampled[req_id] = token
        return StepResult(list(sampled), list(sampled.values()))

    def write(self, req_id: str, count: int) -> None:
        tokens, computed, blocks = self.rows[req_id]
        for number, group in enumerate(self.limits.block_groups):
            for position in range(computed, computed + count):
                block_id = blocks[number][position // group.block_size]
                assert block_id != NULL_BLOCK
                offset = position % group.block_size
                entry = self.held.setdefault(block_id, {})
                entry[offset] = number, tuple(tokens[: position + 1])

    def check_reads(self, req_id: str, computed: int, count: int) -> None:
        """After all writes of the step: no visible block may have been overwritten."""
        tokens, _, blocks = self.rows[req_id]
        for number, group in enumerate(self.limits.block_groups):
            first = 0 if group.window is None else max(0, computed - group.window + 1)
            for position in range(first, computed + count):
                block_id = blocks[number][position // group.block_size]
                found = self.held[block_id][position % group.block_size]
                assert found == (number, tuple(tokens[: position + 1])), (req_id, position)


def make_workers(limits):
    judged = GroupLimits(
        limits.max_num_batched_tokens,
        limits.max_model_len,
        1000,
        limits.num_blocks,
        limits.block_size,
        limits.groups,
    )
    return Workers(limits, SlotTable(limits.max_num_seqs, judged))


def random_limits(rng):
    groups = rng.choice(
        [
            (BlockGroup(4, 9),),
            FULL_AND_SLIDING,
            (BlockGroup(4), BlockGroup(8, 20)),
            (BlockGroup(2, 1), BlockGroup(2, 7)),
        ]
    )
    step = rng.randint(4, 24)
    least = request_blocks(80, groups, step)
    return SchedulerLimits(
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=step,
        max_model_len=80,
        num_blocks=1 + least + rng.randint(0, least),
        block_size=min(group.block_size for group in groups),
        pipeline_parallel_size=rng.randint(1, 3),
        groups=groups,
    )


@pytest.mark.parametrize("seed", seeds(15, of=60))
def test_nobody_reads_what_another_wrote_and_no_block_is_lost(seed):
    """Random requests that share prefixes, in few blocks; steps fail, drivers adopt other drivers'
    requests."""
    rng = random.Random(seed)
    limits = random_limits(rng)
    workers, scheduler = make_workers(limits), Scheduler(limits)
    shared = [rng.randrange(97) for _ in range(40)]
    requests = {}
    for index in range(12):
        prompt = shared[: rng.randint(0, 40)] + [
            rng.randrange(97) for _ in range(rng.randint(1, 9))
        ]
        most = rng.randint(1, 80 - len(prompt))
        requests[str(index)] = prompt, most
        scheduler.add_request(
            GenerationRequest(
                str(index),
                np.array(prompt, np.int32),
                most,
                sampling=SamplingParams(ignore_eos=True),
            )
        )
    done, in_flight, seq = {}, [], 0
    while scheduler.has_unfinished_requests() or in_flight:
        while len(in_flight) <= limits.pipeline_parallel_size:
            output = scheduler.schedule()
            if output is None:
                break
            seq += 1
            result = workers.run(output, seq)
            check_holdings(scheduler, limits)
            in_flight.append((output, result))
        assert in_flight, "the scheduler has stalled"
        if rng.random() < 0.03:
            outputs = [output for output, _ in in_flight]
            lost = workers.table.fail(outputs)
            for req_id in lost:
                workers.rows.pop(req_id, None)
            for req_id, row in workers.rows.items():
                assert req_id not in lost, row
            scheduler.step_failed(outputs, lost)
            in_flight.clear()
            continue
        for finished in scheduler.update_from_output(*in_flight.pop(0)):
            done[finished.req_id] = finished.token_ids
    for req_id, (prompt, most) in requests.items():
        tokens = list(prompt)
        for _ in range(most):
            tokens.append((31 * sum(tokens) + len(tokens)) % 97)
        assert done[req_id] == tokens[len(prompt) :]
    assert scheduler.num_free_blocks == limits.num_blocks - 1


def check_holdings(scheduler, limits):
    for request in scheduler._queues.running.values():
        held = [i for own in request.blocks.by_group for i in own if i != NULL_BLOCK]
        assert len(set(held)) == len(held)
        most = request_blocks(
            request.num_computed, limits.block_groups, limits.max_num_batched_tokens
        )
        assert len(held) <= most


def test_request_of_twenty_windows_stays_within_its_bound():
    groups = (BlockGroup(4, 16),)
    limits = SchedulerLimits(2, 8, 400, 1 + request_blocks(400, groups, 8), 4, groups=groups)
    assert limits.num_blocks - 1 == -(-(15 + 8) // 4) + 1
    workers, scheduler = make_workers(limits), Scheduler(limits)
    prompt = np.arange(200, dtype=np.int32)
    scheduler.add_request(
        GenerationRequest("long", prompt, 150, sampling=SamplingParams(ignore_eos=True))
    )
    seq = 0
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        seq += 1
        scheduler.update_from_output(output, workers.run(output, seq))
    assert scheduler.num_free_blocks == limits.num_blocks - 1
    with pytest.raises(RequestError, match="do not fit"):
        few = SchedulerLimits(2, 8, 400, limits.num_blocks - 1, 4, groups=groups)
        Scheduler(few).add_request(
            GenerationRequest("long", prompt, 150, sampling=SamplingParams(ignore_eos=True))
        )


# The judge.


def sliding_table(groups=FULL_AND_SLIDING, num_blocks=60):
    return SlotTable(4, GroupLimits(64, 200, 1000, num_blocks, 4, groups))


def new(req_id, num_tokens, computed, *by_group):
    return NewRequest(
        req_id,
        np.arange(num_tokens, dtype=np.int32),
        num_tokens,
        computed,
        by_group[0],
        more_block_ids=by_group[1:],
    )


def refused(table, output, field, match=""):
    with pytest.raises(InvalidSchedulerOutput, match=match) as caught:
        table.encode(output, epoch=1, link=1, seq=99)
    assert caught.value.field == field
    assert not len(table) or output.scheduled_new_reqs[0].req_id not in table


def admission(*requests):
    counts = {r.req_id: len(r.token_ids) - r.num_computed_tokens for r in requests}
    return SchedulerOutput(counts, scheduled_new_reqs=requests)


def test_null_blocks_stand_behind_windows_alone():
    behind = blocks_behind(20, BlockGroup(4, 9))
    assert behind == 3
    good = new("a", 22, 20, [1, 2, 3, 4, 5, 6], [0, 0, 0, 7, 8, 9], [0, 10, 11, 12, 13, 14])
    for wrong in (
        new("a", 22, 20, [0, 2, 3, 4, 5, 6], [0, 0, 0, 7, 8, 9], [0, 0, 0, 12, 13, 14]),
        new("a", 22, 20, [1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 8, 9], [0, 0, 0, 12, 13, 14]),
        new("a", 22, 20, [1, 2, 3, 4, 5, 6], [0, 0, 0, 7, 8, 0], [0, 0, 0, 12, 13, 14]),
        new("a", 22, 20, [1, 2, 3, 4, 5, 6], [0, 0, 0, 7, 8, 9], [0, 0, 0, 12, 13, 60]),
    ):
        refused(sliding_table(), admission(wrong), "block_ids", "give block ids from 1 to 59")
    message = decode_step(sliding_table().encode(admission(good), epoch=1, link=1, seq=1).frames)
    ids = np.frombuffer(message.new_block_ids, "<i4").tolist()
    assert ids == [1, 2, 3, 4, 5, 6, 0, 0, 0, 7, 8, 9, 0, 10, 11, 12, 13, 14]
    assert list(message.new_block_groups) == [0] * 6 + [1] * 6 + [2] * 6


def test_groups_that_there_are_not_and_blocks_of_two_groups_are_refused():
    table = sliding_table()
    refused(table, admission(new("a", 4, 0, [1], [2])), "more_block_ids", "2 groups beside")
    refused(table, admission(new("a", 4, 0, [1], [2], [1])), "block_ids", "writes to it")
    refused(table, admission(new("a", 8, 4, [1, 2], [1, 3], [4, 5])), "block_ids", "once")
    table.encode(admission(new("a", 4, 0, [1], [2], [3])), epoch=1, link=1, seq=1)
    for more in ([{"a": [5]}] * 3, 7, {"a": [5]}, ["a"]):
        step = SchedulerOutput(decode_req_ids=("a",), more_new_block_ids=more)
        with pytest.raises(InvalidSchedulerOutput) as caught:
            table.encode(step, epoch=1, link=1, seq=2)
        assert caught.value.field == "more_new_block_ids"
    for given in ({"a": [3]}, {"a": [0]}, {"a": [60]}, {"b": [9]}):
        step = SchedulerOutput(
            decode_req_ids=("a",), new_block_ids={"a": [7]}, more_new_block_ids=({}, given)
        )
        with pytest.raises(InvalidSchedulerOutput):
            table.encode(step, epoch=1, link=1, seq=2)
    step = SchedulerOutput(
        decode_req_ids=("a",), new_block_ids={"a": [7]}, more_new_block_ids=({"a": [8]}, {"a": [9]})
    )
    message = decode_step(table.encode(step, epoch=1, link=1, seq=2).frames)
    assert np.frombuffer(message.new_block_ids, "<i4").tolist() == [7, 8, 9]
    assert list(message.new_block_groups) == [0, 1, 2]
    table.require_resync()
    message = decode_step(table.encode(SchedulerOutput(), epoch=1, link=1, seq=3).frames)
    assert np.frombuffer(message.resync, "<i4").tolist() == [0, 5, 6, 2, 2, 2]


def test_a_block_is_its_requests_until_the_window_has_left_it_behind():
    table = sliding_table((BlockGroup(4, 9),))
    table.encode(admission(new("a", 16, 0, [1, 2, 3, 4])), epoch=1, link=1, seq=1)
    left = blocks_behind(16, BlockGroup(4, 9))
    assert left == 2
    refused(table, admission(new("b", 4, 0, [3])), "block_ids", "'a' writes to it")
    table.encode(admission(new("b", 4, 0, [2])), epoch=1, link=1, seq=2)
    refused(table, admission(new("c", 4, 0, [2])), "block_ids", "'b' writes to it")
    table.encode(SchedulerOutput(finished_req_ids=["a"]), epoch=1, link=1, seq=3)
    refused(table, admission(new("c", 4, 0, [2])), "block_ids", "'b' writes to it")
    table.encode(admission(new("c", 8, 0, [1, 3])), epoch=1, link=1, seq=4)


def test_adopted_places_are_passed_on():
    adopted = AdoptedRequest(
        "a", np.arange(22, dtype=np.int32), 22, 20, (1, 2), (), b"", 0, ((0, 3), (4,))
    )
    again = adopted.as_new([5], [[6], [7, 8]])
    assert [list(own) for own in again.blocks_by_group] == [[1, 2, 5], [0, 3, 6], [4, 7, 8]]

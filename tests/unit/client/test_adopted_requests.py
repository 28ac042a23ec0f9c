"""Requests that change drivers: the ranks' reports are merged, and the reference scheduler
continues from them, block by block."""

import copy
import random
from collections import deque
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from rpc_schema.adoption import AdoptRequestsReply, RequestRow
from rpc_schema.errors import BadFrameError
from rpc_schema.identity import ContentIdentity
from rpc_schema.kv_cache import BlockGroup
from tests.support.exhaustive import seeds
from tests.unit.client.test_scheduler import Model, expected, make_limits, random_requests
from worker_client.errors import AdoptionMismatch, InvalidSchedulerOutput, RequestError
from worker_client.group.adoption import AdoptedRequest, RankRow, merge, read_page
from worker_client.group.weights_state import WeightsVersion
from worker_client.requests import GenerationRequest, SamplingParams
from worker_client.scheduler import Scheduler, admissions
from worker_client.scheduler.admissions import MAX_NOTED_RUNS
from worker_client.scheduler_output import NewRequest, SchedulerOutput, StepResult
from worker_client.steps.slots import SlotTable
from worker_client.steps.step_checks import MAX_NOTE_BYTES


class TwoRanks(Model):
    """A group of two ranks whose KV cache holds what was written into each place, whoever drives.
    The second is the output rank; either may be some steps behind the other."""

    def __init__(self, limits, latency, kv):
        super().__init__(limits, latency)
        self.kv = kv
        self.checkpoints = kv.setdefault("checkpoints", {})
        self.about: dict[str, NewRequest] = {}
        self.past: deque = deque([{}], maxlen=latency + 1)

    def check_and_run(self, output):
        self.about.update({new.req_id: new for new in output.scheduled_new_reqs})
        # One that was adopted and not admitted yet may be preempted, or end: workers ignore that.
        ended = [name for name in output.finished_req_ids if name in self.rows]
        preempted = [name for name in output.preempted_req_ids if name in self.rows]
        output = replace(output, finished_req_ids=ended, preempted_req_ids=preempted)
        before = {req_id: row["computed"] for req_id, row in self.rows.items()}
        result = super().check_and_run(output)
        for req_id, row in self.rows.items():
            fresh = any(new.req_id == req_id for new in output.scheduled_new_reqs)
            start = self.about[req_id].num_computed_tokens if fresh else before[req_id]
            for position, digest, place in self.places(row):
                if position >= start:
                    self.kv[place] = digest
        for row in self.rows.values():
            for _, digest, place in self.places(row):
                assert self.kv[place] == digest, "a position's KV is another's"
        self.past.append(copy.deepcopy(self.rows))
        return result

    def places(self, row):
        digest, size = 0, self.limits.block_size
        for position, token in enumerate(row["tokens"][: row["computed"]]):
            digest = hash((digest, token))
            yield position, digest, (row["blocks"][position // size], position % size)

    def serve(self, num_steps, outputs):
        """Maximum number of steps; the last ones have no result."""
        while num_steps and (self.scheduler.has_unfinished_requests() or self.in_flight):
            output = self.scheduler.schedule() if len(self.in_flight) < self.latency else None
            if output is not None:
                self.in_flight.append((output, self.check_and_run(output)))
                num_steps -= 1
                continue
            for done in self.scheduler.update_from_output(*self.in_flight.popleft()):
                outputs[done.req_id] = done.token_ids

    def told_by(self, rank, rows, *, all_tokens):
        told = []
        for req_id, row in rows.items():
            about = self.about[req_id]
            tokens = row["tokens"] if all_tokens else row["tokens"][: len(about.token_ids)]
            told.append(
                make_row(
                    rank,
                    tokens,
                    row["blocks"],
                    slot=int(req_id[1:]),
                    req_id=req_id,
                    num_prompt_tokens=about.num_prompt_tokens,
                    num_computed_tokens=row["computed"],
                    extensions=about.extensions,
                    note=about.note,
                    weights_version=0,
                )
            )
        return told


def make_row(rank, tokens, blocks, **fields):
    defaults = {
        "slot": 0,
        "req_id": "a",
        "num_prompt_tokens": 2,
        "num_computed_tokens": 0,
        "extensions": (),
        "note": b"",
        "weights_version": 0,
    }
    row = RequestRow(**{**defaults, **fields}, num_tokens=len(tokens), num_blocks=len(blocks))
    return RankRow(rank, row, np.array(tokens, np.int32), np.array(blocks, np.int32))


def go_on(scheduler, adopted, requests, outputs):
    """Adopt, and add the requests that neither run nor have ended."""
    for done in scheduler.adopt_requests(adopted):
        outputs[done.req_id] = done.token_ids
    running = {request.req_id for request in adopted}
    for request in requests:
        if request.id not in running and request.id not in outputs:
            scheduler.add_request(request)


def random_limits(rng, checkpoint_blocks=0):
    return make_limits(
        keeps_state=checkpoint_blocks > 0,
        checkpoint_blocks=checkpoint_blocks,
        max_num_seqs=rng.choice([1, 3, 8]),
        max_num_batched_tokens=rng.choice([4, 16, 64]),
        num_blocks=rng.choice([33, 40, 100]),
        pipeline_parallel_size=rng.choice([1, 2, 3]),
        enable_prefix_caching=rng.random() < 0.8,
    )


@pytest.mark.each_value
@pytest.mark.parametrize("seed", seeds(6, of=20))
@pytest.mark.parametrize("checkpoint_blocks", [0, 1, 3])
def test_requests_go_through_many_drivers_and_end_with_their_tokens(seed, checkpoint_blocks):
    """Of models with states, they go back to a checkpoint each time."""
    rng = random.Random(seed)
    limits = random_limits(rng, checkpoint_blocks)
    requests = random_requests(rng, 20)
    outputs: dict[str, list[int]] = {}
    adopted: list[AdoptedRequest] = []
    kv: dict = {}
    num_kept = 0
    for _ in range(30):
        latency = rng.randrange(1, limits.pipeline_parallel_size + 2)
        model = TwoRanks(limits, latency, kv)
        go_on(model.scheduler, adopted, requests, outputs)
        model.serve(rng.randrange(1, 20), outputs)
        ranks = [model.rows, model.past[rng.randrange(len(model.past))]]
        rng.shuffle(ranks)
        told = [
            model.told_by(0, ranks[0], all_tokens=False),
            model.told_by(1, ranks[1], all_tokens=True),
        ]
        adopted = merge(told, 1, limits.block_groups, checkpoint_blocks)
        assert {request.req_id for request in adopted} == {*ranks[0], *ranks[1]}
        num_kept += sum(request.num_computed_tokens for request in adopted)
    model = TwoRanks(limits, 1, kv)
    go_on(model.scheduler, adopted, requests, outputs)
    model.serve(10**9, outputs)
    assert num_kept > 0
    assert outputs == {r.id: expected(r, limits.max_model_len) for r in requests}
    assert model.scheduler.num_free_blocks == limits.num_blocks - 1


def test_kv_is_what_all_ranks_have_and_one_token_is_left_to_compute():
    rows = [
        make_row(rank, [5, 6, 7, 8, 9][: 5 if rank else 2], [3, 4], num_computed_tokens=computed)
        for rank, computed in enumerate((4, 5, 2))
    ]
    (adopted,) = merge([[row] for row in rows], 1, [BlockGroup(2)])
    assert adopted.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert (adopted.num_computed_tokens, adopted.block_ids) == (2, (3,))
    rows = [make_row(rank, [5, 6], [3], num_computed_tokens=1, slot=4 - rank) for rank in (0, 1)]
    (moved,) = merge([[row] for row in rows], 1, [BlockGroup(2)])
    assert (moved.num_computed_tokens, moved.block_ids, moved.slot) == (1, (3,), 3)
    row = make_row(0, [5, 6, 7, 8], [3, 4], num_computed_tokens=4)
    (alone,) = merge([[row]], 0, [BlockGroup(2)])
    assert (alone.num_computed_tokens, alone.block_ids) == (3, (3, 4))


@pytest.mark.parametrize(
    ("computed", "blocks", "kept"),
    [
        ((9, 10), [7, 4, 5, 6, 9], 8),
        ((7, 10), [7, 4, 5, 6, 9], 4),
        ((3, 10), [7, 4, 5, 6, 9], 0),
        ((9, 10), [7, 4, 5, 9, 6], 4),
        ((9, 10), [7, 0, 5, 9, 6], 0),
    ],
    ids=["last border", "one rank is behind", "before the first", "without a checkpoint", "none"],
)
def test_states_are_those_of_the_last_checkpoint_that_all_ranks_have(computed, blocks, kept):
    """With checkpoints every second block, of two tokens."""
    rows = [
        [make_row(rank, range(11), blocks, num_computed_tokens=each)]
        for rank, each in enumerate(computed)
    ]
    (adopted,) = merge(rows, 1, [BlockGroup(2)], 2)
    assert adopted.num_computed_tokens == kept
    assert adopted.block_ids == tuple(blocks[: kept // 2])


@pytest.mark.parametrize(
    "other",
    [
        [],
        [make_row(1, [5, 6, 7, 8], [3, 5], num_computed_tokens=3)],
        [make_row(1, [5, 6, 7, 8], [3], num_computed_tokens=3)],
        [make_row(1, [5, 6, 7, 8], [3, 4], num_computed_tokens=0)],
    ],
    ids=["absent", "other block", "fewer blocks", "nothing computed"],
)
def test_request_that_ranks_have_differently_begins_again_from_its_tokens(other):
    mine = make_row(0, [5, 6, 7, 8], [3, 4], num_computed_tokens=3)
    (adopted,) = merge([[mine], other], 0, [BlockGroup(2)])
    assert (adopted.num_computed_tokens, adopted.block_ids) == (0, ())
    assert adopted.as_new([9]).block_ids == [9]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_prompt_tokens", 1),
        ("extensions", SamplingParams(top_k=4).extensions()),
    ],
)
def test_disagreement_is_named(field, value):
    ranks = [
        [make_row(0, [1, 2], [], slot=6)],
        [],
        [make_row(2, [1, 2], [], slot=6, **{field: value})],
    ]
    with pytest.raises(AdoptionMismatch, match=r"ranks 0 and 2 .* slot 6") as error:
        merge(ranks, 0, [BlockGroup(4)])
    assert (error.value.field, error.value.slot, error.value.ranks) == (field, 6, (0, 2))


def test_tokens_that_disagree_are_named():
    ranks = [[make_row(0, [1, 3], [])], [make_row(1, [1, 2, 3], [])]]
    with pytest.raises(AdoptionMismatch, match="token_ids"):
        merge(ranks, 1, [BlockGroup(4)])


def test_pages_are_split_by_row_and_refused_where_they_do_not_fit():
    rows = [make_row(3, [1, 2], [7]), make_row(3, [], []), make_row(3, [3], [8, 9])]
    reply = AdoptRequestsReply(
        epoch=1,
        seq=1,
        rank=3,
        rows=tuple(entry.row for entry in rows),
        next_slot=0,
        token_ids=np.array([1, 2, 3], "<i4").tobytes(),
        block_ids=np.array([7, 8, 9], "<i4").tobytes(),
    )
    read = list(read_page(reply))
    assert [entry.token_ids.tolist() for entry in read] == [[1, 2], [], [3]]
    assert [entry.block_ids.tolist() for entry in read] == [[7], [], [8, 9]]
    for field in ("token_ids", "block_ids"):
        for column in (b"\0", b"\0" * 4):
            with pytest.raises(BadFrameError):
                list(read_page(msgspec.structs.replace(reply, **{field: column})))


def served(limits, request, tokens):
    """Return a scheduler's request with `tokens` as another driver receives it."""
    scheduler = Scheduler(limits)
    scheduler.add_request(request)
    (new,) = scheduler.schedule().scheduled_new_reqs
    known = np.array([*request.prompt, *tokens], np.int32)
    computed = len(known) - 1
    blocks = tuple(range(1, 1 - (-computed // limits.block_size)))
    return AdoptedRequest(
        new.req_id, known, new.num_prompt_tokens, computed, blocks, new.extensions, new.note, 0
    )


def weights(number):
    return WeightsVersion(number, ContentIdentity(content=bytes(32)))


@pytest.mark.parametrize("room", [8, MAX_NOTED_RUNS])
def test_outputs_say_which_weights_have_sampled_over_updates_and_drivers(monkeypatch, room):
    """room: of a note, for versions."""
    monkeypatch.setattr(admissions, "MAX_NOTED_RUNS", room)
    limits, prompt = make_limits(eos_token_ids=()), [10, 11, 12]
    first = Scheduler(limits)
    first.add_request(GenerationRequest("a", prompt, max_tokens=17))
    for version in range(12):  # an update after each step, which loses all rows
        first.use_weights(weights(version))
        step = first.schedule()
        first.update_from_output(step, StepResult(["a"], [version], weights_version=version))
        first.step_failed([first.schedule()], frozenset("a"))
    first.use_weights(weights(30))
    (new,) = first.schedule().scheduled_new_reqs
    known = np.array([*prompt, *range(12), 50, 51, 52], np.int32)  # three tokens since then
    left = AdoptedRequest("a", known, 3, 0, (), new.extensions, new.note, 0, weights_version=30)
    second = Scheduler(limits)
    assert second.adopt_requests([left]) == []
    step = second.schedule()
    assert second.update_from_output(step, StepResult(["a"], [53], weights_version=30)) == []
    result = StepResult(["a"], [54], weights_version=31)
    (output,) = second.update_from_output(second.schedule(), result)
    known = [(version, 1) for version in range(12)]
    if room == 8:
        known = [(None, 5), *known[5:]]
    runs = [(run.version, run.num_tokens) for run in output.weights_versions]
    assert runs == [*known, (30, 4), (31, 1)]
    assert sum(count for _, count in runs) == len(output.token_ids) == 17


def test_tokens_past_a_request_s_end_are_dropped():
    limits, prompt = make_limits(eos_token_ids=(7,)), np.arange(10, 16, dtype=np.int32)
    for tokens, ends, reason in (
        ([1, 7, 2, 3], [1, 7], "stop"),
        ([1, 2, 3, 4, 7], [1, 2, 3, 4], "length"),
        ([1, 2, 3, 7], [1, 2, 3, 7], "stop"),
    ):
        request = GenerationRequest("a", prompt, max_tokens=4)
        scheduler = Scheduler(limits)
        (done,) = scheduler.adopt_requests([served(limits, request, tokens)])
        assert (done.token_ids, done.finish_reason, done.num_prompt_tokens) == (ends, reason, 6)
        assert not scheduler.has_unfinished_requests()
        assert scheduler.num_free_blocks == limits.num_blocks - 1


def test_request_that_reports_logprobs_begins_again_from_its_prompt():
    limits, prompt = make_limits(), np.arange(10, 16, dtype=np.int32)
    request = GenerationRequest("a", prompt, max_tokens=4, sampling=SamplingParams(logprobs=2))
    scheduler = Scheduler(limits)
    assert scheduler.adopt_requests([served(limits, request, [1, 2])]) == []
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert (new.token_ids.tolist(), new.num_computed_tokens) == (prompt.tolist(), 0)


def test_prefixes_of_adopted_requests_are_found_and_shared():
    limits, prompt = make_limits(), np.arange(10, 22, dtype=np.int32)
    scheduler = Scheduler(limits)
    scheduler.adopt_requests([served(limits, GenerationRequest("a", prompt), [1, 2])])
    scheduler.add_request(GenerationRequest("b", prompt))
    first, second = scheduler.schedule().scheduled_new_reqs
    assert (first.req_id, first.num_computed_tokens, first.block_ids) == ("a", 13, [1, 2, 3, 4])
    assert (second.num_computed_tokens, second.block_ids[:2]) == (8, [1, 2])
    scheduler.abort_request("a")
    assert scheduler.num_free_blocks == limits.num_blocks - 1 - 3
    scheduler.abort_request("b")
    assert scheduler.num_free_blocks == limits.num_blocks - 1


def test_what_cannot_be_adopted_is_refused_and_nothing_is_adopted():
    limits, prompt = make_limits(), np.arange(6, dtype=np.int32)
    good = served(limits, GenerationRequest("good", prompt, max_tokens=4), [1])
    foreign = replace(good, req_id="foreign", note=b"mine")
    long = served(
        make_limits(max_model_len=500, num_blocks=200),
        GenerationRequest("long", prompt, max_tokens=400),
        [1],
    )
    note = msgspec.msgpack.encode((900_000, 0, 0, 0))
    vast = replace(good, req_id="vast", note=note, num_computed_tokens=0, block_ids=[])
    taken = replace(good, req_id="taken")
    for bad, field in ((foreign, "note"), (long, "limit"), (taken, "id")):
        scheduler = Scheduler(limits)
        scheduler.add_request(GenerationRequest("taken", prompt))
        with pytest.raises(RequestError) as error:
            scheduler.adopt_requests([good, bad])
        assert error.value.field == field
        assert scheduler.num_free_blocks == limits.num_blocks - 1
        scheduler.adopt_requests([good])
    # It fits into the cache, but after a preemption no step could admit it with all its blocks.
    scheduler = Scheduler(make_limits(max_model_len=900_000, num_blocks=900_001, block_size=1))
    with pytest.raises(RequestError, match="more than a step can admit") as error:
        scheduler.adopt_requests([vast])
    assert error.value.field == "max_tokens"


def test_note_that_is_too_long_is_refused():
    new = NewRequest("a", np.zeros(3, np.int32), 3, 0, [1], note=b"x" * (MAX_NOTE_BYTES + 1))
    with pytest.raises(InvalidSchedulerOutput, match="at most 65536"):
        SlotTable(2).encode(
            SchedulerOutput({"a": 3}, scheduled_new_reqs=[new]), epoch=1, link=0, seq=1
        )

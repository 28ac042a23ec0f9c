"""What rows report to an adopting driver, against hand-kept requests: results arrive late, and
failed or unfinished steps do not count."""

import copy
from collections import deque

import numpy as np
import pytest
import torch
from row_steps import Admission, NaiveRows, Plan, StepGenerator, encode, int32s, request_state

from rpc_schema.adoption import MAX_PAGE_BYTES, MAX_ROW_BLOCKS
from rpc_schema.errors import InvalidStepError
from tests.support.exhaustive import seeds
from worker_client.requests import SamplingParams
from worker_daemon.runner import adoption, token_history
from worker_daemon.runner.adoption import describe_requests
from worker_daemon.runner.input_batch import InputBuilder
from worker_daemon.runner.request_state import MAX_TAKEN_BACK
from worker_daemon.runner.row_tables import RowTables, TorchRowKernels
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.runner.staging import HostStaging
from worker_daemon.runner.step_layout import ExactShapes
from worker_daemon.runner.token_history import Result, SampledTokens, TokenHistory
from worker_daemon.runner.token_versions import TokenVersions

CPU = torch.device("cpu")
MOST_LATE = 5


def make_builder(state):
    tables = RowTables(state.limits, CPU, TorchRowKernels())
    return InputBuilder(state, tables, HostStaging(), ExactShapes())


def draw_limits(rng):
    max_num_seqs = int(rng.integers(1, 10))
    return StepLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + int(rng.integers(8, 40)),
        max_model_len=int(rng.integers(2, 60)),
        vocab_size=int(rng.integers(5, 1000)),
        block_size=2 ** int(rng.integers(0, 5)),
        num_blocks=int(rng.integers(2, 60)),
    )


def split(page):
    """[(row, its tokens, its blocks)]"""
    tokens, blocks = np.frombuffer(page.token_ids, "<i4"), np.frombuffer(page.block_ids, "<i4")
    told = []
    for row in page.rows:
        told.append((row, tokens[: row.num_tokens].tolist(), blocks[: row.num_blocks].tolist()))
        tokens, blocks = tokens[row.num_tokens :], blocks[row.num_blocks :]
    assert tokens.size == blocks.size == 0
    return told


class Rank:
    """Rows and their history, with every state of the naive requests since the last result."""

    def __init__(self, limits, history):
        self.rows = NaiveRows(limits)
        self.state = request_state(limits)
        self.builder = make_builder(self.state)
        self.history = history
        self.late = deque()
        self.good = {}
        self.came_with = {}
        """Of each slot, its last admission: step, count, computed tokens, their blocks."""

    def run(self, seq, plan, rng):
        if plan.keep is not None:  # a driver sends that once it knows what became of all before
            self.deliver(0)
        message, arrays = encode(seq, plan, self.rows)
        ran = self.rows.apply(seq, plan)
        for new in plan.admissions:
            held = [block_id for slot, block_id in plan.blocks if slot == new.slot]
            held = held[: -(-new.computed // self.rows.limits.block_size)]
            fits = len(held) * self.rows.limits.block_size >= new.computed
            computed, held = (new.computed, held) if fits else (0, [])
            self.came_with[new.slot] = (seq, self.rows.admissions[new.slot], computed, held)
        step = self.state.apply(message, arrays)
        inputs = self.builder.build(step)
        self.builder.tables.update(inputs.columns)
        tokens = rng.integers(0, 1000, inputs.sample_rows.slots_np.size).tolist()
        slots = [slot for slot, (_, _, samples) in ran.items() if samples]
        for slot, token in zip(slots, tokens, strict=True):
            self.rows.requests[slot].sampled.append(token)
        self.late.append((seq, inputs.sample_rows.sampled, tokens, self.snapshot()))

    def snapshot(self):
        admissions = self.rows.admissions
        return {
            slot: (admissions[slot], r.computed, list(r.blocks), len(r.known) + len(r.sampled))
            for slot, r in self.rows.requests.items()
        }

    def deliver(self, left):
        while len(self.late) > left:
            seq, sampled, tokens, self.good = self.late.popleft()
            if tokens:
                self.history.unrecorded.append(
                    Result(1, seq, sampled, np.array(tokens, "<i4").tobytes())
                )
            else:
                self.history.unrecorded.append(Result(1, seq))

    def told(self, state):
        self.builder.tables.restore(state.take_back(self.history.has_confirmed))
        return split(
            describe_requests(state, self.builder, self.history, 0, 0, TokenVersions(), {})
        )

    def expected(self, slot, good, first_bad):
        """(computed tokens, blocks): those of the last good step, or those that the first bad one
        admitted the row with."""
        count, computed, held, _ = good.get(slot, (0, 0, [], 0))
        if count == self.rows.admissions[slot]:
            return computed if held else 0, held
        seq, count, computed, held = self.came_with[slot]
        assert count == self.rows.admissions[slot]
        return (computed, held) if seq == first_bad else (0, [])

    def check(self, told):
        assert [row.slot for row, _, _ in told] == sorted(self.rows.requests)
        for row, tokens, blocks in told:
            request = self.rows.requests[row.slot]
            count, _, _, length = self.good.get(row.slot, (0, 0, [], 0))
            if count != self.rows.admissions[row.slot]:
                length = len(request.known)
            assert tokens == (request.known + request.sampled)[:length]
            first_bad = self.late[0][0] if self.late else None
            expected = self.expected(row.slot, self.good, first_bad)
            assert (row.num_computed_tokens, blocks) == expected
            assert row.num_prompt_tokens == request.num_prompt
            assert row.extensions == request.sampling.extensions()


@pytest.mark.parametrize("seed", seeds(2, of=4))
def test_rows_are_told_as_the_last_result_left_them(seed):
    rng = np.random.default_rng(seed)
    limits = draw_limits(rng)
    rank = Rank(limits, SampledTokens(limits.max_num_seqs + 1, limits.max_model_len))
    steps = StepGenerator(rng, limits)
    num_late = 0
    for seq in range(1, 180):
        plan = steps.draw(rank.rows)
        plan.deferred = []
        rank.run(seq, plan, rng)
        rank.deliver(int(rng.integers(0, MOST_LATE)))
        if rng.random() < 0.4:
            state = copy.deepcopy(rank.state)
            rank.check(rank.told(state))
            num_late += len(rank.late) > 0
            again = split(
                describe_requests(state, rank.builder, rank.history, 0, 0, TokenVersions(), {})
            )
            assert again == rank.told(state)
    assert num_late > 10


@pytest.mark.parametrize("seed", range(2))
def test_failed_step_and_those_behind_it_do_not_count_on_ranks_without_results(seed):
    rng = np.random.default_rng(50 + seed)
    limits = draw_limits(rng)
    rank, steps = Rank(limits, TokenHistory()), StepGenerator(rng, limits)
    for seq in range(1, 120):
        rank.run(seq, draw_ordinary(steps, rank.rows), rng)
        if rng.random() < 0.3:
            failing = copy.deepcopy(rank)
            before = failing.late[-2][3] if len(failing.late) > 1 else {}
            failing.state.mark_failed(seq)
            for later in range(seq + 1, seq + int(rng.integers(1, 5))):
                failing.run(later, draw_ordinary(steps, failing.rows), rng)
            for row, tokens, blocks in failing.told(failing.state):
                expected = failing.expected(row.slot, before, seq)
                assert (row.num_computed_tokens, blocks) == expected
                assert tokens == failing.rows.requests[row.slot].known
            assert failing.state.has_failed


def draw_ordinary(steps, rows):
    """A step without deferral and full resynchronisation."""
    while True:
        plan = steps.draw(rows)
        plan.deferred = []
        if plan.keep is None:
            return plan


def test_rows_without_a_request_stay_free_when_steps_are_taken_back():
    limits = StepLimits(4, 40, 32, 50, 4, 30)
    rank, rng = Rank(limits, SampledTokens(5, 32)), np.random.default_rng(0)
    rank.run(1, admit(0, 5, [3, 4]), rng)
    rank.run(2, Plan(scheduled={0: 1}), rng)
    rank.run(3, Plan(finished=[0]), rng)
    assert rank.told(rank.state) == []
    message, arrays = encode(4, Plan(blocks=[(0, 8)]), rank.rows)
    with pytest.raises(InvalidStepError, match="new_block_slots"):
        copy.deepcopy(rank.state).apply(message, arrays)
    message, arrays = encode(4, admit(0, 5, [6, 7]), rank.rows)
    assert rank.state.apply(message, arrays).starts.tolist() == [0]
    rank.builder.tables.update(rank.builder.build(rank.state.dummy_step(5)).columns)
    ((_, tokens, blocks),) = split(
        describe_requests(rank.state, rank.builder, rank.history, 0, 0, TokenVersions(), {})
    )
    assert (tokens, len(blocks)) == ([0] * 5, 2)


def test_more_late_steps_than_are_remembered_leave_no_kv_to_vouch_for():
    limits = StepLimits(2, 40, 400, 50, 4, 400)
    rank, rng = Rank(limits, SampledTokens(3, 400)), np.random.default_rng(0)
    rank.run(1, admit(1, 4, [1]), rng)
    rank.deliver(0)
    for seq in range(2, MAX_TAKEN_BACK + 3):
        needs_block = rank.rows.requests[1].computed % 4 == 0
        rank.run(seq, Plan(scheduled={1: 1}, blocks=[(1, seq)] if needs_block else []), rng)
    ((row, tokens, blocks),) = rank.told(rank.state)
    assert (row.num_computed_tokens, blocks) == (0, [])
    assert tokens == (rank.rows.requests[1].known + rank.rows.requests[1].sampled)[:5]


def admit(slot, num_tokens, blocks, computed=0, schedule=None):
    new = Admission(slot, [0] * num_tokens, num_tokens, computed, SamplingParams())
    scheduled = num_tokens - computed if schedule is None else schedule
    return Plan(admissions=[new], blocks=[(slot, b) for b in blocks], scheduled={slot: scheduled})


def test_row_keeps_the_kv_it_came_with_though_its_step_never_reached_the_device():
    limits = StepLimits(3, 40, 32, 50, 4, 30)
    rank, rng = Rank(limits, SampledTokens(4, 32)), np.random.default_rng(0)
    rank.run(1, admit(1, 6, [2, 3]), rng)
    rank.run(2, Plan(finished=[1]), rng)
    rank.deliver(0)
    plan = admit(1, 6, [5, 6, 7], computed=5)
    plan.admissions[0].sampling = SamplingParams(temperature=0.5, seed=8)
    plan.admissions.append(Admission(2, [0] * 9, 9, 8, SamplingParams()))
    plan.blocks.append((2, 9))  # too few for its tokens
    for seq, step in ((3, plan), (4, admit(0, 6, [8, 9], computed=5))):
        rank.state.apply(*encode(seq, step, rank.rows))
        rank.rows.apply(seq, step)
    rank.state.mark_failed(3)
    told = {row.slot: (row, blocks) for row, _, blocks in rank.told(rank.state)}
    assert {slot: blocks for slot, (_, blocks) in told.items()} == {0: [], 1: [5, 6], 2: []}
    assert [told[slot][0].num_computed_tokens for slot in range(3)] == [0, 5, 0]
    assert SamplingParams.of(told[1][0].extensions).seed == 8
    assert rank.told(rank.state) == [(row, [0] * row.num_tokens, b) for row, b in told.values()]


def test_kv_that_a_refused_step_was_to_compute_is_not_vouched_for():
    limits = StepLimits(2, 40, 32, 50, 4, 30)
    rank, rng = Rank(limits, TokenHistory()), np.random.default_rng(0)
    rank.run(1, admit(1, 6, [2, 3]), rng)
    with pytest.raises(InvalidStepError):
        rank.state.apply(*encode(2, admit(1, 6, [4, 5]), rank.rows))
    rank.state.apply(*encode(3, admit(0, 6, [2, 4], computed=4), rank.rows))
    told = {row.slot: (row.num_computed_tokens, b) for row, _, b in rank.told(rank.state)}
    assert told == {0: (0, []), 1: (6, [2, 3])}


def test_tokens_that_wait_for_their_sampling_are_not_told():
    limits = StepLimits(2, 40, 32, 50, 4, 30)
    rank = Rank(limits, SampledTokens(3, 32))
    plan = admit(1, 6, [2, 3])
    plan.deferred = [1]
    message, arrays = encode(1, plan, rank.rows)
    rank.rows.apply(1, plan)
    inputs = rank.builder.build(rank.state.apply(message, arrays))
    rank.builder.tables.update(inputs.columns)
    rank.history.unrecorded.append(Result(1, 1))
    ((row, tokens, _),) = rank.told(copy.deepcopy(rank.state))
    assert (tokens, row.num_computed_tokens) == ([0] * 6, 6)
    rank.state.take_unsampled(1, None)
    rank.history.unrecorded.append(Result(1, 2, inputs.sample_rows.sampled, int32s(9)))
    ((row, tokens, _),) = rank.told(rank.state)
    assert (tokens, row.num_computed_tokens) == ([0] * 6 + [9], 6)


def test_long_rows_come_in_pages():
    length, count = MAX_PAGE_BYTES // 16, 9
    limits = StepLimits(count, count, length, 50, 16, 30)
    state = request_state(limits)
    builder = make_builder(state)
    rng = np.random.default_rng(3)
    plan = Plan(
        admissions=[
            Admission(slot, rng.integers(0, 50, length - slot).tolist(), 1, 0, SamplingParams())
            for slot in range(count)
        ]
    )
    message, arrays = encode(1, plan, NaiveRows(limits))
    builder.build(state.apply(message, arrays))
    first_slot, told = 0, []
    for _ in range(count):
        page = describe_requests(state, builder, TokenHistory(), first_slot, 0, TokenVersions(), {})
        assert len(page.token_ids) <= MAX_PAGE_BYTES
        assert len(page.rows) == min(3, count - first_slot)
        told += split(page)
        first_slot = page.next_slot
        if not first_slot:
            break
    assert [(row.slot, tokens) for row, tokens, _ in told] == [
        (new.slot, new.tokens) for new in plan.admissions
    ]
    assert (
        describe_requests(state, builder, TokenHistory(), count, 0, TokenVersions(), {}).rows == ()
    )


def test_row_of_more_than_a_reply_holds_is_told_in_part(monkeypatch):
    monkeypatch.setattr(adoption, "MAX_ROW_TOKENS", 10)
    monkeypatch.setattr(adoption, "MAX_ROW_BLOCKS", 2)
    limits = StepLimits(2, 40, 32, 50, 4, 30)
    rank, rng = Rank(limits, SampledTokens(3, 32)), np.random.default_rng(0)
    rank.run(1, admit(1, 12, [2, 3, 4]), rng)
    rank.deliver(0)
    ((row, tokens, blocks),) = rank.told(rank.state)
    assert (tokens, blocks, row.num_computed_tokens) == ([0] * 10, [], 0)
    assert MAX_ROW_BLOCKS > 2


def test_history_keeps_a_slot_s_requests_apart():
    rng = np.random.default_rng(8)
    history, truth, generation = SampledTokens(4, 50), {}, [0] * 4
    for seq in range(400):
        slots = np.flatnonzero(rng.random(4) < 0.6)
        for slot in slots.tolist():
            if slot not in truth or truth[slot][0] + len(truth[slot][1]) > 50 or rng.random() < 0.1:
                generation[slot] += 1
                truth[slot] = (int(rng.integers(1, 40)), [])
        positions = np.array([truth[s][0] + len(truth[s][1]) for s in slots], np.int32)
        tokens = rng.integers(0, 99, slots.size).tolist()
        for slot, token in zip(slots.tolist(), tokens, strict=True):
            truth[slot][1].append(token)
        columns = token_history.Sampled(slots, np.array(generation)[slots], positions)
        history.unrecorded.append(Result(7, seq, columns, np.array(tokens, "<i4").tobytes()))
        if rng.random() < 0.6:
            continue  # so that several results are recorded at once
        assert history.has_confirmed(7, seq) and not history.has_confirmed(8, seq)
        for slot, (known, sampled) in truth.items():
            end = history.known_to(slot, generation[slot], known)
            assert end == known + len(sampled)
            assert history.between(slot, known, end).tolist() == sampled
            assert history.known_to(slot, generation[slot] + 1, 3) == 3


def test_a_request_with_a_state_begins_at_its_first_token_and_is_adopted_without_it():
    """Another rank may not have taken the last step: nobody could take the state back."""
    tokens = [3, 1, 4, 1, 5, 9]
    rank = Rank(StepLimits(4, 40, 32, 50, 4, 30, keeps_state=True), SampledTokens(4, 32))
    plan = Plan(blocks=[(0, 1), (0, 2)], scheduled={0: 2})
    plan.admissions = [Admission(0, tokens, 6, 4, SamplingParams())]
    with pytest.raises(InvalidStepError) as refused:
        rank.state.apply(*encode(1, plan, rank.rows))
    assert refused.value.field.endswith("num_computed_tokens")
    assert not rank.state.num_requests()
    rank.state.drop_all()
    plan.scheduled = {0: 6}
    plan.admissions = [Admission(0, tokens, 6, 0, SamplingParams())]
    rank.run(2, plan, np.random.default_rng(0))
    rank.deliver(0)
    ((row, told, blocks),) = rank.told(rank.state)
    assert (row.num_computed_tokens, row.num_blocks, blocks) == (0, 0, [])
    assert len(told) == 7 and told[:6] == tokens


def test_a_request_with_checkpoints_is_adopted_with_its_blocks():
    limits = StepLimits(4, 40, 32, 50, 4, 30, keeps_state=True, checkpoint_blocks=1)
    rank = Rank(limits, SampledTokens(4, 32))
    plan = Plan(blocks=[(0, 1), (0, 2)], scheduled={0: 4})
    plan.admissions = [Admission(0, [3, 1, 4, 1, 5, 9], 6, 0, SamplingParams())]
    rank.run(1, plan, np.random.default_rng(0))
    rank.deliver(0)
    ((row, _, blocks),) = rank.told(rank.state)
    assert (row.num_computed_tokens, row.num_blocks, blocks) == (4, 2, [1, 2])

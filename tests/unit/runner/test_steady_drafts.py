"""Steps whose rows keep their numbers of drafts take a shorter way than others. Random steps, some
of them invalid, must have the same results, refusals and rows as if each took the long way."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec.structs import replace as changed
from row_steps import bitmap, int32s, uint16s
from test_request_state import flatten

from rpc_schema.errors import InvalidStepError
from rpc_schema.kv_cache import BlockGroup
from rpc_schema.sampling import RandomSampling
from rpc_schema.step import ExecuteModel, NewRequestData
from tests.support.exhaustive import seeds
from worker_daemon.runner.input_batch import InputBuilder
from worker_daemon.runner.parts.interface import PartContext, StepPart
from worker_daemon.runner.parts.step_parts import StepParts
from worker_daemon.runner.request_state import RequestState
from worker_daemon.runner.row_tables import RowTables, TorchRowKernels
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.runner.staging import HostStaging
from worker_daemon.runner.step_layout import StepLadder, decode_sizes, drafted_counts, mixed_plans

CPU = torch.device("cpu")
LIMITS = StepLimits(7, 60, 70, 50, 4, 200, max_samples_per_seq=2, max_drafts=3, makes_drafts=True)
FORMS = {
    "device": LIMITS,
    "brought": replace(LIMITS, makes_drafts=False),
    "groups": replace(LIMITS, groups=(BlockGroup(4, None), BlockGroup(8, 16))),
}


class Refusing(StepPart):
    request_extension = RandomSampling
    may_refuse = True


def new_state(limits):
    return RequestState(limits, StepParts([Refusing(None)], None, PartContext(limits, *[None] * 4)))


def new_builder(state):
    limits = state.limits
    longest, most = limits.max_model_len, limits.max_num_batched_tokens
    mixed = mixed_plans(
        limits.max_num_seqs, most, longest, limits.num_groups, (16, 32), limits.max_num_samples
    )
    ladder = StepLadder(
        decode_sizes(limits.max_num_seqs),
        lambda size: [longest // 2, longest],
        mixed,
        limits.num_groups,
        drafts=drafted_counts(limits.max_drafts),
        max_num_tokens=most,
    )
    return InputBuilder(state, RowTables(limits, CPU, TorchRowKernels()), HostStaging(), ladder)


class Drawn:
    """Draws steps from the counts of the rows: most go on as the last one of their micro-batch."""

    def __init__(self, rng, state):
        self.rng, self.state, self.limits = rng, state, state.limits
        self.seq = 0
        self.refusals = float(rng.choice([0.0, 0.1, 0.5]))
        """How often a row's earlier drafts were refused."""
        self.num_turns = int(rng.integers(1, 3))
        self.turns = [{} for _ in range(self.num_turns)]
        """{slot: drafts, or None for a chunk of its prompt} of each micro-batch's last step."""

    def message(self):
        rng, counts = self.rng, self.state.counts
        self.seq += 1
        live = np.flatnonzero(counts.live[:-1]).tolist()
        turn = self.seq % self.num_turns
        fields, arrays, rows = {}, [], self.turns[turn]
        rows = {s: k for s, k in rows.items() if s in live and k is not None}
        if not rows or rng.random() < 0.08:
            rows, fields, arrays = self._others(live, turn)
        self.turns[turn] = rows
        return self._schedule(rows, fields), arrays

    def _others(self, live, turn):
        """Other rows, or other numbers of drafts, and perhaps a new request or an end."""
        rng, counts, fields, arrays = self.rng, self.state.counts, {}, []
        ends = counts.num_computed >= self.limits.max_model_len - 4
        finished = [s for s in live if ends[s] or rng.random() < 0.05]
        own = [s for s in live if s % self.num_turns == turn or rng.random() < 0.1]
        own = [s for s in own if s not in finished]
        drafts = int(rng.integers(0, 4))
        rows = {s: drafts if rng.random() < 0.7 else int(rng.integers(0, 4)) for s in own}
        left = counts.num_tokens - counts.num_computed
        rows |= {s: None for s in own if left[s] > 1}
        if finished:
            fields["finished"] = uint16s(*finished)
        free = range(turn, self.limits.max_num_seqs, self.num_turns)
        free = [s for s in free if s not in live]
        if free and rng.random() < 0.5:
            slot, count = int(rng.choice(free)), int(rng.integers(1, 12))
            extensions = (RandomSampling(),) if slot == 5 and rng.random() < 0.5 else ()
            new = NewRequestData(
                slot=slot,
                req_id=f"r{self.seq}",
                num_tokens=count,
                num_prompt_tokens=count,
                num_computed_tokens=0,
                extensions=extensions,
            )
            fields["scheduled_new_reqs"] = (new,)
            arrays = [int32s(*rng.integers(0, 50, count))]
            rows[slot] = None
        elif rng.random() < 0.1:
            kept = [s for s in live if rng.random() < 0.8 and not counts.unsampled[s]]
            columns = counts.num_computed, counts.num_tokens, *counts.blocks_by_group
            table = [v for s in kept for v in (s, *(int(c[s]) for c in columns))]
            fields, rows = {"resync": int32s(*table)}, {s: k for s, k in rows.items() if s in kept}
        if rows and rng.random() < 0.15:
            fields["deferred"] = bitmap([s for s in rows if rng.random() < 0.7] or [*rows])
        if rng.random() < 0.1:
            several = [s for s, k in rows.items() if k is None]
            fields["num_samples"] = int32s(*(v for s in several for v in (s, 2)))
        return rows, fields, arrays

    def _schedule(self, rows, fields):
        """The message for these rows, with what it says of earlier drafts."""
        rng, counts = self.rng, self.state.counts
        new = {r.slot: r for r in fields.get("scheduled_new_reqs", ())}
        tokens, drafts, blocks, lowered = {}, {}, [], {}
        for slot, number in rows.items():
            bound = counts.corrected[slot] >= 0 and slot not in new
            most = int(counts.num_tokens[slot]) - int(self.state.num_known_tokens[slot])
            most = most + 1 if rng.random() < 0.05 else min(3, most)
            if bound and most > 0 and rng.random() < self.refusals:
                lowered[slot] = int(rng.integers(1, most + 1))
            start, known = int(counts.num_computed[slot]), int(counts.num_tokens[slot])
            held = counts.blocks_by_group[:, slot].tolist()
            if slot in new:
                start, known, held = 0, new[slot].num_tokens, [0] * len(held)
            start -= lowered.get(slot, 0)
            known -= lowered.get(slot, 0)
            tokens[slot] = int(rng.integers(1, known - start + 1)) if number is None else 1
            if number:
                drafts[slot] = number
                tokens[slot] += number
            for group, (has, form) in enumerate(zip(held, self.limits.block_groups, strict=True)):
                missing = -(-(start + tokens[slot]) // form.block_size) - has
                blocks += [(slot, group)] * (missing if rng.random() < 0.98 else missing - 1)
        settled = [s for s in rows if s not in new and counts.corrected[s] > -2]
        if rng.random() < 0.7:
            settled = []
        elif rng.random() < 0.4:
            settled = [s for s in settled if rng.random() < 0.5]
        live = np.flatnonzero(counts.live).tolist()
        if rng.random() < 0.05:  # a row that is exact, or of another micro-batch
            lowered.setdefault(int(rng.choice(live or [0])), 1)
        if rng.random() < 0.05:
            settled = sorted({*settled, int(rng.choice(list(rows) or [0]))})
        if drafts and (not self.limits.makes_drafts or rng.random() < 0.3):
            low = -1 if self.limits.makes_drafts else 0
            own = rng.integers(low, 50, sum(drafts.values()))
            fields["draft_token_ids"] = int32s(*own)
        pairs = [v for s in sorted(tokens) if tokens[s] != 1 for v in (s, tokens[s])]
        if rng.random() < 0.5:
            lowered = dict(reversed(lowered.items()))
        if self.limits.num_groups > 1:
            fields["new_block_groups"] = bytes(group for _, group in blocks)
        return ExecuteModel(
            epoch=1,
            link=1,
            seq=self.seq,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled=bitmap(sorted(rows)),
            num_scheduled_tokens=int32s(*pairs),
            new_block_slots=uint16s(*(slot for slot, _ in blocks)),
            new_block_ids=int32s(*rng.integers(1, 200, len(blocks))),
            num_drafts=int32s(*(v for s in sorted(drafts) for v in (s, drafts[s]))),
            corrections=int32s(*(v for pair in lowered.items() for v in pair)),
            settled=bitmap(settled) if settled else b"",
            skip_drafts=bool(rng.random() < 0.1),
            **fields,
        )

    def broken(self, message):
        """The message with one or two faults, or values that may be one."""
        for _ in range(int(self.rng.integers(1, 3))):
            message = self._fault(message)
        return message

    def _fault(self, message):
        rng = self.rng
        numbers = ("corrections", "draft_token_ids", "num_drafts", "num_scheduled_tokens")
        field = str(rng.choice([*numbers, "new_block_ids", "new_block_slots", "settled", "total"]))
        if field == "total":
            total = max(0, message.total_num_scheduled_tokens + int(rng.integers(-1, 2)))
            return changed(message, total_num_scheduled_tokens=total)
        raw, kind = bytearray(getattr(message, field)), rng.integers(0, 4)
        if field == "settled":
            raw = bytearray(bitmap([int(rng.integers(0, 12))]) if kind else b"\0\0")
        elif kind == 0 and raw:
            del raw[-int(rng.integers(1, 5)) :]
        elif kind == 1 and len(raw) >= 8:
            raw += raw[:8]
        elif kind == 2 and len(raw) >= 4:
            width = 2 if field == "new_block_slots" else 4
            at = int(rng.integers(0, len(raw) // width)) * width
            value = int(rng.choice([-2, -1, 0, 1, 4, 8, 49, 50, 200, 2**31 - 1]))
            value = abs(value) % 2**16 if width == 2 else value
            raw[at : at + width] = value.to_bytes(width, "little", signed=width == 4)
        else:
            raw += int32s(int(rng.integers(-1, 9)), int(rng.integers(0, 4)))
        return changed(message, **{field: bytes(raw)})


def outcome(state, message, arrays):
    """(the step, None) or (None, what its refusal says)."""
    try:
        return state.apply(message, arrays), None
    except InvalidStepError as error:
        return None, (error.field, str(error.value), error.fix, str(error))


def assert_same_step(own, other):
    for name in own._fields:
        if name not in ("steady", "new_requests"):
            pair = (flatten(getattr(own, name)), flatten(getattr(other, name)))
            assert pair[0] == pair[1], name


def assert_same_rows(own, other):
    for name in ("known_tokens", "generation", "num_known_tokens", "req_ids"):
        assert flatten(getattr(own, name)) == flatten(getattr(other, name)), name
    assert own.num_held_blocks() == other.num_held_blocks()
    assert flatten(own.counts) == flatten(other.counts)
    assert own.has_failed == other.has_failed
    for name in ("_written_at", "_noted_at"):
        assert flatten(getattr(own.contents, name)) == flatten(getattr(other.contents, name)), name


def assert_same_inputs(own, other):
    assert own.plan == other.plan and own.num_tokens == other.num_tokens
    for place, (column, expected) in enumerate(
        zip(own.columns.every, other.columns.every, strict=True)
    ):
        assert column.tolist() == expected.tolist(), place
    assert own.seq_lens_np.tolist() == other.seq_lens_np.tolist()
    assert own.reads.tolist() == other.reads.tolist()
    rows, expected = own.sample_rows, other.sample_rows
    for name in ("slots_np", "generations", "positions_np", "given", "num_newer", "sampled"):
        assert flatten(getattr(rows, name)) == flatten(getattr(expected, name)), name
    for name in ("used", "bitmap", "are_bounds", "has_drafts"):
        assert getattr(rows, name) == getattr(expected, name), name


def take_the_long_way(state):
    """Let the next step be checked whole: its rows have their counts, and there are no batches."""
    assert state.counts is state._counts
    state._steady = {}


class Twins:
    """Two equal states: one takes the shorter way where it can, the other never."""

    def __init__(self, rng, limits):
        self.rng = rng
        self.steady, self.whole = new_state(limits), new_state(limits)
        self.builder = new_builder(self.steady)
        self.last = []
        """The steady batches of the last two steps."""
        self.deferred = []
        self.num_steady = self.num_drafted = self.num_refused = 0

    def apply(self, message, arrays):
        """Apply a step to both; return False if both refuse it."""
        take_the_long_way(self.whole)
        own, refusal = outcome(self.steady, message, arrays)
        other, expected = outcome(self.whole, message, arrays)
        assert refusal == expected
        if own is None:
            self.num_refused += 1
            return False
        assert_same_step(own, other)
        assert_same_inputs(self.builder.build(own), new_builder(self.whole).build(other))
        goes_on = own.steady is not None and own.steady in self.last
        self.last = [own.steady, *self.last[:1]]
        self.num_steady += goes_on
        self.num_drafted += goes_on and own.drafts is not None
        if message.resync is not None:
            self.deferred.clear()
        if message.deferred is not None:
            self.deferred.append(message.seq)
        return True

    def between(self, seq):
        """What may happen between two steps."""
        both = self.steady, self.whole
        for waiting in [s for s in self.deferred if self.rng.random() < 0.7]:
            taken = [flatten(state.take_unsampled(waiting, None)) for state in both]
            assert taken[0] == taken[1]
            self.deferred.remove(waiting)
        if self.rng.random() < 0.1:
            assert_same_rows(*both)
        if self.rng.random() < 0.02:
            good = seq - int(self.rng.integers(0, 6))
            kept = [flatten(state.take_back(lambda _, at: at <= good)) for state in both]
            assert kept[0] == kept[1]
            assert_same_rows(*both)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", seeds(1, of=20))
def test_steady_steps_equal_those_that_are_checked_whole(form, number):
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    twins = Twins(rng, FORMS[form])
    drawn = Drawn(rng, twins.whole)
    for seq in range(1, 400):
        message, arrays = drawn.message()
        is_broken = rng.random() < 0.15 and twins.apply(drawn.broken(message), arrays)
        if not (is_broken or twins.apply(message, arrays)):
            drawn.turns[seq % drawn.num_turns] = {}
        twins.between(seq)
    assert_same_rows(twins.steady, twins.whole)
    assert min(twins.num_steady, twins.num_drafted, twins.num_refused) > 20


def admitted(state, slots):
    """Requests of four tokens, with all the blocks that they can have."""
    new = [
        NewRequestData(
            slot=s, req_id=f"r{s}", num_tokens=4, num_prompt_tokens=4, num_computed_tokens=0
        )
        for s in slots
    ]
    most = state.limits.max_blocks_per_seq
    message = ExecuteModel(
        epoch=1,
        link=1,
        seq=1,
        total_num_scheduled_tokens=4 * len(new),
        scheduled=bitmap(slots),
        num_scheduled_tokens=int32s(*(v for s in slots for v in (s, 4))),
        scheduled_new_reqs=tuple(new),
        new_block_slots=uint16s(*np.repeat(slots, most)),
        new_block_ids=int32s(*[1] * most * len(new)),
    )
    return state.apply(message, [int32s(*[1] * 4 * len(new))])


def drafted(seq, drafts, **fields):
    """A step of these rows: {slot: drafts}."""
    return ExecuteModel(
        epoch=1,
        link=1,
        seq=seq,
        total_num_scheduled_tokens=sum(1 + count for count in drafts.values()),
        scheduled=bitmap([*drafts]),
        num_scheduled_tokens=int32s(*(v for s, k in drafts.items() if k for v in (s, 1 + k))),
        num_drafts=int32s(*(v for s, k in drafts.items() if k for v in (s, k))),
        **fields,
    )


def test_rows_that_keep_their_numbers_of_drafts_are_steady_from_their_second_step_on():
    state, drafts = new_state(LIMITS), {1: 3, 2: 0, 5: 1}
    admitted(state, [*drafts])
    batch = state.apply(drafted(2, drafts), []).steady
    notes = [
        {},
        {"draft_token_ids": int32s(7, -1, 8, 9), "skip_drafts": True},
        {"corrections": int32s(5, 1, 1, 3)},
        {"corrections": int32s(1, 2), "settled": bitmap([1, 5])},
        {"settled": bitmap([1])},
        {},
    ]
    steps = [state.apply(drafted(3 + at, drafts, **each), []) for at, each in enumerate(notes)]
    assert all(step.steady is batch for step in steps) and batch is not None
    assert [step.starts.tolist() for step in steps] == [
        [8, 5, 6],
        [12, 6, 8],
        [13, 7, 9],
        [15, 8, 11],
        [19, 9, 13],
        [23, 10, 15],
    ]
    assert [step.corrections.tolist() for step in steps] == [
        [0, -1, 0],
        [0, -1, 0],
        [3, -1, 1],
        [-1, -1, -1],
        [-1, -1, 0],
        [0, -1, 0],
    ]
    fewer = drafts | {5: 0}
    other = state.apply(drafted(9, fewer), [])
    assert other.steady is not batch
    settled = state.apply(drafted(10, fewer, settled=bitmap([5])), [])
    assert settled.steady is other.steady and settled.corrections.tolist() == [0, -1, -1]
    plain = state.apply(drafted(11, dict.fromkeys(drafts, 0)), [])
    exact = state.apply(drafted(12, dict.fromkeys(drafts, 0), settled=bitmap([1])), [])
    assert plain.corrections is not None and exact.corrections is None
    assert exact.steady is not plain.steady
    assert state.apply(drafted(13, dict.fromkeys(drafts, 0)), []).steady is exact.steady


def test_refusals_in_every_step_let_micro_batches_be_steady():
    state = new_state(LIMITS)
    admitted(state, [0, 1, 2, 3])
    turns, last = [{0: 3, 2: 2}, {1: 1, 3: 3}], {}
    for seq in range(2, 12):
        rows = turns[seq % 2]
        fields = {"corrections": int32s(*(v for s in rows for v in (s, 1)))} if seq > 3 else {}
        step = state.apply(drafted(seq, rows, **fields), [])
        if seq > 3:
            assert step.steady is last[seq % 2] is not None
        last[seq % 2] = step.steady
    counts = state.counts
    assert counts.num_computed[:4].tolist() == [20, 10, 15, 20]


def test_rows_whose_feature_refuses_tokens_are_not_settled():
    """Neither with their admission nor in steps that go on beside rows that had drafts."""
    state = new_state(LIMITS)
    admitted(state, [1])
    new = NewRequestData(
        slot=0,
        req_id="r0",
        num_tokens=1,
        num_prompt_tokens=1,
        num_computed_tokens=0,
        extensions=(RandomSampling(),),
    )
    blocks = {"new_block_slots": uint16s(0, 0), "new_block_ids": int32s(1, 2)}
    first = drafted(2, {0: 0}, scheduled_new_reqs=(new,), **blocks)
    with pytest.raises(InvalidStepError, match="refuses tokens") as refused:
        state.apply(changed(first, settled=bitmap([0])), [int32s(3)])
    assert refused.value.field == "settled"
    state.parts.admit(state.apply(first, [int32s(3)]).new_requests)
    state.apply(drafted(3, {1: 2}), [])
    for seq in range(4, 7):
        both = {0: 0, 1: 0}
        assert state.apply(drafted(seq, both), []).corrections.tolist() == [0, 0]
        with pytest.raises(InvalidStepError, match="refuses tokens"):
            state.apply(drafted(seq, both, settled=bitmap([0])), [])


def test_a_row_that_samples_again_what_it_has_goes_on_with_one_token():
    state = new_state(LIMITS)
    admitted(state, [0])
    for seq in (2, 3):
        state.apply(drafted(seq, {0: 0}), [])
    state.take_back(lambda _, seq: seq < 3)
    two = changed(
        drafted(4, {0: 0}), total_num_scheduled_tokens=2, num_scheduled_tokens=int32s(0, 2)
    )
    assert state.apply(changed(two, num_samples=int32s(0, 2)), []).num_samples.tolist() == [2]
    with pytest.raises(InvalidStepError, match="7 of 8 tokens"):
        state.apply(two, [])

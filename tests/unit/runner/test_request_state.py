"""Validation of steps against a plain dict: every valid step gives the same rows, and every broken
one is refused with the field's name and changes nothing."""

import copy
from dataclasses import fields, is_dataclass

import numpy as np
import pytest
from msgspec.structs import replace
from row_steps import (
    Admission,
    NaiveRows,
    Plan,
    StepGenerator,
    bitmap,
    encode,
    int32s,
    request_state,
    uint16s,
)

from rpc_schema.errors import InvalidStepError, PrecededByError
from rpc_schema.step import ExecuteModel
from tests.support.exhaustive import seeds
from worker_client.requests import SamplingParams
from worker_daemon.runner.draft_gaps import DraftGaps
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.runner.step_checker import MAX_UNSAMPLED_STEPS

LIMITS = StepLimits(
    max_num_seqs=9,
    max_num_batched_tokens=40,
    max_model_len=23,
    vocab_size=19,
    block_size=4,
    num_blocks=30,
)
MEMOS = {"_record", "_checker", "_steady", "limits"}


def draw_limits(rng):
    max_num_seqs = int(rng.integers(1, 20))
    return StepLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + int(rng.integers(0, 60)),
        max_model_len=int(rng.integers(1, 50)),
        vocab_size=int(rng.integers(1, 100)),
        block_size=2 ** int(rng.integers(0, 5)),
        num_blocks=int(rng.integers(2, 60)),
        max_samples_per_seq=int(rng.choice([1, 3])),
    )


def flatten(value):
    """Nested state as a list of comparable leaves."""
    if isinstance(value, np.ndarray):
        return [("array", value.shape, value.tobytes())]
    if is_dataclass(value):
        return [leaf for f in fields(value) for leaf in flatten(getattr(value, f.name))]
    if isinstance(value, dict):
        return [leaf for key in value for leaf in (key, *flatten(value[key]))]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in flatten(item)]
    if isinstance(value, DraftGaps):
        return flatten(vars(value))
    return [value]


def copied(state, *shared):
    """A copy to try steps on. It shares the features, which know no rows, and what is named."""
    return copy.deepcopy(state, {id(each): each for each in (state.parts, state.limits, *shared)})


def everything(state):
    """All that a step may change, copied; counts where the rows have them, also those that steps
    which only go on keep elsewhere. A refusal voids the notes of the blocks' contents, as any
    failure does."""
    state = copied(state, state._checker, state._record)
    assert state.counts is state._counts
    left_out = (*MEMOS, "parts", "contents", "host_contents")
    kept = {k: flatten(v) for k, v in vars(state).items() if k not in left_out}
    return kept | {"steps": len(state._record._steps)}


def check_step(step, ran, plan, rows):
    assert step.slots.tolist() == list(ran)
    assert step.starts.tolist() == [start for start, _, _ in ran.values()]
    assert step.num_tokens.tolist() == [count for _, count, _ in ran.values()]
    assert step.num_samples.tolist() == [samples for _, _, samples in ran.values()]
    assert step.total_num_tokens == sum(plan.scheduled.values())
    deferred = [] if step.deferred is None else step.slots[step.deferred].tolist()
    assert deferred == sorted(plan.deferred)
    updates = step.block_updates
    triples = zip(updates.rows, updates.indices, updates.block_ids, strict=True)
    for slot, index, block_id in triples:
        assert rows.requests[slot].blocks[index] == block_id
    assert sorted(zip(updates.rows, updates.block_ids, strict=True)) == sorted(plan.blocks)
    assert len({*zip(updates.rows.tolist(), updates.indices.tolist(), strict=True)}) == len(
        plan.blocks
    )


def check_rows(state, rows):
    assert state.counts.live.sum() == len(rows.requests)
    for slot, request in rows.requests.items():
        assert state.known_tokens[slot].tolist() == request.known
        assert state.num_known_tokens[slot] == len(request.known)
        assert state.num_prompt_tokens[slot] == request.num_prompt
    slots = np.arange(rows.limits.max_num_seqs)
    generations = np.array(rows.admissions)
    current = state.are_current(slots, generations)
    assert current.tolist() == [slot in rows.requests for slot in slots]
    assert not state.are_current(slots, generations - 1).any()


def check_counts(state, rows, seq):
    """A full resynchronisation is accepted only where every count agrees, and no token is
    outstanding."""
    settled = [slot for slot in rows.requests if slot not in rows.waiting]
    message, _ = encode(seq, Plan(keep=settled), rows)
    copied(state).apply(message, [])
    for slot in rows.waiting:
        message, _ = encode(seq, Plan(keep=[*settled, slot]), rows)
        with pytest.raises(InvalidStepError) as refused:
            copied(state).apply(message, [])
        assert refused.value.field == "resync"


@pytest.mark.parametrize("seed", seeds(4, of=12))
def test_rows_follow_a_plain_dict_over_random_steps(seed):
    rng = np.random.default_rng(seed)
    limits = draw_limits(rng) if seed else LIMITS
    state, rows, steps = request_state(limits), NaiveRows(limits), StepGenerator(rng, limits)
    num_samples = 0
    for seq in range(1, 250):
        plan = steps.draw(rows)
        message, arrays = encode(seq, plan, rows)
        ran = rows.apply(seq, plan)
        check_step(state.apply(message, arrays), ran, plan, rows)
        check_rows(state, rows)
        num_samples += sum(samples for _, _, samples in ran.values())
        if rng.random() < 0.3:
            check_counts(state, rows, seq)
        for waiting in [s for s in rows.unsampled if rng.random() < 0.4]:
            state.take_unsampled(waiting, None)
            del rows.unsampled[waiting]
    assert num_samples > 20


def decode_of(rng, rows, slots):
    """One token for each of these slots, and a block where its last one is full."""
    plan = Plan(scheduled=dict.fromkeys(slots, 1))
    for slot in slots:
        request = rows.requests[slot]
        if len(request.blocks) * rows.limits.block_size <= request.computed:
            plan.blocks.append((slot, int(rng.integers(1, rows.limits.num_blocks))))
    return plan


def disturbance(rng, rows, steps, slots):
    """A step that is no plain decode of one batch: of some rows of several, or one that ends a row
    and admits another in its place."""
    some = sorted(rng.choice(slots, int(rng.integers(1, len(slots))), replace=False).tolist())
    if rng.random() < 0.5:
        plan = decode_of(rng, rows, some)
        plan.deferred = [slot for slot in some if rng.random() < 0.3]
        return plan
    new = steps.admission(some[0])
    new.tokens, new.num_prompt, new.computed = new.tokens[:3], 1, 0
    blocks = [(some[0], 1)] * -(-len(new.tokens) // rows.limits.block_size)
    return Plan(
        finished=some[:1], admissions=[new], scheduled={some[0]: len(new.tokens)}, blocks=blocks
    )


def test_micro_batches_that_take_turns_are_steady_and_follow_a_plain_dict():
    rng = np.random.default_rng()
    limits = StepLimits(12, 40, 400, 19, 4, 30)
    state, rows, steps = request_state(limits), NaiveRows(limits), StepGenerator(rng, limits)
    slots = [*range(12)]
    first = Plan(admissions=[steps.admission(slot) for slot in slots])
    for new in first.admissions:
        new.tokens, new.num_prompt, new.computed = new.tokens[:3], 1, 0
        first.blocks += [(new.slot, 1)] * -(-len(new.tokens) // limits.block_size)
    first.scheduled = {new.slot: len(new.tokens) for new in first.admissions}
    batches = [sorted(part.tolist()) for part in np.split(rng.permutation(12), [4, 9])]
    num_continued, last = 0, {}
    for seq in range(1, 200):
        plan = first if seq == 1 else decode_of(rng, rows, batches[seq % 3])
        if seq > 1 and rng.random() < 0.05:
            plan = disturbance(rng, rows, steps, slots)
        message, arrays = encode(seq, plan, rows)
        ran = rows.apply(seq, plan)
        step = state.apply(message, arrays)
        check_step(step, ran, plan, rows)
        num_continued += step.steady is not None and last.get(seq % 3) is step.steady
        last[seq % 3] = step.steady
        if rng.random() < 0.1:
            check_counts(state, rows, seq)
            check_rows(state, rows)
        for waiting in list(rows.unsampled):
            state.take_unsampled(waiting, None)
            del rows.unsampled[waiting]
    assert num_continued > 60


# Ways to break a valid step: (message, frames, rows before it) -> the broken one and the field that
# must be named, or None where the step has nothing to break.


def pick(rng, values):
    values = list(values)
    return values[int(rng.integers(len(values)))] if values else None


def free_slot(message, rows):
    taken = {new.slot for new in message.scheduled_new_reqs}
    finished = {int(s) for s in np.frombuffer(message.finished, "<u2")}
    stay = {*rows.requests} - finished
    if message.resync is not None:
        stay = {int(s) for s in np.frombuffer(message.resync, "<i4")[::4]}
    free = [s for s in range(rows.limits.max_num_seqs) if s not in stay | taken]
    return free[-1] if free else None


def finished_odd_bytes(rng, message, arrays, rows):
    return replace(message, finished=message.finished + b"\0"), arrays, "finished"


def finished_out_of_range(rng, message, arrays, rows):
    slot = pick(rng, [rows.limits.max_num_seqs, 65535])
    return replace(message, finished=message.finished + uint16s(slot)), arrays, "finished"


def finished_not_live(rng, message, arrays, rows):
    free = [s for s in range(rows.limits.max_num_seqs) if s not in rows.requests]
    if not free:
        return None
    finished = message.finished + uint16s(pick(rng, free))
    return replace(message, finished=finished), arrays, "finished"


def finished_twice(rng, message, arrays, rows):
    if not message.finished:
        return None
    return replace(message, finished=message.finished + message.finished[:2]), arrays, "finished"


def resync_odd_bytes(rng, message, arrays, rows):
    resync = (message.resync or b"") + bytes(int(rng.integers(1, 4)))
    return replace(message, resync=resync), arrays, "resync"


def resync_not_rows(rng, message, arrays, rows):
    resync = (message.resync or b"") + int32s(*[0] * int(rng.integers(1, 4)))
    return replace(message, resync=resync), arrays, "resync"


def resync_not_live(rng, message, arrays, rows):
    gone = {*np.frombuffer(message.finished, "<u2").tolist()}
    dead = [s for s in range(rows.limits.max_num_seqs) if s not in rows.requests or s in gone]
    slot = pick(rng, [*dead, rows.limits.max_num_seqs, 2**31 - 1])
    return (
        replace(message, resync=(message.resync or b"") + int32s(slot, 0, 0, 0)),
        arrays,
        "resync",
    )


def resync_negative_slot(rng, message, arrays, rows):
    """A negative slot must not index rows from the end."""
    slot = int(rng.integers(1, rows.limits.max_num_seqs + 3))
    aliased = rows.limits.max_num_seqs + 1 - slot
    counts = rows.resync_rows([aliased])[0][1:] if aliased in rows.requests else (0, 0, 0)
    return replace(message, resync=int32s(-slot, *counts)), arrays, "resync"


def resync_twice(rng, message, arrays, rows):
    if not message.resync:
        return None
    return replace(message, resync=message.resync + message.resync[:16]), arrays, "resync"


def resync_other_counts(rng, message, arrays, rows):
    if not message.resync:
        return None
    values = np.frombuffer(message.resync, "<i4").reshape(-1, 4).copy()
    values[rng.integers(len(values)), rng.integers(1, 4)] += pick(rng, [-1, 1, 100])
    return replace(message, resync=values.tobytes()), arrays, "resync"


def with_request(rng, message, **changes):
    """The message with one of its new requests changed, or None without any."""
    if not message.scheduled_new_reqs:
        return None
    chosen = int(rng.integers(len(message.scheduled_new_reqs)))
    requests = tuple(
        replace(new, **changes) if index == chosen else new
        for index, new in enumerate(message.scheduled_new_reqs)
    )
    return replace(message, scheduled_new_reqs=requests)


def new_slot_out_of_range(rng, message, arrays, rows):
    broken = with_request(rng, message, slot=pick(rng, [rows.limits.max_num_seqs, 65534]))
    return broken and (broken, arrays, "slot")


def new_slot_taken(rng, message, arrays, rows):
    finished = {*np.frombuffer(message.finished, "<u2").tolist()}
    if message.resync is not None or not (taken := {*rows.requests} - finished):
        return None
    broken = with_request(rng, message, slot=pick(rng, taken))
    return broken and (broken, arrays, "slot")


def new_slot_twice(rng, message, arrays, rows):
    if len(message.scheduled_new_reqs) < 2:
        return None
    first, second, *rest = message.scheduled_new_reqs
    requests = (first, replace(second, slot=first.slot), *rest)
    return replace(message, scheduled_new_reqs=requests), arrays, "slot"


def new_too_long(rng, message, arrays, rows):
    if not message.scheduled_new_reqs:
        return None
    first, *rest = message.scheduled_new_reqs
    length = rows.limits.max_model_len + 1
    extra = int32s(*[0] * (length - first.num_tokens))
    requests = (replace(first, num_tokens=length), *rest)
    return replace(message, scheduled_new_reqs=requests), [extra + arrays[0]], "num_tokens"


def new_prompt_longer_than_tokens(rng, message, arrays, rows):
    broken = with_request(rng, message, num_prompt_tokens=rows.limits.max_model_len + 1)
    return broken and (broken, arrays, "num_prompt_tokens")


def new_all_computed(rng, message, arrays, rows):
    if not message.scheduled_new_reqs:
        return None
    first, *rest = message.scheduled_new_reqs
    more = first.num_tokens + int(rng.integers(0, 2))
    requests = (replace(first, num_computed_tokens=more), *rest)
    return replace(message, scheduled_new_reqs=requests), arrays, "num_computed_tokens"


def new_unknown_stop_token(rng, message, arrays, rows):
    params = SamplingParams(stop_token_ids=(0, rows.limits.vocab_size))
    broken = with_request(rng, message, extensions=params.extensions())
    return broken and (broken, arrays, "stop_token_ids")


def new_more_logprobs_than_tokens(rng, message, arrays, rows):
    broken = with_request(rng, message, extensions=SamplingParams(logprobs=20).extensions())
    return broken and (broken, arrays, "logprobs")


def new_temperature_too_small(rng, message, arrays, rows):
    params = SamplingParams(temperature=pick(rng, [1e-300, 1e-40, 9e-6]), seed=0)
    broken = with_request(rng, message, extensions=params.extensions())
    return broken and (broken, arrays, "temperature")


def token_out_of_vocabulary(rng, message, arrays, rows):
    if not arrays:
        return None
    tokens = np.frombuffer(arrays[0], "<i4").copy()
    tokens[rng.integers(tokens.size)] = pick(rng, [-1, rows.limits.vocab_size, -(2**31)])
    return message, [tokens.tobytes()], "tokens"


def tokens_of_another_size(rng, message, arrays, rows):
    if not arrays:
        return None
    return message, [pick(rng, [arrays[0][4:], arrays[0] + bytes(4), b""])], "tokens"


def tokens_of_odd_bytes(rng, message, arrays, rows):
    return (message, [arrays[0][:-1]], "tokens") if arrays else None


def another_number_of_frames(rng, message, arrays, rows):
    return message, pick(rng, [[], arrays * 2]) if arrays else [b""], "arrays"


def block_out_of_range(rng, message, arrays, rows):
    if not message.new_block_ids:
        return None
    block_ids = np.frombuffer(message.new_block_ids, "<i4").copy()
    bad = [0, -1, rows.limits.num_blocks, 2**31 - 1, -(2**31)]
    block_ids[rng.integers(block_ids.size)] = pick(rng, bad)
    return replace(message, new_block_ids=block_ids.tobytes()), arrays, "new_block_ids"


def block_ids_of_odd_bytes(rng, message, arrays, rows):
    return replace(message, new_block_ids=message.new_block_ids + b"\0"), arrays, "new_block_ids"


def block_slots_of_odd_bytes(rng, message, arrays, rows):
    broken = replace(message, new_block_slots=message.new_block_slots + b"\0")
    return broken, arrays, "new_block_slots"


def more_block_slots_than_ids(rng, message, arrays, rows):
    broken = replace(message, new_block_slots=message.new_block_slots + uint16s(0))
    return broken, arrays, "new_block_slots"


def fewer_block_slots_than_ids(rng, message, arrays, rows):
    broken = replace(message, new_block_ids=message.new_block_ids + int32s(1))
    return broken, arrays, "new_block_slots"


def block_for_unknown_slot(rng, message, arrays, rows):
    free = free_slot(message, rows)
    slot = pick(rng, [s for s in (free, rows.limits.max_num_seqs, 65535) if s is not None])
    broken = replace(
        message,
        new_block_slots=message.new_block_slots + uint16s(slot),
        new_block_ids=message.new_block_ids + int32s(1),
    )
    return broken, arrays, "new_block_slots"


def too_many_blocks(rng, message, arrays, rows):
    bits = np.unpackbits(np.frombuffer(message.scheduled, np.uint8), bitorder="little")
    slot = pick(rng, np.flatnonzero(bits))
    if slot is None:
        return None
    count = rows.limits.max_blocks_per_seq + 1
    broken = replace(
        message,
        new_block_slots=message.new_block_slots + uint16s(*[slot] * count),
        new_block_ids=message.new_block_ids + int32s(*[1] * count),
    )
    return broken, arrays, "new_block_slots"


def without_blocks(rng, message, arrays, rows):
    """At least one scheduled request has no room for its tokens."""
    if not message.scheduled_new_reqs or not message.new_block_ids:
        return None
    slots = np.frombuffer(message.new_block_slots, "<u2")
    if message.scheduled_new_reqs[0].slot not in slots:
        return None
    keep = slots != message.scheduled_new_reqs[0].slot
    block_ids = np.frombuffer(message.new_block_ids, "<i4")[keep]
    broken = replace(
        message, new_block_slots=slots[keep].tobytes(), new_block_ids=block_ids.tobytes()
    )
    return broken, arrays, "num_scheduled_tokens"


def scheduled_unknown_slot(rng, message, arrays, rows):
    free = free_slot(message, rows)
    slot = pick(rng, [s for s in (free, rows.limits.max_num_seqs, 65535) if s is not None])
    named = np.zeros(65536, np.uint8)
    bits = np.unpackbits(np.frombuffer(message.scheduled, np.uint8), bitorder="little")
    named[: bits.size] = bits
    named[slot] = 1
    broken = replace(
        message,
        scheduled=np.packbits(named, bitorder="little").tobytes(),
        total_num_scheduled_tokens=message.total_num_scheduled_tokens + 1,
    )
    return broken, arrays, "scheduled"


def scheduled_before_it_is_sampled(rng, message, arrays, rows):
    waiting = rows.waiting - {*np.frombuffer(message.finished, "<u2").tolist()}
    if message.resync is not None or not waiting:
        return None
    return replace(message, scheduled=bitmap(sorted(waiting))), arrays, "scheduled"


def counts_of_odd_bytes(rng, message, arrays, rows):
    broken = replace(message, num_scheduled_tokens=message.num_scheduled_tokens + b"\0\0")
    return broken, arrays, "num_scheduled_tokens"


def counts_not_pairs(rng, message, arrays, rows):
    broken = replace(message, num_scheduled_tokens=message.num_scheduled_tokens + int32s(0))
    return broken, arrays, "num_scheduled_tokens"


def count_of_unscheduled_slot(rng, message, arrays, rows):
    bits = np.unpackbits(np.frombuffer(message.scheduled, np.uint8), bitorder="little")
    slot = pick(rng, [-1, 65536, 2**31 - 1, -(2**31), *np.flatnonzero(bits == 0).tolist()])
    counts = message.num_scheduled_tokens + int32s(slot, 1)
    return replace(message, num_scheduled_tokens=counts), arrays, "num_scheduled_tokens"


def count_twice(rng, message, arrays, rows):
    if not message.num_scheduled_tokens:
        return None
    counts = message.num_scheduled_tokens + message.num_scheduled_tokens[:8]
    return replace(message, num_scheduled_tokens=counts), arrays, "num_scheduled_tokens"


def count_below_one(rng, message, arrays, rows):
    if not message.num_scheduled_tokens:
        return None
    pairs = np.frombuffer(message.num_scheduled_tokens, "<i4").reshape(-1, 2).copy()
    pairs[rng.integers(len(pairs)), 1] = pick(rng, [0, -1, -(2**31)])
    return replace(message, num_scheduled_tokens=pairs.tobytes()), arrays, "num_scheduled_tokens"


def count_above_what_remains(rng, message, arrays, rows):
    """One more token than the request still has, where the batch has room for it."""
    total = message.total_num_scheduled_tokens + 1
    if not message.num_scheduled_tokens or total > rows.limits.max_num_batched_tokens:
        return None
    pairs = np.frombuffer(message.num_scheduled_tokens, "<i4").reshape(-1, 2).copy()
    slot, count = pairs[0]
    new = {new.slot: new for new in message.scheduled_new_reqs}
    request = new.get(slot) or rows.requests[slot]
    computed = new[slot].num_computed_tokens if slot in new else request.computed
    if computed + count != request.num_tokens:
        return None
    pairs[0, 1] += 1
    broken = replace(
        message, num_scheduled_tokens=pairs.tobytes(), total_num_scheduled_tokens=total
    )
    return broken, arrays, "num_scheduled_tokens"


def another_total(rng, message, arrays, rows):
    total = message.total_num_scheduled_tokens
    broken = replace(message, total_num_scheduled_tokens=pick(rng, [total + 1, abs(total - 1)]))
    return broken, arrays, "total_num_scheduled_tokens"


MUTATIONS = [
    finished_odd_bytes,
    finished_out_of_range,
    finished_not_live,
    finished_twice,
    resync_odd_bytes,
    resync_not_rows,
    resync_not_live,
    resync_negative_slot,
    resync_twice,
    resync_other_counts,
    new_slot_out_of_range,
    new_slot_taken,
    new_slot_twice,
    new_too_long,
    new_prompt_longer_than_tokens,
    new_all_computed,
    new_unknown_stop_token,
    new_more_logprobs_than_tokens,
    new_temperature_too_small,
    token_out_of_vocabulary,
    tokens_of_another_size,
    tokens_of_odd_bytes,
    another_number_of_frames,
    block_out_of_range,
    block_ids_of_odd_bytes,
    block_slots_of_odd_bytes,
    more_block_slots_than_ids,
    fewer_block_slots_than_ids,
    block_for_unknown_slot,
    too_many_blocks,
    without_blocks,
    scheduled_unknown_slot,
    scheduled_before_it_is_sampled,
    counts_of_odd_bytes,
    counts_not_pairs,
    count_of_unscheduled_slot,
    count_twice,
    count_below_one,
    count_above_what_remains,
    another_total,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_broken_step_is_refused_by_name_and_leaves_no_trace(mutate):
    rng = np.random.default_rng(MUTATIONS.index(mutate))
    state, rows, steps = request_state(LIMITS), NaiveRows(LIMITS), StepGenerator(rng, LIMITS)
    num_broken = 0
    for seq in range(1, 90):
        plan = steps.draw(rows)
        message, arrays = encode(seq, plan, rows)
        broken = mutate(rng, message, arrays, rows)
        if broken is not None:
            num_broken += 1
            before = everything(state)
            with pytest.raises(InvalidStepError) as refused:
                state.apply(broken[0], broken[1])
            assert refused.value.field.split(".")[-1] == broken[2]
            assert refused.value.fix
            assert everything(state) == before
            assert state.has_failed
        rows.apply(seq, plan)
        state.apply(message, arrays)
        check_rows(state, rows)
        for waiting in [s for s in rows.unsampled if rng.random() < 0.3]:
            state.take_unsampled(waiting, None)
            del rows.unsampled[waiting]
    assert num_broken >= 3


def admit(state, slot, num_tokens, seq=1, schedule=None, num_blocks=None, **changes):
    """One admission, scheduled whole unless told otherwise."""
    limits = state.limits
    count = num_tokens if schedule is None else schedule
    blocks = -(-num_tokens // limits.block_size) if num_blocks is None else num_blocks
    plan = Plan(
        admissions=[Admission(slot, [0] * num_tokens, num_tokens, 0, SamplingParams())],
        blocks=[(slot, 1)] * blocks,
        scheduled={slot: count} if count else {},
    )
    message, arrays = encode(seq, plan, NaiveRows(limits))
    return state.apply(replace(message, **changes), arrays)


def decode(seq, slots, **changes):
    message = ExecuteModel(
        epoch=1, link=1, seq=seq, total_num_scheduled_tokens=len(slots), scheduled=bitmap(slots)
    )
    return replace(message, **changes)


def decode_all(rng, rows, slots):
    """One more token for each slot, and blocks where they are needed or, now and then, ahead."""
    plan, limits = Plan(scheduled=dict.fromkeys(slots, 1)), rows.limits
    for slot in rng.permutation(slots).tolist():
        request = rows.requests[slot]
        missing = -(-(request.computed + 1) // limits.block_size) - len(request.blocks)
        room = limits.max_blocks_per_seq - len(request.blocks)
        ahead = int(rng.integers(0, 3)) if rng.random() < 0.1 else 0
        for _ in range(min(room, max(missing, ahead))):
            plan.blocks.append((slot, int(rng.integers(1, limits.num_blocks))))
    return plan


def broken_decodes(rng, message, rows):
    """(broken message, the field that must be named) for everything that can be wrong with a step
    that only continues decoding."""
    limits, slots, ids = rows.limits, message.new_block_slots, message.new_block_ids
    free = [s for s in range(limits.max_num_seqs) if s not in rows.requests]
    live, most = pick(rng, rows.requests), limits.max_blocks_per_seq
    total = message.total_num_scheduled_tokens
    more = [
        (uint16s(pick(rng, [*free, limits.max_num_seqs, 65535])), int32s(1), "new_block_slots"),
        (uint16s(live), int32s(pick(rng, [0, -1, limits.num_blocks, 2**31 - 1])), "new_block_ids"),
        (uint16s(live), b"", "new_block_slots"),
        (b"\0", int32s(1), "new_block_slots"),
        (uint16s(live), b"\0", "new_block_ids"),
        (uint16s(live) * most, int32s(1) * most, "new_block_slots"),
    ]
    for more_slots, more_ids, name in more:
        changed = replace(message, new_block_slots=slots + more_slots, new_block_ids=ids + more_ids)
        yield changed, name
    yield replace(message, total_num_scheduled_tokens=total + 1), "total_num_scheduled_tokens"
    spare = {s: len(r.blocks) * limits.block_size - r.computed for s, r in rows.requests.items()}
    if 0 in spare.values():
        yield replace(message, new_block_slots=b"", new_block_ids=b""), "num_scheduled_tokens"
        for slot, request in rows.requests.items():
            if spare[slot] and len(request.blocks) < most:
                other = {"new_block_slots": uint16s(slot), "new_block_ids": int32s(1)}
                yield replace(message, **other), "num_scheduled_tokens"


@pytest.mark.parametrize("seed", seeds(3, of=6))
def test_runs_of_decodes_follow_a_plain_dict_and_refuse_what_is_broken(seed):
    rng = np.random.default_rng(seed)
    limits = StepLimits(12, 400, 41, 19, 2 ** int(rng.integers(1, 4)), 30)
    state, rows, steps = request_state(limits), NaiveRows(limits), StepGenerator(rng, limits)
    slots = sorted(rng.permutation(12)[: int(rng.integers(1, 13))].tolist())
    if seed == 0:
        slots = list(range(2, 9))
    start = Plan(admissions=[steps.admission(slot) for slot in slots])
    for new in start.admissions:
        new.tokens = new.tokens[: int(rng.integers(1, 9))]
        new.num_prompt, new.computed = 1, 0
        start.scheduled[new.slot] = len(new.tokens)
        start.blocks += [(new.slot, 1)] * -(-len(new.tokens) // limits.block_size)
    message, arrays = encode(1, start, rows)
    rows.apply(1, start)
    state.apply(message, arrays)
    num_broken = 0
    for seq in range(2, 32):
        plan = decode_all(rng, rows, slots)
        message, arrays = encode(seq, plan, rows)
        for broken, name in broken_decodes(rng, message, rows) if seq % 3 == 0 else ():
            num_broken += 1
            before = everything(state)
            with pytest.raises(InvalidStepError) as refused:
                state.apply(broken, [])
            assert refused.value.field == name
            assert everything(state) == before
        with pytest.raises(InvalidStepError):
            state.apply(message, [int32s(1)])
        given = state.apply(message, arrays)
        starts = given.starts.tolist()
        check_step(given, rows.apply(seq, plan), plan, rows)
        if rng.random() < 0.2:  # something else in between, and then on
            check_counts(state, rows, seq)
            one = decode_all(rng, rows, [pick(rng, slots)])
            message, arrays = encode(seq, one, rows)
            check_step(state.apply(message, arrays), rows.apply(seq, one), one, rows)
        check_rows(state, rows)
        assert given.starts.tolist() == starts
    check_counts(state, rows, 99)
    assert num_broken >= 60


@pytest.mark.parametrize("last_block_at", [1, 3])
def test_decodes_end_at_max_model_len_where_blocks_would_reach_further(last_block_at):
    state = request_state(StepLimits(4, 40, 10, 50, 4, 30))
    admit(state, 0, 5, num_blocks=3 if last_block_at == 1 else 2)
    for seq in range(2, 7):
        more = seq == last_block_at
        blocks = {"new_block_slots": uint16s(0), "new_block_ids": int32s(7)} if more else {}
        assert state.apply(decode(seq, [0], **blocks), []).starts.tolist() == [seq + 3]
    with pytest.raises(InvalidStepError, match="max_model_len is 10") as refused:
        state.apply(decode(7, [0]), [])
    assert refused.value.field == "num_scheduled_tokens"


def test_more_tokens_than_a_batch_holds_are_refused():
    limits = StepLimits(4, 10, 32, 50, 4, 30)
    with pytest.raises(InvalidStepError, match="max_num_batched_tokens is 10") as refused:
        admit(request_state(limits), 0, 11)
    assert refused.value.field == "total_num_scheduled_tokens"


def test_context_ends_at_max_model_len():
    limits = StepLimits(4, 40, 5, 50, 4, 30)
    state = request_state(limits)
    admit(state, 0, 4, num_blocks=2)
    assert state.apply(decode(2, [0]), []).starts.tolist() == [4]
    with pytest.raises(InvalidStepError, match="max_model_len is 5"):
        state.apply(decode(3, [0]), [])


def test_count_that_would_wrap_an_int32_is_refused():
    limits = StepLimits(4, 2**31 - 1, 64, 50, 4, 30)
    state = request_state(limits)
    admit(state, 0, 8, schedule=5)
    counts = int32s(0, 2**31 - 1)
    with pytest.raises(InvalidStepError, match="num_scheduled_tokens"):
        state.apply(
            decode(2, [0], num_scheduled_tokens=counts, total_num_scheduled_tokens=2**31 - 1), []
        )


def test_deferred_samplings_are_bounded_and_taken_once():
    state = request_state(StepLimits(2 * MAX_UNSAMPLED_STEPS, 40, 23, 19, 4, 30))
    admit(state, 0, 4, seq=1)
    for seq in range(2, 2 + MAX_UNSAMPLED_STEPS):  # requests may end before their sampling
        admit(state, 0, 4, seq=seq, finished=uint16s(0), deferred=b"\1")
    with pytest.raises(InvalidStepError, match="sample step 2 first") as refused:
        admit(state, 0, 4, seq=90, finished=uint16s(0), deferred=b"\1")
    assert refused.value.field == "deferred"
    assert [found.tolist() for found in state.take_unsampled(2, None)[:1]] == [[]]
    for step_seq in (2, 1, 90):
        with pytest.raises(InvalidStepError) as refused:
            state.take_unsampled(step_seq, None)
        assert refused.value.field == "step_seq"


def test_deferred_rows_are_no_more_than_requests_even_if_these_have_ended():
    """The memory profile counts one row of logits for each request."""
    state, most = request_state(LIMITS), LIMITS.max_num_seqs
    for slot in range(most - 1):
        admit(state, slot, 4, seq=slot + 1, deferred=bitmap([slot]))
    admit(state, most - 1, 4, seq=20)
    plan = Plan(
        finished=[0],
        admissions=[Admission(0, [0], 1, 0, SamplingParams())],
        blocks=[(0, 1), (most - 1, 2)],
        scheduled={0: 1, most - 1: 1},
        deferred=[0],
    )
    two, tokens = encode(21, plan, NaiveRows(LIMITS))
    before = everything(state)
    with pytest.raises(InvalidStepError, match="sample step 1 first") as refused:
        state.apply(two, tokens)
    value = f"2 slots sample, and {most - 1} wait for SampleTokens"
    assert (refused.value.field, refused.value.value) == ("deferred", value)
    assert everything(state) == before
    state.apply(
        replace(two, seq=22, deferred=None), tokens
    )  # steps that defer nothing copy nothing
    assert state.take_unsampled(1, None)[0].size == 0  # slot 0 has another request now
    admit(state, 0, 4, seq=23, finished=uint16s(0), deferred=bitmap([0]))
    last = {"finished": uint16s(most - 1), "deferred": bitmap([most - 1])}
    admit(state, most - 1, 4, seq=24, **last)
    with pytest.raises(InvalidStepError) as refused:
        admit(state, most - 1, 4, seq=25, **last)
    assert refused.value.value == f"1 slots sample, and {most} wait for SampleTokens"
    admit(state, 0, 4, seq=26, resync=b"", deferred=bitmap([0]))  # which frees all copies


def test_rows_of_a_step_are_sampled_in_several_messages():
    state = request_state(LIMITS)
    for slot in (1, 3, 8):
        admit(state, slot, 4, seq=slot, num_blocks=3)
    state.apply(decode(20, [1, 3, 8], deferred=bitmap([1, 8])), [])
    for wrong in (b"", b"\1", bitmap([3]), bitmap([1, 3]), bitmap([1, 20])):
        with pytest.raises(InvalidStepError) as refused:
            state.take_unsampled(20, wrong)
        assert refused.value.field == "slots"
    with pytest.raises(InvalidStepError, match="SampleTokens") as refused:
        state.apply(decode(21, [8]), [])
    assert refused.value.field == "scheduled"
    state.apply(decode(22, [3]), [])
    slots, left = state.take_unsampled(20, bitmap([8]))
    assert (slots.tolist(), left.tolist()) == ([8], [1])
    state.apply(decode(23, [3, 8]), [])
    with pytest.raises(InvalidStepError):
        state.take_unsampled(20, bitmap([8]))
    slots, left = state.take_unsampled(20, None)
    assert (slots.tolist(), left.tolist()) == ([1], [])
    state.apply(decode(24, [1, 3, 8]), [])


def test_only_slots_that_sample_are_deferred():
    state = request_state(LIMITS)
    admit(state, 1, 4, seq=1, num_blocks=2)
    admit(state, 2, 9, seq=2, schedule=3)
    chunk = int32s(2, 4)
    for wrong in (b"", b"\1", bitmap([2]), bitmap([1, 2]), bitmap([1, 3]), b"\2\0\0\0\1"):
        step = decode(3, [1, 2], num_scheduled_tokens=chunk, deferred=wrong)
        with pytest.raises(InvalidStepError) as refused:
            state.apply(replace(step, total_num_scheduled_tokens=5), [])
        assert refused.value.field == "deferred"
    step = decode(4, [1, 2], num_scheduled_tokens=chunk, deferred=bitmap([1]))
    applied = state.apply(replace(step, total_num_scheduled_tokens=5), [])
    assert applied.deferred.tolist() == [True, False]


def test_failure_stands_until_a_resynchronisation():
    state = request_state(LIMITS)
    state.raise_if_failed()
    with pytest.raises(InvalidStepError):
        state.apply(decode(7, [3]), [])
    admit(state, 0, 4, seq=8)
    with pytest.raises(PrecededByError, match="step 7 failed"):
        state.raise_if_failed()
    state.mark_failed(9)
    with pytest.raises(PrecededByError, match="step 7 failed"):
        state.raise_if_failed()
    state.apply(decode(10, [], resync=int32s(0, 4, 5, 1)), [])
    state.raise_if_failed()
    assert state.counts.live.sum() == 1


def test_resynchronisation_frees_the_slots_it_does_not_name():
    state = request_state(LIMITS)
    for slot in (0, 3, 8):
        admit(state, slot, 4, seq=1 + slot)
    state.apply(decode(20, [], resync=int32s(3, 4, 5, 1)), [])
    assert state.counts.live.sum() == 1
    admit(state, 8, 4, seq=21)
    assert state.are_current(np.array([0, 3, 8]), np.array([1, 1, 2])).tolist() == [
        False,
        True,
        True,
    ]


def test_drop_all_forgets_requests_failures_and_deferred_samplings():
    state = request_state(LIMITS)
    admit(state, 2, 4, deferred=b"\4")
    state.mark_failed(1)
    state.drop_all()
    assert (state.counts.live.sum(), state.has_failed) == (0, False)
    with pytest.raises(InvalidStepError):
        state.take_unsampled(1, None)
    admit(state, 2, 4, seq=2)


def test_dummy_step_lies_on_a_row_that_no_request_can_have():
    state = request_state(LIMITS)
    step = state.dummy_step(5)
    assert (step.seq, step.slots.tolist(), step.total_num_tokens) == (5, [LIMITS.max_num_seqs], 1)
    assert not step.num_samples.any()
    with pytest.raises(InvalidStepError):
        admit(state, LIMITS.max_num_seqs, 4)

"""What a step's tensors hold, against lists kept by hand: tokens, positions, blocks, sampling."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from row_steps import NaiveRows, Plan, StepGenerator, encode, request_state

from tests.support.exhaustive import seeds
from worker_client.requests import SamplingParams
from worker_daemon.runner.input_batch import InputBuilder
from worker_daemon.runner.row_tables import RowTables, TorchRowKernels
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.runner.staging import HostStaging
from worker_daemon.runner.step_layout import (
    LARGE_MIXED_LONGEST,
    MIXED_SIZES,
    ExactShapes,
    StepLadder,
    decode_sizes,
    drafted_counts,
    largest_shape,
    mixed_plans,
    mixed_sizes,
)

CPU = torch.device("cpu")


def make_builder(state, ladder=None):
    tables = RowTables(state.limits, CPU, TorchRowKernels())
    return InputBuilder(state, tables, HostStaging(), ladder or ExactShapes())


def make_ladder(limits):
    middle = max(1, limits.max_model_len // 2)
    bounds = sorted({middle, limits.max_model_len})
    mixed = mixed_plans(
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        limits.max_model_len,
        max_num_samples=limits.max_num_samples,
    )
    return StepLadder(decode_sizes(limits.max_num_seqs), lambda size: bounds, mixed)


def draw_limits(rng):
    max_num_seqs = int(rng.integers(1, 14))
    return StepLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + int(rng.integers(8, 60)),
        max_model_len=int(rng.integers(2, 40)),
        vocab_size=int(rng.integers(5, 1000)),
        block_size=2 ** int(rng.integers(0, 5)),
        num_blocks=int(rng.integers(2, 60)),
        max_samples_per_seq=int(rng.choice([1, 4])),
    )


def naive_token(request, position):
    known = len(request.known)
    return request.known[position] if position < known else request.sampled[position - known]


def check_tokens(limits, inputs, gathered, rows, ran):
    """The spare row owns the padding, which reads and writes the null block's first slot."""
    spans = [(slot, p) for slot, (start, n, _) in ran.items() for p in range(start, start + n)]
    requests = rows.requests
    padding = inputs.plan.shape.num_tokens - len(spans)
    columns = inputs.columns
    assert inputs.num_tokens == len(spans)
    spare = [limits.max_num_seqs] * padding
    assert columns.token_rows.tolist() == [slot for slot, _ in spans] + spare
    assert columns.positions.tolist() == [p for _, p in spans] + [0] * padding
    size = limits.block_size
    assert (
        gathered.slot_mappings[0].tolist()
        == [requests[slot].blocks[p // size] * size + p % size for slot, p in spans] + [0] * padding
    )
    expected = [naive_token(requests[slot], p) for slot, p in spans]
    assert gathered.token_ids[: len(spans)].tolist() == expected
    from_device = [p >= len(requests[slot].known) for slot, p in spans]
    assert (columns.host_token_ids[: len(spans)] == -1).tolist() == from_device


def check_attention(limits, inputs, attention, rows, ran):
    counts = [n for _, n, _ in ran.values()]
    ends = [start + n for start, n, _ in ran.values()]
    padding = inputs.plan.shape.num_seqs - len(ran)
    assert attention.num_seqs == len(ran) + padding
    # Padding is sequences without tokens; beside decodes, they have a key.
    one = int(all(count == 1 for count in counts))
    counts += [0] * padding
    assert attention.query_start_loc.tolist() == np.cumsum([0, *counts]).tolist()
    assert attention.seq_lens.tolist() == ends + [one] * padding
    assert attention.seq_lens_np.tolist() == ends
    order = attention.seq_order.tolist()
    assert sorted(order) == [*range(attention.num_seqs)]
    ordered = attention.seq_lens[attention.seq_order].tolist()
    assert ordered == sorted(ordered, reverse=True)
    assert attention.query_lens_np.tolist() == counts[: len(ran)]
    assert attention.max_query_len >= max(counts, default=0)
    assert attention.max_seq_len >= max(ends, default=0)
    spare = [limits.max_num_seqs] * padding
    assert attention.seq_rows.tolist() == [*ran, *spare]
    for slot, end in zip(ran, ends, strict=True):
        used = -(-end // limits.block_size)
        blocks = attention.block_table[slot, :used].tolist()
        assert blocks == rows.requests[slot].blocks[:used]
    assert not attention.block_table[limits.max_num_seqs].any()


def check_sample_rows(state, inputs, rows, ran):
    last = np.cumsum([n for _, n, _ in ran.values()]) - 1
    samples = [
        (slot, index - newer, start + n - newer, newer)
        for (slot, (start, n, count)), index in zip(ran.items(), last.tolist(), strict=True)
        for newer in reversed(range(count))
    ]
    chosen = inputs.sample_rows
    count, slots = len(samples), [slot for slot, *_ in samples]
    assert chosen.slots_np.tolist() == slots
    assert chosen.slots.shape[0] == inputs.plan.shape.num_samples <= staged_samples(state)
    assert chosen.slots[:count].tolist() == slots
    assert (chosen.slots[count:] == state.spare_slot).all()
    assert chosen.token_indices[:count].tolist() == [index for _, index, *_ in samples]
    positions = [position for *_, position, _ in samples]
    assert chosen.positions[:count].tolist() == chosen.positions_np.tolist() == positions
    assert state.are_current(chosen.slots_np, chosen.generations).all()
    newest = [place for place, (*_, newer) in enumerate(samples) if not newer]
    assert chosen.num_newer.tolist() == [newer for *_, newer in samples]
    assert bool(chosen.given) == (len(newest) < count)
    assert chosen.newest_of(chosen.positions).tolist() == [positions[place] for place in newest]
    assert chosen.sampled.slots.tolist() == sorted({*slots})
    kept = np.sort(np.random.default_rng(count).permutation(count)[: count // 2])
    few = chosen.keep(kept, 0)
    assert few.slots_np.tolist() == [slots[place] for place in kept]
    assert bool(few.given) == (len({*few.slots_np.tolist()}) < kept.size)


def staged_samples(state):
    return largest_shape(state.limits).num_samples


def metadata_of(state, chosen):
    """How the rows are drawn, as their part tells the sampler."""
    return state.parts.chooser.metadata(chosen.without_padding())


def check_sampling(metadata, chosen, rows):
    params = [rows.requests[slot].sampling for slot in chosen.slots_np]
    for name in ("temperature", "top_p", "min_p"):
        expected = np.array([getattr(p, name) for p in params], np.float32)
        assert getattr(metadata, name)[: len(params)].numpy().tobytes() == expected.tobytes()
    assert metadata.temperature.shape == (len(params),)
    assert metadata.top_k[: len(params)].tolist() == [p.top_k for p in params]
    assert metadata.seeds[: len(params)].tolist() == [
        p.seed if p.temperature else 0 for p in params
    ]
    assert metadata.positions.tolist() == chosen.positions_np.tolist()
    assert (chosen.used == 0) == all(
        p.temperature == 0 and p.logprobs is None and not (p.min_tokens and p.stop_token_ids)
        for p in params
    )
    random = [p for p in params if p.temperature > 0]
    assert metadata.any_random >= bool(random)
    assert metadata.any_top_k >= any(p.top_k for p in random)
    assert metadata.any_top_p >= any(p.top_p < 1 for p in random)
    assert metadata.any_min_p >= any(p.min_p for p in random)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", seeds(3, of=10))
def test_gathered_tensors_equal_naive_ones_over_random_steps(seed, padded):
    rng = np.random.default_rng(100 + seed)
    limits = draw_limits(rng)
    state, rows, steps = request_state(limits), NaiveRows(limits), StepGenerator(rng, limits)
    builder = make_builder(state, make_ladder(limits) if padded else None)
    num_from_device = num_padded = num_before = 0
    for seq in range(1, 200):
        plan = steps.draw(rows)
        plan.deferred = []
        message, arrays = encode(seq, plan, rows)
        ran = rows.apply(seq, plan)
        step = state.apply(message, arrays)
        inputs = builder.build(step)
        num_before += step.block_updates.rows.size > inputs.plan.shape.num_updates
        read = [s for s, (start, _, _) in ran.items() if start >= len(rows.requests[s].known)]
        assert inputs.reads.tolist() == read
        num_padded += inputs.plan.shape.num_seqs > len(ran)
        builder.tables.update(inputs.columns)
        gathered = builder.tables.gather(inputs.columns)
        check_tokens(limits, inputs, gathered, rows, ran)
        check_attention(limits, inputs, inputs.attention(gathered, builder.tables)[0], rows, ran)
        check_sample_rows(state, inputs, rows, ran)
        chosen = inputs.sample_rows
        check_sampling(metadata_of(state, chosen), chosen, rows)
        num_from_device += len(read)
        newest = chosen.newest()
        sampled = rng.integers(0, limits.vocab_size, newest.slots_np.size)
        builder.tables.last_sampled[newest.slots.long()] = torch.from_numpy(sampled)
        for slot, token in zip(newest.slots_np.tolist(), sampled.tolist(), strict=True):
            rows.requests[slot].sampled.append(token)
    assert num_from_device > 5
    assert not num_padded or padded
    assert not num_before or padded


@pytest.mark.parametrize("padded", [False, True])
def test_steps_that_only_go_on_fill_the_columns_as_if_they_were_the_first(padded):
    rng = np.random.default_rng()
    limits = StepLimits(12, 200, 64, 50, 4, 300)
    state, rows, steps = request_state(limits), NaiveRows(limits), StepGenerator(rng, limits)
    ladder, exact = make_ladder(limits) if padded else ExactShapes(), ExactShapes()
    builder = make_builder(state, ladder)
    seq = num_same = 0

    def run(plan):
        nonlocal seq, ladder, exact
        seq += 1
        if rng.random() < 0.1:
            ladder, exact = exact, ladder
            builder.pad_by(ladder, ())
        message, arrays = encode(seq, plan, rows)
        rows.apply(seq, plan)
        step = state.apply(message, arrays)
        inputs = builder.build(step)
        other = make_builder(state, ladder).build(step)
        assert inputs.plan == other.plan
        pairs = zip(inputs.columns.every, other.columns.every, strict=True)
        for place, (own, column) in enumerate(pairs):
            assert own.tolist() == column.tolist(), inputs.columns._fields[place]
        for slot in inputs.sample_rows.slots_np.tolist():
            rows.requests[slot].sampled.append(0)
        return inputs

    for _ in range(8):
        live = rng.choice(12, int(rng.integers(1, 12)), replace=False).tolist()
        plan = Plan(finished=list(rows.requests))
        plan.admissions = [steps.admission(slot) for slot in sorted(live)]
        for new in plan.admissions:
            new.tokens = rng.integers(0, 50, int(rng.integers(1, 12))).tolist()
            new.num_prompt, new.computed = len(new.tokens), 0
        plan.scheduled = {new.slot: len(new.tokens) for new in plan.admissions}
        free = iter(1 + rng.permutation(299))
        needed = {new.slot: -(-len(new.tokens) // 4) for new in plan.admissions}
        plan.blocks = [(s, int(next(free))) for s in sorted(needed) for _ in range(needed[s])]
        inputs = run(plan)
        for _ in range(int(rng.integers(1, 20))):
            last, step = inputs.sample_rows, Plan(scheduled=dict.fromkeys(sorted(live), 1))
            for slot in sorted(live):
                request = rows.requests[slot]
                if len(request.blocks) * 4 < request.computed + 1:
                    step.blocks.append((slot, int(next(free))))
            inputs = run(step)
            assert inputs.reads.tolist() == sorted(live)
            assert state.are_current(inputs.sample_rows.slots_np, last.generations).all()
            num_same += inputs.sample_rows.slots_np is last.slots_np
    assert num_same > 5


def test_decodes_of_every_size_are_padded_to_the_next_of_the_ladder():
    limits = StepLimits(300, 400, 64, 10, 4, 20)
    ladder = make_ladder(limits)
    sizes = decode_sizes(limits.max_num_seqs)
    assert sizes[:5] == [1, 2, 4, 8, 16]
    assert sizes[-1] >= limits.max_num_seqs > sizes[-2]
    state = request_state(limits)
    for count in range(1, limits.max_num_seqs + 1):
        step = state.dummy_step(1)._replace(
            slots=np.arange(count),
            num_tokens=np.ones(count, np.int32),
            starts=np.zeros(count, np.int32),
            total_num_tokens=count,
            num_samples=np.ones(count, np.int32),
        )
        for longest in (1, 32, 33, 64):
            plan = ladder.fit(step._replace(longest=longest))
            assert plan in ladder.plans
            assert plan.shape.num_seqs == min(size for size in sizes if size >= count)
            assert plan.max_seq_len == (32 if longest <= 32 else 64)
    decodes = [plan for plan in ladder.plans if plan.max_query_len == 1]
    assert decodes == sorted(decodes, reverse=True)


def test_other_steps_are_padded_to_the_next_number_of_tokens():
    limits = StepLimits(20, 700, 600, 10, 4, 2000)
    ladder = make_ladder(limits)
    empty = request_state(limits).dummy_step(1)
    for count in (*range(3, 700, 7), 512):
        step = empty._replace(
            slots=np.arange(2),
            num_tokens=np.array([count - 1, 1], np.int32),
            total_num_tokens=count,
            new_requests=("one", "two"),
            longest=count,
        )
        shape = ladder.fit(step).shape
        assert shape.num_tokens == min((n for n in MIXED_SIZES if n >= count), default=count)
        assert (ladder.fit(step) in ladder.plans) == (count <= MIXED_SIZES[-1])
        if count <= MIXED_SIZES[-1]:  # what does not fit is written before the program runs
            updates = step.block_updates._replace(rows=np.zeros(shape.num_tokens + 1, np.int64))
            assert ladder.fit(step._replace(block_updates=updates)).shape == shape


MANY = 10**15
"""Weights of a layer that is larger than any."""


@pytest.mark.parametrize(
    ("layer_weights", "largest"), [(MANY, 512), (218_103_808, 512), (57_000_000, 2048), (1, 4096)]
)
def test_small_layers_are_padded_to_larger_steps(layer_weights, largest):
    sizes = mixed_sizes(layer_weights)
    assert sizes[: len(MIXED_SIZES)] == MIXED_SIZES
    assert sizes[-1] == largest
    assert list(sizes) == sorted(set(sizes))
    assert all(after <= 1.25 * before for before, after in pairwise(sizes[len(MIXED_SIZES) - 1 :]))


def test_large_steps_are_padded_unless_their_context_is_long():
    limits = StepLimits(20, 8192, 20_000, 10, 4, 2000)
    sizes = mixed_sizes(57_000_000)
    ladder = StepLadder([], list, mixed_plans(20, 8192, 20_000, 1, sizes))
    empty = request_state(limits).dummy_step(1)
    for count in (500, 513, 1000, 2000, 2048, 2049, 5000):
        for longest in (count, LARGE_MIXED_LONGEST, LARGE_MIXED_LONGEST + 1):
            step = empty._replace(
                slots=np.arange(1),
                num_tokens=np.array([count], np.int32),
                total_num_tokens=count,
                new_requests=("one",),
                longest=longest,
            )
            fits = count <= MIXED_SIZES[-1] or longest <= LARGE_MIXED_LONGEST
            padded = min((n for n in sizes if n >= count), default=count) if fits else count
            plan = ladder.fit(step)
            assert plan.shape.num_tokens == padded
            assert plan.max_query_len >= count
            assert plan.max_seq_len >= longest


def test_long_chunks_after_long_contexts_are_not_padded():
    """They are not alone in their steps, which others pad if they have as many tokens."""
    limits = StepLimits(20, 8192, 20_000, 10, 4, 2000)
    ladder = StepLadder([], list, mixed_plans(20, 8192, 20_000))
    empty = request_state(limits).dummy_step(1)

    def size(*rows):
        counts, ends = np.array(rows, np.int32).T
        step = empty._replace(
            slots=np.arange(len(rows)),
            num_tokens=counts,
            starts=ends - counts,
            ends=ends,
            total_num_tokens=int(counts.sum()),
            longest=int(ends.max()),
            new_requests=("one",),
        )
        return ladder.fit(step).shape.num_tokens

    assert size((1, 50), (256, 16384)) == size((256, 19_000), (1, 50)) == 257
    assert size((255, 16384), (2, 50)) == size((256, 16383), (1, 50)) == 320
    assert size((256, 256), (1, 19_000)) == 320


def test_seeds_keep_all_their_bits():
    limits = StepLimits(8, 16, 8, 10, 4, 20)
    state, rows = request_state(limits), NaiveRows(limits)
    steps = StepGenerator(np.random.default_rng(0), limits)
    builder, plan = make_builder(state), Plan()
    seeds = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62 + 12345, 2**63 - 1]
    plan.admissions = [steps.admission(slot) for slot in range(8)]
    for new, seed in zip(plan.admissions, seeds, strict=True):
        new.tokens, new.num_prompt, new.computed = [1], 1, 0
        new.sampling = SamplingParams(temperature=1.0, seed=seed)
    plan.scheduled = dict.fromkeys(range(8), 1)
    plan.blocks = [(slot, 1) for slot in range(8)]
    inputs = builder.build(state.apply(*encode(1, plan, rows)))
    assert metadata_of(state, inputs.sample_rows).seeds.tolist() == seeds


def test_kept_rows_are_a_selection_of_all_columns():
    limits = StepLimits(6, 64, 8, 10, 4, 20)
    state, rows = request_state(limits), NaiveRows(limits)
    steps = StepGenerator(np.random.default_rng(3), limits)
    plan = Plan(admissions=[steps.admission(slot) for slot in range(6)])
    plan.scheduled = {new.slot: len(new.tokens) - new.computed for new in plan.admissions}
    plan.blocks = [(slot, 1) for slot in range(6)] + [(slot, 2) for slot in range(6)]
    builder = make_builder(state)
    chosen = builder.build(state.apply(*encode(1, plan, rows))).sample_rows
    assert chosen.slots_np.size == 6
    picked = np.array([5, 2, 0])
    kept = chosen.keep(picked, used=4)
    assert kept.used == 4
    for name in ("slots_np", "generations", "positions_np"):
        assert np.array_equal(getattr(kept, name), getattr(chosen, name)[picked])
    for name in ("slots", "token_indices", "positions"):
        assert torch.equal(getattr(kept, name), getattr(chosen, name)[torch.from_numpy(picked)])


def test_dummy_step_reads_and_writes_the_null_block_alone():
    limits = StepLimits(4, 16, 8, 10, 4, 20)
    state = request_state(limits)
    builder = make_builder(state)
    inputs = builder.build(state.dummy_step(1))
    builder.tables.update(inputs.columns)
    gathered = builder.tables.gather(inputs.columns)
    assert gathered.slot_mappings[0].tolist() == [0]
    assert inputs.columns.seq_rows.tolist() == [state.spare_slot]
    assert not builder.tables.block_table[state.spare_slot].any()
    assert inputs.sample_rows.slots_np.size == 0
    assert inputs.reads.tolist() == [state.spare_slot]  # nobody has ever sampled for it


def test_no_plan_is_larger_than_the_largest_step():
    """With drafts, whose decodes may be padded to more sequences than there may be requests."""
    rng = np.random.default_rng()
    num_beyond = 0
    for _ in range(60):
        limits = replace(draw_limits(rng), max_drafts=int(rng.integers(0, 8)))
        limits = replace(limits, max_num_batched_tokens=int(rng.integers(14, 300)))
        ladder = StepLadder(
            decode_sizes(limits.max_num_seqs),
            lambda size: [40],
            mixed_plans(
                limits.max_num_seqs,
                limits.max_num_batched_tokens,
                limits.max_model_len,
                max_num_samples=limits.max_num_samples,
            ),
            drafts=drafted_counts(limits.max_drafts),
            max_num_tokens=limits.max_num_batched_tokens,
        )
        most = largest_shape(limits)
        for plan in ladder.plans:
            assert all(own <= bound for own, bound in zip(plan.shape[:4], most[:4], strict=True))
            num_beyond += plan.shape.num_samples > limits.max_num_samples
    assert num_beyond

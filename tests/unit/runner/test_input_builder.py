"""What a step's tensors hold, against lists kept by hand: tokens, positions, blocks, sampling."""

import numpy as np
import pytest
import torch
from row_steps import NaiveRows, Plan, StepGenerator, encode

from rpc_schema.sampling import SamplingParams
from worker_daemon.runner.input_batch import InputBuilder
from worker_daemon.runner.request_state import RequestState, StepLimits
from worker_daemon.runner.staging import HostStaging

CPU = torch.device("cpu")


def draw_limits(rng):
    max_num_seqs = int(rng.integers(1, 14))
    return StepLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + int(rng.integers(8, 60)),
        max_model_len=int(rng.integers(2, 40)),
        vocab_size=int(rng.integers(5, 1000)),
        block_size=2 ** int(rng.integers(0, 5)),
        num_blocks=int(rng.integers(2, 60)),
    )


def naive_token(request, position):
    known = len(request.known)
    return request.known[position] if position < known else request.sampled[position - known]


def check_tokens(limits, builder, inputs, rows, ran):
    spans = [(slot, p) for slot, (start, n, _) in ran.items() for p in range(start, start + n)]
    requests = rows.requests
    assert inputs.token_slots.tolist() == [slot for slot, _ in spans]
    assert inputs.positions.tolist() == [p for _, p in spans]
    size = limits.block_size
    assert inputs.attention.slot_mapping.tolist() == [
        requests[slot].blocks[p // size] * size + p % size for slot, p in spans
    ]
    expected = [naive_token(requests[slot], p) for slot, p in spans]
    assert builder.gather_token_ids(inputs).tolist() == expected
    from_device = [p >= len(requests[slot].known) for slot, p in spans]
    assert (inputs.host_token_ids == -1).tolist() == from_device


def check_attention(limits, attention, rows, ran):
    counts = [n for _, n, _ in ran.values()]
    ends = [start + n for start, n, _ in ran.values()]
    assert attention.num_seqs == len(ran)
    assert attention.query_start_loc.tolist() == np.cumsum([0, *counts]).tolist()
    assert attention.seq_lens.tolist() == attention.seq_lens_np.tolist() == ends
    assert attention.query_lens_np.tolist() == counts
    assert attention.max_query_len == max(counts, default=0)
    assert attention.max_seq_len == max(ends, default=0)
    for row, (slot, end) in enumerate(zip(ran, ends, strict=True)):
        used = -(-end // limits.block_size)
        blocks = attention.block_table[row, :used].tolist()
        assert blocks == rows.requests[slot].blocks[:used]


def check_sample_rows(state, inputs, rows, ran):
    sampling = {slot: (start, n) for slot, (start, n, samples) in ran.items() if samples}
    chosen = inputs.sample_rows
    assert chosen.slots.tolist() == chosen.slots_np.tolist() == list(sampling)
    last = np.cumsum([n for _, n, _ in ran.values()]) - 1
    indices = dict(zip(ran, last.tolist(), strict=True))
    assert chosen.token_indices.tolist() == [indices[slot] for slot in sampling]
    assert chosen.positions.tolist() == [start + n for start, n in sampling.values()]
    assert chosen.num_generated.tolist() == [
        start + n - rows.requests[slot].num_prompt for slot, (start, n) in sampling.items()
    ]
    assert state.are_current(chosen.slots_np, chosen.generations).all()


def check_sampling(metadata, chosen, rows):
    params = [rows.requests[slot].sampling for slot in chosen.slots_np]
    for name in ("temperature", "top_p", "min_p"):
        expected = np.array([getattr(p, name) for p in params], np.float32)
        assert getattr(metadata, name).numpy().tobytes() == expected.tobytes()
    assert metadata.top_k.tolist() == [p.top_k for p in params]
    assert metadata.seeds.tolist() == [p.seed for p in params]
    assert metadata.positions.tolist() == chosen.positions.tolist()
    random = [p for p in params if p.temperature > 0]
    assert metadata.any_random >= bool(random)
    assert metadata.any_top_k >= any(p.top_k for p in random)
    assert metadata.any_top_p >= any(p.top_p < 1 for p in random)
    assert metadata.any_min_p >= any(p.min_p for p in random)
    asked = [p.logprobs for p in params if p.logprobs is not None]
    assert metadata.num_logprobs == max(asked, default=-1)
    bans = zip(metadata.ban_rows.tolist(), metadata.ban_token_ids.tolist(), strict=True)
    assert sorted(bans) == sorted(
        (row, token)
        for row, (p, done) in enumerate(zip(params, chosen.num_generated, strict=True))
        if done < p.min_tokens
        for token in p.stop_token_ids
    )


@pytest.mark.parametrize("seed", range(10))
def test_gathered_tensors_equal_naive_ones_over_random_steps(seed):
    rng = np.random.default_rng(100 + seed)
    limits = draw_limits(rng)
    state, rows, steps = RequestState(limits), NaiveRows(limits), StepGenerator(rng, limits)
    builder = InputBuilder(state, CPU, depth=3)
    published, num_from_device = {}, 0
    for seq in range(1, 200):
        plan = steps.draw(rows)
        plan.defer = False
        message, arrays = encode(seq, plan, rows)
        ran = rows.apply(seq, plan)
        inputs = builder.build(state.apply(message, arrays))
        published = {s: p for s, p in published.items() if s in rows.requests}
        published |= {new.slot: -1 for new in plan.admissions}
        read = [s for s, (start, _, _) in ran.items() if start >= len(rows.requests[s].known)]
        assert inputs.tokens_from == max((published[s] for s in read), default=-1)
        check_tokens(limits, builder, inputs, rows, ran)
        check_attention(limits, inputs.attention, rows, ran)
        check_sample_rows(state, inputs, rows, ran)
        chosen = inputs.sample_rows
        check_sampling(builder.sampling_metadata(chosen), chosen, rows)
        num_from_device += len(read)
        sampled = rng.integers(0, limits.vocab_size, chosen.slots_np.size)
        builder.last_sampled[chosen.slots] = torch.from_numpy(sampled)
        builder.note_publication(chosen.slots_np, seq)
        for slot, token in zip(chosen.slots_np.tolist(), sampled.tolist(), strict=True):
            rows.requests[slot].sampled.append(token)
            published[slot] = seq
    assert num_from_device > 5


def test_seeds_keep_all_their_bits():
    limits = StepLimits(8, 16, 8, 10, 4, 20)
    state, rows = RequestState(limits), NaiveRows(limits)
    steps = StepGenerator(np.random.default_rng(0), limits)
    builder, plan = InputBuilder(state, CPU, depth=1), Plan()
    seeds = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62 + 12345, 2**63 - 1]
    plan.admissions = [steps.admission(slot) for slot in range(8)]
    for new, seed in zip(plan.admissions, seeds, strict=True):
        new.tokens, new.num_prompt, new.computed = [1], 1, 0
        new.sampling = SamplingParams(temperature=1.0, seed=seed)
    plan.scheduled = dict.fromkeys(range(8), 1)
    plan.blocks = [(slot, 1) for slot in range(8)]
    inputs = builder.build(state.apply(*encode(1, plan, rows)))
    assert builder.sampling_metadata(inputs.sample_rows).seeds.tolist() == seeds


def test_kept_rows_are_a_selection_of_all_columns():
    limits = StepLimits(6, 64, 8, 10, 4, 20)
    state, rows = RequestState(limits), NaiveRows(limits)
    steps = StepGenerator(np.random.default_rng(3), limits)
    plan = Plan(admissions=[steps.admission(slot) for slot in range(6)])
    plan.scheduled = {new.slot: len(new.tokens) - new.computed for new in plan.admissions}
    plan.blocks = [(slot, 1) for slot in range(6)] + [(slot, 2) for slot in range(6)]
    builder = InputBuilder(state, CPU, depth=1)
    chosen = builder.build(state.apply(*encode(1, plan, rows))).sample_rows
    assert chosen.slots_np.size == 6
    picked = np.array([5, 2, 0])
    kept = chosen.keep(picked)
    for name in ("slots_np", "generations", "num_generated"):
        assert np.array_equal(getattr(kept, name), getattr(chosen, name)[picked])
    for name in ("slots", "token_indices", "positions"):
        assert torch.equal(getattr(kept, name), getattr(chosen, name)[torch.from_numpy(picked)])


def test_dummy_step_reads_and_writes_the_null_block_alone():
    limits = StepLimits(4, 16, 8, 10, 4, 20)
    state = RequestState(limits)
    inputs = InputBuilder(state, CPU, depth=1).build(state.dummy_step(1))
    assert inputs.attention.slot_mapping.tolist() == [0]
    assert inputs.attention.block_table.tolist() == [[0]]
    assert inputs.sample_rows.slots_np.size == 0
    assert inputs.tokens_from == -1


def test_uploaded_columns_do_not_share_the_callers_memory():
    rng = np.random.default_rng(4)
    staging = HostStaging(64, CPU, depth=2)
    columns = [rng.integers(-9, 9, size).astype(np.int32) for size in (5, 0, 17, 1)]
    expected = [column.tolist() for column in columns]
    first = staging.upload(columns)
    for column in columns:
        column.fill(77)
    staging.upload(columns)
    assert [column.tolist() for column in first] == expected

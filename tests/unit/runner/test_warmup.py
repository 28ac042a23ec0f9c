"""Synthetic steps: each is valid within any limits, and the largest has the maximum size."""

import numpy as np
import pytest
import torch
from row_steps import request_state

from rpc_schema.lifecycle import CompileOrWarmUpModel, DetermineAvailableMemory
from worker_client.requests import SamplingParams
from worker_daemon.kernels.tiles import DeviceLimits, choose_num_splits, decode_tile, run_at_once
from worker_daemon.runner.scheduled_step import StepLimits
from worker_daemon.runner.warmup import (
    decode_sweep,
    largest_step,
    proposal_lengths,
    size_lengths,
    size_sweep,
    warm_up_lengths,
    warm_up_steps,
)

TINY = [
    StepLimits(1, 1, 1, 1, 1, 2),
    StepLimits(1, 1, 1, 1, 1024, 2),
    StepLimits(1, 1, 2, 5, 1, 2),
    StepLimits(1, 1, 2, 5, 2, 2),
    StepLimits(1, 8192, 1, 5, 16, 3),
    StepLimits(300, 300, 1, 5, 16, 2),
    StepLimits(300, 300, 4096, 5, 16, 2),
    StepLimits(300, 8192, 4096, 5, 1, 400),
    StepLimits(65535, 65535, 3, 5, 4, 100),
]


def random_limits(seed):
    rng = np.random.default_rng(seed)
    max_num_seqs = int(rng.integers(1, 2 ** rng.integers(1, 10)))
    return StepLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + int(rng.integers(0, 2 ** rng.integers(1, 13))),
        max_model_len=int(rng.integers(1, 2 ** rng.integers(1, 13))),
        vocab_size=int(rng.integers(1, 1000)),
        block_size=2 ** int(rng.integers(0, 8)),
        num_blocks=2 + int(rng.integers(0, 2 ** rng.integers(1, 13))),
        max_samples_per_seq=1 + seed % 3,
    )


ALL_LIMITS = TINY + [random_limits(seed) for seed in range(6)]


def test_warm_up_steps_are_valid_within_any_limits():
    request = CompileOrWarmUpModel(epoch=3, link=2, seq=9)
    for limits in ALL_LIMITS:
        state = request_state(limits)
        steps = [
            state.apply(s.message, s.arrays)
            for s in warm_up_steps(request, limits, state.parts.heaviest)
        ]
        assert len(steps) >= 2
        assert all(step.num_samples.all() and step.slots.size for step in steps)
        admitting = [step.new_requests[0] for step in steps if step.new_requests]
        kinds = {SamplingParams.of(new.extensions).temperature for new in admitting}
        assert kinds == {0.0, 1.0}
        assert not state.has_failed


def test_kernels_are_requested_for_the_lengths_that_warm_up_runs():
    request = CompileOrWarmUpModel(epoch=3, link=2, seq=9)
    for limits in ALL_LIMITS:
        state = request_state(limits)
        ran = {
            (tuple(step.ends.tolist()), tuple(step.num_tokens.tolist()))
            for each in warm_up_steps(request, limits, state.parts.heaviest)
            for step in [state.apply(each.message, each.arrays)]
        }
        requested = {(tuple(ends), tuple(counts)) for ends, counts in warm_up_lengths(limits)}
        assert requested == ran


def test_kernels_of_a_draft_model_are_requested_for_decodes_after_the_sweep():
    limits = StepLimits(64, 512, 200, 5, 16, 400)
    decodes = list(proposal_lengths(limits))
    assert len(decodes) == len(list(size_lengths(limits)))
    for (lengths, _), (ends, counts) in zip(size_lengths(limits), decodes, strict=True):
        assert counts == [1] * len(lengths)
        assert ends == [min(length + 1, 200) for length in lengths]


def test_warm_up_decodes_where_a_second_token_fits():
    limits = StepLimits(8, 64, 64, 10, 16, 20)
    state = request_state(limits)
    request = CompileOrWarmUpModel(epoch=1, link=1, seq=1)
    steps = [
        state.apply(s.message, s.arrays)
        for s in warm_up_steps(request, limits, state.parts.heaviest)
    ]
    num_alone = len(state.parts.heaviest) + 1  # with the parts that act by an extension of the step
    assert [bool(step.new_requests) for step in steps] == [
        *(True, False),
        *[True] * num_alone,
        *(True, False),
    ]
    alone = [step.new_requests[0].extensions for step in steps[2 : 1 + num_alone]]
    assert alone == [(extension,) for extension in state.parts.heaviest]


def test_the_sweep_is_valid_and_reaches_every_order_of_magnitude():
    request = CompileOrWarmUpModel(epoch=3, link=2, seq=9)
    for limits in ALL_LIMITS:
        state = request_state(limits)
        steps = [state.apply(s.message, s.arrays) for s in size_sweep(request, limits)]
        assert not state.has_failed
        totals = [step.total_num_tokens for step in steps]
        assert max(totals[:4]) == max(totals)
        assert totals[-1] == 1
        room = min(limits.max_num_seqs, limits.num_blocks - 1) * limits.max_model_len
        largest = max(step.total_num_tokens for step in steps)
        assert largest > min(room, limits.max_num_batched_tokens // 2) // 2
        assert max(step.slots.size for step in steps) * 2 > min(
            limits.max_num_seqs, limits.num_blocks - 1, limits.max_num_batched_tokens
        )


def test_the_sweep_has_long_chunks_after_earlier_context_and_beside_decodes():
    limits = StepLimits(8, 4096, 9000, 10, 16, 4000)
    state, chunks, beside, last = request_state(limits), set(), set(), []
    for synthetic in size_sweep(CompileOrWarmUpModel(epoch=1, link=1, seq=1), limits):
        step = state.apply(synthetic.message, synthetic.arrays)
        if step.starts[-1] > 0:
            chunks.add(int(step.num_tokens[-1]))
            beside.add(step.num_tokens[:-1].tolist() == [1])
            last = [step.num_tokens.tolist(), step.longest]
    assert chunks == {511, 1024, 2047, 4095}
    assert beside == {False, True}
    # A chunk that the paged kernels take, beside a decode of a step that may have many keys.
    assert last == [[1, 511], 1024 + 512]


def test_the_sweep_of_decodes_is_valid():
    request = CompileOrWarmUpModel(epoch=3, link=2, seq=9)
    for limits in ALL_LIMITS[1::4]:
        state = request_state(limits)
        steps = [state.apply(s.message, s.arrays) for s in decode_sweep(request, limits)]
        assert not state.has_failed
        assert all(step.num_tokens.max() == 1 and step.num_samples.all() for step in steps)
        assert max(step.slots.size for step in steps) == limits.max_num_seqs
        assert max(step.longest for step in steps) == limits.max_model_len


@pytest.mark.each_value
@pytest.mark.parametrize("has_fp8_cache", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 4, 8])
@pytest.mark.parametrize("num_sms", [78, 132])
def test_the_sweep_of_decodes_takes_every_kernel_that_a_decode_takes(
    num_kv_heads, num_sms, has_fp8_cache
):
    device = DeviceLimits(num_sms, 227 * 1024)
    rng = np.random.default_rng()
    max_num_seqs, max_model_len = int(rng.integers(1, 300)), int(rng.integers(16, 40000))
    limits = StepLimits(max_num_seqs, 8192, max_model_len, 5, 16, 4000)

    def kernel(num_seqs, longest):
        splits = choose_num_splits(
            num_seqs, num_kv_heads, longest, None, device, has_fp8_cache=has_fp8_cache
        )
        keys = -(-longest // splits)
        num_programs = num_seqs * num_kv_heads * splits
        tile = decode_tile(
            num_programs, keys, 4, 128, torch.bfloat16, device,
            is_split=splits > 1, has_fp8_cache=has_fp8_cache,
        )  # fmt: skip
        return splits > 1, run_at_once(num_programs, device), tile

    state, swept = request_state(limits), set()
    for synthetic in decode_sweep(CompileOrWarmUpModel(epoch=1, link=1, seq=1), limits):
        step = state.apply(synthetic.message, synthetic.arrays)
        swept.add(kernel(step.slots.size, step.longest))
    for _ in range(2000):
        size, longest = rng.integers(1, max_num_seqs + 1), rng.integers(1, max_model_len + 1)
        assert kernel(int(size), int(longest)) in swept, (size, longest, limits)


def test_largest_step_fills_the_batch_and_samples_all_that_it_may_of_every_row():
    request = DetermineAvailableMemory(epoch=1, link=1, seq=4)
    for limits in ALL_LIMITS:
        num_seqs = limits.max_num_seqs
        state = request_state(limits)
        synthetic = largest_step(request, limits, state.parts.heaviest)
        step = state.apply(synthetic.message, synthetic.arrays)
        most = min(limits.max_num_batched_tokens, num_seqs * limits.max_model_len)
        assert step.slots.size == num_seqs and step.total_num_tokens == most
        assert step.num_samples.all()
        assert step.num_samples.sum() == min(limits.max_num_samples, most)


@pytest.mark.parametrize("kind", [CompileOrWarmUpModel, DetermineAvailableMemory])
def test_synthetic_steps_carry_the_ids_of_their_operation(kind):
    request, limits = kind(epoch=7, link=5, seq=11), StepLimits(4, 16, 8, 10, 4, 20)
    heaviest = request_state(limits).parts.heaviest
    sweeps = (size_sweep(request, limits), decode_sweep(request, limits))
    steps = [*warm_up_steps(request, limits, heaviest), *sweeps[0], *sweeps[1]]
    for step in (largest_step(request, limits, heaviest), *steps):
        message = step.message
        assert (message.epoch, message.link, message.seq) == (7, 5, 11)

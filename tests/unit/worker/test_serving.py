"""A worker from start-up to tokens, against transformers and against itself in other batches."""

import weakref

import numpy as np
import pytest
import torch
from worker_driver import GREEDY, SCHEDULER, WorkerDriver

from rpc_schema import lifecycle, step
from rpc_schema.errors import InvalidStepError
from worker_client.requests import SamplingParams
from worker_daemon.layers.torch_ops import TorchOps
from worker_daemon.runner.step_sampler import StepSampler

NOISY = SamplingParams(temperature=1.1, top_k=40, top_p=0.95, min_p=0.01, seed=2**63 - 5)


@pytest.mark.parametrize(("name", "length"), [("llama", 37), ("qwen", 1)])
def test_start_up_chain_ends_in_the_reference_tokens(
    name, length, make_worker, prompts, reference, request
):
    model = request.getfixturevalue(name)
    driver = WorkerDriver(make_worker())
    device = driver.init_device()
    assert (device.backend, device.device_name, device.rank) == ("gloo", "CPU", 0)
    loaded = driver.load_model(name)
    assert loaded.max_model_len == 128
    assert loaded.model_memory_bytes >= 4 * sum(p.numel() for p in model.parameters())
    memory = driver.profile()
    assert memory.available_bytes > 0
    assert memory.weights_bytes == loaded.model_memory_bytes
    driver.allocate()
    driver.warm_up()
    ids = driver.ids()
    metadata = driver.worker.get_model_metadata(lifecycle.GetModelMetadata(**ids))
    assert metadata.vocab_size == model.config.vocab_size
    assert metadata.num_layers == 3
    (prompt,) = prompts([length], vocab_size=model.config.vocab_size)
    assert driver.generate(5, prompt, 16) == reference(model, prompt, 16)


def test_many_lengths_at_once_equal_the_reference(serving, llama, prompts, reference):
    texts = prompts([1, 16, 17, 5, 12, 3], seed=3)
    new = [(slot, text, GREEDY) for slot, text in enumerate(texts)]
    first = serving.execute({slot: len(text) for slot, text in enumerate(texts)}, new)
    tokens = {slot: [sampled.token] for slot, sampled in first.items()}
    rng = np.random.default_rng(5)
    while min(map(len, tokens.values())) < 14:
        chosen = [slot for slot in tokens if rng.random() < 0.7]
        for slot, sampled in serving.execute(dict.fromkeys(chosen, 1)).items():
            tokens[slot].append(sampled.token)
    for slot, text in enumerate(texts):
        assert tokens[slot] == reference(llama, text, len(tokens[slot]))


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunked_prefill_gives_the_same_tokens(serving, prompts, chunk):
    (prompt,) = prompts([45], seed=chunk)
    whole = serving.generate(0, prompt, 8, NOISY)
    assert serving.generate(6, prompt, 8, NOISY, chunk=chunk) == whole


def test_prefix_hit_gives_the_same_tokens(serving, llama, prompts, reference):
    shared, tail, other = prompts([32, 6, 9], seed=4)
    serving.execute({0: 38}, [(0, shared + tail, GREEDY)])
    hit = (32, serving.blocks[0][:2])
    first = serving.execute({1: 9}, [(1, shared + other, GREEDY, hit)])[1].token
    tokens = [first] + [serving.execute({1: 1})[1].token for _ in range(5)]
    assert tokens == reference(llama, shared + other, 6)


def test_seeded_sampling_is_independent_of_the_batch(serving, prompts):
    text, *others = prompts([20, 11, 7, 9], seed=6)
    alone = serving.generate(2, text, 10, NOISY)
    new = [(slot + 3, other, NOISY) for slot, other in enumerate(others)] + [(0, text, NOISY)]
    batch = {slot: len(tokens) for slot, tokens, _ in new}
    tokens = [serving.execute(batch, new)[0].token]
    rng = np.random.default_rng(1)
    while len(tokens) < 10:
        company = [slot for slot in (3, 4, 5) if rng.random() < 0.6]
        tokens.append(serving.execute(dict.fromkeys([0, *company], 1))[0].token)
    assert tokens == alone
    reseeded = SamplingParams(temperature=1.1, top_k=40, top_p=0.95, min_p=0.01, seed=1)
    assert serving.generate(2, text, 10, reseeded) != alone


def test_logprobs_equal_the_reference(serving, llama, prompts):
    (prompt,) = prompts([23], seed=8)
    params = SamplingParams(temperature=0.7, seed=9, logprobs=5)
    sampled = serving.execute({4: 23}, [(4, prompt, params)])[4]
    with torch.no_grad():
        expected = llama(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    (chosen, value), *likeliest = sampled.logprobs
    assert chosen == sampled.token
    assert abs(value - expected[chosen].item()) < 1e-4
    values, ids = expected.topk(5)
    assert [token for token, _ in likeliest] == ids.tolist()
    assert np.allclose([v for _, v in likeliest], values, atol=1e-4)
    assert sampled.rank == 1 + int((expected > expected[chosen]).sum())


def test_min_tokens_holds_stop_tokens_back(serving, prompts):
    (prompt,) = prompts([10], seed=10)
    free = serving.generate(0, prompt, 4)
    params = SamplingParams(min_tokens=2, stop_token_ids=tuple(free[:1]))
    held = serving.generate(0, prompt, 4, params)
    assert free[0] not in held[:2]


def test_deferred_sampling_without_masks_equals_immediate(serving, prompts):
    (prompt,) = prompts([15], seed=11)
    immediate = serving.generate(1, prompt, 6, NOISY)
    tokens, new, count = [], [(1, prompt, NOISY)], len(prompt)
    while len(tokens) < 6:
        assert serving.execute({1: count}, new, defer=True) == {}
        tokens.append(serving.sample(serving.seq)[1].token)
        new, count = [], 1
    assert tokens == immediate


def test_deferred_sampling_obeys_its_masks(serving, llama, prompts):
    texts = prompts([9, 14, 3], seed=12)
    new = [(slot, text, GREEDY) for slot, text in enumerate(texts)]
    serving.execute({slot: len(text) for slot, text in enumerate(texts)}, new, defer=True)
    rng = np.random.default_rng(13)
    masks = {slot: rng.random(151) < 0.1 for slot in (2, 0)}
    sampled = serving.sample(serving.seq, masks)
    for slot, text in enumerate(texts):
        with torch.no_grad():
            logits = llama(torch.tensor([text])).logits[0, -1]
        if slot in masks:
            logits[~torch.from_numpy(masks[slot])] = -torch.inf
        assert sampled[slot].token == logits.argmax()


LOGIT_USERS = (
    NOISY,
    SamplingParams(logprobs=4),
    SamplingParams(temperature=0.9, seed=3, presence_penalty=0.6, repetition_penalty=1.3),
    SamplingParams(logit_bias={7: 2.5, 90: -1.0}, allowed_token_ids=tuple(range(0, 151, 2))),
    GREEDY,
    SamplingParams(temperature=1.2, seed=8, bad_words=((5,), (6, 7)), logprobs=2),
)
"""Parameters of the slots from 0 on."""


def asked_for(slot, sampled):
    """Without what is reported because another row of the message asks for it."""
    wanted = LOGIT_USERS[slot].logprobs
    return sampled.token, [] if wanted is None else (sampled.logprobs[: 1 + wanted], sampled.rank)


def test_rows_sampled_later_see_the_logits_of_their_step(serving, prompts):
    """In two messages, behind the step's other rows and another step: to the last bit, as all at
    once. No part changes them in place for those that come after it."""
    texts = prompts([9, 14, 3, 7, 11, 5], seed=20)
    lengths = {slot: len(text) for slot, text in enumerate(texts)}
    rng = np.random.default_rng()

    def run(later):
        serving.worker.on_attach()
        driver = WorkerDriver(serving.worker)
        new = [(slot, text, LOGIT_USERS[slot]) for slot, text in enumerate(texts)]
        sampled = [driver.execute(lengths, new)]
        for _ in range(4):
            rows = driver.execute(dict.fromkeys(lengths, 1), defer=later)
            seq = driver.seq
            between = driver.execute(dict.fromkeys((1, 4), 1))
            if later:
                rows |= driver.sample(seq, slots=later[:2])
                rows |= driver.sample(seq)
            sampled += [rows, between]
        return [{slot: asked_for(slot, own) for slot, own in rows.items()} for rows in sampled]

    later = rng.permutation([0, 2, 3, 5]).tolist()
    assert run(later) == run(())


def test_rows_that_are_sampled_in_parts_hold_the_logits_of_those_that_are_left(
    serving, prompts, monkeypatch
):
    """Before a part is sampled, the logits of the others are alone: the memory profile counts one
    row for each request, beside what sampling takes."""
    texts = prompts([9, 14, 3, 7], seed=22)
    new = [(slot, text, GREEDY) for slot, text in enumerate(texts)]
    serving.execute({slot: len(text) for slot, text in enumerate(texts)}, new, defer=True)
    step_seq, waiting = serving.seq, serving.worker._serving.runner._unsampled
    whole, are_gone = weakref.ref(waiting[step_seq].rows.chosen.logits), []
    sample = StepSampler.sample

    def noting(sampler, rows):
        are_gone.append(whole() is None)
        return sample(sampler, rows)

    monkeypatch.setattr(StepSampler, "sample", noting)
    serving.execute({}, finished=[1])
    masks = dict.fromkeys((0, 1), np.arange(151) % 3 == 0)
    assert list(serving.sample(step_seq, masks, slots=(0, 1))) == [0]
    assert waiting[step_seq].rows.chosen.logits.shape[0] == 2
    masks = dict.fromkeys((2, 3), np.arange(151) % 3 == 0)
    assert sorted(serving.sample(step_seq, masks)) == [2, 3]
    assert (are_gone, list(waiting)) == ([True, True], [])


def test_a_step_reads_the_output_layer_once(serving, prompts, monkeypatch):
    reads, product = [], TorchOps.product

    def counting(ops, source, matrix, *rest):
        if matrix.shape[0] == 192:  # 151 tokens, padded
            reads.append(source.shape[0])
        return product(ops, source, matrix, *rest)

    monkeypatch.setattr(TorchOps, "product", counting)
    texts = prompts([9, 14, 3, 7, 11, 5], seed=21)
    new = [(slot, text, LOGIT_USERS[slot]) for slot, text in enumerate(texts)]
    serving.execute({slot: len(text) for slot, text in enumerate(texts)}, new)
    assert reads == [6]
    serving.execute(dict.fromkeys(range(3), 1))
    assert reads == [6, 3]
    serving.execute(dict.fromkeys(range(6), 1), defer=(1, 4, 5))
    step_seq, masks = serving.seq, dict.fromkeys((4, 1), np.arange(151) % 3 == 0)
    assert len(serving.sample(step_seq, masks, slots=(4, 1))) == 2
    assert len(serving.sample(step_seq)) == 1
    assert reads == [6, 3, 6]


def test_request_that_finished_while_it_waited_is_left_out(serving, prompts):
    first, second, third = prompts([4, 5, 6], seed=14)
    new = [(0, first, GREEDY), (1, second, GREEDY)]
    serving.execute({0: 4, 1: 5}, new, defer=True)
    waiting = serving.seq
    serving.execute({0: 6}, [(0, third, GREEDY)], finished=[0])
    assert list(serving.sample(waiting)) == [1]
    with pytest.raises(InvalidStepError):
        serving.sample(waiting)


def test_step_without_tokens_and_dummy_batches_change_nothing(serving, prompts):
    (prompt,) = prompts([13], seed=15)
    expected = serving.generate(0, prompt, 6)
    tokens = [serving.execute({0: 13}, [(0, prompt, GREEDY)])[0].token]
    while len(tokens) < 6:
        assert serving.execute({}) == {}
        dummy = step.ExecuteDummyBatch(**serving.ids())
        reply, frames = serving.worker.execute_dummy_batch(dummy).result()
        assert (reply.slots, reply.seq, frames) == (b"", serving.seq, [])
        tokens.append(serving.execute({0: 1})[0].token)
    assert tokens == expected


def test_context_may_be_filled_to_the_last_position(serving, llama, prompts, reference):
    (prompt,) = prompts([128], seed=16)
    serving.execute({0: 64}, [(0, prompt, GREEDY)])
    last = serving.execute({0: 64})[0].token
    assert last == reference(llama, prompt[:127] + prompt[127:], 1)[0]
    with pytest.raises(InvalidStepError, match="at most 8 blocks"):
        serving.execute({0: 1})


def test_attach_drops_the_requests_of_the_driver_before(serving, prompts):
    (prompt,) = prompts([8], seed=17)
    expected = serving.generate(0, prompt, 3)
    serving.execute({0: 8, 1: 8}, [(0, prompt, GREEDY), (1, prompt, GREEDY)])
    assert serving.worker.on_attach()
    serving.release(0)
    serving.release(1)
    assert serving.generate(0, prompt, 3) == expected


def test_half_precision_runs(make_worker, llama, prompts):
    driver = WorkerDriver(make_worker(), scheduler=SCHEDULER)
    driver.init_device()
    driver.serve("llama", dtype="bfloat16")
    (prompt,) = prompts([20], seed=18)
    tokens = driver.generate(0, prompt, 5)
    assert len(tokens) == 5
    full = 4 * sum(p.numel() for p in llama.parameters())
    assert full / 2 <= driver.worker.describe().memory_bytes["weights"] < full

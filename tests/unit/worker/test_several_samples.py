"""Steps that sample several tokens of a request, one after each of its last scheduled tokens: each
as if the request ended before it, in every way that a request can be sampled."""

import msgspec
import numpy as np
import pytest
import torch
import transformers
from worker_driver import GREEDY, SCHEDULER, WorkerDriver

from rpc_schema.adoption import AdoptRequests
from rpc_schema.errors import InvalidStepError
from worker_client.requests import SamplingParams
from worker_daemon.worker.worker import Worker

MOST = 4
SEVERAL = msgspec.structs.replace(SCHEDULER, max_samples_per_seq=MOST)
NOISY = SamplingParams(temperature=1.3, top_k=60, top_p=0.97, seed=2**62 + 9)
FIRST = 7
"""Length of the prompts; the rest was generated."""
PARAMS = {
    "greedy": lambda text: GREEDY,
    "random": lambda text: NOISY,
    "penalties": lambda text: SamplingParams(
        repetition_penalty=1.9, presence_penalty=1.5, frequency_penalty=0.8, logprobs=3
    ),
    "bad words": lambda text: SamplingParams(
        # A token that is chosen, after the last one; and after the one before it.
        bad_words=(*((text[-1], token) for token in text[-3:-1]), tuple(text[-4:-2])),
        logprobs=2,
    ),
    "min tokens": lambda text: SamplingParams(
        min_tokens=len(text) - FIRST - 1, stop_token_ids=tuple(range(0, 151, 2))
    ),
    "rules": lambda text: SamplingParams(
        temperature=0.8, seed=5, logit_bias={7: 3.0}, allowed_token_ids=tuple(range(0, 151, 3))
    ),
}


@pytest.fixture(scope="module")
def several_worker(model_root, llama):
    worker = Worker("cpu", [model_root], lambda phase, seconds, done=0.0: None)
    driver = WorkerDriver(worker, scheduler=SEVERAL)
    driver.init_device()
    driver.serve("llama")
    yield worker
    worker.close()


@pytest.fixture
def several(several_worker):
    several_worker.on_attach()
    return WorkerDriver(several_worker, scheduler=SEVERAL)


def likeliest(model, tokens):
    """Transformers' most likely token after each of these."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].argmax(-1).tolist()


@pytest.mark.parametrize("chunk", [1, 4, 40])
def test_samples_follow_the_last_tokens_of_a_row(several, llama, prompts, reference, chunk):
    """In a batch of rows with one sample and with several, in whole prompts or their last chunk;
    each row goes on from its newest sample."""
    counts = {0: 1, 1: min(3, chunk), 3: min(2, chunk), 4: 1, 6: min(MOST, chunk)}
    texts = dict(zip(counts, prompts([9, 12, 7, 1, 11], seed=31), strict=True))
    new = [(slot, text, GREEDY) for slot, text in texts.items()]
    first = {slot: max(0, len(text) - chunk) for slot, text in texts.items()}
    begun = {slot: number for slot, number in first.items() if number}
    if begun:
        assert several.execute(begun, [each for each in new if each[0] in begun]) == {}
    rest = {slot: len(text) - first[slot] for slot, text in texts.items()}
    left = [each for each in new if each[0] not in begun]
    asked = {slot: count for slot, count in counts.items() if slot != 4}  # 1: as without
    sampled = several.execute(rest, left, several=asked)
    for slot, count in counts.items():
        own = [*(each.token for each in sampled[slot].earlier), sampled[slot].token]
        assert own == likeliest(llama, texts[slot])[-count:]
    tokens = {slot: [own.token] for slot, own in sampled.items()}
    for _ in range(3):
        for slot, own in several.execute(dict.fromkeys(counts, 1)).items():
            assert not own.earlier
            tokens[slot].append(own.token)
    for slot, text in texts.items():
        assert tokens[slot] == reference(llama, text, 4)


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("later", [False, True])
def test_each_sample_is_that_of_a_request_that_ends_before_it(several, prompts, name, later):
    """Beside another row with several samples and other parameters. The tokens were generated, so
    a rule that counted one of them too early would forbid the model's choice."""
    head, other = prompts([FIRST, 17], seed=41)
    text = head + several.generate(0, head, 9)
    params, alone = PARAMS[name](text), []
    for end in range(len(text) - MOST + 1, len(text) + 1):
        sampled = run(several, [(2, text[:end], params)])
        alone.append(facts(sampled[2]))
        several.execute({}, finished=[2])
    company = run(several, [(5, other, NOISY)], several={5: 2})[5]
    several.execute({}, finished=[5])
    both = [(2, text, params), (5, other, NOISY)]
    sampled = run(several, both, several={2: MOST, 5: 2}, later=later)
    assert [facts(own) for own in [*sampled[2].earlier, sampled[2]]] == alone
    assert [own.token for own in sampled[5].earlier] == [own.token for own in company.earlier]


def run(driver, new, several=None, later=False):
    """Compute whole requests, whose prompts end early; later: sample them in two messages."""
    scheduled = {slot: len(text) for slot, text, _ in new}
    message, arrays = driver.step(scheduled, new, defer=later)
    pairs = [v for slot, count in (several or {}).items() for v in (slot, count)]
    message = msgspec.structs.replace(
        message,
        num_samples=np.array(pairs, "<i4").tobytes(),
        scheduled_new_reqs=tuple(
            msgspec.structs.replace(each, num_prompt_tokens=FIRST)
            for each in message.scheduled_new_reqs
        ),
    )
    sampled = driver.read(driver.worker.execute_model(message, arrays))
    if later:
        assert sampled == {}
        seq = driver.seq
        for slot, *_ in reversed(new):
            sampled |= driver.sample(seq, slots=[slot])
    return sampled


def facts(sampled):
    return sampled.token, [(token, round(p, 4)) for token, p in sampled.logprobs], sampled.rank


def test_penalties_of_each_sample_equal_transformers(several, llama, prompts):
    text = prompts([9], seed=33)[0]
    text += several.generate(0, text, 9)
    params = SamplingParams(repetition_penalty=2.5)
    sampled = several.execute({0: 18}, [(0, text, params)], several={0: 3})[0]
    rule = transformers.RepetitionPenaltyLogitsProcessor(2.5)
    for end, own in zip((16, 17, 18), [*sampled.earlier, sampled], strict=True):
        with torch.no_grad():
            logits = llama(torch.tensor([text[:end]])).logits[0, -1:]
        assert own.token == rule(torch.tensor([text[:end]]), logits).argmax()


def test_masks_are_those_of_the_newest_samples(several, llama, prompts):
    texts = prompts([9, 14], seed=35)
    new = [(slot, text, GREEDY) for slot, text in enumerate(texts)]
    lengths = {slot: len(text) for slot, text in enumerate(texts)}
    several.execute(lengths, new, defer=True, several={0: 3, 1: 2})
    rng = np.random.default_rng(36)
    masks = {1: rng.random(151) < 0.1, 0: rng.random((2, 151)) < 0.1}
    sampled = several.sample(several.seq, masks)
    for slot, count in ((0, 3), (1, 2)):
        with torch.no_grad():
            logits = llama(torch.tensor([texts[slot]])).logits[0, -count:]
        own = np.atleast_2d(masks[slot])
        logits[-len(own) :][~torch.from_numpy(own)] = -torch.inf
        tokens = [*(each.token for each in sampled[slot].earlier), sampled[slot].token]
        assert tokens == logits.argmax(-1).tolist()
    with pytest.raises(InvalidStepError, match=f"at most {MOST} times"):
        several.execute({0: 1}, defer=True)
        several.sample(several.seq, {0: np.ones((MOST + 1, 151), np.bool_)})


def test_an_adopting_driver_gets_the_tokens_that_rows_gained(several, prompts):
    texts = prompts([9, 14], seed=37)
    new = [(slot, text, NOISY) for slot, text in enumerate(texts)]
    lengths = {slot: len(text) for slot, text in enumerate(texts)}
    first = several.execute(lengths, new, several={0: 3})
    second = several.execute({0: 1, 1: 1})
    reply = several.worker.adopt_requests(AdoptRequests(**several.ids()))
    tokens = np.frombuffer(reply.token_ids, "<i4").tolist()
    assert tokens == [
        token
        for slot, text in enumerate(texts)
        for token in (*text, first[slot].token, second[slot].token)
    ]

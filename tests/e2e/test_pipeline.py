"""A full pipeline under random delays, and sampling that waits for grammar masks."""

import numpy as np
import pytest

from tests.support.checkpoints import VOCAB_SIZE, decisive_prompts, prompts
from tests.support.delayed_daemon import DelayedDaemons, most_steps_at_once
from tests.support.exhaustive import exhaustively
from tests.support.mock_schedulers import RandomScheduler
from tests.support.serving import (
    assert_greedy,
    connect,
    generate,
    greedy_request,
    scheduler_limits,
    worker_config,
)
from worker_client.group.outcomes import StepFuture
from worker_client.requests import GenerationRequest
from worker_client.scheduler_output import NewRequest, SchedulerOutput
from worker_client.steps.masks import StepMasks
from worker_client.worker_group import WorkerGroup

BLOCK_SIZE = 4
ATOL = 1e-4
EVERYTHING = np.ones(VOCAB_SIZE, np.bool_)


@pytest.fixture(scope="module")
def reference(checkpoint):
    return checkpoint("LlamaForCausalLM", num_hidden_layers=5, attention_bias=True, seed=51)


@pytest.fixture(scope="module")
def delayed(model_root, tmp_path_factory):
    """Three daemons that wait 0 to 30 ms before and after each step."""
    with DelayedDaemons(3, model_root, tmp_path_factory.mktemp("journals")) as daemons:
        yield daemons


@pytest.fixture
def requests(reference):
    lengths = [5, 19, 33, 8, 26, 12, 41, 3]
    return [
        greedy_request(f"r{index}", prompt, 16)
        for index, prompt in enumerate(decisive_prompts(reference, 61, lengths, 16))
    ]


def test_three_steps_in_flight_under_delays(delayed, reference, requests):
    config = worker_config(reference.path, 3, max_num_seqs=8, block_size=BLOCK_SIZE)
    with connect(delayed.endpoints, config) as (group, loaded):
        run = generate(group, loaded, requests, max_num_batched_tokens=24)
        mixed = RandomScheduler(scheduler_limits(group, loaded), seed=3)
        shuffled = generate(group, loaded, requests, mixed)
    assert_greedy(run, reference, requests)
    assert_greedy(shuffled, reference, requests)
    assert run.most_in_flight > 3
    assert most_steps_at_once(delayed.stays()) >= 3


def test_sampled_tokens_under_delays(delayed, serve, reference):
    requests = [
        greedy_request(f"s{index}", prompt, 12, temperature=1.2, seed=index, top_p=0.9)
        for index, prompt in enumerate(prompts(62, [4, 17, 30, 9, 22]))
    ]
    with serve(reference.path) as (group, loaded):
        expected = generate(group, loaded, requests).tokens
    config = worker_config(reference.path, 3, block_size=BLOCK_SIZE)
    with connect(delayed.endpoints, config) as (group, loaded):
        assert generate(group, loaded, requests).tokens == expected


class DeferredLoop:
    """Drives requests by hand: one step for all, whose sampling waits for masks."""

    def __init__(
        self, group: WorkerGroup, requests: list[GenerationRequest], first_block: int = 1
    ) -> None:
        self.group = group
        self.requests = requests
        self.tokens: dict[str, list[int]] = {request.id: [] for request in requests}
        self._next_block = first_block

    def prefill(self) -> StepFuture:
        """Admit all, with blocks for every token that they will ever have."""
        new = [
            NewRequest(
                req_id=request.id,
                token_ids=request.prompt,
                num_prompt_tokens=len(request.prompt),
                num_computed_tokens=0,
                block_ids=self._take_blocks(len(request.prompt) + request.max_tokens),
                extensions=request.extensions(()),
            )
            for request in self.requests
        ]
        return self.group.execute_model(
            SchedulerOutput(
                num_scheduled_tokens={r.req_id: len(r.token_ids) for r in new},
                scheduled_new_reqs=new,
                extensions=(StepMasks(deferred=[r.req_id for r in new]),),
            )
        )

    def decode(self) -> StepFuture:
        """Decode one more token for each request."""
        return self.group.execute_model(
            SchedulerOutput(
                decode_req_ids=tuple(self.tokens), extensions=(StepMasks(deferred=self.tokens),)
            )
        )

    def sample(self, deferred: StepFuture, masks: dict[str, np.ndarray]) -> None:
        """masks: bool [VOCAB_SIZE] for some requests."""
        packed = {req_id: pack(mask) for req_id, mask in masks.items()}
        future = self.group.sample_tokens(deferred, (StepMasks(packed),))
        assert not deferred.result().req_ids
        sampled = future.result().sampled
        assert sampled.keys() == self.tokens.keys()
        for req_id, token in sampled.items():
            self.tokens[req_id].append(token)

    def finish(self) -> None:
        """Free the requests' rows."""
        self.group.execute_model(SchedulerOutput(finished_req_ids=tuple(self.tokens))).result()

    def _take_blocks(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // BLOCK_SIZE)
        self._next_block += count
        return list(range(self._next_block - count, self._next_block))


def pack(mask: np.ndarray) -> np.ndarray:
    """bool [VOCAB_SIZE] -> int32 [ceil(VOCAB_SIZE / 32)], lowest bit first."""
    bits = np.zeros(-(-VOCAB_SIZE // 32) * 32, np.bool_)
    bits[:VOCAB_SIZE] = mask
    return np.packbits(bits, bitorder="little").view("<i4")


def draw_masks(rng: np.random.Generator, req_ids: list[str]) -> dict[str, np.ndarray]:
    """From one allowed token to nearly all, for about two thirds of the requests."""
    masks = {}
    for req_id in req_ids:
        mask = rng.random(VOCAB_SIZE) < rng.choice([0.0, 0.02, 0.5, 0.97])
        mask[rng.integers(VOCAB_SIZE)] = True
        if rng.random() < 0.67:
            masks[req_id] = mask
    return masks


def assert_likeliest(reference, sequence: list[int], mask: np.ndarray, token: int) -> None:
    """No token that the mask allows is more likely after the sequence."""
    logprobs = reference.logprobs(sequence)[-1].numpy()
    assert mask[token]
    assert logprobs[token] >= logprobs[mask].max() - ATOL


@pytest.mark.parametrize("shape", [exhaustively((1, 1)), exhaustively((2, 1)), (2, 2)])
def test_grammar_masks(serve, reference, shape):
    num_steps = 8
    rng = np.random.default_rng(71)
    requests = [
        greedy_request(f"g{index}", prompt, num_steps)
        for index, prompt in enumerate(prompts(63, [7, 20, 3, 14]))
    ]
    history = []
    with serve(reference.path, *shape, block_size=BLOCK_SIZE) as (group, _):
        loop = DeferredLoop(group, requests)
        for step in range(num_steps):
            masks = draw_masks(rng, list(loop.tokens))
            loop.sample(loop.prefill() if step == 0 else loop.decode(), masks)
            history.append(masks)
        loop.finish()
    for request in requests:
        sequence = request.prompt.tolist()
        for masks, token in zip(history, loop.tokens[request.id], strict=True):
            assert_likeliest(reference, sequence, masks.get(request.id, EVERYTHING), token)
            sequence.append(token)


def test_masks_hold_for_random_sampling(serve, reference):
    """At a high temperature, two allowed tokens of which each must come up."""
    allowed = np.zeros(VOCAB_SIZE, np.bool_)
    allowed[[17, 300]] = True
    requests = [
        greedy_request(f"h{index}", prompt, 4, temperature=50.0, seed=index)
        for index, prompt in enumerate(prompts(64, [5] * 8))
    ]
    with serve(reference.path, 2, block_size=BLOCK_SIZE) as (group, _):
        loop = DeferredLoop(group, requests)
        for step in range(4):
            deferred = loop.prefill() if step == 0 else loop.decode()
            loop.sample(deferred, dict.fromkeys(loop.tokens, allowed))
        loop.finish()
    assert {token for tokens in loop.tokens.values() for token in tokens} == {17, 300}


def test_deferred_sampling_without_masks_is_ordinary_sampling(serve, reference):
    requests = [
        greedy_request(f"d{index}", prompt, 6, temperature=index * 0.6, seed=3)
        for index, prompt in enumerate(prompts(65, [7, 20, 3]))
    ]
    with serve(reference.path, 2, block_size=BLOCK_SIZE) as (group, loaded):
        loop = DeferredLoop(group, requests)
        loop.sample(loop.prefill(), {})
        for _ in range(5):
            loop.sample(loop.decode(), {})
        loop.finish()
        assert generate(group, loaded, requests).tokens == loop.tokens


def test_two_steps_wait_for_their_masks(serve, reference):
    """While the second stage holds back one half's tokens, the other half runs."""
    num_steps = 6
    only = {name: np.zeros(VOCAB_SIZE, np.bool_) for name in "ab"}
    only["a"][100:140] = True
    only["b"][5:50] = True
    requests = {
        name: [greedy_request(f"{name}{i}", p, num_steps) for i, p in enumerate(prompts(s, [9, 4]))]
        for name, s in (("a", 66), ("b", 67))
    }
    with serve(reference.path, 2, block_size=BLOCK_SIZE) as (group, _):
        loops = {n: DeferredLoop(group, requests[n], 1 + 20 * i) for i, n in enumerate("ab")}
        waiting = {name: loop.prefill() for name, loop in loops.items()}
        for step in range(num_steps):
            for name, loop in loops.items():
                loop.sample(waiting[name], dict.fromkeys(loop.tokens, only[name]))
                if step < num_steps - 1:
                    waiting[name] = loop.decode()
        for loop in loops.values():
            loop.finish()
    for name, loop in loops.items():
        for request in requests[name]:
            sequence = request.prompt.tolist()
            for token in loop.tokens[request.id]:
                assert_likeliest(reference, sequence, only[name], token)
                sequence.append(token)

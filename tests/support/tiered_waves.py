"""Requests in waves, whose prompts begin with one of a few stems, for a KV cache that holds fewer
of them than host memory."""

import contextlib
import random
from dataclasses import dataclass, field

from tests.support.checkpoints import NearTie, prompts
from tests.support.every_draft import every_draft
from tests.support.serving import assert_greedy_tokens, greedy_request, scheduler_limits
from worker_client.driver import Driver

HOST_BYTES = 1 << 20
NUM_GPU_BLOCKS = 48
CONFIG = {
    "kv_host_memory_bytes": HOST_BYTES,
    "max_model_len": 96,
    "max_num_batched_tokens": 32,
}
"""A tier of more blocks than the KV cache has, and prompts in several chunks."""


@dataclass
class Waves:
    """Requests in waves, whose prompts begin with one of a few stems in turn: more than the KV
    cache holds, so that what it keeps longest is what is used last."""

    seed: int
    stems: list[list[int]] = field(default_factory=list)
    requests: list[list[object]] = field(default_factory=list)

    def __post_init__(self):
        rng = random.Random(self.seed)
        lengths = [rng.randint(34, 49) for _ in range(6)]
        self.stems = [each.tolist() for each in prompts(rng.randrange(1 << 20), lengths)]
        turns = iter(self.stems * 3)
        self.requests = [
            [self._request(rng, next(turns), f"{wave}-{index}") for index in range(4)]
            for wave in range(4)
        ]

    def _request(self, rng, stem, name):
        tail = prompts(rng.randrange(1 << 20), [rng.randint(1, 9)])[0].tolist()
        return greedy_request(name, stem + tail, rng.randint(4, 10))

    @property
    def flat(self):
        return [request for wave in self.requests for request in wave]


def new_driver(group, loaded, **options):
    return Driver(group, every_draft(scheduler_limits(group, loaded)), **options)


def run_waves(driver, waves):
    """The outputs of all waves, one after the other."""
    outputs = {}
    for wave in waves:
        for request in wave:
            driver.add_request(request)
        outputs |= {each.req_id: each for each in driver.run()}
    return outputs


def assert_right(outputs, model, waves):
    """Compare with transformers' tokens, where rounding cannot change them."""
    clear = []
    for request in waves.flat:
        with contextlib.suppress(NearTie):
            model.greedy(request.prompt.tolist(), request.max_tokens)
            clear.append(request)
    assert len(clear) > len(waves.flat) // 2, waves.seed
    tokens = tokens_of(outputs)
    assert_greedy_tokens({each.id: tokens[each.id] for each in clear}, model, clear)


def tokens_of(outputs):
    return {name: output.token_ids for name, output in outputs.items()}


def num_loaded(outputs):
    return sum(output.num_loaded_tokens for output in outputs.values())


def tiers(group):
    return [status.host_tier for status in group.get_status()]

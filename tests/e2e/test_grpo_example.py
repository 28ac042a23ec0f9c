"""The example of GRPO learns, and gives the same tokens, rewards and policies whatever dies."""

import random

import pytest
import torch
from transformers import LlamaForCausalLM

from examples.grpo.__main__ import differences
from examples.grpo.policy import Batch
from examples.grpo.run_files import MAX_TOKENS, SEGMENT_TOKENS, SPAN
from examples.grpo.supervisor import Kill, Supervisor
from examples.grpo.task import EOS
from tests.support.forked_processes import ForkedPopen
from tests.support.one_thread import one_thread

pytestmark = pytest.mark.slow

NUM_UPDATES = 8
CLOSE = 1e-4
"""In nats; float32."""


def run(directory, kills=()):
    started = Supervisor(directory, NUM_UPDATES, kept_policies=NUM_UPDATES, popen=ForkedPopen)
    with started as supervisor:
        rewards = supervisor.run(kills)
    return supervisor, rewards


def test_run_with_kills_equals_the_undisturbed_one(tmp_path):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    undisturbed, rewards = run(tmp_path / "undisturbed")
    assert undisturbed.deaths.total() == 0
    victims = ["trainer", "driver", f"daemon {rng.randrange(2)}"]
    kills = [Kill(rng.randrange(4), rng.uniform(0.0, 0.2), victim) for victim in victims]
    disturbed, again = run(tmp_path / "disturbed", kills)
    assert disturbed.deaths.keys() == {*victims}
    assert again == rewards
    found = differences(tmp_path / "undisturbed", tmp_path / "disturbed", NUM_UPDATES)
    assert list(found) == []
    policies = [
        LlamaForCausalLM.from_pretrained(undisturbed.files.policy(number))
        for number in range(NUM_UPDATES)
    ]
    with one_thread(), torch.no_grad():
        for number in range(NUM_UPDATES):
            check_samples(undisturbed.files, number, policies)


def check_samples(files, number, policies):
    """Check a batch: each token's log probability is that of transformers' model of its policy, and
    policies change at borders alone."""
    samples = files.read_batch(number)
    batch = Batch.of(samples)
    last = max(0, number - 1)
    assert [sample.cohort for sample in samples] == [number] * len(samples)
    for sample in samples:
        places = range(len(sample.token_ids))
        segments = [number + place // SEGMENT_TOKENS for place in places]
        expected = [max(0, min(segment, NUM_UPDATES) - SPAN) for segment in segments]
        assert sample.policies == expected
        assert len(places) == MAX_TOKENS or sample.token_ids[-1] == EOS
    for policy in range(max(0, number - SPAN), last + 1):
        expected = batch.logprobs_under(policies[policy])
        for row, sample in enumerate(samples):
            for place, own in enumerate(sample.policies):
                if own == policy:
                    assert abs(expected[row, place] - sample.logprobs[place]) < CLOSE

"""The task: go through the classes of tokens in turn, and do not stop early. A token's class is its
number modulo NUM_CLASSES."""

import random
from typing import Final

from examples.grpo.run_files import GROUP_SIZE, GROUPS, MAX_TOKENS, Sample
from worker_client.requests import derived_seed

VOCAB_SIZE: Final = 64
EOS: Final = 0
NUM_CLASSES: Final = 4
PROMPT_TOKENS: Final = 4


def make_cohort(number: int) -> list[Sample]:
    """Return the samples that begin in a segment: prompts and seeds depend on its number alone."""
    return [
        Sample(number, group, index, prompt, derived_seed(number, group * GROUP_SIZE + index))
        for group, prompt in enumerate(_prompts(number))
        for index in range(GROUP_SIZE)
    ]


def has_ended(sample: Sample) -> bool:
    """Return True if a sample has its last token."""
    return sample.token_ids[-1:] == [EOS] or len(sample.token_ids) == MAX_TOKENS


def reward_of(sample: Sample) -> float:
    """Return the share of MAX_TOKENS that are of the class after that of the token before."""
    before = [sample.prompt[-1], *sample.token_ids]
    right = (
        token != EOS and token % NUM_CLASSES == (last + 1) % NUM_CLASSES
        for last, token in zip(before, sample.token_ids, strict=False)
    )
    return sum(right) / MAX_TOKENS


def _prompts(cohort: int) -> list[list[int]]:
    rng = random.Random(cohort)
    return [rng.choices(range(1, VOCAB_SIZE), k=PROMPT_TOKENS) for _ in range(GROUPS)]

"""Random token rules, and their implementation with transformers."""

import numpy as np
import torch
import transformers
from transformers import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from worker_client.requests import SamplingParams

NUM_COMMON = 12
"""Number of first tokens of the vocabulary that bad words use."""


def random_params(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    """Return rules that leave tokens to sample."""
    params: dict[str, object] = {}
    if rng.random() < 0.7:
        params |= {
            "presence_penalty": float(rng.uniform(-2, 2)),
            "frequency_penalty": float(rng.uniform(-2, 2)),
            "repetition_penalty": float(rng.uniform(0.5, 2)),
        }
    if rng.random() < 0.6:
        biased = rng.permutation(vocab_size)[: rng.integers(1, vocab_size)].tolist()
        params["logit_bias"] = {token: float(np.float32(rng.normal() * 3)) for token in biased}
    if rng.random() < 0.4:
        allowed = rng.permutation(vocab_size)[: rng.integers(20, vocab_size)].tolist()
        params["allowed_token_ids"] = (*allowed, allowed[-1])
    if rng.random() < 0.6:
        lengths = rng.integers(1, 4, rng.integers(1, 9))
        params["bad_words"] = tuple(
            tuple(rng.integers(0, NUM_COMMON, length).tolist()) for length in lengths
        )
    return SamplingParams(**params)  # type: ignore[arg-type]


class RuleProcessor(transformers.LogitsProcessor):
    """The rules of one request, with transformers' processors if available."""

    def __init__(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        self.params = params
        self.num_prompt_tokens = num_prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """input_ids int64 [1, n], scores [1, V] -> float32 [1, V]."""
        params, scores = self.params, scores.float().clone()
        if params.allowed_token_ids is not None:
            banned = torch.ones(scores.shape[1], dtype=torch.bool)
            banned[list(params.allowed_token_ids)] = False
            scores[:, banned] = -torch.inf
        if params.bad_words:
            scores = NoBadWordsLogitsProcessor([list(w) for w in params.bad_words])(
                input_ids, scores
            )
        if params.logit_bias:
            biases = {(token,): bias for token, bias in params.logit_bias.items()}
            scores = SequenceBiasLogitsProcessor(biases)(input_ids, scores)
        if params.repetition_penalty != 1:
            scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(input_ids, scores)
        output = input_ids[0, self.num_prompt_tokens :]
        counts = torch.bincount(output, minlength=scores.shape[1]).float()
        return scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)

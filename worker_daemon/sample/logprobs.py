"""Computes log probabilities of the given logits."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """The log probabilities of R rows; column 0 is the sampled token, columns 1 to n the most
    likely in order."""

    token_ids: Tensor
    """int32 [R, n + 1]"""
    logprobs: Tensor
    """float32 [R, n + 1]"""
    ranks: Tensor
    """int32 [R]: 1 + the number of tokens strictly more likely than the sampled one."""


def token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return the log probabilities, float32 [R], of token_ids int64 [R] under the softmax of logits
    [R, V]. Rows whose token is NO_TOKEN are meaningless."""
    values = logits.float()
    chosen = values.gather(1, token_ids.clamp(min=0).unsqueeze(1)).squeeze(1)
    return chosen - values.logsumexp(dim=1)


def gather_logprobs(logits: Tensor, sampled: Tensor, num_logprobs: int) -> LogprobTensors:
    """Return the log probabilities for logits float32 [R, V], sampled int64 [R], 0 <= num_logprobs
    <= V. Rows whose sampled token is NO_TOKEN are meaningless."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, sampled.clamp(min=0).unsqueeze(1))
    top, top_ids = logprobs.topk(num_logprobs, dim=-1)
    return LogprobTensors(
        token_ids=torch.cat((sampled.unsqueeze(1), top_ids), dim=1).to(torch.int32),
        logprobs=torch.cat((chosen, top), dim=1),
        ranks=(logprobs > chosen).sum(dim=-1, dtype=torch.int32) + 1,
    )

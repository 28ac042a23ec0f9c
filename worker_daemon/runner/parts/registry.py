"""Lists all parts, in the order in which they act on logits; tokens are chosen last. A new part
needs its file and a line here; its structs are registered in rpc_schema/extensions.py.
"""

from typing import Final

import torch

from rpc_schema.extensions import RequestExtension
from worker_daemon.contracts.sampling import Sampling
from worker_daemon.runner.parts.grammar_masks import GrammarMasksPart
from worker_daemon.runner.parts.interface import PartContext, StepPart
from worker_daemon.runner.parts.random_sampling import RandomSamplingPart
from worker_daemon.runner.parts.step_parts import StepParts
from worker_daemon.runner.parts.stop_tokens import StopTokensPart
from worker_daemon.runner.parts.token_logprobs import TokenLogprobsPart
from worker_daemon.runner.scheduled_step import StepLimits

PARTS: Final[tuple[type[StepPart], ...]] = (
    GrammarMasksPart,
    TokenLogprobsPart,
    StopTokensPart,
    RandomSamplingPart,  # which chooses the tokens
)

HEAVIEST: Final[tuple[RequestExtension, ...]] = tuple(
    part.heaviest for part in PARTS if part.heaviest is not None
)
"""Extensions of a request that uses every part."""


def make_parts(
    limits: StepLimits,
    device: torch.device,
    sampling: Sampling,
    *,
    is_first_stage: bool = True,
    is_last_stage: bool = True,
) -> StepParts:
    """Return the parts of one runner."""
    context = PartContext(limits, device, is_first_stage, is_last_stage, sampling)
    *parts, chooser = [part(context) for part in PARTS]
    assert isinstance(chooser, RandomSamplingPart)
    return StepParts([*parts, chooser], chooser, context)

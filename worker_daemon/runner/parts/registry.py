"""All parts, in the order in which they act on logits; tokens are chosen last. A new
part is its file and its line here; its structs are registered in rpc_schema/extensions.py.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from rpc_schema.extensions import RequestExtension
from worker_daemon.contracts.logits_processor import MakeLogitsProcessor
from worker_daemon.contracts.sampling import Sampling
from worker_daemon.runner.parts.allowed_tokens import AllowedTokensPart
from worker_daemon.runner.parts.bad_words import BadWordsPart
from worker_daemon.runner.parts.grammar_masks import GrammarMasksPart
from worker_daemon.runner.parts.interface import PartContext, StepPart
from worker_daemon.runner.parts.logit_bias import LogitBiasPart
from worker_daemon.runner.parts.logits_processors import LogitsProcessorsPart
from worker_daemon.runner.parts.logprob_tokens import LogprobTokensPart
from worker_daemon.runner.parts.penalties import PenaltiesPart
from worker_daemon.runner.parts.prompt_logprobs import PromptLogprobsPart
from worker_daemon.runner.parts.random_sampling import RandomSamplingPart
from worker_daemon.runner.parts.step_parts import StepParts
from worker_daemon.runner.parts.stop_tokens import StopTokensPart
from worker_daemon.runner.parts.token_logprobs import TokenLogprobsPart
from worker_daemon.runner.scheduled_step import StepLimits

PARTS: Final[tuple[type[StepPart], ...]] = (
    GrammarMasksPart,
    TokenLogprobsPart,
    LogprobTokensPart,
    PromptLogprobsPart,
    AllowedTokensPart,
    BadWordsPart,
    LogitBiasPart,
    LogitsProcessorsPart,
    StopTokensPart,
    PenaltiesPart,
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
    processors: Mapping[str, MakeLogitsProcessor] = MappingProxyType({}),
) -> StepParts:
    """Return the parts of one runner."""
    context = PartContext(limits, device, is_first_stage, is_last_stage, sampling, processors)
    *parts, chooser = [part(context) for part in PARTS]
    assert isinstance(chooser, RandomSamplingPart)
    return StepParts([*parts, chooser], chooser, context)

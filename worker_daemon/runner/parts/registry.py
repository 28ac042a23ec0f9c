"""Lists all parts, in the order in which they act on logits; tokens are chosen last. A new part
needs its file and a line here; its structs are registered in rpc_schema/extensions.py.
"""

from collections.abc import Mapping
from typing import Final

import torch

from rpc_schema.codec import Frame
from rpc_schema.extensions import StepExtension
from worker_daemon.contracts.arrays import Int64s
from worker_daemon.contracts.logits_processor import MakeLogitsProcessor
from worker_daemon.contracts.sampling import Sampling
from worker_daemon.contracts.uploads import FindUpload, no_uploads
from worker_daemon.layers.encoder import EncoderEmbedding
from worker_daemon.lora.adapters import Adapters
from worker_daemon.models.pooler import Pooler
from worker_daemon.runner.parts.allowed_tokens import AllowedTokensPart
from worker_daemon.runner.parts.bad_words import BadWordsPart
from worker_daemon.runner.parts.full_logprobs import FullLogprobsPart
from worker_daemon.runner.parts.grammar_masks import GrammarMasksPart
from worker_daemon.runner.parts.host_tier import HostTierPart
from worker_daemon.runner.parts.interface import PartContext, StepPart
from worker_daemon.runner.parts.kv_files import KVFilesPart
from worker_daemon.runner.parts.logit_bias import LogitBiasPart
from worker_daemon.runner.parts.logits_processors import LogitsProcessorsPart
from worker_daemon.runner.parts.logprob_tokens import LogprobTokensPart
from worker_daemon.runner.parts.lora import LoraPart
from worker_daemon.runner.parts.penalties import PenaltiesPart
from worker_daemon.runner.parts.pooling import PoolingPart
from worker_daemon.runner.parts.prompt_embeds import PromptEmbedsPart
from worker_daemon.runner.parts.prompt_logprobs import PromptLogprobsPart
from worker_daemon.runner.parts.random_sampling import RandomSamplingPart
from worker_daemon.runner.parts.replayed_experts import ReplayedExpertsPart
from worker_daemon.runner.parts.routed_experts import RoutedExpertsPart
from worker_daemon.runner.parts.step_parts import StepParts
from worker_daemon.runner.parts.stop_tokens import StopTokensPart
from worker_daemon.runner.parts.token_logprobs import TokenLogprobsPart
from worker_daemon.runner.parts.trace_logprobs import TraceLogprobsPart
from worker_daemon.runner.routed_experts import KeptExperts, ReplayTarget
from worker_daemon.runner.scheduled_step import StepLimits

PARTS: Final[tuple[type[StepPart], ...]] = (
    PromptEmbedsPart,  # before the first layer
    ReplayedExpertsPart,
    HostTierPart,  # acts before the forward pass, by the connector
    KVFilesPart,  # likewise
    LoraPart,
    FullLogprobsPart,  # before all that change logits
    GrammarMasksPart,
    TokenLogprobsPart,
    LogprobTokensPart,
    PromptLogprobsPart,
    TraceLogprobsPart,
    AllowedTokensPart,
    BadWordsPart,
    LogitBiasPart,
    LogitsProcessorsPart,
    StopTokensPart,
    PenaltiesPart,
    PoolingPart,
    RoutedExpertsPart,
    RandomSamplingPart,  # the part that chooses the tokens
)


def heaviest_of_step(
    slots: Int64s, limits: StepLimits
) -> tuple[tuple[StepExtension, ...], tuple[Frame, ...]]:
    """Return the extensions of a step in which every part acts on these slots, and their frames."""
    own = [each for part in PARTS if (each := part.heaviest_of_step(slots, limits)) is not None]
    return tuple(e for e, _ in own), tuple(frame for _, frames in own for frame in frames)


def make_parts(
    limits: StepLimits,
    device: torch.device,
    sampling: Sampling,
    *,
    is_first_stage: bool = True,
    is_last_stage: bool = True,
    pooler: Pooler | None = None,
    encoder: EncoderEmbedding | None = None,
    adapters: Adapters | None = None,
    processors: Mapping[str, MakeLogitsProcessor] | None = None,
    dtype: torch.dtype = torch.float32,
    find_upload: FindUpload = no_uploads,
    kept_experts: KeptExperts | None = None,
    replay: ReplayTarget | None = None,
) -> StepParts:
    """Return the parts of one runner. adapters: those of its model, if it has any."""
    context = PartContext(
        limits,
        device,
        is_first_stage,
        is_last_stage,
        sampling,
        pooler=pooler,
        encoder=encoder,
        adapters=adapters,
        processors=processors or {},
        dtype=dtype,
        find_upload=find_upload,
        kept_experts=kept_experts,
        replay=replay,
    )
    *parts, chooser = [part(context) for part in PARTS if part.serves(context)]
    assert isinstance(chooser, RandomSamplingPart)
    return StepParts([*parts, chooser], chooser, context)

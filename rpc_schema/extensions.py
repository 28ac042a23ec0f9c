"""Optional features in messages: closed unions of structs, one struct for each feature, absent if
it is not used. A new feature is a struct in its own module, and a line in each union here that it
belongs to.

Extensions of a step or a reply may have array frames (`num_frames`): they follow the message's own,
in the order of its extensions.
"""

from collections.abc import Iterable
from typing import Annotated, TypeAlias, TypeVar

from msgspec import Meta

from rpc_schema.base import Extension
from rpc_schema.host_tier import HostTierMoves
from rpc_schema.kv_files import FileMoves
from rpc_schema.lora_request import LoraRequest
from rpc_schema.pooling import PooledOutputs, PoolingParams
from rpc_schema.prompt_embeds import PromptEmbeds
from rpc_schema.routed_experts import (
    ReplayExperts,
    RoutedExperts,
    RoutedExpertsWanted,
)
from rpc_schema.sampling import (
    FullLogprobs,
    FullLogprobsWanted,
    GivenLogprobs,
    GrammarMasks,
    LogitsProcessors,
    LogprobsWanted,
    LogprobTokens,
    PromptLogprobs,
    PromptLogprobsWanted,
    RandomSampling,
    StopTokens,
    TokenLogprobs,
    TraceLogprobs,
    TraceWanted,
)
from rpc_schema.structured import StructuredOutput
from rpc_schema.token_rules import TokenRule

RequestExtension: TypeAlias = (
    RandomSampling
    | StopTokens
    | LogprobsWanted
    | FullLogprobsWanted
    | TraceWanted
    | LogprobTokens
    | PromptLogprobsWanted
    | TokenRule
    | LogitsProcessors
    | StructuredOutput
    | LoraRequest
    | PromptEmbeds
    | PoolingParams
    | RoutedExpertsWanted
    | ReplayExperts
)
"""Extension of a request, from its admission on."""

StepExtension: TypeAlias = GrammarMasks | HostTierMoves | FileMoves
"""Extension of one step, or of the sampling of one."""

ReplyExtension: TypeAlias = (
    TokenLogprobs
    | FullLogprobs
    | TraceLogprobs
    | GivenLogprobs
    | PromptLogprobs
    | PooledOutputs
    | RoutedExperts
)
"""Extension of a step's reply."""

RequestExtensions: TypeAlias = Annotated[tuple[RequestExtension, ...], Meta(max_length=16)]
StepExtensions: TypeAlias = Annotated[tuple[StepExtension, ...], Meta(max_length=16)]
ReplyExtensions: TypeAlias = Annotated[tuple[ReplyExtension, ...], Meta(max_length=16)]
"""At most one of each kind."""

KindT = TypeVar("KindT", bound=Extension)


def extension_of(extensions: Iterable[Extension], kind: type[KindT]) -> KindT | None:
    """Return the extension of a type, if there is one."""
    for each in extensions:
        if isinstance(each, kind):
            return each
    return None

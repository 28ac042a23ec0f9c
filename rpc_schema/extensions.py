"""What messages have of optional features: closed unions of structs, one struct a feature, absent
where it is not used. A new feature is a struct of its own module and a line in each union here that
it belongs to.

One of a step or a reply may have array frames (`num_frames`): they follow the message's own, in the
order of its extensions.
"""

from collections.abc import Iterable
from typing import Annotated, TypeAlias, TypeVar

from msgspec import Meta

from rpc_schema.base import Extension
from rpc_schema.sampling import (
    GrammarMasks,
    LogprobsWanted,
    RandomSampling,
    StopTokens,
    TokenLogprobs,
)

RequestExtension: TypeAlias = RandomSampling | StopTokens | LogprobsWanted
"""Of a request, from its admission on."""

StepExtension: TypeAlias = GrammarMasks
"""Of one step, or of the sampling of one."""

ReplyExtension: TypeAlias = TokenLogprobs
"""Of a step's reply."""

RequestExtensions: TypeAlias = Annotated[tuple[RequestExtension, ...], Meta(max_length=16)]
StepExtensions: TypeAlias = Annotated[tuple[StepExtension, ...], Meta(max_length=16)]
ReplyExtensions: TypeAlias = Annotated[tuple[ReplyExtension, ...], Meta(max_length=16)]
"""At most one of each kind."""

KindT = TypeVar("KindT", bound=Extension)


def extension_of(extensions: Iterable[Extension], kind: type[KindT]) -> KindT | None:
    """Return the extension of a kind, if there is one."""
    return next((each for each in extensions if isinstance(each, kind)), None)

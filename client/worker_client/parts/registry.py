"""Lists the features, and asks all of them on the driver's behalf. A new feature needs its file and
a line here; its structs are registered in rpc_schema/extensions.py."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from rpc_schema.codec import Frame
from rpc_schema.errors import BadFrameError
from rpc_schema.extensions import ReplyExtension, RequestExtension
from worker_client.parts.interface import ExtensionFault, ModelBounds, RequestPart
from worker_client.parts.logprobs import (
    FullLogprobsRequestPart,
    LogprobsPart,
    LogprobTokensRequestPart,
    PromptLogprobsRequestPart,
    TraceRequestPart,
)
from worker_client.parts.lora import LoraRequestPart
from worker_client.parts.pooling import PoolingRequestPart
from worker_client.parts.prompt_embeds import PromptEmbedsRequestPart
from worker_client.parts.routed_experts import (
    ReplayExpertsRequestPart,
    RoutedExpertsRequestPart,
)
from worker_client.parts.sampling import (
    LogitsProcessorsRequestPart,
    RandomSamplingRequestPart,
    StopTokensRequestPart,
)
from worker_client.parts.structured import StructuredOutputPart
from worker_client.parts.token_rules import (
    AllowedTokensRequestPart,
    BadWordsRequestPart,
    LogitBiasRequestPart,
    PenaltiesRequestPart,
)

Extensions: TypeAlias = tuple[RequestExtension, ...]
"""Extensions of a request."""

PARTS: Final[tuple[RequestPart, ...]] = (
    RandomSamplingRequestPart(),
    StopTokensRequestPart(),
    LoraRequestPart(),
    LogprobsPart(),
    FullLogprobsRequestPart(),
    LogprobTokensRequestPart(),
    PromptLogprobsRequestPart(),
    TraceRequestPart(),
    StructuredOutputPart(),
    PoolingRequestPart(),
    AllowedTokensRequestPart(),
    BadWordsRequestPart(),
    LogitBiasRequestPart(),
    PenaltiesRequestPart(),
    LogitsProcessorsRequestPart(),
    PromptEmbedsRequestPart(),
    RoutedExpertsRequestPart(),
    ReplayExpertsRequestPart(),
)

_OF_REQUEST: Final[Mapping[type, RequestPart]] = MappingProxyType(
    {part.extension: part for part in PARTS}
)
_OF_REPLY: Final[Mapping[type, RequestPart]] = MappingProxyType(
    {part.reply_extension: part for part in PARTS if part.reply_extension is not None}
)
_REPORTING: Final = frozenset(p.extension for p in PARTS if p.reply_extension is not None)
_REFUSING: Final = frozenset(p.extension for p in PARTS if p.may_refuse)
_POOLING: Final = frozenset(p.extension for p in PARTS if p.pools)
_LIMITING: Final = frozenset(p.extension for p in PARTS if p.limits_running)
NONE_POOLED: Final[Mapping[int, str]] = MappingProxyType({})
KINDS: Final = tuple(_OF_REQUEST)
"""Types of extensions that a request may have."""


def find_fault(
    extension: RequestExtension, bounds: ModelBounds, num_prompt_tokens: int
) -> ExtensionFault | None:
    """Return the fault of an extension whose fields are within their bounds, if any."""
    part = _OF_REQUEST[type(extension)]
    if part.judges_prompt:
        bounds = bounds.of_prompt(num_prompt_tokens)
    return part.find_fault(extension, bounds)


def reports(extensions: Extensions) -> bool:
    """Return True if replies report anything of a request besides its tokens."""
    return not _REPORTING.isdisjoint(map(type, extensions))


def may_refuse(extensions: Extensions) -> bool:
    """Return True if tokens of a request may be refused after a step has counted them."""
    return not _REFUSING.isdisjoint(map(type, extensions))


def may_jump(extensions: Extensions) -> bool:
    """Return True if a request's output is the same where forced tokens are not sampled."""
    return all(_OF_REQUEST[type(each)].may_jump for each in extensions)


def pools(extensions: Extensions) -> bool:
    """Return True if a request samples nothing, and ends with an output."""
    return not _POOLING.isdisjoint(map(type, extensions))


def prefix_root(extensions: Extensions) -> bytes:
    """Return the root of a request's block hashes: empty if its extensions do not change the
    meaning of its tokens."""
    named = []
    for each in extensions:
        salt = _OF_REQUEST[type(each)].prefix_salt(each)
        if salt:
            named.append(type(each).__name__.encode() + b"\0" + salt)
    if not named:
        return b""
    digest = blake2b(digest_size=16)
    for salt in sorted(named):
        digest.update(len(salt).to_bytes(4, "little") + salt)
    return digest.digest()


def may_start(extensions: Extensions, running: Iterable[Extensions], bounds: ModelBounds) -> bool:
    """Return True if a request may be scheduled beside those that run."""
    if _LIMITING.isdisjoint(map(type, extensions)):
        return True
    limiting = [each for each in extensions if type(each) in _LIMITING]
    others = list(running)
    return all(
        _OF_REQUEST[type(each)].may_start(
            each, [own for theirs in others for own in theirs if type(own) is type(each)], bounds
        )
        for each in limiting
    )


def read_reports(
    extensions: Sequence[ReplyExtension],
    frames: Sequence[Frame],
    req_ids: Sequence[str],
    asked: Mapping[str, Extensions],
    pooled: Mapping[int, str] = NONE_POOLED,
) -> Mapping[type[ReplyExtension], Mapping[str, Any]]:
    """Return the reports of a reply, by kind of extension and request id. req_ids: the request of
    each token, "" for a token that the reports leave out; asked: the extensions of the requests
    that it may report on; pooled: those that the step ends, by slot.

    Raises:
        BadFrameError: the frames do not fit.
    """
    found: dict[type[ReplyExtension], Mapping[str, Any]] = {}
    for extension, part, own in _parts_of(extensions, frames):
        if part.pools:
            found[type(extension)] = part.read_outputs(extension, own, pooled)
        else:
            theirs = _asked(part, asked)
            found[type(extension)] = part.read_reply(extension, own, req_ids, theirs)
    return found


def read_token_reports(
    extensions: Sequence[ReplyExtension],
    frames: Sequence[Frame],
    req_ids: Sequence[str],
    asked: Mapping[str, Extensions],
) -> Mapping[type[ReplyExtension], Mapping[str, Any]]:
    """Return those reports of a reply that are on sampled tokens, as read_reports does."""
    return {
        type(extension): part.read_reply(extension, own, req_ids, _asked(part, asked))
        for extension, part, own in _parts_of(extensions, frames)
        if part.reports_tokens and not part.pools
    }


def _parts_of(
    extensions: Sequence[ReplyExtension], frames: Sequence[Frame]
) -> Iterator[tuple[ReplyExtension, RequestPart, Sequence[Frame]]]:
    """Yield each extension with its part and its frames."""
    expected = sum(extension.num_frames for extension in extensions)
    if len(frames) != expected:
        raise BadFrameError(f"{len(frames)} frames; the extensions of the reply have {expected}")
    first = 0
    for extension in extensions:
        yield extension, _OF_REPLY[type(extension)], frames[first : first + extension.num_frames]
        first += extension.num_frames


def _asked(part: RequestPart, asked: Mapping[str, Extensions]) -> Mapping[str, Any]:
    return {
        req_id: each
        for req_id, carried in asked.items()
        for each in carried
        if type(each) is part.extension
    }

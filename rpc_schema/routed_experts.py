"""The experts to which a model's routers have sent the tokens of requests: reported, or brought
by requests that replay them."""

from typing import Annotated, Final, Literal

from msgspec import Meta

from rpc_schema.base import (
    ContentHash,
    Count,
    Extension,
    FramedExtension,
    Name,
    Positive,
    RawInt32,
    Value,
)
from rpc_schema.token_rules import RuleFault

MAX_REPORTED_BYTES: Final = 6 << 20
"""Bound on the experts that a reply reports of the tokens of its step, and on those of cached
tokens of the requests that the step admits. Together they fit into a reply."""


class RoutedExpertsShape(Value, frozen=True, kw_only=True):
    """Sizes of what a model that was loaded with enable_return_routed_experts reports of a token:
    the numbers of its experts, [num_layers, top_k], in the order of the router's scores."""

    num_layers: Positive
    """Layers with experts; others have no entry."""
    top_k: Positive
    """Experts of a token."""
    num_experts: Positive
    """Experts of a layer."""

    @property
    def dtype(self) -> str:
        """Dtype of the numbers, as NumPy names it."""
        return "<u1" if self.num_experts <= 256 else "<u2"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's numbers."""
        return self.num_layers * self.top_k * (1 if self.num_experts <= 256 else 2)

    @property
    def max_positions(self) -> int:
        """Most tokens whose experts take MAX_REPORTED_BYTES."""
        return MAX_REPORTED_BYTES // self.bytes_per_token


class RoutedExpertsWanted(Extension, frozen=True, tag=29, kw_only=True):
    """A request reports the experts of each of its tokens, in the step that computes it. Those of
    tokens whose KV is there at its admission come with its first step: they are kept with the
    blocks. The model must be loaded with enable_return_routed_experts."""

    first: Count = 0
    """First position to report of the tokens whose KV is there already."""


class RoutedExperts(FramedExtension, frozen=True, tag=24, kw_only=True):
    """Experts of the tokens of requests, in chunks of consecutive positions. Two frames: int32
    [chunks], the position of each one's first token; and the experts of all chunks' tokens,
    [tokens, num_layers, top_k] in the shape's dtype. Of a request with drafts, also those of
    drafts that are refused: the next chunk begins where the request goes on."""

    shape: RoutedExpertsShape
    req_ids: Annotated[tuple[Name, ...], Meta(max_length=131_070)]
    """The request of each chunk. One may have two: cached tokens, and behind them computed ones."""
    counts: RawInt32
    """Tokens of each chunk."""

    @property
    def num_frames(self) -> int:
        return 2


class ReplayExperts(Extension, frozen=True, tag=30, kw_only=True):
    """A request brings the experts of its first tokens, in place of its routers' choice; weights
    are computed from the routers' scores. The experts are an upload [num_positions, num_layers,
    top_k], which every rank must keep until the request ends. A step that needs a missing upload
    fails. Requests that replay share only blocks of the same tokens and experts."""

    num_positions: Positive
    num_layers: Positive
    top_k: Positive
    max_expert: Count
    """Largest number among the experts."""
    content_hash: ContentHash
    """Name of the upload."""

    @property
    def dtype(self) -> Literal["uint8", "uint16"]:
        """Dtype of the upload."""
        return "uint8" if self.max_expert < 256 else "uint16"

    @property
    def uploads(self) -> tuple[bytes, ...]:
        return (self.content_hash,)


def replay_fault(
    replay: ReplayExperts, shape: RoutedExpertsShape, num_tokens: int
) -> RuleFault | None:
    """Return the first fault of a request's experts; None if there is none. The same on both sides.
    shape: the model's; num_tokens: those that the request brings."""
    given = [replay.num_layers, replay.top_k]
    wanted = [shape.num_layers, shape.top_k]
    if given != wanted:
        fix = f"give {wanted} experts of each token: [layers with experts, top_k]"
        return RuleFault("replay_experts", given, fix)
    if replay.max_expert >= shape.num_experts:
        fix = f"give experts from 0 to {shape.num_experts - 1}"
        return RuleFault("replay_experts", replay.max_expert, fix)
    if replay.num_positions > num_tokens:
        fix = f"give those of at most {num_tokens} tokens, which the request has"
        return RuleFault("replay_experts", replay.num_positions, fix)
    return None

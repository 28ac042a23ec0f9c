"""Sampling, stop tokens and logprobs of one request: three extensions, and a convenient form of all
of them together."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from rpc_schema.base import Count, Extension, Fraction, FramedExtension, RawUInt16, Unsigned

MAX_LOGPROBS = 20

MAX_STOP_TOKEN_IDS = 1024
"""Bound for one request, the model's own end-of-sequence tokens included."""

MIN_TEMPERATURE = 1e-5
"""Logits divided by less than this may exceed float32."""


class RandomSampling(Extension, frozen=True, tag=1, kw_only=True):
    """Random sampling of a request's tokens; without it, workers take the most likely ones. The
    same (seed, position, logits) gives the same token in any batch and any parallel shape."""

    temperature: Annotated[float, Meta(ge=0.0, le=1e6)] = 0.0
    """At least MIN_TEMPERATURE, or 0, which also takes the most likely token."""
    top_k: Count = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: Annotated[float, Meta(ge=1e-6, le=1.0)] = 1.0
    min_p: Fraction = 0.0
    seed: Unsigned = 0
    """Chosen by the client if the caller gave none."""


class StopTokens(Extension, frozen=True, tag=2, kw_only=True):
    """The tokens that end a request. The driver ends it; workers keep them for another driver, and
    sample none of them before min_tokens."""

    token_ids: Annotated[tuple[Count, ...], Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    """End of sequence included."""
    min_tokens: Count = 0
    """Output tokens before which none of them is sampled."""


class LogprobsWanted(Extension, frozen=True, tag=3, kw_only=True):
    """A request reports the log probability of each sampled token and of the most likely ones."""

    count: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
    """Most likely tokens to report besides the sampled one."""


class TokenLogprobs(FramedExtension, frozen=True, tag=1, kw_only=True):
    """Log probabilities of all of a reply's rows. Three frames: int32 token ids [rows, width + 1]
    (the sampled token first), their float32 log probabilities, and the int32 rank [rows] of the
    sampled token (1 = most likely). They are of the logits after grammar masks, before bans,
    temperature and filters."""

    width: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
    """Width for the row that asked for the most."""

    @property
    def num_frames(self) -> int:
        return 3


class GrammarMasks(FramedExtension, frozen=True, tag=1, kw_only=True):
    """Tokens that some rows of a step may sample. One frame: int32 [slots, ceil(vocab_size / 32)],
    bit 1 = allowed."""

    slots: RawUInt16
    """Slots with a mask, in the order of the frame's rows. Slots that sample nothing are
    skipped."""

    @property
    def num_frames(self) -> int:
        return 1


SamplingExtension: TypeAlias = RandomSampling | StopTokens | LogprobsWanted


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The three extensions of one request in one value, for callers."""

    temperature: float = 0.0
    """0 takes the most likely token; top_k, top_p, min_p and seed then have no effect."""
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """None reports none."""

    @classmethod
    def of(cls, extensions: Iterable[Extension]) -> "SamplingParams":
        """Return the parameters of a request's extensions: the inverse of `extensions`."""
        names = {"token_ids": "stop_token_ids", "count": "logprobs"}
        return cls(
            **{
                names.get(name, name): value
                for extension in extensions
                if isinstance(extension, SamplingExtension)
                for name, value in msgspec.structs.asdict(extension).items()
            }
        )

    def extensions(self) -> tuple[SamplingExtension, ...]:
        """Return the extensions for a request, without those at their defaults."""
        drawn = RandomSampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
        )
        stops = StopTokens(token_ids=self.stop_token_ids, min_tokens=self.min_tokens)
        wanted: list[SamplingExtension] = []
        if drawn != RandomSampling():
            wanted.append(drawn)
        if stops != StopTokens():
            wanted.append(stops)
        if self.logprobs is not None:
            wanted.append(LogprobsWanted(count=self.logprobs))
        return tuple(wanted)
